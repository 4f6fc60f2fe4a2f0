"""The command line: what is accepted, what is refused with which words, and what help costs."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

import evener
from evener import cli
from evener.cli.run import main as run_main
from evener.cli.run import parser, split, to_request
from evener.errors import UsageError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def request_of(*argv: str):
    options = parser()
    own, target = split(list(argv), options)
    return to_request(options.parse_args(own), target)


@pytest.mark.parametrize(
    "argv, script, module, args",
    [
        (["train.py"], "train.py", False, ()),
        (["--cpu", "train.py", "--cpu", "--nproc", "3"], "train.py", False, ("--cpu", "--nproc", "3")),
        (["--nproc", "2", "--", "train.py", "--", "-m"], "train.py", False, ("--", "-m")),
        (["--nproc=2", "-m", "pkg.train", "--help"], "pkg.train", True, ("--help",)),
        (["-m", "pkg.train", "--", "x"], "pkg.train", True, ("x",)),
        (["--set", "seed=1", "--tee", "all", "train.py", "x y"], "train.py", False, ("x y",)),
    ],
)
def test_everything_after_the_script_belongs_to_the_script(folder, argv, script, module, args):
    request = request_of(*argv)
    assert (request.script, request.module, request.args) == (script, module, args)
    assert request.nproc == (2 if any(word.startswith("--nproc") for word in argv[:2]) else None)


def test_overrides_are_json_or_words(folder):
    words = ["max_grad_norm=1e-3", "strategy=fsdp", "exact=true", 'precision={"a": [1]}', "dir=", "weights=a=b"]
    given = [item for word in words for item in ("--set", word)]
    expected = {"max_grad_norm": 1e-3, "strategy": "fsdp", "exact": True, "precision": {"a": [1]}, "dir": ""}
    expected["weights"] = "a=b"
    assert request_of(*given, "train.py").overrides == expected


@pytest.mark.parametrize(
    "argv, words",
    [
        (["--nprocs", "2", "train.py"], ["--nprocs is not an option", "fix: --nproc"]),
        (["--nproc-per-node=2", "train.py"], ["fix: --nproc"]),
        (["--lr", "0.1", "train.py"], ["--lr is not an option", "go after the script"]),
        (["--nproc", "two", "train.py"], ["--nproc two is not a number", "--nproc N"]),
        (["--nproc", "gpu", "train.py"], ["one process per GPU is the default"]),
        (["--nproc", "cpu", "train.py"], ["--cpu --nproc N"]),
        (["--gpus", "0", "train.py"], ["--gpus 0 asks for no GPU", "--gpus 0, is GPU 0 alone", "--cpu"]),
        (["--gpus", "a100", "train.py"], ["'a100' is no index and no UUID", "--gpus auto"]),
        (["--gpus", "1,1", "train.py"], ["names a GPU twice"]),
        (["--gpus", "2", "--cpu", "train.py"], ["--cpu hides the GPUs", "leave one of them out"]),
        (["--gpus", "2", "--min-free", "20", "train.py"], ["--min-free 20 is no amount of memory", "20GiB"]),
        (["--wait=soon", "train.py"], ["--wait=soon is no time", "--wait=10min"]),
        (["--wait", "90", "train.py"], ["There is no script 90", "--wait=90"]),
        (["--nproc"], ["--nproc: expected one argument"]),
        (["--tee", "some", "train.py"], ["rank0", "all", "none"]),
        (["--set", "lr", "train.py"], ["--set lr: not KEY=VALUE"]),
        (["--set", "a-b=1", "train.py"], ["not KEY=VALUE"]),
        ([], ["which script?", "-m MODULE"]),
        (["--cpu"], ["which script?"]),
        (["trian.py"], ["There is no script trian.py", "fix: evener run train.py"]),
        (["train"], ["fix: evener run train.py"]),
        (["sub"], ["sub is a folder"]),
        (["nosuch/train.py"], ["no folder nosuch either"]),
        (["sub/train.py"], ["no .py file"]),
        (["pkg.mod"], ["evener run -m pkg.mod"]),
    ],
)
def test_a_mistake_is_one_message_with_the_way_out(folder, capsys, argv, words):
    assert cli.main(["run", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("evener: ")
    for word in words:
        assert word in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["rum"], ["'rum' is not a verb", "fix: evener run"]),
        (["train.py"], ["is a script, not a verb", "evener run train.py"]),
        (["--versoin"], ["evener --version"]),
    ],
)
def test_a_wrong_verb_names_the_right_one(capsys, argv, words):
    assert cli.main(argv) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error


def test_help_and_version(capsys):
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out == f"evener {evener.__version__}\n"
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS) and "evener run train.py" in text
    assert cli.main([]) == 2
    with pytest.raises(SystemExit) as stopped:
        run_main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "--nproc",
        "--cpu",
        "--log-dir",
        "--tee",
        "--set",
        "--dry-run",
        "examples:",
        "evener run --dry-run train.py",
    ):
        assert word in text


def test_every_verb_in_the_help_exists():
    import importlib

    for verb in cli.VERBS:
        assert callable(importlib.import_module(f"evener.cli.{verb}").main)


def test_python_m_evener_is_the_command():
    done = subprocess.run([sys.executable, "-m", "evener", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"evener {evener.__version__}\n"


def cpu_seconds(*words: str) -> float:
    """User and system time of one child."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.skipif("COVERAGE_PROCESS_START" in os.environ, reason="a traced child costs more")
@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]], ids=["help", "run help"])
def test_help_costs_less_than_100_ms_of_cpu(words):
    bare = min(cpu_seconds("-c", "pass") for _ in range(3))
    ours = min(cpu_seconds("-m", "evener", *words) for _ in range(3))
    assert ours < 0.1, f"{ours:.3f} s of CPU, of which a bare interpreter is {bare:.3f} s"


def test_a_usage_error_of_the_parser_is_ours():
    with pytest.raises(UsageError):
        parser().parse_args(["--tee", "x"])
