"""Where processes are spawned, a script without a main guard still trains; one that asks for workers is told why not."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from evener.limits import usable_cpus

BODY = """
import multiprocessing, sys
multiprocessing.set_start_method("spawn", force=True)
import torch, evener
from torch.nn import functional as F
{definition}
model = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = evener.Run(
    model, optimizer, lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), Rows(),
    global_batch_size=8, precision="fp32", dir="run", num_workers={workers},
)
with run:
    print("updates", len(list(run.updates(epochs=1))), "workers", run.feed.num_workers)
"""
ROWS = """
import torch
class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.full((4,), float(i)), i % 3
"""


def script(folder, workers, guard):
    (folder / "rows.py").write_text(ROWS)
    text = BODY.format(definition="from rows import Rows", workers=workers)
    if guard:
        text = "def main():\n" + textwrap.indent(text, "    ") + '\nif __name__ == "__main__":\n    main()\n'
    (folder / "train.py").write_text(text)
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, capture_output=True, text=True, timeout=300,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


@pytest.mark.parametrize("guard", [False, True])
def test_auto_is_no_worker_without_a_guard_and_some_with_one(tmp_path, guard):
    done = script(tmp_path, '"auto"', guard)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"updates 3 workers {min(4, usable_cpus()) if guard else 0}" in done.stdout


def test_workers_without_a_guard_end_in_words(tmp_path):
    done = script(tmp_path, "2", guard=False)
    assert done.returncode != 0
    last = done.stderr[done.stderr.rindex("evener: ") :]
    assert "num_workers=0" in last and "Traceback" not in last
