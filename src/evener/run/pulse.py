"""Where a rank's time goes: waiting for rows, in the step, in the loop's body; kept beside the run while it lives.

Three clock readings an update, 0.7 us, and one per phase of the step (phases.py). Once a second each rank writes
`pulse-rankN.json` into the run directory, where `evener top` reads it. Nothing waits for the device: on a GPU the wait
for rows is the host's, an upper bound of the GPU's where rows are read in the training process (num_workers=0).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import torch

from evener.report.events import Events
from evener.run.busy import Busy
from evener.run.phases import Phases

_SECONDS, _BYTES = 1.0, 1000
_RAREST, _POINTS = 10.0, 500  # a `phases` event every 1 to 10 seconds: rarer as a run gets long
T = TypeVar("T")


class Pulse:
    """One rank's clock. Until `open` it measures and writes nothing; no failure of its file ends a training."""

    def __init__(self) -> None:
        self.descriptor, self.path = -1, Path()
        self.fixed: dict[str, Any] = {}
        self.device, self.process = torch.device("cpu"), psutil.Process()
        self.waited = self.stepped = self.rest = 0.0  # seconds since the beginning
        self.updates = 0
        self.at_write = self.at_point = self.at_split = (0.0, 0.0, 0.0, 0)
        self.phases: Phases | None = None
        self.events: Events | None = None
        self.busy: Busy | None = None
        self.began = self.mark = time.perf_counter()
        self.due = self.split_due = self.mark + _SECONDS

    def open(self, folder: Path, device: torch.device, **fixed: Any) -> None:
        """From now on `pulse-rankN.json` is written; `fixed` goes into it as it is."""
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
        self.fixed = {"pid": os.getpid(), "host": socket.gethostname(), "device": str(device), "gpu": gpu, **fixed}
        self.busy = Busy(gpu) if gpu is not None else None
        self.device, self.path = device, folder / f"pulse-rank{fixed['rank']}.json"
        with contextlib.suppress(OSError):  # another machine without this disk: nobody reads it there
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def timed(self, items: Iterable[T]) -> Iterator[T]:
        """`items`, with the time that each took to come. From one to the next it is the step's, then the body's."""
        iterator, clock = iter(items), time.perf_counter
        self.mark = clock()  # what came before the loop is nobody's
        while True:
            asked = clock()
            self.rest += asked - self.mark
            try:
                item = next(iterator)
            except StopIteration:
                return
            self.mark = clock()
            self.waited += self.mark - asked
            yield item

    def share(self) -> float:
        """The part of the time since this was last asked that the host waited for rows."""
        (waited, stepped, rest, _), self.at_point = self._since(self.at_point), self._totals()
        return waited / max(waited + stepped + rest, 1e-9)

    def split(self, now: float) -> dict[str, Any]:
        """Where the time went since this was last asked, and the memory now: the fields of a `phases` event."""
        self.split_due = now + min(_RAREST, max(_SECONDS, (now - self.began) / _POINTS))
        (waited, stepped, rest, updates), self.at_split = self._since(self.at_split), self._totals()
        known = self.phases.take(waited, stepped, rest, updates) if self.phases is not None else None
        fields: dict[str, Any] = {"updates": updates, "seconds": round(waited + stepped + rest, 6), "split": None}
        if known is not None:
            split = {name: round(value, 6) for name, value in known[0].items()}
            fields |= {"split": split, "measured_updates": known[1]}
        if self.device.type == "cuda":
            fields["memory_bytes"] = torch.cuda.memory_allocated(self.device)
            fields["gpu_utilization_percent"] = self.busy.take() if self.busy is not None else None
            return fields | {"peak_bytes": torch.cuda.max_memory_allocated(self.device)}
        return fields | {"memory_bytes": self.process.memory_info().rss}

    def tell(self, kind: str, update: int, fields: dict[str, Any]) -> None:
        """An event of another rank than 0, in `events-rankN.jsonl`; where there is no such folder, nowhere."""
        if self.descriptor >= 0:
            with contextlib.suppress(OSError):
                rank = self.fixed["rank"]
                self.events = self.events or Events(self.path.with_name(f"events-rank{rank}.jsonl"))
                self.events.write(kind, update=update, rank=rank, **fields)

    def close(self) -> None:
        """The run is over: nothing beats any more."""
        if self.busy is not None:
            self.busy.ended.set()
        if self.events is not None:
            self.events.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            if os.getpid() == self.fixed["pid"]:  # not a forked process that happens to drop the run
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def _totals(self) -> tuple[float, float, float, int]:
        return self.waited, self.stepped, self.rest, self.updates

    def _since(self, before: tuple[float, float, float, int]) -> tuple[float, float, float, int]:
        waited, stepped, rest, updates = before
        return self.waited - waited, self.stepped - stepped, self.rest - rest, self.updates - updates

    def write(self, update: int, now: float) -> None:
        self.due = now + _SECONDS
        (waited, stepped, rest, updates), self.at_write = self._since(self.at_write), self._totals()
        if self.descriptor < 0:
            return
        values = {"t": round(time.time(), 3), "update": update, "updates": updates, "seconds": waited + stepped + rest}
        values |= {"data_wait_seconds": waited, "step_seconds": stepped, "body_seconds": rest, **self.fixed}
        if self.device.type == "cuda":
            values["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            values["peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
        # In place and always as long: a rename over it would make the disk work, 2 ms a time. A reader who meets a
        # write in the middle sees no JSON and looks again.
        with contextlib.suppress(OSError):
            os.lseek(self.descriptor, 0, os.SEEK_SET)
            os.write(self.descriptor, json.dumps(values).encode("ascii").ljust(_BYTES) + b"\n")
