"""Out of memory is arithmetic: the figures of the message and the place where it was raised say which remedy helps.

The message's own hint (fragmentation) is printed whatever the figures are, so it is never read. There are three
generations of the text: up to 2.0 in brackets ("already allocated; ... reserved in total"), 2.1, and since 2.2.
"""

from __future__ import annotations

import re

from evener.explain.facts import Facts
from evener.explain.kinds import STAGES
from evener.explain.match import Match

MIB = 1024.0
_UNIT = {"bytes": 1 / 1024, "b": 1 / 1024, "kib": 1.0, "kb": 1.0, "mib": MIB, "mb": MIB, "gib": MIB**2, "gb": MIB**2}
_UNIT |= {"tib": MIB**3, "eb": MIB**5}
_SIZE = r"(?P<{0}>[\d.]+) ?(?P<{0}_unit>bytes|[KMGTE]i?B)"
_FIGURES = {
    "request": (r"[Tt]ried to allocate (?:more than )?" + _SIZE,),
    "total": (_SIZE + r" total capac?ity", r"total capac?ity of " + _SIZE),
    "free": (_SIZE + r" free", r"of which " + _SIZE + r" is free"),
    "allocated": (_SIZE + r" already allocated", r"[Mm]emory " + _SIZE + r" is allocated by PyTorch"),
    "unallocated": (_SIZE + r" is reserved by PyTorch but unallocated",),
    "reserved": (_SIZE + r" reserved in total", _SIZE + r" cached"),
    "own": (r"this process has " + _SIZE,),
}
_OPTIMIZER = re.compile(r"_multi_tensor_|_foreach_|optim/\w+\.py|optimizer\S*\.step\(|in step\b.*optim|:_init_group:")
_BACKWARD = re.compile(r"autograd|\.backward\(")
_LOADING = re.compile(
    r"_cuda_deserialize|torch\.load|load_from_checkpoint|restore_location|load_state_dict|_load_checkpoint"
)
_RESUMING = re.compile(
    r"load_from_checkpoint|[Rr]esum(?:e|ing) (?:from|training)|[Ll]oading checkpoint|--resume|restored? from"
)
_GROWS = re.compile(
    r"(?m)\b\w*(?:loss|likelihood|nll|cost|objective)\w*\s*\+=\s*(?!.*(?:\.item\(|\.detach\(|float\())[\w.]*(?:loss|likelihood|nll|cost|objective)\w*\s*$"
    r"|(?:losses|outputs|history|logs?)\w*\.append\(\s*(?:loss|output|out|logits|pred)\w*\s*\)"
)


def figures(text: str) -> dict[str, float]:
    """The sizes in the message, in KiB; only those that are there."""
    found = {}
    for name, sources in _FIGURES.items():
        match = next((match for source in sources if (match := re.search(source.format(name), text))), None)
        if match is not None:
            found[name] = float(match[name]) * _UNIT[match[f"{name}_unit"].lower()]
    if "unallocated" not in found and "reserved" in found and "allocated" in found:
        found["unallocated"] = max(0.0, found["reserved"] - found["allocated"])
    return found


def shown(kib: float) -> str:
    """12.3 GiB, 128 MiB."""
    if kib >= MIB**2:
        return f"{kib / MIB**2:.2f} GiB"
    return f"{kib / MIB:.4g} MiB" if kib >= MIB else f"{kib:.4g} KiB"


def _held(pattern: str, text: str) -> list[tuple[str, float]]:
    """(process id, KiB) of every process that the text lists."""
    return [(pid, float(size) * _UNIT[unit.lower()]) for pid, size, unit in re.findall(pattern, text)]


def foreign(text: str, f: dict[str, float]) -> list[tuple[str, float]]:
    """Other processes and what they hold. The own one is listed too, in containers under another id."""
    held = _held(r"Process (\d+) has ([\d.]+) ?([KMG]i?B) memory in use", text)
    if held and "allocated" in f and "own" not in f:
        mine = f["allocated"] + f.get("unallocated", 0.0) + 0.4 * MIB**2  # and the context
        own = min(held, key=lambda one: abs(one[1] - mine))
        if abs(own[1] - mine) < max(0.15 * mine, 0.5 * MIB**2):
            held.remove(own)
    return held


def _by_the_driver(match: Match, facts: Facts) -> list[tuple[str, float]]:
    """The same of the message's GPU, out of the lines that `evener run` left; none if the own process is unknown."""
    rank = match.raised.lines[-1].rank if match.raised is not None else None
    device, fate = re.search(r"GPU (\d+)\b", match.flat), facts.fates.get(-1 if rank is None else rank)
    if device is None or fate is None:
        return []
    line = rf"NVML: GPU \d+ \(cuda:{device[1]}\): process (\d+) of .* holds ([\d.]+) ([KMG]iB)"
    return [one for one in _held(line, facts.everything) if one[0] != str(fate.pid)]


def memory(match: Match, facts: Facts) -> bool:
    """Which kind of out-of-memory this message is."""
    text, code = match.flat, match.raised.code if match.raised else ""
    f = figures(text)
    everything = facts.everything
    # An older message, or a container, hides them: then what the driver said when the rank failed.
    held = foreign(text, f) or _by_the_driver(match, facts)
    others, pids = sum(size for _, size in held), [pid for pid, _ in held]
    request, free, total = f.get("request"), f.get("free"), f.get("total")
    allocated, spare = f.get("allocated"), f.get("unallocated", 0.0)
    values = {name: shown(value) for name, value in f.items()}
    if allocated is not None and total:
        values["percent"] = f"{100 * allocated / total:.0f}"
    if pids:
        values |= {"others": shown(others), "pids": ", ".join(pids), "first_pid": pids[0]}
    if total and allocated is not None and free is not None and "own" not in f and not pids:
        missing = total - free - allocated - spare
        if missing > 0.3 * total:
            others, values["others"] = missing, shown(missing)

    if device := re.search(r"GPU (\d+)\b", text):
        values["gpu"] = device[1]

    def verdict(kind: str, sub: str | None = None, confidence: str = "high", *alternatives: str) -> bool:
        match.become(kind)
        match.stage = min(match.stage, STAGES.index("failure"))  # a kind may be a mere condition where nobody says so
        match.sub, match.confidence, match.alternatives = sub, confidence, list(alternatives)
        match.values |= values
        return True

    if "more than 1EB" in text or (request and request >= MIB**4):
        return verdict("nccl-timeout", "garbage-size", "medium", "oom-capacity")
    if _LOADING.search(code):
        sub = "all-ranks-on-one" if (allocated is not None and total and allocated < 0.5 * total) else None
        return verdict("oom-on-resume", sub, "high", "oom-other-process")
    if request and total and request > total:
        return verdict("oom-capacity", "one-request", "high")
    if _OPTIMIZER.search(code) and not _BACKWARD.search(code.splitlines()[-1] if code else ""):
        return verdict("oom-optimizer-step", None, "high", "oom-capacity")
    if total and others > 0.3 * total:
        return verdict("oom-other-process", None, "high" if pids else "medium", "oom-on-resume", "oom-capacity")
    if request is not None and allocated is not None:
        within = free is None or free < request <= free + spare
        if within and spare >= request and spare / (allocated + spare or 1) > 0.15:
            on = "expandable_segments:True" in re.sub(r"try setting \S+", "", everything)
            return verdict("oom-fragmentation", "already-on" if on else None, "high", "oom-capacity")
        if within and spare / (allocated + spare or 1) > 0.15:
            return verdict("oom-fragmentation", None, "medium", "oom-capacity")
    if _GROWS.search(everything):
        return verdict("oom-growing", None, "high", "oom-capacity")
    if _RESUMING.search(everything) and (allocated is None or (total and allocated < 0.6 * total)):
        return verdict("oom-on-resume", None, "medium", "oom-capacity")
    if request is None and allocated is None:
        return verdict("oom-capacity", None, "low", "oom-fragmentation", "oom-other-process", "oom-on-resume")
    sub = "backward" if _BACKWARD.search(code) else None
    full = bool(total and allocated is not None and allocated > 0.8 * total)
    return verdict("oom-capacity", sub, "high" if full else "medium", "oom-fragmentation")
