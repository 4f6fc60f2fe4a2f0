"""Reading the rows of one job: a gather, a batched `__getitems__`, or one row after the other under its own seeds.

What comes out is a function of (dataset, seed, epoch, row) alone. That holds because
- a gather draws no random numbers;
- a row that is read alone is read under seeds from (seed, epoch, row);
- a batched read whose generators stand still afterwards drew nothing; one that drew is thrown away, and its rows are
  read alone, now and from then on.
So neither the cut, nor the worker that happens to read a row, nor prefetching can change a batch.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import Subset, default_collate

from evener.data import rng
from evener.data.columns import Columns
from evener.data.order import Indices
from evener.data.source import Collate
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
        from evener.data.transfer import pinned

        self.batches = [pinned(batch) for batch in self.batches]
        return self


class Step(Protocol):
    """Anything that carries a job."""

    @property
    def job(self) -> Job:
        """What to read."""


AnyStep = TypeVar("AnyStep", bound=Step)

# How much is gathered ahead, at most. Between two steps of training the caches hold the model, neither the dataset nor
# this code: 64 rows of 784 floats took 210 us alone and 110 us as part of a burst (one thread, a busy machine).
_BURST_BYTES, _BURST_STEPS = 1 << 21, 32


class GatherReader:
    """Reads columns: one gather, and its pieces are views."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self._row_bytes = max(1, sum(t[:1].nbytes for t in columns.tensors))

    def read(self, job: Job) -> Loaded:
        """The job's batches. Never fails for indices in range."""
        return self._pieces(self.columns.gather(torch.from_numpy(job.ids)), 0, job)

    def read_all(self, steps: Iterator[AnyStep]) -> Iterator[tuple[AnyStep, Loaded]]:
        """Each step with its batches; small jobs are gathered several at once. An error of `steps` waits its turn."""
        more, broken = True, None
        while more:
            group: list[AnyStep] = []
            rows = 0
            try:
                while len(group) < _BURST_STEPS and rows * self._row_bytes < _BURST_BYTES:
                    group.append(next(steps))
                    rows += len(group[-1].job.ids)
            except StopIteration:
                more = False
            except Exception as error:
                more, broken = False, error
            if group:
                columns = self.columns.gather(torch.from_numpy(np.concatenate([step.job.ids for step in group])))
                first, read = 0, []
                for step in group:
                    read.append((step, self._pieces(columns, first, step.job)))
                    first += len(step.job.ids)
                yield from read
        if broken is not None:
            raise broken

    def _pieces(self, columns: list[torch.Tensor], first: int, job: Job) -> Loaded:
        """The job's pieces, whose rows begin at row `first` of the gathered columns."""
        build, batches = self.columns.batch, []
        for start, stop in job.bounds:
            batches.append(build([c[first + start : first + stop] for c in columns]) if stop > start else None)
        return Loaded(batches, [stop - start for start, stop in job.bounds])


class RowReader:
    """Reads any other dataset, and columns for a user's collate_fn.

    Args:
        dataset: With `__getitem__` or `__getitems__`.
        collate_fn: Makes a batch of a list of rows; None is torch's `default_collate`. One of the user's is called
            under seeds from (seed, epoch, first position of the piece).
        skip: Leave rows that cannot be read out of their batch, instead of raising.
        seed: Of the run.
    """

    def __init__(self, dataset: Any, collate_fn: Collate | None, *, skip: bool, seed: int) -> None:
        self.dataset, self.collate_fn, self.skip, self.seed = dataset, collate_fn, skip, seed
        self._several = _several(dataset)
        self._draws = False  # a batched read has drawn random numbers: read row by row from now on

    def read(self, job: Job) -> Loaded:
        """The job's batches. The caller's random generators stand as before, whatever happens.

        Raises:
            DataError: a row that cannot be read, named, from the exception that it raised; rows that do not collate.
        """
        if not len(job.ids):
            return Loaded([None] * len(job.bounds), [0] * len(job.bounds))
        before = rng.states()
        try:
            rows, skipped = self._rows(job)
            batches, counts = [], []
            for start, stop in job.bounds:
                part = [row for row in rows[start:stop] if row is not _Missing]
                counts.append(len(part))
                ids, at = job.ids[start:stop], job.start + start
                batches.append(put_together(part, self.collate_fn, self.seed, job.epoch, at, ids) if part else None)
            return Loaded(batches, counts, skipped)
        finally:
            before.restore()

    def read_all(self, steps: Iterator[AnyStep]) -> Iterator[tuple[AnyStep, Loaded]]:
        """Each step with its batches, read when it is asked for."""
        return ((step, self.read(step.job)) for step in steps)

    def _rows(self, job: Job) -> tuple[list[Any], tuple[tuple[int, str], ...]]:
        """The job's rows, `_Missing` for a skipped one, and what was skipped."""
        failure: Exception | None = None
        if self._several is not None and not self._draws:
            # One seed for the epoch: a dataset that only looks at torch.initial_seed() sees the same in every cut.
            torch.default_generator.manual_seed(mix(self.seed, job.epoch))
            before = rng.states()
            try:
                rows = self._several(job.ids.tolist())
            except NotImplementedError:
                self._several = None
            except Exception as error:  # one of the rows; reading them alone finds out which
                failure = error
            else:
                if before.same(rng.states()):
                    return self._checked(rows, job), ()
                self._draws = True
        rows, skipped = self._one_by_one(job)
        if failure is not None and not skipped and not self.skip:
            raise DataError(
                f"{type(self.dataset).__name__}.__getitems__ failed for rows that can be read one by one"
                f" (epoch {job.epoch}): {type(failure).__name__}: {failure}",
                evidence=[f"rows {listed(job.ids)}", *where(failure)],
                fix=["mend __getitems__", "or remove it: rows are then read one by one"],
            ) from failure
        return rows, skipped

    def _checked(self, rows: Any, job: Job) -> list[Any]:
        got: list[Any] = list(rows)
        if len(got) != len(job.ids):
            raise DataError(
                f"{type(self.dataset).__name__}.__getitems__ returned {len(got)} rows for {len(job.ids)} indices.",
                evidence=[f"rows {listed(job.ids)}"],
                fix=["return one row per index, in the order of the indices"],
            )
        return got

    def _one_by_one(self, job: Job) -> tuple[list[Any], tuple[tuple[int, str], ...]]:
        rows: list[Any] = []
        skipped: list[tuple[int, str]] = []
        several, dataset = self._several, self.dataset
        for i, seed in zip(job.ids.tolist(), rng.row_seeds(self.seed, job.epoch, job.keys)):
            rng.seed_all(seed)
            try:
                rows.append(dataset[i] if several is None else several([i])[0])
            except Exception as error:
                if not self.skip:
                    raise _bad_row(i, job.epoch, error) from error
                skipped.append((i, f"{type(error).__name__}: {error}"))
                rows.append(_Missing)
        return rows, tuple(skipped)


def put_together(
    rows: list[Any], collate_fn: Collate | None, seed: int, epoch: int, position: int, ids: Indices
) -> Any:
    """A batch of rows: by `default_collate`, or by the user's function under seeds from (seed, epoch, position).

    Raises:
        DataError: rows that do not go together; `ids` names them.
    """
    try:
        if collate_fn is None:
            return default_collate(rows)
        rng.seed_all(mix(seed, epoch, position, _COLLATE))
        return collate_fn(rows)
    except Exception as error:
        name = "default_collate" if collate_fn is None else getattr(collate_fn, "__name__", "collate_fn")
        raise DataError(
            f"{len(rows)} rows could not be put together by {name} (epoch {epoch}): {type(error).__name__}: {error}",
            evidence=[f"rows {listed(ids)}", f"the first is {_shape(rows[0])}", *where(error)],
            fix=["let the dataset return rows of one shape", "or pass a collate_fn that pads them"],
        ) from error


class _Missing:
    """Stands for a row that was skipped."""


def _several(dataset: Any) -> Callable[[list[int]], Any] | None:
    """The dataset's batched read, if there is one that is more than a loop over its rows."""
    if type(dataset) is Subset and _several(dataset.dataset) is None:
        return None
    several = getattr(dataset, "__getitems__", None)
    return several if callable(several) else None


def _bad_row(i: int, epoch: int, error: Exception) -> DataError:
    return DataError(
        f"row {i} of the dataset could not be read (epoch {epoch}): {type(error).__name__}: {error}",
        evidence=where(error),
        fix=[f"dataset[{i}] shows it", 'on_bad_sample="skip" leaves such rows out, and names them'],
    )


def where(error: Exception) -> list[str]:
    """The innermost line of the error, when it is not one of this module's."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    return [f"at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}"] if frames else []


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
