"""What a run saves and when, and what it continues from."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from evener import __version__
from evener.checkpoint import Checkpoints
from evener.config import Config
from evener.config_checks import seconds_of
from evener.dist import comm, here
from evener.dist.device import hardware
from evener.engine import Engine
from evener.engine.divergence import refuse_divergence
from evener.errors import CheckpointError, UsageError
from evener.report.events import read_events
from evener.report.folder import in_use
from evener.run.output import Output
from evener.run.resume import FINISHED, ROWS, changed_code, differences, refuse, siblings, with_other_data


def began(folder: Path) -> str | None:
    """The job of `evener run` that made the newest start in this run directory."""
    job = None
    with contextlib.suppress(OSError):
        for event in read_events(folder / "events.jsonl"):
            job = event.get("job") if event.get("kind") == "start" else job
    return job


class Saving:
    """What one run saves: engine, registered objects, the user's values, generators, the data position. Collective."""

    def __init__(self, config: Config, engine: Engine, identity: Mapping[str, Any], code: Mapping[str, Any]) -> None:
        self.config, self.engine, self.identity, self.code = config, engine, identity, code
        self.other_data = False  # the rows are others than those of the checkpoint, and that was accepted
        self.state: dict[str, Any] = {}
        self.registered: dict[str, Any] = {}
        self.waiting: dict[str, Any] = {}  # restored states of objects that are not registered yet
        every = config.save_every
        self.every = every if isinstance(every, int) else None
        self.every_seconds = seconds_of(every) if isinstance(every, str) else None
        self.saved_at = (0, time.monotonic())
        self.checkpoints: Checkpoints | None = None
        self.failed: CheckpointError | None = None  # why the newest checkpoint is not on the disk
        self._begun = (0, 0.0, 0.0)  # update, when, for how many seconds the training was kept waiting

    def find(
        self, wanted: Path, is_main: bool, restarted: str | None
    ) -> tuple[Path | None, Mapping[str, Any] | None, list[str]]:
        """(directory to continue, its state, lines to show). Newest first. Rank 0's disk decides for all.

        A job that was `restarted` (its name) goes on with what it began itself: a run that it had finished is finished.
        UsageError: `resume="must"` and nothing fits.
        """
        lines: list[str] = []
        if self.config.resume == "never":
            return None, None, lines
        there = [
            (str(path), (path / FINISHED).exists(), in_use(path), restarted is not None and began(path) == restarted)
            for path in (siblings(wanted) if is_main else ())
            if (path / "checkpoints").is_dir()
        ]
        for name, finished, used, ours in comm.broadcast(there):
            if used:
                lines.append(f"{name} is in use: its Run was not closed, by {used}")
                continue
            checkpoints = Checkpoints(Path(name) / "checkpoints", keep=self.config.keep_checkpoints)
            newest, notes = checkpoints.newest()
            lines += notes
            if newest is None and ours:
                lines.append(f"{name} was begun by this job and has no checkpoint yet (save_every= saves more often)")
                return Path(name), None, lines
            if newest is None:
                continue
            states, about = checkpoints.load(newest)
            placed, accepted = self._accept(states, about["identity"])
            differ = differences({**about["identity"], **accepted}, self.identity)
            if finished and not (ours and not differ):
                if not any("is a finished run" in line for line in lines):  # the newest of them is enough
                    lines.append(f"{name} is a finished run")
            elif differ:
                lines += [f"{name} is another run:", *(f"  {line}" for line in differ)]
            else:
                if accepted:
                    self.other_data = True
                    epoch, then = placed["run"]["cursor"][0], about["identity"][ROWS]
                    now = f"{accepted[ROWS]} now: accepted; their order begins with epoch {epoch}"
                    lines.append(f"{then} rows then, {now}")
                lines += changed_code(about.get("code", {}), self.code)
                other = differences(about["fingerprint"], self._fingerprint())
                if self.config.exact and other:
                    lines += ["close from here on, not exact:", *(f"  {line}" for line in other)]
                return Path(name), placed, lines
        if self.config.resume == "must":
            raise refuse(f'resume="must": nothing in {wanted} can be continued.', lines or ["there is no checkpoint"])
        return None, None, lines

    def _accept(
        self, states: Mapping[str, Any], then: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """With `accept_changed_data`: the states placed at an epoch's beginning, and the rows there are now."""
        now = {ROWS: self.identity[ROWS]}
        if not self.config.accept_changed_data or then[ROWS] == now[ROWS] or None in (then[ROWS], now[ROWS]):
            return states, {}
        return with_other_data(states), now

    def _fingerprint(self) -> dict[str, Any]:
        """What exact mode's bits depend on. A resume elsewhere is close, and says so."""
        return {**self.engine.fingerprint(), "hardware": hardware(self.engine.device)}

    def open(self, folder: Path, output: Output) -> None:
        self.checkpoints = Checkpoints(folder / "checkpoints", keep=self.config.keep_checkpoints)
        self.output = output

    def start(self, number: int) -> None:
        """A loop begins, or a state was restored: periods count from here."""
        self.saved_at = (number, time.monotonic())

    def is_due(self, number: int) -> bool:
        """Whether `save_every=` updates have passed a multiple since the last save; the same on every rank."""
        return self.every is not None and number // self.every > self.saved_at[0] // self.every

    def time_is_up(self) -> bool:
        """Whether `save_every="10min"` has passed on this rank's clock; starts the next period when it has."""
        number, when = self.saved_at
        if self.every_seconds is None or time.monotonic() - when < self.every_seconds:
            return False
        self.saved_at = (number, time.monotonic())
        return True

    def register(self, name: str, thing: Any) -> None:
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            what = f"register({name!r}): a {type(thing).__name__} has no state_dict() and load_state_dict()."
            raise UsageError(what, fix=["run.state[name] = value keeps JSON values"])
        self.registered[name] = thing
        if name in self.waiting:
            thing.load_state_dict(self.waiting.pop(name))

    def write(self, name: str | int, position: Mapping[str, Any], number: int, *, behind: bool = False) -> None:
        """Write it and say so, or with `behind` begin to: then only the copy of the state is waited for, and a disk
        that fails does not stop the training.
        """
        assert self.checkpoints is not None
        self.landed(wait=True)
        self.failed, began = None, time.monotonic()  # this one speaks for itself
        with self.engine.group.call("save" if isinstance(name, str) else "the loop's checkpoint"):
            self.engine.meet()
            self.compare_ranks()
            states = {
                "engine": self.engine.state_dict(copy=False),  # written, or copied by `begin`, before this returns
                "registered": {key: thing.state_dict() for key, thing in self.registered.items()} | self.waiting,
                "random": {
                    # Between updates a user's own draws go on where they were. All ranks continue from rank 0's.
                    "python": random.getstate(),
                    "numpy": numpy.random.get_state(legacy=False),
                    "torch": self.engine.randomness.torch_states(),
                },
                "run": {**position, "state": self.state},
            }
            versions = {"torch": str(torch.__version__), "numpy": numpy.__version__, "evener": __version__}
            about = {"update": number, "identity": self.identity, "code": self.code, "versions": versions}
            about |= {"fingerprint": self._fingerprint(), "world_size": here().world_size}
            if isinstance(name, int):
                self.saved_at = (number, time.monotonic())
            if behind:
                self.checkpoints.begin(number, states, about)
                self._begun = (number, began, time.monotonic() - began)
                return
            notes = self.checkpoints.save(name, states, about)
        seconds = time.monotonic() - began
        self._written(name, number, seconds, seconds, notes)

    def compare_ranks(self) -> None:
        """Before every checkpoint, and at the end of a loop without any."""
        refuse_divergence(self.engine.model, [target.optimizer for target in self.engine.targets.values()])

    def landed(self, *, wait: bool = False) -> None:
        """Say what became of the checkpoint behind the training, if it is known. Rank 0 knows; no communication."""
        outcome = self.checkpoints.behind.outcome(wait=wait) if self.checkpoints is not None else None
        if outcome is None:
            return
        number, began, blocked = self._begun
        if not isinstance(outcome, CheckpointError):
            self._written(number, number, round(time.monotonic() - began, 3), blocked, outcome)
            return
        self.failed = outcome
        line = f"no checkpoint of update {number}: {outcome.cause} Training goes on; earlier ones stay."
        self.output.console.say(f"  {line}")
        self.output.folder.event("checkpoint_failed", update=number - 1, text=line)

    def _written(self, name: str | int, number: int, seconds: float, blocked: float, notes: list[str]) -> None:
        assert self.checkpoints is not None
        for note in notes:
            self.output.console.say(note)
        path = str(self.checkpoints.path(name))
        self.output.folder.event("checkpoint", update=number - 1, path=path, seconds=seconds, blocked_seconds=blocked)

    def read(self, name: str) -> Mapping[str, Any]:
        assert self.checkpoints is not None
        states, about = self.checkpoints.load(self.checkpoints.path(name))
        return self._accept(states, about["identity"])[0]

    def restore(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put everything back; returns the position that `write` was given."""
        self.engine.load_state_dict(states["engine"])
        self.state = states["run"]["state"]
        self.waiting = dict(states["registered"])
        for key, thing in self.registered.items():
            if key in self.waiting:
                thing.load_state_dict(self.waiting.pop(key))
        drawn = states["random"]
        random.setstate(drawn["python"])
        numpy.random.set_state(drawn["numpy"])
        if len(drawn["torch"]) == len(self.engine.randomness.generators):  # another kind of device has its own
            self.engine.randomness.set_torch_states(drawn["torch"])
        self.start(self.engine.number)  # a run that was taken back saves again from there
        if self.checkpoints is not None:
            self.checkpoints.reached = self.engine.number
        position: Mapping[str, Any] = states["run"]
        return position
