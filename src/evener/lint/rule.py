"""A rule: one class with a check; its docstring is its page, and its examples are its unit test."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from evener.lint.events import Event, Window, all_events, windows
from evener.lint.names import Names
from evener.lint.project import Project
from evener.lint.source import Source

LEVELS = ("error", "warning", "hint")


@dataclass(frozen=True)
class Edit:
    """Bytes [start, end) of the file become `text`."""

    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    column: int  # from 1, in characters
    rule: str
    level: str
    message: str
    fix: str  # what to do, one line
    edits: tuple[Edit, ...] = ()
    imports: tuple[str, ...] = ()  # lines that the edits need, added once
    unsafe: bool = False  # the edits need --unsafe-fixes
    end: int = 0  # the column behind the last marked character of the line

    @property
    def fixable(self) -> bool:
        return bool(self.edits)


@dataclass
class Checked:
    """One file under check: its source, its names, the project around it."""

    source: Source
    project: Project
    names: Names = field(init=False)

    def __post_init__(self) -> None:
        self.names = Names(self.source, self.project)

    @cached_property
    def events(self) -> list[list[Event]]:
        return all_events(self.names)

    @cached_property
    def windows(self) -> list[Window]:
        return [window for events in self.events for window in windows(self.names, events)]

    def uses(self, *kinds: str) -> bool:
        """This file, one that imports it or one imported by those makes such a thing."""
        return self.project.uses(self.source.path, *kinds)

    def calls(self, *attributes: str) -> bool:
        return self.project.calls(self.source.path, *attributes)


class Rule:
    """Subclasses set `level`, `fix` (one line: what to do) and write `check`."""

    level: ClassVar[str] = "warning"
    in_tests: ClassVar[bool] = True  # False: a test does that on purpose
    fix: ClassVar[str] = ""

    def __init__(self) -> None:
        self.id = re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()
        self.theme = type(self).__module__.rpartition(".")[2]

    def check(self, file: Checked) -> Iterator[Finding]:
        raise NotImplementedError

    def found(
        self,
        file: Checked,
        node: ast.AST,
        message: str,
        *edits: Edit,
        fix: str = "",
        imports: tuple[str, ...] = (),
        unsafe: bool = False,
    ) -> Finding:
        source = file.source
        line, start = node.lineno, node.col_offset  # type: ignore[attr-defined]
        raw = source.lines[line - 1]
        end = node.end_col_offset if node.end_lineno == line else len(raw.rstrip())  # type: ignore[attr-defined]
        column, stop = (len(raw[:at].decode(errors="replace")) + 1 for at in (start, end))
        return Finding(
            source.path,
            line,
            column,
            self.id,
            self.level,
            message,
            fix or self.fix,
            tuple(dict.fromkeys(edits)),
            imports,
            unsafe,
            stop,
        )


@dataclass(frozen=True)
class Page:
    """A rule's docstring, taken apart."""

    title: str
    why: str
    bad: str
    good: str
    fixed: str  # what `--fix` makes of `bad`; equal to `good` where the docstring has no block of its own


def read(rule: Rule | type[Rule]) -> Page:
    """The block behind `bad -, good +:` is a difference; `fixed:` is there where `--fix` makes something else."""
    head, _, rest = (inspect.getdoc(rule) or "").partition("\nbad -, good +:\n")
    change, _, fixed = rest.partition("\nfixed:\n")
    rows = [line[4:] for line in change.splitlines()]  # a mark, a space, the line
    bad, good = ("".join(f"{row[2:]}\n" for row in rows if row[:1] != other) for other in "+-")
    title, _, why = head.strip().partition("\n")
    return Page(title, why.strip(), bad, good, f"{textwrap.dedent(fixed)}\n" if fixed else good)


# --- edits ----------------------------------------------------------------------------------------------------------
def replace(source: Source, node: ast.AST, text: str) -> Edit:
    return Edit(*source.span(node), text)


def line_start(source: Source, node: ast.AST) -> int:
    return source.starts[node.lineno - 1]  # type: ignore[attr-defined]


def indent_of(source: Source, stmt: ast.stmt) -> str:
    raw = source.lines[stmt.lineno - 1].decode()
    return raw[: len(raw) - len(raw.lstrip())]


def alone(source: Source, stmt: ast.stmt) -> bool:
    """The statement has its lines for itself: nothing before it, and no `;` behind it."""
    start, end = source.span(stmt)
    rest = source.data[end : source.starts[stmt.end_lineno or stmt.lineno]]
    return not source.data[line_start(source, stmt) : start].strip() and not rest.split(b"#")[0].strip()


def insert_before(source: Source, stmt: ast.stmt, code: str) -> Edit | None:
    """`code` on a line of its own before the statement, as deep as it."""
    if not alone(source, stmt):
        return None
    at = line_start(source, stmt)
    return Edit(at, at, f"{indent_of(source, stmt)}{code}{newline(source)}")


def insert_after(source: Source, stmt: ast.stmt, code: str) -> Edit | None:
    if not alone(source, stmt):
        return None
    at = source.starts[stmt.end_lineno or stmt.lineno]
    ends = source.data[:at].endswith((b"\n", b"\r"))
    line = f"{indent_of(source, stmt)}{code}"
    return Edit(at, at, f"{line}{newline(source)}" if ends else f"{newline(source)}{line}")


def newline(source: Source) -> str:
    return "\r\n" if source.lines[0].endswith(b"\r\n") else "\n"


def add_argument(source: Source, call: ast.Call, text: str) -> Edit:
    """`text` as the last argument. A trailing comma stays where it is."""
    end = source.span(call)[1] - 1
    inside = [*call.args, *(one.value for one in call.keywords)]
    if not inside:
        return Edit(end, end, text)
    behind = max(source.span(one)[1] for one in inside)
    between = source.data[behind:end]
    bare = b"".join(line.split(b"#")[0] for line in between.splitlines(keepends=True))
    while bare.startswith(b")"):  # (the argument was in brackets)
        behind, bare = source.data.index(b")", behind) + 1, bare[1:]
    if b"," in bare:
        at = source.data.index(b",", behind) + 1
        return Edit(at, at, f" {text},")
    return Edit(behind, behind, f", {text}")


def remove_argument(source: Source, call: ast.Call, value: ast.expr) -> Edit:
    """Takes the keyword (or last positional) argument out, with the comma that joins it to its neighbour."""
    spans = sorted([source.span(one) for one in call.args] + [source.span(one) for one in call.keywords])
    start, end = next(span for span in spans if span[0] <= source.span(value)[0] and source.span(value)[1] <= span[1])
    i = spans.index((start, end))
    if i + 1 < len(spans):
        return Edit(start, spans[i + 1][0], "")
    if i:
        return Edit(spans[i - 1][1], end, "")
    return Edit(start, end, "")
