"""Which cut: every combination of the factors that are open, priced, judged against the device, and one chosen.

    total = reserved + context + communicators             reserved: the replayed allocator's peak, not the tensors' sum
    low   = allocated and the smallest overheads           high: reserved + 12 % and the largest overheads

The replay was 1 to 9 % below published GPU runs in all four cases that could be compared, so a cut *fits* only where
`high` does, is *tight* where the device may be enough, and else *does not fit*. On the CPU there is no cache of the
allocator: what is allocated is what is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evener import facts
from evener.errors import EvenerError, UsageError
from evener.facts import GIB, MIB
from evener.plan import clock
from evener.plan.allocator import replay
from evener.plan.captured import Captured
from evener.plan.clock import Machine
from evener.plan.memory import Family, peak_of, support, terms_of
from evener.plan.values import Cut, Share, Term, Trace

RESERVED_MARGIN = 0.12
# After so long, once a cut fits, the rest is left out unless asked for; sooner what only a comparison would take.
ENOUGH_SECONDS, ENOUGH_FOR_OTHERS = 90.0, 40.0
RECOMPUTE = ("none", "selective", "full")
_ORDER = ("single", "ddp", "dp", "hsdp", "fsdp")  # what is simpler and moves less, first
_STATES = {"SGD": 0, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2}  # at least so many copies of the parameters

Tracer = Callable[[Cut, float | None], Trace]  # TimeoutError where it takes longer than so many seconds


@dataclass(frozen=True)
class Row:
    """One cut, judged. Bytes of one rank; `seconds` of one update; None where it is not known or not possible."""

    cut: Cut
    verdict: str  # "fits", "tight", "does not fit", "not possible"
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    seconds_per_update: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    data_seconds: float | None = None  # of reading its rows, where that was measured
    bound_by: str | None = None  # "compute" or "data"; None where one of both is not known
    rows_per_second: float | None = None
    phase: str = ""
    how: str = ""
    at_peak: tuple[Share, ...] = ()
    terms: tuple[Term, ...] = ()
    untraced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""  # why it is not possible, or does not fit whatever its activations are

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        return {**values.pop("cut"), **values}


@dataclass(frozen=True)
class Plan:
    """What was decided, why, and everything that was compared. Frozen."""

    chosen: Row | None
    because: tuple[str, ...]
    cuts: tuple[Row, ...]
    machine: Machine
    global_batch_size: int
    neighbours: tuple[str, ...] = ()
    untraced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)  # decided, for what the script leaves open
    overrides: Mapping[str, Any] = field(default_factory=dict)  # given to the planning with --set

    def to_json(self) -> dict[str, Any]:
        """The contract of `evener plan --json`."""
        machine = {name: getattr(self.machine, name) for name in ("name", "device", "capacity_bytes", "nodes")}
        return {
            **vars(self),
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "cuts": [row.to_json() for row in self.cuts],
            "machine": {**machine, "kind": self.machine.kind_name},
        }


class Book:
    """Traces that were made, and any cut of their families: few are traced, the rest follows from them."""

    def __init__(self, tracer: Tracer, say: Callable[[str], None]) -> None:
        self.tracer, self.say = tracer, say
        self.progress = ""
        self.made: dict[Cut, Trace] = {}
        self.began, self.seconds = time.monotonic(), 0.0  # seconds: of tracing alone
        self.until: float | None = None  # on the same clock; None: as long as it takes
        self.families: dict[Cut, Family | None] = {}
        self.refused: dict[Cut, EvenerError] = {}

    def traced(self, cut: Cut) -> Trace:
        """The trace itself. What was refused once in a family is refused again without asking."""
        if cut.family in self.refused:
            raise self.refused[cut.family]
        if cut not in self.made:
            began = time.monotonic()
            left = None if self.until is None else self.until - began
            if left is not None and left <= 0:
                raise TimeoutError(cut.words())
            self.say(f"{self.progress}tracing {cut.words()}")
            try:
                self.made[cut] = self.tracer(cut, left)
            except EvenerError as error:
                self.refused[cut.family] = error
                raise
            finally:
                self.seconds += time.monotonic() - began
        return self.made[cut]

    def trace(self, cut: Cut) -> Trace:
        """Of any cut: traced, or put together from traces of other sizes."""
        if cut in self.made:
            return self.made[cut]
        if cut.family not in self.families:
            few = replace(cut, microbatches=min(2, cut.microbatches))
            try:
                self.families[cut.family] = Family([self.traced(one) for one in support(few)])
            except UsageError:  # the step itself is another one at another size: each is traced by itself
                self.families[cut.family] = None
        family = self.families[cut.family]
        return family.trace(cut) if family is not None and family.covers(cut) else self.traced(cut)


def price(trace: Trace, machine: Machine, captured: Captured) -> Row:
    """A row from a trace: what it reserves, whether that fits, how long it takes."""
    cut, peak, terms = trace.cut, peak_of(trace), terms_of(trace)
    base, room = _overheads(cut, machine, captured), machine.capacity_bytes
    allocated = peak.bytes + sum(term.bytes for term in terms)
    low = peak.least + sum(term.low_bytes for term in (*terms, *base))
    high = peak.bytes + sum(term.high_bytes for term in terms)
    reserved, again = allocated, False
    if machine.device == "cuda":
        workspaces = [*(term.bytes for term in terms), trace.rest_bytes]
        reserved = max(allocated, replay(trace.events, workspaces=workspaces).reserved_bytes)
        high = max(high, int(reserved * (1 + RESERVED_MARGIN)))
        left = room - sum(term.bytes for term in base)
        if low <= room < reserved + room - left:  # the allocator gives back what it keeps before it gives up
            again = replay(trace.events, workspaces=workspaces, capacity=max(0, left)).failed_at is None
    total = reserved + sum(term.bytes for term in base)
    high += sum(term.high_bytes for term in base)
    computed = clock.seconds(trace, machine, tf32=cut.precision == "tf32")
    took, data, bound = clock.with_data(computed, cut, machine, captured)
    guessed = [f"{term.name}: {term.source}" for term in terms if term.how == "guessed"]
    return Row(
        cut,
        "fits" if high <= room else "tight" if total <= room or again else "does not fit",
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        device_total_bytes=total,
        low_bytes=low,
        high_bytes=high,
        seconds_per_update=took.mid,
        seconds_low=took.low,
        seconds_high=took.high,
        data_seconds=data,
        bound_by=bound,
        rows_per_second=captured.global_batch_size / took.mid if took.mid else None,
        phase=peak.phase,
        how=trace.how,
        at_peak=peak.at_peak,
        terms=(*terms, *base),
        untraced=tuple(dict.fromkeys((*trace.untraced, *guessed))),
        notes=tuple(dict.fromkeys((*trace.notes, *took.because))),
    )


def _overheads(cut: Cut, machine: Machine, captured: Captured) -> list[Term]:
    """What the process holds on the device beside torch's allocator."""
    if machine.device != "cuda":
        held = captured.process_bytes
        return [Term("libraries and dataset in this process", held, held, int(held * 1.2), "modelled", "measured here")]

    def term(name: str, row: str) -> Term:
        found = machine.calibration.get(f"{row}_bytes")
        if found is not None:
            return Term(name, int(found), int(found), int(found * 1.1), "modelled", "calibration")
        sizes = facts.overheads()[row]
        low, mid, high = (int(sizes[end] * MIB) for end in ("low", "mid", "high"))
        return Term(name, low, mid, high, "guessed", sizes["source"])

    terms = [term("CUDA context and kernels", "context")]
    terms += [term("NCCL", "nccl")] * (cut.world_size > 1)
    terms += [term("NCCL, second communicator", "more_nccl")] * (cut.world_size > 1 and cut.strategy == "hsdp")
    return terms


def microbatches(captured: Captured, world: int) -> list[int]:
    """Sizes worth looking at, largest first: what the script says, else the rank's rows halved again and again."""
    if captured.slice_size is not None:
        return [captured.slice_size]
    most = -(-captured.global_batch_size // world)
    given = captured.asked("microbatch_size")
    if given is not None:
        return [min(int(given), most)]
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def with_microbatch(cut: Cut, captured: Captured, size: int) -> Cut:
    """The cut with so many rows at once; the pieces of a rank are balanced, so they may be a little smaller."""
    rows = -(-captured.global_batch_size // cut.world_size)
    if captured.slice_size is not None:
        slices = -(-captured.global_batch_size // captured.slice_size)
        return replace(cut, microbatch_size=size, microbatches=-(-slices // cut.world_size))
    pieces = -(-rows // size)
    return replace(cut, microbatch_size=-(-rows // pieces), microbatches=pieces)


def combinations(captured: Captured, machine: Machine, world: int) -> list[Cut]:
    """Open factors, in the order in which a cut is preferred; microbatches are left at 1.

    Every strategy before more is computed again; what changes activations, and the other precision, come last.
    """
    strategy, kept = captured.asked("strategy"), captured.asked("saved_activations")
    strategies = ["single"] if world == 1 else ["ddp", *["hsdp"] * (machine.nodes > 1), "fsdp"]
    natural, again = natural_precision(captured, machine), captured.asked("activation_checkpointing")
    first = []
    for name in strategies if strategy is None else [strategy]:
        ranks, devices = (1, world) if name == "dp" else (world, 1)
        replicas = machine.nodes if name == "hsdp" else 1
        first.append(Cut(name, natural, "none", kept or "keep", 1, 1, ranks, devices, replicas))
    cuts = [replace(one, activation_checkpointing=how) for how in ([again] if again else RECOMPUTE) for one in first]
    if machine.device == "cuda" and kept is None and again in (None, "none"):
        cuts += [replace(one, saved_activations=how) for one in first for how in ("offload", "int8")]
    if natural != "fp32" and captured.asked("precision") is None:  # shown once, for comparison; never chosen
        cuts.append(replace(first[0], precision="fp32", activation_checkpointing=again or "none"))
    return cuts


def natural_precision(captured: Captured, machine: Machine) -> str:
    """What the run itself would take: the script's, or what precision="auto" is on this device."""
    given = captured.asked("precision")
    if isinstance(given, str):
        return given
    if machine.device != "cuda":
        return captured.cpu_precision
    capability = machine.capability
    return "bf16" if capability is None or capability >= (8, 0) else "fp16"


def rows_of(
    book: Book, captured: Captured, machine: Machine, world: int, *, everything: bool = True
) -> tuple[list[Row], list[Cut]]:
    """Every combination: the largest microbatch that fits, after those that do not; and what was left out."""
    rows: list[Row] = []
    left: list[Cut] = []
    cuts = combinations(captured, machine, world)
    for number, cut in enumerate(cuts, 1):
        book.progress = f"{number}/{len(cuts)} "
        if not everything and any(row.verdict == "fits" for row in rows):
            other = cut.precision != cuts[0].precision or cut.saved_activations != cuts[0].saved_activations
            book.until = book.began + (ENOUGH_FOR_OTHERS if other else ENOUGH_SECONDS)
        try:
            rows += list(_sizes(book, cut, captured, machine))
        except TimeoutError:
            left.append(cut)
    plain = {_figures(row): row for row in rows if row.cut.saved_activations == "keep"}
    rows = [row for row in rows if row.cut.saved_activations == "keep" or _figures(row) not in plain]
    rows.sort(key=lambda row: (_ORDER.index(row.cut.strategy), row.cut.precision != cuts[0].precision))
    return rows, left


def _figures(row: Row) -> tuple[Any, ...]:
    """Rows with the same ones, saved_activations apart, are shown once: there is nothing that it changes."""
    cut, total = replace(row.cut, saved_activations="keep"), row.device_total_bytes
    return (cut, row.verdict, row.peak_allocated_bytes, total) if total else (row.cut,)


def _sizes(book: Book, cut: Cut, captured: Captured, machine: Machine) -> Iterator[Row]:
    """From the largest microbatch on, until one fits. Where what is there without activations is too much, nothing is
    traced."""
    sizes = microbatches(captured, cut.world_size)
    least = states_bytes(cut, captured)
    if least > machine.capacity_bytes:
        reason = f"parameters, gradients and optimizer state alone take {amount(least)}"
        yield Row(with_microbatch(cut, captured, sizes[-1]), "does not fit", low_bytes=least, reason=reason)
        return
    for size in sizes:
        asked = with_microbatch(cut, captured, size)
        try:
            if asked.microbatches == 1 and len(sizes) > 2 and book.seconds > 2 * len(book.made):
                # Two pieces of this size need at most the gradients more: where they are far too large, so is one, and
                # a family of traces is saved. Every size below needs those of two pieces anyway.
                twice = price(book.trace(replace(asked, microbatches=2)), machine, captured)
                if (twice.low_bytes or 0) - captured.parameter_bytes > machine.capacity_bytes:
                    continue
            row = price(book.trace(asked), machine, captured)
        except EvenerError as error:
            yield Row(asked, "not possible", reason=" ".join([error.cause, *error.evidence[:1]]))
            return
        yield row
        if row.verdict == "fits":
            return


def states_bytes(cut: Cut, captured: Captured) -> int:
    """Certainly there when the optimizer steps, whatever the activations are."""
    width = 0.5 if cut.precision.endswith("-true") else 1.0
    states = min((_STATES.get(name, 0) for name in captured.optimizers), default=0)
    trained = captured.trainable / max(1, captured.parameters)
    return int(captured.parameter_bytes * width * (1 + (1 + states) * trained) / cut.shards)


def choose(rows: Iterable[Row], precision: str, saved: str | None = None) -> tuple[Row | None, list[str]]:
    """The fastest cut that fits; without known times the simplest, with the largest microbatch. And why.

    Of the run's own precision, and without lossy activations unless the script asks for them (`saved`).
    """
    able = [
        row
        for row in rows
        if row.cut.precision == precision and row.cut.saved_activations in ("keep", "offload", saved)
    ]
    fit = [row for row in able if row.verdict == "fits"]
    why = [] if fit else ["nothing fits with certainty; the run's out-of-memory ladder may have to cut further"]
    able = fit or [row for row in able if row.verdict == "tight"]
    if not able:
        return None, ["no cut fits"]

    def simple(row: Row) -> tuple[int, int, bool, int]:
        cut, again = row.cut, row.cut.activation_checkpointing
        recompute = RECOMPUTE.index(again) if again in RECOMPUTE else 1
        return _ORDER.index(cut.strategy), recompute, cut.saved_activations != "keep", cut.microbatches

    times = [(row, row.seconds_per_update) for row in able if row.seconds_per_update is not None]
    if not times:
        return min(able, key=simple), [*why, "times are not known: the simplest cut that fits, in the fewest pieces"]
    # Within 3 % times are equal, as far as a roofline can tell.
    least = min(took for _, took in times)
    near = [row for row, took in times if took <= least * 1.03]
    if len(able) > 1:
        known = f"; of {len(able) - len(times)} the time is not known" if len(times) < len(able) else ""
        why.append(f"the fastest of the {len(able)} cuts in {precision} that {'fit' if fit else 'may fit'}{known}")
        why += [f"{len(near)} are within 3 % of each other: the simplest of them"] * (len(near) > 1)
    return min(near, key=simple), why


def fragments(trace: Trace, row: Row, machine: Machine) -> list[str]:
    """What torch's other allocator setting would save, where that is more than 3 %."""
    if machine.device != "cuda" or row.peak_reserved_bytes is None:
        return []
    other = replay(trace.events, expandable=True, workspaces=[term.bytes for term in terms_of(trace)])
    if other.reserved_bytes > row.peak_reserved_bytes * 0.97:
        return []
    less, setting = amount(other.reserved_bytes), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return [f"{setting} would reserve {less} in place of {amount(row.peak_reserved_bytes)}"]


def neighbour(book: Book, captured: Captured, other: Machine) -> str:
    """What the choice would be on another machine of the same kind, in one line."""
    world, several = other.gpus * other.nodes, other.nodes > 1
    unit, plural = ("GPU", "s") if other.device == "cuda" else ("process", "es")
    what = f"{world} {unit}{plural * (world > 1)}{f' on {other.nodes} nodes' * several}"
    if world > captured.global_batch_size:
        return f"{what}: not possible, the global batch has {captured.global_batch_size} rows"
    for cut in combinations(captured, other, world):  # the first that fits, for the sake of time
        if cut.precision == natural_precision(captured, other):
            try:
                chosen, _ = choose(_sizes(book, cut, captured, other), cut.precision, cut.saved_activations)
            except TimeoutError:
                return f"{what}: not compared, for the sake of time"
            if chosen is not None:
                took = chosen.seconds_per_update
                time = "" if took is None else f", {duration(took)} an update"
                return f"{what}: {chosen.cut.words()}, {amount(chosen.device_total_bytes)}{time} ({chosen.verdict})"
    return f"{what}: no cut fits"


def amount(count: int | None) -> str:
    """For readers: 12.34 GiB, 56.7 MiB, 8.9 KiB, ? where it is not known."""
    if count is None:
        return "?"
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB or count == 0 else f"{count / 1024:.1f} KiB"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
