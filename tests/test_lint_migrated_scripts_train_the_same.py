"""`evener lint --fix --select migrate` keeps a script's losses: old and new are run here, on the CPU.

`"cuda"` is read as `"cpu"` in the new scripts, so that autocast and the scaler really work. Apex is gone from every
machine; its documented behaviour (patched forward, scaled loss, unscaled gradients behind the context) stands in for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from evener.cli import main

MODEL = """
import torch
import torch.nn.functional as F

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(12)]
losses = []
"""
CUDA_AMP = (
    MODEL
    + """
from torch.cuda.amp import GradScaler, autocast  # the old place

scaler = GradScaler(init_scale=1024.0)
for x, y in loader:
    optimizer.zero_grad()
    with autocast(True, dtype=torch.bfloat16):  # positional
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
"""
)
CUDA_AMP_MODULE = CUDA_AMP.replace("from torch.cuda.amp import GradScaler, autocast", "from torch.cuda import amp")
CUDA_AMP_MODULE = CUDA_AMP_MODULE.replace("= GradScaler(", "= amp.GradScaler(").replace(
    "with autocast(", "with amp.autocast("
)
CUDA_AMP_DOTTED = CUDA_AMP.replace("from torch.cuda.amp import GradScaler, autocast", "")
CUDA_AMP_DOTTED = CUDA_AMP_DOTTED.replace("= GradScaler(", "= torch.cuda.amp.GradScaler(").replace(
    "with autocast(", "with torch.cuda.amp.autocast("
)

APEX = (
    MODEL
    + """
from apex import amp

model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
for step, (x, y) in enumerate(loader):
    optimizer.zero_grad()
    # forward and loss
    logits = model(x)
    loss = F.cross_entropy(logits, y)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.5)
    optimizer.step()
    losses.append(loss.item())
"""
)
APEX_IN_TWO_FUNCTIONS = (
    "import argparse\n"
    + MODEL
    + """
try:
    from apex import amp
except ImportError:
    raise ImportError("needs Apex")


def train(model, optimizer):
    model.train()
    for x, y in loader:
        output = model(x)
        loss = F.cross_entropy(output, y)

        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())


def main():
    args = argparse.Namespace(opt_level="O1")
    global model, optimizer
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    train(model, optimizer)
    state = {"model": model.state_dict(), "amp": amp.state_dict()}
    amp.load_state_dict(state["amp"])


main()
"""
)


class StandIn(types.ModuleType):
    """What Apex's amp did at O0 and O1, on the CPU."""

    def __init__(self) -> None:
        super().__init__("apex.amp")
        self.scale = 65536.0

    def initialize(self, model, optimizer, opt_level="O1"):
        if opt_level == "O1":
            inner = model.forward

            def forward(*args):
                with torch.autocast("cpu", dtype=torch.float16):
                    return inner(*args).float()

            model.forward = forward
        self.scale = 65536.0 if opt_level == "O1" else 1.0
        return model, optimizer

    @contextlib.contextmanager
    def scale_loss(self, loss, optimizer):
        yield loss * self.scale
        for p in self.master_params(optimizer):
            p.grad.div_(self.scale)

    def master_params(self, optimizer):
        return [p for group in optimizer.param_groups for p in group["params"]]

    def state_dict(self):
        return {"scale": self.scale}

    def load_state_dict(self, state):
        self.scale = state["scale"]


def losses_of(code: str, tmp_path: Path, monkeypatch, on_cpu: bool = False) -> list[float]:
    if on_cpu:  # the real autocast and scaler, not their disabled forms
        code = code.replace('"cuda"', '"cpu"')
    apex = types.ModuleType("apex")
    apex.amp = StandIn()
    monkeypatch.setitem(sys.modules, "apex", apex)
    monkeypatch.setitem(sys.modules, "apex.amp", apex.amp)
    script = tmp_path / "ran.py"
    script.write_text(code)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        losses = runpy.run_path(str(script))["losses"]
    old = any("torch.cuda.amp" in str(one.message) and one.category is FutureWarning for one in said)
    assert old == ("torch.cuda" in code), "only the old form warns"
    return losses


def migrated(code: str, tmp_path: Path) -> str:
    script = tmp_path / "train.py"
    script.write_text(code)
    assert main(["lint", "--fix", "--select", "migrate", str(script)]) == 0
    after = script.read_text()
    assert main(["lint", "--fix", "--select", "migrate", str(script)]) == 0
    assert script.read_text() == after, "a second run changes nothing"
    return after


@pytest.mark.parametrize("code", [CUDA_AMP, CUDA_AMP_MODULE, CUDA_AMP_DOTTED], ids=["names", "module", "dotted"])
def test_torch_cuda_amp_becomes_torch_amp_with_the_same_losses(code, tmp_path, monkeypatch, capsys):
    after = migrated(code, tmp_path)
    assert (
        "cuda.amp" not in after
        and '"cuda", enabled=True, dtype=torch.bfloat16' in after
        and "init_scale=1024.0" in after
    )
    assert losses_of(after, tmp_path, monkeypatch) == losses_of(code, tmp_path, monkeypatch)
    # with everything switched on, on the CPU: the same as the old classes asked for the CPU
    by_hand = code.replace("torch.cuda.amp.", "torch.amp.").replace("torch.cuda", "torch")
    by_hand = by_hand.replace("GradScaler(init", 'GradScaler("cpu", init').replace(
        "autocast(True, dtype", 'autocast("cpu", dtype'
    )
    assert losses_of(after, tmp_path, monkeypatch, on_cpu=True) == losses_of(by_hand, tmp_path, monkeypatch)


@pytest.mark.parametrize("code", [APEX, APEX_IN_TWO_FUNCTIONS], ids=["one function", "two functions"])
@pytest.mark.parametrize("level", ["O0", "O1"])
def test_apex_becomes_autocast_and_a_scaler_with_the_same_losses(code, level, tmp_path, monkeypatch, capsys):
    code = code.replace('"O1"', f'"{level}"')
    after = migrated(code, tmp_path)
    assert "amp." not in after.replace("torch.amp.", "").replace("opt_level", "") and "scaler.step(optimizer)" in after
    before = losses_of(code, tmp_path, monkeypatch)
    assert losses_of(after, tmp_path, monkeypatch, on_cpu=True) == before
    assert len(before) == 12 and before[0] != before[-1]


@pytest.mark.parametrize(
    "wrong",
    [
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O3")',
        'model, optimizer = amp.initialize(model, optimizer, opt_level="O1", loss_scale=128.0)',
        'if len(loader):\n    model, optimizer = amp.initialize(model, optimizer, opt_level="O1")',
        'amp.register_float_function(torch, "sigmoid")\nmodel, optimizer = amp.initialize(model, optimizer)',
    ],
)
def test_what_is_not_understood_of_apex_is_left_alone_and_said(wrong, tmp_path, capsys):
    code = APEX.replace('model, optimizer = amp.initialize(model, optimizer, opt_level="O1")', wrong)
    script = tmp_path / "train.py"
    script.write_text(code)
    assert main(["lint", "--fix", "--select", "migrate", str(script)]) == 1
    assert script.read_text() == code
    assert "apex.amp no longer exists" in capsys.readouterr().out


LAUNCHED = """
import argparse
import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args()
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
loss = model(torch.ones(1, 2) * args.local_rank).sum()
loss.backward()
print(f"local rank {args.local_rank} of {dist.get_world_size()}", flush=True)
dist.barrier()
del loss, model  # a reducer that outlives its group aborts the process once in a while (torch 2.13, gloo)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("started", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_launch_script_becomes_torchrun_and_the_ranks_know_who_they_are(tmp_path, capsys, started):
    script, shell = tmp_path / "train.py", tmp_path / "train.sh"
    script.write_text(LAUNCHED)
    shell.write_text("set -e\npython -m torch.distributed.launch --nproc_per_node=2 --use_env train.py  # two GPUs\n")
    assert main(["lint", "--select", "migrate", str(tmp_path)]) == 1
    assert main(["lint", "--fix", "--select", "migrate", str(tmp_path)]) == 0
    assert shell.read_text() == "set -e\ntorchrun --nproc_per_node=2 train.py  # two GPUs\n"
    assert 'default=int(os.environ.get("LOCAL_RANK", -1))' in script.read_text()
    if not started:
        return
    place = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["sh", "train.sh"], cwd=tmp_path, env=place, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    # Not by lines: two processes may write theirs into one.
    assert sorted(re.findall(r"local rank \d of \d", done.stdout)) == ["local rank 0 of 2", "local rank 1 of 2"]
