"""`Mean`: a value with its denominator. What a loss or a metric is the mean *of* is said, never guessed."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from evener.errors import LossError

Number = float | int | torch.Tensor


class Mean:
    """A mean over `count` things, given as `total=` (their sum) or as `mean=`.

    Means over microbatches and ranks are combined exactly: the sum of totals over the sum of counts. For a loss the
    gradient is that of this ratio over the global batch.

    Args:
        total: 0-dimensional tensor or number, the sum. For a loss: with a graph.
        mean: 0-dimensional tensor or number, total / count.
        count: How many things (rows, unmasked tokens): tensor or number, >= 0.
    """

    __slots__ = ("count", "form", "value")

    def __init__(self, *, total: Number | None = None, mean: Number | None = None, count: Number) -> None:
        if (total is None) == (mean is None):
            what = "Mean takes exactly one of total= and mean=."
            raise LossError(what, fix=["Mean(total=summed_loss, count=tokens)", "Mean(mean=mean_loss, count=tokens)"])
        self.form = "total" if total is not None else "mean"
        self.value: Number = _one(self.form, total if total is not None else mean)
        self.count: Number = _one("count", count)
        if not isinstance(self.count, torch.Tensor) and self.count < 0:
            raise LossError(f"Mean(count={count!r}): a count is at least 0.", fix=["count=len(y)"])

    def __add__(self, other: object) -> NoReturn:
        fix = ["Mean(total=a_total + weight * b_mean * count, count=count): multiply further terms by the count"]
        raise LossError("two Means cannot be added: an update has one denominator.", fix=fix)

    __radd__ = __add__

    def __repr__(self) -> str:
        return f"Mean({self.form}={self.value!r}, count={self.count!r})"


def _one(name: str, value: Any) -> Number:
    """One number, on the host or on a device; a tensor of one element becomes 0-dimensional."""
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            what = f"Mean({name}=): a tensor of shape {tuple(value.shape)}; it must be one number."
            raise LossError(what, fix=[f"{name}=values.sum()", "or values.mean() for mean="])
        return value.reshape(()) if value.ndim else value
    if isinstance(value, int | float):
        return value
    if hasattr(value, "__float__") and not isinstance(value, str):  # numpy's numbers
        return float(value)
    what = f"Mean({name}={value!r}): a {type(value).__name__} is no number."
    raise LossError(what, fix=["give a number or a tensor of one element"])


def total_of(form: str, value: Number, count: Number) -> Number:
    """The sum: the value when given as total, the value times the count when given as mean."""
    if form == "total":
        return value
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()  # a count of thousands is not a half-precision number
    return value * count
