"""Reading the rows of one job: a gather, a batched `__getitems__`, or one row after the other under its own seeds.

What comes out is a function of (dataset, seed, epoch, row) alone. That holds because
- a gather draws no random numbers;
- a row that is read alone is read under seeds from (seed, epoch, row);
- a batched read whose generators stand still afterwards drew nothing; one that drew is thrown away, and its rows are
  read alone, now and from then on.
So neither the cut, nor the worker that happens to read a row, nor prefetching can change a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, default_collate

from evener.data import rng
from evener.data.columns import Columns
from evener.data.order import Indices, where
from evener.data.source import Reading
from evener.data.transfer import pinned
from evener.dist.mix import mix
from evener.errors import DataError

_COLLATE = 0xC0  # sets the seeds of a random collate_fn apart from those of rows


@dataclass(frozen=True, slots=True)
class Job:
    """One rank's rows of one update.

    `ids` are row indices (int64) at positions `start`, `start + 1`, ... of the epoch, `keys` their randomness keys
    (`Order.keys`); piece k is rows bounds[k][0] .. bounds[k][1]-1 of them.
    """

    epoch: int
    start: int
    ids: Indices
    keys: Indices
    bounds: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class Loaded:
    """A job's batches, one per piece, on the CPU (or where the columns are); None where a piece has no row."""

    batches: list[Any]
    rows: list[int]
    skipped: tuple[tuple[int, str], ...] = ()

    def pin_memory(self) -> Loaded:
        """Called by the DataLoader's pinning thread on CUDA."""
        self.batches = [pinned(batch) for batch in self.batches]
        return self


class Reader:
    """What reads jobs, here or in data workers, to which it is sent as it is."""

    def read(self, job: Any) -> Loaded:
        """The job's batches."""
        raise NotImplementedError

    def read_all(self, steps: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Loaded]]:
        """(plan, batches) for each (plan, job), read when it is asked for."""
        return ((plan, self.read(job)) for plan, job in steps)


# How much is gathered ahead, at most. Between two steps of training the caches hold the model, neither the dataset nor
# this code: 64 rows of 784 floats took 210 us alone and 110 us as part of a burst (one thread, a busy machine).
_BURST_BYTES, _BURST_STEPS = 1 << 21, 32


class GatherReader(Reader):
    """Reads columns: one gather, and its pieces are views."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._row_bytes = max(1, sum(t[:1].nbytes for t in columns.tensors))

    def read(self, job: Job) -> Loaded:
        return next(self.read_all(iter([(None, job)])))[1]

    def read_all(self, steps: Iterator[tuple[Any, Job]]) -> Iterator[tuple[Any, Loaded]]:
        """As for any reader; small jobs are gathered several at once. An error of `steps` waits its turn."""
        more, broken, build = True, None, self.columns.batch
        while more:
            group: list[tuple[Any, Job]] = []
            rows = 0
            try:
                while len(group) < _BURST_STEPS and rows * self._row_bytes < _BURST_BYTES:
                    group.append(next(steps))
                    rows += len(group[-1][1].ids)
            except StopIteration:
                more = False
            except Exception as error:
                more, broken = False, error
            if group:
                columns = self.columns.gather(torch.from_numpy(np.concatenate([job.ids for _, job in group])))
                read, at = [], 0
                for plan, job in group:
                    cut = [(start + at, stop + at) for start, stop in job.bounds]
                    batches = [build([c[start:stop] for c in columns]) if stop > start else None for start, stop in cut]
                    read.append((plan, Loaded(batches, [stop - start for start, stop in cut])))
                    at += len(job.ids)
                yield from read
        if broken is not None:
            raise broken


class RowReader(Reader):
    """Reads any other dataset (`__getitem__` or `__getitems__`), and columns for a user's collate_fn."""

    def __init__(self, dataset: Any, how: Reading) -> None:
        self.dataset, self.how, self.skip = dataset, how, how.on_bad_sample == "skip"
        self._several = _several(dataset)
        self._draws = False  # a batched read has drawn random numbers: read row by row from now on

    def read(self, job: Job) -> Loaded:
        """The job's batches. The caller's random generators stand as before, whatever happens."""
        if not len(job.ids):
            return Loaded([None] * len(job.bounds), [0] * len(job.bounds))
        with rng.kept():
            rows, skipped = self._rows(job)
            return Loaded(*collated(rows, job.bounds, self.how, job.epoch, job.start, job.ids), skipped)

    def _rows(self, job: Job) -> tuple[list[Any], tuple[tuple[int, str], ...]]:
        """The job's rows, `_Missing` for a skipped one, and what was skipped."""
        failure: Exception | None = None
        name = type(self.dataset).__name__
        if self._several is not None and not self._draws:
            # One seed for the epoch: a dataset that only looks at torch.initial_seed() sees the same in every cut.
            torch.default_generator.manual_seed(mix(self.how.seed, job.epoch))
            before = rng.states()
            try:
                rows = list(self._several(job.ids.tolist()))
            except NotImplementedError:
                self._several = None
            except Exception as error:  # one of the rows; reading them alone finds out which
                failure = error
            else:
                self._draws = not rng.same(before, rng.states())
                if not self._draws and len(rows) != len(job.ids):
                    what = f"{name}.__getitems__ returned {len(rows)} rows for {len(job.ids)} indices."
                    fix = ["return one row per index, in the order of the indices"]
                    raise DataError(what, evidence=[f"rows {listed(job.ids)}"], fix=fix)
                if not self._draws:
                    return rows, ()
        rows, skipped = self._one_by_one(job)
        if failure is not None and not skipped and not self.skip:
            raise DataError(
                f"{name}.__getitems__ failed for rows that can be read one by one"
                f" (epoch {job.epoch}): {type(failure).__name__}: {failure}",
                evidence=[f"rows {listed(job.ids)}", *where(failure)],
                fix=["mend __getitems__", "or remove it: rows are then read one by one"],
            ) from failure
        return rows, skipped

    def _one_by_one(self, job: Job) -> tuple[list[Any], tuple[tuple[int, str], ...]]:
        rows: list[Any] = []
        skipped: list[tuple[int, str]] = []
        several, dataset = self._several, self.dataset
        for i, seed in zip(job.ids.tolist(), rng.row_seeds(self.how.seed, job.epoch, job.keys)):
            rng.seed_all(seed)
            try:
                rows.append(dataset[i] if several is None else several([i])[0])
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                if not self.skip:
                    what = f"row {i} of the dataset could not be read (epoch {job.epoch}): {problem}"
                    fix = [f"dataset[{i}] shows it", 'on_bad_sample="skip" leaves such rows out, and names them']
                    raise DataError(what, evidence=where(error), fix=fix) from error
                skipped.append((i, problem))
                rows.append(_Missing)
        return rows, tuple(skipped)


def collated(
    rows: list[Any], bounds: Sequence[tuple[int, int]], how: Reading, epoch: int, position: int, ids: Indices
) -> tuple[list[Any], list[int]]:
    """The batches of the pieces of rows, and how many rows each has. `position`: of the first row in the epoch.

    By `default_collate`, or by the user's function under seeds from (seed, epoch, first position of the piece).
    """
    batches: list[Any] = []
    counts: list[int] = []
    collate_fn = default_collate if how.collate_fn is None else how.collate_fn
    for start, stop in bounds:
        part = [row for row in rows[start:stop] if row is not _Missing]
        counts.append(len(part))
        try:
            if how.collate_fn is not None and part:
                rng.seed_all(mix(how.seed, epoch, position + start, _COLLATE))
            batches.append(collate_fn(part) if part else None)
        except Exception as error:
            name = getattr(collate_fn, "__name__", "collate_fn")
            problem = f"{type(error).__name__}: {error}"
            what = f"{len(part)} rows could not be put together by {name} (epoch {epoch}): {problem}"
            evidence = [f"rows {listed(ids[start:stop])}", f"the first is {_shape(part[0])}", *where(error)]
            fix = ["let the dataset return rows of one shape", "or pass a collate_fn that pads them"]
            raise DataError(what, evidence=evidence, fix=fix) from error
    return batches, counts


class _Missing:
    """Stands for a row that was skipped."""


def _several(dataset: Any) -> Callable[[list[int]], Any] | None:
    """The dataset's batched read, if there is one that is more than a loop over its rows."""
    if type(dataset) is Subset and _several(dataset.dataset) is None:
        return None
    several = getattr(dataset, "__getitems__", None)
    return several if callable(several) else None


def _shape(row: Any) -> str:
    if isinstance(row, torch.Tensor | np.ndarray):
        return f"{type(row).__name__} {list(row.shape)}"
    if isinstance(row, tuple | list):
        return f"{type(row).__name__} of ({', '.join(_shape(part) for part in row[:6])})"
    if isinstance(row, dict):
        return f"dict of ({', '.join(f'{key!r}: {_shape(value)}' for key, value in list(row.items())[:6])})"
    return type(row).__name__


def listed(ids: Indices, most: int = 16) -> str:
    """Row ids for a message: the first few, and how many more."""
    text = ", ".join(map(str, ids[:most].tolist())) if len(ids) else "that come next in the stream"
    return text if len(ids) <= most else f"{text} and {len(ids) - most} more"
