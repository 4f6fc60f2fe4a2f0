"""From bytes to the lines worth reading: any size, in bounded memory, and fast enough for a gigabyte.

A log of gigabytes is nearly all progress and INFO lines, and these repeat but for their digits. So the shape of a line,
its text without digits, decides: a shape that has been seen costs one look-up, a new one is searched for a few stems
that messages of failures have. Around each such line a window is kept, a limited number of times per shape, so that a
message printed at every step cannot push the others out. The head and the tail of the text always are.

A carriage return ends a line here (progress bars overwrite themselves), but line numbers are an editor's.
"""

from __future__ import annotations

import codecs
import gzip
import io
import os
from collections import deque
from dataclasses import dataclass
from typing import BinaryIO, cast

from evener.errors import UsageError

BLOCK = 1 << 18  # with 1 MiB the allocator kept up to 135 MB in pieces, and how much was chance
LONGEST_READ = 4 << 20  # bytes without the end of a line
LONGEST_LINE = 4096
HEAD, TAIL = 600, 1000  # lines that are always kept
BEFORE, AFTER = 80, 40  # lines: a traceback before its exception; a message after its first line
SAME_WITH_WINDOW, SAME_ALONE = 12, 1100  # lines of one shape: kept with their surroundings, kept at all (1,024 ranks)
KEPT_BYTES = 4 << 20  # of hits, twice: the first ones and the last ones

# Stems in lower case. Nearly every message of a failure has one; those that have none are found near the end.
_STEMS = """error exception traceback assert warn fatal fail kill signal abort timeout timed_out exit nvrm terminat oom
segmentation cannot unable_to no_space evict cancel preempt loss_scale evener:_"""
STEMS = tuple(stem.replace("_", " ").encode() for stem in _STEMS.split())
# Upper case to lower, a carriage return to a line's end.
_SHAPE = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r", b"abcdefghijklmnopqrstuvwxyz\n")
_NO_ENDS = bytes(set(range(256)) - set(b"\r\n"))
MOST_SHAPES = 200_000


@dataclass(frozen=True, slots=True)
class Raw:
    """One kept line as it stands in the source: its name, its line number from 1, and its text."""

    source: str
    number: int
    text: str


class Selection:
    """The kept lines of one source, and how many it had."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines_total = 0
        self.lines: list[Raw] = []
        self._last: deque[Raw] = deque()
        self._first_bytes = self._last_bytes = 0
        self._seen: dict[bytes, int] = {}
        # The newest lines: the number of the first of them, what ends each, and two places among them: those before
        # `_done` are kept or not; those before `_until` shall be kept.
        self._lines, self._ends, self._number = list[bytes](), b"", 1
        self._done, self._until = 0, HEAD

    def read(self, stream: BinaryIO) -> None:
        """Reads `stream` to its end; where it is torn, what came before is kept."""
        rest = b""
        try:
            while block := stream.read(BLOCK):
                rest += block
                cut = max(rest.rfind(b"\n"), rest.rfind(b"\r")) + 1
                if cut or len(rest) >= LONGEST_READ:
                    self._block(rest[: cut or len(rest)])
                    rest = rest[cut or len(rest) :]
            if rest:
                self._block(rest)
        finally:
            self._keep(len(self._lines) - TAIL, len(self._lines))
            self.lines += self._last
            torn = bool(self._lines) and not self._ends.endswith(b"\n")
            self.lines_total = self._number + self._ends.count(b"\n") - (not torn)

    def _block(self, data: bytes) -> None:
        """Keeps what is worth it in whole lines."""
        start, seen = len(self._lines), self._seen
        self._lines += data.replace(b"\r", b"\n").split(b"\n")
        self._ends += data.translate(None, _NO_ENDS)
        if data.endswith((b"\r", b"\n")):
            self._lines.pop()
        else:
            self._ends += b" "
        self._keep(start, self._until)
        shapes = data.translate(_SHAPE, b"0123456789").split(b"\n")
        if len(seen) > MOST_SHAPES:
            seen.clear()
        new = dict.fromkeys(shape for shape in shapes if shape not in seen)
        seen |= dict.fromkeys(new, 0) | dict.fromkeys(_with_a_stem(list(new)), 1)
        for place, shape in enumerate(shapes, start):
            if count := seen[shape]:
                seen[shape] = count + 1
                if count <= SAME_WITH_WINDOW:
                    self._keep(place - BEFORE, place + AFTER)
                elif count <= SAME_ALONE:
                    self._keep(place, place + 1)
        old = max(0, len(self._lines) - TAIL)
        self._number += self._ends.count(b"\n", 0, old)
        self._lines, self._ends = [line[:LONGEST_LINE] for line in self._lines[old:]], self._ends[old:]
        self._done, self._until = max(0, self._done - old), self._until - old

    def _keep(self, low: int, high: int) -> None:
        """These places, but for those that are done; what is not there yet follows with the next block."""
        low = max(low, self._done, 0)
        number = self._number + self._ends.count(b"\n", 0, low)
        for place, line in enumerate(self._lines[low : max(high, 0)], low):
            if line.strip():
                self._take(Raw(self.source, number, line[:LONGEST_LINE].decode("utf-8", "replace")))
            number += self._ends[place : place + 1] == b"\n"
        self._done = max(self._done, min(high, len(self._lines)))
        self._until = max(self._until, high)

    def _take(self, raw: Raw) -> None:
        size = len(raw.text) + 64
        if self._first_bytes < KEPT_BYTES:
            self.lines.append(raw)
            self._first_bytes += size
            return
        self._last.append(raw)
        self._last_bytes += size
        while self._last_bytes > KEPT_BYTES:
            self._last_bytes -= len(self._last.popleft().text) + 64


def _with_a_stem(shapes: list[bytes]) -> list[bytes]:
    """Those of `shapes` that have a stem, searched as one text: that is much faster than one by one."""
    text = b"\n".join(shapes)
    found = set()
    for stem in STEMS:
        at = text.find(stem)
        while at >= 0:
            end = text.find(b"\n", at)
            end = len(text) if end < 0 else end
            found.add(text[text.rfind(b"\n", 0, at) + 1 : end])
            at = text.find(stem, end)
    return list(found)


def read_stream(stream: BinaryIO, source: str) -> Selection:
    """Lines of one stream: plain or gzip, UTF-8 or (as PowerShell's `>` writes) UTF-16."""
    peekable = stream if isinstance(stream, io.BufferedReader) else io.BufferedReader(cast(io.RawIOBase, stream))
    magic = peekable.peek(2)[:2]
    chosen: BinaryIO = peekable
    if magic == b"\x1f\x8b":
        chosen = cast(BinaryIO, gzip.GzipFile(fileobj=peekable))
    elif magic in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        chosen = cast(BinaryIO, codecs.EncodedFile(peekable, "utf-8", "utf-16", errors="replace"))
    selection = Selection(source)
    try:
        selection.read(chosen)
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        if magic != b"\x1f\x8b":
            raise
        if not selection.lines:
            raise UsageError(f"{source} is not a whole gzip file.", evidence=[str(error)]) from error
    return selection


def read_file(path: str) -> Selection:
    """Lines of one file; a missing, unreadable or binary one is a UsageError."""
    try:
        with open(path, "rb") as file:
            selection = read_stream(file, path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be read: {error.strerror or error}.", fix=["evener explain FILE, or -"]
        ) from error
    if sum("\x00" in raw.text for raw in selection.lines[:200]) > 20:
        raise UsageError(f"{os.path.basename(path)} is not a text file.", fix=["give the log of the run"])
    return selection
