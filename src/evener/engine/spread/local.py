"""`sync_every=k`, local SGD: a rank makes k steps by its own rows, then parameters and optimizer states are averaged.

A rank's gradient is weighted so that the mean over ranks is the gradient of the global batch, uneven rows included:
with plain SGD and k=1 the result is that of ddp. With more, or with another optimizer, it is an approximation.

One small sum per update stays: norm, finite vote and used parameters are the same on every rank, so that skips, clips
and schedules are. Before anything looks at the model from outside (a save, an evaluation, a digest) the ranks meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.engine.spread import Tensors, batched, existing, norm_of
from evener.engine.spread.ddp import Replicas

_BYTES = 25 << 20


class LocalSGD(Replicas):
    """ddp with `sync_every`. `also`: further tensors to average (the running average of the weights)."""

    name = "ddp"

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        every: int,
        world_size: int,
        also: Callable[[], Iterable[torch.Tensor]],
    ) -> None:
        super().__init__(parameters)
        self.optimizer, self.every, self.world_size, self.also = optimizer, every, world_size, also
        self.since = 0  # updates since the ranks were equal
        self.handed: Tensors = []
        self.square = torch.zeros(())

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.handed = []  # or the last update's gradients would live on
        if self.since >= self.every:
            self.meet()

    def finish(self) -> Tensors:
        self.since += 1
        used = [parameter.grad is not None for parameter in self.parameters]
        square = norm_of(existing(self.parameters)).square()
        told = torch.cat([square.view(1), torch.tensor(used, device=square.device).to(square.dtype)])
        dist.all_reduce(told)
        # Only a rank that did not use a parameter has to ask whether another one did: reading waits for the device.
        elsewhere = told[1:].tolist() if not all(used) else ()
        for parameter, mine, theirs in zip(self.parameters, used, elsewhere):
            if theirs and not mine:  # its optimizer state must exist on all ranks
                parameter.grad = torch.zeros_like(parameter)
        self.handed = existing(self.parameters)
        if self.handed:
            torch._foreach_mul_(self.handed, float(self.world_size))
        self.square = told[0] * self.world_size
        return self.handed

    def norm(self, gradients: Tensors) -> torch.Tensor:
        """The root mean square of the ranks' norms: the same on every rank, and not finite where one is not."""
        if gradients is self.handed:
            return self.square.sqrt()
        square = norm_of(gradients).square()
        dist.all_reduce(square)
        return (square / self.world_size).sqrt()

    def loaded(self) -> None:
        self.since = 0

    @torch.no_grad()
    def meet(self) -> None:
        """Average over ranks what the steps since the last time have changed. Collective; nothing when nothing has."""
        if not self.since:
            return
        self.since = 0
        tensors: list[Any] = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = [self.optimizer.state[p] for p in tensors if p in self.optimizer.state]
        tensors += [value for state in states for _, value in sorted(state.items()) if isinstance(value, torch.Tensor)]
        tensors += self.also()
        # A count of steps, which may live on the host, is the same everywhere.
        here = [one for one in tensors if one.is_floating_point() and one.device == self.parameters[0].device]
        for dtype, same in batched(here, lambda one: torch.promote_types(one.dtype, torch.float32), _BYTES):
            flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in same])
            dist.all_reduce(flat)
            flat /= self.world_size
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same])):
                tensor.copy_(part.view_as(tensor))
