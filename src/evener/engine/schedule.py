"""Schedules advance once per update (or epoch) that happened, on every world size alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener.errors import UsageError, one_of


class Schedule:
    """Any LRScheduler, or an object with `step_update(n)`; ReduceLROnPlateau is stepped by the user, with a metric."""

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, by: str) -> None:
        one_of("schedule_by", by, ["update", "epoch"])
        self.scheduler, self.by = scheduler, by
        self.done = 0
        self.by_user = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.counts = hasattr(scheduler, "step_update")
        if scheduler is None:
            return
        if not (self.counts or callable(getattr(scheduler, "step", None))):
            raise UsageError(
                f"scheduler= is a {type(scheduler).__name__} without step() or step_update(n).",
                fix=["torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)"],
            )
        theirs = getattr(scheduler, "optimizer", optimizer)
        if theirs is not optimizer:
            raise UsageError(
                f"the schedule {type(scheduler).__name__} drives another optimizer than the one passed.",
                fix=["make the schedule from the same optimizer object"],
            )

    def after_update(self, skipped: bool) -> None:
        """The update's schedule step; a skipped update makes none."""
        if skipped:
            return
        self.done += 1
        if self.scheduler is None or self.by_user or self.by != "update":
            return
        if self.counts:
            self.scheduler.step_update(self.done)
        else:
            self.scheduler.step()

    def after_epoch(self) -> None:
        if self.scheduler is not None and self.by == "epoch" and not self.by_user:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        inner = self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None
        return {"done": self.done, "scheduler": inner}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.done = state["done"]
        if state["scheduler"] is not None:
            self.scheduler.load_state_dict(state["scheduler"])
