"""Gradients of one update equal a single-process, single-microbatch float64 reference to 1e-12, for random cuts."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import evener
from tests.conftest import SEED
from tests.models import MLP, make, mlp_rows, seeded

WORLDS = (1, 2, 3, 4)


class Penalised(MLP):
    """A parameter that only some batches use, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes = nn.Parameter(torch.full((3,), 0.5))
        self.never = nn.Parameter(torch.ones(2))


def build(kind: str) -> nn.Module:
    return seeded(Penalised if kind == "sometimes" else MLP, 1).double()


def weights(rows: int) -> torch.Tensor:
    """A token count per row, from 0 to 40, very uneven."""
    return (torch.arange(rows, dtype=torch.float64) * 7919 % 41).floor()


def rows_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = model(x)
    if hasattr(model, "sometimes") and bool((x[:, 0] > 0.8).any()):
        logits = logits + model.sometimes * (x[:, :1] > 0.8)
    return F.cross_entropy(logits, y, reduction="none")


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient penalty per row: double backward."""
    x = x.detach().requires_grad_(True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradient.pow(2).sum(1)


def make_loss(form: str):
    def loss_fn(model, batch):
        x, y, w = batch
        each = rows_of(model, x, y)
        if form == "penalty":
            each = each + 0.3 * penalty(model, x)
        if form in ("rows", "penalty"):
            return each.mean()
        if form == "total":
            return evener.Mean(total=(each * w).sum(), count=w.sum())
        if form == "mean":
            count = w.sum()
            return evener.Mean(mean=(each * w).sum() / count.clamp(min=1), count=count)
        return evener.Mean(total=each.sum(), count=len(y))  # "number": a denominator that is no tensor

    return loss_fn


def one_update(kind, form, edges, microbatch, strategy_options):
    """Rank's rows are edges[rank]:edges[rank+1]. Returns the gradients (None where unused) and the update's values."""
    rank, world = evener.rank(), evener.world_size()
    model = build(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = evener.Engine(
        model,
        optimizer,
        make_loss(form),
        device="cpu",
        precision="fp32",
        microbatch_size=microbatch,
        report=lambda *event: None,
        **strategy_options,
    )
    x, y = mlp_rows(edges[-1], dtype=torch.float64)
    start, stop = edges[rank], edges[rank + 1]
    batch = (x[start:stop], y[start:stop], weights(edges[-1])[start:stop]) if stop > start else None
    engine.backward(batch)
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    update = engine.apply()
    result = gradients, update.loss, update.count, update.rows, update.grad_norm, update.skipped
    engine.close()
    assert world == evener.world_size()
    return result


def reference(kind, form, rows):
    model = build(kind)
    x, y = mlp_rows(rows, dtype=torch.float64)
    w = weights(rows)
    each = rows_of(model, x, y)
    if form == "penalty":
        each = each + 0.3 * penalty(model, x)
    loss = (each * w).sum() / w.sum() if form in ("total", "mean") else each.mean()
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}, float(loss.detach())


cuts = st.integers(1, 40).flatmap(
    lambda rows: st.tuples(
        st.just(rows),
        st.lists(st.integers(0, rows), min_size=3, max_size=3).map(sorted),
        st.one_of(st.none(), st.integers(1, rows)),
    )
)


drawn = given(
    cut=cuts,
    world=st.sampled_from(WORLDS),
    kind=st.sampled_from(["plain", "sometimes"]),
    form=st.sampled_from(["rows", "total", "mean", "number", "penalty"]),
)
unbounded = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


def holds_for(ranks, cut, world, kind, form):
    rows, inner, microbatch = cut
    edges = [0, *inner[: world - 1], rows]
    if form in ("total", "mean") and weights(rows).sum() == 0:
        return
    expected, loss = reference(kind, form, rows)
    norm = torch.sqrt(sum(g.pow(2).sum() for g in expected.values() if g is not None))
    for gradients, got_loss, count, got_rows, got_norm, skipped in ranks(world)(
        one_update, kind, form, edges, microbatch, {}
    ):
        for name, gradient in expected.items():
            assert (gradients[name] is None) == (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12)
        assert abs(got_loss - loss) < 1e-12 * max(1, abs(loss))
        assert count == (weights(rows).sum() if form in ("total", "mean") else rows)
        assert got_rows == rows and not skipped
        assert abs(got_norm - norm) < 1e-12 * max(1, norm)


@settings(max_examples=20, **unbounded)
@drawn
def test_any_cut_gives_the_reference_gradient(ranks, cut, world, kind, form):
    holds_for(ranks, cut, world, kind, form)


@pytest.mark.full
@settings(max_examples=400, **unbounded)
@drawn
def test_many_cuts_give_the_reference_gradient(ranks, cut, world, kind, form):
    holds_for(ranks, cut, world, kind, form)


def test_dp_parts_of_any_size_give_the_reference_gradient(ranks):
    expected, loss = reference("plain", "rows", 23)
    for scatter in ((3, 1), (1, 0, 2), [1, 1, 1, 1]):
        options = {"strategy": "dp", "scatter": scatter}
        for form in ("rows", "number"):
            gradients, got_loss, *_ = ranks(1)(one_update, "plain", form, [0, 23], 10, options)[0]
            for name, gradient in expected.items():
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12)
            assert abs(got_loss - loss) < 1e-12


def custom_scatter(batch, parts):
    x, y, w = batch
    return [(x[::2], y[::2], w[::2]), (x[1::2], y[1::2], w[1::2])]


def lossy_scatter(batch, parts):
    return [tuple(leaf[:1] for leaf in batch)]


def test_dp_custom_scatter(ranks):
    expected, _ = reference("plain", "rows", 8)
    model = build("plain")
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.0), make_loss("rows"), device="cpu", precision="fp32",
        strategy="dp", scatter=custom_scatter,
    )  # fmt: skip
    engine.targets[""].spread.devices = engine.targets[""].spread.devices * 2
    x, y = mlp_rows(8, dtype=torch.float64)
    engine.backward((x, y, weights(8)))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-12)
    assert any("ddp is faster" in note for note in engine.notes)


def accumulate(world_rows, microbatch):
    """float32: the last window of an epoch is shorter and must not be divided by the configured count."""
    model = make("mlp")
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.0), row_mean, device="cpu", precision="fp32",
        microbatch_size=microbatch,
    )  # fmt: skip
    x, y = mlp_rows(world_rows)
    world, rank = evener.world_size(), evener.rank()
    start, stop = rank * world_rows // world, (rank + 1) * world_rows // world
    engine.backward((x[start:stop], y[start:stop]) if stop > start else None)
    gradient = model.head.weight.grad.clone()
    engine.apply()
    engine.close()
    return gradient


def row_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_short_last_window_is_divided_by_its_own_rows(ranks):
    """Others divide by the configured number of microbatches: with 1 of 4 microbatches left, 4 times too small."""
    rows = 3  # one microbatch where four were configured (microbatch 3 of a batch of 12)
    model = make("mlp")
    row_mean(model, mlp_rows(rows)).backward()
    for world in WORLDS:
        for gradient in ranks(world)(accumulate, rows, 3):
            torch.testing.assert_close(gradient, model.head.weight.grad, rtol=1e-6, atol=1e-7)


def test_token_means_on_very_uneven_ranks(ranks):
    """A mean of per-rank means is far off here; the global denominator is not."""
    rows, edges = 12, [0, 1, 12]
    expected, _ = reference("plain", "total", rows)
    x, y = mlp_rows(rows, dtype=torch.float64)
    w = weights(rows)
    wrong = build("plain")
    for start, stop in pairwise(edges):
        each = rows_of(wrong, x[start:stop], y[start:stop])
        ((each * w[start:stop]).sum() / w[start:stop].sum().clamp(min=1) / 2).backward()
    error = (wrong.head.weight.grad - expected["head.weight"]).norm() / expected["head.weight"].norm()
    assert error > 0.3  # what the naive way would do
    for gradients, *_ in ranks(2)(one_update, "plain", "mean", edges, None, {}):
        torch.testing.assert_close(gradients["head.weight"], expected["head.weight"], rtol=1e-12, atol=1e-12)


def test_seed_is_printed():
    assert isinstance(SEED, int)
