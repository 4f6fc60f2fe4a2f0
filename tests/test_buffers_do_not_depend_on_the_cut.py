"""BatchNorm and other buffers: every piece starts from the update's initial values, the result is the weighted mean."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.engine.cut import Cut
from evener.engine.step import apply, backward, unscale
from tests.models import mlp_rows, seeded

ROWS, SLICE = 22, 5


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.bn = nn.BatchNorm1d(6)
        self.b = nn.Linear(6, 3)
        self.register_buffer("constant", torch.tensor([0.1, 0.7]))
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        h = self.bn(self.a(x))
        if self.training:
            self.average = 0.9 * self.average + 0.1 * h.detach().mean(0)  # replaced, not written in place
            self.calls += 1
        return self.b(F.relu(h))


def row_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def reference(rows):
    """One update by hand: slices of SLICE rows, each from the initial buffers, weighted by their rows."""
    model = seeded(Normed)
    x, y = mlp_rows(rows)
    initial = {k: v.clone() for k, v in model.named_buffers()}
    mean = {k: torch.zeros_like(v, dtype=torch.float64) for k, v in initial.items()}
    for start in range(0, rows, SLICE):
        one = copy.deepcopy(model)
        stop = min(rows, start + SLICE)
        (row_mean(one, (x[start:stop], y[start:stop])) * (stop - start) / rows).backward()
        for name, parameter in model.named_parameters():
            add = dict(one.named_parameters())[name].grad
            parameter.grad = add if parameter.grad is None else parameter.grad + add
        for name, value in one.named_buffers():
            mean[name] += value.double() * (stop - start) / rows
    return {n: p.grad for n, p in model.named_parameters()}, mean


def one_update(exact):
    model = seeded(Normed)
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32",
        slice_size=SLICE, exact=exact,
    )  # fmt: skip
    assert engine.batch.coupled and engine.batch.why_coupled == "BatchNorm sees one slice at a time"
    cut = Cut(evener.rank(), evener.world_size(), None, SLICE)
    x, y = mlp_rows(ROWS)
    parts = [(i, b - a, (x[a:b], y[a:b])) for i, (a, b) in cut.numbered(ROWS)]
    done = backward(engine, engine.targets[""], row_mean, parts, ROWS)
    unscale(done)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    apply(engine, done, fold=False)
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    for _ in range(2):
        engine.step_parts(parts, ROWS)
    counter = int(model.bn.num_batches_tracked), int(model.calls)
    digest = engine.digest()
    engine.close()
    return gradients, buffers, counter, digest


@pytest.mark.parametrize("exact", [False, True])
def test_one_slice_at_a_time_on_any_world_size(ranks, exact):
    gradients, mean = reference(ROWS)
    for world in (1, 2, 3, 4, 6):  # with 6 ranks one has no slice
        for got, buffers, counter, _ in ranks(world)(one_update, exact):
            for name, gradient in gradients.items():
                torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-6)
            for name in ("bn.running_mean", "bn.running_var", "average"):
                torch.testing.assert_close(buffers[name].double(), mean[name], rtol=1e-6, atol=1e-6)
            assert torch.equal(buffers["constant"], torch.tensor([0.1, 0.7]))  # to the bit
            assert counter == (3, 3)  # advanced once per update, also on a rank without rows


def skipped_update():
    model = seeded(Normed)
    engine = evener.Engine(
        model, torch.optim.AdamW(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32",
        slice_size=SLICE, report=lambda *event: None,
    )  # fmt: skip
    cut = Cut(evener.rank(), evener.world_size(), None, SLICE)
    states = []
    for k in range(4):
        x, y = mlp_rows(ROWS, seed=k)
        if k == 2:
            x[0, 0] = math.nan
        parts = [(i, b - a, (x[a:b], y[a:b])) for i, (a, b) in cut.numbered(ROWS)]
        update = engine.step_parts(parts, ROWS)
        states.append((update.skipped, {n: b.clone() for n, b in model.named_buffers()}))
    engine.close()
    return states


def test_a_skipped_update_leaves_no_nan_in_running_statistics(ranks):
    for world in (1, 2, 4):
        for states in ranks(world)(skipped_update):
            assert [skipped for skipped, _ in states] == [False, False, True, False]
            for name, value in states[1][1].items():
                assert torch.equal(value, states[2][1][name]), name
                assert torch.isfinite(states[3][1][name]).all()


def test_frozen_batchnorm_keeps_its_statistics_even_after_train():
    model = seeded(Normed)
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32",
        batchnorm="frozen",
    )  # fmt: skip
    assert not engine.batch.coupled
    before = model.bn.running_mean.clone()
    model.train()
    engine.step(mlp_rows(8))
    assert torch.equal(model.bn.running_mean, before)


def late_change():
    model = seeded(Normed)
    model.bn = nn.Identity()
    model.eval()
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32", coupled=False
    )
    engine.step(mlp_rows(4))
    model.train()
    try:
        engine.step(mlp_rows(4))
    except evener.EvenerError as error:
        return str(error)
    finally:
        engine.close()
    return int(model.calls)


def test_buffers_that_start_to_change_late(ranks):
    assert ranks(1)(late_change) == [1]
    for text in ranks(2)(late_change):
        assert "buffers that were constant in the first update changed" in text and "average" in text
