"""A 6-layer GPT on one thread: with real arithmetic in the step, what evener adds must disappear."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from bench.table import Table, verdict
from bench.timing import interleave

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 256, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens) + self.position.weight[: tokens.shape[1]])
        return F.linear(self.norm(x), self.token.weight)


def make(fused: bool | None = None) -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = GPT()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)


def make_batch(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def raw_update(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> Callable[[], object]:
    """The loop by hand, on a plain or a wrapped model: the norm decides whether to step, the loss is kept unread."""
    parameters = list(model.parameters())
    running: torch.Tensor

    def update() -> None:
        nonlocal running
        loss = loss_of(model, batch)
        loss.backward()
        running = loss.detach()
        norm = nn.utils.get_total_norm([p.grad for p in parameters])
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()

    return update


def run(quick: bool) -> list[Table]:
    from evener.engine import Engine

    torch.set_num_threads(1)
    batch = make_batch(2 if quick else 4)
    engine = Engine(*make(), loss_of, device="cpu", precision="fp32")
    contestants = {
        "evener": functools.partial(engine.step, batch),
        "raw": raw_update(*make(), batch),
        "raw fused": raw_update(*make(fused=True), batch),
    }
    times = interleave(contestants, updates=1, rounds=6 if quick else 20, warm_up=2)
    table = Table(
        f"gpt: {LAYERS} layers, width {WIDTH}, {len(batch)} x {LENGTH} tokens, AdamW fp32, one thread, CPU time",
        ["loop", "ms per update", "evener / loop"],
    )
    for name in contestants:
        table.add(name, f"{1e3 * times.median(name):.1f}", f"{times.ratio('evener', name):.3f}")
    table.note(verdict("ratio to raw", times.ratio("evener", "raw"), 1.01))
    table.note(verdict("ratio to raw with fused=True", times.ratio("evener", "raw fused"), 1.01))
    table.note(times.spread())
    return [table]
