"""The flag of each update (did it count?), read when it has landed, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from evener.engine.update import Update
from evener.errors import NonFiniteError

_IN_A_ROW = 10  # "stop" without a number
_MANY = 20  # skipped updates after which it is said: a loss scale that is looked for costs a dozen
_FALLING = 12  # halvings in a row after which a loss scale is reported


class Flags:
    """Owns the not yet read flag of the newest update, the counts of skipped ones, and `on_nonfinite`.

    `report(kind, update, fields)` is told of skipped updates. Every rank reads the same flags.
    """

    def __init__(
        self, device: torch.device, on_nonfinite: str, report: Callable[[str, int, dict[str, Any]], None]
    ) -> None:
        number = on_nonfinite.partition(":")[2]
        self.stop_after = None if on_nonfinite == "skip" else int(number or _IN_A_ROW)
        self.report = report
        self.skipped = 0  # updates skipped because something was not finite
        self.in_a_row = 0
        self.halvings = 0
        self.pending: tuple[Update, Any, Any] | None = None
        self.requests = [0.0, 0.0]  # of any rank, to stop and to save, as far as they have landed
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.host = torch.zeros(3, pin_memory=True)
            self.event = torch.cuda.Event()

    def take(self, update: Update, found: torch.Tensor) -> None:
        """Start the flag's way to the host. Does not wait."""
        requests = None if update.sums is None else update.sums[:, -2:]
        if self.cuda:
            self.host[0].copy_(found, non_blocking=True)
            if requests is not None:
                self.host[1:].copy_(requests.sum(0), non_blocking=True)
            self.event.record()
            host = self.host.numpy()
            self.pending = (update, host[:1], None if requests is None else host[None, 1:])
        else:
            # On the CPU the array is the flag itself: reading it is no operation at all. MPS has to copy.
            flag = found.numpy() if found.device.type == "cpu" else found
            self.pending = (update, flag, None if requests is None else requests.numpy())

    def read_now(self, found: torch.Tensor) -> bool:
        """For optimizers that cannot skip on the device: one scalar read per update."""
        return bool(found.numpy()) if found.device.type == "cpu" else bool(found)

    def land(self) -> bool | None:
        """Whether the newest update was skipped; None when that was read before."""
        if self.pending is None:
            return None
        update, flag, requests = self.pending
        self.pending = None
        if self.cuda:
            self.event.synchronize()
        if requests is not None and requests.any():
            self.requests = [now + float(new) for now, new in zip(self.requests, requests.sum(0))]
        if not flag:
            self.in_a_row = self.halvings = 0
            return False
        self._explain(update)
        return True

    def _explain(self, update: Update) -> None:
        if update.count == 0:
            self.report("zero_count", update.number, {})
            return
        self.skipped += 1
        scale = update.scale
        scaled = update._scale is not None
        self.report("skip", update.number, {"grad_norm": update.grad_norm, "loss": update.loss, "scale": scale})
        if self.skipped == _MANY:
            text = (
                f"{_MANY} updates were skipped so far, the last is {update.number}: the schedule runs on without them"
            )
            text += ". Lower the learning rate, or clip with max_grad_norm="
            self.report("warning", update.number, {"text": text})
        if scaled:
            self.halvings += 1
            if self.halvings == _FALLING or scale < 1.0:
                self.report("scale_falling", update.number, {"scale": scale, "skipped_in_a_row": self.halvings})
        # While fp16 looks for its scale, overflowing gradients with a finite loss are normal.
        if not scaled or scale <= 1.0 or not math.isfinite(update.loss):
            self.in_a_row += 1
        if self.stop_after is not None and self.in_a_row >= self.stop_after:
            what = f"{self.in_a_row} updates in a row had gradients that are not finite, the last is {update.number}."
            evidence = [f"loss {update.loss:g}, grad norm {update.grad_norm:g}, loss scale {scale:g}"]
            fix = [
                "lower the learning rate, or clip with max_grad_norm=",
                "look at the rows of the first skipped update (kind skip in events.jsonl)",
            ]
            raise NonFiniteError(what, evidence=evidence, fix=fix)

    def state_dict(self) -> dict[str, int]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row, "halvings": self.halvings}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.skipped, self.in_a_row, self.halvings = state["skipped"], state["in_a_row"], state["halvings"]
