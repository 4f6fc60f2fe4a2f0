"""`evener lint`: static mistakes of multi-GPU, mixed precision and checkpointing scripts.

Reads with the standard library's `ast`; nothing of the linted code is run or imported. `lint()` is the whole room:
files in, findings out. A rule is a class of `rules/`; its docstring is its page.
"""

from __future__ import annotations

from evener.lint.engine import Options, Report, lint
from evener.lint.rule import Finding


def page(rule: str, language: str = "en") -> str | None:
    """The page of a rule as `evener explain RULE` prints it ("en" or "zh"); None where no rule has this id."""
    from evener.lint.pages import page_of

    return page_of(rule, language)


__all__ = ["Finding", "Options", "Report", "lint", "page"]
