"""Every rule is its page: its wrong example fires it, its right example fires nothing, its fix does what the page says."""

from __future__ import annotations

import ast

import pytest

from evener.lint import engine, fix, page, rules
from evener.lint.pages import read
from evener.lint.project import Project

PATH = "train.py"
# What the examples leave out: the names that a script would have.
AROUND = "import argparse, contextlib, copy, os, subprocess\nimport torch\nimport torch.nn.functional as F\n"


def checked(code: str, chosen=rules.ALL, path: str = PATH) -> list:
    data = code.encode()
    project = engine.with_file(Project([]), path, data)
    return engine.check_data(project, tuple(chosen), path, data)


def fixed(code: str, chosen, unsafe: bool = True) -> str:
    data = code.encode()
    project = engine.with_file(Project([]), PATH, data)
    return fix.fix_file(PATH, data, project, tuple(chosen), unsafe).after.decode()


def in_script(code: str) -> str:
    """The example as a whole script: with the imports that it takes for granted."""
    return code if "import torch\n" in code else AROUND + code


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_the_wrong_example_fires_the_rule(rule):
    code = in_script(read(rule).bad)
    ast.parse(code)
    found = checked(code, [rule])
    assert found, code
    for one in found:
        assert one.rule == rule.id and one.level == rule.level and one.message and one.fix
        assert one.message[-1] not in ".!"


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda rule: rule.id)
def test_the_right_example_fires_nothing_of_any_rule(rule):
    found = checked(in_script(read(rule).good))
    assert [one for one in found if one.level != "hint" or one.rule == rule.id] == []


FIXABLE = [rule for rule in rules.ALL if any(one.edits for one in checked(in_script(read(rule).bad), [rule]))]


@pytest.mark.parametrize("rule", FIXABLE, ids=lambda rule: rule.id)
def test_the_fix_makes_of_the_wrong_example_what_the_page_says(rule):
    told = read(rule)
    code = in_script(told.bad)
    after = fixed(code, [rule])
    if after.startswith(AROUND):
        after = after.removeprefix(AROUND)
    assert after == told.fixed
    assert checked(in_script(after), [rule]) == []
    assert fixed(after, [rule]) == after, "a second run changes nothing"


def test_there_are_at_least_forty_rules_and_each_has_a_page_of_its_own():
    assert len({rule.id for rule in rules.ALL}) == len(rules.ALL) >= 40
    for rule in rules.ALL:
        text = page(rule.id)
        assert text is not None and rule.id in text and "wrong:" in text and "right:" in text and rule.fix
        assert len(read(rule).title) <= 110 and read(rule).title.endswith(".")
    assert page("no-such-rule") is None


def test_most_rules_of_level_error_can_say_how_they_are_fixed_by_hand():
    assert all(len(rule.fix) > 4 for rule in rules.ALL)
