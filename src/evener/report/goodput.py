"""What interruptions cost a run: updates made twice, seconds lost, and the share of the time that was of use.

Lost is the time from the moment whose state a continued run went on from to its first update afterwards. A stop that
was asked for is no loss, and the pause until the next start is left out.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.report.events import number, read_events
from evener.report.folder import read_json


@dataclass(frozen=True)
class Goodput:
    restarts: int
    redone_updates: int
    lost_seconds: float
    wall_seconds: float  # since the first start, pauses left out

    @property
    def share(self) -> float | None:
        """Between 0 and 1; None when no time has passed."""
        return max(0.0, 1 - self.lost_seconds / self.wall_seconds) if self.wall_seconds > 0 else None

    def __str__(self) -> str:
        redid = f"redid {self.redone_updates:,} update{'s' * (self.redone_updates != 1)}"
        times = f"{self.lost_seconds:.1f} s lost in {self.restarts} restart{'s' * (self.restarts != 1)}"
        share = "unknown" if self.share is None else f"{100 * self.share:.0f} %"
        return f"{redid}, {times}; goodput {share}"


def goodput(events: Iterable[Mapping[str, Any]]) -> Goodput | None:
    """Of one run directory's events, in their order. None when it never started."""
    first = last = stopped = lost_since = None
    saved: dict[str, float] = {}  # when the state of a checkpoint was the newest
    restarts, redone, lost, paused = 0, 0, 0.0, 0.0
    asked = False  # the newest start follows a stop that was asked for
    for event in events:
        kind, now = event.get("kind"), _finite(event.get("t"), -1.0)
        if not 0 <= now < 1e11:  # a year that calendars know
            continue
        if kind == "start":
            first = now if first is None else first
            asked = stopped is not None
            paused += max(0.0, now - stopped) if stopped is not None else 0.0
            stopped = None
        elif kind == "stop":
            stopped = now
        elif kind == "checkpoint":
            saved[Path(str(event.get("path"))).name] = now - _finite(event.get("seconds"))
        elif kind == "resume" and not asked:
            restarts += 1
            redone += int(_finite(event.get("redone_updates")))
            lost_since = saved.get(str(event.get("checkpoint")), last if last else now)
        elif kind == "update" and lost_since is not None:
            lost, lost_since = lost + max(0.0, now - lost_since), None
        last = now
    if first is None or last is None:
        return None
    return Goodput(restarts, redone, round(lost, 3), round(max(0.0, last - first - paused), 3))


def _finite(value: object, otherwise: float = 0.0) -> float:
    found = number(value)
    return found if found is not None and math.isfinite(found) else otherwise


def newest_update(folder: Path) -> int | None:
    """The number of the newest update that left a trace in a run directory; each rank leaves one a second."""
    numbers = [int(one["update"]) for one in read_json(folder, "pulse-rank*.json", "update")]
    with contextlib.suppress(OSError):
        updates = (one.get("update") for one in read_events(folder / "events.jsonl") if one["kind"] == "update")
        numbers += [number for number in updates if isinstance(number, int)]
    return max(numbers, default=None)
