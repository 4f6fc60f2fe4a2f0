"""Evaluation: every row exactly once on any world size, exact ratios, and no trace left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

from evener.data import Feed, Order, share, source_of
from evener.dist import Group, comm
from evener.engine.cut import chop
from evener.engine.mean import Mean, total_of
from evener.engine.randomness import Randomness
from evener.errors import LossError

MetricFn = Callable[[torch.nn.Module, Any], Any]


@contextlib.contextmanager
def no_trace(model: torch.nn.Module, randomness: Randomness) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards mode (per module), buffers and generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    torch_states, python_state, numpy_state = randomness.save(), random.getstate(), numpy.random.get_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        randomness.restore(torch_states)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def evaluate(
    model: torch.nn.Module,
    data: Any,
    metric_fn: MetricFn,
    *,
    batch_size: int,
    group: Group,
    device: torch.device,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]] | None,
    randomness: Randomness,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: Any,
    seed: int,
) -> tuple[dict[str, float], int]:
    """Means by name over all rows of `data`, and how many rows. Collective; communicates once, at the end.

    Each rank computes a contiguous share in pieces of at most `batch_size` rows, in dataset order.
    """
    source = source_of(data)

    def cut(rows: int) -> tuple[tuple[int, int], ...]:
        return chop(*share(rows, group.rank, group.world_size), batch_size)

    feed = Feed(
        source,
        Order(source.rows, seed, "sequential"),
        global_batch_size=batch_size * group.world_size,
        drop_last=False,
        rank=group.rank,
        world_size=group.world_size,
        cut=cut,
        device=device,
        seed=seed,
        local_world_size=group.place.local_world_size,
        collate_fn=collate_fn,
        num_workers=num_workers,
    )
    totals: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    try:
        from evener.data import Cursor

        with no_trace(model, randomness):
            number = 0
            for portion in feed.portions(Cursor(), epochs=1):
                for piece in portion.pieces:
                    randomness.begin_piece(-1, number)
                    number += 1
                    with autocast() if autocast is not None else contextlib.nullcontext():
                        output = metric_fn(model, piece.batch)
                    for name, mean in as_means(output, piece.rows).items():
                        # Kept on the device as float64 sums: read once, at the end.
                        total, count = _wide(total_of(mean.form, mean.value, mean.count)), _wide(mean.count)
                        totals[name] = totals[name] + total if name in totals else total
                        counts[name] = counts[name] + count if name in counts else count
    finally:
        feed.close()
    mine = {name: [float(totals[name]), float(counts[name])] for name in totals}
    with group.call("evaluate"):
        every: list[dict[str, list[float]]] = comm.all_gather(mine)
    names = sorted({name for one in every for name in one}, key=lambda name: (name != "loss", name))
    means = {}
    for name in names:
        total = sum(one[name][0] for one in every if name in one)
        count = sum(one[name][1] for one in every if name in one)
        means[name] = total / count if count else float("nan")
    return means, source.rows


def as_means(output: Any, rows: int) -> Mapping[str, Mean]:
    """What a metric_fn returned, by name: {name: Mean}, a loss, or (loss, {name: Mean}) as a loss_fn returns."""
    loss, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    if isinstance(loss, Mapping):
        loss, metrics = None, loss
    means: dict[str, Mean] = {}
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        means["loss"] = Mean(mean=loss.detach().reshape(()), count=rows)
    elif isinstance(loss, Mean):
        means["loss"] = loss
    elif loss is not None:
        raise LossError(
            f"metric_fn returned a {type(loss).__name__}; it returns what a loss_fn does, or {{name: Mean}}.",
            fix=['return {"accuracy": evener.Mean(total=hits, count=len(y))}'],
        )
    for name, mean in metrics.items():
        if not isinstance(mean, Mean):
            raise LossError(
                f"metric {name!r} is a {type(mean).__name__}; a metric says what it is the mean of.",
                fix=[f"{{{name!r}: evener.Mean(total=..., count=...)}}"],
            )
        means[name] = mean
    return means


def _wide(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to(torch.float32 if value.device.type == "mps" else torch.float64)
