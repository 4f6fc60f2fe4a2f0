"""What a crash cost is counted: updates made twice, seconds lost, goodput; a stop that was asked for costs nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from evener.report.events import read_events
from evener.report.goodput import Goodput, goodput, newest_update


def at(kind, t, **fields):
    return {"kind": kind, "t": t, **fields}


def test_the_time_since_the_checkpoint_is_lost():
    events = [
        at("start", 100.0),
        at("update", 110.0, update=0),
        at("checkpoint", 151.0, path="run/checkpoints/update-40", seconds=1.0),
        at("update", 160.0, update=49),
        at("start", 170.0),
        at("resume", 172.0, checkpoint="update-40", redone_updates=10),
        at("update", 175.0, update=40),
        at("finish", 200.0),
    ]
    cost = goodput(events)
    assert cost == Goodput(restarts=1, redone_updates=10, lost_seconds=25.0, wall_seconds=100.0)
    assert str(cost) == "redid 10 updates, 25.0 s lost in 1 restart; goodput 75 %"


def test_a_pause_after_a_stop_is_no_loss():
    events = [
        at("start", 0.0),
        at("update", 10.0, update=0),
        at("checkpoint", 20.0, path="x/update-5", seconds=0.5),
        at("stop", 20.0),
        at("update", 20.1, update=5),  # the last point lands a moment later
        at("start", 1000.0),
        at("contract", 1000.5),
        at("resume", 1001.0, checkpoint="update-5", redone_updates=0),
        at("update", 1002.0, update=5),
        at("finish", 1020.0),
    ]
    assert goodput(events) == Goodput(restarts=0, redone_updates=0, lost_seconds=0.0, wall_seconds=40.0)


def test_torn_lines_and_nothing_at_all_are_survived(tmp_path):
    assert goodput([]) is None and newest_update(tmp_path) is None
    (tmp_path / "events.jsonl").write_text('{"t": 1.0, "kind": "update", "update": 7, "rank": 0}\n{"t": 2.0, "ki')
    (tmp_path / "pulse-rank1.json").write_text('{"upda')
    assert newest_update(tmp_path) == 7
    (tmp_path / "pulse-rank0.json").write_text('{"update": 9}')
    assert newest_update(tmp_path) == 9
    assert goodput(read_events(tmp_path / "events.jsonl")) is None


SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
import torch, evener
from tests.models import make, mlp_rows, row_loss
model = make("mlp")
run = evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.01), row_loss, mlp_rows(36), global_batch_size=6,
                 save_every=4, dir="run")
for update in run.updates(updates=16):
    time.sleep(0.11)
    if update.number == 9 and len(sys.argv) > 1:
        while not os.path.isdir("run/checkpoints/update-8"):
            time.sleep(0.1)  # checkpoints are written behind the training
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_run_says_at_its_end_what_was_made_twice(tmp_path):
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=root))
    command = [sys.executable, "train.py"]
    killed = subprocess.run([*command, "kill"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -9
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    events = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    (resume,) = [event for event in events if event["kind"] == "resume"]
    assert resume["checkpoint"] == "update-8" and resume["redone_updates"] in (1, 2)  # seen once in 0.1 s
    assert re.search(r"continues .*run after 8 updates \((9|10) were made\)", done.stdout), done.stdout
    last = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"finished: redid [12] updates?, \d+\.\d s lost in 1 restart; goodput \d+ %", last), last
