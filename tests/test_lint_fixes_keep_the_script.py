"""`--fix` edits spans: comments and layout stay, imports come once, a fix that does not settle its finding is undone."""

from __future__ import annotations

import random

import pytest

from evener.lint import engine, fix, rules
from evener.lint.edits import Edit, replace
from evener.lint.pages import read
from evener.lint.project import Project
from evener.lint.rule import Finding, hit
from evener.lint.rule import rule as made
from tests.test_lint_rules import FIXABLE, checked, fixed, in_script

BY_ID = {rule.id: rule for rule in rules.ALL}


def one(name: str):
    return [BY_ID[name]]


SCRIPT = '''#!/usr/bin/env python
# Copyright someone
"""What the script does."""
from __future__ import annotations

import argparse
import torch   # the framework

parser = argparse.ArgumentParser()
parser.add_argument(
    "--local_rank",  # by the launcher
    type=int, default=-1,
)
parser.add_argument("--local_rank2", type=int)
args = parser.parse_args()
scaler = torch.amp.GradScaler("cuda")
for x, y in loader:
\tscaler.scale(f(model(x), y)).backward()   # scaled
\ttorch.nn.utils.clip_grad_norm_(  # clipped
\t\tmodel.parameters(), 1.0
\t)
\tscaler.step(optimizer); scaler.update()
print("ü", args.local_rank)
'''


def test_comments_tabs_and_layout_stay_and_the_import_comes_once():
    after = fixed(SCRIPT, rules.ALL)
    expected = SCRIPT.replace('    "--local_rank",  #', '    "--local-rank", "--local_rank",  #')
    expected = expected.replace("default=-1,", 'default=int(os.environ.get("LOCAL_RANK", -1)),')
    expected = expected.replace("import annotations\n", "import annotations\nimport os\n")
    expected = expected.replace("\ttorch.nn.utils.clip", "\tscaler.unscale_(optimizer)\n\ttorch.nn.utils.clip")
    assert after == expected
    assert fixed(after, rules.ALL) == after


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_and_encodings_stay(ending):
    code = '# -*- coding: latin-1 -*-\nimport torch\ntext = "é"\nstate = torch.utils.checkpoint.checkpoint(f, x)\n'
    data = code.replace("\n", ending).encode("latin-1")
    project = engine.with_file(Project([]), "a.py", data)
    done = fix.fix_file("a.py", data, project, tuple(one("checkpoint-use-reentrant")), unsafe=False)
    assert done.after == data.replace(b"f, x)", b"f, x, use_reentrant=False)")


def test_an_import_is_not_added_twice_and_goes_above_the_first_use():
    code = "import os\nimport torch, argparse\np = argparse.ArgumentParser()\np.add_argument('--local_rank', type=int)\nprint(p.parse_args().local_rank)\n"
    after = fixed(code, one("local-rank-flag"))
    assert after.count("import os") == 1
    without = fixed(code.replace("import os\n", ""), one("local-rank-flag"))
    assert without.startswith("import os\nimport torch")
    marked = "#!/usr/bin/python\n# coding: utf-8\n" + code.replace("import os\n", "")
    assert fixed(marked, one("local-rank-flag")).startswith(
        "#!/usr/bin/python\n# coding: utf-8\nimport os\nimport torch"
    )


@pytest.mark.parametrize(
    "call, expected",
    [
        ("cp(f, x)", "cp(f, x, use_reentrant=False)"),
        ("cp(f, x,)", "cp(f, x, use_reentrant=False,)"),
        ("cp(f, *xs)", "cp(f, *xs, use_reentrant=False)"),
        ("cp(f, (x))", "cp(f, (x), use_reentrant=False)"),
        ("cp(\n    f,  # a, b\n    x,  # (c\n)", "cp(\n    f,  # a, b\n    x, use_reentrant=False,  # (c\n)"),
        ("cp(f, **more)", "cp(f, **more)"),
    ],
)
def test_an_argument_is_added_where_it_belongs(call, expected):
    head = "from torch.utils.checkpoint import checkpoint as cp\ny = "
    assert fixed(f"{head}{call}\n", one("checkpoint-use-reentrant")) == f"{head}{expected}\n"


@pytest.mark.parametrize(
    "call, expected",
    [
        ("StepLR(o, 3, verbose=True)", "StepLR(o, 3)"),
        ("StepLR(o, verbose=True, step_size=3)", "StepLR(o, step_size=3)"),
        ("StepLR(verbose=True)", "StepLR()"),
    ],
)
def test_an_argument_is_taken_out_with_its_comma(call, expected):
    head = "from torch.optim.lr_scheduler import StepLR\ns = "
    assert fixed(f"{head}{call}\n", one("removed-api")) == f"{head}{expected}\n"


def test_unsafe_fixes_need_their_flag():
    code = in_script(read(BY_ID["barrier-every-step"]).bad)
    assert fixed(code, one("barrier-every-step"), unsafe=False) == code
    assert fixed(code, one("barrier-every-step"), unsafe=True) != code


@pytest.mark.parametrize("text", ["import torch as x", "x = ("])
def test_a_fix_that_does_not_silence_its_rule_or_does_not_parse_is_undone(text):
    @made("error", "no")
    def stubborn(file):
        return (hit(stmt, "still there", replace(file, stmt, text)) for stmt in file.tree.body)

    data = b"import torch\n"
    done = fix.fix_file("a.py", data, engine.with_file(Project([]), "a.py", data), (stubborn,), unsafe=False)
    assert done.after == data and done.fixed == () and done.refused


def test_overlapping_edits_are_not_made_together():
    def finding(*edits):
        return Finding("a.py", 1, 1, "r", "error", str(edits), "f", tuple(Edit(*edit) for edit in edits))

    first, inside, shared = finding((0, 5, "a")), finding((3, 8, "b")), finding((0, 5, "a"), (9, 9, "c"))
    assert fix._compatible([first, inside]) == [first]
    assert fix._compatible([first, shared]) == [first, shared], "an equal edit may be shared"
    assert fix._compatible([finding((4, 4, "x")), finding((4, 4, "y"))]) == [finding((4, 4, "x"))]


def test_fixes_of_many_rules_in_one_file_come_to_rest(test_seed):
    """Wrong examples in random order, one after the other in functions of one file."""
    drawn = random.Random(test_seed).sample(FIXABLE, 12)
    parts = []
    for i, rule in enumerate(drawn):
        body = "".join(
            f"    {line}\n" if line else "\n"
            for line in read(rule).bad.splitlines()
            if not line.startswith(("import", "from"))
        )
        parts.append(f"def part_{i}(model, optimizer, net, loader, args, x, y):\n    pass\n{body}")
    code = in_script("\n\n".join(parts))
    after = fixed(code, rules.ALL)
    compile(after, "a.py", "exec")
    assert fixed(after, rules.ALL) == after
    left = {finding.rule for finding in checked(after) if finding.edits}
    assert not left, left
