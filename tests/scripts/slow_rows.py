"""Rows that take 10 ms each: the update waits for data. Stopped from outside."""

import time

import torch

import evener


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((16,), i % 7.0), torch.tensor(i % 4)


def loss_fn(model, batch):
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y)


if __name__ == "__main__":
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = evener.Run(model, optimizer, loss_fn, Slow(), global_batch_size=32, dir="run", num_workers=0)
    for _ in run.updates(updates=100_000):
        pass
