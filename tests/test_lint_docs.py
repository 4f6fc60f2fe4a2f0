"""docs/lint.md is what the rules say, and the pre-commit hook is what the command takes."""

from __future__ import annotations

from pathlib import Path

from evener.lint.pages import document

ROOT = Path(__file__).parents[1]


def test_docs_lint_is_made_from_the_rules():
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert text == document(), "make it again: python -m evener.lint.pages > docs/lint.md"


def test_the_pre_commit_hooks_call_the_linter():
    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert text.count("entry: evener lint") == 2 and "types: [python]" in text and "require_serial: true" in text
