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
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

from evener.errors import UsageError

BLOCK = 1 << 18  # with 1 MiB the allocator kept up to 135 MB in pieces, and how much was chance
LONGEST_READ = 4 << 20  # bytes without the end of a line
HEAD_BYTES, TAIL_BYTES = 64 << 10, 96 << 10
BEFORE_BYTES, AFTER_BYTES = 6 << 10, 3 << 10  # a traceback before its exception; a message after its first line
LONGEST_LINE = 4096
SAME_WITH_WINDOW, SAME_ALONE = 12, 1100  # lines of one shape: kept with their surroundings, kept at all (1,024 ranks)
KEPT_BYTES = 4 << 20  # of hits, twice: the first ones and the last ones

# Stems in lower case. Nearly every message of a failure has one; those that have none are found near the end.
_STEMS = """error exception traceback assert warn fatal fail kill signal abort timeout timed_out exit nvrm terminat oom
segmentation cannot unable_to no_space evict cancel preempt loss_scale evener:_"""
STEMS = tuple(stem.replace("_", " ").encode() for stem in _STEMS.split())
# Upper case to lower, a carriage return to a line's end.
_SHAPE = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ\r", b"abcdefghijklmnopqrstuvwxyz\n")
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
        self._first: list[Raw] = []
        self._last: deque[Raw] = deque()
        self._first_bytes = self._last_bytes = 0
        self._seen: dict[bytes, int] = {}
        self._upto = 0  # offset in the source up to which lines were kept

    def read(self, stream: BinaryIO) -> list[Raw]:
        """Reads `stream` to its end."""
        offset, number, rest, before = 0, 1, b"", b""
        while True:
            block = stream.read(BLOCK)
            data = rest + block
            if block:
                cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
                if cut == 0 and len(data) < LONGEST_READ:
                    rest = data
                    continue
                data, rest = data[: cut or len(data)], data[cut or len(data) :]
            self._block(before, data, offset, number, last=not block)
            number += data.count(b"\n")
            offset += len(data)
            before = (before + data)[-TAIL_BYTES:]
            if not block:
                break
        self.lines_total = number - 1 if before.endswith(b"\n") else number if offset else 0
        return self.kept()

    def kept(self) -> list[Raw]:
        return [*self._first, *self._last]

    def _block(self, before: bytes, data: bytes, offset: int, number: int, *, last: bool) -> None:
        """Keeps what is worth it in `data`, which starts at `offset`; `before` is the text in front of it."""
        text = before + data
        start = offset - len(before)
        spans = []
        if offset < HEAD_BYTES:
            spans.append((len(before), len(before) + min(len(data), HEAD_BYTES - offset)))
        around, alone = self._hits(data)
        spans += [(at + len(before) - BEFORE_BYTES, at + len(before) + AFTER_BYTES) for at in around]
        spans += [(low + len(before), high + len(before)) for low, high in alone]
        if last:
            spans.append((len(text) - TAIL_BYTES, len(text)))
        line, counted = number - before.count(b"\n"), 0
        for low, high in _merged(spans, len(text)):
            low = max(_line_start(text, low), self._upto - start)
            high = _line_end(text, high)
            if low >= high:
                continue
            line += text.count(b"\n", counted, low)
            counted = low
            for piece in re.split(rb"(?<=[\r\n])", text[low:high]):
                if piece.strip():
                    self._keep(Raw(self.source, line, piece.rstrip(b"\r\n")[:LONGEST_LINE].decode("utf-8", "replace")))
                line += piece.count(b"\n")
            counted = high
            self._upto = start + high

    def _hits(self, data: bytes) -> tuple[list[int], list[tuple[int, int]]]:
        """Lines with a stem: the offsets of those to keep with what is around, and the spans of those to keep alone."""
        around, alone, seen, end = [], [], self._seen, -1
        shapes = data.translate(_SHAPE, b"0123456789").split(b"\n")
        if len(seen) > MOST_SHAPES:
            seen.clear()
        new = dict.fromkeys(shape for shape in shapes if shape not in seen)
        seen |= dict.fromkeys(new, 0) | dict.fromkeys(_with_a_stem(list(new)), 1)
        for shape, line in zip(shapes, data.replace(b"\r", b"\n").split(b"\n")):
            start, end = end + 1, end + 1 + len(line)
            if count := seen[shape]:
                seen[shape] = count + 1
                if count <= SAME_WITH_WINDOW:
                    around.append(start)
                elif count <= SAME_ALONE:
                    alone.append((start, end + 1))
        return around, alone

    def _keep(self, raw: Raw) -> None:
        size = len(raw.text) + 64
        if self._first_bytes < KEPT_BYTES:
            self._first.append(raw)
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


def _line_start(text: bytes, at: int) -> int:
    at = max(at, 0)
    low = max(0, at - 2 * LONGEST_LINE)  # bounded: a block may have no carriage return at all
    return max(text.rfind(b"\n", low, at), text.rfind(b"\r", low, at), low - 1) + 1


def _line_end(text: bytes, at: int) -> int:
    high = min(len(text), at + 2 * LONGEST_LINE)
    ends = [end for end in (text.find(b"\n", at, high), text.find(b"\r", at, high)) if end >= 0]
    return min(ends) + 1 if ends else high


def _merged(spans: list[tuple[int, int]], length: int) -> Iterator[tuple[int, int]]:
    """The spans in order, without overlaps, inside 0..length."""
    low = high = -1
    for start, end in sorted((max(0, start), min(length, end)) for start, end in spans):
        if start > high:
            if high > low:
                yield low, high
            low, high = start, end
        high = max(high, end)
    if high > low:
        yield low, high


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
        selection.lines = selection.read(chosen)
    except (EOFError, gzip.BadGzipFile, OSError) as error:
        if magic != b"\x1f\x8b":
            raise
        selection.lines = selection.kept()
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
