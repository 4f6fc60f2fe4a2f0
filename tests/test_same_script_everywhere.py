"""The same script gives the same bits under python, torchrun and `evener run`, on any number of processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch, evener
from torch.nn import functional as F

def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y), {"accuracy": evener.Mean(total=(logits.argmax(1) == y).sum(), count=len(y))}

evener.seed(0)
x = torch.randn(40, 6)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = evener.Run(model, optimizer, loss_fn, (x, x.argmax(1) % 3), global_batch_size=12, exact=True, precision="fp32", dir="out")
for update in run.updates(epochs=2):
    pass
accuracy = run.evaluate((x, x.argmax(1) % 3))["accuracy"]
run.print(f"digest {run.digest()} accuracy {accuracy!r} world {run.world_size}")
run.close()
"""


def launch(tmp_path, name, command):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *command, "train.py"], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"digest (\w+) accuracy (\S+) world (\d)", done.stdout)
    assert found, done.stdout + done.stderr
    assert (folder / "out" / "events.jsonl").exists() and not (folder / "out-2").exists()  # one directory, by rank 0
    return found.groups()


def test_under_python_torchrun_and_evener_run(tmp_path):
    results = {
        "python": launch(tmp_path, "python", []),
        "torchrun": launch(tmp_path, "torchrun", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        "evener": launch(tmp_path, "evener", ["-m", "evener", "run", "--cpu", "--nproc", "3"]),
    }
    assert [world for *_, world in results.values()] == ["1", "2", "3"]
    assert len({(digest, accuracy) for digest, accuracy, _ in results.values()}) == 1, results


def test_flags_reach_the_first_run(tmp_path):
    folder = tmp_path / "flags"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", "1", "--set", "seed=5", "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    import json

    config = json.loads(Path(folder, "out", "config.json").read_text())
    assert config["seed"] == {"value": 5, "origin": "flag"}


@pytest.mark.parametrize("mistake", ["global_batch_sise=12"])
def test_a_misspelt_keyword_ends_in_one_line(tmp_path, mistake):
    (tmp_path / "train.py").write_text(SCRIPT.replace("global_batch_size=12", mistake))
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "Run has no keyword 'global_batch_sise'" in done.stderr and "global_batch_size=" in done.stderr
