"""The values that planning is made of: what was traced (`Trace`), of which cut (`Cut`).

Frozen, standard library only, and JSON both ways: traces are made in a child process that has torch (room `measure`)
and are read by rooms that have not (`memory`, `allocator`, `clock`).

One `Trace` is two updates on one rank: the first creates gradients and optimizer state, the second is the steady one.
Sizes are what the operation asks the allocator for (`untyped_storage().nbytes()`), before any rounding.

    trace.events[:trace.updates[0]]                    what lives before the first update (parameters, buffers, ...)
    trace.events[trace.updates[0]:trace.updates[1]]    update 0
    trace.events[trace.updates[1]:]                    update 1: time is priced from this one

Categories of storage: parameter (gathered ones too), gradient, optimizer, buffer, activation (made in a forward and
kept for its backward), temporary, batch, communication (buckets, what collectives read and write).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

PHASES = ("start", "forward", "backward", "reduce", "optimizer")


@dataclass(frozen=True, slots=True)
class Alloc:
    """Storage `id` of so many bytes begins to live. `module`: the path inside the model, "" for none of it."""

    id: int
    bytes: int
    category: str
    module: str
    phase: str


@dataclass(frozen=True, slots=True)
class Free:
    """Storage `id` is gone: nothing on this rank refers to it any more."""

    id: int
    phase: str


@dataclass(frozen=True, slots=True)
class Op:
    """One dispatched operation. It runs after the allocations before it in the list, which hold its results.

    name: as dispatched, "aten.mm.default".
    flops: multiply-adds counted as 2; 0 where torch has no formula for it (then it is bound by its bytes).
    bytes_read, bytes_written: of its tensor arguments and results, each counted once; views are no operation.
    dtype: of what it computes with, "float32", "bfloat16": the widest floating argument.
    shape: of a matrix product, (batch, m, k, n); () for anything else.
    """

    name: str
    phase: str
    flops: int
    bytes_read: int
    bytes_written: int
    dtype: str
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective ("all_reduce", "all_gather", ...), where the step starts it; or a copy of an offloaded activation
    ("to_host", "to_device"), whose group is 1.

    bytes: the larger of its input and output on one rank (the whole of an all-gather's result).
    group: number of ranks in it.
    waits: True where the step waits for it at once, False where it overlaps what follows.
    """

    kind: str
    bytes: int
    group: int
    phase: str
    waits: bool = False


Event = Alloc | Free | Op | Collective
_KINDS: Mapping[str, type[Any]] = {"a": Alloc, "f": Free, "o": Op, "c": Collective}
_LETTERS = {kind: letter for letter, kind in _KINDS.items()}
_FIELDS = {kind: tuple(kind.__dataclass_fields__) for kind in _KINDS.values()}


@dataclass(frozen=True, slots=True)
class Cut:
    """The factors that planning chooses between; words as in the keywords of `Run`.

    microbatch_size: rows that go through the model at once on one rank.
    microbatches: forwards of one rank in one update (its rows are at most their product).
    world_size: ranks; 1 for "single" and "dp". devices: GPUs of one process, for "dp"; else 1.
    replicas: groups of ranks that hold the same shards, for "hsdp"; else 1.
    """

    strategy: str = "single"
    precision: str = "fp32"
    activation_checkpointing: str = "none"
    saved_activations: str = "keep"
    microbatch_size: int = 1
    microbatches: int = 1
    world_size: int = 1
    devices: int = 1
    replicas: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def words(self) -> str:
        """For messages: `fsdp on 8 ranks, bf16, recompute full, 4 microbatches x 16`"""
        parts = [self.strategy if self.ranks == 1 else f"{self.strategy} on {self.ranks} ranks", self.precision]
        parts += [f"recompute {self.activation_checkpointing}"] * (self.activation_checkpointing != "none")
        parts += [f"activations {self.saved_activations}"] * (self.saved_activations != "keep")
        pieces = "microbatch" if self.microbatches == 1 else "microbatches"
        return ", ".join([*parts, f"{self.microbatches} {pieces} x {self.microbatch_size}"])

    @property
    def ranks(self) -> int:
        """GPUs in use: ranks, or the devices of one process."""
        return self.world_size * self.devices

    @property
    def shards(self) -> int:
        """Among how many ranks parameters, gradients and states are divided."""
        return self.world_size // self.replicas if self.strategy in ("fsdp", "hsdp") else 1

    @property
    def family(self) -> Cut:
        """The same with microbatch and world size left open: cuts of one family are extrapolated from one another."""
        pieces = min(2, self.microbatches)  # from the second on they repeat
        return replace(self, microbatch_size=0, microbatches=pieces, world_size=0 if self.world_size > 1 else 1)


@dataclass(frozen=True, slots=True)
class Trace:
    """Two updates of one rank.

    Attributes:
        device: Whose rules the step was traced under: "cuda" or "cpu".
        capability: Compute capability assumed where device is "cuda", (8, 0); None for the CPU.
        updates: Where the first and the second update begin in `events`.
        pieces: Microbatches traced in each update; cut.microbatches may be larger, the rest repeats the last but one.
        row_bytes: Of one row of the batch. `events` hold the rows of the traced pieces.
        rows: Rows that went through the model in each traced update on this rank.
        how: "traced", or "extrapolated" where it was put together from other traces.
        untraced: What the step does that no event shows, one line each.
        notes: What was assumed (attention kernel, repeated blocks), one line each.
    """

    cut: Cut
    events: tuple[Event, ...]
    updates: tuple[int, int]
    device: str = "cuda"
    capability: tuple[int, int] | None = None
    pieces: int = 1
    row_bytes: int = 0
    rows: int = 0
    how: str = "traced"
    untraced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def steady(self) -> Iterator[Event]:
        """The events of update 1."""
        yield from self.events[self.updates[1] :]

    @property
    def rest_bytes(self) -> int:
        """Rows of the rank's batch that wait on the device and were not traced."""
        return max(0, self.cut.microbatches * self.cut.microbatch_size - self.rows) * self.row_bytes

    def to_json(self) -> dict[str, Any]:
        """Events become short lists: ["a", 7, 4096, "activation", "layers.0", "forward"]."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        short = [[_LETTERS[type(e)], *(getattr(e, name) for name in _FIELDS[type(e)])] for e in self.events]
        return {**values, "cut": self.cut.to_json(), "events": short}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Trace:
        events = []
        for letter, *fields in values["events"]:
            if letter == "o":
                fields[-1] = tuple(fields[-1])
            events.append(_KINDS[letter](*fields))
        tuples = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return Trace(**{**values, **tuples, "cut": Cut(**values["cut"]), "events": tuple(events)})


@dataclass(frozen=True, slots=True)
class Share:
    """So many bytes of one category in one module are alive at the peak."""

    category: str
    module: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Term:
    """One summand that is in no trace, or beside it; a scratch row's `bytes` are 0, because the trace has them.

    how: "modelled" (a documented rule), "guessed" (a figure of others, or a rule of thumb).
    """

    name: str
    low_bytes: int
    bytes: int
    high_bytes: int
    how: str
    source: str = ""
