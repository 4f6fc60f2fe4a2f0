"""One line at the bottom of a terminal: a bar, its numbers, and other people's output above it.

rich renders the bar; the line itself is kept here. rich's own live display holds back what is printed without a line
end, and so would mangle a tqdm bar, a prompt or a debugger in the user's loop. Here a program that prints half a line
has the terminal to itself until the line ends.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TextIO

_SMALLEST, _LARGEST = 8, 40  # cells of the bar itself
_WIDE, _NUMBERS = 60, 75  # columns from which there is room for a word; what counts, rates and time need beside it


class Bar:
    """Draws on `stream`, a terminal. Between construction and `close`, sys.stdout and sys.stderr print above it."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._stream = stream
        self._rich = Console(file=stream, markup=False, highlight=False, emoji=False)
        self._line, self._drawn, self._mid_line = "", False, False
        self._replaced: list[tuple[str, _Above]] = []
        for name in ("stdout", "stderr"):
            real = getattr(sys, name)
            if real is not None and real.isatty():  # a redirected stream goes to its file, as the user asked
                self._replaced.append((name, _Above(self, real)))
                setattr(sys, name, self._replaced[-1][1])

    def draw(self, counts: str, fraction: float | None, parts: Sequence[str], left: str) -> None:
        """`update 3/10`, the bar (unless `fraction` is None), then of `left` (the time) and `parts` what fits."""
        self._line = self._composed(counts, fraction, parts, left)
        self.redraw()

    def redraw(self) -> None:
        if not self._mid_line:
            self._write(f"\r{self._line}\x1b[K")
            self._drawn = True

    def erase(self) -> None:
        if self._drawn:
            self._write("\r\x1b[K")
            self._drawn = False

    def above(self, text: str, stream: TextIO) -> None:
        """Write `text` to `stream` as it is, above the bar."""
        self.erase()
        stream.write(text)
        if text:
            self._mid_line = not text.endswith("\n")
        if self._line and not self._mid_line:
            stream.flush()
            self.redraw()

    def close(self) -> None:
        """Take the bar away and give the streams back. What someone else put there meanwhile stays."""
        for name, above in self._replaced:
            above.bar = None
            if getattr(sys, name) is above:
                setattr(sys, name, above.real)
        self._replaced = []
        self.erase()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()

    def _composed(self, counts: str, fraction: float | None, parts: Sequence[str], left: str) -> str:
        from rich.cells import cell_len, set_cell_size
        from rich.progress_bar import ProgressBar

        columns = columns_of(self._stream) - 1  # a full last column makes some terminals wrap
        start = f"update {counts}" if columns >= _WIDE else counts
        # Its width follows from the terminal's alone: it does not jump with the numbers behind it.
        cells = 0 if fraction is None else min(_LARGEST, max(_SMALLEST, columns - _NUMBERS))
        percent = "" if fraction is None else f" {int(100 * fraction):3d}%"
        room, shown = columns - cell_len(start + percent) - cells - 1, list[str]()
        for part in filter(None, (left, *parts)):  # the time comes first in need and last in place
            if cell_len(part) + 3 <= room:
                room -= cell_len(part) + 3
                shown.append(part)
        shown.sort(key=lambda part: part == left)
        tail = percent + "".join(f" · {part}" for part in shown)
        if fraction is None or room < 0:
            return set_cell_size(start + tail, min(columns, cell_len(start + tail)))
        bar = ProgressBar(1.0, fraction, cells, style="grey35", complete_style="cyan", finished_style="cyan")
        with self._rich.capture() as drawn:
            self._rich.print(bar, end="")
        return f"{start} {drawn.get()}{tail}"


class _Above:
    """A text stream that prints above a bar; otherwise, and after the bar is gone, the real one."""

    def __init__(self, bar: Bar, real: TextIO) -> None:
        self.bar: Bar | None = bar
        self.real = real

    def write(self, text: str) -> int:
        if self.bar is None:
            return self.real.write(text)
        self.bar.above(text, self.real)
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def columns_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def can_draw(stream: TextIO) -> bool:
    """Whether a line can be redrawn there: a terminal that knows how, in an encoding that has the characters."""
    with suppress(ValueError):  # closed
        encoding = (getattr(stream, "encoding", None) or "").lower().replace("-", "")
        knows = os.name == "posix" and os.environ.get("TERM", "dumb") not in ("dumb", "")
        return stream.isatty() and encoding == "utf8" and knows
    return False
