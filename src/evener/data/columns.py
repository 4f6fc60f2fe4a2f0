"""Tensors in memory whose first dimension is the rows: a batch is one gather, not a walk over rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evener.errors import DataError

Build = Callable[[Sequence[Any]], Any]


class Columns:
    """Equally long tensors, each [rows, ...], any dtype, on any device; `names` is how errors call them.

    `batch` and `row` make the batch from the gathered columns, and one row from the columns' entries.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], batch: Build, row: Build, names: Sequence[str] | None = None
    ) -> None:
        self.tensors, self.batch, self.row = tuple(tensors), batch, row
        self._map: torch.Tensor | None = None  # of a Subset: its rows' places in the tensors
        names = names or [f"tensor {i}" for i in range(len(tensors))]
        shapes = [f"{name}: {list(tensor.shape)}" for name, tensor in zip(names, tensors)]
        if not tensors or any(tensor.ndim == 0 for tensor in tensors):
            raise DataError("tensors without rows.", evidence=shapes, fix=["the first dimension is the rows"])
        if any(len(tensor) != len(tensors[0]) for tensor in tensors):
            fix = ["make the first dimension of every tensor the rows"]
            raise DataError("the tensors have different numbers of rows.", evidence=shapes, fix=fix)

    def through(self, indices: Sequence[int]) -> Columns:
        """The rows at `indices` of this, in that order; negative ones count from the end, as in a Subset."""
        places, rows = torch.as_tensor(indices, dtype=torch.int64), len(self)
        places = torch.where(places < 0, places + rows, places)
        if len(places) and (int(places.min()) < 0 or int(places.max()) >= rows):
            fix = [f"its indices are from 0 to {rows - 1}"]
            raise DataError(f"a Subset has indices outside of its dataset's {rows} rows.", fix=fix)
        part = Columns(self.tensors, self.batch, self.row)
        part._map = places if self._map is None else self._map[places]
        return part

    def __len__(self) -> int:
        return len(self.tensors[0] if self._map is None else self._map)

    def gather(self, index: torch.Tensor) -> list[torch.Tensor]:
        """The columns' rows at `index` (int64, CPU): new tensors [len(index), ...], each on its column's device."""
        if self._map is not None:
            index = self._map.index_select(0, index)
        # index_select takes 7 us for 64 rows of 784 floats where tensor[index] takes 32.
        return [t.index_select(0, index if t.is_cpu else index.to(t.device)) for t in self.tensors]

    def __getitem__(self, i: int) -> Any:
        return self.__getitems__([i])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Single rows, for a collate_fn of the user's."""
        columns = self.gather(torch.tensor(indices, dtype=torch.int64))
        return [self.row(values) for values in zip(*(column.unbind(0) for column in columns))]
