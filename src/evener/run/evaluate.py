"""Evaluation: every row exactly once on any world size, exact ratios, and no trace left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import numpy
import torch

from evener.batch import aligned
from evener.config import Config
from evener.data import Cursor, is_stream, make_feed, source_of
from evener.dist import comm
from evener.engine import Engine
from evener.engine.cut import Cut
from evener.engine.join import Join
from evener.engine.mean import Mean, total_of
from evener.engine.oom import figures, free, is_oom
from evener.engine.randomness import Randomness
from evener.engine.shards import Shards
from evener.errors import DataError, EvenerError, LossError, MemoryLimitError, UsageError
from evener.run.predict import checked, in_dataset_order, raise_told, told

MetricFn = Callable[..., Any]


@contextlib.contextmanager
def no_trace(model: torch.nn.Module, randomness: Randomness) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards mode (per module), buffers and generators are as before."""
    modes = [(module, module.training) for module in model.modules()]
    # The entries, not only the tensors: a forward may replace a buffer, or make one that was None.
    buffers = [
        (module._buffers, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    torch_states, python_state, numpy_state = randomness.save(), random.getstate(), numpy.random.get_state()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for entries, name, buffer, value in buffers:
                entries[name] = buffer
                if buffer is not None and value is not None:
                    buffer.copy_(value)
        randomness.restore(torch_states)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


class Walk:
    """Every row of a dataset once, in dataset order, over all ranks: this rank's contiguous shares, without a trace.

    Args:
        module: Holds everything that must not change.
        batch_size: Rows at once on one rank.
        training: The dataset that the run trains on.
        beat: Called for every chunk.
    """

    def __init__(
        self,
        engine: Engine,
        config: Config,
        module: torch.nn.Module,
        data: Any,
        *,
        batch_size: int,
        training: Any,
        shards: Shards | None,
        beat: Callable[[], None],
    ) -> None:
        # A stream is read by every rank, and each keeps its chunks.
        source, workers = source_of(data, "split" if is_stream(data) else None), config.num_workers
        if source.stream and source.dataset is training and _moves(training):
            raise UsageError(
                f"the run trains on this very {type(training).__name__}: iterating it here would move it on.",
                fix=["give a second object of the same stream"],
            )
        if source.stream and workers != "auto":
            workers = min(1, workers)  # the run's number is for the rows of its dataset
        self.beat = beat
        self.module, self.rows, self.randomness, self.exact = module, source.rows, engine.randomness, config.exact
        self.group, self.batch_size = engine.group, batch_size
        self.device, self.stream = engine.device, source.stream
        self.autocast = engine.autocast if engine.autocast is not None else contextlib.nullcontext
        rank, world_size = self.group.rank, self.group.world_size
        # Fixed chunks, whoever computes one: in exact mode its values do not depend on the world size.
        cut = Cut(rank, world_size, None, batch_size)
        self.shards, self.join = shards, Join(cut, None, engine.device) if shards is not None else None
        self.feed = make_feed(
            source,
            stream="split",
            order=None if source.stream else "sequential",
            global_batch_size=batch_size * world_size,
            drop_last=False,
            rank=rank,
            world_size=world_size,
            cut=cut.pieces,
            device=engine.device,
            seed=config.seed,
            local_world_size=self.group.place.local_world_size,
            collate_fn=config.collate_fn,
            num_workers=workers,
        )

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """fn(*args), with the model's parameters at hand."""
        return self.shards.call(fn, *args) if self.shards is not None else fn(*args)

    def pieces(self) -> Generator[tuple[int, Any, int], None, None]:
        """(first row in the dataset, batch, rows); the caller computes inside autocast and without gradients.

        The first row is negative where the rank has nothing left and another has: then it computes and forgets.
        """
        try:
            with no_trace(self.module, self.randomness):
                for portion in self.feed.portions(Cursor(), epochs=1):
                    self.beat()
                    self.rows = portion.cursor.offset + portion.rows
                    first = portion.cursor.offset
                    parts = [(first + piece.start, piece.rows, piece.batch) for piece in portion.pieces]
                    for at, rows, batch in self.join.fill(parts, portion.rows) if self.join is not None else parts:
                        self.randomness.begin_piece(-1, at // self.batch_size)
                        with self.autocast():
                            yield at, aligned(batch) if self.exact else batch, rows
        finally:
            self.feed.close()

    def each(self, what: str, use: Callable[[int, Any, int], None]) -> EvenerError | None:
        """use(first row, batch, rows) for all pieces, up to a problem that the other ranks must be told of.

        Raises:
            MemoryLimitError: where the others cannot be told: they wait for this rank's part of a computation.
        """
        problem: EvenerError | None = None
        pieces, rows = self.pieces(), self.batch_size
        while True:
            given = False
            try:
                if (piece := next(pieces, None)) is None:
                    return problem
                given, rows = True, piece[2]
                if problem is None:
                    use(*piece)
            except (DataError, MemoryLimitError) as error:
                problem = error
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                problem = self._out_of_memory(what, str(error).split("\n", 1)[0], rows)
            del piece
            if problem is not None and not self.stream:
                pieces.close()  # a stream is read on: its ranks tell each other how far they are
            if isinstance(problem, MemoryLimitError):
                free(self.device)
                if self.shards is not None or (self.stream and not given):
                    raise problem

    def _out_of_memory(self, what: str, words: str, rows: int) -> MemoryLimitError:
        many = f"{rows} row{'s' if rows > 1 else ''}"
        where = f" on rank {self.group.rank}" if self.group.world_size > 1 else ""
        less = [f"batch_size={rows // 2} in {what}: fewer rows at once, the same answer"] if rows > 1 else []
        return MemoryLimitError(
            f"Out of memory in {what} of {many} at once{where}.",
            evidence=[words, *figures(self.device), "the training is as it was: nothing of it was changed"],
            fix=[*less, "shorter rows, or a smaller model; evener.memory() says who holds memory"],
        )


def _moves(stream: Any) -> bool:
    """Whether iterating a stream changes the object itself, for another iteration that is under way."""
    return any(hasattr(stream, name) for name in ("state_dict", "set_epoch", "__next__"))


def evaluate(walk: Walk, model: Any, metric_fn: MetricFn) -> tuple[dict[str, float], int]:
    """Means by name over all rows, and how many rows. Collective; communicates once, at the end."""
    chunks: list[int] = []
    values: list[Any] = []  # total, count, total, ... of every chunk's means, on the device until the end
    names: list[list[str]] = []

    def use(at: int, batch: Any, rows: int) -> None:
        means = as_means(walk.call(metric_fn, model, batch), rows)
        if at >= 0:
            chunks.append(at)
            names.append(list(means))
            for mean in means.values():
                values.extend([total_of(mean.form, mean.value, mean.count), mean.count])

    problem = walk.each("evaluate", use)
    read = iter(_read(values) if problem is None else ())
    found = zip(chunks, names) if problem is None else ()
    mine = [[at, {name: [next(read), next(read)] for name in of}] for at, of in found]
    with walk.group.call("evaluate"):
        answers: list[list[Any]] = comm.all_gather([told(problem), mine])
    raise_told(problem, [said for said, _ in answers])
    every = [one for _, one in answers]
    sums: dict[str, list[float]] = {}
    for _, pairs in sorted((one for ranks in every for one in ranks), key=lambda one: one[0]):
        for name, (total, count) in pairs.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = [before[0] + total, before[1] + count]
    ordered = sorted(sums, key=lambda name: (name != "loss", name))
    return {name: sums[name][0] / sums[name][1] if sums[name][1] else float("nan") for name in ordered}, walk.rows


def predict(walk: Walk, model: Any, fn: Callable[..., Any]) -> torch.Tensor:
    """fn's values for every row, in dataset order, on every rank and on the CPU. Collective."""
    outputs: list[tuple[int, int, torch.Tensor]] = []

    def use(at: int, batch: Any, rows: int) -> None:
        values = checked(walk.call(fn, model, batch), rows)
        if at >= 0:
            outputs.append((at, at + rows, values))

    problem = walk.each("predict", use)
    with walk.group.call("predict"):
        return in_dataset_order(outputs, walk.rows, problem)


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


def _read(values: list[Any]) -> list[float]:
    """All of them as numbers, with one trip to the device for the tensors among them."""
    tensors = [value.detach().reshape(()) for value in values if isinstance(value, torch.Tensor)]
    wide = torch.float32 if tensors and tensors[0].device.type == "mps" else torch.float64
    numbers = iter(torch.stack([value.to(wide) for value in tensors]).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else float(value) for value in values]
