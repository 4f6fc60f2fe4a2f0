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
import math
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
from evener.engine.flags import Flags
from evener.engine.mean import Mean
from evener.engine.optim import check_parameters, prepare
from evener.engine.pins import Pins
from evener.engine.precision import Precision, cast_parameters, decide
from evener.engine.randomness import Randomness
from evener.engine.scaler import LossScale
from evener.engine.schedule import Schedule
from evener.engine.setup import check_model, choose_strategy, decide_batch, freeze_batchnorm, has_batchnorm
from evener.engine.spread import existing
from evener.engine.spread.choose import make_spread
from evener.engine.tally import Tally, as_loss, refuse_names
from evener.engine.update import Update
from evener.errors import BatchSizeError, LossError, UsageError, one_of, show_errors_without_traceback

Part = tuple[int, int, Any]  # slice or microbatch number, rows, batch
Report = Callable[[str, int, dict[str, Any]], None]
Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(slots=True)
class _Open:
    """An update between its backward and its apply."""

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
        model: A plain module; moved to `device`, never wrapped.
        optimizer: Over the model's parameters. SGD, Adam, AdamW and Adagrad are switched to their fused kernels where
            the choice was left to torch, because those skip an update on the device.
        loss_fn: `loss_fn(model, batch)` returns a scalar (the mean over its rows), a `Mean`, or (either, {name: Mean}).
        device: None for `evener.device()`.
        precision, strategy, exact, coupled, slice_size, microbatch_size, seed, scheduler, schedule_by, max_grad_norm,
            before_step, on_nonfinite, scaler, batchnorm, compile, split, loss_is: as for `Run`.
        global_batch_size: Only for the default slice size; the batches passed to `step` decide.
        group: A `Group` to use instead of making one.
        report: Called as report(kind, update number, fields) for what a log should know: skipped updates, parameters
            without gradient, a falling loss scale. The default warns.

    Raises:
        ModelError, OptimizerError, PrecisionError, BatchSizeError, DeviceError, UsageError: before anything has run.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[..., Any],
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
        max_grad_norm: float | None = None,
        before_step: Callable[[torch.nn.Module], object] | None = None,
        on_nonfinite: str = "skip",
        scaler: Any = None,
        batchnorm: str = "slice",
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
        self.model = check_model(model)
        self.loss_fn = loss_fn
        self.device = devices.device(device)
        self.precision: Precision = decide(precision, self.device)
        self.parameters = check_parameters(model, optimizer)
        self.optimizer = optimizer
        if loss_is is not None:
            one_of("loss_is", loss_is, ["row mean"])
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise UsageError(
                f"max_grad_norm={max_grad_norm!r} must be larger than 0.", fix=["max_grad_norm=None: no clip"]
            )
        one_of("batchnorm", batchnorm, ["slice", "frozen"])
        if batchnorm == "frozen":
            freeze_batchnorm(model)
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
            batchnorm=has_batchnorm(model),
            rank=rank,
            world_size=world,
        )
        self.cut = self.batch.cut
        self.split, self.loss_is = split, loss_is
        self.max_grad_norm, self.before_step = max_grad_norm, before_step
        self.notes: list[str] = [self.precision.because] if self.precision.because else []

        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.pins = Pins(exact=exact, tf32=self.precision.name == "tf32", device=self.device)
        self.model.to(self.device)
        _move_state(optimizer, self.device)
        self.master = next(p.dtype for p in self.parameters)
        if self.precision.param is not None:
            kept = cast_parameters(model, self.precision.param)
            self.model.register_forward_pre_hook(_cast_input(self.precision.param), with_kwargs=True)
            if kept:
                self.notes.append(f"kept in fp32: {', '.join(kept[:3])}{', ...' if len(kept) > 3 else ''}")
        if self.precision.output is not None:
            self.model.register_forward_hook(_cast_output(self.precision.output))
        if compile:
            self.model.compile()
        self.skips_on_device = prepare(optimizer, exact=exact)
        if world > 1:
            with self.group.call("the constructor of Run or Engine"):
                for tensor in (*model.parameters(), *model.buffers()):
                    torch.distributed.broadcast(tensor.detach(), 0)
        self.spread = make_spread(
            self.strategy,
            self.parameters,
            loss_fn,
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
        self.loss_scale = LossScale(scaler, self.device) if self.precision.scaler else None
        if scaler is not None and self.loss_scale is None:
            raise UsageError(
                f"scaler= was given, but precision {self.precision.name} needs no loss scale.",
                fix=['precision="fp16"', "or leave scaler out"],
            )
        self.schedule = Schedule(scheduler, optimizer, schedule_by)
        self.randomness = Randomness(seed, self.device, rank=rank, per_slice=self.cut.slice_size is not None)
        self.buffers = Buffers(model, world_size=world, agree=self._union)
        self.flags = Flags(self.device, on_nonfinite, report or _warn)
        self.report: Report = report or _warn
        self.autocast: Autocast | None = None
        if self.precision.compute is not None:
            self.autocast = functools.partial(torch.autocast, self.device.type, dtype=self.precision.compute)

        self.number = 0
        self.names: tuple[str, ...] | None = None  # metric names, agreed in the first update
        self.scalar: bool | None = None
        self.provisional = 1.0  # P, a power of two; matters only where the exponent range is small
        self.ignored_labels = False
        self._constants: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._named_unused = False
        self._open: _Open | None = None
        self._began = time.perf_counter()

    # ------------------------------------------------------------------------------------------------ public

    @property
    def scheduler(self) -> Any:
        return self.schedule.scheduler

    def step(self, batch: Any) -> Update:
        """One update from this rank's rows. Collective; reads nothing from the device in the proven state."""
        parts, rows = self._parts(batch)
        self._backward(parts, rows)
        return self._apply(fold=self.before_step is None)

    def backward(self, batch: Any) -> None:
        """Forward, backward and reduction: afterwards `.grad` is final, unscaled and not yet clipped. Collective."""
        parts, rows = self._parts(batch)
        self._backward(parts, rows)
        self._unscale()

    def apply(self) -> Update:
        """Finite vote, clip, optimizer, schedule: the second half of an update. Called on all ranks."""
        if self._open is None:
            raise UsageError("apply() without a backward(batch) before it.", fix=["engine.backward(batch)"])
        return self._apply(fold=False)

    def step_parts(self, parts: Sequence[Part], rows: int, *, all_delivered: bool = True) -> Update:
        """As `step`, for rows that `self.cut` has cut: (number, rows, batch) each. `rows`: of the whole global batch.

        all_delivered: False where rows may be missing (bad rows skipped), on any rank: then they are counted.
        """
        self._backward(parts, rows, all_delivered)
        return self._apply(fold=self.before_step is None)

    def digest(self) -> str:
        """sha256 over parameters, buffers and optimizer state in name order. Collective; reads everything."""
        self.settle()
        with self.group.call("digest"):
            return digest_of(self.model, self.optimizer, self.group)

    def state_dict(self) -> dict[str, Any]:
        """Everything the next update depends on, apart from the data. Tensors are clones. Waits for the device."""
        self.settle()
        return {
            "model": {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()},
            "optimizer": _clone(self.optimizer.state_dict()),
            "schedule": self.schedule.state_dict(),
            "scaler": self.loss_scale.state_dict() if self.loss_scale else None,
            "number": self.number,
            "provisional": self.provisional,
            "flags": self.flags.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Called on all ranks with the same state; no communication.

        Raises:
            UsageError: the state belongs to another precision or has parts that this engine lacks.
        """
        if (state["scaler"] is None) != (self.loss_scale is None):
            raise UsageError(
                "the state has a loss scale and this engine none, or the reverse: another precision.",
                fix=["construct the engine with the precision that the state was saved with"],
            )
        self.model.load_state_dict(state["model"])
        # load_state_dict keeps the tensors it is given: a later step would change the caller's copy.
        self.optimizer.load_state_dict(_clone(state["optimizer"]))
        self.skips_on_device = prepare(self.optimizer, exact=self.batch.exact)
        self.schedule.load_state_dict(state["schedule"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["scaler"])
        self.number, self.provisional = state["number"], state["provisional"]
        self.flags.load_state_dict(state["flags"])

    def settle(self) -> None:
        """Read the last update's flag and make its schedule step. Waits for the device; no communication."""
        skipped = self.flags.land()
        if skipped is not None:
            self.schedule.after_update(skipped)

    def close(self) -> None:
        """Undo what the constructor set outside the engine: hooks, pinned settings, a process group of its own."""
        self.settle()
        close = getattr(self.spread, "close", None)
        if close is not None:
            close()
        self.pins.close()
        if self.owns_group:
            self.group.close()

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

    def _backward(self, parts: Sequence[Part], nominal: int | None, all_delivered: bool = True) -> None:
        spread, buffers, randomness, autocast = self.spread, self.buffers, self.randomness, self.autocast
        tally = Tally()
        waiting: Callable[[], None] | None = None
        sums: torch.Tensor | None = None
        distributed = self.group.world_size > 1
        rows = nominal if all_delivered else None
        slots = spread.slots(nominal or 1)
        # In exact mode the division comes last, one factor for every element alike.
        known = rows if not self.batch.exact else None
        spread.begin(nominal or 1)
        buffers.begin()
        states = randomness.save()
        last = len(parts) - 1
        for i, (number, count, batch) in enumerate(parts):
            randomness.begin_piece(self.number, number)
            if autocast is None:
                output = spread.forward(self.model, batch, count)
            else:
                with autocast():
                    output = spread.forward(self.model, batch, count)
            loss, scalar, metrics = as_loss(output, count)
            if self.scalar is not scalar:
                self._learn_kind(scalar, batch)
            tally.add(number if slots > 1 else 0, loss, count, metrics)
            if self.names is None:
                self._agree(tally, nominal, sum(part[1] for part in parts))
            elif self.names != (tuple(metrics) if len(metrics) < 2 else tuple(sorted(metrics))):
                refuse_names(self.names, metrics)
            if buffers.slots:
                buffers.after_forward(number, count)
            if i == last and distributed:
                sums, waiting = self._send(tally, slots)
            spread.before_backward(i == last)
            value = loss.value
            assert isinstance(value, torch.Tensor)
            if value.dtype in (torch.float16, torch.bfloat16):
                value = value.float()  # weights beyond 65504, or with more than 8 bits, must not be rounded
            torch.autograd.backward(value, self._weight(loss, scalar, count, known, value))
            spread.after_backward(number)
            if buffers.slots:
                buffers.after_backward()
        if not parts and distributed:
            if self.names is None:
                self._agree(tally, nominal, 0)
            sums, waiting = self._send(tally, slots)
        randomness.restore(states)
        gradients = spread.finish()
        if waiting is not None:
            waiting()
        if not distributed and slots > 1 and parts:
            sums = tally.pack(self.names or (), slots, self.device)
        if buffers.slots:
            total = rows if rows is not None else round(float(sums[:, 2].sum())) if sums is not None else tally.rows
            buffers.finish(spread, total, nominal or total)
        if not self._named_unused:
            self._name_unused(gradients)
        self._open = _Open(tally, sums, gradients, rows, len(parts))

    def _send(self, tally: Tally, slots: int) -> tuple[torch.Tensor, Callable[[], None]]:
        """Losses, counts and metrics are known after the last forward: their sum travels during the backward."""
        assert self.names is not None
        sums = tally.pack(self.names, slots, self.device)
        return sums, self.spread.sum_(sums, overlap=True)

    def _weight(self, loss: Mean, scalar: bool, count: int, known: int | None, value: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward of a piece starts from: its weight, times the loss scale."""
        weight: Any
        if scalar:
            weight = count / known if known else count / self.provisional
        elif loss.form == "total":
            weight = 1.0 / self.provisional
        else:
            weight = loss.count / self.provisional
        start = weight.to(value.dtype) if isinstance(weight, torch.Tensor) else self._constant(weight, value.dtype)
        if self.loss_scale is not None:
            start = (start * self.loss_scale.scale).to(value.dtype)
        return start if value.ndim == 0 else start.expand(value.shape)

    def _correction(self, tally: Tally, sums: torch.Tensor | None, rows: int | None) -> Any:
        """What reduced gradients are still to be multiplied with, apart from the loss scale: P / N, or 1."""
        if self.scalar and rows and not self.batch.exact:
            return 1.0
        denominator: Any = tally.denominator() if sums is None else sums[:, 1].sum()
        if self.batch.exact and self.scalar and rows:
            denominator = rows  # the same number without a trip to the device
        if isinstance(denominator, torch.Tensor):
            return self.provisional / denominator
        return self.provisional / denominator if denominator else math.nan

    def _factor(self, correction: Any) -> torch.Tensor | None:
        """correction / loss scale as one tensor; None for exactly 1."""
        if self.loss_scale is not None:
            inverse = self.loss_scale.scale.reciprocal()
            return inverse if isinstance(correction, float) and correction == 1.0 else inverse * correction
        if isinstance(correction, torch.Tensor):
            return correction
        if correction == 1.0:
            return None
        # Rounded once to the gradients' own precision.
        return self._constant(correction, torch.float64 if self.master == torch.float64 else torch.float32)

    def _unscale(self) -> None:
        """Make `.grad` final: multiply by what is still owed, so that hooks and users see the gradient itself."""
        done = self._open
        assert done is not None
        factor = self._factor(self._correction(done.tally, done.sums, done.rows))
        if factor is not None and done.gradients:
            torch._foreach_mul_(done.gradients, factor)
        done.unscaled = True

    def _apply(self, *, fold: bool) -> Update:
        done = self._open
        assert done is not None
        tally, sums, rows, gradients = done.tally, done.sums, done.rows, done.gradients
        factor = None
        if fold:
            factor = self._factor(self._correction(tally, sums, rows))
        else:
            if not done.unscaled:
                self._unscale()
            if self.before_step is not None:
                self.before_step(self.model)
            gradients = existing(self.parameters)  # surgery may have replaced them
        self._open = None

        norm = self.spread.norm(gradients)
        if factor is not None:
            norm = norm * factor
        # The vote: what is not finite in any reduced gradient is not finite in their norm, on every rank alike.
        found = torch.zeros((), dtype=torch.float32, device=norm.device)
        torch._amp_foreach_non_finite_check_and_unscale_([norm], found, self._constant(1.0, torch.float32))
        if self.max_grad_norm is not None:
            clip = torch.clamp(self.max_grad_norm / (norm + 1e-6), max=1.0)
            factor = clip if factor is None else factor * clip
        if factor is not None and gradients:
            torch._foreach_mul_(gradients, factor)
        if not gradients:
            found.fill_(1.0)

        self.settle()  # the previous update's flag has landed: its schedule step comes before this optimizer step
        lr = self.optimizer.param_groups[0]["lr"]
        scale = None
        if self.loss_scale is not None:
            scale = self.loss_scale.scale.clone()
            self.loss_scale.update(self._scaler_vote(found, tally, sums))
        if self.skips_on_device:
            optimizer: Any = self.optimizer
            optimizer.found_inf, optimizer.grad_scale = found, None
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale
        elif not self.flags.read_now(found):
            self.optimizer.step()
        self.buffers.undo_if(found)
        for parameter in self.parameters:
            parameter.grad = None  # freed during the next forward
        now = time.perf_counter()
        update = Update(
            self.number,
            tally=tally,
            sums=sums,
            names=self.names or (),
            rows=rows,
            microbatches=done.pieces,
            lr=lr.clone() if isinstance(lr, torch.Tensor) else lr,
            norm=norm,
            found=found,
            scale=scale,
            seconds=now - self._began,
        )
        self._began = now
        self.flags.take(update, found)
        self.number += 1
        return update

    def _scaler_vote(self, found: torch.Tensor, tally: Tally, sums: torch.Tensor | None) -> torch.Tensor:
        """An update without anything to count is skipped, but says nothing about the loss scale."""
        if self.scalar:
            return found
        counted = tally.denominator() if sums is None else sums[:, 1].sum()
        if isinstance(counted, torch.Tensor):
            return found * (counted != 0)
        return found if counted else torch.zeros_like(found)

    # ------------------------------------------------------------------------------------------------ learned once

    def _constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        key = (value, dtype)
        tensor = self._constants.get(key)
        if tensor is None:
            if len(self._constants) > 256:  # row counts that never repeat
                self._constants.clear()
            tensor = self._constants[key] = torch.full((), value, dtype=dtype, device=self.device)
        return tensor

    def _learn_kind(self, scalar: bool, batch: Any) -> None:
        if self.scalar is not None:
            raise LossError(
                "loss_fn returned a scalar for one batch and a Mean for another: an update has one denominator.",
                fix=["return evener.Mean(total=..., count=...) every time"],
            )
        self.scalar = scalar
        if scalar and self.loss_is is None and (self.ignored_labels or _has_ignored_labels(batch)):
            self.note_ignored_labels()

    def note_ignored_labels(self) -> None:
        """A batch's `labels` hold -100: refused as soon as the loss is known to be a plain scalar.

        Raises:
            LossError: the loss is a scalar and `loss_is` does not say that this is right.
        """
        self.ignored_labels = True
        if not self.scalar or self.loss_is is not None:
            return
        raise LossError(
            "the loss is a scalar (a mean over rows), but the batch's labels hold -100: positions that do not count.",
            evidence=["a mean over the unmasked tokens of each microbatch is not the mean over the global batch"],
            fix=[
                "count = (labels != -100).sum(); return evener.Mean(mean=loss, count=count)",
                'or loss_is="row mean", if the scalar really is a mean over rows',
            ],
        )

    def _agree(self, tally: Tally, rows: int | None, mine_rows: int) -> None:
        """First update, after the first forward: ranks agree on metric names, the kind of loss, and P. Collective."""
        mine: dict[str, Any] | None = None
        if tally.entries:
            per_row = float(tally.denominator()) / tally.rows
            mine = {"names": sorted(tally.metrics[0]), "scalar": self.scalar, "per_row": per_row, "rows": mine_rows}
        every = [one for one in comm.all_gather(mine) if one is not None]
        if not every:
            self.names = ()
            return
        for one in every:
            if one["names"] != every[0]["names"] or one["scalar"] != every[0]["scalar"]:
                raise LossError(
                    "ranks returned different metrics or kinds of loss in the first update.",
                    evidence=[f"{one['names']}, {'scalar' if one['scalar'] else 'Mean'}" for one in every],
                    fix=["return the same metric names, and always a scalar or always a Mean, on every rank"],
                )
        self.names, self.scalar = tuple(every[0]["names"]), every[0]["scalar"]
        if self.loss_scale is not None:
            # From the first piece of the first rank, which is the same piece on every world size.
            expected = every[0]["per_row"] * (rows if rows is not None else sum(one["rows"] for one in every))
            self.provisional = 2.0 ** round(math.log2(expected)) if expected > 0 else 1.0

    def _union(self, positions: list[int]) -> list[int]:
        return sorted({position for one in comm.all_gather(positions) for position in one})

    def _name_unused(self, gradients: Sequence[torch.Tensor]) -> None:
        self._named_unused = True
        if len(gradients) < len(self.parameters):
            names = {id(p): name for name, p in self.model.named_parameters()}
            unused = [names[id(p)] for p in self.parameters if p.grad is None]
            self.report("unused_parameters", self.number, {"names": unused})

    def words(self) -> dict[str, Any]:
        """The precision in words, for the contract line."""
        return self.precision.words(self.master)

    def fingerprint(self) -> dict[str, Any]:
        """What exact mode's bits depend on besides the hardware; a resume checks it."""
        return {**self.pins.fingerprint(), "precision": self.precision.name, "slice_size": self.cut.slice_size}


def _has_ignored_labels(batch: Any) -> bool:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return bool((labels == -100).any())


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


def _clone(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if isinstance(state, dict):
        return {key: _clone(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_clone(value) for value in state]
    return state


def _warn(kind: str, update: int, fields: dict[str, Any]) -> None:
    import warnings

    details = ", ".join(f"{key}: {value}" for key, value in fields.items())
    warnings.warn(f"evener: update {update}: {kind.replace('_', ' ')} ({details})", stacklevel=2)
