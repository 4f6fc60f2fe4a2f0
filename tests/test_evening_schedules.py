"""Schedules of every kind, on any world size, stopped and resumed; what the start says of them; gradients in between."""

from __future__ import annotations

import math

import pytest
import torch
from torch.optim import lr_scheduler as lrs

import evener
from tests.models import make, mlp_rows, row_loss

EPOCHS, ROWS, BATCH = 4, 21, 6  # 16 updates
TOTAL = 16


class Timm:
    """The shape of timm's schedulers: step_update after updates, step(epoch) after epochs, which does nothing here."""

    def __init__(self, optimizer):
        self.optimizer, self.updates = optimizer, 0
        self._set(0)

    def _set(self, n):
        self.updates = n
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + n)

    def step(self, epoch, metric=None):
        self.last_epoch = epoch

    def step_update(self, n, metric=None):
        self._set(n)

    def state_dict(self):
        return {key: value for key, value in self.__dict__.items() if key != "optimizer"}

    def load_state_dict(self, state):
        self.__dict__.update(state)


def warm_up_then_cosine(optimizer, total):
    def factor(k):
        return (k + 1) / 4 if k < 4 else 0.5 + 0.5 * math.cos(math.pi * (k - 4) / (total - 4))

    return lrs.LambdaLR(optimizer, factor)


def sequential(optimizer, total=TOTAL):
    parts = [lrs.LinearLR(optimizer, 0.1, total_iters=4), lrs.CosineAnnealingLR(optimizer, max(8, total - 4))]
    return lrs.SequentialLR(optimizer, parts, milestones=[4])


MAKERS = {
    "lambda": warm_up_then_cosine,
    "sequential": sequential,
    "onecycle": lambda o, total: lrs.OneCycleLR(o, 0.2, total),
    "cosine": lambda o, total: lrs.CosineAnnealingLR(o, total),
    "multistep": lambda o, total: lrs.MultiStepLR(o, [3, 9, 9]),
    "polynomial": lambda o, total: lrs.PolynomialLR(o, total),
    "restarts": lambda o, total: lrs.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o, total: lrs.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "chained": lambda o, total: lrs.ChainedScheduler([lrs.ExponentialLR(o, 0.9), lrs.ConstantLR(o, 0.5, 5)]),
    "timm": lambda o, total: Timm(o),
}


def parts():
    model = make("mlp")
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.05}]
    return model, torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def evening(folder, kind, as_object, by="update", stop_at=None, keywords=None):
    model, optimizer = parts()
    schedule = MAKERS[kind](optimizer, TOTAL if by == "update" else EPOCHS) if as_object else MAKERS[kind]
    run = evener.Run(
        model, optimizer, row_loss, mlp_rows(ROWS), global_batch_size=BATCH, exact=True, slice_size=2, precision="fp32",
        scheduler=schedule, schedule_by=by, dir=folder, **(keywords or {}),
    )  # fmt: skip
    trail = run.state.setdefault("trail", [])
    try:
        for update in run.updates(epochs=EPOCHS):
            trail.append([update.lr, [group["momentum"] for group in optimizer.param_groups]])
            if update.number == stop_at:
                run.stop()
        return run.digest(), trail
    except evener.Stopped:
        return None
    finally:
        run.close()


def by_hand(kind, by="update"):
    """The learning rate and momentum that a plain loop would use."""
    _, optimizer = parts()
    schedule = MAKERS[kind](optimizer, TOTAL if by == "update" else EPOCHS)
    rates = []
    for k in range(TOTAL):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if by == "epoch":
            if k % 4 == 3:
                schedule.step()
        elif kind == "timm":
            schedule.step_update(k + 1)
        else:
            schedule.step()
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR calls its parts so
@pytest.mark.filterwarnings("ignore:To get the last learning rate")
@pytest.mark.parametrize("as_object", [False, True], ids=["function", "object"])
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_on_worlds_1_and_3_and_resumed(ranks, tmp_path, kind, as_object):
    whole = ranks(1)(evening, str(tmp_path / "whole"), kind, as_object)[0]
    assert [lr for lr, _ in whole[1]] == pytest.approx(by_hand(kind), rel=1e-12)
    assert ranks(3)(evening, str(tmp_path / "run"), kind, as_object, "update", 5) == [None] * 3
    assert ranks(1)(evening, str(tmp_path / "run"), kind, as_object) == [whole]


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize("kind", ["cosine", "sequential", "multistep"])
def test_by_epoch_and_resumed_in_the_middle_and_at_its_end(ranks, tmp_path, kind):
    whole = ranks(1)(evening, str(tmp_path / "whole"), kind, True, "epoch")[0]
    assert [lr for lr, _ in whole[1]] == pytest.approx(by_hand(kind, "epoch"), rel=1e-12)
    for at in (5, 7):
        folder = str(tmp_path / f"run{at}")
        assert ranks(1)(evening, folder, kind, True, "epoch", at) == [None]
        assert ranks(3)(evening, folder, kind, True, "epoch") == [whole] * 3


def in_batches(folder, stop_after=None):
    model, optimizer = parts()
    run = evener.Run(
        model, optimizer, row_loss, mlp_rows(ROWS), global_batch_size=BATCH, precision="fp32", dir=folder,
        scheduler=lrs.StepLR(optimizer, 1, gamma=0.5), schedule_by="epoch", exact=True, slice_size=2,
    )  # fmt: skip
    trail = run.state.setdefault("trail", [])
    try:
        for batch in run.batches(epochs=3):
            trail.append([batch.epoch, run.step(batch).lr])
            if len(trail) == stop_after:
                run.stop()
        return trail, optimizer.param_groups[0]["lr"]
    except evener.Stopped:
        return None
    finally:
        run.close()


@pytest.mark.parametrize("stop_after", [None, 2, 4])
def test_by_epoch_in_a_loop_over_batches(ranks, tmp_path, stop_after):
    folder = str(tmp_path / "run")
    if stop_after:
        assert ranks(1)(in_batches, folder, stop_after) == [None]
    for trail, last in ranks(2)(in_batches, folder):
        assert trail == [[epoch, 0.1 * 0.5**epoch] for epoch in range(3) for _ in range(4)]
        assert last == 0.1 * 0.5**3


def plateau(folder, stop_at=None):
    model, optimizer = parts()
    schedule = lrs.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    run = evener.Run(
        model, optimizer, row_loss, mlp_rows(ROWS), global_batch_size=BATCH, precision="fp32", dir=folder,
        scheduler=schedule, exact=True, slice_size=2,
    )  # fmt: skip
    rates = run.state.setdefault("rates", [])
    try:
        for epoch in run.epochs(5):
            for update in epoch:
                if update.number == stop_at:
                    run.stop()
            run.scheduler.step([1.0, 0.5, 0.6, 0.4, 0.7][epoch.number])
            rates.append(optimizer.param_groups[0]["lr"])
        return run.digest(), rates
    except evener.Stopped:
        return None
    finally:
        run.close()


@pytest.mark.parametrize("at", [9, 11])
def test_reduce_on_plateau_is_stepped_by_the_user_and_resumed(ranks, tmp_path, at):
    whole = ranks(1)(plateau, str(tmp_path / "whole"))[0]
    assert whole[1] == [0.1, 0.1, 0.05, 0.05, 0.025]
    assert ranks(3)(plateau, str(tmp_path / "run"), at) == [None] * 3
    assert ranks(1)(plateau, str(tmp_path / "run")) == [whole]


def said(tmp_path, capsys, schedule, by="update", epochs=EPOCHS):
    model, optimizer = parts()
    run = evener.Run(
        model, optimizer, row_loss, mlp_rows(ROWS), global_batch_size=BATCH, precision="fp32", dir=tmp_path / "run",
        scheduler=schedule(optimizer), schedule_by=by, resume="never",
    )  # fmt: skip
    with run:
        list(run.updates(epochs=epochs))
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if line.startswith("lr ") or "schedule" in line)


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_the_start_says_the_range_and_warns_of_a_schedule_that_does_not_fit(tmp_path, capsys):
    assert said(tmp_path, capsys, lambda o: lrs.CosineAnnealingLR(o, TOTAL)) == "lr 0.1 -> 9.61e-4 over 16 updates"
    ranged = said(tmp_path, capsys, lambda o: warm_up_then_cosine(o, TOTAL))
    assert ranged == "lr 0.025 -> 0.1 -> 1.7e-3 over 16 updates"
    early = said(tmp_path, capsys, lambda o: lrs.CosineAnnealingLR(o, 4))
    assert 'warning: the schedule ends after 4 updates, the run after 16 (schedule_by="epoch"?)' in early
    late = said(tmp_path, capsys, lambda o: sequential(o, 1600))
    assert "warning: the schedule needs 1,600 updates, the run ends after 16: it never arrives" in late
    fits = said(tmp_path, capsys, lambda o: lrs.CosineAnnealingLR(o, EPOCHS), by="epoch")
    assert fits == "lr 0.1 -> 0.0146 over 16 updates"
    late = said(tmp_path, capsys, lambda o: lrs.CosineAnnealingLR(o, TOTAL), by="epoch")
    assert "the schedule needs 64 updates, the run ends after 16" in late


def with_hook(folder):
    """Norms logged per layer, and one layer's gradient replaced."""
    logged, points = [], []

    def hook(model):
        logged.append({name: float(p.grad.norm()) for name, p in model.named_parameters()})
        model.head.bias.grad = torch.full_like(model.head.bias, 0.25)
        model.body[0].weight.grad = None

    model, optimizer = parts()
    before = [model.head.bias.detach().clone(), model.body[0].weight.detach().clone()]
    run = evener.Run(
        model, optimizer, row_loss, mlp_rows(ROWS), global_batch_size=BATCH, exact=True, slice_size=2, precision="fp32",
        before_step=hook, dir=folder, logger=lambda values, step: points.append((step, values)),
    )  # fmt: skip
    with run:
        for _ in run.updates(updates=3):
            run.log({f"grad/{name}": norm for name, norm in logged[-1].items()})
        digest = run.digest()
    # 0.05 times 0.25 times (1 + 1.9 + 2.71): plain momentum
    moved = torch.allclose(before[0] - model.head.bias, torch.full((3,), 0.05 * 0.25 * 5.61), atol=1e-6)
    steps = [step for step, values in points if "grad/head.bias" in values]
    return digest, logged, moved and torch.equal(before[1], model.body[0].weight), steps if run.is_main else [0, 1, 2]


def test_gradients_are_logged_and_replaced_before_the_step(ranks, tmp_path):
    one = ranks(1)(with_hook, str(tmp_path / "one"))[0]
    assert one[2] and one[3] == [0, 1, 2] and all(norm > 0 for norm in one[1][0].values())
    assert ranks(3)(with_hook, str(tmp_path / "three")) == [one] * 3
