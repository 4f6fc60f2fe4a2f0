"""`evener run --hang-after T`: nothing was done for so long. Which rank does not move, in which phase, at which line.

A rank's `Run` touches a file while it works (`run/beat.py`), a few times a second at most. Nothing else is recorded
while a training runs: the phase is read from the stack that the rank writes when it is asked, in native code too.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence

from evener.errors import LaunchError
from evener.launch import failure, records
from evener.launch.records import Line
from evener.launch.shim import ask_for_stack, state_of

_ANSWER_SECONDS = 2.0  # for a stack; one that the kernel holds gives none
# By evener's innermost frame. In the step the next frame inwards decides between forward and backward.
_PHASES = [
    (r"data/", "", "data"),
    (r"run/(evaluate|predict)\.py", "", "evaluate"),
    (r"checkpoint/|run/saving\.py", "", "save"),
    (r"engine/spread/", "forward", "forward"),
    (r"engine/spread/", "", "reduce"),
    (r"engine/oom\.py", "agree", "reduce"),
    (r"engine/step\.py", "apply", "optimizer"),
    (r"engine/step\.py", "", "forward"),
    (r"engine/(target|update|ema|scaler|schedule|flags)\.py", "", "optimizer"),
    (r"run/run\.py", "__init__", "start"),
    (r"run/run\.py", "_save", "save"),
    (r"run/run\.py", "_feed_batches|_prepared", "data"),
]
_WAITS = re.compile(r"torch/distributed/|evener/(engine/spread|dist)/")


class Hang:
    """Looks at the ranks' files; `seconds` without a change is a hang. Own clock: the files' may jump."""

    def __init__(self, folder: str, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.seen: dict[str, int] = {}
        self.since = time.monotonic()

    def is_there(self, ranks: Mapping[int, int]) -> bool:
        """Whether the job hangs. Not before a Run was begun, nor outside of its loops, nor while a rank is in first().

        ranks: Process id by rank.
        """
        now, seen = time.monotonic(), _times(self.folder)
        if seen != self.seen or not seen or _in_first(set(ranks.values())):
            self.seen, self.since = seen, now
        return now - self.since >= self.seconds


def _times(folder: str) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(folder)}
    except OSError:  # one ended in this moment
        return {}


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
    paths = {rank: os.path.join(logs, f"rank{rank}.stack") for rank in ranks}
    before = {rank: _size(path) for rank, path in paths.items()}
    states: dict[int, str] = {}
    for rank, pid in ranks.items():
        try:
            states[rank] = state_of(pid)
            ask_for_stack(pid)
            if states[rank] == "T":
                os.kill(pid, signal.SIGCONT)  # it writes its stack, and stays where it was
        except OSError:
            continue
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and any(_size(paths[rank]) == before[rank] for rank in states):
        time.sleep(0.02)
    time.sleep(0.05)  # the last lines of the last one
    stacks = {rank: records.read_stack(paths[rank], before[rank]) for rank in ranks}
    waits = {rank: bool(stack) and bool(_WAITS.search(stack[0].file)) for rank, stack in stacks.items()}
    moved = [rank for rank in ranks if states.get(rank) not in failure.STATES and waits[rank]]
    still = [rank for rank in ranks if rank not in moved]
    what = f"hang{'s' * (len(still) == 1)}" if still else "wait for each other"
    evidence = []
    for rank in [*still, *moved]:
        evidence.append(f"rank {rank} {'waits' if rank in moved else 'is'} {_where(stacks[rank])}")
        evidence += [failure.STATES[states[rank]]] if states.get(rank) in failure.STATES else []
    if not still:
        evidence.append("not in the same call, or over a network that lost it (--debug compares the calls on GPUs)")
    evidence.append(f"logs: {failure.relative(logs, os.getcwd())}")
    names = failure.ranks_text(still or moved)
    return LaunchError(f"{names} {what}: nothing was done for {seconds:.0f} s", evidence=evidence)


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


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
            found = (
                phase for file, function, phase in _PHASES if re.match(file, name) and re.match(function, one.function)
            )
            if phase := next(found, ""):
                return phase
        inner = one.file
    return "script"


def _where(stack: Sequence[Line]) -> str:
    if not stack:
        return "in a place that it could not tell: in the kernel, or in native code that takes no signals"
    own = failure.users_frame([one for one in stack if not one.file.startswith(failure.EVENER)])
    call = next((one.function for one in stack if one.file.endswith("distributed_c10d.py")), "")
    line = "" if own is None else f", {failure.line_text(own, os.getcwd())}"
    return f"in phase {phase_of(stack)}{f' ({call})' if call else ''}{line}"
