"""A run directory as values for a report, bounded whatever the files hold: damaged lines, hostile texts, 100 MB.

Files are read once, line by line. A curve keeps at most POINTS points, extremes first; of everything else there is a
count, and the first and last of a kind.
"""

from __future__ import annotations

import bisect
import json
import math
import socket
import statistics
import time
import tomllib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from evener.errors import UsageError
from evener.report.events import ORDINARY, number, read_events
from evener.report.folder import in_use, read_json
from evener.report.goodput import Goodput, goodput
from evener.report.text import clean

POINTS, INCIDENTS, NOTES, NAMES, TEXT, RANKS = 2000, 100, 60, 24, 600, 1024
WORDS = tomllib.loads(resources.files("evener.report").joinpath("words.toml").read_text("utf-8"))
_SILENT_SECONDS = 120.0  # a run of another machine, whose lock cannot be seen, counts as alive for so long
_SAYS = {"start": "going", "update": "going", "stop": "stopped", "finish": "finished", "error": "failed"}


class Points:
    """Values over updates, ascending. Too many are thinned: of four neighbours the two that have the smallest and the
    largest first value stay.
    """

    def __init__(self, limit: int = POINTS) -> None:
        self.limit, self.rows, self.names = limit, list[tuple[int, dict[str, float]]](), dict[str, None]()

    def add(self, update: int, values: Mapping[str, float]) -> None:
        while self.rows and self.rows[-1][0] >= update:  # made again after a restart: the newer ones count
            self.rows.pop()
        self.names = dict.fromkeys(list(self.names | dict.fromkeys(values))[:NAMES])
        self.rows.append((update, dict(values)))
        if len(self.rows) > 2 * self.limit:
            self._thin()

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Updates and values of one curve; None where a value is not finite."""
        while len(self.rows) > self.limit:
            self._thin()
        found = [(update, values[name]) for update, values in self.rows if name in values]
        return [x for x, _ in found], [y if math.isfinite(y) else None for _, y in found]

    def known(self, name: str) -> list[float]:
        return [y for y in self.series(name)[1] if y is not None]

    def last(self, name: str) -> float | None:
        return (self.series(name)[1] or [None])[-1]

    def _thin(self) -> None:
        kept = [self.rows[0]]
        for start in range(1, len(self.rows) - 1, 4):
            four = self.rows[start : min(start + 4, len(self.rows) - 1)]
            order = sorted(range(len(four)), key=lambda i: next(iter(four[i][1].values()), 0.0))
            kept += [four[i] for i in sorted({order[0], order[-1]})]
        self.rows = [*kept, self.rows[-1]]


@dataclass
class RankTimes:
    """Where a rank's time went, in `updates` since the newest start that it measured; and its curves, of all starts."""

    began: float | None = None  # when that start was
    updates: int = 0
    split: Counter[str] = field(default_factory=Counter)
    memory_peak: float = 0.0
    busy_seen: tuple[float, int] = (0.0, 0)  # percent of the time, of its GPU: the sum, and how many
    memory: Points = field(default_factory=lambda: Points(300))
    busy: Points = field(default_factory=lambda: Points(300))
    phases: Points = field(default_factory=lambda: Points(600))

    def take(self, event: Mapping[str, Any], began: float | None) -> None:
        if began != self.began:
            self.began, self.updates, self.split, self.memory_peak, self.busy_seen = began, 0, Counter(), 0.0, (0.0, 0)
        update, measured = _whole(event.get("update")) or 0, _whole(event.get("measured_updates"))
        memory = _numbers({name: event.get(name) for name in ("peak_bytes", "memory_bytes")})
        if memory:
            self.memory_peak = max(self.memory_peak, *memory.values())
            self.memory.add(update, memory)
        if (busy := number(event.get("gpu_utilization_percent"))) is not None and 0 <= busy <= 100:
            self.busy_seen = (self.busy_seen[0] + busy, self.busy_seen[1] + 1)
            self.busy.add(update, {"busy": busy})
        if measured:
            parts = {name: max(0.0, one) for name, one in _numbers(event.get("split")).items() if math.isfinite(one)}
            self.updates += measured
            self.split.update(parts)
            self.phases.add(update, {name: 1000 * value / measured for name, value in parts.items()})

    def seconds(self, *names: str) -> float | None:
        """Seconds an update in these phases; in all of them without names."""
        return sum(self.split[name] for name in names or self.split) / self.updates if self.updates else None

    def gpu_utilization(self) -> float | None:
        """Percent; the mean over what was sampled."""
        return self.busy_seen[0] / self.busy_seen[1] if self.busy_seen[1] else None

    def own(self) -> float:
        """Seconds an update of its own work: all but the wait for the others in the reduction."""
        return (self.seconds() or 0.0) - (self.seconds("reduction") or 0.0)


class Record:
    """What is known of one run. Texts have no control characters and are cut; numbers are numbers or missing.

    status: "finished", "stopped", "failed", "going", "died", or "empty".
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.status = path, clean(path.absolute().name)[:80] or "run", "empty"
        self.last_update: int | None = None
        self.newest: float | None = None  # seconds since 1970, of the newest event
        self.newest_start: dict[str, Any] = {}  # the event
        self.began: list[float] = []  # when it started, and started again
        self.contracts: list[str] = []
        self.notes, self.counts = Counter[str](), Counter[str]()
        self.points, self.epochs, self.evaluations = Points(), Points(), Points()
        self.first_incidents: list[dict[str, Any]] = []
        self.last_incidents: deque[dict[str, Any]] = deque(maxlen=INCIDENTS)
        self.blocked_seconds = 0.0  # that checkpoints kept the training waiting
        self.ranks: dict[int, RankTimes] = {}
        self.peak: dict[str, float] = {}  # of a planned run: predicted_bytes, real_bytes
        self.flops: dict[str, Any] = {}  # the event, once the operations of an update were counted
        self.goodput = Goodput(0, 0, 0.0, 0.0)
        self.config: dict[str, dict[str, str]] = {}

    @classmethod
    def read(cls, path: Path, lost_peer: Callable[[str, str], bool] = lambda kind, text: False) -> Record:
        """UsageError: there is no run in this directory. lost_peer: whether an exception's type and text say only that
        another rank is gone.
        """
        record = cls(path)
        try:
            record.goodput = goodput(record._taken(read_events(path / "events.jsonl"))) or record.goodput
        except OSError as error:
            raise _no_run(path, error) from None
        errors: dict[tuple[int, int], dict[str, Any]] = {}  # of the other ranks, one for each start and rank
        for file in sorted(path.glob("events-rank*.jsonl"))[:RANKS]:
            with suppress(OSError, ValueError):
                times = record.ranks.setdefault(int(file.stem.removeprefix("events-rank")), RankTimes())
                for event in read_events(file):
                    at = number(event.get("t")) or 0.0
                    if event["kind"] == "phases":
                        times.take(event, max((began for began in record.began if began <= at), default=None))
                    elif event["kind"] == "error":
                        one = _incident("error", event)
                        errors[record._start_of(one), one["rank"] or 0] = one
        config = next(iter(read_json(path, "config.json")), {})
        for name, one in ((name, one) for name, one in list(config.items())[:200] if isinstance(one, dict)):
            value, origin = clean(json.dumps(one.get("value")))[:TEXT], clean(one.get("origin"))[:40]
            record.config[clean(name)[:60]] = {"value": value, "origin": origin}
        here = record.newest_start.get("host") in (None, socket.gethostname())
        alive = in_use(path) if here else time.time() - (record.newest or 0.0) < _SILENT_SECONDS
        if record.status == "going" and not alive:
            record.status = "finished" if (path / "finished").exists() else "died"  # the loop was left with `break`
            if record.status == "died":
                record._died()
        record._fold_ends(list(errors.values()), lost_peer)
        return record

    @property
    def incidents(self) -> list[dict[str, Any]]:
        """The first and the last ones, in their order; `counts` has all."""
        return [*self.first_incidents, *self.last_incidents]

    @property
    def newest_ranks(self) -> dict[int, RankTimes]:
        """Those that measured something since the newest start of which that is known, in their order."""
        newest = max((one.began or 0.0 for one in self.ranks.values()), default=0.0)
        return {rank: one for rank, one in sorted(self.ranks.items()) if (one.began or 0.0) == newest}

    def without_work(self) -> list[int]:
        """Ranks that computed nothing while others did: the batch has fewer pieces than there are ranks."""
        ranks = {rank: one for rank, one in self.newest_ranks.items() if one.updates}
        idle = [rank for rank, one in ranks.items() if not one.seconds("forward", "backward")]
        return idle if len(idle) < len(ranks) else []

    def straggler(self) -> tuple[int, float, float] | None:
        """(rank, its own seconds an update, the others' median) where one rank keeps the others waiting."""
        idle = self.without_work()
        own = {rank: one.own() for rank, one in self.newest_ranks.items() if one.updates and rank not in idle}
        if len(own) < 2:
            return None
        worst = max(own, key=lambda rank: own[rank])
        usual = statistics.median(seconds for rank, seconds in own.items() if rank != worst)
        return (worst, own[worst], usual) if own[worst] > 1.25 * usual else None

    def _taken(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for event in events:
            with suppress(TypeError, ValueError, OverflowError, RecursionError):  # odd types count for nothing
                self._take(event)
            yield event

    def _take(self, event: dict[str, Any]) -> None:
        kind, update = clean(event["kind"])[:40], _whole(event.get("update"))
        if kind == "start" and self.status == "going":
            self._died()
        self.newest = number(event.get("t")) or self.newest
        before = kind == "update" and update is not None and update <= (-1 if (at := self.last_update) is None else at)
        # The last point of a run comes after its last word.
        if not (before and self.status in ("stopped", "finished", "failed")):
            self.status = _SAYS.get(kind, self.status)
        self._count(kind, {**event, "logs": self._logs()} if kind == "error" else event)
        if kind == "start":
            self.newest_start = _shown(event)
            self.began = [*self.began[-NOTES:], number(event.get("t")) or 0.0]
        elif kind == "contract":
            self.contracts = [*self.contracts[-NOTES:], clean(event.get("line"))[:TEXT]]
        elif kind == "warning":
            text = clean(event.get("text"))[:TEXT]
            self.notes[text if text in self.notes or len(self.notes) < NOTES else "other notes"] += 1
        elif kind == "checkpoint":
            self.blocked_seconds += number(event.get("blocked_seconds")) or 0.0
        elif kind == "phases":
            began = self.began[-1] if self.began else None
            self.ranks.setdefault(_whole(event.get("rank")) or 0, RankTimes()).take(event, began)
        elif kind == "flops":
            self.flops = _shown(event)
        elif kind == "peak":
            self.peak = _numbers(event)
        elif kind in ("update", "epoch", "evaluate") and update is not None:
            known = _numbers({name: event.get(name) for name in WORDS["curves"]})
            values = {**known, **{n: one for n, one in _numbers(event.get("metrics")).items() if n not in known}}
            {"update": self.points, "epoch": self.epochs, "evaluate": self.evaluations}[kind].add(update, values)
        if update is not None and kind in ("update", "epoch", "evaluate", "phases", "stop", "finish"):
            self.last_update = update

    def _count(self, kind: str, event: dict[str, Any]) -> None:
        self.counts[kind] += 1
        if kind not in ORDINARY:
            into = self.first_incidents if len(self.first_incidents) < INCIDENTS else self.last_incidents
            into.append(_incident(kind, event))

    def _died(self) -> None:
        self._count("died", {"t": self.newest, "update": self.last_update, "logs": self._logs()})

    def _logs(self) -> Any:
        start = self.newest_start
        return f"{start['job']}-restart{start['attempt']}" if start.get("attempt") else start.get("job")

    def _start_of(self, incident: Mapping[str, Any]) -> int:
        return bisect.bisect_right(self.began, incident["t"] or 0.0)

    def _fold_ends(self, errors: list[dict[str, Any]], lost_peer: Callable[[str, str], bool]) -> None:
        """One incident for the end of each start: the first exception that no lost peer caused, of whichever rank."""
        shown, ends = self.incidents, dict[int, list[dict[str, Any]]]()
        for one in (*(one for one in shown if one["kind"] in ("error", "died")), *errors):
            ends.setdefault(self._start_of(one), []).append(one)
        for start, several in ends.items():
            raised = sorted((one for one in several if one["kind"] == "error"), key=lambda one: one["t"] or 0.0)
            causes = [one for one in raised if not lost_peer(str(one.get("type")), str(one.get("text")))]
            end = (causes or [one for one in several if one["kind"] == "died"] or raised)[0]
            if end["kind"] == "error":
                told = [one for one in raised if all(one.get(name) == end.get(name) for name in ("type", "text"))]
                other = [one for one in raised if one not in told]
                if self.newest_start.get("world_size") != 1:
                    end["who"], end["others"] = (ranks_text(one["rank"] or 0 for one in some) for some in (told, other))
                end["lost_peer"] = not causes
                if causes:
                    end["logs"] = None
                if start == len(self.began) and self.status == "died":
                    self.status = "failed"
            folded = set(map(id, several))
            at = next((n for n, one in enumerate(shown) if id(one) in folded), None)
            if at is None:
                at = next((n for n, one in enumerate(shown) if (one["t"] or 0.0) > (end["t"] or 0.0)), len(shown))
            self.counts.subtract(one["kind"] for one in shown if id(one) in folded)
            self.counts[end["kind"]] += 1
            before, after = ([one for one in part if id(one) not in folded] for part in (shown[:at], shown[at:]))
            shown = [*before, end, *after]
        self.counts = +self.counts
        self.first_incidents = shown[:INCIDENTS]
        self.last_incidents = deque(shown[INCIDENTS:], maxlen=INCIDENTS)


def _incident(kind: str, event: Mapping[str, Any]) -> dict[str, Any]:
    t, update, rank = number(event.get("t")), _whole(event.get("update")), _whole(event.get("rank"))
    t = t if t and 0 < t < 1e11 else None  # a year that calendars know
    return {**_shown(event), "t": t, "update": update, "rank": rank, "kind": kind}


def ranks_text(ranks: Iterable[int]) -> str:
    """ "rank 1", "ranks 0, 2", or nothing."""
    found = sorted(set(ranks))
    more = f" and {len(found) - 8:,} more" if len(found) > 8 else ""
    return f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found[:8]))}{more}" if found else ""


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else None


def _numbers(values: object) -> dict[str, float]:
    pairs = list(values.items())[:NAMES] if isinstance(values, dict) else []
    return {clean(name)[:60]: value for name, one in pairs if (value := number(one)) is not None}


def _shown(value: Any) -> Any:
    """A value of an event as something that can be shown: numbers as they are, long things cut."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, list):
        more = f", ... ({len(value):,} in all)" if len(value) > 8 else ""
        return ", ".join(clean(one)[:80] for one in value[:8]) + more
    if isinstance(value, dict):
        return {clean(key)[:60]: _shown(one) for key, one in list(value.items())[:NAMES]}
    return clean(str(value)[: 4 * TEXT])[:TEXT]


def _no_run(path: Path, error: OSError) -> UsageError:
    inside = sorted(clean(one.parent) for one in path.glob("*/events.jsonl"))[:5]
    fix = [f"evener report {one}" for one in inside] or ["evener report runs/NAME: what Run(dir=...) made"]
    why = f"events.jsonl cannot be read ({clean(error.strerror or error)})" if path.exists() else "it does not exist"
    return UsageError(f"{clean(path)} is no run directory: {why}.", fix=fix)
