"""One of two or more ranks breaks, in the way that the first argument says. Plain torch: any launcher can start it."""

import os
import signal
import sys
import time
from datetime import timedelta

how = sys.argv[1]
rank = int(os.environ["RANK"])

if how in ("killed", "segfault", "exits", "raises", "hangs") and "--no-torch" in sys.argv:
    # what the others do when nobody waits for anybody
    if rank != 1:
        time.sleep(60)
else:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("BREAKS_TIMEOUT", "10"))))
    dist.all_reduce(torch.ones(1))
    print("started", rank, flush=True)


def load(row):
    raise KeyError(f"labels of row {row}")


def main():
    if how == "raises" and rank == 1:
        load(17)
    if how == "cleans" and rank == 1:
        try:
            load(17)
        finally:
            time.sleep(8)  # an upload, a logger: the victims end first
    if how == "killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault" and rank == 1:
        import ctypes

        ctypes.string_at(0)
    if how == "exits" and rank == 1:
        os._exit(0)
    if how == "hangs" and rank == 1:
        time.sleep(300)
    if how == "one-rank" and rank == 0:
        dist.barrier()
    if how == "one-rank":
        while True:  # busy with something else, for ever
            time.sleep(0.1)
    if how == "unused":
        both = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 1), "unused": torch.nn.Linear(4, 1)})
        both.forward = lambda x: both["used"](x)
        model = DistributedDataParallel(both)
        for _ in range(2):
            model(torch.randn(2, 4)).sum().backward()
    if how == "shapes":
        dist.all_reduce(torch.ones(4 + 4 * rank))
    if how == "oom":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 158.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 115.69 MiB "
            "is free. Of the allocated memory 22.14 GiB is allocated by PyTorch, and 910.35 MiB is reserved by PyTorch but "
            "unallocated."
        )
    if how == "same":
        raise RuntimeError("Attempting to unscale FP16 gradients.")
    if "--no-torch" not in sys.argv:
        dist.all_reduce(torch.ones(1))


main()
