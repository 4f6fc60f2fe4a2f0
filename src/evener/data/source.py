"""What the user gave as data, looked at once: its rows, how they are read, and what a DataLoader brought along."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from evener.data import loader as loaders
from evener.data.columns import Columns
from evener.errors import DataError, UsageError, refuse_prepared

Collate = Callable[[list[Any]], Any]
Cut = Callable[[int], Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Source:
    """A dataset that is ready to be read.

    `dataset` has a length and rows, or is a stream, which can only be iterated; when it is a `Columns`, whole batches
    are one gather. `order`, `collate_fn` and the worker settings are what a DataLoader said, None where it said
    nothing. `notes` are lines worth telling the user.
    """

    dataset: Any
    rows: int  # 0 for a stream
    stream: bool = False
    order: str | None = None
    collate_fn: Collate | None = None
    num_workers: int | None = None
    prefetch_factor: int | None = None
    timeout: float | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    notes: tuple[str, ...] = ()

    @property
    def in_memory(self) -> bool:
        """Whether rows come from this process's memory, so that worker processes would only cost."""
        inner = self.dataset
        while type(inner) is Subset:
            inner = inner.dataset
        return isinstance(inner, Columns | list | tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is to be read: what both kinds of feed are told. Keywords of a run were checked by `Config`."""

    global_batch_size: int  # rows of an update over all ranks
    drop_last: bool  # otherwise the last update of an epoch has fewer
    rank: int  # who this is; the rows of a dataset do not depend on it
    world_size: int
    local_world_size: int | None = None  # ranks on this machine (None: all of them), which share its CPUs
    # cut(rows) gives this rank's pieces of an update of `rows` rows: contiguous (start, stop) offsets in the update.
    # Asked anew for every update, when the update is read; prefetched updates keep the cut they had.
    cut: Cut
    device: torch.device  # where the batches go
    seed: int  # of per-row randomness; the order has its own
    num_workers: int | Literal["auto"] = "auto"  # processes that read rows; "auto": what a DataLoader said, else chosen
    collate_fn: Collate | None = None  # in place of the source's
    on_bad_sample: str = "raise"  # or "skip": such rows are left out and listed in the portion
    timeout: float | None = None  # seconds to wait for a worker; None: what a DataLoader said, else 300
    lap: Callable[[str], None] | None = None  # called around what waits for a copy to the device
    inspect: Callable[[Any], None] | None = None  # sees every batch, in order, before it is copied; may raise
    say: Callable[[str], None] | None = None  # called on every rank with what the user should know of a stream
    exact: bool = False  # a stream that goes on with another row than before is an error, not only said

    def by_reader(self, source: Source) -> Reading:
        """What a reader needs and data workers can be sent: the collate_fn that counts, none of the run's functions."""
        collate_fn = self.collate_fn if self.collate_fn is not None else source.collate_fn
        return replace(self, collate_fn=collate_fn, cut=_no_rows, inspect=None, say=None, lap=None)


def _no_rows(rows: int) -> tuple[()]:
    return ()


def source_of(data: Any, stream: str | None = None) -> Source:
    """Accept what the user calls data.

    Taken: a map-style dataset, a TensorDataset or a Subset of one, one tensor or array, a tuple or a dict of tensors
    or arrays whose first dimension is the rows, a DataLoader, and with `stream` ("split" or "mine") a stream.

    Raises:
        DataError: empty, of unequal lengths, a stream without `stream`, a foreign sampler, or not a dataset at all.
        UsageError: `stream` for what is none.
    """
    if isinstance(data, Source):
        return data
    refuse_prepared("DataLoader", data, "the dataset itself, loader.dataset", DataError)
    loader = data if isinstance(data, DataLoader) else None
    inner = data if loader is None else loader.dataset
    streams, kind = is_stream(inner), type(inner).__name__
    if streams and stream is None:
        raise DataError(
            f"{kind} is a stream: it can be iterated, but has no row 0 to go back to.",
            fix=[
                'stream="split": every rank reads all of it and keeps its rows',
                'stream="mine": it gives each rank rows of its own (sharded by evener.rank() and world_size())',
                "or give a map-style dataset (__len__ and __getitem__); a stream that fits in memory: list(stream)",
            ],
        )
    if stream is not None and not streams:
        what = f'stream="{stream}" is for what can only be iterated; a {kind} has rows with numbers.'
        raise UsageError(what, fix=["leave stream= out: every row is read once, on any number of processes"])
    dataset, rows = (inner, 0) if streams else _dataset(inner)
    if loader is None:
        return Source(dataset, rows, streams)
    collate: Any = None if loader.collate_fn is default_collate else loader.collate_fn
    return Source(
        dataset,
        rows,
        streams,
        order=loaders.order_of(loader, None if streams else rows),
        collate_fn=collate,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor,
        timeout=loader.timeout or None,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        notes=loaders.ignored(loader, isinstance(dataset, Columns) and collate is None, streams),
    )


def is_stream(data: Any) -> bool:
    """Whether data can be iterated and has no rows with numbers; a DataLoader is what its dataset is."""
    if isinstance(data, DataLoader):
        data = data.dataset
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _dataset(data: Any) -> tuple[Any, int]:
    """The dataset to read from, as columns where it is tensors in memory, and how many rows it has."""
    columns, kind = _columns(data), type(data).__name__
    if columns is None and (isinstance(data, Mapping | tuple | str | bytes) or not hasattr(data, "__getitem__")):
        raise _no_dataset(data)
    try:
        rows = len(data if columns is None else columns)
    except (TypeError, NotImplementedError):
        raise DataError(f"{kind} has no length.", fix=["define __len__: how many rows the dataset has"]) from None
    except Exception as error:  # such as a negative one
        fix = ["return how many rows the dataset has, an integer from 1"]
        raise DataError(f"{kind}.__len__ failed: {type(error).__name__}: {error}.", fix=fix) from error
    if rows < 1:
        raise DataError(f"the dataset is empty ({kind}).", fix=["give a dataset with at least one row"])
    return data if columns is None else columns, rows


def _no_dataset(data: Any) -> DataError:
    evidence, fix = [], []
    if isinstance(data, Mapping):
        evidence = [f"{key!r}: {type(value).__name__}" for key, value in list(data.items())[:8]]
        fix = ["columns: make every value a tensor", 'splits: pass one of them, such as data["train"]']
    elif isinstance(data, tuple):
        evidence = [f"its parts: {', '.join(type(part).__name__ for part in data[:8])}"]
        fix = ["columns: make every part a tensor", "rows: pass a list of rows"]
    accepted = "accepted: a Dataset with __len__ and __getitem__, a DataLoader, a tensor, a tuple or dict of tensors"
    return DataError(f"a {type(data).__name__} is not a dataset.", evidence=evidence, fix=[*fix, accepted])


def _columns(data: Any) -> Columns | None:
    """Columns, when the data is tensors in memory; None for a dataset that is read row by row."""
    if type(data) is TensorDataset:
        return Columns(data.tensors, list, tuple)  # a list, as default_collate makes of its tuples
    if type(data) is Subset:
        inner = _columns(data.dataset)
        return None if inner is None else inner.through(data.indices)
    if _is_array(data):
        return Columns([_tensor(data)], _only, _only)
    parts = list(data.values()) if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    if not parts or not all(map(_is_array, parts)):
        return None
    if isinstance(data, list):
        count = len(data)
        raise DataError(
            f"a list of {count} tensors can mean {count} columns or {count} rows.",
            fix=[
                "columns (x, y): pass a tuple, (x, y)",
                "rows of one shape: pass torch.stack(rows)",
                "other rows: a Dataset",
            ],
        )
    columns = [_tensor(part) for part in parts]
    if isinstance(data, tuple):
        return Columns(columns, tuple, tuple)
    named = functools.partial(_named, tuple(data))
    return Columns(columns, named, named, [repr(name) for name in data])


def _named(names: tuple[Any, ...], values: Any) -> dict[Any, Any]:
    return dict(zip(names, values))


def _only(values: Any) -> Any:
    (value,) = values
    return value


def _is_array(value: object) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def _tensor(value: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        # A read-only array (a memory map) is only ever gathered from.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        try:
            return torch.as_tensor(value).detach()  # a gradient would be that of every update together
        except (TypeError, ValueError) as error:  # such as another byte order
            cause = f"an array of dtype {value.dtype} has no tensor."
            raise DataError(cause, evidence=[str(error)], fix=["array.astype(...)"]) from None
