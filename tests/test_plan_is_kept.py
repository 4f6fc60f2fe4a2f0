"""A plan made here is taken up by `evener run` of the same script on the same devices, and that is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from evener.cli.plan import keep
from evener.plan import kept

SCRIPT = """
import sys, torch, evener
model = torch.nn.Linear(4, 2)
rows = torch.zeros(16, 4), torch.zeros(16, dtype=torch.int64)
loss_fn = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
with evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, rows, global_batch_size=8, dir="run",
                resume="never") as run:
    for update in run.updates(updates=1):
        pass
"""


def evener(folder, *words):
    done = subprocess.run(
        [sys.executable, "-m", "evener", *words],
        cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def origin(folder, keyword):
    newest = max(folder.glob("run*/config.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())[keyword]["origin"]


@pytest.mark.skipif(sys.platform != "linux", reason="evener run")
def test_a_plan_is_taken_up_by_the_same_run_and_by_no_other(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    assert "kept for `evener run` on 2 processes on the CPU" in evener(
        tmp_path, "plan", "--cpu", "--nproc", "2", "train.py"
    )
    run = ["run", "--cpu", "--nproc", "2"]
    said = evener(tmp_path, *run, "./train.py")
    assert "strategy=ddp" in said and ": as `evener plan` chose on " in said and origin(tmp_path, "strategy") == "plan"
    for words in (["--plan", "none", "train.py"], ["--set", "seed=1", "train.py"], ["train.py", "--lr=1"]):
        said = evener(tmp_path, *run, "--dry-run", *words)
        assert "evener plan" not in said, words
    assert "evener plan" not in evener(tmp_path, "run", "--cpu", "--dry-run", "train.py")
    (tmp_path / "train.py").write_text(SCRIPT + "# another learning rate\n")
    said = evener(tmp_path, *run, "--dry-run", "train.py")
    assert "is not used: train.py was changed since; `evener plan` makes another" in said


def test_where_a_plan_lies_depends_on_all_that_it_was_made_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for_two = kept.place(["train.py", "--lr", "1"], ["a=1", "b=2"], "cpu", 2)
    assert for_two == kept.place([f"{os.getcwd()}/train.py", "--lr", "1"], ["b=2", "a=1"], "cpu", 2)
    others = [
        kept.place(["train.py", "--lr", "2"], ["a=1", "b=2"], "cpu", 2),
        kept.place(["train.py", "--lr", "1"], [], "cpu", 2),
        kept.place(["train.py", "--lr", "1"], ["a=1", "b=2"], "H100-80GB", 2),
        kept.place(["train.py", "--lr", "1"], ["a=1", "b=2"], "cpu", 4),
    ]
    assert len({for_two, *others}) == 5


def test_a_home_that_cannot_be_written_keeps_nothing(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "file").write_text("")
    assert not keep(tmp_path / "file" / "plans" / "x.json", {})
    assert kept.find(tmp_path / "file" / "plans" / "x.json", str(tmp_path / "train.py")) == ({}, "")


@pytest.mark.parametrize("text", ["torn{", "[]", "{}", '{"made": 0, "script": "x"}'])
def test_what_is_no_plan_of_this_version_stops_no_run(tmp_path, text):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "x.json").write_text(text)
    planned, said = kept.find(tmp_path / "x.json", str(tmp_path / "train.py"))
    assert planned == {} and said.endswith("`evener plan` makes another")
