"""The feed of a stream: portions as a `Feed` gives them, from rows whose number nobody knows before they end.

split   every rank reads the whole stream and keeps its rows: the global batch is the next `global_batch_size` rows.
mine    the stream of each rank gives rows of its own, each once: the global batch is the union of what every rank's
        part holds. A rank whose stream has ended gives no rows while the others go on with smaller updates, and the
        epoch is over when all have ended; with drop_last when the first cannot fill its part, and the rest is left out.

Before each update the ranks tell each other how far they are: one collective of a few integers. That is how all of them
end an epoch at the same update, and how streams that are not what `stream=` says are noticed before they train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from evener.data.cursor import Cursor, Mark, no_update
from evener.data.delivery import Delivery
from evener.data.feed import Cut, Feed, Piece, Portion
from evener.data.order import Order
from evener.data.source import Collate, Source
from evener.data.stream import START, StreamJob, StreamReader, Taken
from evener.dist import comm
from evener.dist.mix import mix
from evener.errors import BatchSizeError, DataError, UsageError

_NO_TIMEOUT = 7 * 86400.0  # while a worker reads again what a resume needs


def make_feed(
    source: Source, *, stream: str | None, order: Any, on_bad_sample: str = "raise", **how: Any
) -> Feed | StreamFeed:
    """The feed for a source: see `Feed` and `StreamFeed` for `how`."""
    if not source.stream:
        for name in ("say", "exact"):
            how.pop(name, None)
        kind = order if order is not None else source.order or "shuffle"
        return Feed(source, Order(source.rows, how["seed"], kind), on_bad_sample=on_bad_sample, **how)
    if order is not None:
        raise UsageError(
            "order= is for datasets whose rows have numbers; a stream comes in its own order.",
            fix=["leave order= out, and shuffle inside of the stream: __iter__ runs under seeds from (seed, epoch)"],
        )
    if on_bad_sample != "raise":
        raise UsageError(
            f'on_bad_sample="{on_bad_sample}" cannot be kept for a stream: after an error it may have no next row.',
            fix=["leave bad rows out inside of the stream"],
        )
    how.pop("local_world_size", None)
    return StreamFeed(source, kind=stream or "split", **how)


class StreamFeed:
    """Reads a stream and hands out portions. Constructed, and iterated, on all ranks together.

    Args:
        kind: "split" or "mine", see above.
        num_workers: 0 (and "auto") reads here, 1 in a process that reads ahead. More would share the stream in another
            way for every number of them, and are refused; a DataLoader's larger number means 1.
        say: Called on every rank with what the user should know.
        exact: The next row must be what it was when the checkpoint was written; otherwise that is only said.
        The others: as for `Feed`.

    Raises:
        UsageError: num_workers.
        BatchSizeError: a rank of "mine" that no row of an update belongs to: its stream would never be read.
    """

    def __init__(
        self,
        source: Source,
        *,
        kind: str,
        global_batch_size: int,
        drop_last: bool,
        rank: int,
        world_size: int,
        cut: Cut,
        device: torch.device,
        seed: int,
        num_workers: int | Literal["auto"] = "auto",
        collate_fn: Collate | None = None,
        timeout: float | None = None,
        inspect: Callable[[Any], None] | None = None,
        say: Callable[[str], None] | None = None,
        exact: bool = False,
    ) -> None:
        workers = min(1, source.num_workers or 0) if num_workers == "auto" else num_workers
        if workers > 1:
            raise UsageError(
                f"num_workers={num_workers} for a stream: its rows come one after the other, from one reader per rank.",
                evidence=["several readers would give each row several times, or in an order that depends on them"],
                fix=["num_workers=1 reads ahead in a process of its own", "num_workers=0 reads in this process"],
            )
        self.source, self.kind, self.num_workers = source, kind, workers
        self.global_batch_size, self.drop_last, self.exact = global_batch_size, drop_last, exact
        self.rank, self.world_size = rank, world_size
        split = kind == "split"
        self._size = global_batch_size if split else sum(stop - start for start, stop in cut(global_batch_size))
        if min(row[0] for row in self._told([self._size])) == 0:
            raise BatchSizeError(
                f'stream="mine": a global batch of {global_batch_size} rows has no part for every one of {world_size}'
                " ranks, so that some streams would never be read.",
                fix=["a larger global_batch_size, or a smaller slice_size", 'or stream="split"', "or fewer processes"],
            )
        self._say = say or (lambda text: None)
        self._reader = StreamReader(
            source.dataset,
            collate_fn if collate_fn is not None else source.collate_fn,
            size=self._size,
            cut=cut,
            global_batch_size=global_batch_size,
            split=split,
            drop_last=drop_last,
            seed=seed if split else mix(seed, rank),
        )
        self._delivery = Delivery(
            self._reader, source, num_workers=workers, timeout=timeout, seed=seed, device=device, inspect=inspect
        )
        self._live: Iterator[tuple[Any, Taken]] | None = None  # goes on from `_at`
        self._at = Cursor()
        self._uneven = False  # that a rank's stream ended early was said

    def length(self, epoch: int) -> None:
        """Nobody knows how many rows an epoch has."""

    def updates_in(self, epoch: int) -> None:
        """Nobody knows how many updates an epoch has."""

    def close(self) -> None:
        self._live = None
        self._delivery.close()

    def portions(self, cursor: Cursor, *, epochs: int | None = None, updates: int | None = None) -> Iterator[Portion]:
        """This rank's portions from `cursor` on, as `Feed.portions`. Collective: one small gather for each.

        Where the iteration before stopped at `cursor` it goes on; elsewhere the stream goes back to its start, or is
        given its state, and is read up to `cursor.mark`.

        Raises (while iterating):
            DataError: on all ranks: a row that cannot be read, an epoch without rows, streams that do not fit together.
        """
        end = None if epochs is None else cursor.epoch + epochs
        while (end is None or cursor.epoch < end) and (updates is None or updates > 0):
            mark = cursor.mark or START
            taken: Taken | None = None
            error: Exception | None = None
            try:
                if not mark.ended:
                    taken = self._next(cursor, mark)
            except Exception as problem:  # the others are told before it is raised
                error = problem
            try:
                portion = self._portion(cursor, mark, taken, error)
            except BaseException:
                self._live = None  # what it read and nobody used is read again
                raise
            self._at = cursor = portion.next if portion is not None else Cursor(cursor.epoch + 1)
            if portion is not None:
                updates = None if updates is None else updates - 1
                yield portion

    def _next(self, cursor: Cursor, mark: Mark) -> Taken:
        workers = self._delivery.workers
        if self._live is None or cursor != self._at:
            if mark.rows and not (self._reader.keeps_state and mark.state is not None):
                self._say(f"reads {mark.rows:,} rows of the stream again to continue after them (it has no state_dict)")
            if workers is not None:
                workers.timeout = _NO_TIMEOUT
            self._live = self._delivery.results(_jobs(cursor.epoch, mark))
        taken = next(self._live)[1]
        if workers is not None:
            workers.timeout = self._delivery.timeout
        if taken.reread is not None:
            rows, seconds = taken.reread
            self._say(f"read {rows:,} rows again in {seconds:.1f} s")
        return taken

    def _portion(self, cursor: Cursor, mark: Mark, taken: Taken | None, error: Exception | None) -> Portion | None:
        """What all ranks do next; None when the epoch has no update left."""
        mine = [error is not None, taken is not None, 0, False, 0, False, False]
        if taken is not None:
            mine[2:] = taken.seen, taken.more, taken.look, taken.first, taken.changed
        every = self._told([int(value) for value in mine])
        self._refuse(cursor, every, error)
        split, at = self.kind == "split", cursor.offset
        rows = every[0][2] if split else sum(one[2] for one in every)
        more = [one[3] for one in every]
        goes_on = all(more) if self.drop_last else any(more)
        if rows == 0 and at == 0:
            raise DataError(
                f"the stream {type(self.source.dataset).__name__} gave no row in epoch {cursor.epoch}.",
                fix=["__iter__ must begin anew each time: make what it iterates inside of it"]
                if cursor.epoch
                else ["give a stream with at least one row"],
            )
        if rows == 0 or (self.drop_last and rows < self.global_batch_size):
            if at == 0:
                raise no_update(cursor.epoch, rows, self.global_batch_size)
            self._live = None
            return None
        if not split and not self._uneven and any(one[1] for one in every) and len(set(more)) > 1:
            self._uneven = True
            ended = ", ".join(str(rank) for rank, one in enumerate(more) if not one)
            rest = "the rest of the others is left out" if self.drop_last else "the others go on with smaller updates"
            self._say(f"the stream of rank {ended} has come to its end in epoch {cursor.epoch}: {rest}")
        if not goes_on:
            after = Cursor(cursor.epoch + 1)
            if taken is not None and taken.more:
                self._live = None  # drop_last: the others' streams are shorter
        else:
            after = Cursor(cursor.epoch, at + rows, taken.mark if taken is not None else replace(mark, ended=True))
        pieces = () if taken is None else zip(taken.cut, taken.rows, taken.batches)
        planned = rows if split else self.global_batch_size
        made = tuple([Piece(start, stop, n, batch) for (start, stop), n, batch in pieces])
        return Portion(cursor, after, rows, made, not goes_on, planned)

    def _refuse(self, cursor: Cursor, every: Sequence[Sequence[int]], error: Exception | None) -> None:
        """What all ranks must stop for; every rank sees it, so that none waits for another."""
        if error is not None:
            raise error
        failed = [rank for rank, one in enumerate(every) if one[0]]
        at = f"at row {cursor.offset} of epoch {cursor.epoch}"
        if failed:
            ranks = ", ".join(map(str, failed))
            raise DataError(f"the stream of rank {ranks} failed {at}; that rank says how.", fix=["see its log"])
        looks, firsts = [one[4] for one in every], [one[5] for one in every]
        if any(one[6] for one in every):
            text = f"the stream goes on with another row than when the checkpoint was written, {at}: " + (
                "rows may be missing or come twice"
            )
            if self.exact:
                raise DataError(
                    f"{text}; exact=True cannot continue.",
                    fix=["shuffle and draw with torch, random or numpy.random: they are seeded for every row"],
                )
            self._say(f"warning: {text}")
        if self.kind == "split":
            if len({(one[2], one[3]) for one in every}) > 1:
                raise DataError(
                    f"the stream has other lengths on the ranks, {at}.",
                    evidence=[
                        f"rank {r}: {one[2]} rows, {'more' if one[3] else 'the end'}" for r, one in enumerate(every)
                    ],
                    fix=[_SAME, _MINE],
                )
            if len(set(looks)) > 1:
                other = next(rank for rank, look in enumerate(looks) if look != looks[0])
                raise DataError(
                    f'stream="split": rank {other} reads other rows than rank 0, {at}.',
                    fix=[_SAME, "draw with torch, random or numpy.random: they are seeded for every row", _MINE],
                )
        elif all(firsts) and all(one[2] > 1 for one in every) and len(set(looks)) < len(looks):
            same = [rank for rank, look in enumerate(looks) if looks.count(look) > 1][:2]
            raise DataError(
                f'stream="mine": ranks {same[0]} and {same[1]} read the same rows, {at}.',
                fix=[
                    "give each rank rows of its own: every evener.world_size()-th, from evener.rank() on",
                    'stream="split": every rank reads everything and keeps its rows',
                ],
            )

    def _told(self, mine: list[int]) -> list[list[int]]:
        """Every rank's numbers, in rank order: one collective."""
        return [mine] if self.world_size == 1 else comm.all_gather_integers(mine)


_SAME = "every rank must read the same rows in the same order: no sharding by rank, no order of its own"
_MINE = 'stream="mine": each rank reads rows of its own'


def _jobs(epoch: int, mark: Mark) -> Iterator[StreamJob]:
    yield StreamJob(seek=(epoch, mark))
    while True:
        yield StreamJob()
