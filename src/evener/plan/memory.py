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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from evener.errors import UsageError
from evener.plan.values import PHASES, Alloc, Collective, Cut, Event, Free, Op, Share, Trace


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest sum of living storages. `phases`: the largest within each phase; `at_peak`: largest share first."""

    bytes: int
    phase: str
    phases: dict[str, int]
    at_peak: tuple[Share, ...]


def peak_of(trace: Trace) -> Peak:
    """The peak over both updates, with the rows of the batch that were not traced."""
    rest = (trace.cut.microbatches * trace.cut.microbatch_size - trace.rows) * trace.row_bytes
    rest = max(0, rest) * (trace.row_bytes > 0)
    now, top, position = rest, rest, -1
    phases = dict.fromkeys(PHASES, 0)
    sizes: dict[int, int] = {}
    for i, event in enumerate(trace.events):
        if isinstance(event, Alloc):
            sizes[event.id] = event.bytes
            now += event.bytes
            phases[event.phase] = max(phases[event.phase], now)
            if now > top:
                top, position = now, i
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
    last = trace.events[position] if position >= 0 else None
    ordered = sorted(shares.items(), key=lambda item: (-item[1], item[0]))
    at_peak = tuple(Share(category, module, size) for (category, module), size in ordered)
    return Peak(top, last.phase if isinstance(last, Alloc) else "start", phases, at_peak)


def by_category(at_peak: Iterable[Share]) -> dict[str, int]:
    """Bytes of each category, largest first."""
    sums: dict[str, int] = {}
    for share in at_peak:
        sums[share.category] = sums.get(share.category, 0) + share.bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


# ------------------------------------------------------------------------------------------------ extrapolation


def sharded(cut: Cut) -> bool:
    """Whether the world size changes what one rank holds."""
    return cut.strategy in ("fsdp", "hsdp") and cut.world_size > 1


class Family:
    """Traces that differ in microbatch and world size alone, and every cut between and beyond them.

    Args:
        traces: At least one; of one family (`Cut.family`), device and number of traced pieces. Two microbatches make
            the microbatch free, two world sizes the world size.

    Raises:
        UsageError: traces of different families, or that came apart: other events at another size.
    """

    def __init__(self, traces: Sequence[Trace]) -> None:
        self.base = base = traces[0]
        self.traces = {(one.cut.microbatch_size, one.cut.world_size): one for one in traces}
        rows = [one for one in traces if one.cut.world_size == base.cut.world_size]
        self.rows = next((one for one in rows if one.cut.microbatch_size != base.cut.microbatch_size), None)
        worlds = [one for one in traces if one.cut.microbatch_size == base.cut.microbatch_size]
        self.worlds = next((one for one in worlds if one.cut.world_size != base.cut.world_size), None)
        for one in traces[1:]:
            if one.cut.family != base.cut.family or one.device != base.device:
                raise UsageError(f"not of one family: {base.cut.words()} and {one.cut.words()}.")
        self.slopes_m = _slopes(base, self.rows)
        self.slopes_w = _slopes(base, self.worlds)

    def covers(self, cut: Cut) -> bool:
        """Whether `trace(cut)` can say something."""
        mine = self.base.cut
        return (
            cut.family == mine.family
            and (self.rows is not None or cut.microbatch_size == mine.microbatch_size)
            and (self.worlds is not None or cut.world_size == mine.world_size or not sharded(cut))
        )

    def trace(self, cut: Cut) -> Trace:
        """The events of `cut`: a trace that was made, or one put together from those that were."""
        made = self.traces.get((cut.microbatch_size, cut.world_size))
        if made is not None:
            return replace(made, cut=cut)
        if not self.covers(cut):
            raise UsageError(
                f"{cut.words()} cannot be extrapolated from {self.base.cut.words()}.",
                fix=["trace it, or one more microbatch or world size of the same family"],
            )
        mine = self.base.cut
        dm, dw = Fraction(0), Fraction(0)
        if self.rows is not None:
            width = self.rows.cut.microbatch_size - mine.microbatch_size
            dm = Fraction(cut.microbatch_size - mine.microbatch_size, width)
        if self.worlds is not None:
            width_w = Fraction(1, self.worlds.cut.world_size) - Fraction(1, mine.world_size)
            dw = (Fraction(1, cut.world_size) - Fraction(1, mine.world_size)) / width_w
        fm, fw = float(dm), float(dw)
        events = list(self.base.events)
        groups = {mine.world_size // mine.replicas: cut.world_size // cut.replicas, mine.world_size: cut.world_size}
        for i, event in enumerate(events):
            sm, sw = self.slopes_m.get(i), self.slopes_w.get(i)
            if sm or sw:
                event = events[i] = _moved(event, sm, fm, sw, fw)
            if isinstance(event, Collective) and event.group in groups:
                events[i] = replace(event, group=groups[event.group])
        return replace(
            self.base,
            cut=cut,
            events=tuple(events),
            rows=cut.microbatch_size * self.base.pieces,
            how="extrapolated",
        )


Slope = tuple[int, ...]
_FEW = 64  # events in a row that two traces may not share


def _slopes(base: Trace, other: Trace | None) -> dict[int, Slope]:
    """By position: what changes between two traces. Empty without another.

    The events are the same but for a few in one place (a value that was computed once and kept): those stay as they are
    in `base`.
    """
    if other is None:
        return {}
    mine, theirs = base.events, other.events
    alike, ends = min(len(mine), len(theirs)), 0
    first = next((i for i in range(alike) if _kind(mine[i]) != _kind(theirs[i])), alike)
    while ends < alike - first and _kind(mine[-1 - ends]) == _kind(theirs[-1 - ends]):
        ends += 1
    if max(len(mine), len(theirs)) - first - ends > _FEW:
        raise UsageError(
            f"the step is another one at {other.cut.words()} than at {base.cut.words()}.",
            evidence=[f"{len(mine)} and {len(theirs)} events; {first} alike from the front, {ends} from the end"],
            fix=["trace each microbatch by itself"],
        )
    pairs = [(i, i) for i in range(first)]
    pairs += [(len(mine) - k, len(theirs) - k) for k in range(1, ends + 1)]
    slopes: dict[int, Slope] = {}
    for i, j in pairs:
        before, after = _numbers(mine[i]), _numbers(theirs[j])
        if before != after and len(before) == len(after):
            slopes[i] = tuple(y - x for x, y in zip(before, after))
    return slopes


def _kind(event: Event) -> tuple[str, ...]:
    """What makes two events the same one at another size."""
    if isinstance(event, Alloc):
        return "alloc", event.category, event.module, event.phase
    if isinstance(event, Free):
        return "free", event.phase
    return event.name if isinstance(event, Op) else event.kind, event.phase


def _numbers(event: Event) -> tuple[int, ...]:
    if isinstance(event, Alloc | Collective):
        return (event.bytes,)
    if isinstance(event, Op):
        return (event.flops, event.bytes_read, event.bytes_written, *event.shape)
    return ()


def _moved(event: Event, sm: Slope | None, fm: float, sw: Slope | None, fw: float) -> Event:
    numbers = _numbers(event)
    moved = [max(0, round(x + (sm[k] * fm if sm else 0) + (sw[k] * fw if sw else 0))) for k, x in enumerate(numbers)]
    if isinstance(event, Alloc | Collective):
        return replace(event, bytes=moved[0])
    assert isinstance(event, Op)
    flops, read, written, *shape = moved
    return replace(event, flops=flops, bytes_read=read, bytes_written=written, shape=tuple(shape))
