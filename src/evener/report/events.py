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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

# kind -> (what it says, the fields that are always there besides t, kind, update, rank). More fields may follow.
KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "start": ("a run begins in this directory", ("world_size", "versions")),
        "contract": ("the contract line, at the start and whenever a factor changed", ("line",)),
        "update": ("a sampled point of the curves", ("epoch", "loss", "lr", "grad_norm", "rows_per_second")),
        "phases": ("where a rank's time went since its event before", ("updates", "seconds", "split", "memory_bytes")),
        "epoch": ("the means over one epoch", ("epoch", "updates", "rows", "loss", "metrics", "seconds")),
        "skip": ("an update whose gradients were not finite: nothing was changed", ("row_ids", "grad_norm", "scale")),
        "zero_count": ("an update without anything to count (no tokens): skipped", ("row_ids",)),
        "scale_falling": ("the loss scale falls update after update", ("scale", "skipped_in_a_row")),
        "bad_row": ("a row of the dataset that could not be read", ("row", "error")),
        "oom": (
            "out of memory: the update is made again, with microbatches of so many rows (null: as before)",
            ("phase", "ranks", "microbatch_size"),
        ),
        "grow": ("after a calm, larger microbatches are tried again (null: as configured)", ("microbatch_size",)),
        "unused_parameters": ("parameters that received no gradient", ("names",)),
        "evaluate": ("the means over an evaluation", ("metrics", "rows", "seconds")),
        "checkpoint": (
            "a checkpoint was written; training waited for blocked_seconds",
            ("path", "seconds", "blocked_seconds"),
        ),
        "checkpoint_failed": ("a checkpoint could not be written; the training goes on", ("text",)),
        "resume": (
            "the run continues from a checkpoint; later updates are made again",
            ("checkpoint", "redone_updates"),
        ),
        "stop": ("the run ends before its last update", ("reason",)),
        "finish": ("the run made its last update", ("updates", "seconds")),
        "peak": ("the peak of a planned run's memory", ("predicted_bytes", "real_bytes")),
        "warning": ("something the console also said", ("text",)),
        "error": ("the exception that ended the run", ("type", "text")),
    }
)


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


_LONGEST_LINE = 16 << 20  # bytes; no event of evener's is longer, and no damaged file fills the memory


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
