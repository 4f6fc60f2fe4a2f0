"""A nested batch (tensors in dicts, lists, tuples, dataclasses): its rows, a part of them, its device.

The bottom room with torch: data, engine and run all look at batches the same way.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from evener.errors import DataError, MemoryLimitError

Split = Callable[[Any, int, int], Any]


def leaves(batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(path, tensor) of every tensor in the batch, in a fixed order."""
    if isinstance(batch, torch.Tensor):
        yield "batch", batch
    else:
        for name, child in _children(batch):
            for path, leaf in leaves(child):
                yield f"batch{name}{path[5:]}", leaf


def _children(batch: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in batch.items())
    elif isinstance(batch, list | tuple):
        yield from ((f"[{i}]", value) for i, value in enumerate(batch))
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        yield from ((f".{field.name}", getattr(batch, field.name)) for field in dataclasses.fields(batch))


def apply(batch: Any, function: Callable[[torch.Tensor], Any], mover: Callable[[Any], Any] | None = None) -> Any:
    """The same nesting with `function` applied to every tensor: dicts, lists, (named) tuples, dataclasses, at will.

    Anything else (numbers, strings) is passed through. With a `mover`, an object that has a `.to` of its own (Hugging
    Face's BatchEncoding, a PackedSequence, a graph) is handed to it as a whole.
    """
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if mover is not None and callable(getattr(batch, "to", None)) and not isinstance(batch, type):
        return mover(batch)
    kind = type(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return kind(*(apply(value, function, mover) for value in batch))
    if isinstance(batch, list | tuple):
        return kind(apply(value, function, mover) for value in batch)
    if isinstance(batch, Mapping):
        parts = {key: apply(value, function, mover) for key, value in batch.items()}
        return parts if kind is dict else kind(parts)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(batch, **{name: apply(getattr(batch, name), function, mover) for name in names})
    return batch


def _is_pair(batch: Any) -> bool:
    """The usual (x, y): taken apart without a generator, a dozen calls less in every step."""
    kind = type(batch)
    return (kind is tuple or kind is list) and len(batch) == 2 and type(batch[0]) is type(batch[1]) is torch.Tensor


def rows(batch: Any, split: Split | None = None) -> int:
    """The number of rows: the first dimension that every tensor leaf (of one or more dimensions) shares.

    With `split` the leaves may disagree (graphs, packed sequences, images of different sizes). Then the items of a list
    are its rows, the parts of a tuple or dict are equally long columns, and of anything else `len(batch)` counts.

    Raises:
        DataError: no tensor leaf, or leaves with different first dimensions; with `split`, nothing that has a length.
    """
    if split is None and _is_pair(batch):
        x, y = batch
        if x.ndim and y.ndim:
            count: int = x.shape[0]
            if count == y.shape[0]:
                return count
    if split is not None:
        columns = list(batch.values()) if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else [batch]
        try:
            counts = {len(column) for column in columns}
        except TypeError:
            what = f"split= needs len(batch) to count rows; a {type(batch).__name__} has no length."
            raise DataError(what, fix=["give the batch a __len__ that returns its rows"]) from None
        if len(counts) != 1:
            what = f"split= was given a {type(batch).__name__} whose parts have different lengths: {sorted(counts)}."
            fix = ["a tuple or dict holds columns of equally many rows; a list holds the rows themselves"]
            raise DataError(what, fix=fix)
        return counts.pop()
    found = [(path, leaf.shape[0]) for path, leaf in leaves(batch) if leaf.ndim]
    if not found:
        fix = ["return tensors from the dataset or collate_fn", "or pass split=f(batch, start, stop) and a len(batch)"]
        raise DataError(f"no tensor in the batch to count rows on (got {type(batch).__name__}).", fix=fix)
    count = found[0][1]
    if any(size != count for _, size in found):
        what = "the tensors of the batch disagree about the number of rows (first dimension)."
        fix = ["make the first dimension of every tensor the rows", "or pass split=f(batch, start, stop)"]
        raise DataError(what, evidence=[f"{path}: {size}" for path, size in found[:8]], fix=fix)
    return count


def counted(batch: Any, expected: int, split: Split | None = None) -> int | None:
    """How many rows a batch seems to hold, where `expected` are; None where that cannot be said.

    A list or tuple of `expected` things anywhere in it (images of different sizes, their targets), a graph, or tensors
    that disagree (packed sequences) say nothing against it.
    """
    if _is_pair(batch) and batch[0].ndim and batch[1].ndim:
        x, y = batch
        return x.shape[0] if x.shape[0] == y.shape[0] else None
    if split is not None:
        return None
    lengths = dict(_lists(batch))  # length -> whether it must be one of rows
    if lengths:
        rows = next((length for length, of_rows in lengths.items() if of_rows), None)
        if expected in lengths or rows is not None:
            return rows
    sizes = {leaf.shape[0] for _, leaf in leaves(batch) if leaf.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def _lists(batch: Any) -> Iterator[tuple[int, bool]]:
    """(length, whether it holds dicts: one for each row) of every list and tuple in the batch."""
    if isinstance(batch, torch.Tensor):
        return
    if isinstance(batch, list | tuple):
        yield len(batch), any(isinstance(one, Mapping) for one in batch)
    for _, child in _children(batch):
        yield from _lists(child)


def cuttable(batch: Any, expected: int, split: Split | None = None) -> bool:
    """Whether `part` surely gives rows: every tensor has `expected` of them, and no list may be one of rows itself."""
    try:
        if rows(batch, split) != expected:
            return False
    except DataError:
        return False
    return split is not None or _is_pair(batch) or expected not in dict(_lists(batch))


def part(batch: Any, start: int, stop: int, split: Split | None = None) -> Any:
    """Rows start..stop-1 as views (no copy); with `split`, what it returns."""
    if split is not None:
        cut = split(batch, start, stop)
        if rows(cut, split) != stop - start:
            what = f"split(batch, {start}, {stop}) returned {rows(cut, split)} rows."
            raise DataError(what, fix=["return the rows start .. stop-1 as a batch of the same kind"])
        return cut
    if _is_pair(batch):
        x, y = batch
        if x.ndim and y.ndim:
            return type(batch)((x[start:stop], y[start:stop]))
    return apply(batch, lambda leaf: leaf[start:stop] if leaf.ndim else leaf)


def move(batch: Any, device: torch.device) -> Any:
    """The batch on `device`; itself when it is there already. Copies from pinned memory do not block the host.

    Raises:
        MemoryLimitError: it does not fit, also after what nobody holds was freed. Nothing has changed.
    """
    if _is_pair(batch):
        x, y = batch
        if x.device == device and y.device == device:
            return batch
    for again in (True, False):
        try:
            return apply(
                batch,
                lambda leaf: leaf if leaf.device == device else leaf.to(device, non_blocking=True),
                lambda other: other.to(device),
            )
        except torch.OutOfMemoryError as error:
            words = str(error).partition("\n")[0]
        if again:  # outside of the handler, whose traceback keeps what was copied
            gc.collect()
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
    size = sum(leaf.nbytes for _, leaf in leaves(batch))
    what = f"Out of memory while a rank's batch of {size / 2**20:,.1f} MiB is copied to {device}."
    fix = ["more processes: each copies its own rows only", "a smaller global_batch_size, or shorter rows"]
    raise MemoryLimitError(what, evidence=[words], fix=fix)


def aligned(batch: Any) -> Any:
    """The batch with every tensor at an address that an allocator would give it.

    Matrix products round by alignment, and where a slice lies in a gathered batch depends on who computes it: exact
    mode computes every slice from such a copy.
    """
    return apply(batch, lambda leaf: leaf if leaf.data_ptr() % _ALIGNED == 0 else leaf.clone())


_ALIGNED = 64  # bytes
