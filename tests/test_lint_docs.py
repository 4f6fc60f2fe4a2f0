"""docs/lint.md is what the rules say, and the pre-commit hook is what the command takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from evener.lint import page, rules
from evener.lint.pages import document, texts

ROOT = Path(__file__).parents[1]


def test_docs_lint_is_made_from_the_rules():
    text = (ROOT / "docs" / "lint.md").read_text(encoding="utf-8")
    assert text == document(), "make it again: python -m evener.lint.pages > docs/lint.md"


def test_every_rule_has_its_chinese_text_and_nothing_else_has():
    assert list(texts("zh")) == ["words", *(rule.id for rule in rules.ALL)], "in the order of the rules"
    assert list(texts("en")) == ["intro", *texts("zh")] and texts("en")["words"].keys() == texts("zh")["words"].keys()
    for rule in rules.ALL:
        told = texts("zh")[rule.id]
        assert set(told) == {"wrong", "fix"}
        for text in told.values():
            assert re.search(r"[\u4e00-\u9fff]", text) and text.endswith("。") and "  " not in text, text
            assert not re.search(r"[\u4e00-\u9fff][,;:?!]", text), f"punctuation of another language: {text}"


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_the_chinese_page_has_the_same_code(rule):
    english, text = page(rule.id), page(rule.id, "zh")
    code = [line for line in english.splitlines() if line.startswith("    ")]
    assert [line for line in text.splitlines() if line.startswith("    ")] == code
    told = texts("zh")[rule.id]
    assert told["wrong"] in text and f"改法: {told['fix']}" in text and "wrong:" not in text and "fix:" not in text


def test_the_pre_commit_hooks_call_the_linter():
    text = (ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")
    assert text.count("entry: evener lint") == 2 and "types: [python]" in text and "require_serial: true" in text
