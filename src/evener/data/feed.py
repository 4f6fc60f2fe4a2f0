"""The feed: for every update, this rank's rows of the global batch, in the order that (seed, epoch) says.

Ranks differ only in the `cut`. Nothing here communicates; every method may be called on one rank alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from evener.data.columns import Columns
from evener.data.cursor import Cursor, following, no_update, rows_at, updates_in
from evener.data.delivery import Delivery
from evener.data.order import Indices, Order
from evener.data.processes import automatic_count
from evener.data.read import GatherReader, Job, Loaded, RowReader
from evener.data.source import Collate, Source
from evener.data.workers import Reader
from evener.errors import BatchSizeError, UsageError, one_of

Cut = Callable[[int], Sequence[tuple[int, int]]]

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


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A portion that is not read yet."""

    cursor: Cursor
    next: Cursor
    rows: int
    cut: tuple[tuple[int, int], ...]
    job: Job


class Feed:
    """Reads a source in an order and hands out portions.

    Args:
        source: From `source_of`.
        order: Of the source's rows.
        global_batch_size: Rows of an update over all ranks; the last of an epoch has fewer, unless `drop_last`.
        rank, world_size: Who this is; used in messages and to share CPUs, never to choose rows.
        local_world_size: Ranks on this machine (None: all of them), which share its CPUs.
        cut: `cut(rows)` gives this rank's pieces of an update of `rows` rows: contiguous (start, stop) offsets inside
            the update. Asked anew for every update, when the update is read; prefetched updates keep the cut they had.
        device: Where the batches go.
        num_workers: Processes that read rows; "auto" is what a DataLoader said, else `automatic_count`.
        collate_fn: In place of the source's.
        on_bad_sample: "raise", or "skip": such rows are left out and listed in the portion.
        seed: Of per-row randomness; the order has its own.
        timeout: Seconds to wait for a worker; None is what a DataLoader said, else 300.
        inspect: Called with every batch of this rank, in order, before it is copied to the device; may raise.

    The data is a function of (dataset, order, seed) alone. With `seed`, rows that draw from torch's default generator,
    `random` or numpy's legacy generator draw the same in every cut, on any world size, with any number of workers; the
    caller's generators are left as they were.

    Raises:
        BatchSizeError: global_batch_size is not a positive integer.
        UsageError: num_workers, timeout or on_bad_sample out of range.
        DataError: the order is of another number of rows.
    """

    def __init__(
        self,
        source: Source,
        order: Order,
        *,
        global_batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        cut: Cut,
        device: torch.device,
        seed: int,
        local_world_size: int | None = None,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Collate | None = None,
        on_bad_sample: str = "raise",
        timeout: float | None = None,
        inspect: Callable[[Any], None] | None = None,
    ) -> None:
        if type(global_batch_size) is not int or global_batch_size < 1:
            raise BatchSizeError(
                f"global_batch_size={global_batch_size!r}: rows of one update over all ranks, at least 1.",
                fix=["global_batch_size=64"],
            )
        one_of("on_bad_sample", on_bad_sample, ("raise", "skip"))
        if num_workers != "auto" and (type(num_workers) is not int or num_workers < 0):
            raise UsageError(
                f"num_workers={num_workers!r} is not a number of processes.",
                fix=['num_workers="auto", or 0, 1, 2, ...'],
            )
        if order.rows != source.rows:
            raise UsageError(
                f"an order of {order.rows} rows for a dataset of {source.rows}.", fix=["Order(source.rows)"]
            )
        self.source, self.order = source, order
        self.global_batch_size, self.drop_last = global_batch_size, drop_last
        self.rank, self.world_size, self._cut = rank, world_size, cut
        collate_fn = collate_fn if collate_fn is not None else source.collate_fn
        gather = isinstance(source.dataset, Columns) and collate_fn is None
        reader: Reader = (
            GatherReader(source.dataset)
            if gather
            else RowReader(source.dataset, collate_fn, skip=on_bad_sample == "skip", seed=seed)
        )
        if num_workers == "auto":
            automatic = automatic_count(source.in_memory, local_world_size or world_size)
            num_workers = 0 if gather else automatic if source.num_workers is None else source.num_workers
        self.num_workers = num_workers
        self._delivery = Delivery(
            reader, source, num_workers=num_workers, timeout=timeout, seed=seed, device=device, inspect=inspect
        )

    def length(self, epoch: int) -> int:
        """How many rows a whole epoch has."""
        return self.order.length(epoch)

    def updates_in(self, epoch: int) -> int:
        """How many updates a whole epoch has."""
        return updates_in(self.order.length(epoch), self.global_batch_size, self.drop_last)

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
        for step, result in self._delivery.results(self._steps(cursor, epochs, updates)):
            yield self._portion(step, result)

    def close(self) -> None:
        """End the workers, if there are any. Portions already delivered stay valid."""
        self._delivery.close()

    def _steps(self, cursor: Cursor, epochs: int | None, updates: int | None) -> Iterator[_Step]:
        order, size, drop_last = self.order, self.global_batch_size, self.drop_last
        end = None if epochs is None else cursor.epoch + epochs
        block = _Block(order)
        while (end is None or cursor.epoch < end) and (updates is None or updates > 0):
            epoch, offset = cursor.epoch, cursor.offset
            length = order.length(epoch)
            rows = rows_at(offset, length, size, drop_last)
            if rows == 0:
                if offset == 0:
                    raise no_update(epoch, length, size)
                cursor = Cursor(epoch + 1, 0)  # a cursor at the very end of its epoch
                continue
            cut = tuple(self._cut(rows))
            first, last = self._range(cut, rows)
            ids, keys = block.take(epoch, offset + first, offset + last)
            bounds = cut if first == 0 else tuple((start - first, stop - first) for start, stop in cut)
            after = following(cursor, rows, length, size, drop_last)
            yield _Step(cursor, after, rows, cut, Job(epoch, offset + first, ids, keys, bounds))
            cursor = after
            updates = None if updates is None else updates - 1

    def _range(self, cut: tuple[tuple[int, int], ...], rows: int) -> tuple[int, int]:
        """First and last offset of this rank's rows in the update."""
        if not cut:
            return 0, 0
        expected = cut[0][0]
        for start, stop in cut:
            if start != expected or not 0 <= start <= stop <= rows:
                raise BatchSizeError(
                    f"the cut of {rows} rows for rank {self.rank} of {self.world_size} is not contiguous: {list(cut)}.",
                    fix=["pieces follow each other and stay inside of the update"],
                )
            expected = stop
        return cut[0][0], expected

    def _portion(self, step: _Step, result: Loaded) -> Portion:
        pieces = tuple([Piece(start, stop, n, b) for (start, stop), n, b in zip(step.cut, result.rows, result.batches)])
        ends = step.next.epoch != step.cursor.epoch
        return Portion(step.cursor, step.next, step.rows, pieces, ends, step.rows, result.skipped, self.order)


class _Block:
    """The stretch of the order that is being used, computed many rows at a time."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._epoch, self._start, self._stop = -1, 0, 0
        self._ids: Indices
        self._keys: Indices

    def take(self, epoch: int, start: int, stop: int) -> tuple[Indices, Indices]:
        """Indices and keys at positions start .. stop-1, as views that nobody writes to."""
        if epoch != self._epoch or start < self._start or stop > self._stop:
            end = min(max(stop, start + _BLOCK_ROWS), self._order.length(epoch))
            self._ids = self._order.indices(epoch, start, end)
            self._keys = self._order.keys(epoch, start, end, self._ids)
            self._epoch, self._start, self._stop = epoch, start, end
        here = slice(start - self._start, stop - self._start)
        return self._ids[here], self._keys[here]
