"""`exact=True`: the same bits at world sizes 1, 2, 3, 4 and 6, and plain DDP as the control that must differ."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import evener
from evener.engine.cut import Cut
from tests.models import make, token_loss, token_rows

WORLDS = (1, 2, 3, 4, 6)
ROWS, SLICE = 30, 4  # eight slices, the last of two rows; not divisible by 3 or 6


def train(
    optimizer: str,
    precision: str,
    exact: bool,
    updates: int = 20,
    poison: int | None = None,
    threads: int | None = None,
    loss_fn=token_loss,
) -> tuple[str, int]:
    """Digest after some updates of 30 rows; every fifth update is a tail of 13 rows (some ranks have none)."""
    model = make()
    kinds = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "sgd": lambda: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=1e-3),
    }
    how = {"exact": True, "slice_size": SLICE} if exact else {"coupled": False}
    engine = evener.Engine(
        model,
        kinds[optimizer](),
        loss_fn,
        device="cpu",
        precision=precision,
        max_grad_norm=1.0,
        seed=3,
        report=lambda *event: None,
        **how,
    )
    cut = Cut(evener.rank(), evener.world_size(), None, SLICE if exact else None)
    skipped = 0
    for k in range(updates):
        rows = 13 if k % 5 == 4 else ROWS
        tokens, labels = token_rows(rows, seed=k)
        parts = [(i, stop - start, (tokens[start:stop], labels[start:stop])) for i, (start, stop) in cut.numbered(rows)]
        if poison == k:
            with torch.no_grad():
                model.norm.weight[0] = float("nan") if k % 2 else float("inf")
        if threads is not None:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(False)
        update = engine.step_parts(parts, rows)
        skipped += update.skipped
        if poison == k:
            with torch.no_grad():
                model.norm.weight[0] = 1.0
    digest = engine.digest()
    engine.close()
    return digest, skipped


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_digest_is_equal_at_every_world_size(ranks, optimizer, precision):
    digests = {world: set(ranks(world)(train, optimizer, precision, True)) for world in WORLDS}
    assert all(len(one) == 1 for one in digests.values())
    assert len(set.union(*digests.values())) == 1, digests


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_digest_is_equal_after_many_updates(ranks, precision):
    digests = {world: set(ranks(world)(train, "adamw", precision, True, 100)) for world in WORLDS}
    assert len(set.union(*digests.values())) == 1, digests


def test_fp16_with_its_scaler_is_exact_too(ranks):
    digests = {world: set(ranks(world)(train, "adamw", "fp16", True, 8)) for world in (1, 3, 4)}
    assert len(set.union(*digests.values())) == 1, digests


@pytest.mark.parametrize("poison", [3, 4])
def test_nan_and_inf_skip_the_same_update_everywhere(ranks, poison):
    results = {world: set(ranks(world)(train, "adamw", "fp32", True, 8, poison)) for world in WORLDS}
    everything = set.union(*results.values())
    assert len(everything) == 1, results
    assert next(iter(everything))[1] == 1  # exactly the poisoned update was skipped


def test_control_plain_ddp_differs(ranks):
    """If this ever fails, the tests above prove nothing."""
    digests = {ranks(world)(train, "adamw", "fp32", False)[0][0] for world in WORLDS}
    assert len(digests) > 1


def test_digest_does_not_depend_on_omp_num_threads():
    code = "from tests.test_exact_digest_ignores_world_size import train; print(train('adamw', 'fp32', True, 6)[0])"
    digests = set()
    for threads in ("1", "2", "4"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": threads}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


def test_digest_does_not_depend_on_settings_that_somebody_changes_later(ranks):
    digests = {ranks(1)(train, "adamw", "fp32", True, 6, threads=threads)[0] for threads in (None, 2, 4)}
    assert len(digests) == 1, digests


def loss_on_two_threads(model, batch):
    torch.set_num_threads(2)
    return token_loss(model, batch)


def test_a_loss_that_changes_them_is_refused():
    before = torch.get_num_threads()
    with pytest.raises(evener.errors.UsageError, match="loss_fn changes what exact=True holds: 2 threads"):
        train("adamw", "fp32", True, 1, loss_fn=loss_on_two_threads)
    torch.set_num_threads(before)
