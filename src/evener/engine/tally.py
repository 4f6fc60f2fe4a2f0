"""What an update's losses and metrics add up to, over pieces and ranks.

Inside the step nothing is read: entries are kept as they are (0-dimensional tensors on the device, or numbers). With
several ranks they are packed into one float64 vector and summed by one all-reduce that overlaps the backward. In exact
mode the vector has one row per slice, so that the sum is in slice order whoever computed a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from evener.engine.mean import Mean, Number, total_of
from evener.errors import LossError

Entry = tuple[int, str, torch.Tensor, Number, int]  # slot, form ("total" or "mean"), value, count, rows


class Tally:
    """Entries of one update on this rank.

    Column order when packed: loss total, loss count, rows, then metric pairs, then the requests (to stop, to save).
    """

    __slots__ = ("entries", "metrics", "rows")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.metrics: list[Mapping[str, Mean]] = []
        self.rows = 0

    def add(self, slot: int, loss: Mean, rows: int, metrics: Mapping[str, Mean]) -> None:
        """The loss is kept detached: its graph must not outlive the backward."""
        value, count = loss.value, loss.count
        assert isinstance(value, torch.Tensor)
        value = value.detach()
        if isinstance(count, torch.Tensor):
            count = count.detach()
        self.entries.append((slot, loss.form, value, count, rows))
        self.metrics.append(metrics)
        self.rows += rows

    def pack(
        self, names: Sequence[str], slots: int, device: torch.device, requests: tuple[float, float] = (0.0, 0.0)
    ) -> torch.Tensor:
        """(slots, columns) float64: per slot in exact mode; with slots == 1 everything is summed into row 0.

        requests: what this rank asks of all; they travel with the losses, so that ranks agree without a collective of
        their own.
        """
        columns = width(names)
        numbers: list[float] = []
        tensors: list[torch.Tensor] = []
        places: list[int] = []
        for (_, form, value, count, rows), metrics in zip(self.entries, self.metrics):
            row: list[Any] = [total_of(form, value, count), count, rows]
            for name in names:
                metric = metrics[name]
                row += [total_of(metric.form, metric.value, metric.count), metric.count]
            for one in row:
                if isinstance(one, torch.Tensor):
                    places.append(len(numbers))
                    tensors.append(one.detach())
                    numbers.append(0.0)
                else:
                    numbers.append(float(one))
            numbers += [0.0, 0.0]
        if any(requests):
            numbers += [0.0] * (columns - 2) + list(requests)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        host = torch.tensor(numbers, dtype=dtype).to(device, non_blocking=True).view(-1, columns)
        if tensors:
            if any(value.dtype != tensors[0].dtype for value in tensors):
                tensors = [value.to(dtype) for value in tensors]
            values = torch.stack(tensors).to(dtype)
            where = torch.tensor(places).to(device, non_blocking=True)
            host.view(-1).index_put_((where,), values)
        if slots == 1:
            return host.sum(0, keepdim=True)
        packed = torch.zeros(slots, columns, dtype=dtype, device=device)
        for i, entry in enumerate(self.entries):
            packed[entry[0]] = host[i]
        if any(requests):
            packed[0] += host[-1]
        return packed

    def denominator(self) -> Number:
        """The sum of this rank's loss counts; a number when all of them are."""
        total: Number = 0
        for entry in self.entries:
            total = total + entry[3]
        return total


def width(names: Sequence[str]) -> int:
    """Columns of a packed update."""
    return 5 + 2 * len(names)


def as_loss(output: Any, rows: int) -> tuple[Mean, bool, Mapping[str, Mean]]:
    """What a loss_fn returned, as (Mean with a graph, whether it was a plain scalar, metrics)."""
    metrics: Mapping[str, Mean] = {}
    if isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], Mapping):
        output, metrics = output
        for name, metric in metrics.items():
            if not isinstance(name, str):
                raise LossError(f"a metric's name is a {type(name).__name__}: {name!r}.", fix=[f'{{"{name}": ...}}'])
            if not isinstance(metric, Mean):
                what = f"metric {name!r} is a {type(metric).__name__}; a metric says what it is the mean of."
                fix = [f"{{{name!r}: evener.Mean(total=..., count=...)}}", "or Mean(mean=value, count=len(y))"]
                raise LossError(what, fix=fix)
    scalar = isinstance(output, torch.Tensor)
    if scalar and output.numel() != 1:
        fix = ["return loss.mean(), the mean over the rows", "or Mean(total=loss.sum(), count=loss.numel())"]
        raise LossError(f"the loss has shape {tuple(output.shape)}; it must be one number.", fix=fix)
    loss = Mean(mean=output, count=rows) if scalar else output
    if not isinstance(loss, Mean):
        raise LossError(
            f"loss_fn returned {_described(output)}; a loss is a scalar tensor, an evener.Mean, or "
            "(either, {name: Mean}).",
            fix=[
                "return loss",
                "return evener.Mean(total=loss_sum, count=tokens)",
                'return loss, {"accuracy": Mean(...)}',
            ],
        )
    value = loss.value
    if not isinstance(value, torch.Tensor):
        what = f"the loss is a Python {type(value).__name__}, not a tensor: it has no gradient."
        raise LossError(what, fix=["return the tensor itself, without .item() or float()"])
    if not value.is_floating_point():
        raise LossError(f"the loss has dtype {value.dtype}; it must be floating point.", fix=["loss.float()"])
    if not value.requires_grad:
        fix = [
            "compute it from the model's output, without .detach(), .item(), .data or torch.no_grad()",
            "check that the model has parameters with requires_grad=True",
        ]
        raise LossError("the loss is not connected to the parameters: it has no gradient.", fix=fix)
    return loss, scalar, metrics


def _described(output: Any) -> str:
    if output is None:
        return "None (is the `return` missing?)"
    if isinstance(output, Mapping):
        return f"a dict with keys {sorted(map(str, output))[:6]}"
    return f"a {type(output).__name__}"


def refuse_names(agreed: Sequence[str], given: Mapping[str, Mean]) -> NoReturn:
    """Metrics are the same names in every update, since they travel in fixed columns."""
    evidence = [f"before: {', '.join(agreed) or 'none'}", f"now: {', '.join(sorted(given)) or 'none'}"]
    fix = ["return the same metric names every time; a metric with nothing to count is Mean(total=0.0, count=0)"]
    raise LossError("loss_fn returned other metrics than before.", evidence=evidence, fix=fix)
