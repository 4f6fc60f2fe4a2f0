"""A rule: one class with a check; its docstring is its page, and its examples are its unit test.

A new one needs its class in `rules/`, its Chinese text in zh.toml, and `python -m evener.lint.pages > docs/lint.md`.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, NamedTuple

from evener.lint.events import Event, Window, all_events, exclusive, windows
from evener.lint.names import Names
from evener.lint.project import Project
from evener.lint.source import Context, Source, literal, method

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


class Checked:
    """One file under check: its source, its names and the project around it, all asked by one name."""

    def __init__(self, source: Source, project: Project) -> None:
        self.source, self.project, self.names = source, project, (names := Names(source, project))
        self.path, self.text, self.data, self.starts = source.path, source.text, source.data, source.starts
        self.of, self.name, self.segment, self.exact, self.span = (
            source.of, source.name, source.segment, source.exact, source.span,
        )  # fmt: skip
        self.at, self.function, self.statement, self.parent = (
            source.at,
            source.function,
            source.statement,
            source.parent,
        )
        self.inside, self.above, self.params, self.aliases = source.inside, source.above, source.params, source.aliases
        self.values, self.now, self.kinds, self.holds = names.values, names.now, names.kinds, names.holds
        self.is_rank, self.is_loader, self.without_grad = names.is_rank, names.is_loader, names.without_grad

    @cached_property
    def events(self) -> list[list[Event]]:
        return all_events(self.names)

    @cached_property
    def windows(self) -> list[Window]:
        return [window for events in self.events for window in windows(self.names, events)]

    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        found: dict[str, list[ast.Call]] = {}
        for call in self.of(ast.Call):
            found.setdefault(self.name(call.func), []).append(call)
        return found

    @cached_property
    def references(self) -> list[tuple[ast.Attribute | ast.Name, str]]:
        """(node, dotted name) of every longest dotted name of torch and Apex that is read."""
        nodes: list[ast.Attribute | ast.Name] = [*self.of(ast.Attribute), *self.of(ast.Name)]
        named = ((one, self.name(one)) for one in nodes if isinstance(one.ctx, ast.Load))
        return [
            (node, dotted) for node, dotted in named
            if dotted.startswith(("torch.", "apex.")) and not isinstance(self.parent[node], ast.Attribute)
        ]  # fmt: skip

    def calls_of(self, *dotted: str) -> list[ast.Call]:
        return [call for name in dotted for call in self._calls.get(name, ())]

    def making(self, kind: str) -> list[ast.Call]:
        """The calls that make such a thing: a DDP model, a loader."""
        return [call for call in self.of(ast.Call) if kind in self.kinds(call)]

    def methods(self, *words: str) -> Iterator[tuple[ast.Call, ast.Attribute]]:
        """(call, function) of every `x.word(...)`."""
        for call in self.of(ast.Call):
            if func := method(call, *words):
                yield call, func

    def moments(self, *kinds: str) -> Iterator[tuple[Event, list[Event], list[Event]]]:
        """Every event of these kinds with its function's events before and after it, without those that exclude it."""
        for events in self.events:
            for one in (event for event in events if event.kind in kinds):
                others = [other for other in events if not exclusive(other, one)]
                yield one, [o for o in others if o.place < one.place], [o for o in others if o.place > one.place]

    @cached_property
    def backwards(self) -> list[Event]:
        return [one for events in self.events for one in events if one.kind == "backward"]

    def environment(self, *names: str) -> Iterator[tuple[ast.Assign, ast.expr, str]]:
        """(statement, value, name) of every `os.environ["NAME"] = value`."""
        for assign in self.of(ast.Assign):
            target = assign.targets[0]
            if isinstance(target, ast.Subscript) and self.name(target.value) in ("os.environ", "environ"):
                if (name := literal(target.slice)) in names:
                    yield assign, assign.value, str(name)

    def guard(self, where: ast.AST | Context) -> str:
        """The rank test around it: "one", "others" or ""."""
        return self.names.guard(self.at(where) if isinstance(where, ast.AST) else where)

    def uses(self, *kinds: str) -> bool:
        """This file, one that imports it or one imported by those makes such a thing."""
        return self.project.uses(self.path, *kinds)

    def calls(self, *attributes: str) -> bool:
        """The same files call such a method."""
        return self.project.calls(self.path, *attributes)


class Hit(NamedTuple):
    """What a rule sees: where, why in one line, and the edits that repair it."""

    node: ast.AST
    message: str
    edits: tuple[Edit, ...]
    fix: str
    imports: tuple[str, ...]
    unsafe: bool


Hits = Iterator[Hit]


def hit(
    node: ast.AST, message: str, *edits: Edit | None, fix: str = "", imports: tuple[str, ...] = (), unsafe: bool = False
) -> Hit:
    return Hit(node, message, tuple(dict.fromkeys(one for one in edits if one)), fix, imports, unsafe)


class Rule:
    """Subclasses say in their head how they are told, and write `check`."""

    level: ClassVar[str]
    in_tests: ClassVar[bool]  # False: a test does that on purpose
    fix: ClassVar[str]  # one line: what to do

    def __init_subclass__(cls, *, level: str = "warning", in_tests: bool = True, fix: str) -> None:
        cls.level, cls.in_tests, cls.fix = level, in_tests, fix

    def __init__(self) -> None:
        self.id = re.sub(r"(?<!^)(?=[A-Z])", "-", type(self).__name__).lower()
        self.theme = type(self).__module__.rpartition(".")[2]

    def check(self, file: Checked) -> Hits:
        raise NotImplementedError

    def findings(self, file: Checked) -> Iterator[Finding]:
        for node, message, edits, fix, imports, unsafe in self.check(file):
            line, start = node.lineno, node.col_offset  # type: ignore[attr-defined]
            raw = file.source.lines[line - 1]
            end = node.end_col_offset if node.end_lineno == line else len(raw.rstrip())  # type: ignore[attr-defined]
            column, stop = (len(raw[:at].decode(errors="replace")) + 1 for at in (start, end))
            yield Finding(
                file.path, line, column, self.id, self.level, message, fix or self.fix, edits, imports, unsafe, stop
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
def replace(file: Checked, node: ast.AST, text: str) -> Edit:
    return Edit(*file.span(node), text)


def line_start(file: Checked, node: ast.AST) -> int:
    return file.starts[node.lineno - 1]  # type: ignore[attr-defined]


def indent_of(file: Checked, stmt: ast.stmt) -> str:
    raw = file.source.lines[stmt.lineno - 1].decode()
    return raw[: len(raw) - len(raw.lstrip())]


def alone(file: Checked, stmt: ast.stmt) -> bool:
    """The statement has its lines for itself: nothing before it, and no `;` behind it."""
    start, end = file.span(stmt)
    rest = file.data[end : file.starts[stmt.end_lineno or stmt.lineno]]
    return not file.data[line_start(file, stmt) : start].strip() and not rest.split(b"#")[0].strip()


def siblings(file: Checked, stmt: ast.stmt) -> list[ast.stmt]:
    """The block that the statement is in."""
    up = file.parent[stmt]
    return next((body for part in ("body", "orelse", "finalbody") if stmt in (body := getattr(up, part, []))), [stmt])


def insert_before(file: Checked, stmt: ast.stmt, code: str) -> Edit | None:
    """`code` on a line of its own before the statement, as deep as it."""
    if not alone(file, stmt):
        return None
    at = line_start(file, stmt)
    return Edit(at, at, f"{indent_of(file, stmt)}{code}{newline(file)}")


def insert_after(file: Checked, stmt: ast.stmt, code: str) -> Edit | None:
    if not alone(file, stmt):
        return None
    at = file.starts[stmt.end_lineno or stmt.lineno]
    ends = file.data[:at].endswith((b"\n", b"\r"))
    line = f"{indent_of(file, stmt)}{code}"
    return Edit(at, at, f"{line}{newline(file)}" if ends else f"{newline(file)}{line}")


def newline(file: Checked) -> str:
    return "\r\n" if file.source.lines[0].endswith(b"\r\n") else "\n"


def add_argument(file: Checked, call: ast.Call, text: str) -> Edit:
    """`text` as the last argument. A trailing comma stays where it is."""
    end = file.span(call)[1] - 1
    inside = [*call.args, *(one.value for one in call.keywords)]
    if not inside:
        return Edit(end, end, text)
    behind = max(file.span(one)[1] for one in inside)
    between = file.data[behind:end]
    bare = b"".join(line.split(b"#")[0] for line in between.splitlines(keepends=True))
    while bare.startswith(b")"):  # (the argument was in brackets)
        behind, bare = file.data.index(b")", behind) + 1, bare[1:]
    if b"," in bare:
        at = file.data.index(b",", behind) + 1
        return Edit(at, at, f" {text},")
    return Edit(behind, behind, f", {text}")


def remove_argument(file: Checked, call: ast.Call, value: ast.expr) -> Edit:
    """Takes the keyword (or last positional) argument out, with the comma that joins it to its neighbour."""
    spans = sorted([file.span(one) for one in call.args] + [file.span(one) for one in call.keywords])
    start, end = next(span for span in spans if span[0] <= file.span(value)[0] and file.span(value)[1] <= span[1])
    i = spans.index((start, end))
    if i + 1 < len(spans):
        return Edit(start, spans[i + 1][0], "")
    if i:
        return Edit(spans[i - 1][1], end, "")
    return Edit(start, end, "")
