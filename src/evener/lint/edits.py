"""Edits of a file's text: bytes are exchanged, comments and layout around them stay."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from evener.lint.source import Source


@dataclass(frozen=True)
class Edit:
    """Bytes [start, end) of the file become `text`."""

    start: int
    end: int
    text: str


def replace(file: Source, node: ast.AST, text: str) -> Edit:
    return Edit(*file.span(node), text)


def whole_lines(file: Source, stmt: ast.stmt) -> tuple[int, int]:
    """Where the statement's first line begins, and where its last ends."""
    return file.starts[stmt.lineno - 1], file.starts[stmt.end_lineno or stmt.lineno]


def indent_of(file: Source, stmt: ast.stmt) -> str:
    raw = file.lines[stmt.lineno - 1].decode()
    return raw[: len(raw) - len(raw.lstrip())]


def alone(file: Source, stmt: ast.stmt) -> bool:
    """The statement has its lines for itself: nothing before it, and no `;` behind it."""
    (start, end), (first, last) = file.span(stmt), whole_lines(file, stmt)
    return not file.data[first:start].strip() and not file.data[end:last].split(b"#")[0].strip()


def siblings(file: Source, stmt: ast.stmt) -> list[ast.stmt]:
    """The block that the statement is in."""
    up = file.parent[stmt]
    return next((body for part in ("body", "orelse", "finalbody") if stmt in (body := getattr(up, part, []))), [stmt])


def insert(file: Source, stmt: ast.stmt, code: str, after: bool = False) -> Edit | None:
    """`code` on a line of its own before (or behind) the statement, as deep as it."""
    if not alone(file, stmt):
        return None
    at = whole_lines(file, stmt)[after]
    line = f"{indent_of(file, stmt)}{code}"
    open_end = after and not file.data[:at].endswith((b"\n", b"\r"))
    return Edit(at, at, f"{file.newline}{line}" if open_end else f"{line}{file.newline}")


def add_argument(file: Source, call: ast.Call, text: str) -> Edit:
    """`text` as the last argument. A trailing comma stays where it is."""
    end = file.span(call)[1] - 1
    inside = [*call.args, *(one.value for one in call.keywords)]
    if not inside:
        return Edit(end, end, text)
    behind = max(file.span(one)[1] for one in inside)
    bare = b"".join(line.split(b"#")[0] for line in file.data[behind:end].splitlines(keepends=True))
    while bare.startswith(b")"):  # (the argument was in brackets)
        behind, bare = file.data.index(b")", behind) + 1, bare[1:]
    if b"," in bare:
        at = file.data.index(b",", behind) + 1
        return Edit(at, at, f" {text},")
    return Edit(behind, behind, f", {text}")


def remove_argument(file: Source, call: ast.Call, value: ast.expr) -> Edit:
    """Takes the keyword (or last positional) argument out, with the comma that joins it to its neighbour."""
    spans = sorted(file.span(one) for one in (*call.args, *call.keywords))
    inner = file.span(value)
    i = next(i for i, (start, end) in enumerate(spans) if start <= inner[0] and inner[1] <= end)
    start, end = spans[i]
    if i + 1 < len(spans):
        return Edit(start, spans[i + 1][0], "")
    return Edit(spans[i - 1][1] if i else start, end, "")
