"""What one rank's step is made of: the engine and the copy to the device call `lap` where a phase ends.

On a CPU every update is timed with the host's clock. On CUDA the host runs ahead of the device, so that its clock says
nothing: one update a second is marked with CUDA events, which are read later, when they have passed by themselves;
nothing waits for them. Untested on CUDA. On other devices nothing is known, and nothing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

# In the order of a step. `reduction` is what the backward did not hide; `other` the rest of the step; `body` is the
# loop's own body, with evaluations and checkpoints.
PHASES = ("data_wait", "host_to_device", "forward", "backward", "reduction", "optimizer", "other", "body")
_OUTSIDE = ""  # the name of a lap that ends what belongs to no phase
_SAMPLE_SECONDS = 1.0
Split = tuple[dict[str, float], int] | None


class HostPhases:
    """The host's clock: for a device that computes while the host waits.

    `lap(name)`: the phase ends here; it began with the lap before. `take`: (seconds per phase, updates they are of)
    since it was asked last, given the host's seconds of waiting for rows, of steps, and of the loop's body.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys((_OUTSIDE, *PHASES), 0.0)
        self.mark = time.perf_counter()

    def lap(self, name: str, clock: Callable[[], float] = time.perf_counter) -> None:
        now = clock()
        self.seconds[name] += now - self.mark
        self.mark = now

    def take(self, waited: float, stepped: float, rest: float, updates: int) -> Split:
        split = {name: self.seconds[name] for name in PHASES}
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        split |= {"data_wait": waited, "body": rest, "other": max(0.0, stepped - sum(split.values()))}
        return (split, updates) if updates else None


class DevicePhases:
    """Events of `marker` around the phases of one update a second, from the end of the one before to its own end."""

    def __init__(self, marker: Callable[[], Any]) -> None:
        self.marker, self.due = marker, 0.0
        self.open: list[tuple[str, Any]] | None = None  # the update that is being marked
        self.marked: list[list[tuple[str, Any]]] = []  # whole ones, which the device may still have before it

    def lap(self, name: str) -> None:
        if self.open is not None:
            self.open.append((name, self.marker()))
            if name == "optimizer":
                self.marked.append(self.open)
                self.open = None
        elif name == "optimizer" and len(self.marked) < 64 and time.perf_counter() >= self.due:
            self.due = time.perf_counter() + _SAMPLE_SECONDS
            self.open = [(_OUTSIDE, self.marker())]

    def take(self, waited: float, stepped: float, rest: float, updates: int) -> Split:
        split, number = dict.fromkeys(PHASES, 0.0), 0
        while self.marked and self.marked[0][-1][1].query():
            laps, number = self.marked.pop(0), number + 1
            spans = [(name, start.elapsed_time(end) / 1000) for (_, start), (name, end) in pairwise(laps)]
            for name, seconds in spans:
                split[name] = split.get(name, 0.0) + seconds
            idle = split.pop(_OUTSIDE)
            # The device had nothing to do: while the host waited for rows, then in the loop's body, else in the step.
            for phase, host in (("data_wait", waited), ("body", rest)):
                part = min(idle, host / max(1, updates))
                split[phase], idle = split[phase] + part, idle - part
            split["other"] += idle
        return (split, number) if number else None


Phases = HostPhases | DevicePhases


def phases_of(device: torch.device) -> Phases | None:
    """None on a device whose phases cannot be told apart."""
    if device.type == "cpu":
        return HostPhases()
    return DevicePhases(_marker) if device.type == "cuda" else None


def _marker() -> Any:
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
