"""Predictions for every row, in dataset order, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from evener.dist import comm
from evener.errors import DataError, EvenerError, MemoryLimitError


def in_dataset_order(
    outputs: list[tuple[int, int, torch.Tensor]], rows: int, problem: EvenerError | None = None
) -> torch.Tensor:
    """All ranks' (start, stop, values of those rows) as one CPU tensor of `rows` rows. Collective.

    problem: what went wrong on this rank: then every rank raises, and none waits for another.

    Raises:
        DataError, MemoryLimitError: on all ranks: a problem of any rank, or shapes that differ.
    """
    spans = [(start, stop) for start, stop, _ in outputs]
    kinds = sorted({(tuple(values.shape[1:]), str(values.dtype).removeprefix("torch.")) for *_, values in outputs})
    every: list[dict[str, Any]] = comm.all_gather({"spans": spans, "kinds": kinds, "problem": told(problem)})
    raise_told(problem, [one["problem"] for one in every])
    found = sorted({(tuple(shape), dtype) for one in every for shape, dtype in one["kinds"]})
    if len(found) > 1:
        raise DataError(
            "fn returned tensors of different shapes or dtypes.",
            evidence=[f"{dtype} of shape {shape} for a row" for shape, dtype in found[:8]],
            fix=["return one value of the same shape and dtype for every row (pad sequences)"],
        )
    ((shape, name),) = found
    dtype: torch.dtype = getattr(torch, name)
    mine = torch.cat([values for *_, values in outputs]) if outputs else None
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


def told(problem: EvenerError | None) -> list[Any] | None:
    """What went wrong on this rank, for the others."""
    if problem is None:
        return None
    return [isinstance(problem, MemoryLimitError), problem.cause, list(problem.evidence), list(problem.fix)]


def raise_told(problem: EvenerError | None, every: Sequence[list[Any] | None]) -> None:
    """Raise this rank's problem, else the first of another's, of `told` on all ranks."""
    if problem is not None:
        raise problem
    for one in every:
        if one is not None:
            memory, cause, evidence, fix = one
            raise (MemoryLimitError if memory else DataError)(cause, evidence=evidence, fix=fix)


def checked(values: Any, rows: int) -> torch.Tensor:
    """What fn returned for `rows` rows, on the CPU."""
    if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != rows:
        got = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        raise DataError(
            f"fn returned {got} for a batch of {rows} rows.", fix=["return a tensor whose first dimension is the rows"]
        )
    return values.detach().cpu()
