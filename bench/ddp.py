"""Two gloo processes: evener's ddp and torch's DistributedDataParallel take turns inside the same two processes."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench import gpt
from bench.ranks import on_ranks
from bench.table import Table, verdict
from bench.timing import Timings, interleave, wall_clock

WORLD_SIZE, ROWS = 2, 4  # rows per rank


def measure(rounds: int) -> Timings:
    from evener.engine import Engine

    batch = gpt.make_batch(ROWS, seed=dist.get_rank())
    engine = Engine(*gpt.make(), gpt.loss_of, device="cpu", precision="fp32", strategy="ddp")

    def wrapped(fused: bool | None = None) -> tuple[DistributedDataParallel, object]:
        model, optimizer = gpt.make(fused)
        return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer

    contestants = {
        "evener": functools.partial(engine.step, batch),
        "torch DDP": gpt.raw_update(*wrapped(), batch),
        "torch DDP fused": gpt.raw_update(*wrapped(fused=True), batch),
    }
    return interleave(contestants, updates=2, rounds=rounds, warm_up=3, clock=wall_clock, between=dist.barrier)


def run(quick: bool) -> list[Table]:
    times = on_ranks(WORLD_SIZE, measure, 4 if quick else 20)
    table = Table(
        f"ddp: the same GPT on {WORLD_SIZE} gloo processes, {ROWS} rows each, wall time",
        ["loop", "ms per update", "rows per second", "evener's throughput / loop's"],
    )
    for name in times.seconds:
        seconds = times.median(name)
        table.add(
            name, f"{1e3 * seconds:.1f}", f"{WORLD_SIZE * ROWS / seconds:.1f}", f"{times.ratio(name, 'evener'):.3f}"
        )
    table.note(verdict("throughput / torch DDP", times.ratio("torch DDP", "evener"), 0.99, at_least=True))
    table.note(verdict("throughput / torch DDP fused", times.ratio("torch DDP fused", "evener"), 0.99, at_least=True))
    table.note(times.spread())
    return [table]
