"""What a report says of a run, as plain values: the JSON of `evener report --json`, and what fills the page."""

from __future__ import annotations

import re
import shlex
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from evener.report.events import ORDINARY, number
from evener.report.record import WORDS, RankTimes, Record, ranks_text
from evener.report.text import clean, format_count, format_number, format_seconds

_WAITS, _REDUCES, _BODY, _BLOCKED, _SKIPS = 0.10, 0.25, 0.25, 0.05, 0.01  # shares from which they are worth a word
_IDLE = 50  # percent
_ELSEWHERE = ("t", "kind", "update", "rank", "versions", "command", "job", "attempt")


@dataclass(frozen=True)
class Explained:
    """What the logs of a job show: the kind of failure, the ranks to blame ([]: not known), and both in words."""

    kind: str
    ranks: list[int]
    text: str


def summary(record: Record, explained: Mapping[str, Explained], peak: tuple[float | None, str]) -> dict[str, Any]:
    """Values with units in their names; unknown is None. `explained`: a job's folder of logs -> what they show.
    `peak`: FLOP/s of all of its devices and whose word that is, or None and why."""
    cost, start, points = record.goodput, record.newest_start, record.points
    ranks, memory = record.newest_ranks, [one.memory.rows for one in record.ranks.values()]
    times = next(iter(ranks.values()), RankTimes())
    total, versions = sum(times.split.values()), start.get("versions")
    environment = {**start, **(versions if isinstance(versions, dict) else {}), "starts": record.counts["start"]}
    told: dict[str, Any] = {
        "name": record.name,
        "directory": clean(record.path),
        "status": record.status,
        "updates": None if record.last_update is None else record.last_update + 1,
        "age_seconds": None if record.newest is None else max(0.0, time.time() - record.newest),
        **asdict(cost),
        "goodput": cost.share,
        "loss": points.last("loss"),
        "metrics": {name: points.last(name) for name in points.names if name not in WORDS["curves"]},
        "evaluation": {name: record.evaluations.last(name) for name in record.evaluations.names},
        "rows_per_second": statistics.median(points.known("rows_per_second") or [0.0]) or None,
        "count_per_second": statistics.median(points.known("count_per_second") or [0.0]) or None,
        "seconds_per_update": times.seconds(),
        "step_share": {name: times.split[name] / total for name in WORDS["phases"] if name in times.split and total},
        "ranks": [
            {
                "rank": rank,
                "own_seconds": one.own() if one.updates else None,
                "reduction_seconds": one.seconds("reduction"),
                "data_wait_seconds": one.seconds("data_wait"),
                "memory_peak_bytes": int(one.memory_peak) or None,
                "gpu_utilization_percent": one.gpu_utilization(),
            }
            for rank, one in ranks.items()
        ],
        "memory_peak_bytes": int(max((max(one.values()) for of in memory for _, one in of), default=0)) or None,
        "memory_is": "of tensors on the GPU" if "peak_bytes" in times.memory.names else "of the whole process",
        "predicted_peak_bytes": record.peak.get("predicted_bytes"),
        "compared_peak_bytes": record.peak.get("real_bytes"),
        "predicted_seconds_per_update": record.peak.get("predicted_seconds"),
        "compared_seconds_per_update": record.peak.get("real_seconds"),
        "checkpoints": record.counts["checkpoint"],
        "checkpoint_blocked_seconds": record.blocked_seconds,
        "skipped_updates": record.counts["skip"],
        "findings": _findings(record, times, explained),
        "incidents": _in_words(record, explained),
        "incident_counts": {kind: count for kind, count in record.counts.items() if kind not in ORDINARY},
        "contract": record.contracts,
        "fields": [
            {"keyword": name, **one, "reason": _reason(record, name, one)} for name, one in record.config.items()
        ],
        "notes": dict(record.notes),
        "environment": {name: one for name, one in environment.items() if one is not None and name not in _ELSEWHERE},
        "reproduce": _reproduce(record, start),
        "damaged_lines": record.counts["torn"],
    }
    told |= _utilization(record.flops, told["rows_per_second"], *peak)
    return told | {"headline": _headline(told)}


def _utilization(
    flops: Mapping[str, Any], rows_per_second: float | None, peak: float | None, of: str
) -> dict[str, Any]:
    each, rows, share = number(flops.get("flops")), number(flops.get("rows")), None
    per_row = each / rows if each and rows else None
    if not flops:
        of = "no operations were counted: a run counts those of its second update"
    elif per_row is None:
        of = str(flops.get("why") or "none of its operations has a formula")
    elif rows_per_second is None:
        of = "how many rows a second went through is unknown"
    elif peak is not None:
        share = per_row * rows_per_second / peak
    return {"flops_per_row": per_row, "model_flops_utilization": share, "model_flops_utilization_is": of}


def _reason(record: Record, keyword: str, field: Mapping[str, str]) -> str:
    """What the run said about this keyword; else what its origin means."""
    sign = re.compile(rf"\b{re.escape(keyword)}=" + ("|^auto: " if keyword == "precision" else ""))
    said = [note for note in record.notes if sign.search(note)]
    return "; ".join(said[:2]) or WORDS["origins"].get(field["origin"], field["origin"])


def _headline(told: Mapping[str, Any]) -> str:
    """One sentence for somebody who reads no other."""
    if told["updates"] is None:
        return "No update left a trace."
    parts = [f"{format_count(told['updates'])} updates in {format_seconds(told['wall_seconds'] or 0.0)}"]
    parts += [f"loss {format_number(told['loss'])}"] if told["loss"] is not None else []
    word, values = ("evaluated ", told["evaluation"]) if told["evaluation"] else ("", told["metrics"])
    parts += [f"{word}{name} {format_number(value)}" for name, value in values.items() if value is not None][:3]
    parts += [f"{told['restarts']} restart{'s' * (told['restarts'] != 1)}"] if told["restarts"] else []
    return ", ".join(parts) + "."


def _findings(record: Record, times: RankTimes, explained: Mapping[str, Explained]) -> list[str]:
    """What a reader should know first; [] where nothing stands out."""
    found, cost, losses, ranks = list[str](), record.goodput, record.points.known("loss"), record.newest_ranks
    share = {name: value / (sum(times.split.values()) or 1.0) for name, value in times.split.items()}
    if losses and record.points.last("loss") is None:
        found.append("The newest loss is not finite: what came after the first such update taught the model nothing.")
    low, end = sorted(losses)[len(losses) // 10 :][:1], sorted(losses[-len(losses) // 20 :])
    if len(losses) > 20 and (ends := end[len(end) // 2]) > 2 * low[0] > 0:
        found.append(f"The loss rose again: it ends at {format_number(ends)}, and was at {format_number(low[0])}.")
    if cost.restarts:
        found.append(f"Interruptions: {cost}.")
    if (skipped := record.counts["skip"]) > _SKIPS * max(100, record.last_update or 0):
        found.append(f"{format_count(skipped)} updates were skipped: their gradients were not finite.")
    idle = record.without_work()
    busy_ranks = {rank: one for rank, one in ranks.items() if rank not in idle}
    waits = {rank: (one.seconds("data_wait") or 0.0) / (one.seconds() or 1.0) for rank, one in busy_ranks.items()}
    worst = max(waits, key=lambda rank: waits[rank], default=0)
    if waits and waits[worst] >= _WAITS:
        how = "more num_workers, or rows that are cheaper to read"
        found.append(f"Rank {worst} waits for rows {waits[worst]:.0%} of its time: {how}.")
    if idle:
        slices = re.search(r"\(slices of (\d+)\)", record.contracts[-1] if record.contracts else "")
        why = f"it is cut into slices of {slices[1]} rows" if slices else "it is cut into fewer pieces than ranks"
        found.append(
            f"{len(idle)} of {len(ranks)} ranks have no work ({ranks_text(idle)}): the global batch has no rows for "
            f"them, because {why}. A larger global_batch_size, or fewer processes."
        )
    # What little was measured before a hang is no word about which rank is slow.
    hung = _is_hang(record.incidents[-1], explained) if record.incidents else False
    if (slow := None if hung else record.straggler()) is not None:
        own, usual = (f"{1000 * seconds:.3g} ms" for seconds in slow[1:])
        found.append(f"Rank {slow[0]} is the straggler: {own} of own work an update, {usual} elsewhere.")
    elif share.get("reduction", 0.0) >= _REDUCES and not idle:
        why = "small updates, a slow link, or more processes than cores"
        found.append(f"{share['reduction']:.0%} of the time goes into reductions that no backward hides: {why}.")
    busy = {rank: one.gpu_utilization() for rank, one in ranks.items()}
    if bored := {rank: percent for rank, percent in busy.items() if percent is not None and percent < _IDLE}:
        rank = min(bored, key=lambda rank: bored[rank])
        found.append(f"The GPU of rank {rank} did something in {bored[rank]:.0f}% of the time only.")
    if share.get("body", 0.0) >= _BODY:
        found.append(f"{share['body']:.0%} of the time is the loop's own body: evaluations, logging, saving.")
    if cost.wall_seconds and (part := record.blocked_seconds / cost.wall_seconds) >= _BLOCKED:
        found.append(f"Checkpoints kept the training waiting {part:.0%} of the time.")
    return found


def _is_hang(incident: Mapping[str, Any], explained: Mapping[str, Explained]) -> bool:
    logs = explained.get(str(incident.get("logs")))
    return logs is not None and logs.kind == "hang" and incident["kind"] in ("died", "error")


def _in_words(record: Record, explained: Mapping[str, Explained]) -> list[dict[str, Any]]:
    """The incidents with what they mean, from incidents.toml; a kind that it does not know, with its fields."""
    from jinja2 import Environment

    # It is the page that escapes: the JSON has the texts as they are.
    env = Environment(autoescape=False, finalize=lambda value: value if value or value == 0 else "unknown")
    found = []
    for one in record.incidents:
        logs = explained.get(str(one.get("logs"))) if one["kind"] in ("died", "error") else None
        shown = {name: format_number(v) if isinstance(v, float) else v for name, v in one.items()}
        fields = [f"{name} {v}" for name, v in shown.items() if v is not None and name not in ("t", "kind", "rank")]
        words = WORDS["incidents"].get(one["kind"], {"title": one["kind"].replace("_", " ").capitalize(), "what": ""})
        words = WORDS["lost_peer"] if one["kind"] == "error" and one["lost_peer"] else words
        if _is_hang(one, explained) and logs is not None:
            words, shown = WORDS["hang"], {**shown, "hung": ranks_text(logs.ranks)}
        told = {"title": words["title"], "what": env.from_string(words["what"]).render(shown) or "; ".join(fields)}
        told |= {"why": words.get("why"), "do": words.get("do")}
        if logs is not None:
            told |= {"why": f"The logs of its job say: {logs.text}", "do": None}
        found.append({**{name: one[name] for name in ("t", "update", "rank", "kind")}, **told})
    return found


def _reproduce(record: Record, start: Mapping[str, Any]) -> str | None:
    """A command line put together from what the run wrote down; None where it did not."""
    command, world = start.get("command"), start.get("world_size")
    if not isinstance(command, str) or not command:
        return None
    if not start.get("job"):
        return f"python {command}" if world == 1 else f"torchrun --nproc-per-node {world} {command}"
    flags = (f"{name}={one['value']}" for name, one in record.config.items() if one["origin"] == "flag")
    words = [f"evener run --nproc {world}", *["--cpu"] * (start.get("device") == "cpu")]
    return " ".join([*words, *(f"--set {shlex.quote(one)}" for one in flags), command])
