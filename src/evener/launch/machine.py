"""The facts of this machine that a launch is decided from, measured once; the decision itself reads nothing."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from evener.limits import node_cpus, usable_cpus


@dataclass(frozen=True)
class Gpus:
    """The GPUs that were chosen for a launch, in slot order."""

    words: tuple[str, ...] | None  # for CUDA_VISIBLE_DEVICES; None: they cannot be counted, and nobody guesses
    unknown_because: str = ""
    text: str = "GPUs"  # what the user is told: "GPU 6, 7 (NVIDIA A100-SXM4-80GB)"
    kinds: tuple[str, ...] = ()  # the names of those that are GPUs, as the driver says them
    numa_nodes: tuple[int | None, ...] = ()  # the memory node of each; None: not known
    leased: tuple[int, ...] = ()  # descriptors of the lease: whoever has one keeps the claim alive
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Machine:
    """What a launch is decided from. `node_cpus`: memory node -> its CPUs that this process may use."""

    gpus: Gpus
    usable_cpus: int
    loopback: str
    temporary: str
    python: str
    node_cpus: Mapping[int, tuple[int, ...]] = field(default_factory=dict)


def look(gpus: Gpus) -> Machine:
    """This machine now, with the GPUs that were chosen."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return Machine(gpus, usable_cpus(), loopback, tempfile.gettempdir(), sys.executable, node_cpus())
