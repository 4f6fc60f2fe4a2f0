"""Two or more ranks break, in the way that the first argument says. Plain torch: any launcher can start it."""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import ways
from torch.nn.parallel import DistributedDataParallel

how = sys.argv[1]
rank = int(os.environ["RANK"])


def checkpoint(model, optimizer):
    path = "small/last.pt" if how == "disk" else "last.pt"
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": ways.optimizer(model, groups=2).state_dict()}, path)
        if how == "torn":
            ways.tear(path)
    dist.barrier()
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def main():
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    print("started", rank, flush=True)
    if how == "one-rank":
        if rank == 0:
            seconds = float(os.environ.get("BREAKS_TIMEOUT", "5"))
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
            dist.barrier()
        while True:  # busy with something else, for ever
            time.sleep(0.1)
    if how == "oom":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 158.00 MiB. GPU 1 has a total capacity of 23.69 GiB of which 115.69 MiB "
            "is free. Of the allocated memory 22.14 GiB is allocated by PyTorch, and 910.35 MiB is reserved by PyTorch but "
            "unallocated."
        )
    plain = ways.Model(how)
    optimizer = ways.optimizer(plain)
    if how in ("disk", "torn", "optimizer"):
        checkpoint(plain, optimizer)
    model = DistributedDataParallel(plain)
    for step, (x, y) in enumerate(ways.loader(how)):
        ways.in_the_step(how, rank, step, x)
        dist.all_reduce(torch.ones(4 + 4 * rank if how == "shapes" else 4))
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
