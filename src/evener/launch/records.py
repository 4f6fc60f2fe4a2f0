"""What is known about the end of every rank: its own record, and the exit code that the agent saw.

Two sources, because neither is enough. The rank's record (`rank<N>.json`, written by the shim) has the exception and
its time, but a killed process writes nothing; the agent knows every exit code, but not why.
"""

from __future__ import annotations

import contextlib
import json
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
    """How one rank ended.

    Attributes:
        how: "exception", "exit" (SystemExit), "finished", "interrupted", or None: no word from the rank itself, which
            was killed, crashed, or left by `os._exit`.
        code: The exit code; negative for a signal, as in `subprocess`; None when the agent did not say.
        stopped: The agent asked it to stop, because another rank had failed before.
        monotonic_ns: When, on the clock that all processes of the machine share; None without a record.
        errors: The exception, then the ones behind it (its cause or context).
        stack: Where it was when another rank had failed and asked, innermost first; empty: not asked, or no answer.
        state: The kernel's letter for it then ("T" stopped, "D" in the kernel); None: not asked.
    """

    rank: int
    pid: int | None = None
    how: str | None = None
    code: int | None = None
    stopped: bool = False
    monotonic_ns: int | None = None
    errors: tuple[Raised, ...] = ()
    stack: tuple[Line, ...] = ()
    state: str | None = None


def read_pids(logs: str, nproc: int, first: int = 0) -> dict[int, int]:
    """Process ids of the ranks that have started so far."""
    found = {}
    for rank in range(first, first + nproc):
        record = _read(os.path.join(logs, f"rank{rank}.json"))
        if isinstance(record.get("pid"), int):
            found[rank] = record["pid"]
    return found


def any_left_with(code: int, logs: str, nproc: int, first: int = 0) -> bool:
    """Whether some rank says that it ended with this exit code."""
    ended = (_read(os.path.join(logs, f"rank{rank}.json")).get("ended") for rank in range(first, first + nproc))
    return any(isinstance(one, dict) and one.get("code") == code for one in ended)


def read_ends(logs: str, nproc: int, first: int = 0) -> list[RankEnd]:
    """One RankEnd per rank, in rank order."""
    codes, stopped = _agents_account(os.path.join(logs, "agent.log"))
    ends = []
    ranks = range(first, first + nproc)
    records = [_read(os.path.join(logs, f"rank{rank}.json")) for rank in ranks]
    states: dict[str, str] = {}
    for record in records:
        for one, letter in (record.get("ended") or {}).get("others", {}).items():
            if states.get(one) != "T":  # who asked second found it going on again
                states[one] = letter
    for rank, record in zip(ranks, records):
        pid, ended = record.get("pid"), record.get("ended")
        told = ended if isinstance(ended, dict) else {}
        end = RankEnd(
            rank,
            pid=pid,
            how=told.get("how"),
            code=_code(told, codes.get(rank), pid in stopped),
            stopped=pid in stopped,
            monotonic_ns=told.get("monotonic_ns"),
            errors=tuple(_raised(error) for error in told.get("errors", [])),
            stack=read_stack(os.path.join(logs, f"rank{rank}.stack")),
            state=states.get(str(rank)),
        )
        ends.append(end)
    return ends


def _code(told: dict[str, Any], seen: int | None, stopped: bool) -> int | None:
    """The exit code that says how the rank's script ended.

    A rank that raised or left by SystemExit may still be killed while its interpreter shuts down: by the launcher,
    which has seen another rank end, or by native code that does not survive the exception. What it said first counts.
    One that had finished and then crashed by itself has not finished well.
    """
    how, code = told.get("how"), told.get("code")
    if seen is None or how in ("exception", "exit") or (how == "finished" and stopped):
        return code
    return seen


def _raised(error: dict[str, Any]) -> Raised:
    where = error.get("where")
    return Raised(
        type=error["type"],
        module=error["module"],
        message=error["message"],
        where=Line(**where) if where else None,
        traceback=error["traceback"],
    )


def read_stack(path: str, start: int = 0) -> tuple[Line, ...]:
    """The main thread's frames when it was first asked (after `start` bytes), innermost first; a second asker may find
    it going on again.
    """
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        file.seek(start)
        block = file.read().partition("Current thread ")[2]
        block = re.split(r"^(?:Current thread|Thread) ", block, maxsplit=1, flags=re.MULTILINE)[0]
        frames = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', block, flags=re.MULTILINE)
        return tuple(Line(name, int(line), function, _source(name, int(line))) for name, line, function in frames)
    return ()


def _source(path: str, line: int) -> str:
    import linecache

    return linecache.getline(path, line).strip()


def _read(path: str) -> dict[str, Any]:
    """A record, or {} when the rank never wrote one."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        value = json.load(file)
        if isinstance(value, dict):
            return value
    return {}


def _agents_account(path: str) -> tuple[dict[int, int], set[int]]:
    """Exit code per rank and the process ids that the agent stopped, from its log.

    The codes are in the events that it writes as JSON lines between its other messages; the stops are messages.
    """
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
