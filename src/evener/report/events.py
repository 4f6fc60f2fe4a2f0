"""events.jsonl: one JSON object a line, the machine-readable story of a run.

A line is written with one system call to a file opened for appending, so that lines of several processes do not mix
and a killed process leaves at most one torn line, at the end. The JSON is strict and pure ASCII: a number that is not
finite is the text "nan", "inf" or "-inf", and no terminal acts on what `cat` shows.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

_TABLE = tomllib.loads(resources.files("evener.report").joinpath("kinds.toml").read_text("utf-8"))
# kind -> (what it says, the fields that are always there besides t, kind, update, rank). More fields may follow.
KINDS = {kind: (one["says"], tuple(one["fields"])) for kind, one in _TABLE.items()}
ORDINARY = {"torn", *(kind for kind, one in _TABLE.items() if one.get("ordinary"))}  # in a run that nothing happened to
_LONGEST_LINE = 16 << 20  # bytes; no event of evener's is longer, and no damaged file fills the memory


class Events:
    """Appends events to one file. `write` raises OSError when the disk refuses: its owner decides what that means."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        size = os.fstat(self._descriptor).st_size
        # A line that somebody's death or a full disk cut short is closed first, or it would swallow the next one.
        self._torn = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def write(self, kind: str, *, update: int | None = None, rank: int = 0, **fields: Any) -> None:
        """Append one event. ValueError: a kind that KINDS does not have, or a field that it promises is missing."""
        if kind not in KINDS:
            raise ValueError(f"unknown event kind {kind!r}; the kinds are: {', '.join(KINDS)}")
        missing = [name for name in KINDS[kind][1] if name not in fields]
        if missing or "t" in fields:
            raise ValueError(f"event {kind!r}: {'t is reserved' if 't' in fields else f'missing {missing}'}")
        event = {"t": round(time.time(), 3), "kind": kind, "update": update, "rank": rank, **fields}
        line = json.dumps(strict(event), allow_nan=False).encode("ascii") + b"\n"
        line = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is known to be there
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")
        self._torn = False

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def read_events(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The events of a file in its order. What is no event comes as `{"kind": "torn", "line": 7, "text": ...}`.

    Kinds that KINDS does not know are passed on: the file may come from a newer version. Of a file that grows
    meanwhile, what was there at first; a last line without its end is torn, or not yet whole.
    """
    # Of a pipe that nobody writes to even the opening would wait for ever.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        left, number = os.fstat(file.fileno()).st_size, 0
        while left > 0 and (line := file.readline(min(left, _LONGEST_LINE))):
            left, number = left - len(line), number + 1
            if not line.strip():
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):  # also bytes that are not UTF-8
                event = None
            if isinstance(event, dict) and "kind" in event:
                yield event
            else:
                yield {"kind": "torn", "line": number, "text": line[:1000].decode("utf-8", "replace").rstrip("\n")}


def number(value: object) -> float | None:
    """A JSON number as a float; the texts "nan", "inf", "-inf" too; anything else is None."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    with suppress(OverflowError):
        return float(value) if plain or value in ("nan", "inf", "-inf") else None  # type: ignore[arg-type]
    return None


def strict(value: Any) -> Any:
    """`value` in what JSON can say: numbers of any library as numbers, a non-finite one and anything else as text."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): strict(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [strict(one) for one in value]
    if hasattr(value, "tolist"):  # numpy's and torch's own numbers and arrays
        return strict(value.tolist())
    return str(value)
