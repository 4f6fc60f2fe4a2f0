"""What the runs of this machine do now, for `evener top`: found through /proc, read from their own run directories.

A run is found by the process that has its `events.jsonl` open, a launched job by its ranks' command line; there is no
register that could be out of date. Where each rank's time goes is what the rank measured itself (`pulse-rankN.json`).
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import psutil  # type: ignore[import-untyped]

from evener.report.text import clean, format_number, format_seconds

WAITS, BODY = 0.10, 0.25  # parts of an update's time from which they are worth a word
_TAIL_BYTES = 8 << 20  # of events.jsonl, when it is seen for the first time
_SILENT_SECONDS = 20.0
# What belongs to every good run; `warning` is what the console also said, most of it notes. Unknown kinds count.
_NO_INCIDENT = {"start", "contract", "update", "epoch", "evaluate", "checkpoint", "resume", "finish", "warning"}


@dataclass(frozen=True)
class Rank:
    """One process of a run. What it has not measured is None."""

    rank: int
    pid: int
    device: str | None = None
    gpu: str | None = None  # its UUID
    num_workers: int | None = None
    update: int | None = None
    updates_per_second: float | None = None
    data_wait: float | None = None  # parts of the time of the newest second or update
    step: float | None = None
    body: float | None = None
    seconds_since: float | None = None  # since it last said so
    memory_bytes: int | None = None  # resident, data workers included
    allocated_bytes: int | None = None  # on its GPU, by torch


@dataclass(frozen=True)
class Running:
    """A job of this machine; `directory` is None for a script without `evener.Run`."""

    name: str
    directory: str | None = None
    logs: str | None = None
    user: str | None = None
    contract: str | None = None
    update: int | None = None
    epoch: int | None = None
    loss: float | None = None
    rows_per_second: float | None = None
    updates_per_second: float | None = None
    ranks: tuple[Rank, ...] = ()
    incidents: Mapping[str, int] = field(default_factory=dict)
    last_incident: str | None = None
    verdict: str = ""


class Story:
    """The events of one run, read on from where the last look ended."""

    def __init__(self, directory: str) -> None:
        self.path, self.position, self.rest = os.path.join(directory, "events.jsonl"), -1, b""
        self.newest: dict[str, dict[str, Any]] = {}
        self.incidents: Counter[str] = Counter()
        self.last_incident: str | None = None

    def read(self) -> None:
        with contextlib.suppress(OSError), open(self.path, "rb") as file:
            end = file.seek(0, os.SEEK_END)
            if self.position < 0:
                self.position = max(0, end - _TAIL_BYTES)
            file.seek(self.position)
            *lines, self.rest = (self.rest + file.read()).split(b"\n")
            self.position = file.tell()
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        kind = str(event["kind"])
        if kind == "start":  # a run that continues in its directory: what was before is another day's
            self.incidents.clear()
            self.last_incident = None
        self.newest[kind] = event
        if kind not in _NO_INCIDENT:
            self.incidents[kind] += 1
            text = event.get("text") or event.get("reason") or event.get("error") or ""
            where = f"update {event['update']} " if event.get("update") is not None else ""
            self.last_incident = clean(f"{where}{kind}{f': {text}' if text else ''}")


class Watcher:
    """Looks again and again.

    Args:
        usable_cpus: Of this machine, for the advice about data workers.
        gpu_index: From a UUID to the number that people know.
    """

    def __init__(self, usable_cpus: int, gpu_index: Callable[[str], int | None] = lambda uuid: None) -> None:
        self.usable_cpus, self.gpu_index = usable_cpus, gpu_index
        self.stories: dict[str, Story] = {}

    def look(self) -> list[Running]:
        """Every run and every launched job of this machine that may be looked at, by name."""
        processes = {one.pid: one for one in psutil.process_iter(["pid", "ppid", "cmdline"])}
        jobs = _jobs(processes)
        found: list[Running] = []
        for directory, pid in sorted(_directories(processes).items()):
            job = next((job for job in jobs if pid in job["pids"].values()), None)
            if job is not None:
                jobs.remove(job)
            name = job["name"] if job else os.path.basename(directory)
            ranks = tuple(_ranks(directory, processes)) or (Rank(0, pid),)
            run = Running(name, directory, job["logs"] if job else None, _user(processes[pid]), ranks=ranks)
            found.append(self._with_story(run))
        for job in jobs:
            ranks = tuple(Rank(rank, pid) for rank, pid in sorted(job["pids"].items()) if pid in processes)
            if ranks:
                user = _user(processes[ranks[0].pid])
                found.append(Running(job["name"], None, job["logs"], user, ranks=ranks))
        self.stories = {path: story for path, story in self.stories.items() if any(path == r.directory for r in found)}
        measured = [replace(run, ranks=tuple(_with_memory(one, processes) for one in run.ranks)) for run in found]
        return [replace(run, verdict=verdict(run.ranks, self.usable_cpus, self.gpu_index)) for run in measured]

    def _with_story(self, run: Running) -> Running:
        assert run.directory is not None
        story = self.stories.setdefault(run.directory, Story(run.directory))
        story.read()
        point = story.newest.get("update", {})
        first = run.ranks[0]
        loss = point.get("loss")
        return replace(
            run,
            contract=clean(story.newest.get("contract", {}).get("line", "")) or None,
            update=first.update if first.update is not None else point.get("update"),
            epoch=point.get("epoch"),
            loss=loss if isinstance(loss, int | float) else None if loss is None else float(loss),
            rows_per_second=point.get("rows_per_second"),
            updates_per_second=first.updates_per_second,
            incidents=dict(story.incidents),
            last_incident=story.last_incident,
        )


# --- finding them -----------------------------------------------------------------------------------------------------


def _jobs(processes: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Jobs of `evener run`: name, logs, and the process id of every rank."""
    found: dict[str, dict[str, Any]] = {}
    for one in processes.values():
        words = one.info["cmdline"] or []
        at = next((i for i, word in enumerate(words) if word.endswith("evener/launch/shim.py")), len(words))
        if at + 1 < len(words) and "torch.distributed.run" not in words and words[at + 1] not in found:
            with contextlib.suppress(OSError, ValueError, KeyError), open(words[at + 1], encoding="utf-8") as file:
                logs = str(json.load(file)["logs"])
                found[words[at + 1]] = {"name": os.path.basename(logs), "logs": logs, "pids": _recorded(logs)}
    return list(found.values())


def _recorded(logs: str) -> dict[int, int]:
    pids = {}
    for path in glob.glob(os.path.join(glob.escape(logs), "rank*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError), open(path, encoding="utf-8") as file:
            record = json.load(file)
            pids[int(record["rank"])] = int(record["pid"])
    return pids


def _directories(processes: Mapping[int, Any]) -> dict[str, int]:
    """Run directory -> the process that writes it. Data workers have the file from their parent: the parent counts."""
    found: dict[str, set[int]] = {}
    for pid in processes:
        for path in _open_files(pid):
            if path.endswith("/events.jsonl") and os.path.exists(os.path.join(os.path.dirname(path), ".lock")):
                found.setdefault(os.path.dirname(path), set()).add(pid)
    return {
        path: next((pid for pid in sorted(pids) if processes[pid].info["ppid"] not in pids), min(pids))
        for path, pids in found.items()
    }


def _open_files(pid: int) -> Iterator[str]:
    if os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(entry.path)
        return
    with contextlib.suppress(psutil.Error):
        yield from (one.path for one in psutil.Process(pid).open_files())


def _ranks(directory: str, processes: Mapping[int, Any]) -> Iterator[Rank]:
    """The ranks that live on this machine, as they measured themselves."""
    pulses = []
    for path in glob.glob(os.path.join(glob.escape(directory), "pulse-rank*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(path, encoding="ascii") as file:
            one = json.load(file)
            if one["host"] == socket.gethostname() and one["pid"] in processes:
                pulses.append(one)
    for one in sorted(pulses, key=lambda one: int(one["rank"])):
        seconds = max(one["seconds"], 1e-9)
        parts = {name: one[f"{name}_seconds"] / seconds for name in ("data_wait", "step", "body")}
        yield Rank(
            one["rank"],
            one["pid"],
            one["device"],
            one["gpu"],
            one["num_workers"],
            one["update"],
            one["updates"] / seconds,
            seconds_since=max(0.0, time.time() - one["t"]),
            allocated_bytes=one.get("allocated_bytes"),
            **{name: min(1.0, part) for name, part in parts.items()},
        )


def _user(process: Any) -> str | None:
    with contextlib.suppress(psutil.Error, KeyError):
        return str(process.username())
    return None


def _with_memory(rank: Rank, processes: Mapping[int, Any]) -> Rank:
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in (processes[rank.pid], *processes[rank.pid].children(recursive=True)):
            total += one.memory_info().rss
    return replace(rank, memory_bytes=total or None)


# --- in words ---------------------------------------------------------------------------------------------------------


def verdict(ranks: Sequence[Rank], usable_cpus: int, gpu_index: Callable[[str], int | None]) -> str:
    """What holds the run up, from where its ranks' time went; what to do about it."""
    measured = [one for one in ranks if one.data_wait is not None]
    if not measured:
        return "it has not said yet where its time goes" if ranks and ranks[0].device else ""
    silent = max(measured, key=lambda one: one.seconds_since or 0.0)
    usual = 1 / silent.updates_per_second if silent.updates_per_second else 0.0
    if (silent.seconds_since or 0.0) > _SILENT_SECONDS + 5 * usual:
        pause = format_seconds(silent.seconds_since or 0.0)
        return f"no update for {pause}: it evaluates or saves, or it hangs (py-spy dump --pid {silent.pid})"
    worst = max(measured, key=lambda one: one.data_wait or 0.0)
    share = worst.data_wait or 0.0
    if share >= WAITS:
        others = sum((one.data_wait or 0.0) >= WAITS for one in measured) - 1
        also = f" (and {others} more rank{'s' * (others > 1)})" if others else ""
        return f"{_name(worst, gpu_index)} waits for data {percent(share)} of each step{also}: " + _advice(
            worst.num_workers, len(measured), usable_cpus
        )
    slow = max(measured, key=lambda one: one.body or 0.0)
    if (slow.body or 0.0) >= BODY:
        return (
            f"{_name(slow, gpu_index)} spends {percent(slow.body)} of each update in the loop's own body and in saving"
        )
    return f"no rank waits for data (at most {percent(share)} of each step)"


def _name(rank: Rank, gpu_index: Callable[[str], int | None]) -> str:
    index = gpu_index(rank.gpu) if rank.gpu else None
    return f"GPU {index}" if index is not None else f"rank {rank.rank}"


def _advice(workers: int | None, ranks: int, usable_cpus: int) -> str:
    if workers is None:
        return "raise num_workers"
    if workers and (workers + 1) * ranks >= usable_cpus:
        busy = f"{ranks} x {workers} data workers have {usable_cpus} CPUs"
        return f"make reading a row cheaper, or use more CPUs ({busy})"
    return f"raise num_workers from {workers}"


def percent(part: float | None, width: int = 0) -> str:
    return f"{round(100 * (part or 0.0)):>{width}} %"


def share_words(rank: Rank) -> str:
    if rank.data_wait is None:
        return "no time measured"
    return f"data {percent(rank.data_wait, 3)}  step {percent(rank.step, 3)}  body {percent(rank.body, 3)}"


def run_lines(run: Running, size: Callable[[int], str]) -> list[str]:
    """One run as lines; cutting them to the terminal is the caller's."""
    where = run.directory or f"{run.logs} (no evener.Run in it: no steps are measured)"
    lines = [clean(f"{run.name}  {run.user or ''}  {where}".replace("    ", "  "))]
    facts = [f"update {run.update}" if run.update is not None else "", f"epoch {run.epoch}" if run.epoch else ""]
    facts += [f"loss {format_number(run.loss)}" if run.loss is not None else ""]
    facts += [f"{run.updates_per_second:.3g} updates/s" if run.updates_per_second else ""]
    facts += [f"{run.rows_per_second:,.0f} rows/s" if run.rows_per_second else ""]
    if any(facts):
        lines.append("  " + " · ".join(fact for fact in facts if fact))
    for one in run.ranks:
        memory = "" if one.memory_bytes is None else size(one.memory_bytes)
        gpu = "" if one.allocated_bytes is None else f" + {size(one.allocated_bytes)} on the GPU"
        lines.append(f"  rank {one.rank:<3} {one.device or '':<7} pid {one.pid:<8} {share_words(one)}  {memory}{gpu}")
    if run.incidents:
        counts = ", ".join(f"{number} {kind}" for kind, number in run.incidents.items())
        lines.append(f"  incidents: {counts}; last: {run.last_incident}")
    if run.verdict:
        lines.append(f"  -> {run.verdict}")
    return lines
