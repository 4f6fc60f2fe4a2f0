"""What is known about the end of every rank: its own record, and the exit code that the agent saw.

Two sources, because neither is enough. The rank's record (`rank<N>.json`, written by the shim) has the exception and
its time, but a killed process writes nothing; the agent knows every exit code, but not why.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    text: str


@dataclass(frozen=True)
class Raised:
    """An exception as the rank recorded it."""

    type: str
    module: str
    message: str
    where: Line | None
    traceback: str


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    pid: int | None = None
    how: str | None = None  # exception, exit (SystemExit), finished, interrupted; None: killed, crashed, or os._exit
    code: int | None = None  # negative for a signal, as in `subprocess`; None when the agent did not say
    stopped: bool = False  # the agent asked it to stop, because another rank had failed before
    monotonic_ns: int | None = None  # on the clock that all processes of the machine share; None without a record
    errors: tuple[Raised, ...] = ()  # the exception, then the ones behind it (its cause or context)
    stack: tuple[Line, ...] = ()  # where it was when another had failed and asked, innermost first; (): no answer
    state: str | None = None  # the kernel's letter for it then ("T" stopped, "D" in the kernel); None: not asked
    call: str = ""  # the collective that it was in, or had been in when it raised; "": none, or not known


def read_pids(logs: str, nproc: int, first: int = 0) -> dict[int, int]:
    """Process ids of the ranks that have started so far."""
    found = {rank: _read(logs, rank).get("pid") for rank in range(first, first + nproc)}
    return {rank: pid for rank, pid in found.items() if isinstance(pid, int)}


def any_left_with(code: int, logs: str, nproc: int, first: int = 0) -> bool:
    """Whether some rank says that it ended with this exit code."""
    return any(_read(logs, rank).get("ended", {}).get("code") == code for rank in range(first, first + nproc))


def read_ends(logs: str, nproc: int, first: int = 0) -> list[RankEnd]:
    """One RankEnd per rank, in rank order."""
    codes, stopped = _agents_account(os.path.join(logs, "agent.log"))
    records = {rank: _read(logs, rank) for rank in range(first, first + nproc)}
    states: dict[str, str] = {}
    for record in records.values():
        for one, letter in record.get("ended", {}).get("others", {}).items():
            if states.get(one) != "T":  # who asked second found it going on again
                states[one] = letter
    ends = []
    for rank, record in records.items():
        told, pid = record.get("ended", {}), record.get("pid")
        how, code = told.get("how"), codes.get(rank)
        # A rank that raised or left by SystemExit may still be killed while its interpreter shuts down: by the
        # launcher, or by native code that does not survive the exception. What it said first counts. One that had
        # finished and then crashed by itself has not finished well.
        if code is None or how in ("exception", "exit") or (how == "finished" and pid in stopped):
            code = told.get("code")
        errors = [
            Raised(**{**one, "where": Line(**one["where"]) if one["where"] else None}) for one in told.get("errors", [])
        ]
        stack, state = read_stack(os.path.join(logs, f"rank{rank}.stack")), states.get(str(rank))
        when, calls = told.get("monotonic_ns"), calls_of(logs, rank)
        call = calls[0] or (calls[1] if errors else "")  # the one that raised has ended
        ends.append(RankEnd(rank, pid, how, code, pid in stopped, when, tuple(errors), stack, state, call))
    return ends


def read_stack(path: str, start: int = 0) -> tuple[Line, ...]:
    """The main thread's frames when first asked (after `start` bytes), innermost first; later it may go on."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        block = file.read().partition("Stack (most")[2].partition("Stack (most")[0]
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.MULTILINE)
        return tuple(
            Line(name, int(line), function, linecache.getline(name, int(line)).strip())
            for name, line, function in frames
        )
    return ()


def calls_of(logs: str, rank: int) -> tuple[str, str]:
    """The collective that a rank has begun and not ended, and its newest: "all_reduce of [5, 2] Float, call 7 ..."."""
    told = _read(logs, rank, "calls")
    return _call(told.get("pending")), _call(told.get("newest"))


def _call(told: Any) -> str:
    with contextlib.suppress(KeyError, TypeError, AttributeError):
        sizes = zip(told["input_sizes"], told["input_dtypes"])
        what = ", ".join(f"{size} {kind}" for size, kind in sizes)
        name, group = told["profiling_name"].partition(":")[2], told["process_group"][1]
        number = told["p2p_seq_id" if told["is_p2p"] else "collective_seq_id"]
        return f"{name}{what and f' of {what}'}, call {number} of group {group}"
    return ""


def _read(logs: str, rank: int, kind: str = "") -> dict[str, Any]:
    """A record, or {} when the rank never wrote one."""
    path = os.path.join(logs, f"rank{rank}{kind and '.'}{kind}.json")
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        value = json.load(file)
        return value if isinstance(value, dict) else {}
    return {}


def _agents_account(path: str) -> tuple[dict[int, int], set[int]]:
    """Exit code per rank (in events, JSON lines of its log) and the process ids that the agent stopped (messages)."""
    codes: dict[int, int] = {}
    stopped: set[int] = set()
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith("{") and '"exit_code' in line.replace("\\", ""):
                with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                    event = json.loads(line)["metadata"]
                    code = json.loads(event["metadata"])["exit_code"][0]
                    if isinstance(code, int):
                        codes[event["global_rank"]] = code
                    elif event["state"] == "SUCCEEDED":
                        codes[event["global_rank"]] = 0
            elif match := re.search(r"Sending process (\d+) closing signal", line):
                stopped.add(int(match[1]))
    return codes, stopped
