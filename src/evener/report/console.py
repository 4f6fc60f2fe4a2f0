"""What rank 0 shows: lines, and the progress of the run. Other ranks hold the same object and show nothing.

On a terminal the progress is one line with a bar, redrawn at most ten times a second. Elsewhere (a file, a pipe, a
notebook) it is plain lines: the first update, then every tenth of the run or every ten seconds, and the last.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeAlias

from evener.report.bar import Bar, can_draw, columns_of
from evener.report.text import clean, format_count, format_lr, format_number, format_seconds

# Name -> value. The whole and each value may be a function, called only when something is about to be shown: a loss
# on a GPU is then waited for ten times a second at most, not at every update.
Fields: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

_REDRAW_SECONDS = 0.1
_LINE_SECONDS, _LINE_SECONDS_AT_MOST = 10.0, 60.0
_LINE_FRACTION = 0.1
_RATE_SECONDS = 30.0  # the time that is left follows from the pace of this much of the past


class Console:
    """The lines and the bar of one run; `active` on rank 0. `stream`: None takes sys.stdout as it is now."""

    def __init__(self, active: bool, stream: TextIO | None = None) -> None:
        self._stream: TextIO = sys.stdout if stream is None else stream
        self._active = active and self._stream is not None
        self._draws = self._active and can_draw(self._stream)
        self._bar: Bar | None = None
        self._final = ""  # the numbers of the last draw, left behind as a line when the bar goes
        self._forget_progress()

    def say(self, text: str) -> None:
        """A line (or several), above the bar if there is one. Control characters do not get through."""
        self._write(clean(text, lines=True) + "\n")

    def contract(self, line: str) -> None:
        """The contract line; on a terminal that is too narrow it is broken between its parts."""
        if self._draws:
            from rich.cells import cell_len

            row, *parts = clean(line).split(" · ")
            rows = [row]
            for part in parts:
                if cell_len(f"{rows[-1]} · {part}") > columns_of(self._stream):
                    rows.append(f"  · {part}")
                else:
                    rows[-1] += f" · {part}"
            line = "\n".join(rows)
        self.say(line)

    def progress(self, done: int, total: int | None, fields: Fields) -> None:
        """Updates done so far, of how many (None: no end), and what to show beside them: after every update.

        When nothing is due it costs a clock reading and calls nothing of `fields`. A field that is None is left out.
        """
        if not self._active:
            return
        now = time.monotonic()
        last, of = self._shown
        if now < self._due and last <= done < self._due_done and of == total and done != total:
            return
        if (done, total) != self._shown:
            self._show(now, done, total, fields)

    def close(self) -> None:
        """Take the bar away, leaving its last numbers as a line. The console can go on speaking."""
        if self._bar is not None:
            atexit.unregister(self.close)
            bar, self._bar = self._bar, None
            try:
                bar.close()
            except (OSError, ValueError):
                self._active = False
            self._write(self._final + "\n")
        self._forget_progress()

    def _forget_progress(self) -> None:
        self._due, self._due_done, self._started = 0.0, math.inf, 0.0
        self._shown: tuple[int, int | None] = (-1, None)
        self._pace: deque[tuple[float, int]] = deque()

    def _show(self, now: float, done: int, total: int | None, fields: Fields) -> None:
        if not 0 <= self._shown[0] <= done:  # the first of a run, or of the next one
            self._started = now
            self._pace.clear()
        self._shown = (done, total)
        counts = format_count(done) + ("" if total is None else f"/{format_count(total)}")
        parts, left = _parts(fields), self._time_left(now, done, total)
        self._final = " · ".join([f"update {counts}", *parts])
        if self._draws:
            self._due = now + _REDRAW_SECONDS
            self._draw(counts, min(1.0, done / total) if total else None, parts, left)
            return
        self._write(" · ".join([self._final, left] if left else [self._final]) + "\n")
        # Every ten seconds at first, every minute after the first hour: a log of days stays readable.
        self._due = now + min(_LINE_SECONDS_AT_MOST, max(_LINE_SECONDS, (now - self._started) / 60))
        self._due_done = done + max(1, math.ceil(total * _LINE_FRACTION)) if total else math.inf

    def _time_left(self, now: float, done: int, total: int | None) -> str:
        """`12 s left`, from the pace of the last half minute; empty when it is not known yet."""
        pace = self._pace
        pace.append((now, done))
        while len(pace) > 2 and pace[1][0] < now - _RATE_SECONDS:
            pace.popleft()
        seconds, updates = now - pace[0][0], done - pace[0][1]
        if total is None or done >= total or updates <= 0 or seconds <= 0:
            return ""
        return f"{format_seconds((total - done) * seconds / updates)} left"

    def _draw(self, counts: str, fraction: float | None, parts: list[str], left: str) -> None:
        try:
            if self._bar is None:
                self._bar = Bar(self._stream)
                atexit.register(self.close)  # an exception or Ctrl-C ends the script without anyone closing us
            self._bar.draw(counts, fraction, parts, left)
        except (OSError, ValueError):  # the terminal is gone; the training is not
            self._active = False

    def _write(self, text: str) -> None:
        if not self._active:
            return
        try:
            encoding = getattr(self._stream, "encoding", None) or "utf-8"
            if text.encode(encoding, "replace").decode(encoding) != text:  # an old locale shows other characters
                text = text.replace("·", "|").encode(encoding, "replace").decode(encoding)
            if self._bar is not None:
                self._bar.above(text, self._stream)
            else:
                self._stream.write(text)
                self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more: a closed pipe, a closed file
            self._active = False


def _parts(fields: Fields) -> list[str]:
    values = (fields() if callable(fields) else fields).items()
    words = ((name, value() if callable(value) else value) for name, value in values)
    return [clean(_part(name, value)) for name, value in words if value is not None]


def _part(name: str, value: Any) -> str:
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return f"{name} {value}"
    if name == "lr":
        return f"lr {format_lr(number)}"
    if name.endswith("_per_second"):
        return f"{number:{',.0f' if number >= 10 else '.2g'}} {name.removesuffix('_per_second')}/s"
    return f"{name} {format_number(number)}"
