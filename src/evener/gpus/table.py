"""The table of `evener gpus`: one line per GPU within 80 columns, and below it who is on it or why it is not idle."""

from __future__ import annotations

import shutil
import textwrap

from evener.gpus.look import describe
from evener.gpus.values import Gpu, MigDevice, Snapshot

UNKNOWN = "?"


def render(snapshot: Snapshot, width: int | None = None, topology: bool = False) -> str:
    """Text for people; ends with a newline. `width` None is the terminal's (80 where there is none)."""
    width = width or shutil.get_terminal_size((80, 24)).columns
    lines = []
    if snapshot.trouble is not None:
        lines += [snapshot.trouble.cause, *(f"  {line}" for line in snapshot.trouble.evidence)]
        lines += [f"  {'fix: ' if i == 0 else '     '}{line}" for i, line in enumerate(snapshot.trouble.fix)]
    elif not snapshot.gpus:
        lines.append("The driver answers, and shows no GPU.")
    else:
        idle, parts = sum(bool(gpu.idle) for gpu in snapshot.gpus), [part for gpu in snapshot.gpus for part in gpu.mig]
        head = [f"{len(snapshot.gpus)} GPU{'s' if len(snapshot.gpus) > 1 else ''}, {idle} idle"]
        head += [f"{len(parts)} MIG devices, {sum(bool(part.idle) for part in parts)} idle"] if parts else []
        head += [f"driver {snapshot.driver}"] if snapshot.driver else []
        head += [f"CUDA {snapshot.cuda}"] if snapshot.cuda else []
        head += [snapshot.source] if snapshot.source != "nvml" else []
        lines += [" · ".join(head), _row("GPU", "slot", "name", "memory GiB", "util", "temp", "power", "state")]
        for gpu in snapshot.gpus:
            lines += _gpu(gpu, width)
    lines += [
        text
        for note in (*snapshot.visible, *snapshot.notes)
        for text in textwrap.wrap(note, width, break_on_hyphens=False)
    ]
    if topology:
        lines += ["", *_links(snapshot)]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    gpu, slot, name, memory, util, temp, power, state = cells
    return f"{gpu:>4} {slot:>4}  {name:<23.23} {memory:>13} {util:>5} {temp:>5} {power:>7}  {state}".rstrip()


def _gpu(gpu: Gpu, width: int) -> list[str]:
    state = "lost" if gpu.error else "idle" if gpu.idle else "MIG" if gpu.mig_enabled else "busy"
    if gpu.error and "lost" not in gpu.error.lower():
        state = "error"
    lines = [
        _row(
            str(gpu.index),
            "-" if gpu.slot is None else str(gpu.slot),
            _name(gpu.name),
            _memory(gpu.memory_used_bytes, gpu.memory_total_bytes),
            UNKNOWN if gpu.utilization_percent is None else f"{gpu.utilization_percent}%",
            UNKNOWN if gpu.temperature_c is None else f"{gpu.temperature_c}C",
            UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f}W",
            state,
        )
    ]
    drawing = [f"draws: {describe(one)}" for one in gpu.processes or () if one.kind == "graphics"]
    for text in (*gpu.busy_because, *drawing, *gpu.notes):
        lines += _below(text, width)
    for part in gpu.mig:
        lines += _mig(gpu, part, width)
    return lines


def _below(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text, width, initial_indent=" " * 11, subsequent_indent=" " * 13, max_lines=2, placeholder="..."
    )


def _mig(gpu: Gpu, part: MigDevice, width: int) -> list[str]:
    slot = "-" if part.slot is None else str(part.slot)
    memory = _memory(part.memory_used_bytes, part.memory_total_bytes)
    name = (part.name or UNKNOWN).rpartition("MIG ")[2]
    state = "idle" if part.idle else "busy"
    lines = [_row(f"{gpu.index}.{part.index}", slot, f"MIG {name}", memory, "", "", "", state)]
    for text in (part.uuid or "its UUID cannot be read", *part.busy_because):
        lines += _below(text, width)
    return lines


def _name(name: str | None) -> str:
    return (name or UNKNOWN).removeprefix("NVIDIA ").removeprefix("GeForce ")


def _memory(used: int | None, total: int | None) -> str:
    def gib(count: int | None) -> str:
        return UNKNOWN if count is None else f"{count / 1024**3:.1f}"

    return UNKNOWN if used is None and total is None else f"{gib(used)}/{gib(total)}"


def _links(snapshot: Snapshot) -> list[str]:
    if not snapshot.links:
        return ["No pair of GPUs whose connection could be read."]
    lines = ["pair   path                   NVLinks  peer access"]
    for link in snapshot.links:
        nvlinks = UNKNOWN if link.nvlinks is None else str(link.nvlinks)
        lines.append(f"{f'{link.a}-{link.b}':<6} {link.path or UNKNOWN:<22} {nvlinks:>7}  {link.p2p or UNKNOWN}")
    return lines
