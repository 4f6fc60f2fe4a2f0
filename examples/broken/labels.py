"""A token loss as a plain scalar: refused, with the line that is right. Run: python examples/broken/labels.py"""

import torch
from torch import nn
from torch.nn import functional as F

import evener

tokens = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))
length = torch.arange(64) % 9 + 4  # what is behind the end of a row has no label
labels = tokens.roll(-1, 1).masked_fill(torch.arange(12) >= length[:, None], -100)
model = nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = {"tokens": tokens, "labels": labels}
with evener.Run(model, optimizer, loss_fn, rows, global_batch_size=16) as run:
    for update in run.updates(updates=4):
        run.print(update)
