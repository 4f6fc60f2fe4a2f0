"""An ordinary DDP script, as torchrun starts it, with one label too few, and how evener tells it.

evener run --nproc 2 --cpu --tee none examples/broken/old.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
torch.manual_seed(0)
images, labels = torch.randn(128, 64), torch.randint(0, 10, (127,))
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

for start in range(16 * rank, 128, 16 * world):
    x, y = images[start : start + 16], labels[start : start + 16]
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.destroy_process_group()
