"""One update of a tiny MLP: what is left when the arithmetic costs almost nothing is the price of the library.

Every contestant gets the same batch of 8 rows and has the same duties: decide by the norm of the gradient whether to
step, clip, accumulate, scale in fp16, keep the loss without reading it. `bare` is the loop without the norm and the
decision. Optimizers are left to torch's defaults; `raw fused` is the same loop with fused=True, which evener chooses.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from bench.table import Table, verdict
from bench.timing import Timings, interleave

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FEATURES = ("plain", "clip", "accumulate")
NAMES = ("evener", "raw", "raw fused", "bare", "accelerate", "fabric")
MAX_NORM, ROWS, MICROBATCH = 1.0, 8, 2

Update = Callable[[], object]


def make(optimizer: str, **keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, OPTIMIZERS[optimizer](model.parameters(), **keywords)


def make_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 32, generator=generator), torch.randint(0, 10, (ROWS,), generator=generator)


def evener_update(optimizer: str, precision: str, feature: str) -> Update:
    from evener.engine import Engine

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return F.cross_entropy(model(x), y)

    engine = Engine(
        *make(optimizer),
        loss_fn,
        device="cpu",
        precision=precision,
        max_grad_norm=MAX_NORM if feature == "clip" else None,
        microbatch_size=MICROBATCH if feature == "accumulate" else None,
    )
    return functools.partial(engine.step, make_batch())


def raw_update(
    optimizer: str, precision: str, feature: str, *, checked: bool = True, fused: bool | None = None
) -> Update:
    """The loop by hand. checked: with the norm of the gradient and the decision that hangs on it."""
    model, opt = make(optimizer, fused=fused)
    parameters = list(model.parameters())
    x, y = make_batch()
    pieces = ROWS // MICROBATCH if feature == "accumulate" else 1
    dtype = DTYPES[precision]
    scaler = torch.amp.GradScaler("cpu") if precision == "fp16" else None
    running: torch.Tensor

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if dtype is None:
            return F.cross_entropy(model(x), y)
        with torch.autocast("cpu", dtype=dtype):
            return F.cross_entropy(model(x), y)

    def backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(x, y) if pieces == 1 else loss_of(x, y) / pieces
        (loss if scaler is None else scaler.scale(loss)).backward()
        return loss.detach()

    def update() -> None:
        nonlocal running
        if pieces == 1:
            running = backward(x, y)
        else:
            running = sum(backward(*piece) for piece in zip(x.split(MICROBATCH), y.split(MICROBATCH)))
        if scaler is not None and (checked or feature == "clip"):
            scaler.unscale_(opt)
        norm = None
        if feature == "clip":
            norm = nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        elif checked:
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if scaler is not None:
            scaler.step(opt)  # decides by itself
            scaler.update()
        elif not checked or torch.isfinite(norm):
            opt.step()
        opt.zero_grad()

    return update


def accelerate_update(optimizer: str, precision: str, feature: str) -> Update | None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    if precision == "fp16":
        return None  # with cpu=True it trains in fp32 and still says fp16
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    pieces = ROWS // MICROBATCH if feature == "accumulate" else 1
    accelerator = Accelerator(
        cpu=True, mixed_precision={"fp32": "no"}.get(precision, precision), gradient_accumulation_steps=pieces
    )
    model, opt = accelerator.prepare(*make(optimizer))
    parameters = list(model.parameters())
    batch = make_batch()
    running: torch.Tensor

    def update() -> None:
        nonlocal running
        running = 0
        for x, y in [batch] if pieces == 1 else zip(*(part.split(MICROBATCH) for part in batch)):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                running = running + loss.detach()
                accelerator.backward(loss)
                if not accelerator.sync_gradients:
                    continue
                if feature == "clip":
                    norm = accelerator.clip_grad_norm_(parameters, MAX_NORM)
                else:
                    norm = nn.utils.get_total_norm([p.grad for p in parameters])
                if torch.isfinite(norm):
                    opt.step()
                opt.zero_grad()

    return update


def fabric_update(optimizer: str, precision: str, feature: str) -> Update | None:
    from lightning.fabric import Fabric

    if precision == "fp16":
        return None  # on the CPU its 16-mixed is bf16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fabric = Fabric(accelerator="cpu", devices=1, precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision])
    model, opt = fabric.setup(*make(optimizer))
    parameters = list(model.parameters())
    batch = make_batch()
    pieces = ROWS // MICROBATCH if feature == "accumulate" else 1
    running: torch.Tensor

    def update() -> None:
        nonlocal running
        running = 0
        for i, (x, y) in enumerate([batch] if pieces == 1 else zip(*(part.split(MICROBATCH) for part in batch))):
            with fabric.no_backward_sync(model, enabled=i < pieces - 1):
                loss = F.cross_entropy(model(x), y)
                fabric.backward(loss if pieces == 1 else loss / pieces)
            running = running + loss.detach()
        if feature == "clip":
            norm = fabric.clip_gradients(model, opt, max_norm=MAX_NORM, error_if_nonfinite=False)
        else:
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if torch.isfinite(norm):
            opt.step()
        opt.zero_grad()

    return update


def measure(optimizer: str, precision: str, feature: str, *, updates: int, rounds: int) -> Timings:
    case = (optimizer, precision, feature)
    contestants = (
        evener_update(*case),
        raw_update(*case),
        raw_update(*case, fused=True),
        raw_update(*case, checked=False),
        accelerate_update(*case),
        fabric_update(*case),
    )
    present = {name: update for name, update in zip(NAMES, contestants) if update is not None}
    return interleave(present, updates=updates, rounds=rounds, warm_up=updates // 4)


def run(quick: bool) -> list[Table]:
    torch.set_num_threads(1)
    updates, rounds = (100, 5) if quick else (200, 15)
    table = Table(
        "step: one update of a tiny MLP, microseconds of CPU time, one thread",
        ["case", *NAMES, "/ raw", "/ raw fused", "/ bare", "/ best peer", "added us"],
    )
    ratios: dict[str, list[float]] = {"raw": [], "raw fused": [], "bare": [], "peer": []}
    for optimizer, precision, feature in itertools.product(OPTIMIZERS, DTYPES, FEATURES):
        times = measure(optimizer, precision, feature, updates=updates, rounds=rounds)
        if (optimizer, precision, feature) == ("SGD", "fp32", "plain"):  # the shortest one has the largest
            table.note(f"{optimizer} {precision} {feature}: {times.spread()}")
        peers = [times.ratio("evener", name) for name in ("accelerate", "fabric") if name in times.seconds]
        row = [times.ratio("evener", name) for name in ("raw", "raw fused", "bare")]
        for name, value in zip(ratios, [*row, *([max(peers)] if peers else [])]):
            ratios[name].append(value)
        micro = [f"{1e6 * times.median(name):.0f}" if name in times.seconds else "cannot" for name in NAMES]
        table.add(
            f"{optimizer} {precision} {feature}",
            *micro,
            *(f"{value:.2f}" for value in row),
            f"{max(peers):.2f}" if peers else "-",
            f"{1e6 * times.added('evener', 'raw'):+.0f}",
        )
    table.note(verdict("median ratio to raw", statistics.median(ratios["raw"]), 1.03))
    table.note(verdict("worst ratio to raw", max(ratios["raw"]), 1.08))
    table.note(
        f"median ratio to raw fused: {statistics.median(ratios['raw fused']):.3f}; worst {max(ratios['raw fused']):.3f}"
    )
    table.note(verdict("median ratio to bare", statistics.median(ratios["bare"]), 1.15))
    table.note(f"worst ratio to bare: {max(ratios['bare']):.3f}")
    table.note(verdict("worst ratio to the better of accelerate and fabric", max(ratios["peer"]), 1.0))
    return [table]
