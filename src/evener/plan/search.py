"""Which cut: every combination of the factors that are open, priced, judged against the device, and one chosen.

    total = reserved + context + communicators             reserved: the replayed allocator's peak, not the tensors' sum
    low   = allocated and the smallest overheads           high: reserved + 12 % and the largest overheads

The replay was 1 to 9 % below published GPU runs in all four cases that could be compared, so a cut *fits* only where
`high` does, is *tight* where the device may be enough, and else *does not fit*. On the CPU there is no cache of the
allocator: what is allocated is what is taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from evener import facts
from evener.errors import EvenerError, UsageError
from evener.facts import GIB, MIB
from evener.plan import clock, estimate
from evener.plan.allocator import replay
from evener.plan.captured import Captured
from evener.plan.clock import Machine
from evener.plan.values import Cut, Share, Term, Trace

RESERVED_MARGIN = 0.12
ENOUGH_SECONDS = 60.0  # of tracing, when a cut that fits is found: then the rest is not compared unless asked
VERDICTS = ("fits", "tight", "does not fit", "not possible")
RECOMPUTE = ("none", "selective", "full")
_ORDER = ("single", "ddp", "dp", "hsdp", "fsdp")  # what is simpler and moves less, first

Tracer = Callable[[Cut], Trace]


@dataclass(frozen=True)
class Row:
    """One cut, judged. Bytes of one rank; `seconds` of one update; None where it is not known or not possible."""

    cut: Cut
    verdict: str
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_total_bytes: int | None = None
    low_bytes: int | None = None
    high_bytes: int | None = None
    seconds_per_update: float | None = None
    seconds_low: float | None = None
    seconds_high: float | None = None
    rows_per_second: float | None = None
    phase: str = ""
    how: str = ""
    at_peak: tuple[Share, ...] = ()
    terms: tuple[Term, ...] = ()
    untraced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""  # why it is not possible

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        cut = values.pop("cut")
        return {**cut, **values}


@dataclass(frozen=True)
class Plan:
    """What was decided, why, and everything that was compared. Frozen; JSON both ways."""

    chosen: Row | None
    because: tuple[str, ...]
    rows: tuple[Row, ...]
    machine: str
    capacity_bytes: int
    global_batch_size: int
    nodes: int = 1
    device: str = "cuda"
    kind: str = ""
    neighbours: tuple[str, ...] = ()
    untraced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)  # decided, for what the script leaves open
    overrides: Mapping[str, Any] = field(default_factory=dict)  # given to the planning with --set

    def to_json(self) -> dict[str, Any]:
        """The contract of `evener plan --json`."""
        return {
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "because": list(self.because),
            "cuts": [row.to_json() for row in self.rows],
            "untraced": list(self.untraced),
            "notes": list(self.notes),
            "neighbours": list(self.neighbours),
            "keywords": dict(self.keywords),
            "overrides": dict(self.overrides),
            "machine": {
                "name": self.machine,
                "device": self.device,
                "kind": self.kind,
                "capacity_bytes": self.capacity_bytes,
                "nodes": self.nodes,
            },
            "global_batch_size": self.global_batch_size,
        }


class Book:
    """Traces that were made, and any cut of their families: few are traced, the rest follows from them.

    Sizes are affine in the microbatch and in one over the number of shards (see `memory`).
    """

    def __init__(self, tracer: Tracer, say: Callable[[str], None]) -> None:
        self.tracer, self.say = tracer, say
        self.made: dict[Cut, Trace] = {}
        self.seconds = 0.0
        self.families: dict[tuple[Cut, int], estimate.Family | None] = {}
        self.refused: dict[Cut, EvenerError] = {}

    def traced(self, cut: Cut) -> Trace:
        """The trace itself. What was refused once in a family is refused again without asking."""
        if cut.family in self.refused:
            raise self.refused[cut.family]
        if cut not in self.made:
            self.say(f"tracing {cut.words()}")
            began = time.monotonic()
            try:
                self.made[cut] = self.tracer(cut)
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
        key = (cut.family, min(2, cut.microbatches))
        if key not in self.families:
            few = replace(cut, microbatches=min(2, cut.microbatches))
            traces = [self.traced(one) for one in estimate.support(few)]
            try:
                self.families[key] = estimate.Family(traces)
            except UsageError:  # the step itself is another one at another size: each is traced by itself
                self.families[key] = None
        family = self.families[key]
        return family.trace(cut) if family is not None and family.covers(cut) else self.traced(cut)


def price(trace: Trace, machine: Machine, captured: Captured) -> Row:
    """A row from a trace: what it reserves, whether that fits, how long it takes."""
    cut, told = trace.cut, estimate.of(trace)
    rest = (cut.microbatches * cut.microbatch_size - trace.rows) * trace.row_bytes  # rows that were not traced
    workspaces = [*(max(0, term.bytes) for term in told.terms), max(0, rest)]
    base = _overheads(cut, machine, captured)
    spread = {"low": told.low_bytes, "mid": told.peak_allocated_bytes, "high": told.high_bytes}
    reserved = told.peak_allocated_bytes
    if machine.device == "cuda":
        reserved = max(reserved, replay(trace.events, workspaces=workspaces).reserved_bytes)
        spread["mid"], spread["high"] = reserved, int(max(spread["high"], reserved) * (1 + RESERVED_MARGIN))
    low, mid, high = (spread[end] + sum(getattr(term, name) for term in base) for end, name in _ENDS)
    room = machine.capacity_bytes
    if high <= room:
        verdict = "fits"
    elif mid <= room:
        verdict = "tight"
    else:
        left = room - (mid - spread["mid"])
        short = machine.device == "cuda" and low <= room
        # The allocator gives back what it keeps before it gives up.
        again = short and replay(trace.events, workspaces=workspaces, capacity=max(0, left)).failed_at is None
        verdict = "tight" if again else "does not fit"
    took = clock.seconds(trace, machine, tf32=cut.precision == "tf32")
    return Row(
        cut,
        verdict,
        told.peak_allocated_bytes,
        reserved,
        mid,
        low,
        high,
        took.mid,
        took.low,
        took.high,
        captured.global_batch_size / took.mid if took.mid else None,
        told.phase,
        told.how,
        told.at_peak,
        (*told.terms, *base),
        tuple(dict.fromkeys((*told.untraced, *trace.untraced))),
        tuple(dict.fromkeys((*trace.notes, *took.because))),
    )


_ENDS = (("low", "low_bytes"), ("mid", "bytes"), ("high", "high_bytes"))


def _overheads(cut: Cut, machine: Machine, captured: Captured) -> list[Term]:
    """What the process holds on the device beside torch's allocator."""
    if machine.device != "cuda":
        held = captured.process_bytes
        return [Term("libraries and dataset in this process", held, held, int(held * 1.2), "modelled", "measured here")]
    table, measured = facts.overheads(), machine.calibration

    def term(name: str, row: str, key: str) -> Term:
        if key in measured:
            found = int(measured[key])
            return Term(name, found, found, int(found * 1.1), "modelled", "calibration")
        low, mid, high = (int(table[row][end] * MIB) for end in ("low", "mid", "high"))
        return Term(name, low, mid, high, "guessed", table[row]["source"])

    terms = [term("CUDA context and kernels", "context", "context_bytes")]
    if cut.world_size > 1:
        terms.append(term("NCCL", "nccl", "nccl_bytes"))
        if cut.strategy == "hsdp":
            terms.append(term("NCCL, second communicator", "more_nccl", "more_nccl_bytes"))
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


def combinations(captured: Captured, machine: Machine, world: int) -> Iterator[Cut]:
    """Open factors, in the order in which a cut is preferred; microbatches are left at 1."""
    strategy = captured.asked("strategy")
    if strategy is not None:
        strategies: Iterable[str] = (strategy,)
    elif world == 1:
        strategies = ("single",)
    else:
        strategies = ("ddp", "fsdp") if machine.nodes == 1 else ("ddp", "hsdp", "fsdp")
    natural = natural_precision(captured, machine)
    recompute = captured.asked("activation_checkpointing")
    kept = captured.asked("saved_activations")
    first = True
    for name in strategies:
        ranks, devices = (1, world) if name == "dp" else (world, 1)
        one = Cut(name, natural, "none", kept or "keep", world_size=ranks, devices=devices)
        one = replace(one, replicas=machine.nodes if name == "hsdp" else 1)
        for again in RECOMPUTE if recompute is None else (recompute,):
            yield replace(one, activation_checkpointing=again)
        if captured.saves and machine.device == "cuda" and kept is None and recompute in (None, "none"):
            yield replace(one, saved_activations="offload")
            yield replace(one, saved_activations="int8")  # approximate: shown, chosen by people alone
        if first and natural != "fp32" and captured.asked("precision") is None:
            # Shown once, for comparison; never chosen.
            yield replace(one, precision="fp32", activation_checkpointing=recompute or "none")
        first = False


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
    for cut in combinations(captured, machine, world):
        if not everything and book.seconds > ENOUGH_SECONDS and any(row.verdict == "fits" for row in rows):
            left.append(cut)
        else:
            rows += _sizes(book, cut, captured, machine)
    return rows, left


def _sizes(book: Book, cut: Cut, captured: Captured, machine: Machine) -> Iterator[Row]:
    """From the largest microbatch on, until one fits."""
    sizes = microbatches(captured, cut.world_size)
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


def choose(rows: Iterable[Row], precision: str, saved: str | None = None) -> tuple[Row | None, list[str]]:
    """The fastest cut that fits; without known times the simplest, with the largest microbatch. And why.

    Of the run's own precision, and without lossy activations unless the script asks for them (`saved`).
    """
    order = {"fits": 0, "tight": 1}
    able = [row for row in rows if row.verdict in order and row.cut.precision == precision]
    able = [row for row in able if row.cut.saved_activations != "int8" or saved == "int8"]
    if not able:
        return None, ["no cut fits"]
    best = min(order[row.verdict] for row in able)
    able = [row for row in able if order[row.verdict] == best]
    why = [] if best == 0 else ["nothing fits with certainty; the run's out-of-memory ladder may have to cut further"]

    def simple(row: Row) -> tuple[int, int, int, int]:
        cut = row.cut
        return (
            _ORDER.index(cut.strategy) if cut.strategy in _ORDER else len(_ORDER),
            RECOMPUTE.index(cut.activation_checkpointing) if cut.activation_checkpointing in RECOMPUTE else 1,
            int(cut.saved_activations != "keep"),
            cut.microbatches,
        )

    times = [row.seconds_per_update for row in able]
    if all(one is not None for one in times):
        fastest = min(one for one in times if one is not None)
        # Within 3 % times are equal, as far as a roofline can tell.
        near = [row for row in able if row.seconds_per_update is not None and row.seconds_per_update <= fastest * 1.03]
        chosen = min(near, key=simple)
        if len(able) > 1:
            why.append(f"the fastest of the {len(able)} cuts in {precision} that {'fit' if best == 0 else 'may fit'}")
            if len(near) > 1:
                why.append(f"{len(near)} are within 3 % of each other: the simplest of them")
    else:
        chosen = min(able, key=simple)
        why.append("times are not known: the simplest cut that fits, in the fewest pieces")
    return chosen, why


def fragments(trace: Trace, row: Row, machine: Machine) -> list[str]:
    """What torch's other allocator setting would save, where that is more than 3 %."""
    if machine.device != "cuda" or row.peak_reserved_bytes is None:
        return []
    other = replay(trace.events, expandable=True, workspaces=[max(0, term.bytes) for term in estimate.of(trace).terms])
    if other.reserved_bytes > row.peak_reserved_bytes * 0.97:
        return []
    less, setting = amount(other.reserved_bytes), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    return [f"{setting} would reserve {less} in place of {amount(row.peak_reserved_bytes)}"]


def amount(count: int | None) -> str:
    """For readers: 12.34 GiB, 56.7 MiB, ? where it is not known."""
    if count is None:
        return "?"
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / MIB:.1f} MiB"


def neighbour(book: Book, captured: Captured, machine: Machine, world: int) -> str:
    """What the choice would be on another number of GPUs, in one line."""
    what = f"{world} GPU{'s' if world != 1 else ''}" if machine.device == "cuda" else f"{world} processes"
    if world < 1 or world > captured.global_batch_size:
        return f"{what}: not possible"
    other = replace(machine, gpus=max(1, math.ceil(world / machine.nodes)))
    chosen = None
    for cut in combinations(captured, other, world):  # the first that fits, for the sake of time
        if cut.precision == natural_precision(captured, machine):
            chosen, _ = choose(_sizes(book, cut, captured, other), cut.precision, cut.saved_activations)
            if chosen is not None:
                break
    if chosen is None:
        return f"{what}: no cut fits"
    time = "" if chosen.seconds_per_update is None else f", {duration(chosen.seconds_per_update)} an update"
    return f"{what}: {chosen.cut.words()}, {amount(chosen.device_total_bytes)}{time} ({chosen.verdict})"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
