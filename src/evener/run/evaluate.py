"""`evaluate` and `predict`: every row exactly once on any world size, in dataset order, and no trace left behind."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy
import torch

from evener.batch import aligned
from evener.data import Cursor, is_stream, make_feed, source_of
from evener.dist import comm
from evener.engine.cut import Cut
from evener.engine.join import Join
from evener.engine.mean import Mean, total_of
from evener.engine.oom import figures, free, is_oom
from evener.engine.precision import refuse_autocast
from evener.engine.randomness import Randomness
from evener.engine.setup import check_model
from evener.errors import DataError, EvenerError, LossError, MemoryLimitError, UsageError

if TYPE_CHECKING:
    from evener.run.run import Run

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
    """Every row of `data` once, in dataset order, over all ranks: this rank's contiguous shares, without a trace.

    Args:
        model: In place of the run's; nothing of it is changed.
        batch_size: Rows at once on one rank; None: the training's largest piece, at least 64.
    """

    def __init__(self, run: Run, data: Any, model: torch.nn.Module | None, batch_size: int | None) -> None:
        engine, config, self.group, self.device = run.engine, run.config, run.group, run.device
        refuse_autocast(run.device)
        if model is not None and model is not run.ema:
            check_model(model, trained=False)
        engine.meet()
        if batch_size is None:
            pieces = engine.cut.pieces(config.global_batch_size)
            batch_size = max([64, *(stop - start for start, stop in pieces)])
        elif isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            allowed = "a whole number of rows, at least 1"
            raise UsageError(f"batch_size={batch_size!r}: {allowed}.", fix=["batch_size=256"])
        # A stream is read by every rank, and each keeps its chunks.
        source, workers = source_of(data, "split" if is_stream(data) else None), config.num_workers
        if source.stream:
            moves = any(hasattr(source.dataset, name) for name in ("state_dict", "set_epoch", "__next__"))
            if moves and source.dataset is run.feed.source.dataset:
                name = type(source.dataset).__name__
                what = f"the run trains on this very {name}: iterating it here would move it on."
                raise UsageError(what, fix=["give a second object of the same stream"])
            workers = workers if workers == "auto" else min(1, workers)  # the number is for the rows of the dataset
        self.given = run.model if model is None else model
        self.module = engine.model if model is None else model
        self.rows, self.stream, self.batch_size, self.beat = source.rows, source.stream, batch_size, run._beat
        self.randomness, self.exact = engine.randomness, config.exact
        self.autocast = engine.autocast if engine.autocast is not None else contextlib.nullcontext
        # Fixed chunks, whoever computes one: in exact mode its values do not depend on the world size.
        cut = Cut(run.rank, run.world_size, None, batch_size)
        self.shards = engine.shards_of(model)
        self.join = Join(cut, None, run.device) if self.shards is not None else None
        self.feed = make_feed(
            source,
            stream="split",
            order=None if source.stream else "sequential",
            global_batch_size=batch_size * run.world_size,
            drop_last=False,
            rank=run.rank,
            world_size=run.world_size,
            cut=cut.pieces,
            device=run.device,
            seed=config.seed,
            local_world_size=run.group.place.local_world_size,
            collate_fn=config.collate_fn,
            num_workers=workers,
        )

    def call(self, fn: Callable[..., Any], batch: Any) -> Any:
        """fn(model, batch), with the model's parameters at hand."""
        return self.shards.call(fn, self.given, batch) if self.shards is not None else fn(self.given, batch)

    def pieces(self) -> Generator[tuple[int, Any, int], None, None]:
        """(first row in the dataset, batch, rows); the caller computes inside autocast and without gradients.

        The first row is negative where the rank has nothing left and another has: then it computes and forgets.
        """
        if self.shards is not None:
            del self.shards.log[:]
        try:
            with no_trace(self.module, self.randomness):
                for portion in self.feed.portions(Cursor(), epochs=1):
                    self.beat()
                    first = portion.cursor.offset
                    self.rows = first + portion.rows
                    parts = [(first + piece.start, piece.rows, piece.batch) for piece in portion.pieces]
                    for at, rows, batch in self.join.fill(parts, portion.rows) if self.join is not None else parts:
                        self.randomness.begin_piece(-1, at // self.batch_size)
                        with self.autocast():
                            yield at, aligned(batch) if self.exact else batch, rows
        finally:
            self.feed.close()

    def agree(self) -> None:
        """Afterwards, under fsdp: all ranks ran the same blocks, or what each computed is not its own. Collective."""
        if self.shards is not None and len(set(comm.all_gather(self.shards.order()))) > 1:
            self.shards.refuse(self.shards.log)

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
        evidence = [words, *figures(self.device), "the training is as it was: nothing of it was changed"]
        fix = [*less, "shorter rows, or a smaller model; evener.memory() says who holds memory"]
        return MemoryLimitError(f"Out of memory in {what} of {many} at once{where}.", evidence=evidence, fix=fix)


def evaluate(walk: Walk, metric_fn: MetricFn) -> tuple[dict[str, float], int]:
    """Means by name over all rows, and how many rows. Collective; communicates once, at the end."""
    chunks: list[tuple[int, list[str]]] = []  # where each begins, and the names of its means
    values: list[Any] = []  # total, count, total, ... of every chunk's means, on the device until the end

    def use(at: int, batch: Any, rows: int) -> None:
        means = as_means(walk.call(metric_fn, batch), rows)
        if at >= 0:
            chunks.append((at, list(means)))
            for mean in means.values():
                values.extend([total_of(mean.form, mean.value, mean.count), mean.count])

    problem = walk.each("evaluate", use)
    read = iter(_read(values) if problem is None else ())
    mine = [[at, {name: [next(read), next(read)] for name in of}] for at, of in (chunks if problem is None else ())]
    with walk.group.call("evaluate"):
        answers: list[list[Any]] = comm.all_gather([_told(problem), mine])
    _raise_told(problem, [said for said, _ in answers])
    walk.agree()
    sums: dict[str, list[float]] = {}
    for _, pairs in sorted((one for _, ranks in answers for one in ranks), key=lambda one: one[0]):
        for name, (total, count) in pairs.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = [before[0] + total, before[1] + count]
    ordered = sorted(sums, key=lambda name: (name != "loss", name))
    return {name: sums[name][0] / sums[name][1] if sums[name][1] else float("nan") for name in ordered}, walk.rows


def predict(walk: Walk, fn: Callable[..., Any]) -> torch.Tensor:
    """fn's values for every row, in dataset order, on every rank and on the CPU. Collective.

    Raises:
        DataError, MemoryLimitError: on all ranks: a problem of any rank, or shapes that differ.
    """
    spans: list[tuple[int, int]] = []
    outputs: list[torch.Tensor] = []

    def use(at: int, batch: Any, rows: int) -> None:
        values = walk.call(fn, batch)
        if not isinstance(values, torch.Tensor) or values.ndim == 0 or len(values) != rows:
            got = f"shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
            fix = ["return a tensor whose first dimension is the rows"]
            raise DataError(f"fn returned {got} for a batch of {rows} rows.", fix=fix)
        if at >= 0:
            spans.append((at, at + rows))
            outputs.append(values.detach().cpu())

    problem = walk.each("predict", use)
    kinds = sorted({(tuple(values.shape[1:]), str(values.dtype).removeprefix("torch.")) for values in outputs})
    with walk.group.call("predict"):
        every: list[dict[str, Any]] = comm.all_gather({"spans": spans, "kinds": kinds, "problem": _told(problem)})
        _raise_told(problem, [one["problem"] for one in every])
        walk.agree()
        found = sorted({(tuple(shape), dtype) for one in every for shape, dtype in one["kinds"]})
        if len(found) > 1:
            evidence = [f"{dtype} of shape {shape} for a row" for shape, dtype in found[:8]]
            fix = ["return one value of the same shape and dtype for every row (pad sequences)"]
            raise DataError("fn returned tensors of different shapes or dtypes.", evidence=evidence, fix=fix)
        ((shape, dtype),) = found
        longest = max(sum(stop - start for start, stop in one["spans"]) for one in every)
        padded = torch.zeros(longest, *shape, dtype=getattr(torch, dtype))
        if outputs:
            torch.cat(outputs, out=padded[: sum(map(len, outputs))])
        result = padded.new_empty(walk.rows, *shape)
        for one, values in zip(every, comm.all_gather(padded)):
            at = 0
            for start, stop in one["spans"]:
                result[start:stop] = values[at : at + stop - start]
                at += stop - start
        return result


def _told(problem: EvenerError | None) -> list[Any] | None:
    """What went wrong on this rank, for the others."""
    if problem is None:
        return None
    return [isinstance(problem, MemoryLimitError), problem.cause, list(problem.evidence), list(problem.fix)]


def _raise_told(problem: EvenerError | None, every: Sequence[list[Any] | None]) -> None:
    """Raise this rank's problem, else the first of another's, of `_told` on all ranks."""
    if problem is not None:
        raise problem
    for memory, cause, evidence, fix in filter(None, every):
        raise (MemoryLimitError if memory else DataError)(cause, evidence=evidence, fix=fix)


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
        what = f"metric_fn returned a {type(loss).__name__}; it returns what a loss_fn does, or {{name: Mean}}."
        raise LossError(what, fix=['return {"accuracy": evener.Mean(total=hits, count=len(y))}'])
    for name, mean in metrics.items():
        if not isinstance(mean, Mean):
            what = f"metric {name!r} is a {type(mean).__name__}; a metric says what it is the mean of."
            raise LossError(what, fix=[f"{{{name!r}: evener.Mean(total=..., count=...)}}"])
        means[name] = mean
    return means


def _read(values: list[Any]) -> list[float]:
    """All of them as numbers, with one trip to the device for the tensors among them."""
    tensors = [value.detach().reshape(()) for value in values if isinstance(value, torch.Tensor)]
    wide = torch.float32 if tensors and tensors[0].device.type == "mps" else torch.float64
    numbers = iter(torch.stack([value.to(wide) for value in tensors]).tolist() if tensors else ())
    return [next(numbers) if isinstance(value, torch.Tensor) else float(value) for value in values]
