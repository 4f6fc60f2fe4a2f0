"""Several processes of one gloo group on this machine, for the parts that need them."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """What `function(*args)` returns on rank 0, called on all ranks with one thread each. Importable functions only."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, folder, results, function, args), daemon=True)
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise RuntimeError(f"exit codes of the ranks: {[rank.exitcode for rank in ranks]}")
        return results.get()


def _rank(rank: int, world_size: int, folder: str, results: Any, function: Callable[..., Any], args: Any) -> None:
    import torch
    import torch.distributed as dist

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in place.items()}, GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    result = function(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()
