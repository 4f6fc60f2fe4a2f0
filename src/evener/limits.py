"""What this process may use of its machine: CPUs by affinity, quota and memory node, and memory. For every room.

`root` is where /proc and /sys are looked for (tests have a fake one).
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator


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

    `os.cpu_count()` alone is the number of the host, which a container with a quota oversubscribes.
    """
    found = [len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1]
    for said in _cgroups(root, "cpu", ["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        quota, period, *_ = [*" ".join(said).split(), "", ""]
        if quota.isdigit() and int(quota) > 0 and period.isdigit():  # else there is no limit: "max", -1
            found.append(int(quota) // int(period))
    return max(1, min(found))


def memory_limit(root: str = "/") -> tuple[int | None, int | None]:
    """The tightest memory limit of this process's cgroups, and the bytes used under it; None: none, not known."""
    found: list[tuple[int, int | None]] = []
    new, old = ["memory.max", "memory.current"], ["memory.limit_in_bytes", "memory.usage_in_bytes"]
    for limit, used, stat in _cgroups(root, "memory", [*new, "memory.stat"], [*old, "memory.stat"]):
        if limit.isdigit() and int(limit) < 1 << 60:  # version 1 says "none" with a huge number
            # Page cache counts as used, and is given back before anybody is killed.
            cache = re.search(r"(?m)^(?:total_)?inactive_file (\d+)", stat)
            found.append((int(limit), max(0, int(used) - int(cache[1] if cache else 0)) if used.isdigit() else None))
    return min(found, key=lambda one: one[0], default=(None, None))


def _cgroups(root: str, controller: str, new: list[str], old: list[str]) -> Iterator[list[str]]:
    """The texts of these files, for this process's cgroup and each one above it: `new` in version 2, `old` in 1.

    In a container the path is the host's while the mount shows only our own group: folders that do not exist say
    nothing, and the mount's top, which is then our own group, is always read.
    """
    for line in _text(root, "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = os.path.join("sys/fs/cgroup", controllers)
        if controllers and not os.path.isdir(os.path.join(root, mount)):
            mount = os.path.join("sys/fs/cgroup", controller)
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            yield [_text(root, mount, *parts[:depth], name) for name in (old if controllers else new)]


def _text(*path: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(*path), encoding="utf-8") as file:
        return file.read().strip()
    return ""
