"""Every row exactly once, on any world size: no padding, no repeats, in training and evaluation."""

from __future__ import annotations

import random
from itertools import chain

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import evener
from tests.models import make, mlp_rows

WORLDS = (1, 2, 3, 4)


class Counted(Dataset):
    """Rows that say which they are."""

    def __init__(self, rows: int) -> None:
        self.x, self.y = mlp_rows(rows)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i], i


def seen_rows(tmp, rows, batch, keywords):
    seen = []

    def loss_fn(model, batch):
        x, y, index = batch
        seen[-1].extend(index.tolist())
        return F.cross_entropy(model(x), y)

    model = make("mlp")
    run = evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, Counted(rows),
        global_batch_size=batch, precision="fp32", dir=f"{tmp}/run", **keywords,
    )  # fmt: skip
    seen.append([])
    sizes, numbers = [], []
    for update in run.updates(epochs=2):
        sizes.append((update.rows, update.epoch, update.ends_epoch))
        numbers.append(update.number)
        seen.append([])
    run.close()
    return [sorted(one) for one in seen[:-1]], sizes, numbers


def union(results):
    return [sorted(row for rank in results for row in rank[0][k]) for k in range(len(results[0][0]))]


@pytest.mark.parametrize("keywords", [{}, {"microbatch_size": 2}, {"num_workers": 1}, {"order": "sequential"}])
def test_nine_rows_stay_nine(ranks, tmp_path, keywords):
    reference = None
    for world in WORLDS:
        results = ranks(world)(seen_rows, str(tmp_path / str(world)), 9, 4, keywords)
        updates = union(results)
        assert [len(one) for one in updates] == [4, 4, 1, 4, 4, 1]  # others train on 12 rows here, or on 16
        assert sorted(chain(*updates[:3])) == sorted(chain(*updates[3:])) == list(range(9))
        reference = reference or updates
        assert updates == reference  # the same rows in the same update on every world size
        for _, sizes, numbers in results:
            assert sizes == [(4, 0, False), (4, 0, False), (1, 0, True), (4, 1, False), (4, 1, False), (1, 1, True)]
            assert numbers == list(range(6))


def test_drop_last_drops_and_an_order_function_decides(ranks, tmp_path):
    results = ranks(3)(seen_rows, str(tmp_path / "a"), 9, 4, {"drop_last": True})
    assert [len(one) for one in union(results)] == [4, 4, 4, 4]
    results = ranks(2)(seen_rows, str(tmp_path / "b"), 9, 4, {"order": weighted})
    assert union(results) == [[1, 3, 3, 8], [5], [1, 3, 3, 8], [6]]


def weighted(seed, epoch):
    return [1, 3, 3, 8, 5 + epoch]


class Stateful(nn.Module):
    """A model that betrays any trace: dropout, a buffer that every forward changes, mixed train and eval modes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make("mlp")
        self.drop = nn.Dropout(0.5)
        self.register_buffer("forwards", torch.tensor(0.0))

    def forward(self, x):
        self.forwards += 1
        return self.drop(self.net(x))


def metric(model, batch):
    x, y, index = batch
    logits = model(x)
    noise = torch.rand(1) * 0 + random.random() * 0 + numpy.random.rand() * 0  # draws from every generator
    hits = (logits.argmax(1) == y).sum()
    return F.cross_entropy(logits, y) + float(noise), {
        "accuracy": evener.Mean(total=hits, count=len(y)),
        "index": evener.Mean(total=index.sum(), count=len(index)),
    }


def evaluated(tmp, with_evaluation):
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    model = Stateful()
    model.net.body[1].eval()
    run = evener.Run(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), metric, Counted(10),
        global_batch_size=4, precision="fp32", dir=f"{tmp}/run-{with_evaluation}", exact=True, slice_size=1,
    )  # fmt: skip
    scores, draws = [], []
    for update in run.updates(epochs=2):
        if with_evaluation and update.number % 2:
            for rows in (1, 7, 11):
                scores.append((rows, run.evaluate(Counted(rows), batch_size=3)))
        draws.append((float(torch.rand(1)), random.random(), float(numpy.random.rand())))
    modes = [module.training for module in model.modules()]
    result = run.digest(), draws, modes, scores
    run.close()
    return result


def test_evaluation_counts_every_row_once_and_leaves_no_trace(ranks, tmp_path):
    for world in WORLDS:
        with_, without = (ranks(world)(evaluated, str(tmp_path / str(world)), flag) for flag in (True, False))
        for (digest, draws, modes, scores), (digest0, draws0, modes0, _) in zip(with_, without):
            assert digest == digest0 and draws == draws0 and modes == modes0
            for rows, score in scores:
                assert score["index"] == (rows - 1) / 2  # the exact mean over 0..rows-1: each once
    assert len({one[0] for one in with_}) == 1


def test_epoch_means_are_exact(ranks, tmp_path):
    for world in (1, 3):
        for epoch_values, by_hand in ranks(world)(epoch_means, str(tmp_path / str(world))):
            assert epoch_values == pytest.approx(by_hand, rel=1e-9)


def epoch_means(tmp):
    model = make("mlp")

    def loss_fn(model, batch):
        x, y, _ = batch
        each = F.cross_entropy(model(x), y, reduction="none")
        return each.mean(), {"hits": evener.Mean(total=(each > 1).sum(), count=len(y))}

    run = evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, Counted(300), global_batch_size=7,
        precision="fp32", dir=f"{tmp}/run",
    )  # fmt: skip
    values, by_hand = [], []
    for epoch in run.epochs(2):
        totals = [0.0, 0.0, 0]
        for update in epoch:
            totals[0] += update.loss * update.rows
            totals[1] += update.metrics["hits"] * update.rows
            totals[2] += update.rows
        values += [epoch.loss, epoch.metrics["hits"], epoch.updates]
        by_hand += [totals[0] / totals[2], totals[1] / totals[2], 43]
    run.close()
    return values, by_hand
