"""An update that is not finite, or has nothing to count, changes nothing: on all ranks together, counted and said."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import evener
from evener.errors import NonFiniteError, UsageError
from tests.models import make, mlp_rows, token_loss, token_rows

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),  # cannot skip on the device: one scalar read per update
    "unfused": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
}


def row_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def snapshot(engine):
    state = engine.state_dict()
    return {k: v.clone() for k, v in state["model"].items()}, [
        value.clone() if isinstance(value, torch.Tensor) else value
        for one in state["targets"][""]["optimizer"]["state"].values()
        for value in one.values()
    ]


def same(a, b):
    model = all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    return model and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(a[1], b[1]))


def poisoned_on_last_rank(kind, value):
    events = []
    model = make("mlp")
    engine = evener.Engine(
        model, OPTIMIZERS[kind](model.parameters()), row_mean, device="cpu", precision="fp32", max_grad_norm=1.0,
        report=lambda *event: events.append(event),
    )  # fmt: skip
    for k in range(2):
        engine.step(mlp_rows(6, seed=k))
    before = snapshot(engine)
    x, y = mlp_rows(6)
    if evener.rank() == evener.world_size() - 1:
        x[0, 0] = value
    update = engine.step((x, y))
    after = snapshot(engine)
    good = engine.step(mlp_rows(6, seed=5))
    engine.settle()
    engine.close()
    return update.skipped, same(before, after), good.skipped, engine.targets[""].flags.skipped, [e[:2] for e in events]


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_rank_changes_nothing_anywhere(ranks, kind, value):
    for world in (1, 2, 3):
        for skipped, unchanged, good_skipped, count, events in ranks(world)(poisoned_on_last_rank, kind, value):
            assert (skipped, unchanged, good_skipped, count) == (True, True, False, 1)
            assert events == [("skip", 2)]


def zero_tokens(precision):
    events = []
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    engine = evener.Engine(
        model, optimizer, token_loss, device="cpu", precision=precision, coupled=False, scheduler=schedule,
        report=lambda *event: events.append(event), scaler={"init_scale": 256.0} if precision == "fp16" else None,
    )  # fmt: skip
    tokens, labels = token_rows(4)
    engine.step((tokens, labels))
    before = snapshot(engine)
    update = engine.step((tokens, torch.full_like(labels, -100)))
    result = update.skipped, update.count, math.isnan(update.loss), same(before, snapshot(engine))
    lr = engine.step((tokens, labels)).lr
    engine.settle()
    engine.close()
    return (
        result,
        lr,
        [e[:2] for e in events],
        engine.targets[""].loss_scale and engine.targets[""].loss_scale.state_dict()["scale"],
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_an_update_without_tokens_is_skipped_and_said(ranks, precision):
    for world in (1, 3):
        for result, lr, events, scale in ranks(world)(zero_tokens, precision):
            assert result == (True, 0.0, True, True)
            assert lr == pytest.approx(0.05)  # one schedule step so far: the empty update made none
            assert events == [("zero_count", 1)]
            assert scale in (None, 256.0)  # it says nothing about the loss scale


def test_stop_after_too_many_in_a_row():
    for asked, allowed in (("stop:3", 3), ("stop", 10)):
        model = make("mlp")
        engine = evener.Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32",
            on_nonfinite=asked, report=lambda *event: None,
        )  # fmt: skip
        x, y = mlp_rows(4)
        bad = (x * math.nan, y)
        engine.step((x, y))
        for _ in range(allowed):
            engine.step(bad)
        with pytest.raises(NonFiniteError) as error:
            engine.settle()
        assert error.value.exit_code == 66
        assert f"{allowed} updates in a row" in str(error.value) and "max_grad_norm" in str(error.value)


def test_on_nonfinite_is_checked():
    model = make("mlp")
    with pytest.raises(UsageError, match="on_nonfinite='halt' is not known"):
        evener.Engine(model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", on_nonfinite="halt")


def test_a_scale_that_keeps_halving_is_reported_and_is_no_reason_to_stop():
    events = []
    model = make("mlp")

    def steep(model, batch):
        return row_mean(model, batch) * 1e6  # finite loss; gradients overflow until the scale is small

    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=1e-9), steep, device="cpu", precision="fp16",
        on_nonfinite="stop:3", report=lambda *event: events.append(event), scaler={"init_scale": 2.0**20},
    )  # fmt: skip
    for _ in range(30):
        engine.step(mlp_rows(8))
    engine.settle()
    falling = [fields for kind, _, fields in events if kind == "scale_falling"]
    assert falling and falling[0]["skipped_in_a_row"] == 12
    assert not engine.step(mlp_rows(8)).skipped  # it found its scale


def test_parameters_without_gradient_are_named_once():
    events = []
    model = make("mlp")
    model.spare = torch.nn.Linear(2, 2)
    engine = evener.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32",
        report=lambda *event: events.append(event),
    )  # fmt: skip
    for _ in range(4):
        engine.step(mlp_rows(8))
    assert events == [("unused_parameters", 0, {"names": ["spare.weight", "spare.bias"]})]
    assert model.spare.weight.grad is None and model.spare.weight not in engine.optimizer.state
