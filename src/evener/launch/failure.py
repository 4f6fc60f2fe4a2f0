"""From how every rank ended to one cause: which rank, what, where; then the others; the logs last.

When one rank dies, the others fail too, often first on the screen: their peer has closed the connection. So the first
message is rarely the cause. The rule: a rank that crashed or was killed (and not by the launcher) is the cause;
otherwise the earliest exception that is not of the kind a lost peer causes; otherwise a rank that left with a code or
without a word; then one that somebody else asked to stop; then, when the others waited in vain, one that was not even
waiting; only then the earliest of what remains.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evener.errors import LaunchError
from evener.launch.records import Line, Raised, RankEnd

# What an exception looks like when somebody else is to blame: the peer is gone, or did not come in time.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|timed? ?out|remote process (exited|has)|"
    r"ncclremoteerror|ncclsystemerror|connectfullmesh|got 0 bytes|failed to (recv|send|connect)|"
    r"peer (closed|is gone)|watchdog|socket error|no route to host|"
    r"sigterm|received signal 15|killed by signal: terminated",
    re.IGNORECASE,
)
_LOST_PEER_TYPES = {"ConnectionResetError", "ConnectionRefusedError", "ConnectionAbortedError", "BrokenPipeError"}
_LOST_PEER_TYPES |= {"TimeoutError", "DistNetworkError", "DistStoreError", "CollectiveError"}
# A crash of this process alone. ABRT is not among them: native code aborts when a *collective* went wrong.
_CRASHES = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})

# What is refused before anything has run, of what all ranks were given alike.
_ALIKE = frozenset({"UsageError", "BatchSizeError", "PrecisionError"})
EVENER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WAITED = re.compile(r"timed? ?out|watchdog", re.IGNORECASE)
# Where a rank is that waits for others, or may be: the backward of a DDP model reduces.
_WAITING = re.compile(
    r"torch/(distributed/|nn/parallel/|autograd/graph\.py)|evener/(dist|engine)/|(accelerate|lightning)/.*(distributed|strateg)"
)
STATES = {
    "T": "it was stopped (SIGSTOP, Ctrl-Z or a debugger)",
    "D": "it was waiting in the kernel: a disk, a network file system or a driver that does not answer",
}

_SIGNAL_HINTS: dict[int, str] = {
    signal.SIGKILL: "often the kernel's out-of-memory killer: `dmesg | tail` says so, then use fewer data workers or "
    "smaller batches; otherwise somebody's kill",
    signal.SIGSEGV: "a crash in native code: the end of the rank's log has the Python stack",
    signal.SIGBUS: "often /dev/shm is full: data workers pass tensors through it (docker run --shm-size)",
    signal.SIGABRT: "native code gave up: the end of the rank's log has its message",
    signal.SIGTERM: "somebody asked it to stop",
}


@dataclass(frozen=True)
class Failure:
    """The rank to blame, what it raised (if it raised), and the exit code for the whole job."""

    cause: RankEnd
    raised: Raised | None
    exit_code: int
    others: tuple[RankEnd, ...]
    absent: bool = False  # the cause is no end: the others waited for this rank until their time was over


def is_victim(error: Raised) -> bool:
    """Whether this exception says that another rank was lost, rather than what went wrong."""
    return error.type in _LOST_PEER_TYPES or bool(_LOST_PEER.search(f"{error.type}: {error.message}"))


def find_cause(ends: Sequence[RankEnd]) -> Failure | None:
    """The rank whose end ended the job; None when no rank failed."""
    failed = [end for end in ends if end.code not in (0, None) or end.how in ("exception", "interrupted")]
    silent = [end for end in ends if end.how is None and end.code == 0]
    if not failed:
        return None

    def earliest(candidates: list[RankEnd]) -> RankEnd:
        return min(candidates, key=lambda end: (2**63 if end.monotonic_ns is None else end.monotonic_ns, end.rank))

    waited = earliest(failed)
    absent = [end for end in ends if _is_absent(end)]
    signalled = [end for end in failed if end.code is not None and end.code < 0 and not end.stopped]
    crashed = [end for end in signalled if end.how is None and -(end.code or 0) in _CRASHES]
    raised = [end for end in failed if any(not is_victim(error) for error in end.errors)]
    left = [end for end in failed if end.how in ("exit", None) and (end.code or 0) > 0] + silent
    # By its own will, and well; but all that failed miss a peer.
    lost = all(end.errors and all(map(is_victim, end.errors)) for end in failed if not end.stopped)
    begin = waited.monotonic_ns or 0
    early = [end for end in ends if lost and end.code == 0 and (end.monotonic_ns or begin) < begin]
    in_vain = absent and any(_WAITED.search(f"{error.type}: {error.message}") for error in waited.errors)
    if in_vain and not (crashed or raised or left):
        others = tuple(end for end in ends if end is not absent[0])
        return Failure(absent[0], next(iter(waited.errors)), _shell_code(waited.code) or 1, others, absent=True)
    cause = earliest(next(one for one in (crashed, raised, left, early, signalled, failed) if one))
    others = tuple(end for end in ends if end is not cause)
    # An exception raised while cleaning up hides the first one: name the outermost that is no victim.
    error = next((error for error in cause.errors if not is_victim(error)), None) or next(iter(cause.errors), None)
    return Failure(cause, error, _shell_code(cause.code) or 1, others)


def _is_absent(end: RankEnd) -> bool:
    """It had not failed when another rank had, and it was not waiting for anybody."""
    if end.state == "T":
        return True  # it goes on when it is ended, and then fails like the others
    failing = any(one.function == "ended_by" and one.file.endswith("shim.py") for one in end.stack)
    if end.errors or failing or (end.how is not None and not end.stopped):
        return False
    return end.state in STATES or (bool(end.stack) and not is_waiting(end.stack))


def is_waiting(stack: Sequence[Line]) -> bool:
    """Whether it is in a collective: what calls a loss function that never ends waits for nobody."""
    for one in stack:
        if _WAITING.search(one.file):
            return True
        if _is_users(one):
            return False
    return False


def _is_users(frame: Line) -> bool:
    others = r"(site|dist)-packages|/lib/python3|<frozen"
    return not frame.file.startswith(EVENER) and not re.search(others, frame.file)


def users_frame(stack: Sequence[Line]) -> Line | None:
    """The innermost frame of the user's own code; else the innermost."""
    return next(iter([one for one in stack if _is_users(one)] or stack), None)


def _shell_code(code: int | None) -> int:
    """As a shell reports it: 128 + n for signal n."""
    return 1 if code is None else 128 - code if code < 0 else code


def as_error(failure: Failure, logs: str, cwd: str) -> LaunchError:
    """The failure as text, in reading order: cause, place, the other ranks, logs."""
    cause, raised, code = failure.cause, failure.raised, failure.cause.code
    others = failure.others
    text, evidence = f"rank {cause.rank} left with exit code {code}", list[str]()
    if failure.absent and raised is not None:
        text = f"rank {cause.rank} did not come, and the others waited for it until their time was over"
        where = users_frame(cause.stack)
        evidence += [f"rank {cause.rank} was {line_text(where, cwd)}"] if where is not None else []
        evidence += [STATES[cause.state]] if cause.state in STATES else []
        evidence += [f"it was waited for {line_text(raised.where, cwd)}"] if raised.where is not None else []
    elif raised is not None and _is_everybodys(failure, raised):
        text, others = clean(raised.message).replace("\n  ", "\n"), ()  # who was first says nothing
        evidence += [line_text(raised.where, cwd)] if raised.where is not None else []
    elif raised is not None:
        kind = raised.type if raised.module in ("builtins", "__main__") else f"{raised.module}.{raised.type}"
        if cause.how == "exit":
            text += f": {clean(raised.message)}"
        else:
            text = f"rank {cause.rank} failed: {clean(f'{kind}: {raised.message}' if raised.message else kind)}"
        evidence += [line_text(raised.where, cwd)] if raised.where is not None else []
    elif code is not None and code < 0:
        text = f"rank {cause.rank} was killed by {signal_name(-code)} ({-code})"
        hint = _SIGNAL_HINTS.get(-code)
        if cause.how == "finished":
            hint = "after its script had finished, while the interpreter was shutting down"
        evidence += [hint] if hint else []
    elif cause.how is None:
        text += " in the middle of the script"
        evidence.append("no exception reached the end of the script: os._exit(), or native code that calls exit()")
    elif code == 0:
        ended = "finished its script" if cause.how == "finished" else "left with exit code 0"
        text = f"rank {cause.rank} {ended} before the others"
    groups: dict[str, list[int]] = {}
    for end in others:
        groups.setdefault(_how(end), []).append(end.rank)
    evidence += [f"{ranks_text(ranks)} {how}" for how, ranks in groups.items()]
    if raised is not None and _WAITED.search(f"{raised.type}: {raised.message}"):
        evidence += different_calls({end.rank: end.call for end in (cause, *others)})
    log = os.path.join(relative(logs, cwd), f"rank{cause.rank}.log")
    return LaunchError(text, evidence=[*evidence, f"logs: {log} (every rank's, and agent.log, are there)"])


def _is_everybodys(failure: Failure, raised: Raised) -> bool:
    """Whether every rank would have raised it: the others did, or were stopped before they had got beyond it."""
    if raised.module != "evener.errors" or raised.type not in _ALIKE or not failure.others:
        return False
    return all(
        end.errors[0].message == raised.message if end.errors else end.stopped and not is_waiting(end.stack)
        for end in failure.others
    )


def different_calls(calls: Mapping[int, str]) -> list[str]:
    """A line for ranks that wait in different collectives; [] where they are in the same, or one only is known."""
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        groups.setdefault(call, []).append(rank)
    groups.pop("", None)
    told = "; ".join(f"{ranks_text(ranks)}: {clean(call, 160)}" for call, ranks in groups.items())
    return [f"in different calls: {told}"] if len(groups) > 1 else []


def _how(end: RankEnd) -> str:
    if end.errors:
        error = end.errors[0]
        text = clean(f"{error.type}: {error.message}" if error.message else error.type, limit=160)
        return f"failed as a consequence: {text}" if is_victim(error) else f"failed too, later: {text}"
    if end.how == "finished" or end.code == 0:
        return "had finished"
    if end.code is not None and end.code < 0:
        name = signal_name(-end.code)
        return f"was stopped by the launcher ({name})" if end.stopped else f"died of {name}"
    if end.code is not None:
        return f"left with exit code {end.code}"
    return "was stopped by the launcher"


def signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def ranks_text(ranks: Sequence[int]) -> str:
    """[0, 2, 3, 4] as "ranks 0, 2-4"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    spans = [f"{part[0]}-{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def line_text(where: Line, cwd: str) -> str:
    place = f"{relative(where.file, cwd)}:{where.line}"
    if where.function not in ("", "<module>"):
        place += f" in {where.function}"
    return f"at {place}: {clean(where.text)}" if where.text else f"at {place}"


def relative(path: str, cwd: str) -> str:
    """`path` as seen from `cwd` when it lies below it."""
    return os.path.relpath(path, cwd) if path.startswith(cwd.rstrip(os.sep) + os.sep) else path


def clean(text: str, limit: int = 2000) -> str:
    """Text of a rank, safe for a terminal: no control characters, bounded; its first lines stay lines."""
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "?", text.replace("\r\n", "\n")).strip()
    if limit <= 200:
        text = text.partition("\n")[0]
    return (text if len(text) <= limit else text[: limit - 1] + "…").replace("\n", "\n  ")
