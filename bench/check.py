"""`make bench-check`: a few paired ratios against those that were stored; above what the noise explains is an error.

    python -m bench.check [--quick] [--store]

A ratio of two neighbours on one machine moves much less from machine to machine than either of its times, and CPU time
does not see other people's load. The noise is that of this very run (and of the stored one); beyond it a ratio may be
SLACK higher, because two processes of the same code differ by more than the rounds of one.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from bench import data, gpt, step
from bench.table import Table
from bench.timing import Timings, interleave

STORED = Path(__file__).with_name("baseline.json")
SIGMAS, SLACK = 3.0, 0.05
Pair = Mapping[str, Callable[[], object]]  # the measured one, then what it is compared with


def tiny(*case: str) -> AbstractContextManager[Pair]:
    return nullcontext({"evener": step.evener_update(*case), "raw loop": step.raw_update(*case)})


@contextmanager
def whole_gpt() -> Iterator[Pair]:
    from evener.engine import Engine

    batch = gpt.make_batch(2)
    engine = Engine(*gpt.make(), gpt.loss_of, device="cpu", precision="fp32")
    yield {"evener": functools.partial(engine.step, batch), "raw loop": gpt.raw_update(*gpt.make(), batch)}


@contextmanager
def with_data() -> Iterator[Pair]:
    with data.contestants() as made:
        yield {name: made[name] for name in ("Run.updates", "compute only")}


# name -> how the pair is made, updates in a block, rounds
CASES: dict[str, tuple[Callable[[], AbstractContextManager[Pair]], int, int]] = {
    "step: SGD fp32 plain": (functools.partial(tiny, "SGD", "fp32", "plain"), 200, 25),
    "step: AdamW bf16 accumulate": (functools.partial(tiny, "AdamW", "bf16", "accumulate"), 50, 25),
    "gpt": (whole_gpt, 1, 25),
    "data: a loop over Run.updates": (with_data, 100, 25),
}


def measure(name: str, *, quick: bool) -> tuple[Timings, str, str]:
    make, updates, rounds = CASES[name]
    with make() as pair:
        rounds = 5 if quick else rounds
        one, other = pair
        return interleave(pair, updates=updates, rounds=rounds, warm_up=max(2, updates // 4)), one, other


def limit(stored: Mapping[str, float], noise: float) -> float:
    """The highest ratio that is no regression."""
    return stored["ratio"] * (1 + SLACK) + SIGMAS * math.hypot(noise, stored["noise"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few rounds, nothing is judged: does it still run?")
    parser.add_argument("--store", action="store_true", help=f"this run becomes {STORED.name}")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    stored = json.loads(STORED.read_text()) if STORED.is_file() else {"ratios": {}, "machine": "none"}
    table = Table(
        f"bench-check: CPU time of evener / of the other, against {stored['machine']}",
        ["pair", "ms", "ratio", "noise", "stored", "at most", ""],
    )
    found, slower = {}, []
    for name in CASES:
        times, one, other = measure(name, quick=given.quick)
        ratio, noise = times.ratio(one, other), times.noise(one, other)
        found[name] = {"ratio": round(ratio, 4), "noise": round(noise, 4)}
        most = limit(stored["ratios"][name], noise) if name in stored["ratios"] else math.inf
        before = f"{stored['ratios'][name]['ratio']:.3f}" if name in stored["ratios"] else "-"
        slower += [name] if ratio > most else []
        said = "SLOWER" if ratio > most else "ok" if math.isfinite(most) else "new"
        table.add(name, f"{1e3 * times.median(one):.3f}", f"{ratio:.3f}", f"{noise:.3f}", before, f"{most:.3f}", said)
    print(table)
    if given.store:
        machine = f"{platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
        STORED.write_text(json.dumps({"machine": machine, "ratios": found}, indent=2) + "\n")
    return 1 if slower and not given.quick and not given.store else 0


if __name__ == "__main__":
    sys.exit(main())
