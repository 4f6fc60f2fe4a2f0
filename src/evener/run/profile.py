"""`profile=range(10, 15)`: a trace of those updates, which Perfetto and TensorBoard open."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from evener.errors import UsageError


class Profile:
    """Traces the updates of one range on this rank, once. Recording makes these updates slower; it says by how much."""

    def __init__(self, updates: Any, device: torch.device) -> None:
        self.updates: range | None = None
        if updates is not None:
            if not isinstance(updates, range) or updates.step != 1 or updates.start < 0 or not len(updates):
                raise UsageError(
                    f"profile={updates!r} is not a range of updates.", fix=["profile=range(10, 15): updates 10 to 14"]
                )
            self.updates = updates
        self.activities = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            self.activities.append(torch.profiler.ProfilerActivity.CUDA)
        self.profiler: Any = None
        self.before = self.began = 0.0

    def at(self, update: int, folder: Path | None, rank: int) -> str | None:
        """Called before every update. Returns a line to show when the trace is written."""
        if self.updates is None:
            return None
        if update == self.updates.start - 1:
            self.before = time.perf_counter()
        if update == self.updates.start:
            self.before = time.perf_counter() - self.before if self.before else 0.0
            self.profiler = torch.profiler.profile(activities=self.activities, record_shapes=True)
            self.profiler.__enter__()
            self.began = time.perf_counter()
        elif self.profiler is not None and update >= self.updates.stop:
            return self.stop(folder, rank)
        return None

    def stop(self, folder: Path | None, rank: int) -> str | None:
        if self.profiler is None:
            return None
        seconds = (time.perf_counter() - self.began) / len(self.updates or (0,))
        profiler, self.profiler, self.updates = self.profiler, None, None
        profiler.__exit__(None, None, None)
        if folder is None:
            return None
        path = folder / f"rank{rank}.pt.trace.json"
        profiler.export_chrome_trace(str(path))
        cost = f" ({seconds / self.before:.1f} times as slow as the update before)" if self.before else ""
        return f"trace of {len(self.updates or ())} updates: {path}{cost}"
