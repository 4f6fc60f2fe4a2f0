"""One update, whatever the cut.

The denominator. Piece m (a microbatch or slice, on any rank) gives total_m with count_m things; the update optimises

    L = sum_m total_m / N,    N = sum_m count_m over all pieces of all ranks,

so grad L = sum_m d(total_m) / N: never a mean of means, never divided by a configured number of microbatches. A scalar
loss is the mean over its rows, so d(total_m) = rows_m * d(loss_m). When every row count is known before the backward
the weight rows_m / N goes into it. Otherwise the backward starts from 1 / P, P a power of two near N (so that fp16
does not overflow and the correction adds no rounding), and the factor P / N follows the reduction, folded with the
unscale and the clip into one multiplication.

The order is fixed: forward and backward of all pieces -> reduce -> unscale -> finite vote -> clip by the true global
norm -> optimizer -> schedule. The vote is read from the norm of what was reduced, so it is the same on every rank. The
schedule step of update k runs just before the optimizer of update k+1, when its flag has reached the host.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener import batch as batches
from evener.dist import Group, comm
from evener.dist import device as devices
from evener.engine.buffers import Buffers
from evener.engine.digest import digest_of
from evener.engine.ema import Ema
from evener.engine.flags import Flags
from evener.engine.optim import check_parameters
from evener.engine.pins import Pins
from evener.engine.precision import Precision, cast_parameters, decide
from evener.engine.randomness import Randomness
from evener.engine.scaler import LossScale
from evener.engine.schedule import Schedule
from evener.engine.setup import (
    by_name,
    check_model,
    choose_strategy,
    decide_batch,
    for_target,
    freeze_batchnorm,
    has_batchnorm,
)
from evener.engine.spread import existing
from evener.engine.spread.choose import make_spread
from evener.engine.tally import Tally, as_loss, refuse_names
from evener.engine.target import LossFn, Target
from evener.engine.update import Update
from evener.errors import BatchSizeError, UsageError, one_of, show_errors_without_traceback

Part = tuple[int, int, Any]  # slice or microbatch number, rows, batch
Report = Callable[[str, int, dict[str, Any]], None]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
Models = torch.nn.Module | Mapping[str, torch.nn.Module]
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]


@dataclass(slots=True)
class _Open:
    """An update between its backward and its apply."""

    target: Target
    tally: Tally
    sums: torch.Tensor | None
    gradients: list[torch.Tensor]
    rows: int | None
    pieces: int
    unscaled: bool = False


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
            before_step, on_nonfinite, scaler, batchnorm, ema, compile, split, loss_is: as for `Run`. With several
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
    ) -> None:
        show_errors_without_traceback()
        models, optimizers = by_name("model", model), by_name("optimizer", optimizer)
        for one in models.values():
            check_model(one)
        self.given = model if isinstance(model, torch.nn.Module) else models  # what loss_fn sees
        # One module that holds all of them: for names, buffers, state and digest.
        self.model = model if isinstance(model, torch.nn.Module) else torch.nn.ModuleDict(models)
        self.loss_fn = loss_fn
        self.device = devices.device(device)
        self.precision: Precision = decide(precision, self.device)
        self.report: Report = report or _warn
        parameters = {name: check_parameters(self.model, one) for name, one in optimizers.items()}
        if loss_is is not None:
            one_of("loss_is", loss_is, ["row mean"])
        one_of("batchnorm", batchnorm, ["slice", "frozen"])
        if batchnorm == "frozen":
            freeze_batchnorm(self.model)
        self.group = group if group is not None else Group(self.device, timeout=timeout)
        self.owns_group = group is None
        rank, world = self.group.rank, self.group.world_size
        self.distributed = world > 1
        self.strategy = choose_strategy(strategy, world)
        self.batch = decide_batch(
            global_batch_size=global_batch_size,
            microbatch_size=microbatch_size,
            slice_size=slice_size,
            exact=exact,
            coupled=coupled,
            batchnorm=has_batchnorm(self.model),
            rank=rank,
            world_size=world,
        )
        self.cut = self.batch.cut
        self.split, self.before_step = split, before_step
        self.notes: list[str] = [self.precision.because] if self.precision.because else []

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.pins = Pins(exact=exact, tf32=self.precision.name == "tf32", device=self.device)
        self.master = next(iter(parameters.values()))[0].dtype
        self._place(models, optimizers, compile)
        if world > 1:
            with self.group.call("the constructor of Run or Engine"):
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    torch.distributed.broadcast(tensor.detach(), 0)
        if scaler is not None and not self.precision.scaler:
            raise UsageError(
                f"scaler= was given, but precision {self.precision.name} needs no loss scale.",
                fix=['precision="fp16"', "or leave scaler out"],
            )
        self.targets: dict[str, Target] = {}
        names = list(optimizers)
        for name, one in optimizers.items():
            norm = for_target("max_grad_norm", max_grad_norm, name, names)
            if norm is not None and not norm > 0:
                raise UsageError(f"max_grad_norm={norm!r} must be larger than 0.", fix=["max_grad_norm=None: no clip"])
            spread = make_spread(
                self.strategy,
                parameters[name],
                batch=self.batch,
                rank=rank,
                world_size=world,
                reduce_dtype=self.precision.reduce,
                device=self.device,
                device_ids=device_ids,
                output_device=output_device,
                scatter=scatter,
                notes=self.notes,
            )
            settings = for_target("scaler", scaler, name, names)
            self.targets[name] = Target(
                name,
                one,
                parameters[name],
                spread,
                loss_scale=LossScale(settings, self.device) if self.precision.scaler else None,
                schedule=Schedule(for_target("scheduler", scheduler, name, names), one, schedule_by),
                flags=Flags(self.device, on_nonfinite, self.report),
                max_grad_norm=norm,
                exact=exact,
                loss_is=loss_is,
            )
            if len(names) > 1:
                self.targets[name].inputs = parameters[name]
        self.randomness = Randomness(seed, self.device, rank=rank, per_slice=self.cut.slice_size is not None)
        self.buffers = Buffers(self.model, world_size=world, agree=_union)
        self.ema = Ema(self.model, ema) if ema is not None else None
        self.autocast: Autocast | None = None
        if self.precision.compute is not None:
            self.autocast = functools.partial(torch.autocast, self.device.type, dtype=self.precision.compute)
        # What this rank asks of all ranks: it travels with the next update's losses.
        self.asks_to_stop = self.asks_to_save = 0.0
        self.number = 0
        self._open: _Open | None = None
        self._began = time.perf_counter()

    def _place(self, models: Mapping[str, torch.nn.Module], optimizers: Mapping[str, Any], compile: bool) -> None:
        """Device and dtypes of the models; parameter objects stay the same, so the optimizers keep holding them."""
        self.model.to(self.device)
        for optimizer in optimizers.values():
            _move_state(optimizer, self.device)
        if self.precision.param is not None:
            kept = cast_parameters(self.model, self.precision.param)
            if kept:
                self.notes.append(f"kept in fp32: {', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''}")
        for model in models.values():
            if self.precision.param is not None:
                model.register_forward_pre_hook(_cast_input(self.precision.param), with_kwargs=True)
            if self.precision.output is not None:
                model.register_forward_hook(_cast_output(self.precision.output))
            if compile:
                model.compile()

    # ------------------------------------------------------------------------------------------------ public

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
        parts, rows = self._parts(batch)
        self._backward(self._target(optimizer), loss_fn, parts, rows)
        return self._apply(fold=self.before_step is None)

    def backward(self, batch: Any, loss_fn: LossFn | None = None, *, optimizer: str | None = None) -> None:
        """Forward, backward and reduction: afterwards `.grad` is final, unscaled and not yet clipped. Collective.

        Called again before `apply` it starts over from the same randomness (sharpness-aware minimisation).
        """
        parts, rows = self._parts(batch)
        self._backward(self._target(optimizer), loss_fn, parts, rows)
        self._unscale()

    def apply(self) -> Update:
        """Finite vote, clip, optimizer, schedule: the second half of an update. Called on all ranks."""
        if self._open is None:
            raise UsageError("apply() without a backward(batch) before it.", fix=["engine.backward(batch)"])
        return self._apply(fold=False)

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
        self._backward(self._target(optimizer), loss_fn, parts, rows, all_delivered)
        return self._apply(fold=self.before_step is None)

    def digest(self) -> str:
        """sha256 over parameters, buffers and optimizer state in name order. Collective; reads everything."""
        self.settle()
        with self.group.call("digest"):
            return digest_of(self.model, [target.optimizer for target in self.targets.values()])

    def state_dict(self) -> dict[str, Any]:
        """Everything the next update depends on, apart from the data. Tensors are clones. Waits for the device."""
        self.settle()
        return {
            "model": {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()},
            "ema": self.ema.state_dict() if self.ema is not None else None,
            "targets": {name: target.state_dict() for name, target in self.targets.items()},
            "number": self.number,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Called on all ranks with the same state; no communication.

        Raises:
            UsageError: the state belongs to another precision, to other optimizers, or has parts this engine lacks.
        """
        if set(state["targets"]) != set(self.targets):
            raise UsageError(
                f"the state is of the optimizers {sorted(state['targets'])}, this engine has {sorted(self.targets)}.",
                fix=["construct the engine with the same optimizers"],
            )
        if (state["ema"] is None) != (self.ema is None):
            raise UsageError(
                "the state has an average of the weights (ema) and this engine none, or the reverse.",
                fix=["construct the engine with the same ema="],
            )
        self.model.load_state_dict(state["model"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        for name, target in self.targets.items():
            target.load_state_dict(state["targets"][name])
        self.number = state["number"]

    def settle(self) -> None:
        """Read the last updates' flags and make their schedule steps. Waits for the device; no communication."""
        for target in self.targets.values():
            target.settle()

    def agreed(self) -> tuple[bool, bool]:
        """(stop, save): what any rank asked for, once it is known on every rank; the same answer on every rank at the
        same update. Resets what it returns. No communication, no host sync: requests land with the flags.
        """
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

    def note_ignored_labels(self) -> None:
        """A batch's `labels` hold -100: refused for targets whose loss is a plain scalar."""
        for target in self.targets.values():
            target.note_ignored_labels()

    def close(self) -> None:
        """Undo what the constructor set outside the engine: hooks, pinned settings, a process group of its own."""
        try:
            self.settle()
        finally:
            for target in self.targets.values():
                target.spread.close()
            self.pins.close()
            if self.owns_group:
                self.group.close()

    def _target(self, name: str | None) -> Target:
        if name is None:
            if len(self.targets) > 1:
                raise UsageError(
                    f"there are {len(self.targets)} optimizers: {', '.join(self.targets)}.",
                    fix=[f'optimizer="{next(iter(self.targets))}"'],
                )
            return next(iter(self.targets.values()))
        return self.targets[one_of("optimizer", name, self.targets)]

    # ------------------------------------------------------------------------------------------------ the step

    def _parts(self, batch: Any) -> tuple[list[Part], int | None]:
        """This rank's rows, cut. With slices the ranks tell each other their row counts, for the slices' numbers."""
        rows = 0 if batch is None else batches.rows(batch, self.split)
        world = self.group.world_size
        size = self.cut.slice_size
        if size is None and world == 1 and 0 < rows <= (self.cut.microbatch_size or rows):
            return [(0, rows, batches.move(batch, self.device))], rows
        offset, total = 0, rows if world == 1 else None
        if size is not None and world > 1:
            counts: list[int] = comm.all_gather(rows)
            offset, total = sum(counts[: self.group.rank]), sum(counts)
            starts = [sum(counts[:rank]) for rank in range(world)]
            for rank, start in enumerate(starts):  # every rank sees every mistake, so that all stop together
                if counts[rank] and start % size:
                    below = start // size * size
                    raise BatchSizeError(
                        f"rank {rank} starts at row {start} of the global batch, inside a slice of {size} rows.",
                        evidence=[f"rows per rank: {', '.join(map(str, counts))}"],
                        fix=[f"start it at row {below} or {below + size}: whole slices per rank", "or use evener.Run"],
                    )
        if rows == 0:
            return [], total
        batch = batches.move(batch, self.device)
        if size is not None:
            pieces = [(start, min(start + size, rows)) for start in range(0, rows, size)]
            first = offset // size
        else:
            limit = self.cut.microbatch_size or rows
            count = -(-rows // limit)
            if count == 1:
                return [(0, rows, batch)], total
            pieces = [(i * rows // count, (i + 1) * rows // count) for i in range(count)]
            first = 0
        return [
            (first + i, stop - start, batches.part(batch, start, stop, self.split))
            for i, (start, stop) in enumerate(pieces)
        ], total

    def _backward(
        self,
        target: Target,
        loss_fn: LossFn | None,
        parts: Sequence[Part],
        nominal: int | None,
        all_delivered: bool = True,
    ) -> None:
        if loss_fn is None:
            loss_fn = self.loss_fn
            if loss_fn is None:
                raise UsageError("there is no loss_fn.", fix=["step(batch, loss_fn)", "or give one to the constructor"])
        states = self.randomness.save()
        try:
            self._open = self._pieces(target, loss_fn, parts, nominal, all_delivered)
        finally:
            # Also when loss_fn raises: a user's own draws go on as if nothing had been computed.
            self.randomness.restore(states)
        if not target.named_unused:
            self._name_unused(target, self._open.gradients)

    def _pieces(
        self, target: Target, loss_fn: LossFn, parts: Sequence[Part], nominal: int | None, all_delivered: bool
    ) -> _Open:
        spread, buffers, randomness, autocast = target.spread, self.buffers, self.randomness, self.autocast
        tally = Tally()
        waiting: Callable[[], None] | None = None
        sums: torch.Tensor | None = None
        rows = nominal if all_delivered else None
        slots = spread.slots(nominal or 1)
        # In exact mode the division comes last, one factor for every element alike.
        known = None if self.batch.exact else rows
        spread.begin(nominal or 1)
        if buffers.slots:
            buffers.begin()
        last = len(parts) - 1
        for i, (number, count, batch) in enumerate(parts):
            randomness.begin_piece(self.number, number)
            if autocast is None:
                output = spread.forward(loss_fn, self.given, batch, count)
            else:
                with autocast():
                    output = spread.forward(loss_fn, self.given, batch, count)
            loss, scalar, metrics = as_loss(output, count)
            if target.scalar is not scalar:
                target.learn_kind(scalar, batch)
            tally.add(number if slots > 1 else 0, loss, count, metrics)
            if target.names is None:
                target.agree(tally, nominal, sum(part[1] for part in parts))
            elif target.names != (tuple(metrics) if len(metrics) < 2 else tuple(sorted(metrics))):
                refuse_names(target.names, metrics)
            if buffers.slots:
                buffers.after_forward(number, count)
            if i == last and self.distributed:
                sums, waiting = self._send(target, tally, slots)
            spread.before_backward(i == last)
            value = loss.value
            assert isinstance(value, torch.Tensor)
            if value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()  # weights beyond 65504, or with more than 8 bits, must not be rounded
            torch.autograd.backward(value, target.weight(loss, count, known, value), inputs=target.inputs)
            spread.after_backward(number)
            if buffers.slots:
                buffers.after_backward()
        if not parts and self.distributed:
            if target.names is None:
                target.agree(tally, nominal, 0)
            sums, waiting = self._send(target, tally, slots)
        gradients = spread.finish()
        if waiting is not None:
            waiting()
        if not self.distributed and slots > 1 and parts:
            sums = tally.pack(target.names or (), slots, self.device)
        if buffers.slots:
            total = rows if rows is not None else round(float(sums[:, 2].sum())) if sums is not None else tally.rows
            buffers.finish(spread, total, nominal or total)
        return _Open(target, tally, sums, gradients, rows, len(parts))

    def _send(self, target: Target, tally: Tally, slots: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Losses, counts and metrics are known after the last forward: their sum travels during the backward."""
        assert target.names is not None
        sums = tally.pack(target.names, slots, self.device, (self.asks_to_stop, self.asks_to_save))
        self.asks_to_save = 0.0  # once said, it is on its way to all
        return sums, target.spread.sum_(sums, overlap=True)

    def _unscale(self) -> None:
        """Make `.grad` final: multiply by what is still owed, so that hooks and users see the gradient itself."""
        done = self._open
        assert done is not None
        factor = done.target.factor(done.tally, done.sums, done.rows)
        if factor is not None and done.gradients:
            torch._foreach_mul_(done.gradients, factor)
        done.unscaled = True

    def _apply(self, *, fold: bool) -> Update:
        done = self._open
        assert done is not None
        target, tally, sums, rows, gradients = done.target, done.tally, done.sums, done.rows, done.gradients
        factor = None
        if fold:
            factor = target.factor(tally, sums, rows)
        else:
            if not done.unscaled:
                self._unscale()
            if self.before_step is not None:
                self.before_step(self.given)
            gradients = existing(target.parameters)  # surgery may have replaced them
        self._open = None

        norm = target.spread.norm(gradients)
        if factor is not None:
            norm = norm * factor
        # The vote: what is not finite in any reduced gradient is not finite in their norm, on every rank alike.
        found = torch.zeros((), dtype=torch.float32, device=norm.device)
        torch._amp_foreach_non_finite_check_and_unscale_([norm], found, target.constant(1.0, torch.float32))
        if target.max_grad_norm is not None:
            clip = torch.clamp(target.max_grad_norm / (norm + 1e-6), max=1.0)
            factor = clip if factor is None else factor * clip
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)
        if not gradients:
            found.fill_(1.0)

        target.settle()  # the previous update's flag has landed: its schedule step comes before this optimizer step
        lr = target.optimizer.param_groups[0]["lr"]
        scale = None
        if target.loss_scale is not None:
            scale = target.loss_scale.scale.clone()
            target.loss_scale.update(target.scaler_vote(found, tally, sums))
        target.optimize(found)
        if self.buffers.slots:
            self.buffers.undo_if(found)
        if self.ema is not None:
            self.ema.update(found)
        for parameter in target.parameters:
            parameter.grad = None  # freed during the next forward
        now = time.perf_counter()
        update = Update(
            self.number,
            tally=tally,
            sums=sums,
            names=target.names or (),
            rows=rows,
            microbatches=done.pieces,
            lr=lr.clone() if isinstance(lr, torch.Tensor) else lr,
            norm=norm,
            found=found,
            scale=scale,
            seconds=now - self._began,
        )
        self._began = now
        target.flags.take(update, found)
        self.number += 1
        return update

    def _name_unused(self, target: Target, gradients: Sequence[torch.Tensor]) -> None:
        target.named_unused = True
        if len(gradients) < len(target.parameters):
            names = {id(p): name for name, p in self.model.named_parameters()}
            unused = [names[id(p)] for p in target.parameters if p.grad is None]
            self.report("unused_parameters", self.number, {"names": unused})

    def words(self) -> dict[str, Any]:
        """The precision in words, for the contract line."""
        return self.precision.words(self.master)

    def fingerprint(self) -> dict[str, Any]:
        """What exact mode's bits depend on besides the hardware; a resume checks it."""
        return {**self.pins.fingerprint(), "precision": self.precision.name, "slice_size": self.cut.slice_size}


def _union(positions: list[int]) -> list[int]:
    return sorted({position for one in comm.all_gather(positions) for position in one})


def _move_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim and value.device != device:
                state[key] = value.to(device)


def _cast_input(dtype: torch.dtype) -> Callable[..., Any]:
    """Inputs of a model whose parameters are `dtype`: float32 tensors follow, anything else stays."""

    def cast(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        def follow(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(dtype) if leaf.dtype == torch.float32 else leaf

        return batches.apply(args, follow), batches.apply(kwargs, follow)

    return cast


def _cast_output(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return batches.apply(output, lambda leaf: leaf.to(dtype) if leaf.is_floating_point() else leaf)

    return cast


def _warn(kind: str, update: int, fields: dict[str, Any]) -> None:
    import warnings

    details = ", ".join(f"{key}: {value}" for key, value in fields.items())
    warnings.warn(f"evener: update {update}: {kind.replace('_', ' ')} ({details})", stacklevel=2)
