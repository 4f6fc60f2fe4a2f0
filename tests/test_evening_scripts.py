"""Whole scripts, as people write them: stopped or killed once, started on another number of processes, ending where they
would have ended.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

import evener
from tests import test_evening_gan as gans
from tests.models import make, token_loss, token_rows


def classes(rows, seed=0, shape=(8,)):
    """Made digits: ten patterns under noise."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(10, *shape, generator=torch.Generator().manual_seed(99))
    y = torch.randint(10, (rows,), generator=generator)
    return patterns[y] + 0.3 * torch.randn(rows, *shape, generator=generator), y


def hits(logits, y):
    return {"accuracy": evener.Mean(total=(logits.argmax(1) == y).sum(), count=len(y))}


def student(folder, hook):
    evener.seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model, batch):
        x, y = batch
        logits = model(x)
        return F.cross_entropy(logits, y), hits(logits, y)

    run = evener.Run(
        model, optimizer, loss_fn, classes(70), global_batch_size=16, exact=True, precision="fp32", dir=folder
    )
    for epoch in run.epochs(4):
        for update in epoch:
            hook(run, update)
        run.print(epoch)
    accuracy = run.evaluate(classes(33, seed=1))["accuracy"]
    return run, accuracy


def language_model(folder, hook):
    """Validation every four updates, early stopping by run.state, the best one put back at the end."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
    run = evener.Run(
        model, optimizer, token_loss, token_rows(60), global_batch_size=12, slice_size=3, exact=True, precision="fp32",
        max_grad_norm=1.0, dir=folder, save_every=4,
        scheduler=lambda o, total: lr_scheduler.OneCycleLR(o, 0.05, total),
    )  # fmt: skip
    state = run.state
    held_out = token_rows(13, seed=2)
    for update in run.updates(epochs=12):
        hook(run, update)
        if update.number % 4 == 3:
            loss = round(run.evaluate(held_out)["loss"], 4)
            state.setdefault("losses", []).append([update.number, loss])
            if loss < state.get("best", 1e9):
                state["best"], state["patience"] = loss, 0
                run.save("best")
            else:
                state["patience"] += 1
            if state["patience"] == 2:
                break
    losses = state["losses"]
    run.load("best")
    return run, losses


def vision(folder, hook):
    evener.seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 25, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)

    def mixup(batch, generator):
        x, y = batch
        order = torch.randperm(len(x), generator=generator)
        share = 0.5 + 0.5 * torch.rand((), generator=generator)
        return share * x + (1 - share) * x[order], y, y[order], share.expand(len(x))

    def loss_fn(model, batch):
        x, y, other, share = batch
        logits = model(x)
        losses = share * F.cross_entropy(logits, y, reduction="none")
        return (losses + (1 - share) * F.cross_entropy(logits, other, reduction="none")).mean()

    def accuracy(model, batch):
        x, y = batch
        return hits(model(x), y)

    run = evener.Run(
        model, optimizer, loss_fn, classes(50, shape=(1, 5, 5)), global_batch_size=16, slice_size=4, exact=True,
        precision="fp32", prepare=mixup, ema=0.9, dir=folder,
        scheduler=lr_scheduler.CosineAnnealingLR(optimizer, 3), schedule_by="epoch",
    )  # fmt: skip
    scores = run.state.setdefault("scores", [])
    for epoch in run.epochs(3):
        for update in epoch:
            hook(run, update)
        test = classes(21, seed=1, shape=(1, 5, 5))
        scores.append([run.evaluate(test, accuracy, model=m)["accuracy"] for m in (run.model, run.ema)])
    return run, [scores, [round(float(p.sum()), 6) for p in run.ema.parameters()], int(run.ema[1].num_batches_tracked)]


class Augmented(torch.utils.data.Dataset):
    def __init__(self):
        self.x, self.y = classes(45)

    def __len__(self):
        return 45

    def __getitem__(self, i):
        return self.x[i] * random.uniform(0.8, 1.2) + 0.1 * torch.randn(8), self.y[i]


def plain(folder, hook):
    evener.seed(0)
    model = nn.Linear(8, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    run = evener.Run(
        model, optimizer, loss_fn, Augmented(), global_batch_size=10, exact=True, precision="fp32", num_workers=1,
        dir=folder,
    )  # fmt: skip
    for update in run.updates(epochs=3):
        hook(run, update)
    return run, None


def gan(folder, hook):
    run = gans.new_run(folder)
    for batch in run.batches(epochs=3):
        update = run.step(batch, loss_fn=gans.critic_loss, optimizer="d")
        if run.number % gans.CYCLE == gans.CYCLE - 1:
            run.step(batch, loss_fn=gans.generator_loss, optimizer="g")
        hook(run, update)
    return run, [optimizer.param_groups[0]["lr"] for optimizer in run.optimizer.values()]


SCRIPTS = {script.__name__: script for script in (student, language_model, vision, plain)}


def evening(name, folder, stop_at=None):
    """The end of the script: its digest and what it measured; or None, when it was stopped."""
    opened = []

    def hook(run, update):
        opened[:] = [run]
        if update.number == stop_at:
            run.stop()

    try:
        run, measured = SCRIPTS[name](folder, hook)
        return run.digest(), measured
    except evener.Stopped:
        return None
    finally:
        for run in opened:
            run.close()


@pytest.mark.parametrize(
    ("name", "first", "second"),
    # starting a data worker takes seconds: once is enough
    [(name, *worlds) for name in sorted(SCRIPTS) for worlds in ((1, 3), (3, 1)) if (name, worlds) != ("plain", (1, 3))],
)
def test_stopped_once_it_ends_where_it_would_have(ranks, tmp_path, name, first, second):
    whole = ranks(first)(evening, name, str(tmp_path / "whole"))
    assert all(one == whole[0] for one in whole)
    assert ranks(first)(evening, name, str(tmp_path / "run"), 5) == [None] * first
    assert ranks(second)(evening, name, str(tmp_path / "run")) == whole[:1] * second
    if name == "student":
        assert whole[0][1] > 0.8
    if name == "language_model":  # it was stopped early, and by its own rule
        losses = [loss for _, loss in whole[0][1]]
        assert len(losses) < 15 and losses.index(min(losses)) == len(losses) - 3


KILLED = {**SCRIPTS, "gan": gan}
FULL = pytest.mark.full


def evener_run(nproc, *arguments):
    command = [sys.executable, "-m", "evener", "run", "--nproc", str(nproc), "--cpu", "--set", "save_every=2"]
    return subprocess.run(
        [*command, "-m", "tests.test_evening_scripts", *map(str, arguments)], cwd=Path(__file__).parents[1],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=400,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("language_model", 3, 1), *(pytest.param(name, *worlds, marks=FULL) for name in ("student", "vision", "gan") for worlds in ((1, 3), (3, 1)))],
)  # fmt: skip
def test_killed_once_it_ends_where_it_would_have(ranks, tmp_path, name, first, second):
    """SIGKILL of the last rank in the body of update 5 (or 6); then the same command on another number of processes."""
    killed = evener_run(first, name, tmp_path / "run", 5)
    assert killed.returncode != 0 and "SIGKILL" in killed.stdout, killed.stdout
    done = evener_run(second, name, tmp_path / "run")
    assert done.returncode == 0 and re.search(r"continues \S+ after \d updates", done.stdout), done.stdout
    digest, measured = ranks(1)(whole, name, str(tmp_path / "whole"))[0]
    assert f"end {digest} {measured}\n" in done.stdout


def whole(name, folder, kill_at=None):
    """The script's end: its digest and what it measured."""

    def hook(run, update):
        if kill_at is not None and update.number >= kill_at and run.rank == run.world_size - 1:
            deadline = time.monotonic() + 60
            while not list(Path(folder, "checkpoints").glob("update-*")) and time.monotonic() < deadline:
                time.sleep(0.1)  # checkpoints are written behind the training
            os.kill(os.getpid(), signal.SIGKILL)

    run, measured = KILLED[name](folder, hook)
    with run:
        return run.digest(), measured


if __name__ == "__main__":
    name, folder, *kill_at = sys.argv[1:]
    end = whole(name, folder, *map(int, kill_at))
    if evener.rank() == 0:
        print("end", *end)
