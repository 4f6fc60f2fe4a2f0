"""`ema=`: the average a hand-written loop keeps, moved by updates that count, saved with the run, exported plain."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import evener
from tests.models import make, mlp_rows, row_loss
from tests.test_evening_gan import critic_loss, data, generator_loss, networks

DECAY = 0.8


def new_run(folder, x=None, **keywords):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = mlp_rows(30) if x is None else (x, mlp_rows(30)[1])
    keywords = {"global_batch_size": 8, "exact": True, "slice_size": 2, "precision": "fp32", "ema": DECAY, **keywords}
    return evener.Run(model, optimizer, row_loss, rows, dir=folder, **keywords)


def by_hand(folder, bad=(), keywords=None):
    """The average of the weights after each update that was not skipped, beside the run's."""
    x = mlp_rows(30)[0]
    x[list(bad)] = float("nan")
    run = new_run(folder, x, **(keywords or {}))
    average = [p.detach().double() for p in run.model.parameters()]
    skipped = 0
    for update in run.updates(epochs=2):
        skipped += update.skipped
        if not update.skipped:
            for a, p in zip(average, run.model.parameters()):
                a.mul_(DECAY).add_(p.detach().double(), alpha=1 - DECAY)
    worst = max(float((a - p).abs().max()) for a, p in zip(average, run.ema.parameters()))
    run.close()
    return worst, skipped


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize(("bad", "skips"), [((), 0), ((4,), 2)])
def test_it_is_the_average_written_by_hand(ranks, tmp_path, world, bad, skips):
    for worst, skipped in ranks(world)(by_hand, str(tmp_path / "run"), bad):
        assert worst < 1e-6 and skipped == skips


def slow_average(precision):
    """A slow average of weights that moved once, far: what a half precision average would round away."""
    model = make("mlp")
    engine = evener.Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.0), row_loss, device="cpu", precision=precision, ema=0.999
    )
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    start = [p.detach().double() for p in engine.ema.module.parameters()]
    for k in range(200):
        engine.step(mlp_rows(4, seed=k))
    shares = [(p.double() - s).norm() / (w.detach().double() - s).norm() for s, p, w in zip(start, engine.ema.module.parameters(), model.parameters())]  # fmt: skip
    state = engine.ema.state_dict()
    engine.ema.load_state_dict(state)
    again = engine.ema.state_dict()
    engine.close()
    return [float(share) for share in shares], all(torch.equal(state[name], again[name]) for name in state)


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_it_moves_in_half_precision_too(ranks, precision):
    ((shares, kept),) = ranks(1)(slow_average, precision)
    assert shares == pytest.approx([1 - 0.999**200] * len(shares), rel=0.03) and kept


def evening(folder, stop_at=None):
    run = new_run(folder)
    held_out = mlp_rows(11, seed=9)
    try:
        for update in run.updates(epochs=3):
            if update.number == stop_at:
                run.stop()
    except evener.Stopped:
        return None
    finally:
        if stop_at is not None:
            run.close()
    before = run.digest()
    scores = run.evaluate(held_out, model=run.ema), run.evaluate(held_out)
    logits = run.predict(held_out, lambda model, batch: model(batch[0]), model=run.ema)
    run.export(f"{folder}.safetensors", model=run.ema)
    assert run.digest() == before
    run.close()
    return scores, logits, {name: value.clone() for name, value in run.ema.state_dict().items()}


def test_evaluated_predicted_exported_and_resumed(ranks, tmp_path):
    scores, logits, state = ranks(1)(evening, str(tmp_path / "whole"))[0]
    assert scores[0] != scores[1]
    plain = make("mlp")
    plain.load_state_dict(load_file(tmp_path / "whole.safetensors"))
    x, y = mlp_rows(11, seed=9)
    with torch.no_grad():
        assert torch.allclose(plain(x), logits, atol=1e-6)
        assert scores[0]["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(plain(x), y)), abs=1e-6)
    assert ranks(3)(evening, str(tmp_path / "run"), 4) == [None] * 3
    for again in ranks(2)(evening, str(tmp_path / "run")):
        assert again[0][0] == pytest.approx(scores[0], abs=1e-6)
        assert all(torch.equal(state[name], again[2][name]) for name in state)


def of_two_networks():
    models = networks()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    engine = evener.Engine(models, optimizers, device="cpu", precision="fp32", ema=0.5)
    start = models["g"][0].weight.detach().clone()
    engine.step(data(8), generator_loss, optimizer="g")
    moved = models["g"][0].weight.detach().clone()
    for _ in range(5):
        engine.step(data(8), critic_loss, optimizer="d")
    average = engine.ema.module["g"][0].weight.clone()
    engine.close()
    return torch.allclose(average, (start + moved) / 2, atol=1e-7)


def test_each_network_moves_its_average_once_per_update_of_its_own(ranks):
    assert ranks(1)(of_two_networks) == [True]
