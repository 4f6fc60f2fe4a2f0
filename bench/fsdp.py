"""Two gloo processes: evener's fsdp and torch's fully_shard by hand take turns inside the same two processes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from bench import gpt
from bench.ranks import on_ranks
from bench.table import Table
from bench.timing import Timings, interleave, wall_clock

WORLD_SIZE, ROWS = 2, 4  # rows per rank


def by_hand(batch: torch.Tensor) -> Callable[[], object]:
    model, _ = gpt.make()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def update() -> None:
        gpt.loss_of(model, batch).backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        if torch.isfinite(norm.full_tensor()):
            optimizer.step()
        optimizer.zero_grad()

    return update


def measure(rounds: int) -> Timings:
    from evener.engine import Engine

    batch = gpt.make_batch(ROWS, seed=dist.get_rank())
    engine = Engine(*gpt.make(), gpt.loss_of, device="cpu", precision="fp32", strategy="fsdp")
    contestants = {"evener": functools.partial(engine.step, batch), "fully_shard": by_hand(batch)}
    return interleave(contestants, updates=2, rounds=rounds, warm_up=3, clock=wall_clock, between=dist.barrier)


def run(quick: bool) -> list[Table]:
    times = on_ranks(WORLD_SIZE, measure, 4 if quick else 20)
    table = Table(
        f"fsdp: the same GPT on {WORLD_SIZE} gloo processes, {ROWS} rows each, wall time",
        ["loop", "ms per update", "evener's throughput / loop's"],
    )
    for name in times.seconds:
        table.add(name, f"{1e3 * times.median(name):.1f}", f"{times.ratio(name, 'evener'):.3f}")
    table.note(times.spread())
    return [table]
