"""The facts of this machine that a launch is decided from: usable CPUs, visible GPUs, the loopback interface.

Measured once, before the decision, and handed to it as a value; the decision itself reads nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpus:
    """The GPUs that a process started now would see, as words for CUDA_VISIBLE_DEVICES.

    `words` is None when they cannot be counted; `unknown_because` then says why. Nobody guesses.
    """

    words: tuple[str, ...] | None
    unknown_because: str = ""


@dataclass(frozen=True)
class Machine:
    """What a launch is decided from."""

    gpus: Gpus
    usable_cpus: int
    loopback: str
    temporary: str
    python: str


def look(environ: Mapping[str, str], *, gpus: bool = True) -> Machine:
    """This machine now. `gpus=False` does not ask the driver (a `--cpu` launch has no use for the answer)."""
    return Machine(
        gpus=visible_gpus(environ) if gpus else Gpus(()),
        usable_cpus=usable_cpus(),
        loopback="lo0" if sys.platform == "darwin" else "lo",
        temporary=tempfile.gettempdir(),
        python=sys.executable,
    )


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


def visible_gpus(environ: Mapping[str, str]) -> Gpus:
    """The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, counted without torch.

    The user's own words are kept; without the variable the words are UUIDs, which mean the same in every tool.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not wanted.strip():
        return Gpus(())
    uuids, why = _nvml_uuids()
    if uuids is None:
        return Gpus(None, why)
    if not uuids and os.path.exists("/dev/kfd"):
        return Gpus(None, "this machine has an AMD GPU driver, and only NVIDIA GPUs are counted")
    if wanted is None:
        return Gpus(uuids)
    words: list[str] = []
    for word in (entry.strip() for entry in wanted.split(",")):
        # The driver stops reading at the first word that names nothing; what follows is not visible.
        if word.isdecimal():
            valid = int(word) < len(uuids)
        else:
            valid = word.startswith("MIG-") or any(uuid.startswith(word) for uuid in uuids if word)
        if not valid:
            break
        words.append(word)
    return Gpus(tuple(words))


def _nvml_uuids() -> tuple[tuple[str, ...] | None, str]:
    """UUIDs in driver order; (None, why) when the driver is there and does not answer."""
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return (), ""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return (), ""  # no driver: no GPU that torch could use
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles), ""
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
    finally:
        pynvml.nvmlShutdown()
