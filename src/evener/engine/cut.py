"""How an update is cut into pieces: integer algebra, the same on every rank, and for an Engine's own batches.

Rows of an update are numbered 0..rows-1 in the order of the data. Fast mode deals contiguous, balanced ranges to the
ranks and cuts each into microbatches. Exact and coupled mode deal whole slices (slice i is rows i*slice_size ..), so
that what is computed together never depends on who computes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener import batch as batches
from evener.dist import comm
from evener.dist.info import share
from evener.errors import BatchSizeError

if TYPE_CHECKING:
    from evener.engine.engine import Engine

Piece = tuple[int, int]  # start, stop: rows inside the update


def slices(rows: int, slice_size: int) -> tuple[Piece, ...]:
    """All slices of an update of `rows` rows; the last may be shorter."""
    return tuple((start, min(start + slice_size, rows)) for start in range(0, rows, slice_size))


def chop(start: int, stop: int, size: int) -> tuple[Piece, ...]:
    """start..stop in as few balanced pieces as possible, none larger than `size`."""
    rows = stop - start
    if rows <= 0:
        return ()
    pieces = -(-rows // size)
    return tuple((start + i * rows // pieces, start + (i + 1) * rows // pieces) for i in range(pieces))


@dataclass(frozen=True, slots=True)
class Cut:
    """The factors of the contract: who computes which rows of an update.

    `slice_size` is None where rows are independent (fast mode); then `microbatch_size` bounds a piece (None: all rows
    of the rank at once). With a slice size every piece is one slice.
    """

    rank: int
    world_size: int
    microbatch_size: int | None = None
    slice_size: int | None = None

    def pieces(self, rows: int) -> tuple[Piece, ...]:
        """This rank's pieces of an update of `rows` rows; empty for a rank without rows."""
        return tuple(piece for _, piece in self.numbered(rows))

    def numbered(self, rows: int) -> tuple[tuple[int, Piece], ...]:
        """(number, piece): the slice number where there are slices, else the microbatch number on this rank."""
        return _numbered(self, rows)


@functools.lru_cache(maxsize=64)  # two sizes in a run: the update's, and the last of an epoch
def _numbered(cut: Cut, rows: int) -> tuple[tuple[int, Piece], ...]:
    if cut.slice_size is None:
        start, stop = share(rows, cut.rank, cut.world_size)
        return tuple(enumerate(chop(start, stop, cut.microbatch_size or max(1, stop - start))))
    every = slices(rows, cut.slice_size)
    first, last = share(len(every), cut.rank, cut.world_size)
    return tuple((i, every[i]) for i in range(first, last))


def default_slice_size(global_batch_size: int, *, at_least: int = 1) -> int:
    """A sixteenth of the global batch, rounded up; not below `at_least` (rows that BatchNorm needs), nor above all."""
    return min(global_batch_size, max(-(-global_batch_size // 16), at_least))


def cut_batch(engine: Engine, batch: Any) -> tuple[list[tuple[int, int, Any]], int | None]:
    """An Engine's batch of this rank, moved: (number, rows, batch) of each piece, and the rows of all ranks where they
    are known. With slices the ranks tell each other their row counts, for the slices' numbers."""
    rows = 0 if batch is None else batches.rows(batch, engine.split)
    cut = engine.cut
    world, size = cut.world_size, cut.slice_size
    if size is None and world == 1 and 0 < rows <= (cut.microbatch_size or rows):
        return [(0, rows, batches.move(batch, engine.device))], rows
    first, total = 0, rows if world == 1 else None
    if size is not None and world > 1:
        counts: list[int] = comm.all_gather(rows)
        total = sum(counts)
        _check_counts(counts, size, engine.batch.exact)
        first = sum(counts[: cut.rank]) // size
    if rows == 0:
        return [], total
    batch = batches.move(batch, engine.device)
    pieces = slices(rows, size) if size is not None else chop(0, rows, cut.microbatch_size or rows)
    parts = [batch] if len(pieces) == 1 else [batches.part(batch, *piece, engine.split) for piece in pieces]
    if engine.batch.exact:
        parts = [batches.aligned(part) for part in parts]
    return [(first + i, stop - start, part) for i, ((start, stop), part) in enumerate(zip(pieces, parts))], total


def _check_counts(counts: list[int], size: int, exact: bool) -> None:
    """Whole slices per rank, and in exact mode dealt evenly: every rank knows which slices the others have, and sees
    every mistake, so that all stop together."""
    rows, world = f"rows per rank: {', '.join(map(str, counts))}", len(counts)
    for rank, start in enumerate(sum(counts[:rank]) for rank in range(world)):
        if counts[rank] and start % size:
            below = start // size * size
            what = f"rank {rank} starts at row {start} of the global batch, inside a slice of {size} rows."
            fix = [f"start it at row {below} or {below + size}: whole slices per rank", "or use evener.Run"]
            raise BatchSizeError(what, evidence=[rows], fix=fix)
    held = [-(-count // size) for count in counts]
    dealt = [stop - start for start, stop in (share(sum(held), rank, world) for rank in range(world))]
    if exact and held != dealt:
        what = f"exact=True deals the {sum(held)} slices of {size} rows evenly: {dealt} per rank, not {held}."
        fix = [
            f"rows per rank: {', '.join(str(count * size) for count in dealt)} (the last slice may be shorter)",
            "or use evener.Run",
        ]
        raise BatchSizeError(what, evidence=[rows], fix=fix)
