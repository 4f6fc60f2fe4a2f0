"""Schedules advance once per update (or epoch) that happened, on every world size alike."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from evener.errors import UsageError, refuse_prepared

_SIMULATED = 20_000  # steps that are worth trying out for one line of text (a third of a second)


class Schedule:
    """Any LRScheduler, an object with `step_update(n)`, or a function (optimizer, total_updates) that makes one.

    ReduceLROnPlateau is stepped by the user, with a metric.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, by: str) -> None:
        self.optimizer, self.by = optimizer, by
        self.done = 0  # updates that happened
        self.epochs = 0  # that are over
        self.at: int | None = None  # where our last step left the schedule
        self.maker: Any = None  # until it has made the schedule
        self.scheduler: Any = None
        self.by_user = self.counts = False
        self._loaded: Any = None
        self.made: dict[str, Any] | None = None  # what a function's schedule was when it was new
        self.function = scheduler if callable(scheduler) and not hasattr(scheduler, "step") else None
        if self.function is not None:
            self.maker = self.function
        else:
            self._take(scheduler)

    def _take(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.by_user = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.counts = hasattr(scheduler, "step_update")
        if scheduler is None:
            return
        refuse_prepared("schedule", scheduler, "prepared.scheduler")
        if not (self.counts or callable(getattr(scheduler, "step", None))):
            what = f"scheduler= is a {type(scheduler).__name__} without step() or step_update(n)."
            raise UsageError(what, fix=["torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=updates)"])
        theirs = getattr(scheduler, "optimizer", self.optimizer)
        if theirs is not self.optimizer:
            what = f"the schedule {type(scheduler).__name__} drives another optimizer than the one passed."
            raise UsageError(what, fix=["make the schedule from the same optimizer object"])

    def build(self, total: int | None, *, same: bool = True) -> None:
        """Make the schedule, once the number of steps it is for is known. A second call does nothing, unless a state
        from before the first was loaded in between.

        same: After a resume it must be the checkpoint's; False where the saved settings count instead."""
        if self.maker is None:
            return
        if total is None:
            what = "scheduler= is a function of (optimizer, total updates), and the length of a stream is not known."
            fix = ["run.updates(updates=50_000) says it", "or pass the schedule itself, made for as many steps"]
            raise UsageError(what, fix=fix)
        maker, self.maker = self.maker, None
        groups = self.optimizer.param_groups
        before = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._take(maker(self.optimizer, total))
        made = {"kind": type(self.scheduler).__name__, **settings(_plain(self._state()) or {})}
        then, self.made = self.made, made
        if self._loaded is not None and self.scheduler is not None:
            if same and then is not None:
                _refuse_another(then, made)
            self.scheduler.load_state_dict(_typed(self._loaded, self.scheduler))
            self._loaded = None
            # Making a schedule sets the learning rate to that of its start; the restored optimizer had the right one.
            for group, values in zip(groups, before):
                group.update(values)

    def after_update(self, skipped: bool) -> None:
        """The update's schedule step; a skipped update makes none."""
        if skipped:
            return
        self.done += 1
        if self.maker is not None:
            what = "scheduler= is a function of (optimizer, total updates), and the total is not known here."
            raise UsageError(what, fix=["use evener.Run, which knows it", "or pass the schedule itself"])
        if self.scheduler is not None:
            self._advance("update", self.done)

    def after_epoch(self) -> None:
        self.epochs += 1
        self._advance("epoch", self.epochs)

    def _advance(self, by: str, done: int) -> None:
        if self.scheduler is None or self.by != by or self.by_user:
            return
        # A `scheduler.step()` left in the loop would advance the schedule twice as fast, without a word.
        at = getattr(self.scheduler, "last_epoch", None)
        if self.at is not None and at != self.at:
            what = f"the schedule {type(self.scheduler).__name__} was stepped by the script as well."
            fix = [f"remove scheduler.step(): evener steps it once per {self.by}"]
            raise UsageError(what, evidence=[f"it stands at {at}; evener left it at {self.at}"], fix=fix)
        self._step(self.scheduler, done)
        self.at = getattr(self.scheduler, "last_epoch", None)

    def _step(self, scheduler: Any, done: int) -> None:
        if not self.counts:
            scheduler.step()
        elif self.by == "update":
            scheduler.step_update(done)
        elif hasattr(scheduler, "step"):
            scheduler.step(done)

    def preview(self, steps: int) -> tuple[float, float, float, int | None]:
        """(first, last, highest) learning rate over the coming `steps` schedule steps, and where the schedule itself
        ends when it says so. Tried out on a copy; nothing changes.
        """
        first = float(self.optimizer.param_groups[0]["lr"])
        done = self.done if self.by == "update" else self.epochs
        ends = _end(self.scheduler)
        ends = None if ends is None else ends - done
        if self.scheduler is None or self.by_user or steps > _SIMULATED:
            return first, first, first, None
        # A stand-in with the same learning rates, in place of the optimizer: its parameters are not copied.
        stand_in = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=first)
        stand_in.param_groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"} | {"params": []}
            for group in self.optimizer.param_groups
        ]
        trial = copy.deepcopy(self.scheduler, {id(self.optimizer): stand_in})
        last = highest = first
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch misses the optimizer steps between
            for step in range(max(0, steps - 1)):
                try:
                    self._step(trial, done + step + 1)
                except ValueError:  # OneCycleLR, beyond its end
                    return first, last, highest, step
                last = float(stand_in.param_groups[0]["lr"])
                highest = max(highest, last)
        return first, last, highest, ends

    def state_dict(self) -> dict[str, Any]:
        inner = self._loaded if self.maker is not None else self._state()  # restored, and not built since
        return {"done": self.done, "epochs": self.epochs, "scheduler": _plain(inner), "made": self.made}

    def _state(self) -> Any:
        return self.scheduler.state_dict() if hasattr(self.scheduler, "state_dict") else None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = None
        self.done, self.epochs, self.made = state["done"], state["epochs"], state.get("made")
        if self.function is not None and self.made is None:  # saved before the function was called
            self.maker, self._loaded = self.function, None
            self._take(None)
        if state["scheduler"] is None:
            return
        if self.maker is not None:
            self._loaded = state["scheduler"]  # until it is built
        else:
            self.scheduler.load_state_dict(_typed(state["scheduler"], self.scheduler))


def _end(scheduler: Any) -> int | None:
    """Steps after which a schedule has arrived, where it says so."""
    if isinstance(scheduler, torch.optim.lr_scheduler.SequentialLR):
        last = _end(scheduler._schedulers[-1])
        return None if last is None else int(scheduler._milestones[-1]) + last
    return getattr(scheduler, "total_steps", None) or getattr(scheduler, "T_max", None)


# What a schedule's state says about how far it is, not about which one it is.
_PROGRESS = {"last_epoch", "_step_count", "_last_lr", "_get_lr_called_within_step", "_is_initial", "base_lrs"}
_PROGRESS |= {"best", "num_bad_epochs", "cooldown_counter", "T_cur", "_initial_step", "last_metric"}


def settings(state: Any) -> Any:
    """What two schedules of one kind must share: their state without their progress, as JSON."""
    if isinstance(state, Mapping):
        return {str(key): settings(value) for key, value in state.items() if key not in _PROGRESS}
    if isinstance(state, list | tuple):
        return [settings(one) for one in state]
    plain = isinstance(state, str | int | float | bool | None)
    return state if plain else type(state).__name__


def _refuse_another(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """A function made the schedule, so only now can it be seen whether it is the one of the checkpoint."""
    differ = [key for key in {**then, **now} if then.get(key) != now.get(key)]
    if differ:
        what = f"the schedule {now['kind']} that scheduler= made is not the one of the checkpoint."
        fix = ["the same function and the same length of the loop (epochs=, updates=) continue it", 'resume="never"']
        raise UsageError(what, evidence=[f"{key}: {then.get(key)!r}, now {now.get(key)!r}" for key in differ], fix=fix)


def _plain(state: Any) -> Any:
    """MultiStepLR keeps its milestones in a Counter, which no checkpoint holds: as a dict."""
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(value) for value in state] if isinstance(state, list) else state


def _typed(state: Any, scheduler: Any) -> Any:
    """What `_plain` was given, for a schedule of the same kind; schedules made of others hold theirs in a list."""
    typed = {
        key: Counter(value) if isinstance(getattr(scheduler, key, None), Counter) else value
        for key, value in state.items()
    }
    parts = getattr(scheduler, "_schedulers", None)
    if isinstance(parts, list | tuple) and isinstance(state.get("_schedulers"), list):
        typed["_schedulers"] = [_typed(one, part) for one, part in zip(state["_schedulers"], parts)]
    return typed
