"""The pages of the rules, from en.toml and zh.toml: as text for a terminal, and as docs/lint.md."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from evener.lint import rules
from evener.lint.rule import LEVELS, Rule


@cache
def texts(language: str) -> dict[str, Any]:
    """The fixed words, and per rule what its page says."""
    return tomllib.loads(Path(__file__).with_name(f"{language}.toml").read_text("utf-8"))


@dataclass(frozen=True)
class Page:
    title: str
    why: str
    bad: str
    good: str
    fixed: str  # what `--fix` makes of `bad`; equal to `good` where the page says nothing else


def read(rule: Rule) -> Page:
    told = texts("en")[rule.id]
    rows = told["change"].splitlines()  # a mark, a space, the line
    bad, good = ("".join(f"{row[2:]}\n" for row in rows if row[:1] != other) for other in "+-")
    return Page(told["title"], told.get("why", ""), bad, good, told.get("fixed", good))


def page_of(name: str, language: str = "en") -> str | None:
    rule = next((one for one in rules.ALL if one.id == name), None)
    if rule is None:
        return None
    told, say = read(rule), texts(language)["words"]
    why, fix = [told.title, *(["", told.why] if told.why else [])], rule.fix
    if language == "zh":
        own = texts(language)[rule.id]
        why, fix = [own["wrong"]], own["fix"]
    lines = [f"{rule.id}  ({say[rule.level]}, {say['theme']} {rule.theme})", "", *why]
    blocks = {"wrong": told.bad, "right": told.good} | ({"fixed": told.fixed} if told.fixed != told.good else {})
    for word, code in blocks.items():
        lines += ["", f"{say[word]}:", textwrap.indent(code, "    ").rstrip()]
    return "\n".join([*lines, "", f"{say['fix']}: {fix}", f"{say['silence']}: # evener: ignore[{rule.id}]"]) + "\n"


def document() -> str:
    """docs/lint.md."""
    return "\n".join(_document()) + "\n"


def _document() -> Iterator[str]:
    counts = ", ".join(f"{sum(rule.level == level for rule in rules.ALL)} {level}s" for level in LEVELS)
    made = "<!-- made from the rules by `python -m evener.lint.pages`; tests/test_lint_docs.py keeps it so -->"
    yield from ("# The rules of `evener lint`", "", made, "", texts("en")["intro"], "")
    yield f"{len(rules.ALL)} rules: {counts}. Hints are shown with `--hints` or where they are selected."
    theme = ""
    for rule in rules.ALL:
        if rule.theme != theme:
            theme = rule.theme
            yield from ("", f"## Theme: {theme}", "", sys.modules[rule.check.__module__].__doc__ or "")
        told = read(rule)
        yield from ("", f"### {rule.id}", "", f"*{rule.level}* — {told.title}")
        if told.why:
            yield from ("", told.why)
        yield from ("", "```python", "# wrong", told.bad.rstrip(), "", "# right", told.good.rstrip(), "```")
        if told.fixed != told.good:
            yield from ("", "`--fix` makes of it:", "", "```python", told.fixed.rstrip(), "```")


if __name__ == "__main__":
    sys.stdout.write(document())
