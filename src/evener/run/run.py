"""`Run`: a model, an optimizer, a loss and a dataset become updates, on whatever hardware there is."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from evener import __version__
from evener.checkpoint.weights import export as export_weights
from evener.config import Config, ConfigFile, RunKeywords, keyword_groups
from evener.data import Portion, make_feed, source_of
from evener.dist import Group, comm, here
from evener.dist import device as devices
from evener.engine import Engine, Update
from evener.engine.engine import Models, Optimizers
from evener.engine.setup import check_function, check_model
from evener.errors import LessonError, UsageError, show_errors_without_traceback
from evener.measure.flops import FlopCounter, uncountable
from evener.plan.handed import VARIABLE, LaunchPlan, read_plan
from evener.report.folder import script_name
from evener.report.goodput import newest_update
from evener.run.batch import Batch
from evener.run.beat import Beat
from evener.run.epoch import Epoch
from evener.run.evaluate import MetricFn, Walk, evaluate, predict
from evener.run.lesson import learn, lesson_of
from evener.run.loop import Loop, uncaught
from evener.run.output import Output
from evener.run.phases import phases_of
from evener.run.prepare import Preparing
from evener.run.profile import Profile
from evener.run.resume import FINISHED, code_of, identity
from evener.run.saving import Saving
from evener.run.silent import cpu_beside_gpus, strays
from evener.run.trial import Watch
from evener.run.uncaught import explain_uncaught
from evener.run.values import give_values
from evener.run.words import circumstances, contract_of, idle_ranks, in_words

_OF_ENGINE = [name for name in inspect.signature(Engine).parameters if name in keyword_groups()]
_OF_FEED = ["global_batch_size", "order", "drop_last", "collate_fn", "num_workers", "stream", "on_bad_sample", "seed"]
_OF_FEED += ["exact"]


class Run:
    """Trains `model` with `optimizer` on `loss_fn` over `dataset`, one global batch per update.

    Constructed on all ranks together. The same script runs under `python`, `evener run` and `torchrun`.

    Args:
        model, optimizer: Plain modules and optimizers, never wrapped; or {name: one}, with `batches` and `step`.
        loss_fn: `loss_fn(model, batch)` returns a scalar (the mean over its rows), a `Mean`, or (either, {name: Mean}).
        dataset: A map-style dataset, tensors, or a DataLoader (for its dataset, collate_fn and workers); with stream=
            what can only be iterated.
        **keywords: docs/keywords.md has them; `evener.toml`, then flags of `evener run`, override them.

    Raises:
        UsageError, ModelError, OptimizerError, DataError: before anything has run, with the fix.
    """

    def __init__(
        self,
        model: Models = None,  # type: ignore[assignment]  # refused below, in words
        optimizer: Optimizers = None,  # type: ignore[assignment]
        loss_fn: Callable[..., Any] | None = None,
        dataset: Any = None,
        **keywords: Unpack[RunKeywords],
    ) -> None:
        show_errors_without_traceback()
        explain_uncaught()
        for what, given in (("a model", model), ("an optimizer", optimizer), ("a dataset", dataset)):
            if given is None:
                raise UsageError(f"Run needs {what}.", fix=["Run(model, optimizer, loss_fn, dataset, ...)"])
        self._plan = plan = read_plan() or LaunchPlan(run_id="")
        self.config = config = Config.merge(keywords, ConfigFile.find(), plan.overrides, plan=plan.decided)
        if plan.capture is not None:
            from evener.run.capture import serve

            serve(config, model, optimizer, loss_fn, dataset, plan.capture)
        self._beat = Beat(plan.beats, here().rank)
        self._beat.begin()
        if plan.run_id:
            # Overrides are for the script's first Run.
            os.environ[VARIABLE] = replace(plan, overrides={}, decided={}, predicted={}, trial=None).to_json()
        source = source_of(dataset, config.stream)
        self.device = devices.device(plan.device)
        self.group = Group(self.device, timeout=config.timeout, store_dir=plan.store)
        learnt, where = comm.broadcast(lesson_of(config) if self.is_main else None)
        if learnt:
            self.config = config = Config.merge(keywords, ConfigFile.find(), plan.overrides, learnt, plan=plan.decided)
        self.loop = Loop(self)
        self._portions: dict[int, Portion] = {}  # of this update and of those whose flags have not landed
        self._closed = True  # until it is open
        self._output: Output | None = None
        self._before: list[tuple[str, int, dict[str, Any]]] = []  # events from before there was a run directory
        weight_notes, fill = give_values(model, config, self.device, self.world_size)
        how: dict[str, Any] = {name: getattr(config, name) for name in _OF_ENGINE}
        if config.prepare is not None:
            check_function("prepare", config.prepare, "prepare(batch, generator)")
            how["coupled"] = config.coupled is None or config.coupled  # it sees a whole slice: mixup couples its rows
        how |= {"device": self.device, "group": self.group, "fill": fill, "report": self._report}
        self.engine = Engine(model, optimizer, loss_fn, **how)
        try:
            self._phases = phases_of(self.device)
            lap = self._phases.lap if self._phases is not None else None
            self.engine.lap = lap or self.engine.lap
            self._prepared = Preparing(config, self.engine, source.collate_fn)
            self.feed = make_feed(
                source,
                **{name: getattr(config, name) for name in _OF_FEED},
                rank=self.group.rank,
                world_size=self.group.world_size,
                local_world_size=self.group.place.local_world_size,
                cut=self.engine.cut.pieces,
                device=self.device,
                lap=lap,
                inspect=self._prepared.look,
                say=self._say,
            )
            self.feed.updates_in(0)  # an epoch without any update is refused here, not later
            self.profile = Profile(config.profile, self.device, lambda line: self._out.console.say(line))
            about = identity(config, self.engine, None if source.stream else source.rows)
            self.saving = Saving(config, self.engine, about, code_of(self.engine.model))
            silent = [cpu_beside_gpus(self.device, plan.device == "cpu"), *strays(self.engine.model, self.device)]
            self._begin([*source.notes, *weight_notes, *where, *(line for line in silent if line)])
        except BaseException:
            self.engine.close()  # nobody else will: its hooks and settings go
            raise
        # The second update that is made here is counted: the first also makes what later ones only use.
        self._counts_at = self.number + 1 if self.is_main and plan.trial is None else -1
        self._watch = Watch(self, plan.trial) if plan.trial is not None else None
        self._closed = False
        self._beat.end()
        # Not the bound method: a model and its optimizer would stay in memory until the process ends.
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def _begin(self, source_notes: Sequence[str]) -> None:
        """Choose the directory (continue one, or start a new one), open it on rank 0, and say what was decided."""
        config = self.config
        wanted = Path(config.dir) if config.dir is not None else Path("runs") / script_name()
        with self.group.call("the constructor of Run or Engine"):
            restarted = self._plan.run_id if self._plan.attempt else None
            path, saved, notes = self.saving.find(wanted, self.is_main, restarted)
        reached = newest_update(path) if path is not None and self.is_main else None
        self._output = Output(self.is_main, path or config.dir, config.logger, continues=path is not None)
        self.path: Path = Path(comm.broadcast(str(self._output.folder.path) if self.is_main else None))
        self.saving.open(self.path, self._output)
        ranks = {"rank": self.rank, "world_size": self.world_size, "num_workers": self.feed.num_workers}
        self._output.pulse.phases = self._phases
        self._output.pulse.open(self.path, self.device, **ranks)
        folder = self._output.folder
        folder.write_config(config.as_json())
        about = circumstances(self.engine.model, self.device) if self.is_main else {}
        about |= {"versions": {"evener": __version__, "torch": torch.__version__}, "device": str(self.device)}
        about |= {"world_size": self.world_size, "machines": -(-self.world_size // self.group.place.local_world_size)}
        folder.event("start", job=self._plan.run_id or None, attempt=self._plan.attempt, **about)
        self._tell_contract()
        if notes and saved is None:
            notes.append(f"this run goes to {self.path}")
        rows, size = self.feed.length(0), config.global_batch_size
        if rows is not None and rows < size:
            notes.append(f"an epoch has {rows} rows, less than the global batch of {size}: one update")
        idle = idle_ranks(size, self.engine.cut.slice_size, self.world_size)
        for note in (*notes, *source_notes, *self.engine.notes, *idle):
            self._say(note)
        for event in self._before:
            self._report(*event)
        if saved is not None:
            self.loop.restore(saved)
            redone = 0 if reached is None else max(0, reached + 1 - self.number)
            more = f" ({self.number + redone} were made)" if redone else ""
            self._output.console.say(f"  continues {self.path} after {self.number} updates{more}")
            folder.event("resume", update=self.number - 1, checkpoint=f"update-{self.number}", redone_updates=redone)

    @property
    def model(self) -> Any:
        """The model, or {name: model}, as it was given."""
        return self.engine.given

    @property
    def ema(self) -> torch.nn.Module | None:
        """The running average of the model as a module of its own (`ema=`), for evaluate(model=run.ema)."""
        return self.engine.ema.module if self.engine.ema is not None else None

    @property
    def state(self) -> dict[str, Any]:
        """JSON values of your own, saved and restored with the run."""
        return self.saving.state

    @property
    def number(self) -> int:
        """Updates made so far; the number of the next one."""
        return self.engine.number

    @property
    def optimizer(self) -> Any:
        """The optimizer, or {name: optimizer}, as it was given."""
        targets = self.engine.targets
        return {name: one.optimizer for name, one in targets.items()} if len(targets) > 1 else self.engine.optimizer

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
        return contract_of(self.config, self.engine, self.feed.length(0) or self.config.global_batch_size)

    def updates(self, *, updates: int | None = None, epochs: int | None = None) -> Iterator[Update]:
        """Train and yield every `Update`; the body of the loop belongs to its update. Collective.

        A checkpoint is written when the loop asks for the next update, so the body runs at least once. Exactly one of
        `updates` and `epochs`, counted since the run began; a stream's scheduler= of the total needs updates=.

        Raises:
            Stopped: a stop was asked for (a signal, `stop()`): the checkpoint is written.
        """
        return self.loop.updates(updates, epochs)

    def epochs(self, epochs: int) -> Iterator[Epoch]:
        """Yield each `Epoch`; iterate it for its updates, read its exact means afterwards. Collective."""
        return self.loop.epochs(epochs)

    def batches(self, *, batches: int | None = None, epochs: int | None = None) -> Iterator[Batch]:
        """Yield global batches for `step`: several optimizers in turns, or several updates per batch. Collective.

        Exactly one of `batches` and `epochs`, counted since the run began.
        """
        return self.loop.over_batches(batches, epochs)

    def step(self, batch: Batch, *, loss_fn: Callable[..., Any] | None = None, optimizer: str | None = None) -> Update:
        """One update on a batch of `batches`. Collective.

        `loss_fn` (by default the run's own) gets what the run was given: one model, or all of them by name. `optimizer`
        says which one, where there are several: only its parameters receive gradients.
        """
        if not isinstance(batch, Batch):
            fix = ["for batch in run.batches(epochs=10): run.step(batch, ...)", "evener.Engine takes your own batches"]
            raise UsageError(f"step() takes a batch of run.batches(), not a {type(batch).__name__}.", fix=fix)
        if self.loop.went_back:
            fix = ["`continue` after load(): the next batch is the one that follows the checkpoint"]
            raise UsageError("load() went back in the data, and this batch is of the time before.", fix=fix)
        portion = batch.portion
        waiting = [target.flags.pending[0].number for target in self.engine.targets.values() if target.flags.pending]
        self._portions = {number: self._portions[number] for number in waiting} | {self.number: portion}
        self.profile.at(self.number, self.path, self.rank)
        counts = self.number == self._counts_at
        why = ""
        if counts and len(self.engine.targets) > 1:
            why = "several optimizers: one update is not like another"
        elif counts:
            dp = "dp computes in threads, where nothing can be counted"
            why = dp if self.engine.strategy == "dp" else uncountable(self.config.exact)
        counter = FlopCounter() if counts and not why else None
        try:
            with counter or contextlib.nullcontext():
                update = self.engine.step_parts(
                    batch.parts,
                    portion.planned,
                    all_delivered=self.config.on_bad_sample == "raise" and portion.planned == portion.rows,
                    loss_fn=loss_fn,
                    optimizer=optimizer,
                )
        except LessonError as error:
            raise learn(error, self.config, self.path, self.number) from None
        update.epoch, update.ends_epoch = portion.cursor.epoch, portion.ends_epoch
        self._out.update(update, portion.rows, self.loop.batches, self.loop.total)
        if update.number == self._counts_at:  # not one that was made twice
            self._tell_flops(update.number, portion.rows, counter, why)
        self._beat()
        if self._watch is not None:
            self._watch.stepped(batch, update)
        return update

    def _tell_flops(self, number: int, rows: int, counter: FlopCounter | None, why: str) -> None:
        why = counter.why if counter is not None else why
        rows = sum(stop - start for start, stop in self.engine.cut.pieces(rows))  # of rank 0
        flops = counter.total if counter is not None and not why else None
        fields = {"flops": flops, "rows": rows, "format": self.engine.words()["compute"], "why": why or None}
        self._out.folder.event("flops", update=number, **fields)

    def stop(self, reason: str = "run.stop() was called") -> None:
        """Called on any rank: every rank saves and raises `Stopped` when the loop asks for its next update; on several
        ranks one update later, with whose sums the request travels. To end early by a figure, `break` on all ranks.
        """
        self.loop.stop_reason = reason
        self.engine.asks_to_stop = 1.0

    def _tell_contract(self, **at: int) -> None:
        line = self.contract_line()
        self._out.console.contract(line)
        self._out.folder.event("contract", line=line, **at)

    def _say(self, text: str) -> None:
        """A line on the console, and in the events; called on all ranks, shown by rank 0."""
        self._out.console.say(f"  {text}")
        self._out.folder.event("warning", text=text)

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
            metric_fn: As a loss_fn, or returning {name: Mean}; by default the run's own. model: By default the run's.
            batch_size: Rows at once on one rank; by default the training's largest piece, at least 64.
        """
        if metric_fn is not None:
            check_function("metric_fn", metric_fn, "metric_fn(model, batch)")
        if self._watch is not None and (known := self._watch.answer()) is not None:
            return known
        began = time.perf_counter()
        if (fn := self.engine.loss_fn if metric_fn is None else metric_fn) is None:
            what = "evaluate needs a metric_fn: the run has no loss_fn of its own."
            raise UsageError(what, fix=["evaluate(data, fn)"])
        means, rows = evaluate(Walk(self, dataset, model, batch_size), fn)
        self._out.folder.event(
            "evaluate", update=self.number - 1, metrics=means, rows=rows, seconds=time.perf_counter() - began
        )
        self.log({f"evaluate/{name}": value for name, value in means.items()})
        if self._watch is not None:
            self._watch.evaluated(means)
        return means

    def predict(
        self,
        dataset: Any,
        fn: Callable[..., torch.Tensor],
        *,
        model: torch.nn.Module | None = None,
        batch_size: int | None = None,
    ) -> torch.Tensor:
        """`fn(model, batch)` for every row: one CPU tensor, rows in dataset order, on every rank. Collective.

        Leaves no trace, as `evaluate`; `model=` as there.
        """
        check_function("fn", fn, "fn(model, batch)")
        return predict(Walk(self, dataset, model, batch_size), fn)

    def register(self, name: str, thing: Any) -> None:
        """Save and restore an object with state_dict() and load_state_dict() with the run; after a resume at once."""
        if not isinstance(name, str):
            raise UsageError(f"register({name!r}, ...): the name comes first.", fix=['run.register("name", thing)'])
        self.saving.register(name, thing)

    def save(self, name: str) -> None:
        """A checkpoint under a name of its own, which is kept: `run.save("best")`. Collective."""
        if not isinstance(name, str):
            raise UsageError(f"save({name!r}): checkpoints of your own have names.", fix=['run.save("best")'])
        self.loop.save(name)

    def load(self, name: str) -> None:
        """Put everything back to the checkpoint saved under `name`, the data position included. Collective."""
        self.saving.landed(wait=True)
        with self.group.call("load"):
            self.loop.restore(self.saving.read(name))

    def export(self, path: str | os.PathLike[str], *, model: torch.nn.Module | None = None) -> None:
        """Weights with plain names as safetensors: of the run's model, or `model=run.ema`. Collective."""
        if not isinstance(path, str | os.PathLike):
            raise UsageError(f"export({path!r}): not a path.", fix=['run.export("model.safetensors")'])
        if model is not None and model is not self.ema:
            check_model(model, trained=False)
        with self.group.call("export"):
            self.engine.meet()
            shards = self.engine.shards_of(model)
            whole = shards.state_dict() if shards is not None else None
            export_weights(whole or (self.engine.model if model is None else model), Path(path))

    def print(self, *values: object) -> None:
        """print() on rank 0 only, above the progress bar. No communication."""
        if self.is_main:
            self._out.console.say(" ".join(str(value) for value in values))

    def log(self, values: Mapping[str, Any]) -> None:
        """Points of your own curves at the newest update; written on rank 0 only."""
        if not isinstance(values, Mapping):
            raise UsageError(f"log() takes a dict, not a {type(values).__name__}.", fix=['run.log({"name": value})'])
        self._out.log(values, max(0, self.number - 1))

    def digest(self) -> str:
        """sha256 over parameters, buffers and optimizer state, the same wherever they are bit-equal. Collective."""
        return self.engine.digest()

    def close(self) -> None:
        """Read what is still on its way, end data workers, close files. Safe to call twice; no communication.

        Raises:
            CheckpointError: on rank 0: the newest checkpoint could not be written behind the training.
        """
        if self._closed:
            return
        self._closes()
        if (error := uncaught()) is not None and error is not self.loop.error_before:
            self._tell_error(error)
        self.saving.landed(wait=True)
        self._mark_finished()
        self.profile.stop(self.path, self.rank)  # the loop was left inside of the range
        try:
            self.engine.close()
        finally:
            self._out.close()
        if self.saving.failed is not None:
            raise self.saving.failed

    def __del__(self) -> None:
        # Dropped without close(): what the whole process shares (its group, pinned settings) stays for another run, and
        # so does the claim on the directory: when a run is collected is chance.
        if not getattr(self, "_closed", True):
            self._closes()
            self._mark_finished()
            self._out.close()

    def _closes(self) -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        self.feed.close()

    def _mark_finished(self) -> None:
        """The loop came to its end and no exception ended the script since: there is nothing to continue."""
        if self.loop.ended and self.is_main and uncaught() is self.loop.error_before:
            try:
                (self.path / FINISHED).write_text(f"{self.number} updates\n", encoding="ascii")
            except OSError as error:
                what = f"{self.path} could not be marked as finished"
                self._say(f"{what} ({error.strerror}): a next run would continue it")

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.loop.ended, self.saving.failed = False, None  # one error is enough
            if not isinstance(error, SystemExit):
                self._tell_error(error)
        self.close()

    def _tell_error(self, error: BaseException) -> None:
        self._out.event_of_rank("error", self.number, {"type": type(error).__name__, "text": str(error)})

    def _report(self, kind: str, update: int, fields: dict[str, Any]) -> None:
        """Events of the engine: into events.jsonl with the rows they concern, and in words on the console."""
        if self._output is None:
            self._before.append((kind, update, fields))
            return
        if kind in ("skip", "zero_count"):
            fields = {"row_ids": self._portions[update].ids().tolist(), **fields}
        self._out.folder.event(kind, update=update, **{"rank": self.rank, **fields})
        if line := in_words(kind, update, fields):
            self._out.console.say(line)
        if kind == "oom" and update == self._counts_at:
            self._counts_at += 1  # what was made twice was counted twice
        if kind in ("oom", "grow"):  # the product stays, its factors have changed
            self._tell_contract(update=update)


def _close(run: weakref.ref[Run]) -> None:
    if (alive := run()) is not None:
        alive.close()
