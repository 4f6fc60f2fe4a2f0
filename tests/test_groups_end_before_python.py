"""A gloo thread that outlives the interpreter can abort a finished training: none is left when Python begins to end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Registered before anything else, so called after everything else of Python.
WATCH = """
import atexit, glob, os

def last():
    names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
    if "RANK" in os.environ:
        with open(os.path.join({folder!r}, "rank" + os.environ["RANK"]), "w") as file:
            file.write(",".join(name for name in names if "gloo" in name))

atexit.register(last)
"""
PLAIN_DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 3)).sum().backward()
optimizer.step()
{end}
"""
WITH_RUN = """
import torch, torch.distributed as dist, evener
if {own}:
    dist.init_process_group("gloo")
model = torch.nn.Linear(3, 1)
rows = [(torch.ones(3), 1.0)] * 8
run = evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b[0]).square().mean(), rows,
                 global_batch_size=4, dir="run")
for update in run.updates(epochs=1):
    pass
run.close()
if {own}:
    dist.destroy_process_group()
"""


def threads_left(tmp_path, script: str, launcher: list[str]) -> list[str]:
    (tmp_path / "sitecustomize.py").write_text(WATCH.format(folder=str(tmp_path)))
    (tmp_path / "train.py").write_text(script)
    done = subprocess.run(
        [*launcher, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]


EVENER_RUN = [sys.executable, "-m", "evener", "run", "--nproc", "2", "--cpu"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("end", ["dist.destroy_process_group()", ""], ids=["destroyed", "left"])
def test_a_plain_ddp_script_under_evener_run(tmp_path, end):
    assert threads_left(tmp_path, PLAIN_DDP.format(end=end), EVENER_RUN) == ["", ""]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("own", [True, False], ids=["adopted", "made"])
def test_a_script_with_a_run_under_torchrun(tmp_path, own):
    assert threads_left(tmp_path, WITH_RUN.format(own=own), TORCHRUN) == ["", ""]
