"""`Engine`: models, optimizers and the decisions of a training, one update after another. The step is in step.py."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from evener import batch as batches
from evener.config import check_keywords
from evener.dist import Group, here
from evener.dist import device as devices
from evener.engine import batchnorm as bn
from evener.engine import setup
from evener.engine.buffers import Buffers
from evener.engine.cut import cut_batch
from evener.engine.digest import digest_of
from evener.engine.ema import Ema
from evener.engine.flags import Flags
from evener.engine.join import Join, Part
from evener.engine.oom import Ladder
from evener.engine.optim import check_parameters
from evener.engine.pins import Pins
from evener.engine.precision import Precision, cast_hooks, cast_parameters, decide
from evener.engine.randomness import Randomness
from evener.engine.recompute import LATER, recompute
from evener.engine.saved import Saved, check_saved
from evener.engine.scaler import LossScale
from evener.engine.schedule import Schedule
from evener.engine.setup import SHARDED, load_plain, plain_name, plain_state
from evener.engine.shards import Options, Place, Shards, check_fsdp, policy_of, sharded_with_twin
from evener.engine.spread.choose import make_spread
from evener.engine.step import Open, apply, backward
from evener.engine.target import LossFn, Target, clone
from evener.engine.update import Update
from evener.errors import UsageError, one_of, show_errors_without_traceback

Report = Callable[[str, int, dict[str, Any]], None]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Models = torch.nn.Module | Mapping[str, torch.nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


class Engine:
    """The part of `Run` without data, checkpoints and logs.

    Constructed on all ranks together (it makes or adopts the process group and broadcasts rank 0's parameters and
    buffers). `step(batch)` is one update; `batch` is this rank's rows (None for none), and the union over ranks is the
    global batch. `backward(batch)` then `apply()` is the same in two halves: between them `.grad` is final, that is
    reduced over ranks, unscaled and not yet clipped.

    Args:
        model: A plain module, or {name: module}; moved to `device`, never wrapped. loss_fn gets what was passed here.
        optimizer: Over the model's parameters, or {name: optimizer}; then `step(batch, optimizer=name)` trains one of
            them and leaves the others' `.grad` alone. SGD, Adam, AdamW and Adagrad are switched to their fused kernels
            where the choice was left to torch, because those skip an update on the device.
        loss_fn: `loss_fn(model, batch)` returns a scalar (the mean over its rows), a `Mean`, or (either, {name: Mean}).
            None where every step gets its own.
        device: None for `evener.device()`.
        precision, strategy, exact, coupled, slice_size, microbatch_size, seed, scheduler, schedule_by, max_grad_norm,
            before_step, on_nonfinite, scaler, batchnorm, ema, compile, split, loss_is, fsdp,
            activation_checkpointing, saved_activations, gradient_compression, sync_every: as for `Run`. With several
            optimizers scheduler, max_grad_norm and scaler may be given by name.
        global_batch_size: Only for the default slice size; the batches passed to `step` decide.
        group: A `Group` to use instead of making one.
        report: Called as report(kind, update number, fields) for what a log should know: skipped updates, parameters
            without gradient, a falling loss scale. The default warns.

    Raises:
        ModelError, OptimizerError, PrecisionError, BatchSizeError, DeviceError, UsageError: before anything has run.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        loss_fn: LossFn | None = None,
        *,
        device: str | int | torch.device | None = None,
        precision: Any = "auto",
        strategy: str = "auto",
        global_batch_size: int | None = None,
        microbatch_size: int | None = None,
        slice_size: int | None = None,
        exact: bool = False,
        coupled: bool | None = None,
        seed: int = 0,
        scheduler: Any = None,
        schedule_by: str = "update",
        max_grad_norm: Any = None,
        before_step: Callable[[Any], object] | None = None,
        on_nonfinite: str = "skip",
        scaler: Any = None,
        batchnorm: str = "slice",
        ema: float | None = None,
        compile: bool = False,
        split: batches.Split | None = None,
        loss_is: str | None = None,
        device_ids: Sequence[int] | None = None,
        output_device: int | None = None,
        scatter: Any = None,
        group: Group | None = None,
        report: Report | None = None,
        timeout: float = 600.0,
        fsdp: Mapping[str, Any] | None = None,
        activation_checkpointing: Any = None,
        saved_activations: str = "keep",
        gradient_compression: str | None = None,
        sync_every: int | None = None,
        fill: Callable[[Shards], None] | None = None,
    ) -> None:
        show_errors_without_traceback()
        check_keywords(
            strategy=strategy, microbatch_size=microbatch_size, slice_size=slice_size, scheduler=scheduler,
            schedule_by=schedule_by, max_grad_norm=max_grad_norm, on_nonfinite=on_nonfinite, scaler=scaler,
            batchnorm=batchnorm, ema=ema, loss_is=loss_is, scatter=scatter, fsdp=fsdp, sync_every=sync_every,
            saved_activations=saved_activations, gradient_compression=gradient_compression,
        )  # fmt: skip
        models, optimizers = setup.by_name("model", model), setup.by_name("optimizer", optimizer)
        for one in models.values():
            setup.check_model(one, blank=strategy in SHARDED and here().world_size > 1)
        self.given = model if isinstance(model, torch.nn.Module) else models  # what loss_fn sees
        if exact:
            setup.check_exact(torch.nn.ModuleDict(models) if len(models) > 1 else next(iter(models.values())))
        models = {name: setup.plain_module(one) for name, one in models.items()}
        # One module that holds all of them: for names, buffers, state and digest.
        self.model = models[""] if isinstance(model, torch.nn.Module) else torch.nn.ModuleDict(models)
        functions = (("loss_fn", loss_fn, "loss_fn(model, batch)"), ("before_step", before_step, "before_step(model)"))
        for name, given, form in functions:
            if given is not None:
                setup.check_function(name, given, form)
        self.loss_fn = loss_fn
        self.device = devices.device(device)
        self.precision: Precision = decide(precision, self.device)
        self.report: Report = report or _warn
        named = dict(self.model.named_parameters())
        parameters = {name: check_parameters(named, one) for name, one in optimizers.items()}
        setup.check_sparse(self.model)
        self.hooks: list[Any] = bn.freeze(self.model) if batchnorm == "frozen" else []
        self.alone = len(optimizers) == 1
        self.group = group if group is not None else Group(self.device, timeout=timeout)
        rank, world = self.group.rank, self.group.world_size
        self.distributed = world > 1
        self.strategy = setup.choose_strategy(strategy, world)
        setup.check_batchnorm(self.model, batchnorm, strategy=self.strategy, exact=exact)
        synchronised = batchnorm == "sync" and bn.has_batchnorm(self.model)
        self.batch = setup.decide_batch(
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            slice_size=slice_size,
            exact=exact,
            coupled=coupled,
            batchnorm=bn.has_batchnorm(self.model) and not synchronised,
            rank=rank,
            world_size=world,
        )
        self.cut, self.split, self.before_step = self.batch.cut, split, before_step
        self.notes: list[str] = [self.precision.because] if self.precision.because else []

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.join: Join | None = None
        if world > 1 and synchronised:
            self.join = Join(self.cut, split, self.device)
            self.hooks += [*bn.synchronise(self.model, self.join), self.join.own_group()]
            self.notes.append("BatchNorm sees the microbatches of all ranks together")
        sharded = self.strategy in SHARDED and world > 1
        options = Options.of(fsdp, self.strategy, self.group.place.local_world_size, tuple(filter(None, models)))
        self.shards: Shards | None = None
        twin: Shards | None = None
        if sharded:
            check_fsdp(optimizers, options, self.precision, exact=exact, compile=compile, world_size=world)
            self.join = self.join or Join(self.cut, split, self.device)
        self.keeps = check_saved(saved_activations, strategy=self.strategy, exact=exact, compile=compile)
        self.precision, self.approximate = setup.check_traffic(
            gradient_compression, sync_every, self.precision, self.strategy, exact, world
        )
        if saved_activations == "int8":
            self.approximate = ("int8 activations", *self.approximate)
        self.pins = Pins(exact=exact, tf32=self.precision.name == "tf32", device=self.device)
        self.master = next(iter(parameters.values()))[0].dtype
        handles, self.recomputes = recompute(self.model, activation_checkpointing)
        self.hooks += handles
        self._place(models, optimizers, compile, sharded)
        if world > 1:
            with self.group.call("the constructor of Run or Engine"):
                if sharded:
                    place = Place(self.device, rank, world, policy_of(self.precision, exact=exact))
                    self.shards, twin = sharded_with_twin(self.model, options, place, ema is not None, seed, fill)
                    for one in optimizers.values():
                        self.shards.remap(one)
                    self.notes.append(self.shards.words())
                    if compile:
                        blocks = self.shards.blocks.values() or models.values()
                        self.hooks += [setup.compile_forward(block) for block in blocks]
                    parameters = {name: check_parameters(self.named(), one) for name, one in optimizers.items()}
                for tensor in (*(self.model.parameters() if not self.shards else ()), *self.model.buffers()):
                    torch.distributed.broadcast(tensor.detach(), 0)
        if scaler is not None and not self.precision.scaler:
            what = f"scaler= was given, but precision {self.precision.name} needs no loss scale."
            raise UsageError(what, fix=['precision="fp16"', "or leave scaler out"])
        whole = "a slice is computed alone, whatever fits" if self.cut.slice_size is not None else ""
        if not whole and batchnorm != "frozen" and (synchronised or bn.has_batchnorm(self.model)):
            whole = "BatchNorm would see fewer rows, and the result would be another"
        self.ladder = Ladder(self, why_whole=whole)
        self.targets: dict[str, Target] = {}
        self.ema = Ema(self.model, ema, self.shards, twin) if ema is not None else None
        self.dp, self.sync_every = (device_ids, output_device, scatter), sync_every
        names = list(optimizers)
        for name, one in optimizers.items():
            settings = setup.for_target("scaler", scaler, name, names)
            self.targets[name] = Target(
                name,
                one,
                parameters[name],
                make_spread(self, parameters[name], one),
                loss_scale=LossScale(settings, self.device) if self.precision.scaler else None,
                schedule=Schedule(setup.for_target("scheduler", scheduler, name, names), one, schedule_by),
                flags=Flags(self.device, on_nonfinite, self.report),
                max_grad_norm=setup.for_target("max_grad_norm", max_grad_norm, name, names),
                exact=exact,
                loss_is=loss_is,
                everything=self.alone or self.shards is not None,
                half_reduced=gradient_compression is not None and world > 1,
            )
        self.randomness = Randomness(seed, self.device, rank=rank, per_slice=self.cut.slice_size is not None)
        self.buffers = Buffers(self.model, world_size=world)
        self.autocast: Autocast | None = None
        if self.precision.compute is not None and not (self.shards and self.precision.by_part):
            # Autocast would keep a copy of every weight to the end of the forward: all blocks, gathered one by one.
            how: dict[str, Any] = {"dtype": self.precision.compute, "cache_enabled": self.shards is None or exact}
            self.autocast = functools.partial(torch.autocast, self.device.type, **how)
        if saved_activations != "keep":
            saved = Saved(saved_activations, self.model, self.device)
            self.autocast = saved if self.autocast is None else saved.around(self.autocast)
        # What this rank asks of all ranks: it travels with the next update's losses.
        self.asks_to_stop = self.asks_to_save = 0.0
        self.number = 0
        # Called where a phase of the step ends. Nobody looks at the clock at first: bool does nothing, at once.
        self.lap: Callable[[str], object] = bool
        self.began = time.perf_counter()  # of the update in work
        self._open: Open | None = None

    def _place(
        self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Any], compile: bool, sharded: bool
    ) -> None:
        """Device and dtypes of the models; parameter objects stay the same, so the optimizers keep holding them."""
        if not sharded:  # else block by block, when they are
            self.model.to(self.device)
            for state in (state for optimizer in optimizers.values() for state in optimizer.state.values()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        state[key] = value.to(self.device)
        if self.precision.param is not None:
            kept = cast_parameters(self.model, self.precision.param)
            if kept:
                self.notes.append(f"kept in fp32: {', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''}")
        for model in models.values():
            self.hooks += cast_hooks(model, self.precision)
            if compile and not sharded:
                self.hooks.append(setup.Compiled(model, exact=self.batch.exact))

    def shards_of(self, model: torch.nn.Module | None) -> Shards | None:
        """Where `model` (None: the engine's own) has its parameters, if they are sharded."""
        return self.ema.shards if self.ema is not None and model is self.ema.module else self.shards

    def named(self) -> dict[str, torch.nn.Parameter]:
        """What the optimizers hold, by the parameter's name in the model."""
        return self.shards.named() if self.shards is not None else dict(self.model.named_parameters())

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, where there is one."""
        return self._target(None).optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule, where there is one optimizer; else {name: schedule}."""
        if len(self.targets) > 1:
            return {name: target.schedule.scheduler for name, target in self.targets.items()}
        return self._target(None).schedule.scheduler

    def step(self, batch: Any, loss_fn: LossFn | None = None, *, optimizer: str | None = None) -> Update:
        """One update from this rank's rows. Collective; reads nothing from the device in the proven state.

        Args:
            loss_fn: Instead of the engine's own.
            optimizer: Which one, where there are several.
        """
        self._abandon()
        parts, rows = cut_batch(self, batch)
        done = backward(self, self._target(optimizer), self._loss(loss_fn), parts, rows)
        return apply(self, done, fold=self.before_step is None)

    def backward(self, batch: Any, loss_fn: LossFn | None = None, *, optimizer: str | None = None) -> None:
        """Forward, backward and reduction: afterwards `.grad` is final, unscaled and not yet clipped. Collective.

        Called again before `apply` it starts over from the same randomness (sharpness-aware minimisation). Under fsdp
        and hsdp `.grad` is a DTensor: `.item()` of one is this rank's part (`.full_tensor()` is whole, and collective).
        """
        self._abandon()
        parts, rows = cut_batch(self, batch)
        self._open = backward(self, self._target(optimizer), self._loss(loss_fn), parts, rows, final=True)

    def _abandon(self) -> None:
        """A backward without its apply never was: buffers are as before it."""
        if self._open is not None:
            self._open = None
            self.buffers.rewind()

    def apply(self) -> Update:
        """Finite vote, clip, optimizer, schedule: the second half of an update. Called on all ranks."""
        if self._open is None:
            raise UsageError("apply() without a backward(batch) before it.", fix=["engine.backward(batch)"])
        done, self._open = self._open, None
        return apply(self, done, fold=False)

    def step_parts(
        self,
        parts: Sequence[Part],
        rows: int,
        *,
        all_delivered: bool = True,
        loss_fn: LossFn | None = None,
        optimizer: str | None = None,
    ) -> Update:
        """As `step`, for rows that `self.cut` has cut: (number, rows, batch) each. `rows`: of the whole global batch.

        all_delivered: False where rows may be missing (bad rows skipped), on any rank: then they are counted.
        """
        done = backward(self, self._target(optimizer), self._loss(loss_fn), parts, rows, all_delivered, as_cut=True)
        return apply(self, done, fold=self.before_step is None)

    def digest(self) -> str:
        """sha256 over parameters, buffers and optimizer state in name order. Collective; reads everything."""
        self.settle()
        with self.group.call("digest"):
            self.meet()
            return digest_of(self.model, [target.optimizer for target in self.targets.values()], self.shards)

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything the next update depends on, apart from the data. Waits for the device.

        Under fsdp it is collective: tensors are whole on rank 0's host, and shapes without values on the other ranks.

        Args:
            copy: Tensors are clones. False: the engine's own, to be written or copied before the next update.
        """
        if self._open is not None:
            fix = ["engine.apply() first", "or take the state before engine.backward(batch)"]
            raise UsageError("state_dict() between backward() and apply(): half an update is no state.", fix=fix)
        self.settle()
        self.meet()
        copied: Callable[[Any], Any] = clone if copy else lambda state: state
        model: dict[str, Any] = self.shards.state_dict() if self.shards is not None else self.model.state_dict()
        return {
            "model": copied(plain_state(model)),
            "ema": copied(self.ema.state_dict()) if self.ema is not None else None,
            "targets": {name: copied(target.state_dict(self.shards)) for name, target in self.targets.items()},
            "groups": self.groups(),
            "buffers": self.buffers.left_out(plain_state(self.model.state_dict())),
            "number": self.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. On all ranks with the same state. Waits for the device; no communication.

        Raises:
            UsageError: the state belongs to another precision, to other optimizers, or has parts this engine lacks.
        """
        for same, cause in (
            (set(state["targets"]) == set(self.targets), f"the state is of the optimizers {list(state['targets'])}"),
            (
                state["groups"] == self.groups(),
                "the state's optimizer groups hold other parameters, or in another order",
            ),
            ((state["ema"] is None) == (self.ema is None), "only one of state and engine has an average (ema)"),
        ):
            if not same:
                raise UsageError(f"{cause}.", fix=["construct the engine as it was when the state was saved"])
        self.settle()  # or the schedule step of an update that is taken back would come after this
        if self.shards is not None:
            self.shards.load_state_dict(state["model"])
        else:
            load_plain(self.model, state["model"])
        self.buffers.put_back(state["buffers"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        for name, target in self.targets.items():
            target.load_state_dict(state["targets"][name], self.shards)
            target.spread.loaded()
        self.number, self._open = state["number"], None

    def groups(self) -> dict[str, list[list[str]]]:
        """Names of the parameters in each group of each optimizer: optimizer states are kept by position."""
        names = {id(parameter): plain_name(name) for name, parameter in self.named().items()}
        return {
            name: [[names[id(parameter)] for parameter in group["params"]] for group in target.optimizer.param_groups]
            for name, target in self.targets.items()
        }

    def settle(self) -> None:
        """Read the last updates' flags and make their schedule steps. Waits for the device; no communication."""
        for target in self.targets.values():
            target.settle()

    def meet(self) -> None:
        """With sync_every: the ranks average what they hold, now and not later. Collective; else nothing happens."""
        for target in self.targets.values():
            target.spread.meet()

    def recompute_more(self) -> bool:
        """activation_checkpointing="auto", and the smallest piece does not fit: every block is computed again from now
        on. Called on all ranks alike; no communication. False where there is nothing (more) to do."""
        if self.recomputes != LATER:
            return False
        self.recomputes = ""
        with contextlib.suppress(UsageError):  # no block that is repeated: the error to come says what helps
            handles, self.recomputes = recompute(self.model, "full")
            self.hooks += handles
        return bool(self.recomputes)

    def agreed(self) -> tuple[bool, bool]:
        """(stop, save): what any rank asked for, once it is known on every rank; the same answer on every rank at the
        same update. Resets what it returns. No communication, no host sync: requests land with the flags."""
        if self.device.type == "cpu":
            self.settle()  # nothing to wait for: the answer is one update younger
        if not self.distributed:
            answer = bool(self.asks_to_stop), bool(self.asks_to_save)
            self.asks_to_stop = self.asks_to_save = 0.0
            return answer
        stop = save = False
        for target in self.targets.values():
            stop, save = stop or target.flags.requests[0] > 0, save or target.flags.requests[1] > 0
            target.flags.requests = [0.0, 0.0]
        if stop:
            self.asks_to_stop = 0.0
        return stop, save

    @property
    def watches_labels(self) -> bool:
        """Whether some loss is, or may turn out to be, a plain scalar that must not meet labels of -100."""
        return any(target.scalar is not False and target.loss_is is None for target in self.targets.values())

    @property
    def rows_weigh(self) -> bool:
        """Whether some loss is known to be a plain scalar, which counts by its rows."""
        return any(target.scalar for target in self.targets.values())

    def note_ignored_labels(self) -> None:
        """A batch's `labels` hold -100: refused for targets whose loss is a plain scalar."""
        for target in self.targets.values():
            target.note_ignored_labels()

    def close(self) -> None:
        """Undo what the constructor set outside the engine: hooks and pinned settings."""
        try:
            self.settle()
        finally:
            for target in self.targets.values():
                target.close()
            for hook in self.hooks:
                hook.remove()
            self.pins.close()

    def _target(self, name: str | None) -> Target:
        if name is None:
            first, *others = self.targets
            if others:
                every = ", ".join(self.targets)
                raise UsageError(f"there are {len(self.targets)} optimizers: {every}.", fix=[f'optimizer="{first}"'])
            return self.targets[first]
        return self.targets[one_of("optimizer", name, self.targets)]

    def retarget(self, target: Target) -> None:
        """Take the optimizer's parameters as they are now (unfrozen layers, a new group). The same on every rank."""
        target.spread.close()
        target.take(check_parameters(self.named(), target.optimizer))
        target.spread.meet()
        target.spread = make_spread(self, target.parameters, target.optimizer)

    def _loss(self, loss_fn: LossFn | None) -> LossFn:
        loss_fn = loss_fn if loss_fn is not None else self.loss_fn
        if loss_fn is None:
            raise UsageError("there is no loss_fn.", fix=["step(batch, loss_fn)", "or give one to the constructor"])
        return loss_fn

    def name_unused(self, target: Target, gradients: Sequence[torch.Tensor]) -> None:
        """Report the parameters that no gradient reached in the first update."""
        if len(gradients) < len(target.parameters):
            names = {id(p): name for name, p in self.named().items()}
            unused = [names[id(p)] for p in target.parameters if p.grad is None]
            self.report("unused_parameters", self.number, {"names": unused})

    def words(self) -> dict[str, Any]:
        """The precision in words, for the contract line."""
        return self.precision.words(self.master)

    def fingerprint(self) -> dict[str, Any]:
        """What exact mode's bits depend on besides the hardware; a resume checks it."""
        return {**self.pins.fingerprint(), "precision": self.precision.name, "slice_size": self.cut.slice_size}


def _warn(kind: str, update: int, fields: dict[str, Any]) -> None:
    details = ", ".join(f"{key}: {value}" for key, value in fields.items())
    warnings.warn(f"evener: update {update}: {kind.replace('_', ' ')} ({details})", stacklevel=2)
