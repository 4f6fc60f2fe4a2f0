"""A preempted job over a stream: killed on one number of processes, stopped on another, ended where it would have."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "stream_job.py"


def job(folder, *arguments, world, stop_after=None):
    launcher = () if world == 1 else ("-m", "evener", "run", "--nproc", str(world), "--cpu")
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), *arguments], cwd=folder, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if stop_after is not None and line.startswith(stop_after):
                process.send_signal(signal.SIGTERM)
                break
        rest, _ = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, "".join(lines) + rest


def digest(output):
    return re.search(r"digest (\w+)", output)[1]


def main(folder):
    return runpy.run_path(str(SCRIPT))["main"]([folder])


@pytest.mark.parametrize("worlds", [(3, 1), pytest.param((1, 3, 1), marks=pytest.mark.full)])
def test_killed_then_preempted_the_digest_is_that_of_an_uninterrupted_run(ranks, tmp_path, worlds):
    whole = ranks(1)(main, str(tmp_path / "whole"))[0]
    code, output = job(tmp_path, "runs/job", "--die-at", "10", world=worlds[0])
    assert code != 0 and "update 9 of epoch 1" in output and "update 12" not in output, output
    code, output = job(tmp_path, "runs/job", "--stop-at", "17", world=worlds[1], stop_after="update 17 ")
    assert code == 75 and "continues runs/job after 8 updates" in output, output
    assert "update 8 of epoch 1" in output and "read 72 rows again" not in output
    if len(worlds) == 2:  # launching ranks is most of this test's time: the pool's go on
        assert ranks(3)(main, str(tmp_path / "runs/job")) == [whole] * 3
        return
    code, output = job(tmp_path, "runs/job", world=worlds[2])
    assert code == 0 and re.search(r"continues runs/job after (18|19) updates", output), output
    assert digest(output) == whole
