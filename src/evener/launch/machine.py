"""The facts of this machine that a launch is decided from: usable CPUs, chosen GPUs, the loopback interface.

Measured once, before the decision, and handed to it as a value; the decision itself reads nothing.
"""

from __future__ import annotations

import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Gpus:
    """The GPUs that were chosen for a launch, in slot order.

    Attributes:
        words: What goes into CUDA_VISIBLE_DEVICES. None when the GPUs cannot be counted; `unknown_because` then says
            why. Nobody guesses.
        text: What the user is told ("GPU 6, 7 (NVIDIA A100-SXM4-80GB)").
        numa_nodes: The memory node of each; None where it is not known.
        leased: Descriptors of the lease: whoever has one keeps the claim alive.
    """

    words: tuple[str, ...] | None
    unknown_because: str = ""
    text: str = "GPUs"
    numa_nodes: tuple[int | None, ...] = ()
    leased: tuple[int, ...] = ()
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
    return Machine(
        gpus=gpus,
        usable_cpus=usable_cpus(),
        loopback="lo0" if sys.platform == "darwin" else "lo",
        temporary=tempfile.gettempdir(),
        python=sys.executable,
        node_cpus=node_cpus(),
    )


def node_cpus(root: str = "/") -> dict[int, tuple[int, ...]]:
    """The usable CPUs of every memory node (NUMA), by its number; empty where the system has no such thing."""
    if sys.platform != "linux":
        return {}
    found = {}
    allowed = os.sched_getaffinity(0)
    for path in glob.glob(os.path.join(root, "sys/devices/system/node/node[0-9]*/cpulist")):
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            ranges = [part.partition("-") for part in file.read().strip().split(",") if part]
            cpus = {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
            found[int(os.path.basename(os.path.dirname(path)).removeprefix("node"))] = tuple(sorted(cpus & allowed))
    return found


def usable_cpus(root: str = "/") -> int:
    """CPUs that this process may use: its affinity, and the whole CPUs of its cgroup's quota; at least 1.

    `os.cpu_count()` alone is the number of the host, which a container with a quota oversubscribes. `root` is where
    /proc and /sys are looked for (tests have a fake one).
    """
    if sys.platform == "linux":
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = _cgroup_quota(root)
    return max(1, min(count, int(quota)) if quota is not None else count)


def _cgroup_quota(root: str) -> float | None:
    """The smallest CPU quota on the way from this process's cgroup to the top; None when there is none."""
    try:
        with open(os.path.join(root, "proc/self/cgroup"), encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy
            mount, read = "sys/fs/cgroup", _quota_v2
        elif "cpu" in controllers.split(","):
            mount, read = f"sys/fs/cgroup/{controllers}", _quota_v1
            if not os.path.isdir(os.path.join(root, mount)):
                mount = "sys/fs/cgroup/cpu"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # In a container the path is the host's while the mount shows only our own group: folders that do not exist
        # are skipped, and the mount's top, which is then our own group, is always read.
        for depth in range(len(parts), -1, -1):
            with contextlib.suppress(OSError, ValueError):
                quota = read(os.path.join(root, mount, *parts[:depth]))
                if quota is not None:
                    found.append(quota)
    return min(found, default=None)


def _quota_v2(folder: str) -> float | None:
    with open(os.path.join(folder, "cpu.max"), encoding="utf-8") as file:
        quota, period = file.read().split()
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(folder: str) -> float | None:
    with open(os.path.join(folder, "cpu.cfs_quota_us"), encoding="utf-8") as file:
        quota = int(file.read())
    with open(os.path.join(folder, "cpu.cfs_period_us"), encoding="utf-8") as file:
        period = int(file.read())
    return None if quota <= 0 else quota / period
