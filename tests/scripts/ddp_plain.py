"""Plain DistributedDataParallel over gloo, as many scripts have it. Knows nothing of evener."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for _ in range(args.steps):
        loss = nn.functional.mse_loss(model(torch.randn(4, 8)), torch.zeros(4, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    total = torch.stack([p.detach().double().sum() for p in model.parameters()]).sum()
    everyone = [torch.zeros_like(total) for _ in range(world)]
    dist.all_gather(everyone, total)
    assert all(one == total for one in everyone)
    print(
        f"done rank {rank} of {world}, local {os.environ['LOCAL_RANK']}, threads {torch.get_num_threads()}", flush=True
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
