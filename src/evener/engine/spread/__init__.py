"""Strategies: how an update's gradient is spread over devices, behind one seam.

The step knows only `Spread`. A strategy owns where gradients are kept and summed; the step owns the order of things,
the denominator, the finite vote, the clip and the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensors = list[torch.Tensor]


class Spread:
    """`strategy="single"`, and what the step asks of every strategy: called on all ranks in the same order."""

    name = "single"

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def slots(self, rows: int) -> int:
        """Rows of the packed statistics for an update of so many rows: 1, or the number of slices in exact mode."""
        return 1

    def begin(self, rows: int) -> None:
        """Before the first piece: no gradient is left over."""
        for parameter in self.parameters:
            parameter.grad = None

    def clear(self) -> None:
        """Let go of gradients that are kept beside `.grad` of the optimizer's parameters (fsdp)."""

    def gradients(self) -> Tensors:
        """The gradients that exist now, in parameter order: a user may have replaced them."""
        return existing(self.parameters)

    def forward(self, loss_fn: Callable[..., Any], model: Any, batch: Any, rows: int) -> Any:
        """What loss_fn returns for this piece. Communicates only where the forward does (fsdp)."""
        return loss_fn(model, batch)

    def before_backward(self, last: bool) -> None:
        """Before the backward of a piece; `last` on this rank lets the reduction overlap it."""

    def after_backward(self, number: int) -> None:
        """After the backward of piece (slice) `number`."""

    def finish(self) -> Tensors:
        """Gradients, summed over all pieces of all ranks, set as `.grad`; None stays where no rank used a parameter.
        Returns the gradients that exist, in parameter order. Waits for this update's reduction."""
        return existing(self.parameters)

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], object]:
        """Sum a small vector over all ranks in place; the returned function waits for it."""
        return no_wait

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        """The sum of per-piece vectors (by piece number) over all pieces of all ranks, in this strategy's order.
        `like` has their length and dtype, for a rank without pieces."""
        total = torch.zeros_like(like)
        for flat in flats.values():
            total += flat
        return total

    def norm(self, gradients: Tensors) -> torch.Tensor:
        """The global 2-norm, 0-dimensional, at least float32, equal on all ranks. No host sync."""
        return norm_of(gradients)

    def meet(self) -> None:
        """Make what ranks hold equal, where it may differ between updates (local SGD). Collective then."""

    def loaded(self) -> None:
        """A state was loaded: ranks hold the same again."""

    def close(self) -> None:
        """Remove what was attached to the model."""


def norm_of(gradients: Tensors) -> torch.Tensor:
    """The 2-norm over whole gradients that every rank holds. Three operations, no host sync."""
    if not gradients:
        return torch.zeros(())
    half = gradients[0].dtype in (torch.float16, torch.bfloat16)
    # Half precision would overflow at 65504 and read as non-finite.
    norms = torch._foreach_norm(gradients, 2, torch.float32) if half else torch._foreach_norm(gradients)
    dtype = norms[0].dtype
    for norm in norms:
        if norm.dtype != dtype:  # parameters of several dtypes
            norms = tuple(norm.to(torch.promote_types(dtype, torch.float32)) for norm in norms)
            break
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def existing(parameters: Sequence[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def all_reduce(vector: torch.Tensor, *, overlap: bool) -> Callable[[], object]:
    """Sum a vector over all ranks in place; the returned function waits for it (it has happened without `overlap`)."""
    work = dist.all_reduce(vector, async_op=overlap)
    return no_wait if work is None else work.wait


def batched(
    tensors: Iterable[Any], dtype_of: Callable[[Any], torch.dtype], first: int, later: int = 0
) -> Iterator[tuple[torch.dtype, list[Any]]]:
    """Tensors that travel together: of one dtype, until they have so many bytes (`later`: from the second time on)."""
    waiting: dict[torch.dtype, list[Any]] = {}
    filled: Counter[torch.dtype] = Counter()
    size = first
    for tensor in tensors:
        dtype = dtype_of(tensor)
        waiting.setdefault(dtype, []).append(tensor)
        filled[dtype] += tensor.numel() * dtype.itemsize
        if filled[dtype] >= size:
            yield dtype, waiting.pop(dtype)
            filled[dtype], size = 0, later or size
    yield from waiting.items()


def shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`flat` (1-dimensional, contiguous) as a tensor of `like`'s shape, and of its strides where those are dense: a
    fused optimizer wants gradients laid out as their parameters (channels last)."""
    if not like.is_contiguous():
        span = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride()))
        if span == like.numel():
            return flat.as_strided(like.shape, like.stride(), flat.storage_offset())
    return flat.view(like.shape)


def no_wait() -> None:
    """Nothing is on its way."""
