"""One process: gradients are where autograd put them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from evener.engine.spread import Tensors, existing, no_wait, norm_of


class Single:
    """`strategy="single"`: the same step with world size 1; nothing is communicated."""

    name = "single"

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def slots(self, rows: int) -> int:
        return 1

    def begin(self, rows: int) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self) -> list[torch.Tensor]:
        return existing(self.parameters)

    def forward(self, loss_fn: Callable[..., Any], model: Any, batch: Any, rows: int) -> Any:
        return loss_fn(model, batch)

    def before_backward(self, last: bool) -> None:
        pass

    def after_backward(self, number: int) -> None:
        pass

    def finish(self) -> list[torch.Tensor]:
        return existing(self.parameters)

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], None]:
        return no_wait

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(like)
        for flat in flats.values():
            total += flat
        return total

    def norm(self, gradients: Tensors) -> torch.Tensor:
        return norm_of(gradients)

    def meet(self) -> None:
        """Nothing differs between ranks."""

    def close(self) -> None:
        """Remove what was attached to the model."""
