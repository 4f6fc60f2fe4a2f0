"""Two gradients for one update: sharpness-aware minimisation through `Engine.backward` and `apply`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import make, mlp_rows, row_loss

RHO, ROWS = 0.05, 12


def norm_of(parameters):
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters]))


def sam_update(engine, parameters, batch):
    engine.backward(batch)
    scale = RHO / (norm_of(parameters) + 1e-12)
    steps = [p.grad * scale for p in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, steps)
    engine.backward(batch)
    with torch.no_grad():
        torch._foreach_sub_(parameters, steps)
    return engine.apply()


def with_engine(updates, keywords):
    model = make("mlp", dtype=torch.float64)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    engine = evener.Engine(model, optimizer, row_loss, device="cpu", precision="fp32", **keywords)
    rank, world = engine.group.rank, engine.group.world_size
    for number in range(updates):
        x, y = mlp_rows(ROWS, seed=number, dtype=torch.float64)
        start, stop = rank * ROWS // world, (rank + 1) * ROWS // world
        update = sam_update(engine, parameters, (x[start:stop], y[start:stop]))
        assert update.number == number
    engine.close()
    return [p.detach() for p in parameters]


def by_hand(updates):
    model = make("mlp", dtype=torch.float64)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for number in range(updates):
        x, y = mlp_rows(ROWS, seed=number, dtype=torch.float64)
        F.cross_entropy(model(x), y).backward()
        scale = RHO / (norm_of(parameters) + 1e-12)
        steps = [p.grad * scale for p in parameters]
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_add_(parameters, steps)
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, steps)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("keywords", [{}, {"microbatch_size": 3}, {"exact": True, "slice_size": 2}])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_as_a_hand_written_loop(ranks, world, keywords):
    expected = by_hand(5)
    for parameters in ranks(world)(with_engine, 5, keywords):
        assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(parameters, expected))


class Recording(nn.Module):
    """A dropout whose masks are kept, before and after a BatchNorm."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)
        self.masks = []

    def forward(self, x):
        x = self.norm(self.inner(x))
        mask = self.drop(torch.ones_like(x))
        self.masks.append(mask.detach().clone())
        return self.head(x * mask)


def masks_of(updates, skip=False):
    torch.manual_seed(0)
    model = Recording()
    parameters = list(model.parameters())
    engine = evener.Engine(
        model, torch.optim.SGD(parameters, lr=0.1), row_loss, device="cpu", precision="fp32", slice_size=2,
        global_batch_size=ROWS, report=lambda *event: None,
    )  # fmt: skip
    rank, world = engine.group.rank, engine.group.world_size
    seen, before = [], {name: b.clone() for name, b in model.named_buffers()}
    for number in range(updates):
        model.masks.clear()
        x, y = mlp_rows(ROWS, seed=number)
        if skip:
            x[0] = float("nan")
        start, stop = rank * ROWS // world, (rank + 1) * ROWS // world
        sam_update(engine, parameters, (x[start:stop], y[start:stop]))
        half = len(model.masks) // 2
        seen.append((model.masks[:half], model.masks[half:]))
    engine.settle()
    unchanged = all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    engine.close()
    return seen, int(model.norm.num_batches_tracked), unchanged


@pytest.mark.parametrize("world", [1, 2, 3])
def test_dropout_is_the_same_in_both_passes_and_another_in_the_next_update(ranks, world):
    for seen, _, _ in ranks(world)(masks_of, 2):
        for first, second in seen:
            assert first and all(torch.equal(a, b) for a, b in zip(first, second))
        assert not torch.equal(seen[0][0][0], seen[1][0][0])


@pytest.mark.parametrize("world", [1, 3])
def test_running_statistics_advance_once_per_update(ranks, world):
    assert {count for _, count, _ in ranks(world)(masks_of, 3)} == {3}


@pytest.mark.parametrize("world", [1, 3])
def test_a_skipped_update_leaves_running_statistics_as_they_were(ranks, world):
    assert all(unchanged for *_, unchanged in ranks(world)(masks_of, 1, True))
