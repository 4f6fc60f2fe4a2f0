"""`Run`: a model, an optimizer, a loss and a dataset become updates, on whatever hardware there is."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack

import torch

from evener.config import Config, ConfigFile, RunKeywords
from evener.data import Cursor, Feed, Order, Portion, source_of
from evener.dist import Group
from evener.dist import device as devices
from evener.dist.mix import mix
from evener.engine import Engine, Update
from evener.errors import UsageError, show_errors_without_traceback
from evener.plan.handed import VARIABLE, read_plan
from evener.report.contract import Contract, PrecisionWords, contract_line
from evener.run.epoch import Epoch
from evener.run.evaluate import MetricFn, evaluate
from evener.run.output import Output

_PREPARE = 3  # a stream of randomness of its own, apart from the model's


class Run:
    """Trains `model` with `optimizer` on `loss_fn` over `dataset`, one global batch per update.

    Constructed on all ranks together. The same script runs under `python`, `evener run` and `torchrun`.

    Args:
        model: A plain module, never wrapped.
        optimizer: Over the model's parameters.
        loss_fn: `loss_fn(model, batch)` returns a scalar (the mean over its rows), a `Mean`, or (either, {name: Mean}).
        dataset: Rows: a map-style dataset, tensors, or a DataLoader (taken for its dataset, collate_fn and workers).
        **keywords: See the table in docs/keywords.md; `global_batch_size` is required. `evener.toml`, then flags of
            `evener run`, override them.

    Raises:
        UsageError, ModelError, OptimizerError, DataError: before anything has run, with the fix.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
        dataset: Any,
        **keywords: Unpack[RunKeywords],
    ) -> None:
        show_errors_without_traceback()
        plan = read_plan()
        self.config = config = Config.merge(keywords, ConfigFile.find(), plan.overrides if plan else None)
        if plan is not None:
            # Overrides are for the script's first Run.
            os.environ[VARIABLE] = replace(plan, overrides={}).to_json()
        source = source_of(dataset)
        kind = config.order if config.order is not None else source.order or "shuffle"
        order = Order(source.rows, config.seed, kind)
        self.device = devices.device(plan.device if plan else None)
        self.group = Group(self.device, timeout=config.timeout, store_dir=plan.store if plan else None)
        self.number = 0
        self.cursor = Cursor()
        self.total: int | None = None  # updates of the loop that runs now
        self._portions: dict[int, Portion] = {}  # of this update and the one before, whose flag lands during it
        self._closed = False
        self._output: Output | None = None
        self._before: list[tuple[str, int, dict[str, Any]]] = []  # events from before there was a run directory
        self.engine = Engine(
            model,
            optimizer,
            loss_fn,
            device=self.device,
            precision=config.precision,
            strategy=config.strategy,
            global_batch_size=config.global_batch_size,
            microbatch_size=config.microbatch_size,
            slice_size=config.slice_size,
            exact=config.exact,
            # prepare sees a whole slice (mixup couples its rows), so slices must be whole.
            coupled=True if config.prepare is not None and config.coupled is None else config.coupled,
            seed=config.seed,
            scheduler=config.scheduler,
            schedule_by=config.schedule_by,
            max_grad_norm=config.max_grad_norm,
            before_step=config.before_step,
            on_nonfinite=config.on_nonfinite,
            scaler=config.scaler,
            batchnorm=config.batchnorm,
            compile=config.compile,
            split=config.split,
            loss_is=config.loss_is,
            device_ids=config.device_ids,
            output_device=config.output_device,
            scatter=config.scatter,
            group=self.group,
            report=self._report,
        )
        self.feed = Feed(
            source,
            order,
            global_batch_size=config.global_batch_size,
            drop_last=config.drop_last,
            rank=self.group.rank,
            world_size=self.group.world_size,
            local_world_size=self.group.place.local_world_size,
            cut=self.engine.cut.pieces,
            device=self.device,
            seed=config.seed,
            num_workers=config.num_workers,
            collate_fn=config.collate_fn,
            on_bad_sample=config.on_bad_sample,
            inspect=self._look_for_ignored_labels,
        )
        self.feed.updates_in(0)  # an epoch without any update is refused here, not later
        # Two engines may not be left half made: only now is something written.
        self._output = Output(self.is_main, config.dir, config.logger)
        folder = self._output.folder
        versions = {"evener": _version(), "torch": torch.__version__}
        folder.write_config(config.as_json())
        folder.event("start", world_size=self.group.world_size, versions=versions, device=str(self.device))
        line = self.contract_line()
        self._output.console.contract(line)
        for note in (*source.notes, *self.engine.notes):
            self._output.console.say(f"  {note}")
        folder.event("contract", line=line)
        for event in self._before:
            self._report(*event)
        atexit.register(self.close)

    # ------------------------------------------------------------------------------------------------ what it is

    @property
    def model(self) -> torch.nn.Module:
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    @property
    def scheduler(self) -> Any:
        return self.engine.scheduler

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    @property
    def is_main(self) -> bool:
        return self.group.rank == 0

    @property
    def dir(self) -> str | None:
        """The run directory; None on ranks other than 0."""
        path = self._out.folder.path
        return str(path) if path is not None else None

    @property
    def _out(self) -> Output:
        assert self._output is not None
        return self._output

    def contract_line(self) -> str:
        """`global batch 512 = 4 ranks x 8 microbatches x 16 · bf16 · ddp · ...`"""
        config, engine = self.config, self.engine
        rows = min(config.global_batch_size, self.feed.order.length(0))
        most = max((replace(engine.cut, rank=r).pieces(rows) for r in range(self.world_size)), key=len)
        words = engine.words()
        target = next(iter(engine.targets.values()))
        schedule = target.schedule
        by = None if schedule.scheduler is None else "metric" if schedule.by_user else schedule.by
        return contract_line(
            Contract(
                global_batch_size=rows,
                world_size=self.world_size,
                microbatches=len(most),
                microbatch_size=max(stop - start for start, stop in most),
                slice_size=engine.cut.slice_size,
                precision=PrecisionWords(
                    compute=words["compute"], master=words["master"], reduce=words["reduce"], scaler=words["scaler"]
                ),
                strategy=engine.strategy,
                exact=config.exact,
                coupled=engine.batch.coupled,
                schedule_by=by,
                one_scalar_read=not target.skips_on_device and self.device.type != "cpu",
                notes=(engine.batch.why_coupled,) if engine.batch.why_coupled else (),
            )
        )

    # ------------------------------------------------------------------------------------------------ training

    def updates(self, *, updates: int | None = None, epochs: int | None = None) -> Iterator[Update]:
        """Train and yield every `Update`; the body of the loop runs between updates. Collective.

        Args:
            updates: Stop when so many updates were made since the run began.
            epochs: Stop when so many epochs were made. Exactly one of the two.
        """
        if (updates is None) == (epochs is None):
            raise UsageError("updates() takes exactly one of updates= and epochs=.", fix=["run.updates(epochs=10)"])
        for name, value in (("updates", updates), ("epochs", epochs)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name}={value!r}: a whole number, at least 1.", fix=[f"run.updates({name}=10)"])
        self.total = updates if updates is not None else self.number + self._updates_left(epochs or 0)
        return self._train(self.total)

    def epochs(self, epochs: int) -> Iterator[Epoch]:
        """Yield each `Epoch`; iterate it for its updates, read its exact means afterwards. Collective."""
        updates = self.updates(epochs=epochs)
        while self.cursor.epoch < epochs:
            number = self.cursor.epoch
            epoch = Epoch(number, self._until_epoch_ends(updates, number))
            yield epoch
            for _ in epoch:  # a body that did not iterate (or broke off) still gets its epoch made
                pass
            self._out.folder.event(
                "epoch",
                update=self.number - 1,
                epoch=number,
                updates=epoch.updates,
                rows=self.feed.order.length(number),
                loss=epoch.loss,
                metrics=epoch.metrics,
                seconds=epoch.seconds,
            )
        for _ in updates:  # let the loop end in its own words
            pass

    def _until_epoch_ends(self, updates: Iterator[Update], number: int) -> Iterator[Update]:
        while self.cursor.epoch == number:
            update = next(updates, None)
            if update is None:
                return
            yield update

    def _updates_left(self, epochs: int) -> int:
        done = self.cursor.offset // self.config.global_batch_size
        return sum(self.feed.updates_in(epoch) for epoch in range(self.cursor.epoch, epochs)) - done

    def _train(self, total: int) -> Iterator[Update]:
        began = time.perf_counter()
        all_delivered = self.config.on_bad_sample == "raise"
        try:
            for portion in self.feed.portions(self.cursor, updates=max(0, total - self.number)):
                self._portions = {self.number: portion, **dict([*self._portions.items()][:1])}
                parts = [
                    (number, piece.rows, self._prepared(piece.batch, number))
                    for (number, _), piece in zip(self.engine.cut.numbered(portion.rows), portion.pieces)
                    if piece.rows
                ]
                update = self.engine.step_parts(parts, portion.rows, all_delivered=all_delivered)
                update.epoch, update.ends_epoch = portion.cursor.epoch, portion.ends_epoch
                for row, text in portion.skipped:
                    self._report("bad_row", update.number, {"row": row, "error": text})
                if portion.ends_epoch:
                    self.engine.settle()
                    for target in self.engine.targets.values():
                        target.schedule.after_epoch()
                self.cursor = portion.next
                self.number += 1
                self._out.update(update, portion.rows, total)
                yield update
            self.engine.settle()
            self._out.folder.event("finish", update=self.number - 1, updates=self.number, seconds=_since(began))
        finally:
            self._out.finish_loop(total)

    def _prepared(self, batch: Any, number: int) -> Any:
        if self.config.prepare is None:
            return batch
        generator = torch.Generator(device=self.device)
        generator.manual_seed(mix(self.config.seed, self.number, _PREPARE, number))
        return self.config.prepare(batch, generator)

    def _look_for_ignored_labels(self, batch: Any) -> None:
        if not self.engine.watches_labels or not isinstance(batch, Mapping):
            return
        labels = batch.get("labels")
        # As an array: no operation that a profile or a sync counter would see.
        if not isinstance(labels, torch.Tensor) or labels.dtype not in (torch.int64, torch.int32, torch.int16):
            return
        if (labels.numpy() == -100).any():
            self.engine.note_ignored_labels()

    # ------------------------------------------------------------------------------------------------ between updates

    def evaluate(
        self,
        dataset: Any,
        metric_fn: MetricFn | None = None,
        *,
        model: torch.nn.Module | None = None,
        batch_size: int | None = None,
    ) -> dict[str, float]:
        """Means over every row of `dataset`, each exactly once on any world size. Collective.

        Leaves no trace: generators, buffers and train/eval modes (per module) are as before.

        Args:
            metric_fn: As a loss_fn, or returning {name: Mean}; by default the run's loss_fn.
            model: Another module to evaluate; by default the run's model.
            batch_size: Rows at once on one rank; by default the training's largest piece, at least 64.
        """
        if batch_size is None:
            pieces = self.engine.cut.pieces(self.config.global_batch_size)
            batch_size = max([64, *(stop - start for start, stop in pieces)])
        elif isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise UsageError(f"batch_size={batch_size!r}: a whole number of rows, at least 1.", fix=["batch_size=256"])
        began = time.perf_counter()
        means, rows = evaluate(
            model if model is not None else self.model,
            dataset,
            metric_fn if metric_fn is not None else self._loss_fn(),
            batch_size=batch_size,
            group=self.group,
            device=self.device,
            autocast=self.engine.autocast,
            randomness=self.engine.randomness,
            collate_fn=self.config.collate_fn,
            num_workers=self.config.num_workers,
            seed=self.config.seed,
        )
        self._out.folder.event("evaluate", update=self.number - 1, metrics=means, rows=rows, seconds=_since(began))
        self._out.log({f"evaluate/{name}": value for name, value in means.items()}, self.number)
        return means

    def _loss_fn(self) -> MetricFn:
        if self.engine.loss_fn is None:
            raise UsageError("evaluate needs a metric_fn: the run has no loss_fn of its own.", fix=["evaluate(data, fn)"])
        return self.engine.loss_fn

    def print(self, *values: object) -> None:
        """print() on rank 0 only, above the progress bar. No communication."""
        if self.is_main:
            self._out.console.say(" ".join(str(value) for value in values))

    def log(self, values: Mapping[str, Any]) -> None:
        """Points of your own curves at the current update; written on rank 0 only."""
        self._out.log(values, self.number)

    def digest(self) -> str:
        """sha256 over parameters, buffers and optimizer state, the same wherever they are bit-equal. Collective."""
        return self.engine.digest()

    # ------------------------------------------------------------------------------------------------ the end

    def close(self) -> None:
        """Read what is still on its way, end data workers, close files. Safe to call twice; no communication."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self.feed.close()
        try:
            self.engine.close()
        finally:
            self._out.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, SystemExit):
            self._out.folder.event("error", update=self.number, type=type(error).__name__, text=str(error))
        self.close()

    def _report(self, kind: str, update: int, fields: dict[str, Any]) -> None:
        """Events of the engine: into events.jsonl with the rows they concern, and in words on the console."""
        if self._output is None:
            self._before.append((kind, update, fields))
            return
        if kind in ("skip", "zero_count"):
            fields = {"row_ids": self._portions[update].ids().tolist(), **fields}
        self._out.folder.event(kind, update=update, rank=self.rank, **fields)
        line = _in_words(kind, update, fields)
        if line:
            self._out.console.say(line)


def _in_words(kind: str, update: int, fields: Mapping[str, Any]) -> str:
    if kind == "skip":
        scale = f", loss scale {fields['scale']:g}" if fields["scale"] != 1 else ""
        return f"update {update} skipped: its gradients are not finite (loss {fields['loss']:.4g}{scale})"
    if kind == "zero_count":
        return f"update {update} skipped: nothing to count in it"
    if kind == "scale_falling":
        return f"update {update}: the loss scale keeps halving, now {fields['scale']:g}: look for what is not finite"
    if kind == "unused_parameters":
        names = fields["names"]
        shown = ", ".join(names[:5]) + (f", ... ({len(names)} in all)" if len(names) > 5 else "")
        return f"no gradient reached: {shown}"
    if kind == "bad_row":
        return f"row {fields['row']} left out: {fields['error']}"
    return ""


def _since(began: float) -> float:
    return time.perf_counter() - began


def _version() -> str:
    from evener import __version__

    return __version__
