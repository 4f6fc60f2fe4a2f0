"""What a run shows and writes while it trains, without making the training wait.

Values of an update are copied from the device without blocking and shown when they have arrived, one update later. A
point is taken at most every 50 ms, and more rarely as a run gets long: the cost stays below a hundredth of the time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import torch

from evener.engine.update import Update
from evener.report.console import Console
from evener.report.curves import Curves
from evener.report.events import read_events
from evener.report.folder import RunFolder
from evener.report.goodput import goodput
from evener.run.pulse import Pulse
from evener.run.silent import Growth

_SHORTEST, _LONGEST, _POINTS = 0.1, 10.0, 500
_Waiting = tuple[Update, torch.Tensor, float, float, Any, int]


class Output:
    """Rank 0's console, events and curves; on other ranks the same object only keeps their pulse."""

    def __init__(self, active: bool, dir: Any, logger: Any, *, continues: bool = False) -> None:
        self.active, self.continues = active, continues
        self.console = Console(active)
        self.folder = RunFolder(dir, active=active, say=self.console.say, continues=continues)
        self.curves = Curves(self.folder, logger)
        self.pulse = Pulse()
        self.growth = Growth()
        self.began = time.perf_counter()
        self.due = 0.0
        self.rows = 0  # since the last point
        self.since = self.began
        self.number = 0  # of the newest update
        self.waiting: _Waiting | None = None
        self.total: int | None = None

    def update(self, update: Update, rows: int, done: int, total: int | None) -> None:
        """After every update, `done` of `total`. A clock reading when no point is due; never waits for the device."""
        now, pulse = time.perf_counter(), self.pulse
        pulse.stepped += now - pulse.mark  # here, because a call is what an update of a tiny network is made of
        pulse.mark = now
        pulse.updates += 1
        self.number = update.number
        if now >= pulse.due:
            pulse.write(update.number, now)
            if now >= pulse.split_due:
                self._write_split(update.number, now)
            if self.active:
                self._watch_memory(update.number)
        if not self.active:
            return
        self.rows += rows
        self.total = total
        if self.waiting is not None:
            self._land(total)
        if now < self.due and (total is None or done < total):
            return
        self.due = now + min(_LONGEST, max(_SHORTEST, (now - self.began) / _POINTS))
        vector = update.vector()
        event = None
        if vector.is_cuda:
            vector = vector.to("cpu", non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        seconds = now - self.since
        speed = self.rows / seconds if seconds > 0 else 0.0
        self.waiting = (update, vector, speed, self.pulse.share(), event, done)
        self.rows, self.since = 0, now

    def after_last(self) -> None:
        """The body of the last update is over, what it printed stands: now the line with its values."""
        if self.waiting is not None and self.total is not None and self.waiting[-1] >= self.total:
            self._land(self.total, wait=True)

    def _write_split(self, number: int, now: float) -> None:
        self.event_of_rank("phases", number, self.pulse.split(now))

    def event_of_rank(self, kind: str, number: int, fields: dict[str, Any]) -> None:
        """What every rank writes: rank 0's among the others, another rank's in a file of its own."""
        if self.active:
            self.folder.event(kind, update=number, **fields)
        else:
            self.pulse.tell(kind, number, fields)

    def _watch_memory(self, number: int) -> None:
        """Once a second, 20 us."""
        device = self.pulse.device
        used = torch.cuda.memory_allocated(device) if device.type == "cuda" else self.pulse.process.memory_info().rss
        if line := self.growth.add(number, used):
            self.console.say(line)
            self.folder.event("warning", update=number, text=line)

    def _land(self, total: int | None, *, wait: bool = False) -> None:
        assert self.waiting is not None
        update, vector, speed, data_wait, event, done = self.waiting
        if event is not None and not wait and not event.query():
            return
        if event is not None:
            event.synchronize()
        self.waiting = None
        update.landed(vector.tolist())
        values = {"loss": update.loss, **update.metrics, "lr": update.lr}
        self.console.progress(done, total, {**values, "rows_per_second": speed})
        fields: dict[str, Any] = {
            name: getattr(update, name) for name in ("epoch", "loss", "metrics", "lr", "grad_norm")
        }
        fields |= {"rows_per_second": speed, "data_wait": round(data_wait, 4)}
        counted, computed = update.count, update.rows  # tokens, where the loss counts them
        if computed and counted != computed:
            fields["count_per_second"] = speed * counted / computed
        self.folder.event("update", update=update.number, **fields)
        points: dict[str, float] = {f"train/{name}": value for name, value in values.items()}
        points |= {"train/grad_norm": update.grad_norm, "train/rows_per_second": speed}
        self.curves.log(points, update.number)

    def finish_loop(self, total: int | None) -> None:
        """The loop ended: show the last values, take the bar away."""
        if self.waiting is not None:
            self._land(total, wait=True)
        if self.pulse.updates > self.pulse.at_split[3]:
            self._write_split(self.number, time.perf_counter())
        self.console.close()

    def log(self, values: Mapping[str, Any], step: int) -> None:
        if not self.active:
            return
        if self.waiting is not None and self.waiting[0].number < step:
            self._land(self.total, wait=True)  # loggers drop a point that comes after a later one
        self.curves.log(values, step)

    def say_goodput(self) -> None:
        """The last line of a run that was interrupted: what that cost."""
        path = self.folder.path
        with contextlib.suppress(OSError):
            # Only a run that continued has anything to tell: the others do not read their events again.
            told = path if self.active and self.continues else None
            cost = goodput(read_events(told / "events.jsonl")) if told is not None else None
            if cost is not None and cost.restarts:
                self.console.say(f"finished: {cost}")

    def close(self) -> None:
        self.pulse.close()
        self.console.close()
        self.curves.close()
        self.folder.close()
