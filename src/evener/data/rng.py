"""The three global random generators that datasets draw from: torch's, Python's `random`, numpy's legacy one.

Measured (one thread, numpy 2.4, torch 2.13): seeding all three costs 6.5 us, `torch.default_generator.manual_seed` 1 us
of it (`torch.manual_seed` would cost 270 us: it visits every device). Finding out whether a row drew at all would cost
80 us, mostly numpy's state: so rows that are read one by one are simply always seeded, and only a batched read asks.

A dataset with a generator of its own (`np.random.default_rng()` kept in `self`) is out of reach: its draws depend on
who reads the row, as they do under any DataLoader.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from evener.dist.mix import mix

States = tuple[torch.Tensor, Any, Any]


def states() -> States:
    """The states of the three generators, about 40 us."""
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state(legacy=False)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Afterwards all three stand as before."""
    before = states()
    try:
        yield
    finally:
        torch.default_generator.set_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])


def same(a: States, b: States) -> bool:
    """Whether nothing was drawn (or seeded) in between."""
    return torch.equal(a[0], b[0]) and a[1] == b[1] and _same(a[2], b[2])


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b))


def seed_all(seed: int) -> None:
    """Seed the three generators from one 63-bit seed. Touches no GPU generator."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    # torch (low 32 bits) and numpy run the same generator with the same seeding: other bits, or both draw alike.
    np.random.seed(seed >> 31)


def row_seeds(seed: int, epoch: int, keys: npt.NDArray[np.int64]) -> list[int]:
    """A seed in [0, 2**63) per row, from (seed, epoch, key); all rows of a job in one vectorised pass."""
    z = keys.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix(seed, epoch))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    seeds: list[int] = (z >> np.uint64(1)).tolist()
    return seeds
