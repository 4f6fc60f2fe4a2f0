"""`strategy="fsdp"`: what a model or a hook does differently per rank, or with whole tensors, is right or refused."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import evener
from tests.models import seeded
from tests.test_fsdp_gradients import whole


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return x + self.linear(x).tanh()


class Dropped(nn.Module):
    """Three of four equal blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(6, 1)

    def forward(self, x, skip):
        for i, block in enumerate(self.blocks):
            x = x if i == skip else block(x)
        return self.head(x)


def dropped(draw, strategy, exact):
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)[2 * evener.rank() :][:2]
    choices = random.Random(3)

    def loss_fn(model, batch):
        return model(batch, choices.randrange(4) if draw == "equal" else evener.rank() + 1).square().mean()

    model = seeded(Dropped).double()
    how = {"exact": True, "slice_size": 2} if exact else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = evener.Engine(model, optimizer, loss_fn, device="cpu", precision="fp32", strategy=strategy, **how)
    before = [whole(p.detach()) for p in model.parameters()]
    try:
        return [engine.step(x).grad_norm for _ in range(3)]
    except evener.EvenerError as error:
        unchanged = all(torch.equal(whole(p.detach()), old) for p, old in zip(model.parameters(), before))
        return str(error), unchanged
    finally:
        engine.close()


@pytest.mark.parametrize("exact", [False, True])
def test_ranks_that_run_different_blocks_are_refused_in_words(ranks, exact):
    for words, unchanged in ranks(2)(dropped, "own", "fsdp", exact):
        assert unchanged
        assert "rank 0 gathers blocks.2, rank 1 gathers blocks.1" in words or (
            "rank 0 gathers blocks.1, rank 1 gathers blocks.2" in words
        )
        assert "equal on all ranks" in words and 'strategy="ddp"' in words


def test_ranks_that_choose_alike_are_not(ranks):
    expected = ranks(2)(dropped, "equal", "ddp", False)[0]
    for norms in ranks(2)(dropped, "equal", "fsdp", False):
        assert norms == pytest.approx(expected, rel=1e-12)


def compiled(strategy, compile, recompute):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).chunk(evener.world_size())[evener.rank()]
    model = seeded(Dropped)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    engine = evener.Engine(
        model, optimizer, lambda model, x: model(x, -1).square().mean(), device="cpu", precision="fp32",
        strategy=strategy, microbatch_size=2, compile=compile, activation_checkpointing=recompute,
    )  # fmt: skip
    try:
        # inductor's C++ compiler takes seconds for each kernel
        with torch.compiler.set_stance("default", force_backend="aot_eager"):
            norms = [engine.step(x).grad_norm for _ in range(3)]
        return norms, [whole(p.detach()).clone() for p in model.parameters()], graphs["unique_graphs"] - before
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("world", "recompute"),
    [(2, None), *(pytest.param(*one, marks=pytest.mark.full) for one in [(2, "full"), (3, None)])],
)
def test_compiled_blocks_train_the_same(ranks, world, recompute):
    expected, weights, _ = ranks(world)(compiled, "ddp", False, None)[0]
    for norms, mine, graphs in ranks(world)(compiled, "fsdp", True, recompute):
        assert graphs
        assert norms == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(mine, weights, rtol=0, atol=1e-6)


def looked_at(what, draw):
    """evaluate or predict with blocks that each rank draws for itself, or all alike."""
    data = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    model = seeded(Dropped)

    def values(model, x):
        return model(x, evener.rank() + 1 if draw == "own" else 1)

    def metric_fn(model, x):
        return {"mean": evener.Mean(total=values(model, x).sum(), count=len(x))}

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evener.Run(
        model, optimizer, lambda model, x: model(x, 0).mean(), data, global_batch_size=8, strategy="fsdp",
        precision="fp32", ema=0.5,
    ) as run:  # fmt: skip
        try:
            for of in (None, run.ema):
                if what == "evaluate":
                    run.evaluate(data, metric_fn=metric_fn, model=of, batch_size=2)
            if what == "predict":
                run.predict(data, values)
        except evener.EvenerError as error:
            return str(error)
    return "equal"


@pytest.mark.parametrize("what", ["evaluate", "predict"])
def test_an_evaluation_of_different_blocks_is_refused_in_words(ranks, what):
    for words in ranks(2)(looked_at, what, "own"):
        assert "ranks ran different blocks" in words
        assert "rank 0 gathers blocks.2, rank 1 gathers blocks.1" in words or (
            "rank 0 gathers blocks.1, rank 1 gathers blocks.2" in words
        )
    assert ranks(2)(looked_at, what, "equal") == ["equal", "equal"]


def scaled_by_numbers(strategy):
    """Each gradient to a norm of at most 0.05, with numbers that Python reads."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)[2 * evener.rank() :][:2]
    read = []

    def before_step(model):
        for p in model.parameters():
            norm = p.grad.norm().item()
            read.extend([norm, float(p.grad.sum()), float(p.grad.abs().sum()), bool(p.grad.norm() > 0.05)])
            if norm > 0.05:
                p.grad.mul_(0.05 / norm)

    model = seeded(Dropped).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = evener.Engine(
        model, optimizer, lambda model, batch: model(batch, 0).square().mean() + model.blocks[0](batch).mean(),
        device="cpu", precision="fp32", strategy=strategy, before_step=before_step,
    )  # fmt: skip
    norms = [engine.step(x).grad_norm for _ in range(2)]
    engine.close()
    return read + norms


def test_numbers_that_before_step_reads_are_whole(ranks):
    expected = ranks(2)(scaled_by_numbers, "ddp")[0]
    for numbers in ranks(2)(scaled_by_numbers, "fsdp"):
        assert numbers == pytest.approx(expected, rel=1e-9, abs=1e-14)


def with_parameters(kind, strategy):
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)[2 * evener.rank() :][:2]

    def loss_fn(model, batch):
        if kind == "penalty":
            return model(batch, 0).square().mean() + sum(p.square().sum() for p in model.blocks[1].parameters())
        if kind == "metric":
            size = sum(p.detach().square().sum() for p in model.blocks[1].parameters())
            return model(batch, 0).square().mean(), {"size": evener.Mean(total=size, count=1)}
        batch = batch.clone().requires_grad_()
        output = model(batch, 0)
        (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        return output.square().mean() + slope.square().mean()

    model = seeded(Dropped).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = evener.Engine(model, optimizer, loss_fn, device="cpu", precision="fp32", strategy=strategy)
    try:
        return engine.step(x).grad_norm
    except evener.EvenerError as error:
        return str(error)
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["penalty", "metric", "slope"])
def test_whole_parameters_in_loss_fn_are_refused_in_words(ranks, kind):
    for words in ranks(2)(with_parameters, kind, "fsdp"):
        assert "loss_fn computes with parameters themselves" in words and 'strategy="ddp"' in words
    assert ranks(2)(with_parameters, kind, "ddp")[0] > 0  # it is right there
