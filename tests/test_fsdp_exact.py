"""`exact=True` under fsdp: the digest of `single`, at any world size; and back and forth between strategies."""

from __future__ import annotations

import pytest
import torch

import evener
from evener.engine.cut import Cut
from tests.models import make, seeded
from tests.models import token_loss as everything_loss
from tests.models import token_rows as everything_rows
from tests.test_fsdp_gradients import Net, loss_fn, new_engine, rows, token_loss

SLICE = 4


def train(kind, strategy, precision, updates=6, poison=None, exact=True, options=None):
    model = make() if kind == "everything" else seeded(Net)
    loss, data = (everything_loss, everything_rows) if kind == "everything" else (kind, rows)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    how = {"exact": True, "slice_size": SLICE} if exact else {"coupled": False}
    if strategy == "fsdp" and evener.world_size() > 1 and options:
        how["fsdp"] = options
    engine = new_engine(
        model, optimizer, loss, strategy=strategy, precision=precision, max_grad_norm=1.0, seed=3, ema=0.9, **how
    )
    cut = Cut(evener.rank(), evener.world_size(), None, SLICE if exact else None)
    skipped = 0
    for k in range(updates):
        count = 13 if k % 3 == 2 else 30  # four slices: with six ranks, two have none
        batch = data(count, seed=k)
        parts = [(i, b - a, tuple(t[a:b] for t in batch)) for i, (a, b) in cut.numbered(count)]
        if poison == k:
            with torch.no_grad():
                model.temperature.fill_(float("inf"))
        skipped += engine.step_parts(parts, count).skipped
        if poison == k:
            with torch.no_grad():
                model.temperature.fill_(0.5)
    digest = engine.digest()
    ema = {n: float(p.detach().double().sum()) for n, p in engine.ema.module.named_buffers()}
    engine.close()
    return digest, skipped, len(ema)


@pytest.mark.parametrize(
    ("kind", "precision"), [(loss_fn, "fp32"), (token_loss, "bf16"), ("everything", "fp32"), ("everything", "fp16")]
)
def test_digest_is_that_of_one_process(ranks, kind, precision):
    expected = ranks(1)(train, kind, "single", precision)[0]
    for world in (2, 3, 4):
        assert set(ranks(world)(train, kind, "fsdp", precision)) == {expected}, world


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize("kind", [loss_fn, token_loss, "everything"])
def test_digest_at_every_world_size(ranks, kind, precision):
    expected = ranks(1)(train, kind, "single", precision, 12)[0]
    assert ranks(3)(train, kind, "ddp", precision, 12)[0] == expected
    for world in (1, 2, 3, 4, 6):
        blocks = ["LayerNorm"] if kind == "everything" else ["Linear"]
        for options in (None, {"reshard_after_forward": False}, {"blocks": blocks}):
            assert set(ranks(world)(train, kind, "fsdp", precision, 12, None, True, options)) == {expected}, world


def test_an_update_that_is_not_finite_is_skipped_alike(ranks):
    expected = ranks(1)(train, token_loss, "single", "fp32", 4, 2)[0]
    assert expected[1] == 1
    assert set(ranks(3)(train, token_loss, "fsdp", "fp32", 4, 2)) == {expected}


def train_where_only_rows_of_weight_0_use_a_parameter(strategy):
    """Ranks that have no rows in the second update join in with a row of the first one, which uses `sometimes`."""
    model = seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = new_engine(model, optimizer, strategy=strategy, exact=True, slice_size=2)
    tokens, labels = rows(12)
    cut = Cut(evener.rank(), evener.world_size(), None, 2)
    for count, first in ((12, 10), (2, 0)):
        tokens[:, 0] = first
        parts = [(i, b - a, (tokens[a:b].clone(), labels[a:b])) for i, (a, b) in cut.numbered(count)]
        engine.step_parts(parts, count)
    digest = engine.digest()
    engine.close()
    return digest


def test_rows_of_weight_0_step_nothing(ranks):
    expected = ranks(1)(train_where_only_rows_of_weight_0_use_a_parameter, "single")[0]
    for world in (2, 3, 6):
        assert set(ranks(world)(train_where_only_rows_of_weight_0_use_a_parameter, "fsdp")) == {expected}, world


def test_control_fast_mode_differs(ranks):
    """If this ever fails, the tests above prove nothing."""
    digests = {ranks(world)(train, "everything", "fsdp", "fp32", 6, None, False)[0][0] for world in (1, 2, 3, 4)}
    assert len(digests) > 1
