"""One optimizer of an engine, with everything that belongs to it: parameters, reduction, loss scale, schedule, flags.

Most engines have one target. Several models trained in turns (a GAN) have one per optimizer; the models, buffers,
randomness and the cut are the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from evener.dist import comm
from evener.engine.flags import Flags
from evener.engine.mean import Mean
from evener.engine.oom import MARK, UNTRIED, Again, first_line, is_oom
from evener.engine.optim import prepare
from evener.engine.scaler import LossScale
from evener.engine.schedule import Schedule
from evener.engine.shards import Shards
from evener.engine.spread import Spread
from evener.engine.tally import Tally
from evener.errors import LossError, MemoryLimitError, UsageError

LossFn = Callable[..., Any]


class Target:
    """State of one optimizer. Methods named `learn_` run in its first update only; `agree` there is collective."""

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        spread: Spread,
        *,
        loss_scale: LossScale | None,
        schedule: Schedule,
        flags: Flags,
        max_grad_norm: float | None,
        exact: bool,
        loss_is: str | None,
        everything: bool,  # a backward may reach what other optimizers hold
        half_reduced: bool,  # gradients travel in half precision
    ) -> None:
        self.name, self.optimizer, self.spread = name, optimizer, spread
        self.everything, self.half_reduced = everything, half_reduced
        self.take(parameters)
        self.loss_scale, self.schedule, self.flags = loss_scale, schedule, flags
        self.max_grad_norm, self.exact, self.loss_is = max_grad_norm, exact, loss_is
        self.kernels = [(group, group.get("fused")) for group in optimizer.param_groups]
        self.skips_by_itself = getattr(optimizer, "_step_supports_amp_scaling", None)
        self.skips_on_device = prepare(optimizer, exact=exact)
        self.device = parameters[0].device
        self.phase = "forward"  # of the update in work
        self.master = parameters[0].dtype
        self.names: tuple[str, ...] | None = None  # of the metrics
        self.scalar: bool | None = None
        self.provisional = 1.0  # P, a power of two; matters only where the exponent range is small
        self.provisional_agreed = False
        self.ignored_labels = False
        self.named_unused = False
        self._constants: dict[tuple[float, torch.dtype], torch.Tensor] = {}

    def take(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.seen = self.training()
        self.trust, self.survived = UNTRIED, 0  # see oom.py

    def training(self) -> list[bool]:
        """Which of the optimizer's parameters train; compared before every update."""
        return [parameter.requires_grad for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def inputs(self) -> Sequence[torch.nn.Parameter] | None:
        """Where other optimizers' parameters take part in the same graph, only these may receive gradients."""
        return None if self.everything else self.parameters

    # ------------------------------------------------------------------------------------------------ factors

    def weight(self, loss: Mean, count: int, known: int | None, value: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward of a piece starts from: its weight, times the loss scale."""
        weight: Any
        if self.scalar:
            weight = count / known if known else count / self.provisional
        elif loss.form == "total":
            weight = 1.0 / self.provisional
        else:
            weight = loss.count / self.provisional
        start = weight.to(value.dtype) if isinstance(weight, torch.Tensor) else self.constant(weight, value.dtype)
        if self.loss_scale is not None:
            start = (start * self.loss_scale.scale).to(value.dtype)
        return start

    def factor(self, tally: Tally, sums: torch.Tensor | None, rows: int | None) -> torch.Tensor | None:
        """What reduced gradients are still to be multiplied with: P / (N * loss scale). None for exactly 1."""
        owed: Any
        if self.scalar and rows:
            # The weights held 1 / N already; in exact mode the division comes last, one factor for all elements.
            owed = self.provisional / rows if self.exact else 1.0
        else:
            denominator: Any = self._counted(tally, sums)
            if isinstance(denominator, torch.Tensor):
                # An integer count would give a float32 quotient.
                wide = denominator.double() if self.master == torch.float64 else denominator
                owed = self.provisional / wide
            else:
                owed = self.provisional / denominator if denominator else math.nan
        if self.loss_scale is not None:
            inverse = self.loss_scale.scale.reciprocal()
            return inverse if isinstance(owed, float) and owed == 1.0 else inverse * owed
        if isinstance(owed, torch.Tensor):
            return owed
        if owed == 1.0:
            return None
        # Rounded once to the gradients' own precision.
        return self.constant(owed, torch.float64 if self.master == torch.float64 else torch.float32)

    def scaler_vote(self, found: torch.Tensor, tally: Tally, sums: torch.Tensor | None) -> torch.Tensor:
        """An update without anything to count is skipped, but says nothing about the loss scale."""
        if self.scalar:
            return found
        counted = self._counted(tally, sums)
        if isinstance(counted, torch.Tensor):
            return found * (counted != 0)
        return found if counted else torch.zeros_like(found)

    def _counted(self, tally: Tally, sums: torch.Tensor | None) -> Any:
        return tally.denominator() if sums is None else sums[:, 1].sum()

    def constant(self, value: float, dtype: torch.dtype) -> torch.Tensor:
        """A 0-dimensional tensor on the device, made once per value."""
        key = (value, dtype)
        tensor = self._constants.get(key)
        if tensor is None:
            if len(self._constants) > 256:  # row counts that never repeat
                self._constants.clear()
            tensor = self._constants[key] = torch.full((), value, dtype=dtype, device=self.device)
        return tensor

    # ------------------------------------------------------------------------------------------------ the update

    def optimize(self, found: torch.Tensor) -> bool:
        """The optimizer's step, unless `found` says to skip: on the device, or by one scalar read (then False)."""
        if self.skips_on_device:
            optimizer: Any = self.optimizer
            optimizer.found_inf, optimizer.grad_scale = found, None
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale
        elif not self.flags.read_now(found):
            self.optimizer.step()
        else:
            return False
        return True

    def close(self) -> None:
        """Leave the model without hooks and the optimizer with the kernels it came with."""
        self.spread.close()
        optimizer: Any = self.optimizer
        for group, fused in self.kernels:
            if "fused" in group:
                group["fused"] = fused
        if "fused" in optimizer.defaults and self.kernels:
            optimizer.defaults["fused"] = self.kernels[0][1]
        if hasattr(optimizer, "_step_supports_amp_scaling"):
            optimizer._step_supports_amp_scaling = bool(self.skips_by_itself)

    def settle(self) -> None:
        """Read the last update's flag and make its schedule step. Waits for the device; no communication."""
        skipped = self.flags.land()
        if skipped is not None:
            try:
                self.schedule.after_update(skipped)
            except RuntimeError as error:
                if not is_oom(error):
                    raise
                evidence = [first_line(error), "it may have been stepped already, so it is not tried again"]
                fix = ["start it again: it goes on from the newest checkpoint, whole", "a smaller microbatch_size"]
                raise MemoryLimitError("Out of memory in the schedule's step.", evidence=evidence, fix=fix) from None

    # ------------------------------------------------------------------------------------------------ learned once

    def learn_kind(self, scalar: bool, batch: Any) -> None:
        if self.scalar is not None:
            what = "loss_fn returned a scalar for one batch and a Mean for another: an update has one denominator."
            raise LossError(what, fix=["return evener.Mean(total=..., count=...) every time"])
        ignored = scalar and self.loss_is is None and (self.ignored_labels or _has_ignored_labels(batch))
        self.scalar = scalar
        if ignored:
            self.note_ignored_labels()

    def note_ignored_labels(self) -> None:
        """A batch's `labels` hold -100: refused as soon as the loss is known to be a plain scalar."""
        self.ignored_labels = True
        if not self.scalar or self.loss_is is not None:
            return
        what = "the loss is a scalar (a mean over rows), but the batch's labels hold -100: positions that do not count."
        evidence = ["a mean over the unmasked tokens of each microbatch is not the mean over the global batch"]
        fix = [
            "count = (labels != -100).sum(); return evener.Mean(mean=loss, count=count)",
            'or loss_is="row mean", if the scalar really is a mean over rows',
        ]
        raise LossError(what, evidence=evidence, fix=fix)

    def agree(self, tally: Tally, rows: int | None, mine_rows: int) -> None:
        """First update, after the first forward: ranks agree on metric names, the kind of loss, and P. Collective."""
        mine: dict[str, Any] | None = None
        if tally.entries:
            per_row = float(tally.denominator()) / tally.rows
            mine = {"names": sorted(tally.metrics[0]), "scalar": self.scalar, "per_row": per_row, "rows": mine_rows}
        every = [one for one in comm.all_gather(mine) if one is not None]
        if MARK in every:
            raise Again
        if not every:
            self.names = ()
            return
        for one in every:
            if one["names"] != every[0]["names"] or one["scalar"] != every[0]["scalar"]:
                what = "ranks returned different metrics or kinds of loss in the first update."
                evidence = [f"{one['names']}, {'scalar' if one['scalar'] else 'Mean'}" for one in every]
                fix = ["return the same metric names, and always a scalar or always a Mean, on every rank"]
                raise LossError(what, evidence=evidence, fix=fix)
        self.names, self.scalar = tuple(every[0]["names"]), every[0]["scalar"]
        if (self.loss_scale is not None or self.half_reduced) and not self.provisional_agreed:
            self.provisional_agreed = True
            # From the first piece of the first rank, which is the same piece on every world size.
            expected = every[0]["per_row"] * (rows if rows is not None else sum(one["rows"] for one in every))
            self.provisional = 2.0 ** round(math.log2(expected)) if expected > 0 else 1.0

    # ------------------------------------------------------------------------------------------------ state

    def state_dict(self, shards: Shards | None = None) -> dict[str, Any]:
        """Tensors are the optimizer's own, which the next update changes."""
        return {
            "optimizer": self.optimizer.state_dict() if shards is None else self._whole_state(shards),
            "schedule": self.schedule.state_dict(),
            "scaler": self.loss_scale.state_dict() if self.loss_scale else None,
            "provisional": self.provisional if self.provisional_agreed else None,
            "flags": self.flags.state_dict(),
        }

    def _whole_state(self, shards: Shards) -> dict[str, Any]:
        """The optimizer's state_dict with whole tensors (on rank 0); by position, as torch's."""
        state = self.optimizer.state_dict()
        held = [p for group in self.optimizer.param_groups for p in group["params"]]
        for i, of in state["state"].items():
            one = shards.by_local[id(held[i])]
            state["state"][i] = {key: shards.kept(one, value) for key, value in of.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any], shards: Shards | None = None) -> None:
        if (state["scaler"] is None) != (self.loss_scale is None):
            what = "the state has a loss scale and this engine none, or the reverse: another precision."
            raise UsageError(what, fix=["construct the engine with the precision that the state was saved with"])
        # load_state_dict keeps the tensors it is given: a later step would change the caller's copy.
        optimizer = dict(state["optimizer"])
        if shards is not None:
            held = [p for group in self.optimizer.param_groups for p in group["params"]]
            optimizer["state"] = {i: shards.cut_state(held[i], of) for i, of in optimizer["state"].items()}
        self.optimizer.load_state_dict(clone(optimizer))
        self.skips_on_device = prepare(self.optimizer, exact=self.exact)
        self.schedule.load_state_dict(state["schedule"])
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state["scaler"])
        if state["provisional"] is not None:
            # Another batch would suggest another power of two, and half precision would round differently.
            self.provisional, self.provisional_agreed = state["provisional"], True
        self.flags.load_state_dict(state["flags"])


def clone(state: Any) -> Any:
    """A nested state with clones of its tensors."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, state)


def _has_ignored_labels(batch: Any) -> bool:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return False
    return bool((labels == -100).any())
