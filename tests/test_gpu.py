"""What needs a CUDA device. Elsewhere each test is skipped with its reason and counted: never a pass."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import evener
from tests.models import make, mlp_rows, row_loss, token_loss, token_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here: untested on CUDA"),
]


def engine_of(loss_fn=row_loss, kind="mlp", cls=torch.optim.AdamW, **keywords):
    model = make(kind)
    return evener.Engine(
        model, cls(model.parameters(), lr=1e-2), loss_fn, device="cuda:0", report=lambda *e: None, **keywords
    )


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_loop_that_reads_nothing_never_waits_for_the_device(cls, precision):
    engine = engine_of(cls=cls, precision=precision, max_grad_norm=1.0)
    x, y = (tensor.cuda() for tensor in mlp_rows(16))
    for _ in range(3):
        engine.step((x, y))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step((x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_auto_takes_native_bf16():
    engine = engine_of(precision="auto")
    assert engine.precision.name == ("bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16")


def test_gradients_agree_with_the_cpu():
    gradients = []
    for device in ("cpu", "cuda:0"):
        model = make("mlp").double()
        engine = evener.Engine(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            row_loss,
            device=device,
            precision="fp32",
            microbatch_size=3,
        )
        engine.backward(mlp_rows(16, dtype=torch.float64))
        gradients.append([p.grad.cpu() for p in model.parameters()])
        engine.apply()
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exact_repeats_to_the_bit(precision):
    digests = set()
    for _ in range(2):
        engine = engine_of(token_loss, "everything", precision=precision, exact=True, slice_size=4)
        for k in range(5):
            engine.step(token_rows(30, seed=k))
        digests.add(engine.digest())
        engine.close()
    assert len(digests) == 1


def test_fp16_overflow_is_skipped_on_the_device_and_recovers():
    engine = engine_of(precision="fp16", scaler={"init_scale": 4.0})
    x, y = mlp_rows(16)
    flags = [engine.step((x * (1e5 if k == 1 else 1), y)) for k in range(4)]
    assert [update.skipped for update in flags] == [False, True, False, False]
    assert [update.scale for update in flags] == [4.0, 4.0, 2.0, 2.0]


def test_run_feeds_the_gpu_and_evaluates(tmp_path):
    x, y = mlp_rows(200)
    model = make("mlp")
    with evener.Run(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        row_loss,
        (x, y),
        global_batch_size=32,
        dir=tmp_path / "run",
    ) as run:
        assert run.device.type == "cuda"
        losses = [update.loss for update in run.updates(epochs=5)]
        assert losses[-1] < losses[0]
        assert 0 <= run.evaluate((x, y))["accuracy"] <= 1


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_dp_on_two_gpus_gives_the_same_gradient():
    gradients = []
    for keywords in ({"strategy": "single"}, {"strategy": "dp", "device_ids": [0, 1], "scatter": (3, 1)}):
        model = make("mlp")
        engine = evener.Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: F.cross_entropy(m(b[0]), b[1]),
            device="cuda:0", precision="fp32", **keywords,
        )  # fmt: skip
        engine.backward(mlp_rows(16))
        gradients.append([p.grad.clone() for p in model.parameters()])
        engine.apply()
    for a, b in zip(*gradients):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
