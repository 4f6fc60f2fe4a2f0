"""From the strategy's name to the object behind the seam."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from evener.engine.join import Join
from evener.engine.setup import Batch
from evener.engine.shards import Shards
from evener.engine.spread import Spread
from evener.engine.spread.ddp import DDP
from evener.engine.spread.dp import DP
from evener.engine.spread.exact import Exact
from evener.engine.spread.local import LocalSGD
from evener.engine.spread.single import Single
from evener.errors import UsageError


def make_spread(
    strategy: str,
    *,
    parameters: Sequence[torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rank: int,
    world_size: int,
    reduce_dtype: torch.dtype | None,
    device: torch.device,
    device_ids: Sequence[int] | None,
    output_device: int | None,
    scatter: Any,
    notes: list[str],
    shards: Shards | None,
    join: Join | None,
    sync_every: int | None,
    also: Callable[[], Iterable[torch.Tensor]],
) -> Spread:
    """Called on all ranks with the same arguments; `notes` collects what the contract line should say."""
    if strategy != "dp" and (device_ids is not None or output_device is not None or scatter is not None):
        raise UsageError(
            "device_ids, output_device and scatter belong to strategy='dp'.", fix=['strategy="dp"', "or leave them out"]
        )
    if strategy == "dp":
        if batch.cut.slice_size is not None:
            why = "exact=True" if batch.exact else "coupled rows (BatchNorm)"
            raise UsageError(
                f'strategy="dp" cuts a batch over GPUs, which {why} forbids.',
                fix=['strategy="ddp" with one process per GPU', 'or batchnorm="frozen" where BatchNorm may stay fixed'],
            )
        note = "dp is one process driving several GPUs; ddp is faster and the better choice"
        if note not in notes:
            notes.append(note)
        return DP(parameters, device=device, device_ids=device_ids, output_device=output_device, scatter=scatter)
    if shards is not None:
        assert join is not None
        from evener.engine.spread.fsdp import FSDP  # its imports cost as much as torch's own

        return FSDP(parameters, shards=shards, join=join, slice_size=batch.cut.slice_size if batch.exact else None)
    if batch.exact:
        assert batch.cut.slice_size is not None
        return Exact(parameters, rank=rank, world_size=world_size, slice_size=batch.cut.slice_size)
    if strategy == "ddp" and world_size > 1 and sync_every is not None:
        return LocalSGD(parameters, optimizer, every=sync_every, world_size=world_size, also=also)
    if strategy == "ddp" and world_size > 1:
        return DDP(parameters, reduce_dtype=reduce_dtype)
    return Single(parameters)
