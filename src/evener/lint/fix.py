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
            findings = [one for one in _findings(project, rule, path, data) if one.edits and (unsafe or not one.unsafe)]
            findings = [one for one in findings if _key(one) not in skip]
            if not findings:
                break
            together = _compatible(findings)
            new = _tried(project, rule, path, data, together)
            if new is None and len(together) > 1:  # one of them is at fault: try the first alone
                together = together[:1]
                new = _tried(project, rule, path, data, together)
            if new is None:
                refused += together
                skip |= {_key(one) for one in together}
                continue
            data = new
            done += together
    return Fixed(path, before, data, tuple(done), tuple(refused))


def _key(finding: Finding) -> tuple[str, str]:
    return finding.message, str([one.text for one in finding.edits])


def _findings(project: Project, rule: Rule, path: str, data: bytes) -> list[Finding]:
    try:
        now = project if path.endswith(engine.SCRIPTS) else engine.with_file(project, path, data)
        return engine.check_data(now, (rule,), path, data)
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []


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


def _tried(project: Project, rule: Rule, path: str, data: bytes, findings: list[Finding]) -> bytes | None:
    """The new content where it parses and the rule has fallen silent there; None otherwise."""
    script = path.endswith(engine.SCRIPTS)
    if script:
        return apply(data, {edit for one in findings for edit in one.edits})
    source = Source(path, data)
    new = apply(source.data, {edit for one in findings for edit in one.edits})
    for line in dict.fromkeys(line for one in findings for line in one.imports):
        new = _imported(new, line)
    try:
        encoded = new.decode().encode(source.encoding)
        after = engine.check_data(engine.with_file(project, path, encoded), (rule,), path, encoded)
    except (SyntaxError, UnicodeError, ValueError):
        return None
    was = engine.check_data(engine.with_file(project, path, data), (rule,), path, data)
    return encoded if len(after) <= len(was) - len(findings) and encoded != data else None


def _imported(data: bytes, line: str) -> bytes:
    """With the import, once; behind the other imports, or in front where the fix stands above them."""
    source = Source("", data)
    module = line.removeprefix("import ")
    if any(
        alias.name == module and not alias.asname
        for node in source.of(ast.Import)
        for alias in node.names
        if node in source.tree.body
    ):
        return data
    at = 0
    for stmt in source.tree.body:  # behind the docstring and __future__, in front of the first other statement
        future = isinstance(stmt, ast.ImportFrom) and stmt.module == "__future__"
        if not future and not (isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant)):
            break
        at = source.starts[stmt.end_lineno or stmt.lineno]
    for row in source.lines if not at else ():  # a shebang, an encoding, a licence
        if not row.startswith(b"#"):
            break
        at += len(row)
    end = "\r\n" if b"\r\n" in data else "\n"
    return data[:at] + f"{line}{end}".encode() + data[at:]
