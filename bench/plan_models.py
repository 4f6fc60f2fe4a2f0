"""The models, optimizers and settings that predictions are held against: small, of six kinds, in plain torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from evener.plan.values import Cut


class Mlp(nn.Module):
    def __init__(self, width: int = 128, layers: int = 6) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(y)))


class ResNet(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True) if cross else None

    def forward(self, x: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=memory is not None or self.cross is None)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        if self.cross is not None and memory is not None:
            x = x + self.cross(x, memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 4, vocabulary: int = 500, length: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.token.weight)


class EncoderDecoder(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, vocabulary: int = 300) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(Block(width, 4) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, 4, cross=True) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        source, target = self.source(tokens), self.target(tokens)
        for block in self.encoder:
            source = block(source)
        for block in self.decoder:
            target = block(target, source)
        return self.head(target)


class Lstm(nn.Module):
    def __init__(self, width: int = 64, vocabulary: int = 200) -> None:
        super().__init__()
        self.token, self.lstm = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.token(tokens))[0])


class Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.norm(self.conv(x)))


class UNet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 1), nn.Conv2d(width, 10, 1)
        self.down, self.up = nn.ModuleList(Down(width) for _ in range(3)), nn.ModuleList(Down(width) for _ in range(3))
        self.join = nn.ModuleList(nn.Conv2d(2 * width, width, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, kept = self.stem(x), []
        for down in self.down:
            x = down(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        for up, join in zip(self.up, self.join):
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = up(join(torch.cat([x, kept.pop()], 1)))
        return self.head(x)


def class_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _images(rows: int) -> Any:
    return torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows,))


def _pictures(rows: int) -> Any:
    return torch.randn(rows, 3, 16, 16), torch.randint(0, 10, (rows, 16, 16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.Tensor], Callable[[int], Any]]] = {
    "MLP": (Mlp, class_loss, lambda rows: (torch.randn(rows, 128), torch.randint(0, 10, (rows,)))),
    "ResNet": (ResNet, class_loss, _images),
    "GPT": (Gpt, token_loss, lambda rows: torch.randint(0, 500, (rows, 33))),
    "encoder-decoder": (EncoderDecoder, token_loss, lambda rows: torch.randint(0, 300, (rows, 25))),
    "LSTM": (Lstm, token_loss, lambda rows: torch.randint(0, 200, (rows, 25))),
    "U-Net": (UNet, class_loss, _pictures),
}
CHECKPOINTING = {
    "MLP": ("none", "segments:2"),
    "ResNet": ("none", "full", "selective", "every:2"),
    "GPT": ("none", "full", "selective", "every:2"),
    "encoder-decoder": ("none", "full", "selective"),
    "LSTM": ("none",),
    "U-Net": ("none", "full", "selective"),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.01),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "AdamW fused": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW for-loop": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
}
ROWS = {"MLP": 8192, "ResNet": 64, "GPT": 64, "encoder-decoder": 64, "LSTM": 64, "U-Net": 64}


@dataclass(frozen=True)
class Case:
    """One configuration of the grid."""

    model: str
    optimizer: str
    cut: Cut
    clip: bool

    def make(self, rows: int) -> tuple[nn.Module, torch.optim.Optimizer, Any, Any]:
        make, loss_fn, batch = MODELS[self.model]
        torch.manual_seed(0)
        model = make()
        return model, OPTIMIZERS[self.optimizer](model.parameters()), loss_fn, batch(rows)

    @property
    def keywords(self) -> dict[str, Any]:
        return {"max_grad_norm": 1.0} if self.clip else {}

    def __str__(self) -> str:
        return f"{self.model}, {self.optimizer}, {self.cut.words()}{', clip' if self.clip else ''}"


def draw(number: int, seed: int) -> list[Case]:
    """So many different cases of the whole grid."""
    grid = [
        Case(model, optimizer, Cut("single", precision, checkpointing, microbatch_size=rows, microbatches=pieces), clip)
        for model in MODELS
        for optimizer, precision, checkpointing, rows, pieces, clip in itertools.product(
            OPTIMIZERS, ("fp32", "bf16"), CHECKPOINTING[model], (ROWS[model], ROWS[model] // 2), (1, 2), (False, True)
        )
    ]
    return random.Random(seed).sample(grid, number)
