"""Precision: what was asked is what runs, or it is refused; the loss scale is owned, saved and restored."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.engine.precision import bf16_is_native, cast_parameters, decide
from evener.errors import PrecisionError
from tests.models import MLP, make, mlp_rows

CPU = torch.device("cpu")


def row_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def engine_of(model, precision, **keywords):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evener.Engine(
        model, optimizer, keywords.pop("loss_fn", row_mean), device="cpu", precision=precision,
        report=lambda *event: None, **keywords,
    )  # fmt: skip


def test_auto_takes_what_is_fast_and_supported_here():
    chosen = decide("auto", CPU)
    assert chosen.name == ("bf16" if bf16_is_native(CPU) else "fp32")
    assert "native bf16" in chosen.because


@pytest.mark.parametrize(
    ("level", "name", "compute", "scaler", "said"),
    [
        ("O0", "fp32", None, False, "plain fp32"),
        ("O1", "fp16", torch.float16, True, "dynamic loss scaling"),
        ("O2", "fp16", torch.float16, True, "master weights are your parameters themselves"),
        ("O3", "fp16-true", None, True, "no master weights"),
    ],
)
def test_apex_levels_are_mapped_and_explained(level, name, compute, scaler, said):
    chosen = decide(level, CPU)
    assert (chosen.name, chosen.compute, chosen.scaler, chosen.requested) == (name, compute, scaler, level)
    assert said in chosen.because
    engine = engine_of(make("mlp"), level)
    assert said in engine.notes[0]
    for _ in range(3):
        update = engine.step(mlp_rows(8))
    assert engine.words()["scaler"] is scaler and update.loss > 0


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ("bf61", 'precision="bf16"'),
        ("half", "precision is one of: auto, fp32, tf32, bf16"),
        (torch.bfloat16, 'precision="bf16"'),
        (16, "precision is one of"),
        ({"params": "bf16"}, "the parts are param, reduce, output"),
        ({"param": "bf61"}, "each is one of: fp32, bf16, fp16"),
    ],
)
def test_unknown_precision_is_one_clear_error(spec, text):
    with pytest.raises(PrecisionError) as error:
        decide(spec, CPU)
    assert text in str(error.value)


def test_bf16_where_it_is_not_native_is_refused_on_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Tesla T4")
    gpu = torch.device("cuda", 0)
    with pytest.raises(PrecisionError, match=r"Tesla T4 .compute capability 7.5. has no native bf16"):
        decide("bf16", gpu)
    assert decide("auto", gpu).name == "fp16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert decide("auto", gpu).name == "bf16"


def test_compute_dtype_is_what_was_asked_and_parameters_stay_fp32():
    seen = []

    def loss_fn(model, batch):
        logits = model(batch[0])
        seen.append(logits.dtype)
        return F.cross_entropy(logits, batch[1])

    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        model = make("mlp")
        engine_of(model, precision, loss_fn=loss_fn).step(mlp_rows(8))
        assert seen.pop() == dtype
        assert {p.dtype for p in model.parameters()} == {torch.float32}
    model = make("mlp")
    engine = engine_of(model, "bf16-true", loss_fn=loss_fn)
    engine.step(mlp_rows(8))
    assert seen.pop() == torch.bfloat16 and {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert engine.words() == {
        "name": "bf16-true", "master": "bf16", "compute": "bf16", "reduce": "bf16", "scaler": False,
    }  # fmt: skip


def test_regions_kept_in_fp32_stay_so():
    class Careful(MLP):
        def forward(self, x):
            hidden = self.body(x)
            with torch.autocast("cpu", enabled=False):
                out = self.head(hidden.float())
            self.seen = (hidden.dtype, out.dtype)
            return out

    model = Careful()
    engine_of(model, "bf16").step(mlp_rows(8))
    assert model.seen == (torch.bfloat16, torch.float32)

    kept = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    assert cast_parameters(kept, torch.bfloat16) == ["1.weight", "1.bias"]
    assert [p.dtype for p in kept.parameters()] == [torch.bfloat16] * 2 + [torch.float32] * 2 + [torch.bfloat16] * 2
    named = MLP()
    named._keep_in_fp32_modules = ["head"]
    assert set(cast_parameters(named, torch.float16)) == {"head.weight", "head.bias"}


def test_mapping_sets_compute_reduce_and_output():
    outputs = []

    def loss_fn(model, batch):
        outputs.append(model(batch[0]))
        return F.cross_entropy(outputs[-1], batch[1])

    engine = engine_of(make("mlp"), {"param": "bf16", "reduce": "bf16", "output": "fp32"}, loss_fn=loss_fn)
    engine.step(mlp_rows(8))
    assert outputs[-1].dtype == torch.float32
    assert engine.words() == {"name": "bf16", "master": "fp32", "compute": "bf16", "reduce": "bf16", "scaler": False}


def reduce_in_bf16():
    model = make("mlp")
    engine = engine_of(model, {"param": "fp32", "reduce": "bf16"})
    rank = evener.rank()
    x, y = mlp_rows(16)
    engine.backward((x[rank * 8 : rank * 8 + 8], y[rank * 8 : rank * 8 + 8]))
    gradient = model.head.weight.grad.clone()
    engine.apply()
    engine.close()
    return gradient


def test_gradients_are_reduced_in_the_dtype_asked_for(ranks):
    first, second = ranks(2)(reduce_in_bf16)
    assert torch.equal(first, second)
    assert torch.equal(first, first.bfloat16().float())  # every value is a bf16 value


def test_scaler_settings_are_passed_owned_saved_and_restored():
    settings = {"init_scale": 8.0, "growth_interval": 2, "growth_factor": 4.0, "backoff_factor": 0.25}
    engine = engine_of(make("mlp"), "fp16", scaler=settings)
    scales = [engine.step(mlp_rows(8, seed=i)).scale for i in range(4)]
    assert scales == [8.0, 8.0, 32.0, 32.0]
    state = engine.state_dict()
    assert state["targets"][""]["scaler"]["scale"] == 128.0 and state["targets"][""]["scaler"]["growth_interval"] == 2
    other = engine_of(make("mlp"), "fp16")
    other.load_state_dict(state)
    assert other.step(mlp_rows(8)).scale == 128.0
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0, growth_interval=7)
    assert engine_of(make("mlp"), "fp16", scaler=theirs).targets[""].loss_scale.state_dict()["growth_interval"] == 7


@pytest.mark.parametrize(
    ("precision", "scaler", "text"),
    [
        ("fp16", {"init_scales": 2}, "did you mean init_scale?"),
        ("fp16", {"growth_factor": 0.5}, "out of range"),
        ("fp16", 1024, "scaler is None, a torch.amp.GradScaler, or its arguments"),
        ("bf16", {"init_scale": 2.0}, "needs no loss scale"),
    ],
)
def test_bad_scaler_settings(precision, scaler, text):
    with pytest.raises(evener.EvenerError) as error:
        engine_of(make("mlp"), precision, scaler=scaler)
    assert text in str(error.value)


def overflow_on_one_rank():
    """fp16: rank 1's rows overflow in update 1 only."""
    model = make("mlp")
    scheduler_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(scheduler_optimizer, 1, gamma=0.5)
    engine = evener.Engine(
        model, scheduler_optimizer, row_mean, device="cpu", precision="fp16", scheduler=schedule,
        scaler={"init_scale": 4.0}, report=lambda *event: None,
    )  # fmt: skip
    log = []
    for k in range(4):
        x, y = mlp_rows(8, seed=10 * k + evener.rank())
        if k == 1 and evener.rank() == evener.world_size() - 1:
            x = x * 1e5  # beyond 65504 in half precision
        before = [p.detach().clone() for p in model.parameters()]
        update = engine.step((x, y))
        changed = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
        log.append((update.skipped, changed, update.scale, update.lr))
    digest = engine.digest()
    engine.close()
    return log, digest


def test_fp16_overflow_on_one_rank_skips_on_all_and_recovers(ranks):
    for world in (1, 2, 3, 4):
        results = ranks(world)(overflow_on_one_rank)
        assert len({digest for _, digest in results}) == 1
        for log, _ in results:
            assert [skipped for skipped, *_ in log] == [False, True, False, False]
            assert [changed for _, changed, *_ in log] == [True, False, True, True]
            assert [scale for *_, scale, _ in log] == [4.0, 4.0, 2.0, 2.0]
            # the skipped update did not advance the schedule
            assert [lr for *_, lr in log] == pytest.approx([0.1, 0.05, 0.05, 0.025])


def test_fp16_tracks_fp32():
    losses = {}
    for precision in ("fp32", "fp16", "bf16"):
        engine = engine_of(make("mlp"), precision, scaler={"init_scale": 1024.0} if precision == "fp16" else None)
        losses[precision] = [engine.step(mlp_rows(64)).loss for _ in range(20)]
    assert losses["fp16"] == pytest.approx(losses["fp32"], rel=2e-2)
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=5e-2)


def test_token_losses_do_not_overflow_half_precision():
    """A sum over 100,000 tokens does not fit fp16's range; the provisional denominator keeps the gradient in it."""
    model = make("mlp")

    def summed(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return evener.Mean(total=each.sum() * 1000, count=torch.tensor(1000 * len(batch[1])))

    engine = engine_of(model, "fp16", loss_fn=summed)
    update = engine.step(mlp_rows(100))
    assert engine.targets[""].provisional == 2.0**17 and not update.skipped
