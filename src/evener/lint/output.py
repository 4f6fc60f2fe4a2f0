"""Findings as text for people, as JSON, and as GitHub annotations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from evener.lint.engine import Report
from evener.lint.rule import LEVELS, Finding

SHOWN = 120  # columns of a source line


def text(findings: Iterable[Finding]) -> Iterator[str]:
    """Per finding: place and why, the source line with an arrow, and what to do."""
    read = cache(_read)
    for one in findings:
        yield f"{one.path}:{one.line}:{one.column}: {one.level} [{one.rule}] {one.message}"
        source = "".join(read(one.path)[one.line - 1 : one.line])
        if source.strip():
            number = f"{one.line:5} | "
            shown = source.replace("\t", " ")
            cut = max(0, min(one.column - 20, len(shown) - SHOWN)) if len(shown) > SHOWN else 0
            width = max(1, min(one.end or one.column + 1, cut + SHOWN + 1) - one.column)
            yield f"{number}{shown[cut : cut + SHOWN].rstrip()}"
            yield " " * len(number) + " " * (one.column - 1 - cut) + "^" * width
        how = f"  (evener lint --fix{' --unsafe-fixes' if one.unsafe else ''})" if one.edits else ""
        yield f"        fix: {one.fix}{how}"
        yield ""


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_bytes().decode(errors="replace").splitlines()
    except OSError:
        return []


def as_json(findings: Iterable[Finding]) -> str:
    """`[{path, line, column, rule, level, message, fixable}]`, the contract of the design."""
    keys = ("path", "line", "column", "rule", "level", "message", "fixable")
    return json.dumps([{key: getattr(one, key) for key in keys} for one in findings], indent=2)


def github(findings: Iterable[Finding]) -> Iterator[str]:
    """Workflow commands: an annotation at every finding."""
    names = {"error": "error", "warning": "warning", "hint": "notice"}
    for one in findings:
        path = os.path.relpath(one.path).replace(os.sep, "/")
        place = (
            f"file={_escape(path, ',:')},line={one.line},col={one.column},title={_escape(f'evener {one.rule}', ',:')}"
        )
        yield f"::{names[one.level]} {place}::{_escape(f'{one.message}; fix: {one.fix}')}"


def _escape(value: str, more: str = "") -> str:
    for char in "%\r\n" + more:
        value = value.replace(char, f"%{ord(char):02X}")
    return value


def summary(report: Report) -> str:
    """`3 errors, 1 warning in 12 files; 2 can be fixed with --fix`"""
    counts = [(sum(one.level == level for one in report.findings), level) for level in LEVELS]
    named = ", ".join(f"{count} {level}{'s' if count != 1 else ''}" for count, level in counts if count)
    files = f"{report.files} file{'s' if report.files != 1 else ''}"
    if not named:
        return f"nothing found in {files}"
    fixable = sum(one.fixable and not one.unsafe for one in report.findings)
    return f"{named} in {files}" + (f"; {fixable} can be fixed with --fix" if fixable else "")
