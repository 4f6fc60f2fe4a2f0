"""Who this process is: rank, world size and local rank, read in one place.

An initialised process group is the truth; before there is one, the variables that torchrun, `evener run` and most
launchers set (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE); without those, one process.
"""

from __future__ import annotations

import os
import platform
import random
import sys
from dataclasses import dataclass

from evener.errors import UsageError


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the others. `node_first` is the lowest rank of its node when ranks are packed by node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def here() -> Place:
    """Where this process stands now. No communication; does not import torch by itself.

    Raises:
        UsageError: a launcher's variable is not a number, or the numbers contradict each other.
    """
    world = _number("WORLD_SIZE", 1)
    rank = _number("RANK", 0)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        rank, world = dist.get_rank(), dist.get_world_size()
    elif not 0 <= rank < world:
        fix = ["start the script with `evener run` or `torchrun`, or unset RANK and WORLD_SIZE for one process"]
        raise UsageError(f"RANK={rank} with WORLD_SIZE={world}: ranks run from 0 to world size - 1.", fix=fix)
    # Without a LOCAL_RANK (mpirun, a hand-written spawn) one node is the only guess that is right on one node.
    return Place(rank, world, _number("LOCAL_RANK", rank), _number("LOCAL_WORLD_SIZE", world))


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number.", fix=[f"unset {name}, or set it to an integer"]) from None


def share(rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """This rank's (start, stop) of `rows` rows: contiguous, disjoint, complete, and balanced to within one row."""
    return rank * rows // world_size, (rank + 1) * rows // world_size


def cpu_name() -> str:
    """What the kernel calls this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def rank() -> int:
    """This process's rank, 0 in a single process. No communication, no host sync."""
    return here().rank


def world_size() -> int:
    """How many processes train together, 1 in a single process. No communication, no host sync."""
    return here().world_size


def seed(n: int) -> None:
    """Seed Python's `random`, numpy's global generator and torch on every device, the same on every rank.

    Call it before building the model, so that every rank starts from the same parameters. Randomness inside an update
    is not drawn from these generators: it is derived from `Run(seed=)`, the update and the slice.

    Raises:
        UsageError: `n` is not an integer in 0 .. 2**32 - 1 (numpy's range).
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 0 <= n < 2**32:
        raise UsageError(f"seed({n!r}): the seed is an integer from 0 to 4294967295.", fix=["evener.seed(0)"])
    import numpy
    import torch

    random.seed(n)
    numpy.random.seed(n)
    torch.manual_seed(n)
