"""The feed: for every update, this rank's rows of the global batch, in the order that (seed, epoch) says.

Ranks differ only in the `cut`. Nothing here communicates; every method may be called on one rank alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from evener.data.columns import Columns
from evener.data.cursor import Cursor, following, no_update, rows_at, updates_in
from evener.data.order import Indices, Order
from evener.data.processes import automatic_count
from evener.data.read import GatherReader, Job, Loaded, Reader, RowReader
from evener.data.source import Reading, Source
from evener.data.workers import Delivery

# Rows of the order that are computed at once: 22 to 57 ns a row, against 1 to 3 us when 64 are asked for.
_BLOCK_ROWS = 16384


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows start .. stop-1 of the update, as one batch on the device.

    `rows` is how many were delivered: fewer than stop - start where bad rows were skipped, 0 with a `batch` of None.
    """

    start: int
    stop: int
    rows: int
    batch: Any


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """One rank's part of one update.

    `cursor` is where the update starts and `next` where the one after it does: save that one. `rows` counts the rows of
    the whole global batch, over all ranks, as the order gives them; `planned` those that it was cut for, more only
    where a rank's own stream has run dry. `skipped` are the rows of this rank that could not be read, (index, error
    text) each. A stream has no `order`: its ids are positions.
    """

    cursor: Cursor
    next: Cursor
    rows: int
    pieces: tuple[Piece, ...]
    ends_epoch: bool
    planned: int
    skipped: tuple[tuple[int, str], ...] = ()
    order: Order | None = field(default=None, repr=False)

    def ids(self) -> Indices:
        """Row indices (int64, [rows]) of the whole global batch, over all ranks; computed on demand."""
        start, stop = self.cursor.offset, self.cursor.offset + self.rows
        return np.arange(start, stop) if self.order is None else self.order.indices(self.cursor.epoch, start, stop)


def pieces_of(cut: Sequence[tuple[int, int]], loaded: Loaded) -> tuple[Piece, ...]:
    return tuple([Piece(start, stop, n, b) for (start, stop), n, b in zip(cut, loaded.rows, loaded.batches)])


class Feed:
    """Reads a source in an order and hands out portions; `how` are the fields of `Reading`.

    The data is a function of (dataset, order, seed) alone. With `seed`, rows that draw from torch's default generator,
    `random` or numpy's legacy generator draw the same in every cut, on any world size, with any number of workers; the
    caller's generators are left as they were.
    """

    def __init__(self, source: Source, order: Order, **how: Any) -> None:
        self.source, self.order, self.how = source, order, Reading(**how)
        by_reader = self.how.by_reader(source)
        gather = isinstance(source.dataset, Columns) and by_reader.collate_fn is None
        reader: Reader = GatherReader(source.dataset) if gather else RowReader(source.dataset, by_reader)
        if (workers := self.how.num_workers) == "auto":
            automatic = automatic_count(source.in_memory, self.how.local_world_size or self.how.world_size)
            workers = 0 if gather else automatic if source.num_workers is None else source.num_workers
        self.num_workers = workers
        self._delivery = Delivery(reader, source, self.how, workers)

    def length(self, epoch: int) -> int:
        """How many rows a whole epoch has."""
        return self.order.length(epoch)

    def updates_in(self, epoch: int) -> int:
        """How many updates a whole epoch has."""
        return updates_in(self.order.length(epoch), self.how.global_batch_size, self.how.drop_last)

    def portions(self, cursor: Cursor, *, epochs: int | None = None, updates: int | None = None) -> Iterator[Portion]:
        """This rank's portions from `cursor` on, without end unless limited.

        Args:
            epochs: Stop before epoch `cursor.epoch + epochs`: the epoch that the cursor stands in counts as one.
            updates: Stop after so many portions.

        With workers one iteration at a time: a newer call ends the older one.

        Raises (while iterating):
            DataError: a row that cannot be read, an epoch without any update, a cursor outside of its epoch.
            WorkerError: a data worker died, or hangs for `timeout` seconds.
        """
        for (at, after, rows, cut), loaded in self._delivery.results(self._steps(cursor, epochs, updates)):
            ends = after.epoch != at.epoch
            yield Portion(at, after, rows, pieces_of(cut, loaded), ends, rows, loaded.skipped, self.order)

    def close(self) -> None:
        """End the workers, if there are any. Portions already delivered stay valid."""
        self._delivery.close()

    def _steps(self, cursor: Cursor, epochs: int | None, updates: int | None) -> Iterator[tuple[Any, Job]]:
        """((cursor, next cursor, rows, cut), job) of the updates to come."""
        order, size, drop_last = self.order, self.how.global_batch_size, self.how.drop_last
        end = None if epochs is None else cursor.epoch + epochs
        ids = keys = np.empty(0, dtype=np.int64)  # of the stretch of the order in use; nobody writes to them
        known, begin = -1, 0  # its epoch and first position
        while (end is None or cursor.epoch < end) and (updates is None or updates > 0):
            epoch, offset = cursor.epoch, cursor.offset
            length = order.length(epoch)
            rows = rows_at(offset, length, size, drop_last)
            if rows == 0:
                if offset == 0:
                    raise no_update(epoch, length, size)
                cursor = Cursor(epoch + 1, 0)  # a cursor at the very end of its epoch
                continue
            cut = tuple(self.how.cut(rows))
            first, last = (cut[0][0], cut[-1][1]) if cut else (0, 0)
            start, stop = offset + first, offset + last
            if epoch != known or not begin <= start <= stop <= begin + len(ids):
                known, begin, until = epoch, start, min(max(stop, start + _BLOCK_ROWS), length)
                ids = order.indices(epoch, start, until)
                keys = order.keys(epoch, start, until, ids)
            here = slice(start - begin, stop - begin)
            bounds = cut if first == 0 else tuple((a - first, b - first) for a, b in cut)
            after = following(cursor, rows, length, size, drop_last)
            yield (cursor, after, rows, cut), Job(epoch, start, ids[here], keys[here], bounds)
            cursor = after
            updates = None if updates is None else updates - 1
