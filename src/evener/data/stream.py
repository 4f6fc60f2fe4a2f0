"""Reading a stream: rows that come one after the other, with no row 0 to go back to.

What comes out is a function of (stream, seed, epoch, row number): `__iter__` and every `next` run under seeds of their
own, so a stream that shuffles or augments with torch, `random` or numpy's global generator gives the same rows on every
rank and after every resume. A stream with a `set_epoch(epoch)` is told the epoch.
"""

from __future__ import annotations

import copy
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from evener.batch import leaves
from evener.data import rng
from evener.data.cursor import Mark
from evener.data.order import Indices
from evener.data.read import Loaded, put_together, where
from evener.data.source import Collate
from evener.dist.mix import mix
from evener.errors import DataError

Pieces = tuple[tuple[int, int], ...]

_BEGIN = 0xBE  # sets the seeds of __iter__ apart from those of rows
_SEEDS = 1024  # seeds that are made at once
_PRINT_BYTES = 4096  # of a tensor: enough to tell two rows apart


START = Mark()


@dataclass(frozen=True, slots=True)
class StreamJob:
    """The rows of the next update. `seek`: first go to this epoch and mark. It is its own step."""

    seek: tuple[int, Mark] | None = None

    @property
    def job(self) -> StreamJob:
        return self

    @property
    def ids(self) -> Indices:
        """Rows of a stream have no names before they are read."""
        return np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Taken(Loaded):
    """What a stream gave for one update, on one rank.

    seen: rows that were used of the stream: the whole update's (split) or this rank's (mine). more: whether another
    update follows in this epoch, as far as this rank knows. look: a checksum of the rows, to compare ranks. reread:
    (rows, seconds) of going back. changed: after going back another row came next than when the mark was set.
    """

    cut: Pieces = ()
    seen: int = 0
    more: bool = False
    mark: Mark = START
    first: bool = False
    look: int = 0
    reread: tuple[int, float] | None = None
    changed: bool = False


class StreamReader:
    """Reads one stream, update after update, epoch after epoch.

    Args:
        dataset: Can be iterated; `state_dict` and `load_state_dict` are used when it has both.
        size: Rows of an update that are taken from this stream: the global batch (split), or this rank's part (mine).
        cut: `cut(rows)`: this rank's pieces of an update of so many rows.
        split: The stream holds every rank's rows, and only the pieces are kept.
        drop_last: An update is whole or not made; so a whole one is read ahead, else one row.
        seed: Of per-row randomness; with `split` the same on every rank.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        collate_fn: Collate | None,
        *,
        size: int,
        cut: Callable[[int], Sequence[tuple[int, int]]],
        global_batch_size: int,
        split: bool,
        drop_last: bool,
        seed: int,
    ) -> None:
        self.dataset, self.collate_fn, self.size, self.cut, self.split = dataset, collate_fn, size, cut, split
        self.global_batch_size, self.drop_last, self.seed = global_batch_size, drop_last, seed
        self.keeps_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._iterator: Iterator[Any] = iter(())
        self._seeds: Iterator[int] = iter(())
        self._epoch, self._used = -1, 0
        self._ahead: deque[Any] = deque()  # rows of coming updates
        self._ended = self._began = self._first = False
        self._error: Exception | None = None
        self._loaded: int | None = None  # look of the first update after a load_state_dict in the middle of an epoch

    def read(self, job: StreamJob) -> Taken:
        """The next update's batches. The caller's random generators stand as before.

        Raises:
            DataError: a row that cannot be read, rows that do not collate, or a stream that cannot begin anew.
        """
        before = rng.states()
        try:
            return self._read(job)
        finally:
            before.restore()

    def read_all(self, steps: Iterator[Any]) -> Iterator[tuple[Any, Taken]]:
        """Each job with its result, read when it is asked for."""
        return ((job, self.read(job)) for job in steps)

    def _read(self, job: StreamJob) -> Taken:
        reread, changed = None, False
        if job.seek is not None:
            reread, changed = self._seek(*job.seek)
        elif self._ended and not self._ahead:
            self._open(self._epoch + 1)
        start = self._used
        self._fill(self.size)
        if self._error is not None and len(self._ahead) < self.size:
            raise _bad_row(start + len(self._ahead), self._epoch, self._error) from self._error
        rows = [self._ahead.popleft() for _ in range(min(self.size, len(self._ahead)))]
        self._used += len(rows)
        # Exactly these rows were taken: what is read ahead below is not in the state.
        state = copy.deepcopy(self.dataset.state_dict()) if self.keeps_state else None  # type: ignore[attr-defined]
        needed = self.size if self.drop_last else 1
        self._fill(needed)
        more = len(self._ahead) >= needed or self._error is not None
        after = look_of([self._ahead[0]]) if self._ahead else None
        taken = Taken([], [], seen=len(rows), more=more, first=self._first, reread=reread, changed=changed)
        taken.mark = Mark(self._used, state, after, ended=self._ended and not self._ahead)
        taken.look = look_of(rows if self._first else rows[:1])
        self._check_begin(job, taken)
        self._first = False
        if not self.drop_last or len(rows) == self.size:
            self._collate(taken, rows, start)
        if not more and self._ended:
            self._ahead.clear()  # under drop_last: the rest
        return taken

    def _collate(self, taken: Taken, rows: list[Any], start: int) -> None:
        taken.cut = tuple(self.cut(len(rows) if self.split else self.global_batch_size)) if rows else ()
        first = 0 if self.split or not taken.cut else taken.cut[0][0]
        for begin, end in taken.cut:
            part = rows[begin - first : end - first]
            at = start + begin - first
            taken.rows.append(len(part))
            ids = np.arange(at, at + len(part))
            batch = put_together(part, self.collate_fn, self.seed, self._epoch, at, ids) if part else None
            taken.batches.append(batch)

    def _fill(self, rows: int) -> None:
        """Read ahead until `rows` rows wait, or the epoch ends, or a row cannot be read (then its turn comes later)."""
        while len(self._ahead) < rows and not self._ended and self._error is None:
            rng.seed_all(next(self._seeds))
            try:
                self._ahead.append(next(self._iterator))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._error = error

    def _open(self, epoch: int, mark: Mark = START) -> None:
        """Begin an epoch; with a state in the mark, where that state stands."""
        name = type(self.dataset).__name__
        if (self._began or epoch > 0) and hasattr(self.dataset, "__next__"):
            raise DataError(
                f"the stream is a {name}: it can be iterated once, and epoch {epoch} would begin it anew."
                if epoch != self._epoch
                else f"the stream is a {name}: it can be iterated once, and there is no way back to row {mark.rows}.",
                fix=["give an object whose __iter__ begins anew: class Rows(torch.utils.data.IterableDataset)"],
            )
        self._epoch, self._used, self._ended, self._error, self._began, self._first = epoch, 0, False, None, True, True
        self._ahead.clear()
        rng.seed_all(mix(self.seed, epoch, _BEGIN))
        try:
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            if mark.state is not None:
                self.dataset.load_state_dict(copy.deepcopy(mark.state))  # type: ignore[attr-defined]
                self._used = mark.rows
            self._iterator = iter(self.dataset)
        except Exception as error:
            raise DataError(
                f"the stream {name} could not begin epoch {epoch}: {type(error).__name__}: {error}",
                evidence=where(error),
            ) from error
        self._seeds = _seeds(self.seed, epoch, self._used)

    def _seek(self, epoch: int, mark: Mark) -> tuple[tuple[int, float] | None, bool]:
        """Go to `mark` in `epoch`: by the dataset's own state, or by reading again. (rows, seconds) of the latter."""
        if mark.state is not None and not self.keeps_state:
            mark = Mark(mark.rows, None, mark.after)
        began = time.monotonic()
        self._open(epoch, mark)
        while self._used < mark.rows:
            self._fill(1)
            if self._error is not None:
                raise _bad_row(self._used, epoch, self._error) from self._error
            if not self._ahead:
                raise DataError(
                    f"the stream ended after {self._used} rows of epoch {epoch}; the checkpoint was written after"
                    f" {mark.rows} of them.",
                    fix=["resume with the stream that the checkpoint was written with", "or start anew"],
                )
            self._ahead.popleft()
            self._used += 1
        reread = (mark.rows, time.monotonic() - began) if mark.rows and mark.state is None else None
        if mark.after is None:
            return reread, False
        self._fill(1)
        return reread, not self._ahead or look_of([self._ahead[0]]) != mark.after

    def _check_begin(self, job: StreamJob, taken: Taken) -> None:
        """A dataset may stay where load_state_dict put it, and begin the next epoch there: rows would be missing."""
        if not self._first:
            return
        if job.seek is not None:
            self._loaded = taken.look if job.seek[1].state is not None and taken.seen > 1 else None
            return
        stays, self._loaded = self._loaded == taken.look, None
        if stays:
            raise DataError(
                f"the stream begins epoch {self._epoch} in the middle: where its load_state_dict had put epoch"
                f" {self._epoch - 1}.",
                fix=["when __iter__ has come to the end, let it forget the loaded position"],
            )


def _seeds(seed: int, epoch: int, start: int) -> Iterator[int]:
    while True:
        yield from rng.row_seeds(seed, epoch, np.arange(start, start + _SEEDS))
        start += _SEEDS


def _bad_row(row: int, epoch: int, error: Exception) -> DataError:
    return DataError(
        f"row {row} of the stream could not be read (epoch {epoch}): {type(error).__name__}: {error}",
        evidence=where(error),
        fix=["leave bad rows out inside of the stream: after an error it may have no next row"],
    )


def look_of(rows: list[Any]) -> int:
    """A checksum of rows, the same in every process: numbers, texts and the beginnings of tensors and arrays."""
    crc = 0
    for row in rows:
        for leaf in _leaves(row):
            crc = zlib.crc32(leaf, crc)
    return crc


def _leaves(row: Any) -> Iterator[bytes]:
    if isinstance(row, torch.Tensor):
        if row.layout == torch.strided and not row.is_meta:
            yield row.detach().reshape(-1)[:_PRINT_BYTES].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(row, np.ndarray):
        yield np.ascontiguousarray(row.reshape(-1)[:_PRINT_BYTES]).tobytes() if row.dtype != object else b""
    elif isinstance(row, str | bytes | int | float | bool | np.generic | None):
        yield repr(row)[:_PRINT_BYTES].encode()
    elif isinstance(row, Mapping):
        for key, value in row.items():
            yield repr(key).encode()
            yield from _leaves(value)
    elif isinstance(row, list | tuple):
        for value in row:
            yield from _leaves(value)
    else:
        for _, leaf in leaves(row):
            yield from _leaves(leaf)
