"""Several processes, each with the whole model: gradients are summed over ranks in buckets, overlapping the backward.

Hooks on the parameters do it, so that loss_fn sees the plain module and may call it any way it likes. The buckets'
layout is fixed by the parameters alone (torch's DDP rebuilds its buckets after the first step, which changes the
order of sums on resume). Only the last backward of an update communicates; earlier microbatches accumulate locally.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from evener.engine.spread import Spread, all_reduce, batched, existing, shaped
from evener.errors import CollectiveError

_FIRST_BYTES = 1 << 20  # a small first bucket starts the communication early
_BYTES = 25 << 20


class Bucket:
    """Some parameters of one dtype whose gradients travel together, and one flag per parameter: used on this rank."""

    def __init__(self, members: list[int], parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self.members = members
        sizes = [parameters[i].numel() for i in members]
        self.flat = torch.zeros(sum(sizes) + len(members), dtype=dtype, device=parameters[members[0]].device)
        parts = self.flat.split([*sizes, len(members)])
        self.used = parts[-1]
        self.views = [shaped(part, parameters[i]) for part, i in zip(parts, members)]
        self.waiting = len(members)
        self.work: dist.Work | None = None

    def held(self) -> list[torch.Tensor]:
        return [self.flat]


class Replicas(Spread):
    """Every rank has the whole model, and what is added up is added up over ranks."""

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], object]:
        return all_reduce(vector, overlap=overlap)

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        total = super().fold(flats, rows, like)
        dist.all_reduce(total)
        return total


class DDP(Replicas):
    """`strategy="ddp"`. Gradients are summed in `reduce_dtype` (None: their own)."""

    name = "ddp"

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, reduce_dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters)
        # In reverse order: the backward reaches the last parameters first.
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        kinds = batched(reversed(parameters), lambda one: reduce_dtype or one.dtype, _FIRST_BYTES, _BYTES)
        self.buckets = [Bucket([index[id(one)] for one in same], parameters, dtype) for dtype, same in kinds]
        self.bucket_of = {i: bucket for bucket in self.buckets for i in bucket.members}
        self.armed = False
        self.next = 0
        self.fired: set[int] = set()
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(i)) for i, parameter in enumerate(parameters)
        ]

    def _hook(self, i: int) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if not self.armed:
                return
            if i in self.fired:
                what = "a gradient was finished twice in one backward: reentrant activation checkpointing."
                raise CollectiveError(what, fix=["torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"])
            self.fired.add(i)
            self.bucket_of[i].waiting -= 1
            # Strictly in bucket order, so that every rank starts the same collectives in the same order.
            while self.next < len(self.buckets) and self.buckets[self.next].waiting == 0:
                self._launch(self.buckets[self.next])
                self.next += 1

        return ready

    def _launch(self, bucket: Bucket) -> None:
        gradients = existing([self.parameters[i] for i in bucket.members])
        if len(gradients) == len(bucket.members):
            bucket.used.fill_(1)
            torch._foreach_copy_(bucket.views, gradients)
        else:
            for view, flag, i in zip(bucket.views, bucket.used.split(1), bucket.members):
                gradient = self.parameters[i].grad
                flag.fill_(gradient is not None)
                if gradient is None:
                    view.zero_()
                else:
                    view.copy_(gradient)
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.next = 0
        self.fired.clear()
        for bucket in self.buckets:
            bucket.waiting = len(bucket.members)

    def before_backward(self, last: bool) -> None:
        self.armed = last

    def finish(self) -> list[torch.Tensor]:
        self.armed = False
        for bucket in self.buckets[self.next :]:  # a rank without rows, or parameters that were not used
            self._launch(bucket)
        for bucket in self.buckets:
            assert bucket.work is not None
            bucket.work.wait()
            bucket.work = None
            self._hand_back(bucket)
        return existing(self.parameters)

    def _hand_back(self, bucket: Bucket) -> None:
        unused = [k for k, i in enumerate(bucket.members) if self.parameters[i].grad is None]
        # Only a rank that did not use a parameter has to ask whether another rank did: reading waits for the device.
        used_elsewhere = bucket.used.tolist() if unused else []
        for k, i in enumerate(bucket.members):
            parameter = self.parameters[i]
            if parameter.grad is None and not used_elsewhere[k]:
                continue
            view = bucket.views[k]
            # The view itself, not a copy: the gradient autograd made is freed here.
            parameter.grad = view if view.dtype == parameter.dtype else view.to(parameter.dtype)

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()
