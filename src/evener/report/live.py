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
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]

from evener.report.events import ORDINARY, number
from evener.report.folder import read_json
from evener.report.text import clean, format_number, format_seconds

WAITS, BODY = 0.10, 0.25  # parts of an update's time from which they are worth a word
_TAIL_BYTES = 8 << 20  # of events.jsonl, when it is seen for the first time
_SILENT_SECONDS = 20.0


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
    data_wait: float | None = None  # parts of the time of the newest second or update, as are step and body
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
            file.seek(max(0, end - _TAIL_BYTES) if self.position < 0 else self.position)
            *lines, self.rest = (self.rest + file.read()).split(b"\n")
            self.position = file.tell()
            for line in lines:
                with contextlib.suppress(ValueError, TypeError, KeyError):
                    self._take(json.loads(line))

    def facts(self, first: Rank) -> dict[str, Any]:
        """Fields of `Running`, read on; what rank `first` measured is newer than the events."""
        self.read()
        point = self.newest.get("update", {})
        told = {name: point.get(name) for name in ("epoch", "rows_per_second")} | {"loss": number(point.get("loss"))}
        told["update"] = point.get("update") if first.update is None else first.update
        told["contract"] = clean(self.newest.get("contract", {}).get("line", "")) or None
        told |= {"incidents": dict(self.incidents), "last_incident": self.last_incident}
        return told | {"updates_per_second": first.updates_per_second}

    def _take(self, event: dict[str, Any]) -> None:
        kind = str(event["kind"])
        if kind == "start":  # a run that continues in its directory: what was before is another day's
            self.incidents.clear()
            self.last_incident = None
        self.newest[kind] = event
        if kind not in ORDINARY and kind != "resume":
            self.incidents[kind] += 1
            text = event.get("text") or event.get("reason") or event.get("error") or ""
            where = f"update {event['update']} " if event.get("update") is not None else ""
            self.last_incident = clean(f"{where}{kind}{f': {text}' if text else ''}")


class Watcher:
    """Looks again and again. `usable_cpus`: for advice. `gpu_index`: from a UUID to the number that people know."""

    def __init__(self, usable_cpus: int, gpu_index: Callable[[str], int | None] = lambda uuid: None) -> None:
        self.usable_cpus, self.gpu_index = usable_cpus, gpu_index
        self.stories: dict[str, Story] = {}

    def look(self) -> list[Running]:
        """Every run and every launched job of this machine that may be looked at, by name."""
        processes = {one.pid: one for one in psutil.process_iter(["pid", "ppid", "cmdline", "username"])}
        jobs, writers = _jobs(processes), _directories(processes)
        self.stories = {path: self.stories.get(path) or Story(path) for path in sorted(writers)}
        found: list[Running] = []
        for path, story in self.stories.items():
            of = [job for job in jobs if writers[path] in job["pids"].values()]
            jobs = [job for job in jobs if job not in of]
            name, logs = (of[0]["name"], of[0]["logs"]) if of else (os.path.basename(path), None)
            ranks = _measured(path, processes) or (_rank(0, processes[writers[path]]),)
            user, said = processes[writers[path]].info["username"], verdict(ranks, self.usable_cpus, self.gpu_index)
            found.append(Running(name, path, logs, user, ranks=ranks, verdict=said, **story.facts(ranks[0])))
        for job in jobs:
            pids = sorted((rank, pid) for rank, pid in job["pids"].items() if pid in processes)
            if ranks := tuple(_rank(rank, processes[pid]) for rank, pid in pids):
                user = processes[ranks[0].pid].info["username"]
                found.append(Running(job["name"], None, job["logs"], user, ranks=ranks))
        return found


# --- finding them -----------------------------------------------------------------------------------------------------


def _jobs(processes: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Jobs of `evener run`: name, logs, and the process id of every rank."""
    plans: set[str] = set()
    for words in (one.info["cmdline"] or [] for one in processes.values()):
        at = next((i for i, word in enumerate(words) if word.endswith("evener/launch/shim.py")), len(words))
        plans |= {*words[at + 1 : at + 2]} if "torch.distributed.run" not in words else set()
    found = []
    for folder, name in map(os.path.split, sorted(plans)):
        for logs in (str(plan["logs"]) for plan in read_json(folder, glob.escape(name), "logs")):
            pids = {int(one["rank"]): int(one["pid"]) for one in read_json(logs, "rank*.json", "rank", "pid")}
            found.append({"name": os.path.basename(logs), "logs": logs, "pids": pids})
    return found


def _directories(processes: Mapping[int, Any]) -> dict[str, int]:
    """Run directory -> the process that writes it. Data workers have the file from their parent: the parent counts."""
    found: dict[str, set[int]] = {}
    for pid in processes:
        for folder, name in map(os.path.split, _open_files(pid)):
            if name == "events.jsonl" and os.path.exists(os.path.join(folder, ".lock")):
                found.setdefault(folder, set()).add(pid)
    parents = {path: [pid for pid in pids if processes[pid].info["ppid"] not in pids] for path, pids in found.items()}
    return {path: min(parents[path] or pids) for path, pids in found.items()}


def _open_files(pid: int) -> Iterator[str]:
    """Not psutil's where it can be avoided: that one also asks the file's disk, which may hang."""
    if os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another user's process, or one that has just ended
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    yield os.readlink(f"/proc/{pid}/fd/{name}")
    else:
        with contextlib.suppress(psutil.Error):
            yield from (one.path for one in psutil.Process(pid).open_files())


def _measured(directory: str, processes: Mapping[int, Any]) -> tuple[Rank, ...]:
    """The ranks that live on this machine, as they measured themselves."""
    found = []
    for one in read_json(directory, "pulse-rank*.json", "rank", "pid", "host", "seconds"):
        if one["host"] == socket.gethostname() and one["pid"] in processes:
            seconds = max(one["seconds"], 1e-9)
            values = {name: one.get(name) for name in ("device", "gpu", "num_workers", "update", "allocated_bytes")}
            values |= {name: min(1.0, one[f"{name}_seconds"] / seconds) for name in ("data_wait", "step", "body")}
            values |= {
                "updates_per_second": one["updates"] / seconds,
                "seconds_since": max(0.0, time.time() - one["t"]),
            }
            found.append(_rank(one["rank"], processes[one["pid"]], **values))
    return tuple(sorted(found, key=lambda one: one.rank))


def _rank(number: int, process: Any, **measured: Any) -> Rank:
    total = 0
    with contextlib.suppress(psutil.Error):
        total = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    return Rank(number, process.pid, memory_bytes=total or None, **measured)


# --- in words ---------------------------------------------------------------------------------------------------------


def verdict(ranks: Sequence[Rank], usable_cpus: int, gpu_index: Callable[[str], int | None]) -> str:
    """What holds the run up, from where its ranks' time went; what to do about it."""

    def name(rank: Rank) -> str:
        index = gpu_index(rank.gpu) if rank.gpu else None
        return f"rank {rank.rank}" if index is None else f"GPU {index}"

    measured = [one for one in ranks if one.data_wait is not None]
    if not measured:
        return "it has not said yet where its time goes" if ranks and ranks[0].device else ""
    silent = max(measured, key=lambda one: one.seconds_since or 0.0)
    usual = 1 / silent.updates_per_second if silent.updates_per_second else 0.0
    if (pause := silent.seconds_since or 0.0) > _SILENT_SECONDS + 5 * usual:
        words = f"no update for {format_seconds(pause)}: it evaluates or saves, or it hangs"
        return f"{words} (py-spy dump --pid {silent.pid})"
    worst = max(measured, key=lambda one: one.data_wait or 0.0)
    share = worst.data_wait or 0.0
    if share >= WAITS:
        others = sum((one.data_wait or 0.0) >= WAITS for one in measured) - 1
        also = f" (and {others} more rank{'s' * (others > 1)})" if others else ""
        workers, count = worst.num_workers, len(measured)
        advice = "raise num_workers" + ("" if workers is None else f" from {workers}")
        if workers and (workers + 1) * count >= usable_cpus:
            busy = f"{count} x {workers} data workers have {usable_cpus} CPUs"
            advice = f"make reading a row cheaper, or use more CPUs ({busy})"
        return f"{name(worst)} waits for data {percent(share)} of each step{also}: {advice}"
    slow = max(measured, key=lambda one: one.body or 0.0)
    if (slow.body or 0.0) >= BODY:
        return f"{name(slow)} spends {percent(slow.body)} of each update in the loop's own body and in saving"
    return f"no rank waits for data (at most {percent(share)} of each step)"


def percent(part: float | None, width: int = 0) -> str:
    return f"{round(100 * (part or 0.0)):>{width}} %"


def run_lines(run: Running, size: Callable[[int], str]) -> list[str]:
    """One run as lines; cutting them to the terminal is the caller's."""
    where = run.directory or f"{run.logs} (no evener.Run in it: no steps are measured)"
    lines = [clean("  ".join(filter(None, (run.name, run.user, where))))]
    facts = [f"{name} {value}" for name, value in (("update", run.update), ("epoch", run.epoch)) if value is not None]
    facts += [f"loss {format_number(run.loss)}"] if run.loss is not None else []
    facts += [f"{run.updates_per_second:.3g} updates/s"] if run.updates_per_second else []
    facts += [f"{run.rows_per_second:,.0f} rows/s"] if run.rows_per_second else []
    lines += ["  " + " · ".join(facts)] if facts else []
    for one in run.ranks:
        shares = f"data {percent(one.data_wait, 3)}  step {percent(one.step, 3)}  body {percent(one.body, 3)}"
        shares = "no time measured" if one.data_wait is None else shares
        memory = "" if one.memory_bytes is None else size(one.memory_bytes)
        gpu = "" if one.allocated_bytes is None else f" + {size(one.allocated_bytes)} on the GPU"
        lines.append(f"  rank {one.rank:<3} {one.device or '':<7} pid {one.pid:<8} {shares}  {memory}{gpu}")
    if run.incidents:
        counts = ", ".join(f"{number} {kind}" for kind, number in run.incidents.items())
        lines.append(f"  incidents: {counts}; last: {run.last_incident}")
    return [*lines, f"  -> {run.verdict}"] if run.verdict else lines
