"""The run directory: never one run in another's, one clear error at the start, no error later."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys

import pytest

from evener.errors import EvenerError, UsageError
from evener.report.events import read_events
from evener.report.folder import RunFolder, script_name, write_json


def test_a_given_directory_is_made_with_its_parents(tmp_path):
    folder = RunFolder(tmp_path / "a" / "b")
    folder.write_config({"seed": {"value": 0, "origin": "default"}})
    folder.event("stop", update=2, reason="x")
    folder.close()
    folder.close()
    assert folder.path == tmp_path / "a" / "b"
    assert json.loads((folder.path / "config.json").read_text()) == {"seed": {"value": 0, "origin": "default"}}
    assert [event["kind"] for event in read_events(folder.path / "events.jsonl")] == ["stop"]
    assert sorted(file.name for file in folder.path.iterdir()) == [".lock", "config.json", "events.jsonl"]
    assert folder.failures == {}


def test_a_directory_without_events_is_used_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    said: list[str] = []
    assert RunFolder(tmp_path / "run", say=said.append).path == tmp_path / "run"
    assert said == []


def test_a_second_run_goes_beside_the_first_and_says_so(tmp_path):
    said: list[str] = []
    paths = [RunFolder(tmp_path / "digits", say=said.append).path for _ in range(3)]
    assert paths == [tmp_path / "digits", tmp_path / "digits-2", tmp_path / "digits-3"]
    assert said == [f"{paths[0]} holds an earlier run: this one goes to {path}" for path in paths[1:]]


def test_without_a_directory_each_run_has_a_fresh_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/train.py", "--x"])
    said: list[str] = []
    assert str(RunFolder(None, say=said.append).path) == "runs/train"
    (tmp_path / "runs" / "train-2").mkdir()  # somebody's, without events: still not ours
    (tmp_path / "runs" / "train-3").write_text("a file")
    assert str(RunFolder(None, say=said.append).path) == "runs/train-4"
    assert said == []


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("train.py", "train"),
        ("/x/my.train.py", "my.train"),
        ("train", "train"),
        ("", "run"),
        ("-c", "run"),
        ("/x/pkg/__main__.py", "pkg"),
        ("/lib/ipykernel_launcher.py", "notebook"),
    ],
)
def test_script_names(argument, name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [argument])
    assert script_name() == name


def test_dots_and_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert RunFolder(".").path == tmp_path / "here"
    assert RunFolder(".").path == tmp_path / "here-2"
    assert RunFolder("~/x").path == tmp_path / "x"
    monkeypatch.undo()
    with pytest.raises(UsageError, match="is the root of the file system"):
        RunFolder("/")


def test_other_ranks_write_nothing(tmp_path):
    folder = RunFolder(tmp_path / "run", active=False)
    folder.write_config({})
    folder.event("stop", reason="x")
    folder.close()
    assert folder.path is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(UsageError, match="is a file"):
        RunFolder(tmp_path / "run")
    with pytest.raises(EvenerError) as caught:
        RunFolder(tmp_path / "run" / "below")
    assert str(caught.value).splitlines()[0] == f"The run directory {tmp_path / 'run' / 'below'} cannot be written."
    assert "Not a directory" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "free some space, or give dir= on another disk"),
        (errno.EACCES, "give dir= a directory that you may write to"),
        (errno.EROFS, "give dir= a directory that you may write to"),
    ],
)
def test_a_disk_that_refuses_at_the_start_is_one_clear_error(tmp_path, monkeypatch, number, fix):
    folder = RunFolder(tmp_path / "run")

    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(EvenerError) as caught:
        folder.write_config({})
    assert str(caught.value) == (
        f"The run directory {tmp_path / 'run'} cannot be written.\n  {os.strerror(number)}\n  fix: {fix}"
    )
    assert [file.name for file in folder.path.iterdir()] == [".lock", "events.jsonl"]  # no half-written file is left


def test_config_json_is_replaced_whole(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "x.json", {"a": object()})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}
    write_json(tmp_path / "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_disk_that_fills_up_later_is_said_once_and_counted(tmp_path, monkeypatch):
    said: list[str] = []
    folder = RunFolder(tmp_path / "run", say=said.append)
    real, full = os.write, True

    def write(descriptor: int, data: bytes) -> int:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    for number in range(3):
        folder.event("stop", update=number, reason="x")
    full = False
    folder.event("stop", update=3, reason="x")
    assert folder.failures == {"events.jsonl": 3}
    folder.close()
    assert said == [
        "warning: events.jsonl could not be written (No space left on device); the training goes on without it",
        "warning: events.jsonl could not be written 3 times",
    ]
    assert [event["update"] for event in read_events(tmp_path / "run" / "events.jsonl")] == [3]


def test_a_mistake_in_an_event_is_not_swallowed(tmp_path):
    with pytest.raises(ValueError, match="missing"):
        RunFolder(tmp_path / "run").event("stop")


def test_runs_started_together_get_a_directory_each(tmp_path):
    code = f"from evener.report.folder import RunFolder; x = RunFolder({str(tmp_path / 'run')!r}); print(x.path, flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    runs = [subprocess.Popen([sys.executable, "-c", code], **pipes) for _ in range(4)]
    paths = [run.stdout.readline().strip() for run in runs]  # all of them live
    for run in runs:
        run.communicate("\n")
    assert sorted(paths) == [str(tmp_path / name) for name in ("run", "run-2", "run-3", "run-4")]


def test_what_a_killed_start_left_is_taken(tmp_path):
    """Nobody holds its lock, and no event was written: there is nothing to keep."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "events.jsonl").touch()
    first = RunFolder(tmp_path / "run")
    assert first.path == tmp_path / "run"
    second = RunFolder(tmp_path / "run")  # held, although still empty
    assert second.path == tmp_path / "run-2"
    first.event("start", world_size=1, versions={})
    first.close()
    third = RunFolder(tmp_path / "run")
    assert third.path == tmp_path / "run-3"
    second.close()
    third.close()
