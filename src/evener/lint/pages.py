"""The rules' docstrings as text for a terminal and as docs/lint.md."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

from evener.lint import rules
from evener.lint.rule import LEVELS, Rule, read


def page_of(name: str) -> str | None:
    rule = next((one for one in rules.ALL if one.id == name), None)
    if rule is None:
        return None
    told = read(rule)
    lines = [f"{rule.id}  ({rule.level}, theme {rule.theme})", "", told.title, *(["", told.why] if told.why else [])]
    lines += ["", "wrong:", textwrap.indent(told.bad, "    ").rstrip()]
    lines += ["", "right:", textwrap.indent(told.good, "    ").rstrip()]
    if told.fixed != told.good:
        lines += ["", "what --fix makes of it:", textwrap.indent(told.fixed, "    ").rstrip()]
    lines += ["", f"fix: {rule.fix}", f"silence one line: # evener: ignore[{rule.id}]"]
    return "\n".join(lines) + "\n"


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
