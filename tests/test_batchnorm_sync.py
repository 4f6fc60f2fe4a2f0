"""`batchnorm="sync"`: the gradients of one process's whole-batch BatchNorm, with any rows on any rank."""

from __future__ import annotations

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import mlp_rows, seeded
from tests.test_fsdp_gradients import whole


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 6)
        self.bn = nn.BatchNorm1d(6)
        self.conv = nn.Conv1d(2, 4, 2)
        self.bn2 = nn.BatchNorm1d(4, affine=False, momentum=None)
        self.head = nn.Linear(8, 3)
        self.sometimes = nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.calls += 1
        h = self.bn(self.a(x)).view(-1, 2, 3)
        out = self.head(self.bn2(self.conv(h.tanh())).flatten(1))
        here = x[:, :1] > 1.5
        return out + self.sometimes * here if bool(here.any()) else out


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1]), {"n": evener.Mean(total=len(batch[1]), count=1)}


def new_engine(model, optimizer=None, **how):
    return evener.Engine(
        model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), how.pop("loss_fn", loss_fn), device="cpu",
        precision=how.pop("precision", "fp32"), batchnorm=how.pop("batchnorm", "sync"), report=lambda *event: None, **how,
    )  # fmt: skip


def updates(edges, microbatch, strategy="auto"):
    """Updates of other sizes after the first, where an empty rank has nothing to learn the batch from."""
    model = seeded(Net).double()
    engine = new_engine(model, microbatch_size=microbatch, strategy=strategy)
    rank, results = evener.rank(), []
    for k, bounds in enumerate(edges):
        x, y = mlp_rows(bounds[-1], seed=k, dtype=torch.float64)
        start, stop = bounds[rank], bounds[rank + 1]
        engine.backward((x[start:stop], y[start:stop]) if stop > start else None)
        gradients = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
        update = engine.apply()
        results.append((gradients, {n: b.clone() for n, b in model.named_buffers()}, update.loss, update.metrics["n"]))
    digest = engine.digest()
    engine.close()
    return results, digest


def reference(sizes):
    model = seeded(Net).double()
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for k, rows in enumerate(sizes):
        optimizer.zero_grad()
        loss = loss_fn(model, mlp_rows(rows, seed=k, dtype=torch.float64))[0]
        loss.backward()
        gradients = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        results.append((gradients, {n: b.clone() for n, b in model.named_buffers()}, float(loss.detach())))
    return results


EDGES = {
    1: [(0, 17), (0, 9), (0, 2)],
    2: [(0, 5, 17), (0, 9, 9), (0, 0, 2)],
    3: [(0, 0, 5, 17), (0, 1, 2, 9), (0, 0, 0, 2)],
    4: [(0, 6, 6, 16, 17), (0, 2, 4, 6, 9), (0, 1, 1, 1, 2)],
}


@pytest.mark.parametrize(("world", "strategy"), [(1, "auto"), (2, "auto"), (3, "auto"), (4, "auto"), (3, "fsdp")])
def test_gradients_and_statistics_are_those_of_the_whole_batch(ranks, world, strategy):
    expected = reference([17, 9, 2])
    everywhere = ranks(world)(updates, EDGES[world], None, strategy)
    assert len({digest for _, digest in everywhere}) == 1
    for results, _ in everywhere:
        for (gradients, buffers, loss), (got, got_buffers, got_loss, _) in zip(expected, results):
            for name, gradient in gradients.items():
                assert (got[name] is None) == (gradient is None), name
                if gradient is not None:
                    torch.testing.assert_close(got[name], gradient, rtol=1e-12, atol=1e-12)
            for name, value in buffers.items():
                torch.testing.assert_close(got_buffers[name], value, rtol=1e-6, atol=1e-7)
            assert abs(got_loss - loss) < 1e-12


def test_without_it_the_gradients_differ(ranks):
    """The control: slices of their own statistics give another gradient."""
    control = ranks(2)(control_update)[0]
    assert (control - reference([17])[0][0]["a.weight"]).abs().max() > 1e-3


def control_update():
    model = seeded(Net).double()
    engine = new_engine(model, batchnorm="slice", slice_size=9)
    x, y = mlp_rows(17, dtype=torch.float64)
    rank = evener.rank()
    engine.backward((x[9 * rank : 9 + 8 * rank], y[9 * rank : 9 + 8 * rank]))
    gradient = model.a.weight.grad.clone()
    engine.apply()
    engine.close()
    return gradient


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_fewer_microbatches_join_in(ranks, world):
    """Step k's statistics are over the k-th microbatches of all ranks; the reference does it by hand."""
    edges = {2: (0, 3, 13), 3: (0, 0, 3, 13)}[world]
    model = seeded(Net).double()
    x, y = mlp_rows(13, dtype=torch.float64)
    # rank with 3 rows: one microbatch; rank with 10 rows: 5 + 5 in two
    for rows in ([*range(3), *range(3, 8)], [*range(8, 13)]):
        one = seeded(Net).double()
        (loss_fn(one, (x[rows], y[rows]))[0] * len(rows) / 13).backward()
        for p, q in zip(model.parameters(), one.parameters()):
            if q.grad is not None:
                p.grad = q.grad if p.grad is None else p.grad + q.grad
    for results, _ in ranks(world)(updates, [edges], 5):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(results[0][0][name], parameter.grad, rtol=1e-12, atol=1e-12)
        assert results[0][3] == 13 / 3  # metrics: three microbatches, the joining rank counts nothing
        assert int(results[0][1]["calls"]) == 1


def overflow(model, batch):
    """A loss whose gradient is not finite for a row that is alone, though its value is."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss + (model.a.bias[0] * 0).sqrt() if len(batch[1]) == 1 else loss


def joins_with_a_gradient_that_is_not_finite():
    model = seeded(Net).double()
    engine = new_engine(model, loss_fn=overflow)
    x, y = mlp_rows(8, dtype=torch.float64)
    update = engine.step((x, y) if evener.rank() == 0 else None)
    finite = not update.skipped
    engine.close()
    return finite


def test_what_a_joining_rank_computes_leaves_no_trace(ranks):
    """0 times infinity is not 0: the row that a rank joins in with has an infinite gradient."""
    assert ranks(2)(joins_with_a_gradient_that_is_not_finite) == [True, True]


def looks_like():
    model = seeded(Net)
    keys = list(model.state_dict())
    engine = new_engine(model, ema=0.5)
    during = (list(model.state_dict()), type(model.bn).__name__, isinstance(model.bn, nn.BatchNorm1d))
    pickled = pickle.loads(pickle.dumps(model))  # noqa: S301  our own bytes
    copies = [type(copy.deepcopy(model).bn), type(pickled.bn), type(engine.ema.module.bn)]
    engine.step(mlp_rows(4))
    with torch.no_grad():
        if evener.rank() == 0:  # outside of an update nothing communicates
            model(mlp_rows(4)[0])
    engine.close()
    return keys, during, [one is nn.BatchNorm1d for one in copies], type(model.bn) is nn.BatchNorm1d


def test_the_layers_stay_what_they_are(ranks):
    for keys, (names, kind, is_batchnorm), copies, restored in ranks(2)(looks_like):
        assert names == keys and kind == "BatchNorm1d" and is_batchnorm
        assert copies == [True, True, True] and restored


def in_half_precision(precision):
    model = seeded(Net)
    engine = new_engine(model, torch.optim.AdamW(model.parameters(), lr=0.01), precision=precision)
    losses = []
    for k in range(4):
        x, y = mlp_rows(12, seed=k)
        losses.append(engine.step((x[evener.rank() :: 2], y[evener.rank() :: 2])).loss)
    digest = engine.digest()
    engine.close()
    return digest, losses


def test_half_precision(ranks):
    for precision in ("bf16", "fp16", "bf16-true"):
        results = ranks(2)(in_half_precision, precision)
        assert results[0] == results[1] and all(0 < loss < 5 for loss in results[0][1])


def whole_run(folder, **keywords):
    model = seeded(Net)
    x, y = mlp_rows(23)
    run = evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, (x, y), global_batch_size=7, batchnorm="sync",
        dir=folder, resume="never", precision="fp32", **keywords,
    )  # fmt: skip
    for update in run.updates(epochs=2):
        last = update
    score = run.evaluate((x[:5], y[:5]))["loss"]
    weights = model.a.weight.detach().clone()
    line = run.contract_line()
    run.close()
    return weights, last.loss, score, line


def test_a_whole_run_is_the_same_on_any_world_size(ranks, tmp_path):
    """Epochs end with an update of two rows: with four ranks, two of them only join in."""
    results = {world: ranks(world)(whole_run, str(tmp_path / str(world))) for world in (1, 2, 4)}
    weights, loss, score, line = results[1][0]
    assert "coupled" not in line
    for world in (2, 4):
        for got, got_loss, got_score, _ in results[world]:
            torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-5)
            assert abs(got_loss - loss) < 1e-4 and abs(got_score - score) < 1e-4


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def refused(kind):
    how = {
        "exact": {"exact": True, "slice_size": 2},
        "layer": {"batchnorm": "slice", "slice_size": 2},
        "batch": {},
    }[kind]
    model = seeded(Net)
    if kind == "layer":
        model.bn = nn.SyncBatchNorm(6)
    try:
        engine = new_engine(model, **how)
        engine.step(Pair(*mlp_rows(4)) if evener.rank() else None, loss_fn)
    except evener.EvenerError as error:
        return str(error)


def test_what_cannot_be_is_refused(ranks):
    assert all('batchnorm="sync" with exact=True' in text for text in ranks(2)(refused, "exact"))
    assert all("bn is a SyncBatchNorm" in text and 'batchnorm="sync"' in text for text in ranks(2)(refused, "layer"))
    for text in ranks(2)(refused, "batch"):
        assert "rank 0 has no rows in the first update" in text and "a Pair cannot be sent to it from rank 1" in text
