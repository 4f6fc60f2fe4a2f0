"""What a run says about itself: the contract line, its schedules, and the engine's events in words."""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from evener.config import Config
from evener.dist.info import cpu_name
from evener.engine import Engine
from evener.engine.cut import chop
from evener.report.contract import Contract, PrecisionWords, contract_line, lr_line


def contract_of(config: Config, engine: Engine, rows: int) -> str:
    """The contract line for epochs of `rows` rows. The same on every rank; nothing is communicated."""
    size, world = min(config.global_batch_size, rows), engine.group.world_size
    ranks = [replace(engine.cut, rank=rank).pieces(size) for rank in range(world)]
    if (limit := engine.ladder.smallest()) is not None:
        ranks = [tuple(piece for whole in pieces for piece in chop(*whole, limit)) for pieces in ranks]
    target = next(iter(engine.targets.values()))
    schedule, words = target.schedule, engine.words()
    scheduled = schedule.scheduler is not None or schedule.maker is not None
    by: str | None = ("metric" if schedule.by_user else schedule.by) if scheduled else None
    return contract_line(
        Contract(
            global_batch_size=size,
            world_size=world,
            microbatches=max(map(len, ranks)),
            microbatch_size=max(stop - start for pieces in ranks for start, stop in pieces),
            slice_size=engine.cut.slice_size,
            precision=PrecisionWords(**{name: words[name] for name in ("compute", "master", "reduce", "scaler")}),
            strategy=engine.strategy,
            exact=config.exact,
            coupled=engine.batch.coupled,
            schedule_by=by,
            # On the CPU a scalar read waits for nothing.
            one_scalar_read=not target.skips_on_device and engine.device.type != "cpu",
            approximate=engine.approximate,
            notes=tuple(note for note in (engine.recomputes, engine.keeps, engine.batch.why_coupled) if note),
        )
    )


def schedule_lines(engine: Engine, steps: int | None, per_epoch: int | None) -> Iterator[str]:
    """`lr 1e-3 -> 1e-5 over 4,690 updates` for each schedule, with a warning where it does not fit the run.

    With several optimizers only the loop's body knows how many updates each will make, and nobody knows how long a
    stream is (None): then only the first value.
    """
    for name, target in engine.targets.items():
        schedule = target.schedule
        if schedule.scheduler is None:
            continue
        by_update = schedule.by == "update"
        if name or steps is None or (per_epoch is None and not by_update):
            first = schedule.preview(1)[0]
            line = f"{lr_line(first, first, None).removesuffix(', constant')}, then by its schedule"
            yield f"{name}: {line}" if name else line
            continue
        per_epoch = per_epoch or 1
        count = steps if by_update else max(1, round(steps / per_epoch))
        first, last, highest, ends = schedule.preview(count)
        if ends is not None and not by_update:
            ends *= per_epoch
        yield lr_line(first, last, steps, peak=highest, schedule_updates=ends)


def in_words(kind: str, update: int, fields: Mapping[str, Any]) -> str:
    if kind == "skip":
        scale = f", loss scale {fields['scale']:g}" if fields["scale"] != 1 else ""
        return f"update {update} skipped: its gradients are not finite (loss {fields['loss']:.4g}{scale})"
    if kind == "zero_count":
        return f"update {update} skipped: nothing to count in it"
    if kind == "scale_falling":
        return f"update {update}: the loss scale keeps halving, now {fields['scale']:g}: look for what is not finite"
    if kind == "unused_parameters":
        names = fields["names"]
        shown = ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
        return f"no gradient reached: {shown}"
    if kind == "oom":
        who = ", ".join(map(str, fields["ranks"]))
        size = fields["microbatch_size"]
        then = f"microbatches of {size} row{'s' if size > 1 else ''}" if size else "as before"
        return f"update {update}: out of memory in the {fields['phase']} on rank {who}; made again, {then}"
    if kind == "grow":
        return f"update {update}: a larger microbatch is tried again"
    if kind == "warning":
        return str(fields["text"])
    if kind == "bad_row":
        by = f" by rank {fields['rank']}" if fields.get("rank") else ""
        return f"row {fields['row']} left out{by}: {fields['error']}"
    return ""


def idle_ranks(global_batch_size: int, slice_size: int | None, world_size: int) -> list[str]:
    """A line where an update has fewer pieces than there are ranks."""
    pieces = -(-global_batch_size // (slice_size or 1))
    if pieces >= world_size:
        return []
    idle, each = world_size - pieces, global_batch_size // world_size
    what = "1 row" if slice_size is None else f"one slice of {slice_size} rows"
    if pieces > 1:
        what = f"{pieces} rows" if slice_size is None else f"{pieces} slices of {slice_size} rows"
    fix = f"; slice_size={each} gives every rank one" if slice_size is not None and each else ""
    return [f"{idle} of {world_size} ranks {'has' if idle == 1 else 'have'} nothing to do: an update is {what}{fix}"]


def circumstances(model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """Where and from what a run was started, for whoever wants to do it again. Read, not asked: no process starts."""
    on_gpu = device.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(device) if on_gpu else cpu_name() if device.type == "cpu" else None,
        "parameters": sum(one.numel() for one in model.parameters()),
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "command": shlex.join(sys.argv),
        "cwd": os.getcwd(),
        "commit": _commit(Path(sys.argv[0] if sys.argv else "").absolute().parent),
    }


def _commit(folder: Path) -> str | None:
    """The commit that the script's repository stands at; whether files were changed since is not looked at."""
    for git in (place / ".git" for place in (folder, *folder.parents)):
        with suppress(OSError, ValueError):
            head = (git / "HEAD").read_text("ascii").strip()
            return (git / head[5:]).read_text("ascii").strip() if head.startswith("ref: ") else head
    return None
