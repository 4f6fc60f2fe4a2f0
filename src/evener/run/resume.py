"""Which checkpoint a run continues from: what must be equal, what differs, and in which directory it goes on."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from evener.checkpoint.encode import decode, encode
from evener.config import Config
from evener.data import Cursor, Mark
from evener.dist import comm
from evener.engine import Engine
from evener.engine.schedule import settings
from evener.engine.setup import plain_name
from evener.errors import UsageError

ROWS = "dataset rows"  # the field of the identity that `accept_changed_data` lets go
_SHARED = ["global_batch_size", "exact", "drop_last", "seed", "schedule_by", "max_grad_norm", "ema", "stream"]
_SHARED += ["batchnorm"]
FINISHED = "finished"  # a file in the run directory: the loop came to its end and the run was closed


def identity(config: Config, engine: Engine, rows: int | None) -> dict[str, Any]:
    """What two runs must share for one to continue the other, as JSON. World size, strategy, microbatch, worker count
    and everything about output are free.
    """
    about: dict[str, Any] = {name: getattr(config, name) for name in _SHARED}
    about |= {"slice_size": engine.cut.slice_size, "coupled": engine.batch.coupled, "precision": engine.precision.name}
    about |= {"order": config.order if isinstance(config.order, str | None) else "a function"}
    about |= {ROWS: rows, "prepare": config.prepare is not None}  # None: a stream
    about["parameters"] = {plain_name(name): _look(one) for name, one in engine.model.named_parameters()}
    about["buffers"] = {plain_name(name): _look(one) for name, one in engine.model.named_buffers()}
    lossy = {"saved_activations": config.saved_activations == "int8" and "int8"}
    lossy |= {name: getattr(config, name) for name in ("gradient_compression", "sync_every")}
    about |= {name: value for name, value in lossy.items() if value}
    for name, target in engine.targets.items():
        prefix = f"optimizer {name}".strip()
        about[prefix] = type(target.optimizer).__name__
        about[f"{prefix} parameters"] = engine.groups()[name]
        for i, group in enumerate(target.optimizer.param_groups):
            for key, value in group.items():
                if key in ("params", "fused", "foreach", "capturable", "differentiable", "lr", "initial_lr", "betas"):
                    continue
                about[f"{prefix} group {i} {key}"] = _plain(value)
            about[f"{prefix} group {i} lr"] = _plain(group.get("initial_lr", group["lr"]))
            if not _cycles_momentum(target.schedule.scheduler) and "betas" in group:
                about[f"{prefix} group {i} betas"] = _plain(group["betas"])
        if target.loss_scale is not None:
            about[f"{prefix} loss scale"] = target.loss_scale.settings
        scheduler = target.schedule.scheduler
        made = "a function" if target.schedule.maker is not None else None
        about[f"schedule {name}".strip()] = made or (type(scheduler).__name__ if scheduler else None)
        if hasattr(scheduler, "state_dict"):
            about[f"schedule {name} settings".replace("  ", " ")] = settings(scheduler.state_dict())
    return about


def code_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a run is made of beyond its state, for a warning: the layers without parameters are seen here alone."""
    layers = {}
    for name, module in model.named_modules():
        if not any(True for _ in module.children()):
            with contextlib.suppress(Exception):  # a user's own extra_repr
                layers[plain_name(name)] = f"{type(module).__name__}({module.extra_repr()})"
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    about: dict[str, Any] = {"layers": layers, "script": None}
    with contextlib.suppress(OSError):
        about["script"] = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16] if script else None
    return about


def changed_code(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lines to show; nothing is refused for it: code may change without changing what it computes."""
    layers = differences(then.get("layers", {}), now["layers"])
    lines = [f"layer {line}" for line in layers[:4]] + [f"... and {len(layers) - 4} more layers"] * (len(layers) > 4)
    if then.get("script") and now["script"] and then["script"] != now["script"]:
        lines.append("the script has changed")
    head = "changed since the checkpoint, and continued all the same:"
    return [head, *(f"  {line}" for line in lines)] if lines else []


def with_other_data(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states at the beginning of an epoch: the next one, unless they stand at one. Where in an order of other rows
    they would stand, nobody knows.
    """
    position = states["run"]
    epoch, offset = position["cursor"]
    return {**states, "run": {**position, "cursor": [epoch + (offset > 0), 0], "epoch": {}}} if offset else states


def marks_of(cursor: Cursor, stream: str | None, world_size: int) -> dict[str, Any] | None:
    """Where a stream stands, for a checkpoint: one mark, or with stream="mine" every rank's. Collective then."""
    mark = cursor.mark
    if stream is None or mark is None:
        return None
    if stream == "split":
        return {"world_size": None, "marks": [[*mark]]}
    tree, tensors = encode(mark.state)
    held = base64.b64encode(safetensors.torch.save({k: t.cpu().contiguous() for k, t in tensors.items()})).decode()
    marks = [Mark(*one) for one in comm.all_gather([*mark._replace(state=[tree, held])])]
    states = [decode(tree, safetensors.torch.load(base64.b64decode(held))) for _, (tree, held), *_ in marks]
    return {"world_size": world_size, "marks": [[*m._replace(state=state)] for m, state in zip(marks, states)]}


def mark_from(position: Mapping[str, Any], rank: int, world_size: int) -> Mark | None:
    """This rank's mark from `marks_of`. UsageError: ranks read streams of their own, and are more or fewer now."""
    saved = position.get("stream")
    if saved is None:
        return None
    marks, then = saved["marks"], saved["world_size"]  # None where the marks of all ranks are alike
    if then not in (None, world_size):
        own = f'in the middle of an epoch, each with a stream of its own (stream="mine"); now there are {world_size}.'
        evidence = ["which rows of the epoch the new streams would still have to give, nobody knows"]
        fix = [f"start {then} processes", "at the end of an epoch any number can go on: save there"]
        fix += ['stream="split" can be resumed on any number of processes, everywhere']
        raise UsageError(f"the checkpoint was written by {then} ranks {own}", evidence=evidence, fix=fix)
    return Mark(*marks[0 if then is None else rank])


def _look(tensor: torch.Tensor) -> str:
    """`(3, 4) float32, frozen`"""
    kind = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
    frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
    return f"{kind}, frozen" if frozen else kind


def _cycles_momentum(scheduler: Any) -> bool:
    return isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR | torch.optim.lr_scheduler.CyclicLR)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | bool | None) else repr(value)


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line per field that differs: `optimizer group 0 lr: 0.001, now 0.01`."""
    lines = []
    for key in {**then, **now}:
        before, after = then.get(key), now.get(key)
        if before == after:
            continue
        if key in ("parameters", "buffers") and isinstance(before, Mapping) and isinstance(after, Mapping):
            one = key.removesuffix("s")
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            lines += [f"{one} {name}: {before.get(name)}, now {after.get(name)}" for name in names[:4]]
            lines += [f"... and {len(names) - 4} more {key}"] if len(names) > 4 else []
        else:
            lines.append(f"{key}: {before!r}, now {after!r}")
    return lines


def siblings(wanted: Path) -> list[Path]:
    """`digits`, `digits-2`, ... as far as they exist, newest first."""
    found = [wanted]
    while (path := wanted.with_name(f"{wanted.name}-{len(found) + 1}")).is_dir():
        found.append(path)
    return found[::-1]


def refuse(why: str, lines: list[str]) -> UsageError:
    fix = ['resume="auto" starts a new directory where nothing fits', "or give dir= of the run to continue"]
    if any(line.strip().startswith(ROWS) for line in lines):
        fix.append("accept_changed_data=True (evener run --accept-changed-data): its order begins anew")
    return UsageError(why, evidence=lines, fix=fix)
