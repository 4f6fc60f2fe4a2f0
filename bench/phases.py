"""What it costs to know where a step's time goes: the same engine with and without a clock reading per phase.

The pair is one engine and one process; only `engine.lap` differs, update by update in turns. Its difference has a noise
that is larger than itself on a busy machine, so the readings are timed alone as well. The smallest update in these
tables is the worst case: nobody trains it. The second table is what a rank writes at most once a second.
"""

from __future__ import annotations

import functools
import tempfile
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from bench.step import make, make_batch
from bench.table import Table, verdict
from bench.timing import error_of_median, interleave
from evener.engine import Engine
from evener.report.events import Events
from evener.run.phases import HostPhases
from evener.run.pulse import Pulse

TARGET = 0.005  # of a step
Batch = tuple[torch.Tensor, torch.Tensor]
Lap = Callable[[str], object]


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def digits() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def run(quick: bool) -> list[Table]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits_batch = torch.randn(64, 64), torch.randint(0, 10, (64,))
    cases = {
        "smallest MLP, 8 rows": (make("SGD"), make_batch(), 1, 4000),
        "smallest MLP, 4 microbatches of 2": (make("SGD"), make_batch(), 4, 1500),
        "digits' MLP, 64 rows": (digits(), digits_batch, 1, 1000),
    }
    columns = ["update", "without, us", "paired: added, us", "95 % of its noise, us", "readings alone, us", "share"]
    table = Table("Phases of a step", columns)
    for name, (parts, batch, pieces, rounds) in cases.items():
        engine = Engine(*parts, loss_fn, device="cpu", precision="fp32", microbatch_size=len(batch[0]) // pieces)

        def update(engine: Engine, lap: Lap, batch: Batch) -> None:
            engine.lap = lap
            engine.step(batch)

        pair = {
            name: functools.partial(update, engine, lap, batch)
            for name, lap in (("without", engine.lap), ("measured", HostPhases().lap))
        }
        # One update each in turns: a difference this small drowns in what changes between longer blocks.
        times = interleave(pair, updates=1, rounds=rounds // (10 if quick else 1), warm_up=20)
        added, base = times.added("measured", "without"), times.median("without")
        noise = 1.96 * error_of_median([a - b for a, b in zip(times.seconds["measured"], times.seconds["without"])])
        alone = (3 + 2 * pieces) * (_call(HostPhases().lap) - _call(bool))
        figures = (f"{base * 1e6:.0f}", f"{added * 1e6:+.2f}", f"{noise * 1e6:.2f}", f"{alone * 1e6:.2f}")
        table.add(name, *figures, f"{100 * alone / base:.2f} %")
        table.note(f"{name}: {times.spread()}")
        table.note(verdict(f"{name}: share of a step", alone / base, TARGET))
        engine.close()
    return [table, _written()]


def _call(lap: Lap) -> float:
    """Seconds of one call: the least of 20 blocks."""
    return min(timeit.repeat(lambda: lap("forward"), number=5000, repeat=20)) / 5000


def _written() -> Table:
    """One `phases` event: the sums, the resident memory, one line to the disk."""
    table = Table("What a rank writes at most once a second", ["what", "us", "share of a second"])
    with tempfile.TemporaryDirectory() as folder:
        events, pulse = Events(Path(folder) / "events.jsonl"), Pulse()
        pulse.phases = HostPhases()
        times = []
        for number in range(300):
            pulse.updates += 1
            began = time.perf_counter()
            events.write("phases", update=number, **pulse.split(began))
            times.append(time.perf_counter() - began)
        events.close()
    middle = sorted(times)[len(times) // 2]
    table.add("a phases event", f"{middle * 1e6:.0f}", f"{100 * middle:.4f} %")
    table.note(verdict("share of a second", middle, TARGET))
    return table
