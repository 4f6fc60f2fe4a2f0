"""`evener verify` finds what breaks the promise in a user's script, and names it: one planted fault after the other."""

from __future__ import annotations

import pytest

from evener.launch.command import Request
from evener.verify.proof import Proof
from evener.verify.start import Starter

TOP = """
import random, time
import numpy as np
import torch
from torch.nn import functional as F
import evener

evener.seed(0)
x = torch.randn(24, 6)
y = x.argmax(1) % 3
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)
"""
END = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
with evener.Run(model, optimizer, loss_fn, {data}, global_batch_size=8, precision="fp32"{more}) as run:
    for update in run.updates(updates=20):
        {body}
"""


def script(fault="", data="(x, y)", more="", body="pass", top=TOP):
    return top + fault + END.format(data=data, more=f", {more}" if more else "", body=body)


@pytest.fixture(scope="module")
def starter():
    one = Starter(launcher=False, seconds=240)
    yield one
    one.close()


@pytest.fixture
def prove(starter, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the machine is shared with other tests

    def prove(text, only="", worlds=(1, 2), updates=4, **overrides):
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "helper.py").write_text(HELPER)
        request = Request(str(tmp_path / "train.py"), overrides=overrides)
        more = {"only": tuple(only.split(","))} if only else {}
        proof = Proof(request, starter, str(tmp_path / "work"), updates, worlds, **more)
        checks = list(proof.checks())
        prove.not_checked = proof.not_checked
        return {check.name: check for check in checks}

    return prove


NO_BUFFER = """
class Warming(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
        self.warmth = torch.zeros(())

    def forward(self, x):
        self.warmth = self.warmth + 0.1
        return self.linear(x) * (1 + self.warmth)

model = Warming()
"""
OUTSIDE_RNG = """
noise = np.random.default_rng(0)

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x + 0.1 * float(noise.standard_normal())), y)
"""
COUNTER = """
calls = 0

def loss_fn(model, batch):
    global calls
    calls += 1
    x, y = batch
    return F.cross_entropy(model(x), y) * (1 + 0.05 * calls)
"""
SHARED_VARIABLE = """
def make():
    calls = 0

    def loss_fn(model, batch):
        nonlocal calls
        calls += 1
        x, y = batch
        return F.cross_entropy(model(x), y) / calls

    return loss_fn

loss_fn = make()
"""
TOKEN_MEAN = """
mask = torch.arange(6) < torch.arange(24)[:, None] % 6 + 1
weights = torch.ones(6, 6)
model = torch.nn.Linear(6, 6)

def loss_fn(model, batch):
    x, mask = batch
    return (model(x) - x).square()[mask].mean()
"""
RANK_BRANCH = """
def loss_fn(model, batch):
    x, y = batch
    loss = F.cross_entropy(model(x), y)
    return loss * 1.5 if evener.rank() == 1 else loss
"""
IN_BATCH_NEGATIVES = """
def loss_fn(model, batch):
    x, y = batch
    z = F.normalize(model(x))
    return F.cross_entropy(z @ z.T, torch.arange(len(x)))
"""
OWN_AUGMENTATION = """
mine = torch.Generator().manual_seed(1)

def prepare(batch, generator):
    x, y = batch
    return x + 0.1 * torch.randn(x.shape, generator=mine), y
"""
MEMORY = """
remembers = random.Random(0)

def order(seed, epoch):
    return remembers.sample(range(24), 24)
"""
IN_PLACE = """
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = x.clone(), y

    def __len__(self):
        return 24

    def __getitem__(self, i):
        self.x[i] *= 1.01
        return self.x[i].clone(), self.y[i]
"""
OWN_ROW_RNG = """
class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.random = np.random.default_rng(0)

    def __len__(self):
        return 24

    def __getitem__(self, i):
        return x[i] + float(self.random.standard_normal()), y[i]
"""
CLOCK = """
def clock(optimizer, updates):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 + time.time() % 1000)
"""
HELPER = """
calls = 0

def more():
    global calls
    calls += 1
    return 1 + 0.05 * calls
"""
BESIDE = """
import helper

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y) * helper.more()
"""
UNSEEDED = TOP.replace("evener.seed(0)\nx = torch.randn(24, 6)", "x = torch.linspace(-1, 1, 144).reshape(24, 6)")

FAULTS = {
    # name: (script, groups, a check that fails, the part that differs first, the words of the likely cause)
    "a tensor attribute that is no buffer": (
        script(NO_BUFFER), "resume", "killed in update 2, resumed", "loss", "`tensor attribute warmth` is not the same",
    ),
    "an outside RNG": (
        script(OUTSIDE_RNG), "resume", "killed in update 2, resumed", "loss", "`global noise` is not the same",
    ),
    "a global counter": (
        script(COUNTER), "resume", "killed in update 2, resumed", "loss", "`global calls` is not the same",
    ),
    "a global counter, in another cut": (
        script(COUNTER), "microbatch", "microbatches of 3", "loss", "`global calls` is not the same",
    ),
    "a global of a module beside the script": (
        script(BESIDE), "resume", "killed in update 2, resumed", "loss", "`global calls of helper` is not the same",
    ),
    "a variable of an outer function": (
        script(SHARED_VARIABLE), "resume", "killed in update 2, resumed", "loss", "`variable calls of loss_fn`",
    ),
    "unseeded init": (
        script(top=UNSEEDED), "repeat", "the same again", "parameter 0.weight", "evener.seed(0)",
    ),
    "a token mean returned as a row mean": (
        script(TOKEN_MEAN, data="(x, mask)"), "microbatch", "microbatches of 3", "loss", "the loss is no mean over rows",
    ),
    "in-batch negatives": (
        script(IN_BATCH_NEGATIVES), "microbatch", "microbatches of 3", "loss", "rows look at each other",
    ),
    "a rank-dependent branch": (
        script(RANK_BRANCH), "microbatch,world", "2 processes", "loss", "a branch on the rank",
    ),
    "weights changed on one rank": (
        script(body="run.is_main and model[0].bias.data.add_(0.1)"), "world", "2 processes",
        "parameter 0.bias on rank 1", "some ranks only",
    ),
    "random augmentation outside the given generator": (
        script(OWN_AUGMENTATION, more="prepare=prepare"), "resume", "killed in update 2, resumed", "prepared row",
        "`global mine`",
    ),
    "a row's augmentation with a generator of its own": (
        script(OWN_ROW_RNG, data="Rows()"), "rows", "rows and order asked again", "row", "`attribute random of the dataset`",
    ),
    "a sampler with memory": (
        script(MEMORY, more="order=order"), "rows", "rows and order asked again", "order of rows", "order= is no function",
    ),
    "in-place change of the dataset": (
        script(IN_PLACE, data="Rows()"), "rows", "rows and order asked again", "row", "`attribute x of the dataset` changes",
    ),
    "time-dependent lr": (
        script(CLOCK, more="scheduler=clock"), "repeat", "the same again", "schedule", "the clock",
    ),
    "a run.state that counts starts": (
        script('import os\n', body='run.state["pids"] = [*run.state.get("pids", []), os.getpid()]'), "resume",
        "killed in update 2, resumed", "run.state pids", "run.state pids is computed from what",
    ),
    "a metric that trains": (
        script("score = lambda model, batch: model[0].bias.data.add_(0.1) is None or {'loss': evener.Mean(total=loss_fn(model, batch), count=1)}",
               body="run.evaluate((x, y), score)"),
        "evaluate", "evaluate left out", "", "",
    ),
}  # fmt: skip


BEYOND_THE_TEN = {
    "a global counter, in another cut",
    "a variable of an outer function",
    "in-batch negatives",
    "weights changed on one rank",
    "a row's augmentation with a generator of its own",
    "a run.state that counts starts",
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if name in BEYOND_THE_TEN else ()) for name in FAULTS]
)
def test_a_planted_fault_is_found_and_named(prove, name):
    text, only, failing, part, cause = FAULTS[name]
    checks = prove(text, only, (1, 2) if "world" in only else (1,))
    check = next(check for one, check in checks.items() if one.startswith(failing))
    assert check.result == "different" and not check.holds, check
    assert check.blame[0]["part"].startswith(part), check
    words = " | ".join(check.likely)
    assert cause in words, check
    assert cause in check.likely[0] or name == "in-batch negatives", check.likely
