"""Two mistakes that no error shows, found by: evener verify examples/broken/counts.py"""

import torch
from torch import nn
from torch.nn import functional as F

import evener

evener.seed(0)
rows = torch.randn(96, 8)
targets = rows[:, :4] * 0.5
counted = torch.rand(96, 4) < 0.6  # only these positions are to be learned
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
seen = 0


def loss_fn(model, batch):
    global seen
    seen += 1  # first mistake: a warm-up that no checkpoint knows
    x, y, mask = batch
    error = (F.mse_loss(model(x), y, reduction="none") * mask).sum() / mask.sum()  # second: a mean over positions
    return error * min(1.0, seen / 3)


optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with evener.Run(model, optimizer, loss_fn, (rows, targets, counted), global_batch_size=12, dir="runs/counts") as run:
    for update in run.updates(updates=8):
        run.print(update)
