"""Predictions for every row, in dataset order, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evener.dist import comm
from evener.errors import DataError


def in_dataset_order(outputs: list[tuple[int, int, torch.Tensor]], rows: int) -> torch.Tensor:
    """All ranks' (start, stop, values of those rows) as one CPU tensor of `rows` rows. Collective.

    Raises:
        DataError: `fn` returned something else than one value per row, or shapes that differ.
    """
    mine = torch.cat([values for *_, values in outputs]) if outputs else None
    spans = [(start, stop) for start, stop, _ in outputs]
    about = None if mine is None else {"shape": list(mine.shape[1:]), "dtype": str(mine.dtype).removeprefix("torch.")}
    every: list[dict[str, Any]] = comm.all_gather({"spans": spans, "about": about})
    kinds = [one["about"] for one in every if one["about"] is not None]
    if any(kind != kinds[0] for kind in kinds):
        raise DataError(
            "fn returned tensors of different shapes or dtypes.",
            evidence=[str(kind) for kind in kinds],
            fix=["return one value of the same shape and dtype for every row (pad sequences)"],
        )
    dtype: torch.dtype = getattr(torch, kinds[0]["dtype"])
    shape = kinds[0]["shape"]
    result = torch.empty(rows, *shape, dtype=dtype)
    longest = max(sum(stop - start for start, stop in one["spans"]) for one in every)
    padded = torch.zeros(longest, *shape, dtype=dtype)
    if mine is not None:
        padded[: len(mine)] = mine
    for one, values in zip(every, comm.all_gather(padded)):
        at = 0
        for start, stop in one["spans"]:
            result[start:stop] = values[at : at + stop - start]
            at += stop - start
    return result


def checked(fn: Callable[..., Any], model: Any, batch: Any, rows: int) -> torch.Tensor:
    values = fn(model, batch)
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != rows:
        got = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        raise DataError(
            f"fn returned {got} for a batch of {rows} rows.", fix=["return a tensor whose first dimension is the rows"]
        )
    return values.detach().cpu()
