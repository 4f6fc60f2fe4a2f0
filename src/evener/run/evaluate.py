"""Evaluation: every row exactly once on any world size, exact ratios, and no trace left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

from evener.data import Cursor, Feed, Order, Piece, source_of
from evener.dist import Group, comm
from evener.dist.info import share
from evener.engine.cut import chop
from evener.engine.mean import Mean, total_of
from evener.engine.randomness import Randomness
from evener.errors import LossError
from evener.run.predict import checked, in_dataset_order

MetricFn = Callable[..., Any]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


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


class Walk:
    """Every row of a dataset once, in dataset order, over all ranks: this rank's contiguous shares, without a trace.

    Args as those of `Run`; `batch_size`: rows at once on one rank.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        data: Any,
        *,
        batch_size: int,
        group: Group,
        device: torch.device,
        autocast: Autocast | None,
        randomness: Randomness,
        collate_fn: Callable[[list[Any]], Any] | None,
        num_workers: Any,
        seed: int,
    ) -> None:
        source = source_of(data)
        self.module, self.rows, self.randomness = module, source.rows, randomness
        self.autocast: Autocast = autocast if autocast is not None else contextlib.nullcontext

        def cut(rows: int) -> tuple[tuple[int, int], ...]:
            return chop(*share(rows, group.rank, group.world_size), batch_size)

        self.feed = Feed(
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

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """(first row in the dataset, piece); the caller computes inside autocast and without gradients."""
        try:
            with no_trace(self.module, self.randomness):
                number = 0
                for portion in self.feed.portions(Cursor(), epochs=1):
                    for piece in portion.pieces:
                        self.randomness.begin_piece(-1, number)
                        number += 1
                        with self.autocast():
                            yield portion.cursor.offset + piece.start, piece
        finally:
            self.feed.close()


def evaluate(
    module: torch.nn.Module, model: Any, data: Any, metric_fn: MetricFn, **how: Any
) -> tuple[dict[str, float], int]:
    """Means by name over all rows of `data`, and how many rows. Collective; communicates once, at the end.

    `module` holds everything that must not change; `model` is what metric_fn gets; `how`: see `Walk`.
    """
    walk = Walk(module, data, **how)
    totals: dict[str, Any] = {}
    counts: dict[str, Any] = {}
    for _, piece in walk.pieces():
        for name, mean in as_means(metric_fn(model, piece.batch), piece.rows).items():
            # Kept on the device as float64 sums: read once, at the end.
            total, count = _wide(total_of(mean.form, mean.value, mean.count)), _wide(mean.count)
            totals[name] = totals[name] + total if name in totals else total
            counts[name] = counts[name] + count if name in counts else count
    mine = {name: [float(totals[name]), float(counts[name])] for name in totals}
    with how["group"].call("evaluate"):
        every: list[dict[str, list[float]]] = comm.all_gather(mine)
    names = sorted({name for one in every for name in one}, key=lambda name: (name != "loss", name))
    means = {}
    for name in names:
        total = sum(one[name][0] for one in every if name in one)
        count = sum(one[name][1] for one in every if name in one)
        means[name] = total / count if count else float("nan")
    return means, walk.rows


def predict(module: torch.nn.Module, model: Any, data: Any, fn: Callable[..., Any], **how: Any) -> torch.Tensor:
    """fn's values for every row, in dataset order, on every rank and on the CPU. Collective; see `Walk` for `how`."""
    walk = Walk(module, data, **how)
    outputs = [(at, at + piece.rows, checked(fn, model, piece.batch, piece.rows)) for at, piece in walk.pieces()]
    with how["group"].call("predict"):
        return in_dataset_order(outputs, walk.rows)


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
