"""Reading a stream: rows that come one after the other, with no row 0 to go back to.

What comes out is a function of (stream, seed, epoch, row number): `__iter__` and every `next` run under seeds of their
own, so a stream that shuffles or augments with torch, `random` or numpy's global generator gives the same rows on every
rank and after every resume. A stream with a `set_epoch(epoch)` is told the epoch.

The body of a generator `__iter__` begins in the first `next`. So that a shuffle there is the same after a resume, the
first `next` always has the seeds of row 0, and a state is kept of one row before: that row is read again and forgotten,
and the rows that are used have seeds of their own.
"""

from __future__ import annotations

import copy
import itertools
import time
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch

from evener.batch import leaves
from evener.data import rng
from evener.data.cursor import Mark
from evener.data.order import Indices, where
from evener.data.read import Loaded, Reader, collated
from evener.data.source import Cut, Reading
from evener.dist.mix import mix
from evener.errors import DataError

START = Mark()

_BEGIN = 0xBE  # sets the seeds of __iter__ apart from those of rows
_SEEDS = 1024  # seeds that are made at once
_PRINT_BYTES = 4096  # of a tensor: enough to tell two rows apart

# Kept by a stream with a state, which is what the runs of a process share: {epoch: a checksum after its first row}.
_BEGAN = "_evener_began"


@dataclass(frozen=True, slots=True)
class StreamJob:
    """The rows of the next update. `seek`: first go to this epoch and mark."""

    seek: tuple[int, Mark] | None = None
    ids: ClassVar[Indices] = np.empty(0, dtype=np.int64)  # rows of a stream have no names before they are read


@dataclass(slots=True)
class Taken(Loaded):
    """What a stream gave for one update, on one rank.

    seen: rows that were used of the stream: the whole update's (split) or this rank's (mine). more: whether another
    update follows in this epoch, as far as this rank knows. look: a checksum of rows, to compare ranks; 0: nothing to
    compare. changed: after going back another row came next than when the mark was set. moved: the epoch began in
    another state than when this process first read it. notes: to be said.
    """

    cut: tuple[tuple[int, int], ...] = ()
    seen: int = 0
    more: bool = False
    mark: Mark = START
    look: int = 0
    changed: bool = False
    moved: bool = False
    notes: list[str] = field(default_factory=list)


class StreamReader(Reader):
    """Reads one stream, update after update, epoch after epoch; its `state_dict` and `load_state_dict` if it has both.

    size: Rows of an update that are taken from this stream: the global batch (split), or this rank's part (mine).
    With `drop_last` an update is whole or not made; so a whole one is read ahead, else one row.
    """

    def __init__(self, dataset: Any, how: Reading, cut: Cut, size: int, split: bool) -> None:
        self.dataset, self.how, self.cut, self.size, self.split = dataset, how, cut, size, split
        self.keeps_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._iterator: Iterator[Any] = iter(())
        self._seeds: Iterator[int] = iter(())
        self._epoch, self._used = -1, 0
        self._ahead: deque[Any] = deque()  # rows of coming updates
        self._before: Any = None  # the state before the last row of the next update was read
        self._again: list[Any] = []  # the row that was read again after a load_state_dict
        self._ended = self._began = self._first = self._read = False
        self._error: Exception | None = None
        self._loaded: int | None = None  # look of the first update after a load_state_dict in the middle of an epoch

    def read(self, job: StreamJob) -> Taken:
        """The next update's batches. The caller's random generators stand as before."""
        with rng.kept():
            taken = Taken([], [])
            if job.seek is not None:
                self._seek(*job.seek, taken)
            elif self._ended and not self._ahead:
                self._open(self._epoch + 1)
            if self._first and not self._used and self.keeps_state:
                self._look_at_beginning(taken)
            start = self._used
            self._fill(self.size)
            if len(self._ahead) < self.size:
                self._raise_error(start + len(self._ahead))
            rows = [self._ahead.popleft() for _ in range(min(self.size, len(self._ahead)))]
            self._used += len(rows)
            state, back = self._state()
            needed = self.size if self.how.drop_last else 1
            self._fill(needed)
            taken.seen, taken.more = len(rows), len(self._ahead) >= needed or self._error is not None
            taken.mark = Mark(self._used, state, self._look_ahead(), ended=self._ended and not self._ahead, back=back)
            if self._first:
                taken.look = look_of(rows)
                self._check_begin(job, taken, rows)
            elif self.split:
                taken.look = look_of(rows[:1])
            self._first = False
            if rows and (not self.how.drop_last or len(rows) == self.size):
                taken.cut = tuple(self.cut(len(rows) if self.split else self.how.global_batch_size))
                first = 0 if self.split or not taken.cut else taken.cut[0][0]
                bounds = [(a - first, b - first) for a, b in taken.cut]
                ids = np.arange(start, self._used)
                taken.batches, taken.rows = collated(rows, bounds, self.how, self._epoch, start, ids)
            if not taken.more and self._ended:
                self._ahead.clear()  # under drop_last: the rest
            return taken

    def _fill(self, rows: int) -> None:
        """Read ahead until `rows` rows wait, or the epoch ends, or a row cannot be read (then its turn comes later)."""
        while len(self._ahead) < rows and not self._ended and self._error is None:
            if self.keeps_state and len(self._ahead) == self.size - 1 and self._read:
                self._before = copy.deepcopy(self.dataset.state_dict())
            self._read = True
            rng.seed_all(next(self._seeds))
            try:
                self._ahead.append(next(self._iterator))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self._error = error

    def _state(self) -> tuple[Any, int]:
        """A state for the mark, before anything is read ahead, and how many rows before the mark it is.

        After the first row of an epoch there is none: that row is read again.
        """
        state, self._before = self._before, None
        if state is None and self.keeps_state and self._used != 1:
            return copy.deepcopy(self.dataset.state_dict()), 0
        return state, int(state is not None)

    def _look_ahead(self) -> int | None:
        return look_of([self._ahead[0]]) if self._ahead else None

    def _raise_error(self, row: int) -> None:
        """What reading `row` raised, if it did."""
        if (error := self._error) is not None:
            what = f"row {row} of the stream could not be read (epoch {self._epoch}): {type(error).__name__}: {error}"
            fix = ["leave bad rows out inside of the stream: after an error it may have no next row"]
            raise DataError(what, evidence=where(error), fix=fix) from error

    def _open(self, epoch: int, mark: Mark = START) -> None:
        """Begin an epoch; with a state in the mark, where that state stands."""
        name = type(self.dataset).__name__
        if (self._began or epoch > 0) and hasattr(self.dataset, "__next__"):
            again, back = f"epoch {epoch} would begin it anew", f"there is no way back to row {mark.rows}"
            what = f"the stream is a {name}: it can be iterated once, and {back if epoch == self._epoch else again}."
            fix = ["give an object whose __iter__ begins anew: class Rows(torch.utils.data.IterableDataset)"]
            raise DataError(what, fix=fix)
        self._epoch, self._used, self._ended, self._error, self._began, self._first = epoch, 0, False, None, True, True
        self._read, self._before, self._again = False, None, []
        self._ahead.clear()
        rng.seed_all(mix(self.how.seed, epoch, _BEGIN))
        try:
            if callable(getattr(self.dataset, "set_epoch", None)):
                self.dataset.set_epoch(epoch)
            if mark.state is not None and self.keeps_state:
                self.dataset.load_state_dict(copy.deepcopy(mark.state))
                self._used = mark.rows - mark.back
            self._iterator = iter(self.dataset)
        except Exception as error:
            what = f"the stream {name} could not begin epoch {epoch}: {type(error).__name__}: {error}"
            raise DataError(what, evidence=where(error)) from error
        self._seeds = _seeds(self.how.seed, epoch, self._used)
        if self._used and mark.back:
            next(self._seeds)
            self._seeds = itertools.chain([next(_seeds(self.how.seed, epoch, 0))], self._seeds)

    def _seek(self, epoch: int, mark: Mark, taken: Taken) -> None:
        """Go to `mark` in `epoch`: by the dataset's own state, or by reading again, which is said."""
        began = time.monotonic()
        self._open(epoch, mark)
        if again := mark.rows - self._used:
            while self._used < mark.rows:
                self._fill(1)
                if not self._ahead:
                    self._raise_error(self._used)
                    raise DataError(
                        f"the stream ended after {self._used} rows of epoch {epoch}; the checkpoint was written after"
                        f" {mark.rows} of them.",
                        fix=["resume with the stream that the checkpoint was written with", "or start anew"],
                    )
                self._again = [self._ahead.popleft()]
                self._used += 1
        if again > 1:
            taken.notes.append(f"read {again:,} rows again in {time.monotonic() - began:.1f} s")
        if mark.after is not None:
            self._fill(1)
            taken.changed = self._look_ahead() != mark.after

    def _check_begin(self, job: StreamJob, taken: Taken, rows: list[Any]) -> None:
        """A dataset may stay where load_state_dict put it, and begin the next epoch there: rows would be missing."""
        if job.seek is not None:
            loaded = job.seek[1].state is not None and taken.seen > 1
            self._loaded = look_of([*self._again, *rows][: len(rows)]) if loaded else None
        elif self._loaded == taken.look:
            raise DataError(
                f"the stream begins epoch {self._epoch} in the middle: where its load_state_dict had put epoch"
                f" {self._epoch - 1}.",
                fix=["when __iter__ has come to the end, let it forget the loaded position"],
            )
        else:
            self._loaded = None

    def _look_at_beginning(self, taken: Taken) -> None:
        """An object that another run has left in the middle may go on there: rows would be missing."""
        self._fill(1)
        if hasattr(self.dataset, "__dict__"):
            known = vars(self.dataset).setdefault(_BEGAN, {})
            state = self.dataset.state_dict()
            if isinstance(state, Mapping):  # it may be all that the object has
                state = {name: value for name, value in state.items() if name != _BEGAN}
            look = look_of([state])
            taken.moved = known.setdefault(str(self._epoch), look) != look


def _seeds(seed: int, epoch: int, start: int) -> Iterator[int]:
    while True:
        yield from rng.row_seeds(seed, epoch, np.arange(start, start + _SEEDS))
        start += _SEEDS


def look_of(rows: list[Any]) -> int:
    """A checksum of rows, the same in every process: numbers, texts and the beginnings of tensors and arrays."""
    crc = 0
    for leaf in _leaves(rows):
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
