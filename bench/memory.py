"""What each lever on memory frees and what it costs: one update of a 12-layer GPT and of a ResNet-like net.

Memory is counted and not sampled: every storage that an operation makes, until it is freed, on top of parameters and
optimizer state. What waits on the host does not count, as on a GPU it would not; its way back does. Time is CPU time of
one thread; the copies of "offload" run beside the computation on a GPU and cannot here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from bench.gpt import GPT, WIDTH, Block, loss_of, make_batch
from bench.table import Table
from bench.timing import cpu_clock
from evener.engine import Engine, saved


class Peak(TorchDispatchMode):
    """The largest sum of bytes of storages that were made inside and lived at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.living: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if not isinstance(one, torch.Tensor):
                continue
            storage = one.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.living:
                self.living.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self.living.discard(key)
        self.now -= size


class Elsewhere(saved.OnHost):
    """The host's memory is not the device's: the copy is not counted, and what comes back is."""

    def __init__(self, flat: torch.Tensor) -> None:
        with _disable_current_modes():
            super().__init__(flat)

    def back(self) -> torch.Tensor:
        return self.host.clone()


class Deep(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(12)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for before, width in ((16, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(before, width, 3, stride=1 + (before < width), padding=1)]
            layers += [Residual(width) for _ in range(4)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def image_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "half the microbatch": {},  # see below
    'activation_checkpointing="selective"': {"activation_checkpointing": "selective"},
    '"every:2"': {"activation_checkpointing": "every:2"},
    '"segments:4"': {"activation_checkpointing": "segments:4"},
    '"full"': {"activation_checkpointing": "full"},
    'saved_activations="int8"': {"saved_activations": "int8"},
    '"offload"': {"saved_activations": "offload"},
    '"offload" and "full"': {"saved_activations": "offload", "activation_checkpointing": "full"},
}


def measured(build: Callable[[], nn.Module], loss: Any, batch: Any, updates: int, how: dict[str, Any]) -> Any:
    """(peak bytes above what is always held, seconds, gradient of the first update)."""
    torch.manual_seed(0)
    model = build()
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss,
        device="cpu",
        precision="fp32",
        strategy="single",
        **how,
    )
    engine.backward(batch)
    gradient = torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).clone()
    engine.apply()  # makes the optimizer's state, and is kept in case of need
    with Peak() as peak:
        engine.step(batch)
    began = cpu_clock()
    for _ in range(updates):
        engine.step(batch)
    seconds = (cpu_clock() - began) / updates
    engine.close()
    return peak.most, seconds, gradient


def run(quick: bool) -> Iterator[Table]:
    torch.set_num_threads(1)
    rows, images = (2, 8) if quick else (4, 16)
    pictures = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(images) % 10
    nets = {
        f"12-layer GPT, width {WIDTH}, {rows} x 128 tokens": (Deep, loss_of, make_batch(rows), "microbatch_size", rows),
        f"ResNet-like, 12 residual blocks, {images} images of 32 x 32": (
            ResNet, image_loss, pictures, "slice_size", images
        ),
    }  # fmt: skip
    before, saved.OnHost = saved.OnHost, Elsewhere  # type: ignore[misc]
    try:
        for title, (build, loss, batch, size, whole) in nets.items():
            held = sum(3 * p.numel() * p.element_size() for p in build().parameters())
            table = Table(
                f"Memory of one update: {title}, AdamW, fp32, one thread ({held / 2**20:.1f} MiB are always held)",
                ["lever", "peak above that, MiB", "of nothing", "CPU time", "gradients"],
            )
            plain: Any = None
            for name, how in OPTIONS.items():
                half = name == "half the microbatch"
                how = {**how, size: whole // 2 if half else whole}
                peak, seconds, gradient = measured(build, loss, batch, 1 if quick else 2, how)
                plain = plain or (peak, seconds, gradient)
                off = float((gradient - plain[2]).norm() / plain[2].norm())
                same = "the same bits" if torch.equal(gradient, plain[2]) else f"off by {off:.2g}"
                ways = f"{peak / 2**20:.1f}", f"{peak / plain[0]:.2f}", f"x {seconds / plain[1]:.2f}"
                table.add(name, *ways, same)
            if size == "slice_size":
                table.note("half the microbatch is another result here: BatchNorm sees fewer rows")
            yield table
    finally:
        saved.OnHost = before  # type: ignore[misc]
