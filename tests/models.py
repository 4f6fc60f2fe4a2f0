"""Small models with everything that makes cuts hard, and their data. Shared by the tests of the engine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import evener

VOCABULARY, LENGTH = 17, 6


class Everything(nn.Module):
    """Embedding, convolution, BatchNorm, attention, LayerNorm, two dropouts, and a head tied to the embedding."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.conv = nn.Conv1d(width, width, 3, padding=1)
        self.bn = nn.BatchNorm1d(width)
        self.drop1 = nn.Dropout(0.2)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.drop2 = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.drop1(self.bn(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        a, _ = self.attention(x, x, x, need_weights=False)
        return self.head(self.drop2(self.norm(x + a))) / self.scale


class MLP(nn.Module):
    """A plain network without randomness: rows are independent."""

    def __init__(self, inputs: int = 5, hidden: int = 8, outputs: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.GELU())
        self.head = nn.Linear(hidden, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def token_rows(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, LENGTH) int64 tokens, and labels of the same shape with -100 where nothing counts (very uneven)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    labels = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
    keep = torch.rand(rows, 1, generator=generator)
    labels[torch.rand(rows, LENGTH, generator=generator) > keep] = -100
    return tokens, labels


def mlp_rows(rows: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 5, generator=generator, dtype=dtype)
    return x, torch.randint(3, (rows,), generator=generator)


def row_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, dict[str, evener.Mean]]:
    x, y = batch
    logits = model(x)
    return F.cross_entropy(logits, y), {"accuracy": evener.Mean(total=(logits.argmax(1) == y).sum(), count=len(y))}


def token_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> evener.Mean:
    tokens, labels = batch
    logits = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return evener.Mean(total=total, count=(labels != -100).sum())


def seeded(build, seed: int = 0):
    """What `build()` makes, with the same initial values in every process, whatever was drawn before."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    model = build()
    torch.set_rng_state(state)
    return model


def make(kind: str = "everything", seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    model: nn.Module = seeded(Everything if kind == "everything" else MLP, seed)
    return model.to(dtype)
