"""The feed of a stream: portions as a `Feed` gives them, from rows whose number nobody knows before they end.

split   every rank reads the whole stream and keeps its rows: the global batch is the next `global_batch_size` rows.
mine    the stream of each rank gives rows of its own, each once: the global batch is the union of what every rank's
        part holds. A rank whose stream has ended gives no rows while the others go on with smaller updates, and the
        epoch is over when all have ended; with drop_last when the first cannot fill its part, and the rest is left out.

Before each update the ranks tell each other how far they are: one collective of five integers. That is how all of them
end an epoch at the same update, and how streams that are not what `stream=` says are noticed before they train.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from evener.data.cursor import Cursor, Mark, no_update
from evener.data.feed import Feed, Portion, pieces_of
from evener.data.order import Order
from evener.data.source import Reading, Source
from evener.data.stream import START, StreamJob, StreamReader, Taken
from evener.data.workers import Delivery
from evener.dist import comm
from evener.dist.mix import mix
from evener.errors import BatchSizeError, DataError, UsageError

_NO_TIMEOUT = 7 * 86400.0  # while a worker reads again what a resume needs


def make_feed(source: Source, *, stream: str | None, order: Any, **how: Any) -> Feed | StreamFeed:
    """The feed for a source; `how` are the fields of `Reading`."""
    if not source.stream:
        kind = order if order is not None else source.order or "shuffle"
        return Feed(source, Order(source.rows, how["seed"], kind), **how)
    if order is not None:
        fix = ["leave order= out, and shuffle inside of the stream: __iter__ runs under seeds from (seed, epoch)"]
        raise UsageError("order= is for datasets whose rows have numbers; a stream comes in its own order.", fix=fix)
    return StreamFeed(source, stream or "split", **how)


class Told(NamedTuple):
    """What a rank tells the others before an update: see `Taken`."""

    seen: int = 0  # -1: it failed
    more: int = 0
    look: int = 0
    changed: int = 0
    moved: int = 0


class StreamFeed:
    """Reads a stream and hands out portions. Constructed, and iterated, on all ranks together.

    kind: "split" or "mine", see above. num_workers: 0 (and "auto") reads here, 1 in a process that reads ahead. More
    would share the stream in another way for every number of them; a DataLoader's larger number means 1.
    """

    def __init__(self, source: Source, kind: str, **keywords: Any) -> None:
        self.source, self.split, self.how = source, kind == "split", (how := Reading(**keywords))
        if how.on_bad_sample != "raise":
            what = f'on_bad_sample="{how.on_bad_sample}" cannot be kept for a stream'
            fix = ["leave bad rows out inside of the stream"]
            raise UsageError(f"{what}: after an error it may have no next row.", fix=fix)
        self.num_workers = min(1, source.num_workers or 0) if how.num_workers == "auto" else how.num_workers
        if self.num_workers > 1:
            raise UsageError(
                f"num_workers={self.num_workers} for a stream: its rows come one after the other, from one reader per"
                " rank.",
                evidence=["several readers would give each row several times, or in an order that depends on them"],
                fix=["num_workers=1 reads ahead in a process of its own", "num_workers=0 reads in this process"],
            )
        whole = how.global_batch_size
        size = whole if self.split else sum(stop - start for start, stop in how.cut(whole))
        if min(one.seen for one in self._told(Told(size))) == 0:
            raise BatchSizeError(
                f'stream="mine": a global batch of {whole} rows has no part for every one of {how.world_size} ranks, so'
                " that some streams would never be read.",
                fix=["a larger global_batch_size, or a smaller slice_size", 'or stream="split"', "or fewer processes"],
            )
        self._say = how.say or (lambda text: None)
        by_reader = how.by_reader(source)
        if not self.split:
            by_reader = replace(by_reader, seed=mix(how.seed, how.rank))
        self._reader = StreamReader(source.dataset, by_reader, how.cut, size, self.split)
        self._delivery = Delivery(self._reader, source, how, self.num_workers)
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
            if mark.rows > 1 and not (self._reader.keeps_state and mark.state is not None):
                self._say(f"reads {mark.rows:,} rows of the stream again to continue after them (it has no state_dict)")
            if workers is not None:
                workers.timeout = _NO_TIMEOUT
            self._live = self._delivery.results(_steps(cursor.epoch, mark))
        taken = next(self._live)[1]
        if workers is not None:
            workers.timeout = self._delivery.timeout
        for note in taken.notes:
            self._say(note)
        return taken

    def _portion(self, cursor: Cursor, mark: Mark, taken: Taken | None, error: Exception | None) -> Portion | None:
        """What all ranks do next; None when the epoch has no update left."""
        mine = Told() if taken is None else Told(*(getattr(taken, name) for name in Told._fields))
        every = self._told(mine if error is None else Told(-1))
        if error is not None:
            raise error
        self._refuse(cursor, every)
        drop_last, whole = self.how.drop_last, self.how.global_batch_size
        rows = every[0].seen if self.split else sum(one.seen for one in every)
        if rows == 0 and cursor.offset == 0:
            again = "__iter__ must begin anew each time: make what it iterates inside of it"
            fix = [again if cursor.epoch else "give a stream with at least one row"]
            name = type(self.source.dataset).__name__
            raise DataError(f"the stream {name} gave no row in epoch {cursor.epoch}.", fix=fix)
        if rows == 0 or (drop_last and rows < whole):
            if cursor.offset == 0:
                raise no_update(cursor.epoch, rows, whole)
            self._live = None
            return None
        ended = [str(rank) for rank, one in enumerate(every) if not one.more]
        if 0 < len(ended) < len(every) and not self._uneven:
            self._uneven = True
            rest = "the rest of the others is left out" if drop_last else "the others go on with smaller updates"
            self._say(f"the stream of rank {', '.join(ended)} has come to its end in epoch {cursor.epoch}: {rest}")
        goes_on = len(ended) == 0 if drop_last else len(ended) < len(every)
        after = Cursor(cursor.epoch + 1)
        if goes_on:
            here = taken.mark if taken is not None else mark._replace(ended=True)
            after = Cursor(cursor.epoch, cursor.offset + rows, here)
        elif mine.more:
            self._live = None  # drop_last: the others' streams are shorter
        pieces = pieces_of(taken.cut, taken) if taken is not None else ()
        return Portion(cursor, after, rows, pieces, not goes_on, rows if self.split else whole)

    def _refuse(self, cursor: Cursor, every: Sequence[Told]) -> None:
        """What all ranks must stop for; every rank sees it, so that none waits for another."""
        at = f"at row {cursor.offset} of epoch {cursor.epoch}"
        if failed := [str(rank) for rank, one in enumerate(every) if one.seen < 0]:
            what = f"the stream of rank {', '.join(failed)} failed {at}; that rank says how."
            raise DataError(what, fix=["see its log"])
        if any(one.changed for one in every):
            text = f"the stream goes on with another row than when the checkpoint was written, {at}"
            text += ": rows may be missing or come twice"
            if self.how.exact:
                raise DataError(
                    f"{text}; exact=True cannot continue.",
                    fix=[
                        "shuffle and draw with torch, random or numpy.random: they are seeded for every row",
                        "state_dict and load_state_dict must lead to the very next row, and begin from it alone",
                    ],
                )
            self._say(f"warning: {text}")
        if moved := [str(rank) for rank, one in enumerate(every) if one.moved]:
            who = f"epoch {cursor.epoch} of the {type(self.source.dataset).__name__} (rank {', '.join(moved)})"
            self._say(
                f"warning: {who} begins in another state than when this process first read it: if a run before left it"
                " in the middle, rows are missing now; give each run an object of its own"
            )
        looks = [one.look for one in every]
        if self.split:
            if len({(one.seen, one.more) for one in every}) > 1:
                said = [f"{one.seen} rows, {'more' if one.more else 'the end'}" for one in every]
                ends = [f"rank {rank}: {one}" for rank, one in enumerate(said)]
                raise DataError(f"the stream has other lengths on the ranks, {at}.", evidence=ends, fix=[_SAME, _MINE])
            if len(set(looks)) > 1:
                other = next(rank for rank, look in enumerate(looks) if look != looks[0])
                fix = [_SAME, "draw with torch, random or numpy.random: they are seeded for every row", _MINE]
                raise DataError(f'stream="split": rank {other} reads other rows than rank 0, {at}.', fix=fix)
        elif all(looks) and all(one.seen > 1 for one in every) and len(set(looks)) < len(looks):
            same = [rank for rank, look in enumerate(looks) if looks.count(look) > 1][:2]
            raise DataError(
                f'stream="mine": ranks {same[0]} and {same[1]} read the same rows, {at}.',
                fix=[
                    "give each rank rows of its own: every evener.world_size()-th, from evener.rank() on",
                    'stream="split": every rank reads everything and keeps its rows',
                ],
            )

    def _told(self, mine: Told) -> list[Told]:
        """What every rank tells, in rank order: one collective."""
        return [mine] if self.how.world_size == 1 else [Told(*one) for one in comm.all_gather_integers(mine)]


_SAME = "every rank must read the same rows in the same order: no sharding by rank, no order of its own"
_MINE = 'stream="mine": each rank reads rows of its own'


def _steps(epoch: int, mark: Mark) -> Iterator[tuple[None, StreamJob]]:
    yield None, StreamJob(seek=(epoch, mark))
    while True:
        yield None, StreamJob()
