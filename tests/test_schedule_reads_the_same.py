"""A schedule reads the same after k updates on any world size, and is saved and restored with the engine."""

from __future__ import annotations

import pytest
import torch

import evener
from evener.errors import UsageError
from tests.models import make, mlp_rows, row_loss

MAKERS = {
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3), torch.optim.lr_scheduler.CosineAnnealingLR(o, 8)],
        milestones=[3],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, [lambda k: 0.5**k, lambda k: 0.9**k]),
}


def build(kind):
    model = make("mlp")
    groups = [{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": 0.05}]
    optimizer = torch.optim.SGD(groups, lr=0.02, momentum=0.9)
    return model, optimizer, MAKERS[kind](optimizer)


def rates(kind, updates=10):
    model, optimizer, schedule = build(kind)
    engine = evener.Engine(model, optimizer, row_loss, device="cpu", precision="fp32", scheduler=schedule)
    seen = []
    for k in range(updates):
        seen.append([group["lr"] for group in optimizer.param_groups] if k == 0 else None)
        update = engine.step(mlp_rows(6, seed=k))
        engine.settle()
        seen[-1] = (update.lr, [group["lr"] for group in optimizer.param_groups])
    engine.close()
    return seen


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_on_any_world_size(ranks, kind):
    _, optimizer, schedule = build(kind)
    expected = []
    for _ in range(10):
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        expected.append((lr, [group["lr"] for group in optimizer.param_groups]))
    for world in (1, 2, 3, 4):
        for seen in ranks(world)(rates, kind):
            assert seen == expected


def test_step_update_objects_count_updates():
    class Timm:
        def __init__(self):
            self.seen = []

        def step_update(self, n):
            self.seen.append(n)

    model = make("mlp")
    schedule = Timm()
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), row_loss, device="cpu", precision="fp32",
        scheduler=schedule,
    )  # fmt: skip
    for _ in range(3):
        engine.step(mlp_rows(4))
    engine.settle()
    assert schedule.seen == [1, 2, 3]


def test_plateau_is_stepped_by_the_user():
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    engine = evener.Engine(model, optimizer, row_loss, device="cpu", precision="fp32", scheduler=schedule)
    for _ in range(3):
        engine.step(mlp_rows(4))
    engine.settle()
    assert optimizer.param_groups[0]["lr"] == 0.1
    engine.scheduler.step(1.0)
    engine.scheduler.step(2.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_step_left_in_the_loop_is_noticed():
    """Otherwise the schedule runs twice as fast, and nobody says so."""
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    engine = evener.Engine(model, optimizer, row_loss, device="cpu", precision="fp32", scheduler=schedule)
    with pytest.raises(UsageError, match=r"remove scheduler.step\(\): evener steps it once per update"):
        for _ in range(4):
            engine.step(mlp_rows(4))
            schedule.step()


def test_a_schedule_over_another_optimizer_is_refused():
    model = make("mlp")
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2))
    schedule = torch.optim.lr_scheduler.StepLR(other, 1)
    with pytest.raises(UsageError, match="drives another optimizer"):
        evener.Engine(model, optimizer, row_loss, device="cpu", scheduler=schedule)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_state_dict_continues_to_the_bit(precision, cls):
    def new():
        model = make("mlp")
        optimizer = cls(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        return evener.Engine(
            model, optimizer, row_loss, device="cpu", precision=precision, scheduler=schedule,
            report=lambda *event: None,
        )  # fmt: skip

    straight = new()
    for k in range(6):
        straight.step(mlp_rows(8, seed=k))
    first = new()
    for k in range(3):
        first.step(mlp_rows(8, seed=k))
    state = first.state_dict()
    first.step(mlp_rows(8, seed=99))  # must not reach into the saved state
    second = new()
    second.load_state_dict(state)
    for k in range(3, 6):
        second.step(mlp_rows(8, seed=k))
    assert second.digest() == straight.digest()
    assert second.optimizer.param_groups[0]["lr"] == straight.optimizer.param_groups[0]["lr"]
    again = new()
    again.load_state_dict(state)  # the state was not changed by the engine that used it
    for k in range(3, 6):
        again.step(mlp_rows(8, seed=k))
    assert again.digest() == straight.digest()
