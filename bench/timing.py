"""Timing that survives a busy machine: contestants take turns in short blocks, and only neighbours are compared."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]
cpu_clock: Clock = time.process_time  # one process, one thread, nothing waited for: immune to other people's load
wall_clock: Clock = time.perf_counter


@dataclass(frozen=True)
class Timings:
    """Seconds per update, one entry per round; the entries of one round were measured next to each other."""

    seconds: Mapping[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, name: str, other: str) -> float:
        """Median over rounds of name / other: below 1 where `name` is faster."""
        return statistics.median(a / b for a, b in zip(self.seconds[name], self.seconds[other]))

    def spread(self) -> str:
        """How far apart the rounds of each were: tenth to ninetieth percentile, as a share of the median."""
        parts = []
        for name, seconds in self.seconds.items():
            low, *_, high = statistics.quantiles(seconds, n=10, method="inclusive")
            parts.append(f"{name} {(high - low) / statistics.median(seconds):.0%}")
        return f"spread over {len(seconds)} rounds: {', '.join(parts)}"

    def noise(self, name: str, other: str) -> float:
        """The standard error of that ratio's median, from the rounds themselves."""
        return error_of_median([a / b for a, b in zip(self.seconds[name], self.seconds[other])])

    def added(self, name: str, other: str) -> float:
        """Median over rounds of name - other, in seconds per update."""
        return statistics.median(a - b for a, b in zip(self.seconds[name], self.seconds[other]))


def error_of_median(values: Sequence[float]) -> float:
    """From the distance of the quartiles, which a few odd rounds do not move."""
    low, _, high = statistics.quantiles(values, n=4)
    return 1.25 * (high - low) / 1.35 / len(values) ** 0.5


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    *,
    updates: int,
    rounds: int,
    warm_up: int,
    clock: Clock = cpu_clock,
    between: Callable[[], object] = lambda: None,
) -> Timings:
    """Blocks of `updates` calls of every contestant in turn, `rounds` times; every second round runs backwards.

    between: called before and after each block, inside the clock (a barrier, where several ranks take part).
    """
    for call in contestants.values():
        for _ in range(warm_up):
            call()
    gc.collect()
    gc.freeze()  # what is imported by now is not looked through again in somebody's block
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        names = list(contestants)
        for name in reversed(names) if number % 2 else names:
            call = contestants[name]
            between()
            began = clock()
            for _ in range(updates):
                call()
            between()
            seconds[name].append((clock() - began) / updates)
    gc.unfreeze()
    return Timings(seconds)
