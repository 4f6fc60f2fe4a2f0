"""A job over a stream of shards, on a cluster that may take its machines away: `stream_job.py DIR [--die-at UPDATE]`.

Killed at an update (once, before its checkpoint), or asked to stop, it goes on where its last checkpoint is: on as many
processes as there are then. `--stop-at UPDATE`: there it waits until it is asked.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import evener

SHARDS, LINES, WORDS = 6, 17, 8


class Shards(torch.utils.data.IterableDataset):
    """Shards in an order of their own in every epoch; knows the shard and the line where it is."""

    def __init__(self) -> None:
        self.epoch, self.shard, self.line = 0, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(SHARDS), SHARDS)
        while self.shard < SHARDS:
            lines = torch.Generator().manual_seed(order[self.shard])
            words = torch.randint(20, (LINES, WORDS), generator=lines)
            while self.line < LINES:
                tokens = words[self.line]
                self.line += 1
                dropped = tokens.masked_fill(torch.rand(WORDS) < 0.1, 0)  # drawn anew for every row of every epoch
                yield {"tokens": dropped, "labels": tokens.roll(-1)}
            self.shard, self.line = self.shard + 1, 0
        self.shard = 0

    def state_dict(self) -> dict[str, int]:
        return {"shard": self.shard, "line": self.line}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.shard, self.line = state["shard"], state["line"]


def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> evener.Mean:
    losses = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return evener.Mean(total=losses, count=batch["labels"].numel())


def main(argv: list[str] | None = None) -> str:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("dir")
    arguments.add_argument("--die-at", type=int)
    arguments.add_argument("--stop-at", type=int)
    asked = arguments.parse_args(argv)
    evener.seed(0)
    model = nn.Sequential(nn.Embedding(20, 16), nn.Dropout(0.1), nn.Linear(16, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evener.Run(
        model,
        optimizer,
        loss_fn,
        Shards(),
        stream="split",
        global_batch_size=24,
        exact=True,
        precision="fp32",
        save_every=4,
        dir=asked.dir,
        logger=lambda values, step: None,
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total),
    ) as run:
        for update in run.updates(updates=30):
            deadline = time.monotonic() + 60
            if update.number == asked.die_at and run.rank == run.world_size - 1:
                newest = Path(asked.dir, "checkpoints", f"update-{update.number // 4 * 4}")
                while not newest.exists() and time.monotonic() < deadline:
                    time.sleep(0.05)  # it is written behind the training
                os.kill(os.getpid(), signal.SIGKILL)
            if run.is_main:
                print(f"update {update.number} of epoch {update.epoch}", flush=True)
            while update.number == asked.stop_at and not run.engine.asks_to_stop and time.monotonic() < deadline:
                time.sleep(0.05)
        digest = run.digest()
        run.print(f"digest {digest}")
    return digest


if __name__ == "__main__":
    main()
