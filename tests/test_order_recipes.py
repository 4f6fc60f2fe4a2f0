"""The orders of docs/data.md: weighted and grouped by length, the same on any world size and after a resume."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import evener
from evener.data import Order
from evener.errors import DataError
from tests.models import seeded
from tests.test_docs import ROOT, blocks


@functools.cache
def page():
    """The recipes as they stand on the page, without the training below them."""
    text = next(text for _, _, text in blocks(ROOT / "docs" / "data.md") if "def by_length" in text)
    scope = {}
    exec(text[: text.index("def loss_fn")], scope)  # noqa: S102 (our own page)
    return scope


def test_weights_are_kept_and_every_epoch_differs():
    rare, weighted = page()["rare"], page()["weighted"]
    drawn = [weighted(1, epoch) for epoch in range(20)]
    share = np.mean([rare[rows].mean() for rows in drawn])
    expected = 4 * rare.mean() / (4 * rare.mean() + 1 - rare.mean())
    assert abs(share - expected) < 0.02
    assert not np.array_equal(drawn[0], drawn[1]) and np.array_equal(drawn[0], weighted(1, 0))
    assert not np.array_equal(drawn[0], weighted(2, 0))


def test_batches_hold_rows_of_similar_length_and_every_row_once():
    lengths, by_length, size = page()["lengths"], page()["by_length"], page()["BATCH"]
    rows = by_length(0, 3)
    assert sorted(rows) == list(range(len(lengths)))
    spread = [np.ptp(lengths[rows[i : i + size]]) for i in range(0, len(rows), size)]
    assert max(spread) < 60 < np.ptp(lengths) and not np.array_equal(rows, by_length(0, 4))


def train(folder, name, stop_at=None):
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.3), torch.nn.Linear(4, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_fn(model, batch):
        longest = evener.Mean(total=float(batch.shape[1]), count=1)
        return (model(batch.sum(1, keepdim=True) / 100) ** 2).mean(), {"longest": longest}

    run = evener.Run(
        model, optimizer, loss_fn, page()["Lines"](), global_batch_size=page()["BATCH"], slice_size=10, order=page()[name],
        collate_fn=page()["pad"], exact=True, precision="fp32",
        num_workers=0, dir=folder, save_every=None,
    )  # fmt: skip
    try:
        for update in run.updates(epochs=2):
            if update.number == stop_at:
                run.stop()
        return run.digest()
    except evener.Stopped:
        return None
    finally:
        run.close()


@pytest.mark.parametrize("name", ["weighted", pytest.param("by_length", marks=pytest.mark.full)])
def test_an_order_is_the_same_on_any_world_size_and_after_a_resume(ranks, tmp_path, name):
    whole = ranks(1)(train, str(tmp_path / "1"), name)
    for world in (2, 3, 4):
        assert ranks(world)(train, str(tmp_path / str(world)), name) == whole * world
    assert ranks(3)(train, str(tmp_path / "run"), name, 25) == [None] * 3
    assert ranks(2)(train, str(tmp_path / "run"), name) == whole * 2


def test_an_order_that_raises_is_named_with_its_line():
    def order(seed, epoch):
        return [1 / epoch]

    with pytest.raises(DataError) as caught:
        Order(10, 7, order).length(0)
    text = str(caught.value)
    assert "order(seed=7, epoch=0) failed: ZeroDivisionError: division by zero" in text
    assert "test_order_recipes.py:" in text and "in order" in text and "(seed, epoch)" in text

    with pytest.raises(DataError, match=r"order\(seed=7, epoch=0\) failed: TypeError: .*takes 1 positional argument"):
        Order(10, 7, lambda epoch: [0]).length(0)
