"""What equality to the last bit costs: exact=True against the fast mode, both computing 8 slices one by one."""

from __future__ import annotations

import torch
import torch.distributed as dist

from bench import gpt
from bench.ranks import on_ranks
from bench.table import Table, verdict
from bench.timing import Timings, interleave, wall_clock

SLICES, SLICE_SIZE = 8, 1
ROWS = SLICES * SLICE_SIZE


def measure(rounds: int) -> Timings:
    from evener.engine import Engine

    share = ROWS // dist.get_world_size()
    batch = gpt.make_batch(ROWS)[dist.get_rank() * share :][:share]
    common = {"device": "cpu", "precision": "fp32", "global_batch_size": ROWS}
    fast_engine = Engine(*gpt.make(), gpt.loss_of, microbatch_size=SLICE_SIZE, **common)
    foreach_engine = Engine(*gpt.make(fused=False), gpt.loss_of, microbatch_size=SLICE_SIZE, **common)
    exact_engine = Engine(*gpt.make(), gpt.loss_of, exact=True, slice_size=SLICE_SIZE, **common)

    def fast(engine: Engine) -> None:
        # The exact engine's settings hold for the whole process; the fast one must not pay for them.
        torch.use_deterministic_algorithms(False)
        engine.step(batch)
        torch.use_deterministic_algorithms(True)

    contestants = {
        "exact": lambda: exact_engine.step(batch),
        "fast": lambda: fast(fast_engine),
        "fast, not fused": lambda: fast(foreach_engine),
    }
    return interleave(contestants, updates=1, rounds=rounds, warm_up=2, clock=wall_clock, between=dist.barrier)


def run(quick: bool) -> list[Table]:
    table = Table(
        f"exact: the same GPT, {SLICES} slices of {SLICE_SIZE} x {gpt.LENGTH} tokens, one thread each, wall time",
        ["processes", "exact ms", "fast ms", "exact / fast", "exact / fast, not fused"],
    )
    ratios = []
    for world_size in (1, 2, 4):
        times = on_ranks(world_size, measure, 4 if quick else 12)
        ratios.append(times.ratio("exact", "fast"))
        milli = [f"{1e3 * times.median(name):.1f}" for name in ("exact", "fast")]
        table.note(f"{world_size} processes: {times.spread()}")
        table.add(world_size, *milli, f"{ratios[-1]:.3f}", f"{times.ratio('exact', 'fast, not fused'):.3f}")
    table.note(verdict("worst ratio to fast", max(ratios), 1.15))
    table.note("fused optimizers give other bits on shards than on whole tensors: exact mode turns them off")
    return [table]
