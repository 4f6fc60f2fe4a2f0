"""`profile=range(10, 15)`: a trace of those updates, which Perfetto and TensorBoard open."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


class Profile:
    """Traces the updates of one range on this rank, once. Recording makes these updates slower; it says by how much."""

    def __init__(self, updates: range | None, device: torch.device, say: Callable[[str], None]) -> None:
        self.updates, self.say = updates, say
        self.activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self.activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler: Any = None
        self.before = float("inf")  # seconds of the fastest update so far
        self.began = 0.0
        self.traced = 0

    def at(self, update: int, folder: Path, rank: int) -> None:
        """Called before every update."""
        if self.updates is None:
            return
        if update <= self.updates.start:
            now = time.perf_counter()
            # The fastest, not the last: the first updates import, compile and learn.
            self.before = min(self.before, now - self.began) if self.began else self.before
            self.began = now
        if update == self.updates.start:
            self.profiler = torch.profiler.profile(activities=self.activities, record_shapes=True)
            self.profiler.__enter__()
            self.began = time.perf_counter()
        elif self.profiler is not None and update >= self.updates.stop:
            self.stop(folder, rank)
        self.traced += self.profiler is not None

    def stop(self, folder: Path, rank: int) -> None:
        """Write the trace, if one is being recorded, and say so. Every rank writes its own."""
        if self.profiler is None:
            return
        seconds = (time.perf_counter() - self.began) / self.traced
        profiler, self.profiler, self.updates = self.profiler, None, None
        profiler.__exit__(None, None, None)
        path = folder / f"rank{rank}.pt.trace.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)  # on another machine
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:  # a full disk does not end a training
            self.say(f"warning: the trace could not be written ({error})")
            return
        cost = f", {1000 * seconds:.3g} ms each"
        if math.isfinite(self.before):
            cost += f" instead of {1000 * self.before:.3g} ms without"
        self.say(f"trace of {self.traced} update{'s' if self.traced > 1 else ''}: {path}{cost}")
