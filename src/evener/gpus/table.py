"""The table of `evener gpus`: one line per GPU within 80 columns, and below it who is on it or why it is not idle."""

from __future__ import annotations

import shutil
import textwrap

from evener.gpus.look import describe
from evener.gpus.values import GIB, Device, Gpu, MigDevice, Snapshot

UNKNOWN = "?"


def render(snapshot: Snapshot, width: int | None = None, topology: bool = False) -> str:
    """Text for people; ends with a newline. `width` None is the terminal's (80 where there is none)."""
    width = width or shutil.get_terminal_size((80, 24)).columns
    trouble, gpus, lines = snapshot.trouble, snapshot.gpus, list[str]()
    if trouble is not None:
        fix = [f"  {'fix: ' if i == 0 else '     '}{line}" for i, line in enumerate(trouble.fix)]
        for text in (trouble.cause, *(f"  {line}" for line in trouble.evidence), *fix):
            lines += textwrap.wrap(text, width, subsequent_indent=" " * 7, break_long_words=False)
    elif not gpus:
        lines.append("The driver answers, and shows no GPU.")
    else:
        parts = [part for gpu in gpus for part in gpu.mig]
        head = [f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}, {_idle(gpus)} idle"]
        head += [f"{len(parts)} MIG devices, {_idle(parts)} idle"] if parts else []
        head += [f"driver {snapshot.driver}"] if snapshot.driver else []
        head += [f"CUDA {snapshot.cuda}"] if snapshot.cuda else []
        head += [snapshot.source] if snapshot.source != "nvml" else []
        lines += [" · ".join(head), _row("GPU", "slot", "name", "memory GiB", "util", "temp", "power", "state")]
        for gpu in gpus:
            lines += _gpu(gpu, width)
            for part in gpu.mig:
                lines += _mig(gpu, part, width)
    for note in (*snapshot.visible, *snapshot.notes):
        lines += textwrap.wrap(note, width, break_on_hyphens=False)
    return "\n".join([*lines, *(["", *_links(snapshot)] if topology else [])]) + "\n"


def _idle(devices: list[MigDevice] | tuple[Gpu, ...]) -> int:
    return sum(bool(one.idle) for one in devices)


def _row(gpu: str, slot: str, name: str, memory: str, util: str, temp: str, power: str, state: str) -> str:
    return f"{gpu:>4} {slot:>4}  {name:<23.23} {memory:>13} {util:>5} {temp:>5} {power:>7}  {state}".rstrip()


def _gpu(gpu: Gpu, width: int) -> list[str]:
    state = "idle" if gpu.idle else "MIG" if gpu.mig_enabled else "busy"
    if gpu.error:
        state = "lost" if "lost" in gpu.error.lower() else "error"
    util = UNKNOWN if gpu.utilization_percent is None else f"{gpu.utilization_percent}%"
    temp = UNKNOWN if gpu.temperature_c is None else f"{gpu.temperature_c}C"
    power = UNKNOWN if gpu.power_w is None else f"{gpu.power_w:.0f}W"
    name = (gpu.name or UNKNOWN).removeprefix("NVIDIA ").removeprefix("GeForce ")
    drawing = [f"draws: {describe(one)}" for one in gpu.processes or () if one.kind == "graphics"]
    row = _row(str(gpu.index), _slot(gpu), name, _memory(gpu), util, temp, power, state)
    return [row, *_below(width, *gpu.busy_because, *drawing, *gpu.notes)]


def _mig(gpu: Gpu, part: MigDevice, width: int) -> list[str]:
    name, state = (part.name or UNKNOWN).rpartition("MIG ")[2], "idle" if part.idle else "busy"
    row = _row(f"{gpu.index}.{part.index}", _slot(part), f"MIG {name}", _memory(part), "", "", "", state)
    return [row, *_below(width, part.uuid or "its UUID cannot be read", *part.busy_because)]


def _below(width: int, *texts: str) -> list[str]:
    shape = textwrap.TextWrapper(width, " " * 11, " " * 13, max_lines=2, placeholder="...")
    return [line for text in texts for line in shape.wrap(text)]


def _slot(one: Device) -> str:
    return "-" if one.slot is None else str(one.slot)


def _memory(one: Device) -> str:
    counts = one.memory_used_bytes, one.memory_total_bytes
    used, total = (UNKNOWN if count is None else f"{count / GIB:.1f}" for count in counts)
    return UNKNOWN if counts == (None, None) else f"{used}/{total}"


def _links(snapshot: Snapshot) -> list[str]:
    if not snapshot.links:
        return ["No pair of GPUs whose connection could be read."]
    lines = ["pair   path                   NVLinks  peer access"]
    for link in snapshot.links:
        nvlinks = UNKNOWN if link.nvlinks is None else str(link.nvlinks)
        lines.append(f"{f'{link.a}-{link.b}':<6} {link.path or UNKNOWN:<22} {nvlinks:>7}  {link.p2p or UNKNOWN}")
    return lines
