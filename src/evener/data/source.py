"""What the user gave as data, looked at once: its rows, how they are read, and what a DataLoader brought along."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from evener.data import loader as loaders
from evener.data.columns import Columns
from evener.errors import DataError, UsageError, refuse_prepared

Collate = Callable[[list[Any]], Any]


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


def source_of(data: Any, stream: str | None = None) -> Source:
    """Accept what the user calls data.

    Taken: a map-style dataset (`__len__` and `__getitem__`, `__getitems__` when it has one), a TensorDataset or a
    Subset of one, one tensor or array, a tuple or a dict of tensors or arrays whose first dimension is the rows, a
    DataLoader (for its dataset, collate_fn and workers), and with `stream` ("split" or "mine") a stream.

    Raises:
        DataError: empty, of unequal lengths, a stream without `stream`, a foreign sampler, or not a dataset at all.
        UsageError: `stream` for what is none.
    """
    if isinstance(data, Source):
        return data
    refuse_prepared("DataLoader", data, "the dataset itself, loader.dataset", DataError)
    loader = data if isinstance(data, DataLoader) else None
    inner = data if loader is None else loader.dataset
    streams = is_stream(inner)
    if streams and stream is None:
        raise DataError(
            f"{type(inner).__name__} is a stream: it can be iterated, but has no row 0 to go back to.",
            fix=[
                'stream="split": every rank reads all of it and keeps its rows',
                'stream="mine": it gives each rank rows of its own (sharded by evener.rank() and world_size())',
                "or give a map-style dataset (__len__ and __getitem__); a stream that fits in memory: list(stream)",
            ],
        )
    if stream is not None and not streams:
        raise UsageError(
            f'stream="{stream}" is for what can only be iterated; a {type(inner).__name__} has rows with numbers.',
            fix=["leave stream= out: every row is read once, on any number of processes"],
        )
    dataset, rows = (inner, 0) if streams else _dataset(inner)
    if loader is None:
        return Source(dataset, rows, streams)
    collate: Any = None if loader.collate_fn is default_collate else loader.collate_fn
    gathered = isinstance(dataset, Columns) and collate is None
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
        notes=tuple(loaders.ignored(loader, gathered=gathered, stream=streams)),
    )


def is_stream(data: Any) -> bool:
    """Whether data can be iterated and has no rows with numbers; a DataLoader is what its dataset is."""
    if isinstance(data, DataLoader):
        data = data.dataset
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def _dataset(data: Any) -> tuple[Any, int]:
    """The dataset to read from, as columns where it is tensors in memory, and how many rows it has."""
    columns = _columns(data)
    if columns is None and (isinstance(data, Mapping | tuple | str | bytes) or not hasattr(data, "__getitem__")):
        raise _no_dataset(data)
    try:
        rows = len(data if columns is None else columns)
    except (TypeError, NotImplementedError):
        raise DataError(
            f"{type(data).__name__} has no length.", fix=["define __len__: how many rows the dataset has"]
        ) from None
    except Exception as error:  # such as a negative one
        raise DataError(
            f"{type(data).__name__}.__len__ failed: {type(error).__name__}: {error}.",
            fix=["return how many rows the dataset has, an integer from 1"],
        ) from error
    if rows < 1:
        raise DataError(f"the dataset is empty ({type(data).__name__}).", fix=["give a dataset with at least one row"])
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
        # A list, as default_collate makes of its tuples.
        return Columns(data.tensors, list, tuple)
    if type(data) is Subset:
        inner = _columns(data.dataset)
        return None if inner is None else inner.through(data.indices)
    if _is_array(data):
        return Columns([_tensor(data)], _only, _only)
    if isinstance(data, tuple) and data and all(map(_is_array, data)):
        return Columns([_tensor(column) for column in data], tuple, tuple)
    if isinstance(data, list) and data and all(map(_is_array, data)):
        raise DataError(
            f"a list of {len(data)} tensors can mean {len(data)} columns or {len(data)} rows.",
            fix=[
                "columns (x, y): pass a tuple, (x, y)",
                "rows of one shape: pass torch.stack(rows)",
                "other rows: a Dataset",
            ],
        )
    if isinstance(data, Mapping) and data and all(map(_is_array, data.values())):
        names = tuple(data)
        build = _Named(names)
        return Columns([_tensor(data[name]) for name in names], build, build, [repr(name) for name in names])
    return None


class _Named:
    """Builds a dict from values in the order of the names; a class, so that it can be pickled to a worker."""

    def __init__(self, names: tuple[Any, ...]) -> None:
        self.names = names

    def __call__(self, values: Any) -> dict[Any, Any]:
        return dict(zip(self.names, values))


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
            raise DataError(
                f"an array of dtype {value.dtype} has no tensor.", evidence=[str(error)], fix=["array.astype(...)"]
            ) from None
