"""`evener run --hang-after T`: nothing was done for so long. Which rank does not move, in which phase, at which line.

A rank's `Run` touches a file while it works (`run/beat.py`), a few times a second at most. A script without `Run` is
watched from outside: its ranks' logs, and CPU time and bytes of files that they and their children use. Nothing else
is recorded: phase and line are in the stack that a rank writes when asked, its call in torch's flight recorder.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence

import psutil  # type: ignore[import-untyped]

from evener.errors import LaunchError
from evener.launch import failure, records
from evener.launch.records import Line
from evener.launch.shim import ask

_ANSWER_SECONDS = 2.0  # for a stack; one that the kernel holds gives none
# By evener's innermost frame. In the step the next frame inwards decides between forward and backward.
_PHASES = [
    (r"data/", "", "data"),
    (r"run/evaluate\.py", "", "evaluate"),
    (r"checkpoint/|run/saving\.py", "", "save"),
    (r"engine/spread/", "forward", "forward"),
    (r"engine/spread/", "", "reduce"),
    (r"engine/oom\.py", "agree", "reduce"),
    (r"engine/step\.py", "apply", "optimizer"),
    (r"engine/step\.py", "", "forward"),
    (r"engine/(target|update|ema|scaler|schedule|flags)\.py", "", "optimizer"),
    (r"run/run\.py", "__init__", "start"),
    (r"run/loop\.py", "save", "save"),
    (r"run/(loop|prepare)\.py", "_feed|__call__", "data"),
]
_IDLE, _IDLE_BYTES = 0.02, 10_000  # of a CPU, and bytes a second: what a process uses that does nothing but wait


class Hang:
    """Looks at the ranks' files; `seconds` without a change is a hang. beats: the folder of their signs of life."""

    def __init__(self, beats: str, logs: str, seconds: float) -> None:
        self.beats, self.logs, self.seconds = beats, logs, seconds
        self.seen: dict[str, int] = {}
        self.since = self.looked = time.monotonic()  # an own clock: the files' may jump
        self.has_run = False

    def is_there(self, ranks: Mapping[int, int]) -> bool:
        """Whether the job hangs. Not outside of the loops of a Run, nor while a rank is in first()."""
        now = time.monotonic()
        if now < self.looked + min(5.0, self.seconds / 20):
            return False
        self.looked = now
        seen = {entry.name: _stat(entry.path)[1] for entry in _entries(self.beats)}
        self.has_run = self.has_run or bool(seen)
        if not self.has_run and ranks:
            seen = self._from_outside()
        if seen != self.seen or not seen or _in_first(set(ranks.values())):
            self.seen, self.since = seen, now
        return now - self.since >= self.seconds

    def _from_outside(self) -> dict[str, int]:
        """What every log holds, and CPU time and bytes of files in steps that an idle process does not reach in
        `seconds`. What goes through a socket alone is not among them: the kernel does not count it by process.
        """
        seen = {entry.name: _stat(entry.path)[0] for entry in _entries(self.logs) if entry.name.endswith(".log")}
        for one in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if one.ppid() != os.getpid():  # the agent looks after its ranks all the time
                    seen[str(one.pid)] = int(sum(one.cpu_times()[:2]) / (_IDLE * self.seconds))
                    if sys.platform == "linux":
                        seen[f"{one.pid} bytes"] = int(sum(one.io_counters()[2:]) / (_IDLE_BYTES * self.seconds))
        return seen


def _entries(folder: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []


def _in_first(pids: set[int]) -> bool:
    """Whether one of them is inside of `evener.first()`: it holds a lock in that folder (dist/first.py)."""
    try:
        from tempfile import gettempdir

        inodes = {entry.inode() for entry in os.scandir(os.path.join(gettempdir(), f"evener-first-{os.getuid()}"))}
        with open("/proc/locks", encoding="ascii") as file:
            held = [re.match(r"\d+: FLOCK +\S+ +WRITE (\d+) [0-9a-f]+:[0-9a-f]+:(\d+)", line) for line in file]
    except OSError:
        return False
    return any(int(one[1]) in pids and int(one[2]) in inodes for one in held if one is not None)


def described(logs: str, ranks: Mapping[int, int], seconds: float) -> LaunchError:
    """Asks every rank for its stack, and says who does not move."""
    still, waits, evidence = _standing(logs, ranks)
    what = f"hang{'s' * (len(still) == 1)}" if still else "wait for each other"
    cause = f"{failure.ranks_text(still or waits)} {what}: nothing was done for {seconds:.0f} s"
    return _written(os.path.join(logs, "hang.log"), cause, evidence)


def stopped(logs: str, ranks: Mapping[int, int], signum: signal.Signals) -> LaunchError | None:
    """Where the ranks stood when somebody stopped the job, also as `stop.log`; None: no rank waited for another.

    To be asked before the signal is passed on: the first rank that ends for it makes the others look guilty.
    """
    still, waits, evidence = _standing(logs, ranks)
    sender = "Ctrl-C" if signum == signal.SIGINT else "sent to the launcher"
    text = f"stopped by {signum.name} ({sender}), and no rank had failed before"
    if still and waits:
        evidence.append(f"if nothing moved any more, look at {failure.ranks_text(still)}: the others waited for it")
    error = _written(os.path.join(logs, "stop.log"), text, evidence)
    return error if waits else None


def _written(path: str, cause: str, evidence: list[str]) -> LaunchError:
    """The error that the launcher shows; for `evener explain`, later, the same in a file."""
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        file.write("\n  ".join([f"evener: {cause}", *evidence]) + "\n")
    return LaunchError(cause, evidence=[*evidence, f"logs: {failure.relative(os.path.dirname(path), os.getcwd())}"])


def _standing(logs: str, ranks: Mapping[int, int]) -> tuple[list[int], list[int], list[str]]:
    """Asks every rank for its stack: the ranks that wait for no other, those that do, and where each stands."""
    states, stacks = _asked(logs, ranks)
    waits = [rank for rank in ranks if states.get(rank) not in failure.STATES and failure.is_waiting(stacks[rank])]
    still = [rank for rank in ranks if rank not in waits]
    evidence = []
    for rank in still:
        evidence.append(f"rank {rank} is {_where(stacks[rank])}")
        evidence += [failure.STATES[states[rank]]] if states.get(rank) in failure.STATES else []
    evidence += [f"rank {rank} waits {_where(stacks[rank], records.calls_of(logs, rank)[0])}" for rank in waits]
    evidence += [] if still else ["not in the same call, or over a network that lost it"]
    return still, waits, evidence


def _asked(logs: str, ranks: Mapping[int, int]) -> tuple[dict[int, str], dict[int, tuple[Line, ...]]]:
    """The kernel's letter for every rank that is there, and its stack now, innermost first; (): it did not answer."""
    paths = {rank: os.path.join(logs, f"rank{rank}.stack") for rank in ranks}
    before = {rank: _stat(path)[0] for rank, path in paths.items()}
    states: dict[int, str] = {}
    for rank, pid in ranks.items():
        with contextlib.suppress(OSError):
            states[rank] = ask(pid)
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and any(_stat(paths[rank])[0] == before[rank] for rank in states):
        time.sleep(0.02)
    time.sleep(0.2)  # the last lines of the last one, and the collectives
    return states, {rank: records.read_stack(paths[rank], before[rank]) for rank in ranks}


def _stat(path: str) -> tuple[int, int]:
    """Size and time of change; zeros where there is nothing (any more)."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_size, found.st_mtime_ns
    return 0, 0


def phase_of(stack: Sequence[Line]) -> str:
    """data, forward, backward, reduce, optimizer, save, evaluate; or start, script: before and outside of an update.

    stack: Innermost first.
    """
    inner = ""
    for one in stack:
        if one.file.startswith(failure.EVENER) and "/launch/" not in one.file and "/dist/" not in one.file:
            name = one.file.removeprefix(failure.EVENER)
            if name.startswith("engine/step") and re.search(r"torch/autograd/", inner):
                return "backward"
            for file, function, phase in _PHASES:
                if re.match(file, name) and re.match(function, one.function):
                    return phase
        inner = one.file
    return "script"


def _where(stack: Sequence[Line], call: str = "") -> str:
    """call: What torch's recorder says; without it the function's name."""
    if not stack:
        return "in a place that it could not tell: in the kernel, or in native code that takes no signals"
    own = failure.users_frame([one for one in stack if not one.file.startswith(failure.EVENER)])
    call = call or next((one.function for one in stack if one.file.endswith("distributed_c10d.py")), "")
    line = "" if own is None else f", {failure.line_text(own, os.getcwd())}"
    phase = phase_of(stack)
    place = {"script": "in the script", "start": "in the constructor of Run"}.get(phase, f"in phase {phase}")
    return f"{place}{f' ({call})' if call else ''}{line}"
