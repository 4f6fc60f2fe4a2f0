"""`evener lint` on the command line: output, exit codes, silence, settings, and one clear error per mistake."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from evener.cli import main

BAD = "import torch\n\nmodel = f()\nfrom torch._six import inf  # gone\nvalue = torch.cuda.amp.autocast()\n"


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(BAD)
    return path


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["lint", *words])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_text_shows_the_line_an_arrow_why_and_the_fix(script, capsys):
    code, out, _ = run(capsys, "train.py")
    assert code == 1
    assert out == (
        "train.py:4:1: error [removed-import] torch._six.inf no longer exists\n"
        "    4 | from torch._six import inf  # gone\n"
        "        ^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "        fix: use torch.inf  (evener lint --fix)\n"
        "\n"
        "train.py:5:9: warning [cuda-amp-deprecated] torch.cuda.amp.autocast is deprecated\n"
        "    5 | value = torch.cuda.amp.autocast()\n"
        "                ^^^^^^^^^^^^^^^^^^^^^^^\n"
        '        fix: torch.amp.autocast("cuda", ...), torch.amp.GradScaler("cuda", ...)  (evener lint --fix)\n'
        "\n"
        "1 error, 1 warning in 1 file; 2 can be fixed with --fix\n"
    )


def test_json_is_the_contract_of_the_design(script, capsys):
    code, out, _ = run(capsys, "--format", "json", "train.py")
    rows = json.loads(out)
    assert (
        code == 1
        and [list(row) for row in rows] == [["path", "line", "column", "rule", "level", "message", "fixable"]] * 2
    )
    assert rows[0] == {
        "path": "train.py", "line": 4, "column": 1, "rule": "removed-import", "level": "error",
        "message": "torch._six.inf no longer exists", "fixable": True,
    }  # fmt: skip
    assert run(capsys, "--json", "train.py")[1] == out


def test_github_annotations(script, capsys):
    _, out, err = run(capsys, "--format", "github", "train.py")
    assert out.splitlines()[0].startswith(
        "::error file=train.py,line=4,col=1,title=evener removed-import::torch._six.inf no longer"
    )
    assert out.splitlines()[1].startswith("::warning file=train.py,line=5,") and "1 error, 1 warning" in err


def test_exit_codes(script, capsys):
    assert run(capsys, "--select", "warning", "train.py")[0] == 0
    assert run(capsys, "--select", "warning", "--warnings-as-errors", "train.py")[0] == 1
    assert run(capsys, "--ignore", "migrate", "train.py")[:2] == (0, "nothing found in 1 file\n")


@pytest.mark.parametrize(
    "comment, left",
    [
        ("  # evener: ignore[removed-import]", ["cuda-amp-deprecated"]),
        ("  # evener: ignore", ["cuda-amp-deprecated"]),
        ("  # evener: ignore[cuda-amp-deprecated]", ["removed-import", "cuda-amp-deprecated"]),
        ("  # evener: ignore-file[removed-import, cuda-amp-deprecated]", []),
        ('; text = "# evener: ignore[removed-import]"', ["removed-import", "cuda-amp-deprecated"]),
    ],
)
def test_a_comment_silences_its_line(script, capsys, comment, left):
    script.write_text(BAD.replace("  # gone", comment))
    _, out, _ = run(capsys, "--json", "train.py")
    assert [row["rule"] for row in json.loads(out)] == left


def test_a_comment_alone_on_its_line_silences_the_next(script, capsys):
    script.write_text(BAD.replace("from", "# evener: ignore[removed-import]\nfrom"))
    assert [row["rule"] for row in json.loads(run(capsys, "--json", "train.py")[1])] == ["cuda-amp-deprecated"]


def test_pyproject_settings(script, capsys):
    (script.parent / "pyproject.toml").write_text(
        '[tool.evener.lint]\nignore = ["removed-import"]\nexclude = ["other"]\nwarnings-as-errors = true\n'
    )
    (script.parent / "other").mkdir()
    (script.parent / "other" / "a.py").write_text(BAD)
    code, out, _ = run(capsys, "--json", ".")
    assert code == 1 and [(row["path"], row["rule"]) for row in json.loads(out)] == [
        ("train.py", "cuda-amp-deprecated")
    ]


@pytest.mark.parametrize(
    "words, said",
    [
        ([], "which files?"),
        (["nowhere.py"], "There is no file or folder nowhere.py."),
        (["--select", "removed-imports", "train.py"], "fix: removed-import\n"),
        (["--ignore", "everything", "train.py"], "'everything' is no rule, theme or level"),
        (["--unsafe-fixes", "train.py"], "--fix --unsafe-fixes, or --diff"),
        (["--format", "xml", "train.py"], "invalid choice: 'xml'"),
        (["--frobnicate", "train.py"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_mistake_in_the_call_is_one_clear_error(script, capsys, words, said):
    code, out, err = run(capsys, *words)
    assert code == 2 and said in err and out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    "text, said",
    [
        ("[tool.evener.lint]\nselects = []\n", "has no key 'selects'"),
        ("[tool.evener.lint]\nselect = 'amp'\n", "select is a list of words"),
        ("[tool.evener.lint]\nselect = ['amd']\n", "'amd' is no rule"),
        ("[tool.evener.lint\n", "is no valid TOML"),
    ],
)
def test_a_mistake_in_pyproject_is_one_clear_error(script, capsys, text, said):
    (script.parent / "pyproject.toml").write_text(text)
    code, _, err = run(capsys, "train.py")
    assert code == 2 and said in err


def test_the_section_of_the_linter_is_no_keyword_of_a_run(script):
    from evener.config import ConfigFile

    project = script.parent / "pyproject.toml"
    project.write_text("[tool.evener.lint]\nhints = true\n")
    assert ConfigFile.find(script.parent) is None
    project.write_text("[tool.evener]\nseed = 3\n[tool.evener.lint]\nhints = true\n")
    assert dict(ConfigFile.find(script.parent).keywords) == {"seed": 3}


def test_diff_changes_nothing_and_fix_does(script, capsys):
    code, out, _ = run(capsys, "--diff", "train.py")
    assert code == 1 and script.read_text() == BAD
    assert "-from torch._six import inf  # gone\n" in out and "+from torch import inf  # gone\n" in out
    script.chmod(0o750)
    code, out, _ = run(capsys, "--fix", "train.py")
    assert code == 0 and "fixed train.py:4 [removed-import]" in out and "nothing found" in out
    assert script.read_text() == BAD.replace("torch._six", "torch").replace(
        "cuda.amp.autocast()", 'amp.autocast("cuda")'
    )
    assert script.stat().st_mode & 0o777 == 0o750
    assert run(capsys, "--diff", "train.py")[:2] == (0, "")
    assert [one.name for one in script.parent.iterdir()] == ["train.py"], "no file is left behind"


def test_rules_are_listed_and_hints_are_off_until_asked_for(script, capsys):
    from evener.lint import rules

    _, out, _ = run(capsys, "--rules")
    assert len(out.splitlines()) == len(rules.ALL) and "sync-every-step" in out
    script.write_text("import torch\nmodel = torch.nn.DataParallel(net)\n")
    assert "nothing found" in run(capsys, "train.py")[1]
    for words in (["--hints"], ["--select", "dataparallel"], ["--select", "hint"]):
        assert "hint [dataparallel]" in run(capsys, *words, "train.py")[1]


def cpu_seconds(*words: str) -> float:
    import resource

    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "evener", "lint", *words], capture_output=True, check=False, timeout=300)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_one_file_costs_a_fraction_of_a_second_of_cpu(script):
    """The goal is 150 ms (measured: docs/measurements.md); a shared machine gets twice that."""
    script.write_text(
        BAD + "\n".join(f"def f{i}(x):\n    return torch.nn.functional.relu(x) * {i}\n" for i in range(100))
    )
    assert min(cpu_seconds("train.py") for _ in range(3)) < 0.3


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_a_thousand_files_take_less_than_twenty_seconds_on_two_cores(tmp_path):
    """Every rule's wrong example, in files of about 300 lines."""
    from evener.lint import rules
    from evener.lint.pages import read

    examples = [read(rule).bad for rule in rules.ALL]
    for i in range(1000):
        parts = []
        for k in range(45):
            body = examples[(i * 7 + k) % len(examples)].replace("\n", "\n    ")
            parts.append(f"def part_{k}(model, net, loader, args, x, y):\n    {body}\n")
        (tmp_path / f"module_{i}.py").write_text("import torch, os, argparse\n\n" + "\n".join(parts))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "evener", "lint", "--json", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=False, timeout=1700)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < 40, "two cores for 20 s, however loaded they are (docs/measurements.md has the time on a clock)"
