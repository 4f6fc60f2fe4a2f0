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

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from evener.engine.join import Part
from evener.engine.oom import PROVEN, STEPPED, UNTRIED, Again, Held, first_line, free, is_oom
from evener.engine.precision import refuse_autocast
from evener.engine.shards import WholeNumbers, refuse_mixed
from evener.engine.tally import Tally, as_loss, refuse_names
from evener.engine.target import LossFn, Target
from evener.engine.update import Update
from evener.errors import LossError

if TYPE_CHECKING:
    from evener.engine.engine import Engine


@dataclass(slots=True)
class Open:
    """An update between its backward and its apply."""

    target: Target
    tally: Tally
    sums: torch.Tensor | None
    gradients: list[torch.Tensor]
    rows: int | None
    pieces: int
    unscaled: bool = False


def backward(
    engine: Engine,
    target: Target,
    loss_fn: LossFn,
    parts: Sequence[Part],
    nominal: int | None,
    all_delivered: bool = True,
    as_cut: bool = False,
    final: bool = False,
) -> Open:
    """Forward and backward of all pieces, and the reduction. Collective.

    Args:
        parts: This rank's pieces.
        nominal: Rows of the global batch as the order gives them; None where only the ranks together know.
        all_delivered: False where rows may be missing, on any rank: then they are counted.
        as_cut: The pieces of all ranks are those of `engine.cut`, so that each rank knows how many the others have.
        final: `.grad` is to be final: unscaled too.
    """
    if torch.is_autocast_enabled(engine.device.type):
        refuse_autocast(engine.device)
    if engine.pins.exact:
        engine.pins.hold()
    if engine.shards is not None:
        engine.shards.follow(target.optimizer)
    if target.training() != target.seen:
        engine.retarget(target)
    states = engine.randomness.save()
    ladder = engine.ladder
    try:
        if engine.join is not None:
            parts = engine.join.fill(parts, nominal if as_cut and all_delivered else None)
            engine.join.inside = True
        while True:
            pieces = ladder.cut(engine, target, parts) if ladder.level else parts
            try:
                done = _pieces(engine, target, loss_fn, pieces, nominal, all_delivered)
                if final:
                    unscale(done)
                break
            except RuntimeError as error:
                votes = error.votes if isinstance(error, Again) else None
                words = "" if isinstance(error, Again) else first_line(error)
                if words and not is_oom(error):
                    if engine.shards is not None:
                        refuse_mixed(error)
                    raise
            # Here and not in the handler, whose traceback keeps the tensors of what failed.
            if engine.shards is None:
                target.spread.begin(nominal or 1)
            engine.buffers.restore()
            free(engine.device)
            ladder.learn(engine, target, pieces, words, votes)
        ladder.tries = 0
    except BaseException:
        engine.buffers.restore()  # loss_fn raised: its forward counts for nothing
        if engine.shards is not None:
            engine.shards.reset()
        raise
    finally:
        if engine.join is not None:
            engine.join.inside = engine.join.idle = False
        if engine.shards is not None and not engine.alone:
            engine.shards.release()
        # Also when loss_fn raises: a user's own draws go on as if nothing had been computed.
        engine.randomness.restore(states)
    if not target.named_unused:
        target.named_unused = True
        engine.name_unused(target, done.gradients)
    return done


def _pieces(
    engine: Engine, target: Target, loss_fn: LossFn, parts: Sequence[Part], nominal: int | None, all_delivered: bool
) -> Open:
    spread, buffers, randomness, autocast = target.spread, engine.buffers, engine.randomness, engine.autocast
    tally, lap = Tally(), engine.lap
    waiting: Callable[[], object] | None = None
    sums: torch.Tensor | None = None
    rows = nominal if all_delivered else None
    slots = spread.slots(nominal or 1)
    # In exact mode the division comes last, one factor for every element alike.
    known = None if engine.batch.exact else rows
    # Nothing travels before all ranks are known to have come through, unless that was proven.
    overlap = engine.distributed and (target.trust == PROVEN or not engine.ladder.votes)
    target.phase = "forward"  # also of a rank without rows
    spread.begin(nominal or 1)
    if buffers.any:
        buffers.begin()
    last = len(parts) - 1
    lap("")
    for i, (number, count, batch) in enumerate(parts):
        idle = number < 0  # joins in with weight 0
        if idle:
            assert engine.join is not None
            engine.join.idle = True
            kept = [parameter.grad for parameter in target.parameters]
            for parameter in target.parameters:
                parameter.grad = None
        target.phase = "forward"
        randomness.begin_piece(engine.number, number)
        if autocast is None:
            output = spread.forward(loss_fn, engine.given, batch, count)
        else:
            with autocast():
                output = spread.forward(loss_fn, engine.given, batch, count)
        loss, scalar, metrics = as_loss(output, count)
        if not idle:
            if target.scalar is not scalar:
                target.learn_kind(scalar, batch)
            tally.add(number if slots > 1 else 0, loss, count, metrics)
        if target.names is None:
            target.agree(tally, nominal, sum(part[1] for part in parts if part[0] >= 0))
        elif target.names != (tuple(metrics) if len(metrics) < 2 else tuple(sorted(metrics))):
            refuse_names(target.names, metrics)
        if buffers.any and not idle:
            buffers.after_forward(number, count)
        target.phase = "backward"
        if i == last and overlap:
            sums, waiting = _send(engine, target, tally, slots)
        lap("forward")
        if engine.pins.exact:
            engine.pins.check()
        spread.before_backward(overlap and i == last and not idle)
        value = loss.value
        assert isinstance(value, torch.Tensor)
        if value.dtype in (torch.float16, torch.bfloat16):
            value = value.float()  # weights beyond 65504, or with more than 8 bits, must not be rounded
        start = torch.zeros_like(value) if idle else target.weight(loss, count, known, value)
        try:
            torch.autograd.backward(value, start, inputs=target.inputs)
        except RuntimeError as error:
            if "backward through the graph a second time" not in str(error):
                raise
            what = "the loss's graph was used before: loss_fn calls backward(), or returns an earlier batch's loss."
            fix = ["remove loss.backward() from loss_fn: evener does it", "compute the loss anew in every call"]
            raise LossError(what, fix=fix) from error
        if idle:  # 0 times what is not finite is not 0
            for parameter, gradient in zip(target.parameters, kept):
                parameter.grad = gradient
        spread.after_backward(number)
        if buffers.any:
            buffers.after_backward()
        lap("backward")
    if engine.distributed and waiting is None:
        if target.names is None:
            target.agree(tally, nominal, 0)
        if not overlap:
            engine.ladder.agree(engine, target)
        target.phase = "reduction"
        sums, waiting = _send(engine, target, tally, slots)
    target.phase = "reduction"
    gradients = spread.finish()
    if waiting is not None:
        waiting()
    if not engine.distributed and slots > 1 and parts:
        sums = tally.pack(target.names or (), slots, engine.device)
    if buffers.any:
        total = rows if rows is not None else round(float(sums[:, 2].sum())) if sums is not None else tally.rows
        buffers.finish(spread, total, nominal or total)
    lap("reduction")
    return Open(target, tally, sums, gradients, rows, len(tally.entries))


def _send(engine: Engine, target: Target, tally: Tally, slots: int) -> tuple[torch.Tensor, Callable[[], object]]:
    """Losses, counts and metrics are known after the last forward: their sum travels during the backward."""
    assert target.names is not None
    sums = tally.pack(target.names, slots, engine.device, (engine.asks_to_stop, engine.asks_to_save))
    engine.asks_to_save = 0.0  # once said, it is on its way to all
    return sums, target.spread.sum_(sums, overlap=True)


def unscale(done: Open) -> None:
    """Make `.grad` final: multiply by what is still owed, so that hooks and users see the gradient itself."""
    factor = done.target.factor(done.tally, done.sums, done.rows)
    if factor is not None and done.gradients:
        torch._foreach_mul_(done.gradients, factor)
    done.unscaled = True


def apply(engine: Engine, done: Open, *, fold: bool) -> Update:
    """Finite vote, clip, optimizer, schedule. Called on all ranks; communicates only where the norm does (fsdp).

    fold: The factor that is owed goes into the clip: one pass over the gradients. Else `.grad` is final already.
    """
    target, tally, sums, rows = done.target, done.tally, done.sums, done.rows
    held, unscaled, words, phase = None, done.unscaled, "", "optimizer"
    if target.trust == UNTRIED:
        held = Held.of(engine, target)
    while True:
        stepping = False
        try:
            gradients = done.gradients
            factor = None
            if fold:
                factor = target.factor(tally, sums, rows)
            else:
                if not done.unscaled:
                    unscale(done)
                if engine.before_step is not None:
                    phase = "before_step"
                    with nullcontext() if engine.shards is None else WholeNumbers():  # type: ignore[no-untyped-call]
                        engine.before_step(engine.given)
                    phase = "optimizer"
                gradients = target.spread.gradients()  # surgery may have replaced them

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
            stepping = True
            stepped = target.optimize(found)
            if engine.buffers.any:
                engine.buffers.undo_if(found)
            if engine.ema is not None:
                engine.ema.update(found, target.parameters)
            for parameter in target.parameters:
                parameter.grad = None  # freed during the next forward
            if engine.shards is not None:
                target.spread.clear()
            now = time.perf_counter()
            update = Update(
                engine.number,
                tally,
                sums,
                target.names or (),
                rows,
                done.pieces,
                lr.clone() if isinstance(lr, torch.Tensor) else lr,
                norm,
                found,
                scale,
                now - engine.began,
            )
            engine.began = now
            engine.lap("optimizer")
            target.flags.take(update, found)
            if stepped and target.trust == UNTRIED:
                target.trust = STEPPED
            engine.number += 1
            return update
        except BaseException as error:
            if not (isinstance(error, RuntimeError) and is_oom(error)):
                if not stepping:  # of a user's hook, say: this update was not made
                    engine.buffers.restore()
                raise
            again, words = held is not None and not words, first_line(error)
        if held is not None:
            held.put_back()
        free(engine.device)
        if not again:
            largest = max((entry[4] for entry in done.tally.entries), default=0)
            whole = engine.ladder.why_whole
            raise engine.ladder.error(engine, phase, words, largest, 0 if whole or held else largest // 2, whole)
        done.unscaled = unscaled
        fields = {"phase": phase, "ranks": [engine.group.rank], "microbatch_size": None, "text": words}
        engine.report("oom", engine.number, fields)
