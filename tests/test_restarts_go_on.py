"""`evener run --restarts N`: every restart works, goes on from the newest checkpoint, and never starts a run over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.errors import LaunchError
from evener.launch.restart import Attempt, seconds_to_wait
from evener.launch.supervise import Ending

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = """
import os, random, signal, sys, time
sys.path.insert(0, {root!r})
import torch, evener
from tests.models import make, mlp_rows, row_loss

attempt, kills, skew = len(os.listdir("attempts")), int(sys.argv[1]), float(sys.argv[2])
rank = int(os.environ["RANK"])
time.sleep(random.Random(attempt * 31 + rank).random() * skew)

def train(dir, updates, harm):
    model = make("mlp")
    run = evener.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), row_loss, mlp_rows(48), global_batch_size=6,
                     exact=True, slice_size=2, precision="fp32", save_every=2, dir=dir)
    for update in run.updates(updates=updates):
        if harm and attempt < kills and update.number >= 3 * attempt + 1:
            if rank == 0:
                open(f"attempts/{{attempt}}", "w").close()
            if rank == attempt % run.world_size:
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
    digest = run.digest()
    run.close()
    return digest

first = train("runs/first", 4, False)
second = train("runs/second", int(sys.argv[3]), True)
if rank == 0:
    print("DIGESTS", first, second, flush=True)
"""


def run(tmp_path, *words, args=(), script=None, **keywords):
    (tmp_path / "attempts").mkdir(exist_ok=True)
    (tmp_path / "train.py").write_text(script or TRAIN.format(root=ROOT))
    return subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", *words, "train.py", *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=3000, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, **keywords,
    )  # fmt: skip


def digests(text):
    return [line.split()[1:] for line in text.splitlines() if line.startswith("DIGESTS")]


def events(folder: Path):
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


def check_restarts(tmp_path, kills, skew, nproc):
    updates = str(3 * kills + 4)
    (tmp_path / "calm").mkdir()
    calm = run(tmp_path / "calm", "--nproc", "1", args=("0", "0", updates))
    assert calm.returncode == 0, calm.stderr
    done = run(tmp_path, "--nproc", str(nproc), "--restarts", str(kills), args=(str(kills), str(skew), updates))
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests(done.stdout) == digests(calm.stdout)
    assert f"restart {kills} of {kills} in " in done.stderr
    # Neither the run that was finished nor the one that crashed was begun anew.
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "logs", "second"]
    assert sum(event["kind"] == "update" and event["update"] == 0 for event in events(tmp_path / "runs" / "first")) == 1
    # Every failure that was seen is the kill: no restart failed to bring its ranks together.
    assert done.stderr.count("was killed by SIGKILL") >= kills, done.stderr
    assert "connectFullMesh" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="evener run with kills")
def test_killed_twice_and_restarted(tmp_path):
    check_restarts(tmp_path, 2, 0.5, 2)


MEETS = """
import os, random, signal, sys, time
rank, attempt = int(os.environ["RANK"]), sum(name.endswith("-0") for name in os.listdir("attempts"))
time.sleep(random.Random(attempt * 31 + rank).random())
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [2.0] * 3
open(f"attempts/{attempt}-{1 - rank}", "w").close()  # rank 1 counts; the other was here before this collective ended
dist.barrier()
if attempt == int(sys.argv[1]):
    dist.destroy_process_group()
elif rank == attempt % 2:
    os.kill(os.getpid(), signal.SIGKILL)
else:
    time.sleep(600)
"""


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_fifty_restarts_with_skewed_starts(tmp_path):
    """A plain script's own group each time: no import but torch's, and no wait between the starts."""
    words = ["--nproc", "2", "--restarts", "50", "--restart-wait", "0.1s"]
    done = run(tmp_path, *words, script=MEETS, args=("50",))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(os.listdir(tmp_path / "attempts")) == 2 * 51
    # Every failure that was seen is the kill: no restart failed to bring its ranks together.
    assert done.stderr.count("was killed by SIGKILL") == 50 and "restart 50 of 50 in 0 s" in done.stderr, done.stderr
    assert "connectFullMesh" not in done.stderr


def failed(cause="rank 0 failed: ValueError: x", code=1, seconds=5.0, **more):
    return Attempt(Ending(code, LaunchError(cause), **more), seconds)


def test_when_a_restart_makes_sense():
    assert seconds_to_wait([failed()], 3) == 1.0
    assert seconds_to_wait([failed()], 0) is None
    assert seconds_to_wait([failed(code=2)], 3) is None
    assert seconds_to_wait([failed(code=75)], 3) is None
    assert seconds_to_wait([failed(stopped=True)], 3) is None
    assert seconds_to_wait([failed("a"), failed("b")], 1) == "no restart is left of 1"
    assert "failed twice in the same way" in str(seconds_to_wait([failed(), failed()], 3))
    assert seconds_to_wait([failed(), failed(seconds=100.0)], 3) == 2.0
    killed = failed("rank 0 was killed by SIGKILL (9)", 137)
    assert seconds_to_wait([killed, killed], 3) == 2.0
    assert seconds_to_wait([killed] * 9, 20) == 10.0
    assert seconds_to_wait([failed(cause=str(i)) for i in range(9)], 20) == 60.0


def test_a_script_that_fails_by_itself_is_not_tried_for_ever(tmp_path):
    (tmp_path / "broken.py").write_text("raise ValueError('mine')\n")
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", "--restarts", "9", "broken.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.count("evener: restart ") == 1, done.stderr
    assert "failed twice in the same way" in done.stderr


@pytest.mark.parametrize("word", ["-1", "many", "2.5"])
def test_a_bad_count_is_one_clear_error(tmp_path, word, capsys):
    from evener.cli import main

    (tmp_path / "train.py").write_text("")
    assert main(["run", f"--restarts={word}", str(tmp_path / "train.py")]) == 2
    assert f"--restarts {word} is not a number.\n  fix: --restarts 5" in capsys.readouterr().err
