"""From the strategy's name to the object behind the seam."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from evener.engine.spread import Spread
from evener.engine.spread.ddp import DDP
from evener.engine.spread.dp import DP
from evener.engine.spread.exact import Exact
from evener.engine.spread.local import LocalSGD
from evener.errors import UsageError

if TYPE_CHECKING:
    from evener.engine.engine import Engine


def make_spread(engine: Engine, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> Spread:
    """For one optimizer. Called on all ranks alike; `engine.notes` collects what the contract line should say."""
    rank, world, size = engine.group.rank, engine.group.world_size, engine.cut.slice_size
    if engine.strategy == "dp":
        if size is not None:
            why = "exact=True" if engine.batch.exact else "coupled rows (BatchNorm)"
            fix = ['strategy="ddp" with one process per GPU', 'or batchnorm="frozen" where BatchNorm may stay fixed']
            raise UsageError(f'strategy="dp" cuts a batch over GPUs, which {why} forbids.', fix=fix)
        note = "dp is one process driving several GPUs; ddp is faster and the better choice"
        if note not in engine.notes:
            engine.notes.append(note)
        return DP(parameters, engine.device, *engine.dp)
    if any(one is not None for one in engine.dp):
        raise UsageError(
            "device_ids, output_device and scatter belong to strategy='dp'.", fix=['strategy="dp"', "or leave them out"]
        )
    if engine.shards is not None:
        from evener.engine.spread.fsdp import FSDP  # its imports cost as much as torch's own

        return FSDP(parameters, engine)
    if engine.batch.exact:
        assert size is not None
        return Exact(parameters, rank=rank, world_size=world, slice_size=size)
    if world == 1:
        return Spread(parameters)
    if engine.sync_every is not None:
        ema = engine.ema
        return LocalSGD(
            parameters, optimizer, engine.sync_every, world, lambda: [*ema.average, *ema.rounded] if ema else ()
        )
    return DDP(parameters, reduce_dtype=engine.precision.reduce)
