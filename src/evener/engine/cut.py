"""How an update is cut into pieces: pure integer algebra, the same on every rank, without communication.

Rows of an update are numbered 0..rows-1 in the order of the data. Fast mode deals contiguous, balanced ranges to the
ranks and cuts each into microbatches. Exact and coupled mode deal whole slices (slice i is rows i*slice_size ..), so
that what is computed together never depends on who computes it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from evener.dist.info import share

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
