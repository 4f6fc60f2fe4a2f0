"""sha256 over everything an update changes, in name order, the same on every rank and in every cut when bit-equal."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from evener.dist import comm
from evener.engine.setup import plain_state
from evener.engine.shards import Shards
from evener.errors import CollectiveError


def digest_of(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], shards: Shards | None = None) -> str:
    """Parameters, buffers, then optimizer state by parameter name. Collective: ranks compare their digests.

    shards: Where parameters and their states are sharded; then one whole tensor at a time is brought together.

    Raises:
        CollectiveError: the ranks' states differ.
    """
    total = hashlib.sha256()
    named = plain_state(shards.named() if shards is not None else dict(model.named_parameters()))

    def whole(name: str, value: Any) -> Any:
        if shards is None or name not in named or not isinstance(value, torch.Tensor):
            return value
        return shards.whole(shards.shards[name], value)

    for name, tensor in sorted({**named, **plain_state(dict(model.named_buffers()))}.items()):
        _add(total, name, whole(name, tensor))
    for optimizer in optimizers:
        for name, parameter in sorted(named.items()):
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                _add(total, f"{name}/{key}", whole(name, value))
    mine = total.hexdigest()
    every = comm.all_gather(mine)
    if any(one != every[0] for one in every):
        what = "the ranks hold different parameters, buffers or optimizer states."
        evidence = [f"rank {rank}: {one[:16]}" for rank, one in enumerate(every)]
        raise CollectiveError(what, evidence=evidence, fix=["look for code that changes the model on some ranks only"])
    return mine


def _add(total: Any, name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().contiguous()
        total.update(f"{name} {data.dtype} {tuple(data.shape)}\n".encode())
        total.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        total.update(f"{name} {value!r}\n".encode())
