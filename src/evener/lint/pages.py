"""The rules' docstrings as text for a terminal and as docs/lint.md."""

from __future__ import annotations

import inspect
import textwrap
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from evener.lint import rules
from evener.lint.rule import LEVELS, Rule, read


@cache
def chinese() -> dict[str, dict[str, str]]:
    """zh.toml: the fixed words, and per rule what is wrong and what to write."""
    return tomllib.loads(Path(__file__).with_name("zh.toml").read_text("utf-8"))


def page_of(name: str, language: str = "en") -> str | None:
    rule = next((one for one in rules.ALL if one.id == name), None)
    if rule is None:
        return None
    told = read(rule)
    why, fix = [told.title, *(["", told.why] if told.why else [])], rule.fix
    say = {"theme": "theme", "wrong": "wrong", "right": "right", "fixed": "what --fix makes of it", "fix": "fix"}
    say |= {rule.level: rule.level, "silence": "silence one line"}
    if language == "zh":
        own, say = chinese()[rule.id], chinese()["words"]
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
    intro = (inspect.getdoc(rules) or "").partition("\n\n")[2]
    yield "# The rules of `evener lint`"
    yield ""
    yield "<!-- made from the rules by `python -m evener.lint.pages`; tests/test_lint_docs.py keeps it so -->"
    yield ""
    yield intro
    yield ""
    yield f"{len(rules.ALL)} rules: {counts}. Hints are shown with `--hints` or where they are selected."
    theme = ""
    for rule in rules.ALL:
        if rule.theme != theme:
            theme = rule.theme
            yield from ("", f"## Theme: {theme}", "", *theme_text(rule).splitlines())
        told = read(rule)
        yield from ("", f"### {rule.id}", "", f"*{rule.level}* — {told.title}")
        if told.why:
            yield from ("", *told.why.splitlines())
        yield from ("", "```python", "# wrong", told.bad.rstrip(), "", "# right", told.good.rstrip(), "```")
        if told.fixed != told.good:
            yield from ("", "`--fix` makes of it:", "", "```python", told.fixed.rstrip(), "```")


def theme_text(rule: Rule) -> str:
    module = inspect.getmodule(type(rule))
    return (inspect.getdoc(module) or "") if module else ""


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
