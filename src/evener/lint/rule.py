"""A rule: one function over a file that yields hits. Its page (why, wrong, right) is in en.toml and zh.toml, and is its
unit test. A new one needs its function in `rules/`, both texts, and `python -m evener.lint.pages > docs/lint.md`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from evener.lint.edits import Edit
from evener.lint.file import File

LEVELS = ("error", "warning", "hint")


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


@dataclass(frozen=True)
class Hit:
    """What a rule sees: where, why in one line, and the edits that repair it."""

    node: ast.AST
    message: str
    edits: tuple[Edit, ...]
    fix: str  # "": the rule's own
    imports: tuple[str, ...]
    unsafe: bool


Hits = Iterator[Hit]


def hit(
    node: ast.AST, message: str, *edits: Edit | None, fix: str = "", imports: tuple[str, ...] = (), unsafe: bool = False
) -> Hit:
    return Hit(node, message, tuple(dict.fromkeys(one for one in edits if one)), fix, imports, unsafe)


@dataclass(frozen=True)
class Rule:
    id: str
    theme: str
    level: str
    fix: str  # one line: what to do
    in_tests: bool  # False: a test does that on purpose
    check: Callable[[File], Hits]

    def findings(self, file: File) -> Iterator[Finding]:
        for one in self.check(file):
            line, start = one.node.lineno, one.node.col_offset  # type: ignore[attr-defined]
            raw = file.lines[line - 1]
            end = one.node.end_col_offset if one.node.end_lineno == line else len(raw.rstrip())  # type: ignore[attr-defined]
            column, stop = (len(raw[:at].decode(errors="replace")) + 1 for at in (start, end))
            yield Finding(
                file.path, line, column, self.id, self.level, one.message, one.fix or self.fix, one.edits, one.imports,
                one.unsafe, stop,
            )  # fmt: skip


def rule(level: str, fix: str, in_tests: bool = True) -> Callable[[Callable[[File], Hits]], Rule]:
    """Makes a rule of the function; its name is the rule's id, its module's the theme."""

    def made(check: Callable[[File], Hits]) -> Rule:
        return Rule(check.__name__.replace("_", "-"), check.__module__.rpartition(".")[2], level, fix, in_tests, check)

    return made
