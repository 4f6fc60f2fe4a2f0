"""Applies edits: comments and layout untouched, imports added once, every fix proven by linting again."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from evener.lint import engine
from evener.lint.edits import Edit
from evener.lint.project import Project
from evener.lint.rule import Finding, Rule
from evener.lint.source import Source

ROUNDS = 20  # a file whose fixes do not come to rest is left at the last good state


@dataclass(frozen=True)
class Fixed:
    path: str
    before: bytes
    after: bytes
    fixed: tuple[Finding, ...]
    refused: tuple[Finding, ...]  # fixes that did not silence their rule, or broke something: undone


def fix_file(path: str, data: bytes, project: Project, chosen: tuple[Rule, ...], unsafe: bool) -> Fixed:
    """The file with all fixes of the chosen rules. A file that does not parse comes back as it is."""
    before, done, refused = data, [], []
    for rule in chosen:
        skip: set[tuple[str, str]] = set()
        for _ in range(ROUNDS):
            found = _check(project, rule, path, data) or []
            fixable = [one for one in found if one.edits and (unsafe or not one.unsafe) and _key(one) not in skip]
            if not fixable:
                break
            together = _compatible(fixable)
            new = _tried(project, rule, path, data, together, len(found))
            if new is None and len(together) > 1:  # one of them is at fault: try the first alone
                together = together[:1]
                new = _tried(project, rule, path, data, together, len(found))
            if new is None:
                refused += together
                skip |= {_key(one) for one in together}
            else:
                data = new
                done += together
    return Fixed(path, before, data, tuple(done), tuple(refused))


def _key(finding: Finding) -> tuple[str, str]:
    return finding.message, str([one.text for one in finding.edits])


def _check(project: Project, rule: Rule, path: str, data: bytes) -> list[Finding] | None:
    """What the rule finds in this content; None where it does not parse."""
    try:
        now = project if path.endswith(engine.SCRIPTS) else engine.with_file(project, path, data)
        return engine.check_data(now, (rule,), path, data)
    except (SyntaxError, ValueError):
        return None


def _compatible(findings: list[Finding]) -> list[Finding]:
    """The findings, in order, whose edits do not overlap those before. Equal edits (one import) may be shared."""
    taken: set[Edit] = set()
    chosen = []
    for finding in findings:
        fresh = [one for one in finding.edits if one not in taken]
        if any(a is not b and _overlap(a, b) for a in fresh for b in (*taken, *fresh)):
            continue
        taken |= set(finding.edits)
        chosen.append(finding)
    return chosen


def _overlap(a: Edit, b: Edit) -> bool:
    if a.start == a.end or b.start == b.end:  # an insertion clashes inside of a replacement, and with another insertion
        return (a.start == b.start and a.end == b.end) or b.start < a.start < b.end or a.start < b.start < a.end
    return a.start < b.end and b.start < a.end


def apply(data: bytes, edits: set[Edit]) -> bytes:
    """The edited bytes. Insertions come before a replacement that begins at the same place."""
    for edit in sorted(edits, key=lambda one: (one.start, one.end), reverse=True):
        data = data[: edit.start] + edit.text.encode() + data[edit.end :]
    return data


def _tried(project: Project, rule: Rule, path: str, data: bytes, findings: list[Finding], before: int) -> bytes | None:
    """The new content where it parses and the rule finds that many fewer there; None otherwise."""
    edits = {edit for one in findings for edit in one.edits}
    if path.endswith(engine.SCRIPTS):
        return apply(data, edits)
    source = Source(path, data)
    try:
        new = apply(source.data, edits)
        for line in dict.fromkeys(line for one in findings for line in one.imports):
            new = _imported(new, line)
        encoded = new.decode().encode(source.encoding)
    except (SyntaxError, ValueError):
        return None
    after = _check(project, rule, path, encoded)
    return encoded if after is not None and len(after) <= before - len(findings) and encoded != data else None


def _imported(data: bytes, line: str) -> bytes:
    """With the import, once; behind the other imports, or in front where the fix stands above them."""
    source, at = Source("", data), 0
    names = [name for stmt in source.tree.body if isinstance(stmt, ast.Import) for name in stmt.names]
    if any(name.name == line.removeprefix("import ") and not name.asname for name in names):
        return data
    for stmt in source.tree.body:  # behind the docstring and __future__, in front of the first other statement
        future = isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__"
        if not future and not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)):
            break
        at = source.starts[stmt.end_lineno or stmt.lineno]
    for row in source.lines if not at else ():  # a shebang, an encoding, a licence
        if not row.startswith(b"#"):
            break
        at += len(row)
    return data[:at] + f"{line}{source.newline}".encode() + data[at:]
