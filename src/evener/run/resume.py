"""Which checkpoint a run continues from: what must be equal, what differs, and in which directory it goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evener.config import Config
from evener.engine import Engine
from evener.errors import UsageError, one_of

FINISHED = "finished"  # a file in the run directory: the loop came to its end and the run was closed


def identity(config: Config, engine: Engine, rows: int) -> dict[str, Any]:
    """What two runs must share for one to continue the other, as JSON. World size, strategy, microbatch, worker count
    and everything about output are free.
    """
    about: dict[str, Any] = {
        "global_batch_size": config.global_batch_size,
        "slice_size": engine.cut.slice_size,
        "exact": config.exact,
        "coupled": engine.batch.coupled,
        "order": config.order if isinstance(config.order, str | None) else "a function",
        "drop_last": config.drop_last,
        "seed": config.seed,
        "precision": engine.precision.name,
        "schedule_by": config.schedule_by,
        "max_grad_norm": config.max_grad_norm,
        "ema": config.ema,
        "dataset rows": rows,
        "parameters": {name: list(parameter.shape) for name, parameter in engine.model.named_parameters()},
    }
    for name, target in engine.targets.items():
        prefix = f"optimizer {name}".strip()
        about[prefix] = type(target.optimizer).__name__
        for i, group in enumerate(target.optimizer.param_groups):
            for key, value in group.items():
                if key in ("params", "fused", "foreach", "capturable", "differentiable", "lr", "initial_lr", "betas"):
                    continue
                about[f"{prefix} group {i} {key}"] = _plain(value)
            about[f"{prefix} group {i} lr"] = _plain(group.get("initial_lr", group["lr"]))
            if not _cycles_momentum(target.schedule.scheduler) and "betas" in group:
                about[f"{prefix} group {i} betas"] = _plain(group["betas"])
        scheduler = target.schedule.scheduler
        about[f"schedule {name}".strip()] = (
            "a function" if target.schedule.maker is not None else type(scheduler).__name__ if scheduler else None
        )
    return about


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
        if key == "parameters" and isinstance(before, Mapping) and isinstance(after, Mapping) and before != after:
            names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
            lines += [f"parameter {name}: {before.get(name)}, now {after.get(name)}" for name in names[:4]]
            if len(names) > 4:
                lines.append(f"... and {len(names) - 4} more parameters")
        elif before != after:
            lines.append(f"{key}: {before!r}, now {after!r}")
    return lines


def siblings(wanted: Path) -> list[Path]:
    """`digits`, `digits-2`, ... as far as they exist, newest first."""
    found = [wanted] if (wanted / "checkpoints").is_dir() else []
    number = 2
    while (path := wanted.with_name(f"{wanted.name}-{number}")).is_dir():
        if (path / "checkpoints").is_dir():
            found.append(path)
        number += 1
    return found[::-1]


def check_resume(resume: str) -> str:
    return one_of("resume", resume, ["auto", "must", "never"])


def refuse(why: str, lines: list[str]) -> UsageError:
    return UsageError(
        f'resume="must": {why}',
        evidence=lines,
        fix=['resume="auto" starts a new directory where nothing fits', "or give dir= of the run to continue"],
    )
