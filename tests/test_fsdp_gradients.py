"""`strategy="fsdp"`: the gradients of `single` on any world size, whatever the model does with its parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import seeded

WORLDS = (1, 2, 3, 4)
ROWS = 13


class Block(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 10), nn.Linear(10, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks, a head tied to the embedding, a scalar parameter, a frozen layer, and one that some batches use only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.sometimes = nn.Parameter(torch.full((3, 6), 0.5))  # fewer rows than ranks
        self.never = nn.Parameter(torch.ones(2))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.zeros(6))

    def encode(self, tokens):
        x = self.embed(tokens).mean(1)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x)

    def forward(self, tokens):
        x = self.encode(tokens)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        rare = tokens[:, :1] == 10
        if bool(rare.any()):
            x = x + self.sometimes.sum(0) * rare
        return self.head(x) * self.temperature


def rows(count: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (count, 4), generator=generator), torch.randint(11, (count,), generator=generator)


def loss_fn(model, batch):
    """A method that is no forward, and two calls of the model."""
    tokens, labels = batch
    loss = F.cross_entropy(model(tokens), labels) + 0.1 * F.cross_entropy(model(tokens.flip(1)), labels)
    return loss + model.encode(tokens).square().mean(), {"rows": evener.Mean(total=len(labels), count=1)}


def token_loss(model, batch):
    tokens, labels = batch
    count = (labels % 3).sum()
    each = F.cross_entropy(model(tokens), labels, reduction="none")
    return evener.Mean(total=(each * (labels % 3)).sum(), count=count)


def new_engine(model, optimizer=None, loss=loss_fn, **how):
    settings = {"device": "cpu", "precision": "fp32", "strategy": "fsdp", "report": lambda *event: None, **how}
    return evener.Engine(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.0), loss, **settings)


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def one_update(edges, loss, microbatch, options, form="step"):
    model = seeded(Net).double()
    engine = new_engine(model, loss=loss, microbatch_size=microbatch, fsdp=options)
    tokens, labels = rows(edges[-1])
    start, stop = edges[evener.rank()], edges[evener.rank() + 1]
    batch = (tokens[start:stop], labels[start:stop]) if stop > start else None
    engine.backward(batch)
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
    update = engine.apply()
    after = engine.step(batch)
    values = update.loss, update.count, update.grad_norm, after.grad_norm, update.skipped, after.metrics
    mean = model.mean.clone()
    notes = engine.notes
    engine.close()
    return gradients, values, mean, notes


def reference(loss):
    model = seeded(Net).double()
    batch = rows(ROWS)
    value = loss(model, batch)
    value = value[0] if isinstance(value, tuple) else value.value / value.count
    value.backward()
    return {n: p.grad for n, p in model.named_parameters()}, float(value.detach())


EDGES = {1: (0, 13), 2: (0, 4, 13), 3: (0, 0, 12, 13), 4: (0, 5, 5, 6, 13)}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("loss", "microbatch", "options"),
    [
        (loss_fn, None, None),
        (loss_fn, 3, {"reshard_after_forward": False}),
        (token_loss, 3, {"accumulate": "keep", "blocks": ["Block"]}),
        (token_loss, 2, {"blocks": ["blocks.1", "frozen"]}),
    ],
)
def test_gradients_are_those_of_one_process(ranks, world, loss, microbatch, options):
    expected, value = reference(loss)
    norm = float(torch.sqrt(sum(g.square().sum() for g in expected.values() if g is not None)))
    for gradients, values, _, _ in ranks(world)(one_update, EDGES[world], loss, microbatch, options):
        for name, gradient in expected.items():
            assert (gradients[name] is None) == (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
        got, _count, before_clip, second, skipped, _ = values
        assert abs(got - value) < 1e-12 and not skipped
        assert abs(before_clip - norm) < 1e-12 and abs(second - norm) < 1e-12
