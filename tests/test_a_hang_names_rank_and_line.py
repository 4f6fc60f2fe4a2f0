"""When ranks wait in vain, the rank that did not come is named with its line and state, not the one that timed out."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import datetime, os, signal, socket, sys, time
import torch
import torch.distributed as dist

def load_batch(how):
    if how == "python":
        time.sleep(100)  # the line
    elif how == "busy":
        while True: pass  # the line
    elif how == "native":
        pair = socket.socketpair(); pair[0].recv(1)  # the line
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # the line

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
for batch in range(4):
    if dist.get_rank() == 1 and batch == 3:
        load_batch(sys.argv[1])
    dist.all_reduce(torch.ones(1))
"""


def run(tmp_path, script, *args, nproc=3):
    (tmp_path / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "evener", "run", "--nproc", str(nproc), "--cpu", "train.py", *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="real-time signals and /proc")
@pytest.mark.parametrize(
    "how", [pytest.param("python", marks=pytest.mark.full), "stopped", pytest.param("native", marks=pytest.mark.full), pytest.param("busy", marks=pytest.mark.full)]
)  # fmt: skip
def test_the_rank_that_did_not_come(tmp_path, how):
    done = run(tmp_path, SCRIPT, how)
    assert done.returncode == 1
    text = done.stderr[done.stderr.index("evener: rank") :]
    lines = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# the line" in line]
    line = dict(zip(["python", "busy", "native", "stopped"], lines))[how]
    assert text.startswith("evener: rank 1 did not come, and the others waited for it until their time was over"), text
    assert f"rank 1 was at train.py:{line} in load_batch: " in text, text
    assert "it was waited for at train.py:20: dist.all_reduce(torch.ones(1))" in text, text
    assert ("it was stopped (SIGSTOP, Ctrl-Z or a debugger)" in text) == (how == "stopped")
    assert "rank 0" in text and "rank 2" in text


def test_a_rank_that_raises_is_still_the_cause(tmp_path):
    """The others are asked for their stacks too, and are waiting as they should."""
    script = SCRIPT.replace("time.sleep(100)  # the line", 'raise KeyError("label")')
    done = run(tmp_path, script, "python", nproc=2)
    assert "evener: rank 1 failed: KeyError: 'label'" in done.stderr, done.stderr
    assert "did not come" not in done.stderr
