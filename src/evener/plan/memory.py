"""From events to peaks, and from a few traces to all that lie between: the memory algebra of planning.

A trace is a sequence of births and deaths of storages; what is allocated at any moment is a sum, and the peak its
maximum. Every storage's size is affine in the microbatch m and in 1/world:

    bytes(m, W) = a + b * m + c / W

(parameters, their gradients and states are `a`, or `c` where they are sharded; activations are `b * m`). So two traces
with different m, and a third with another W, give every size exactly, up to the padding of shards. The order of births
and deaths does not depend on either. The peak is then taken of the sizes so found, not extrapolated itself: it is a
maximum of affine functions, with a kink wherever it moves from one phase to another.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from evener.errors import UsageError
from evener.plan.values import PHASES, Alloc, Collective, Cut, Event, Free, Op, Share, Term, Trace

_SIZES = (2, 4)  # microbatches to trace: one row takes other paths (squeezed dimensions, other kernels)
_WORLDS = (2, 4)  # shards to trace: what a trace costs grows with the world
_FEW = 64  # events in a row that two traces may not share


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of living storages over both updates, with the rows of the batch that were not traced.

    `least`: without scratch that lives inside of one operation. `phases`: the largest within each phase. `at_peak`:
    largest share first.
    """

    bytes: int
    least: int
    phase: str
    phases: dict[str, int]
    at_peak: tuple[Share, ...]


def peak_of(trace: Trace) -> Peak:
    now = top = least = rest = trace.rest_bytes
    position, phase = -1, "start"
    phases = dict.fromkeys(PHASES, 0)
    sizes: dict[int, int] = {}
    for i, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            sizes[event.id] = event.bytes
            now += event.bytes
            phases[event.phase] = max(phases[event.phase], now)
            if now > top:
                top, position, phase = now, i, event.phase
            following = trace.events[i + 1] if now > least and i + 1 < len(trace.events) else None
            if now > least and not (isinstance(following, Free) and following.id == event.id):
                least = now
        elif isinstance(event, Free):
            now -= sizes.pop(event.id)
    living: dict[int, Alloc] = {}
    for event in trace.events[: position + 1]:
        if isinstance(event, Alloc):
            living[event.id] = event
        elif isinstance(event, Free):
            del living[event.id]
    shares: dict[tuple[str, str], int] = {("batch", ""): rest} if rest else {}
    for one in living.values():
        key = (one.category, one.module)
        shares[key] = shares.get(key, 0) + one.bytes
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    return Peak(top, least, phase, phases, tuple(Share(*key, size) for key, size in ordered))


# ------------------------------------------------------------------------------------------------ extrapolation


def support(cut: Cut) -> list[Cut]:
    """What to trace so that `cut` and its family follow: two microbatches, and two world sizes where it is sharded.
    Just the cut itself where it is as small."""
    sizes = [cut.microbatch_size] if cut.microbatch_size <= _SIZES[0] else list(_SIZES)
    worlds = [cut.world_size]
    if cut.world_size > 1 and cut.strategy not in ("fsdp", "hsdp"):
        worlds = [_WORLDS[0]]
    elif cut.shards > _WORLDS[1]:
        worlds = [cut.replicas * shards for shards in _WORLDS]
    cuts = [replace(cut, microbatch_size=size, world_size=worlds[0]) for size in sizes]
    return cuts + [replace(cut, microbatch_size=sizes[0], world_size=world) for world in worlds[1:]]


class Family:
    """Traces that differ in microbatch and world size alone, and every cut between and beyond them.

    Raises:
        UsageError: traces of different families, or that came apart: other events at another size.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.base = base = traces[0]
        self.traces = {(one.cut.microbatch_size, one.cut.world_size): one for one in traces}
        self.rows = self.worlds = None
        for one in traces[1:]:
            if one.cut.family != base.cut.family or one.device != base.device:
                raise UsageError(f"not of one family: {base.cut.words()} and {one.cut.words()}.")
            if one.cut.world_size == base.cut.world_size:
                self.rows = self.rows or one
            elif one.cut.microbatch_size == base.cut.microbatch_size:
                self.worlds = self.worlds or one
        self.slopes_m = _slopes(base, self.rows)
        self.slopes_w = _slopes(base, self.worlds)

    def covers(self, cut: Cut) -> bool:
        """Whether `trace(cut)` can say something."""
        mine = self.base.cut
        return (
            cut.family == mine.family
            and (self.rows is not None or cut.microbatch_size == mine.microbatch_size)
            and (self.worlds is not None or cut.world_size == mine.world_size or cut.shards == 1)
        )

    def trace(self, cut: Cut) -> Trace:
        """The events of `cut`: a trace that was made, or one put together from those that were."""
        made = self.traces.get((cut.microbatch_size, cut.world_size))
        if made is not None:
            return replace(made, cut=cut)
        if not self.covers(cut):
            fix = ["trace it, or one more microbatch or world size of the same family"]
            raise UsageError(f"{cut.words()} cannot be extrapolated from {self.base.cut.words()}.", fix=fix)
        mine, fm, fw = self.base.cut, 0.0, 0.0
        if self.rows is not None:
            fm = (cut.microbatch_size - mine.microbatch_size) / (self.rows.cut.microbatch_size - mine.microbatch_size)
        if self.worlds is not None:
            fw = (1 / cut.world_size - 1 / mine.world_size) / (1 / self.worlds.cut.world_size - 1 / mine.world_size)
        events = list(self.base.events)
        for i in self.slopes_m.keys() | self.slopes_w.keys():
            events[i] = moved(events[i], (self.slopes_m.get(i), fm), (self.slopes_w.get(i), fw))
        groups = {mine.world_size // mine.replicas: cut.world_size // cut.replicas, mine.world_size: cut.world_size}
        for i, event in enumerate(events):
            if isinstance(event, Collective) and event.group in groups:
                events[i] = replace(event, group=groups[event.group])
        rows = cut.microbatch_size * self.base.pieces
        return replace(self.base, cut=cut, events=tuple(events), rows=rows, how="extrapolated")


Slope = tuple[int, ...]


def _slopes(base: Trace, other: Trace | None) -> dict[int, Slope]:
    """By position: what changes between two traces. Empty without another.

    The events are the same but for a few in one place (a value that was computed once and kept): those stay as they are
    in `base`.
    """
    if other is None:
        return {}
    mine, theirs = base.events, other.events
    alike, ends = min(len(mine), len(theirs)), 0
    first = next((i for i in range(alike) if kind(mine[i]) != kind(theirs[i])), alike)
    while ends < alike - first and kind(mine[-1 - ends]) == kind(theirs[-1 - ends]):
        ends += 1
    if max(len(mine), len(theirs)) - first - ends > _FEW:
        raise UsageError(
            f"the step is another one at {other.cut.words()} than at {base.cut.words()}.",
            evidence=[f"{len(mine)} and {len(theirs)} events; {first} alike from the front, {ends} from the end"],
            fix=["trace each microbatch by itself"],
        )
    pairs = [(i, i) for i in range(first)]
    pairs += [(len(mine) - k, len(theirs) - k) for k in range(1, ends + 1)]
    return {i: slope for i, j in pairs if (slope := difference(mine[i], theirs[j]))}


def kind(event: Event) -> tuple[str, ...]:
    """What makes two events the same one at another size."""
    if isinstance(event, Alloc):
        return "alloc", event.category, event.module, event.phase
    if isinstance(event, Free):
        return "free", event.phase
    return event.name if isinstance(event, Op) else event.kind, event.phase


def difference(one: Event, other: Event) -> Slope | None:
    """Of the sizes of two events of one kind; None where there is none."""
    before, after = _numbers(one), _numbers(other)
    if before == after or len(before) != len(after):
        return None
    return tuple(y - x for x, y in zip(before, after))


def _numbers(event: Event) -> tuple[int, ...]:
    if isinstance(event, Alloc | Collective):
        return (event.bytes,)
    return (event.flops, event.bytes_read, event.bytes_written, *event.shape) if isinstance(event, Op) else ()


def moved(event: Event, *along: tuple[Slope | None, float]) -> Event:
    """The event with its sizes moved along slopes, each so many times."""
    numbers = [float(x) for x in _numbers(event)]
    for slope, times in along:
        numbers = [x + times * dx for x, dx in zip(numbers, slope)] if slope else numbers
    flops, *more = [max(0, round(x)) for x in numbers]
    if isinstance(event, Alloc | Collective):
        return replace(event, bytes=flops)
    assert isinstance(event, Op)
    return replace(event, flops=flops, bytes_read=more[0], bytes_written=more[1], shape=tuple(more[2:]))


# ------------------------------------------------------------------------------------------------ beside the trace


@functools.cache
def workspaces() -> Mapping[str, Any]:
    """The table: what libraries allocate beside tensors, by library, with a source per row."""
    return tomllib.loads(resources.files("evener.plan").joinpath("workspaces.toml").read_text(encoding="utf-8"))


def rows_for(device: str, capability: tuple[int, int] | None) -> list[Mapping[str, Any]]:
    """The table's rows for a device."""
    number = 10 * capability[0] + capability[1] if capability else 80
    rows = [row for row in workspaces()["row"] if row["device"] == device]
    return [row for row in rows if row.get("from", 0) <= number <= row.get("to", 999)]


def scratch(row: Mapping[str, Any], result_bytes: int) -> int:
    """Bytes that a row says live inside of one operation with so large a result."""
    return int(result_bytes * row["of_result"][1]) + int(row["kib"] * 1024)


def terms_of(trace: Trace) -> list[Term]:
    """What is on the device and in no event."""
    ops: dict[str, int] = {}  # the largest result of each operation
    gradients: dict[str, int] = {}
    for event in trace.steady():
        if isinstance(event, Op):
            name = event.name.split(".")[1] if "." in event.name else event.name
            ops[name] = max(ops.get(name, 0), event.bytes_written)
        elif isinstance(event, Alloc) and event.category == "gradient":
            gradients[event.module] = gradients.get(event.module, 0) + event.bytes
    terms = []
    if (
        trace.cut.devices > 1
    ):  # dp's first device has the whole batch, and in the end the others' gradients beside its own
        size, source = sum(gradients.values()), "summed replicas arrive beside the first device's own; untested on CUDA"
        terms = [Term("DataParallel: gradients of the other replicas", 0, size, size, "modelled", source)]
    for row in rows_for(trace.device, trace.capability):
        largest = max((ops[name] for name in row["ops"] if name in ops), default=None)
        if largest is None:
            continue
        low, mid, high = (int(row[key] * 1024) for key in ("low_kib", "kib", "high_kib"))
        if "of_result" in row:  # the events have the middle already, and `Peak.least` is without it
            low, mid, high = 0, 0, max(0, int(largest * row["of_result"][2]) + high - scratch(row, largest))
        terms.append(Term(row["name"], low, mid, high, row["how"], row["source"]))
    return terms
