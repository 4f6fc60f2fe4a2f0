"""One look at the GPUs: which probe, what went wrong, who holds what, and whether each is idle, or why not."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from evener.errors import UsageError
from evener.gpus import nvml, smi, visible
from evener.gpus.values import GIB, MIB, Device, Gpu, Holder, Process, Snapshot, Trouble, from_json

IDLE_BYTES = 200 * MIB  # a GPU with no process has a few MiB in use; a CUDA context alone takes 300 and more
# Drivers before 510 may count what they reserve as used; a GPU that trains holds more than this.
IDLE_BYTES_WITH_RESERVED = GIB
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB"))
D = TypeVar("D", bound=Device)
HolderOf = Callable[[str], Holder | None]


def look(environ: Mapping[str, str], *, root: str = "/", holder_of: HolderOf = lambda uuid: None) -> Snapshot:
    """The GPUs of this machine now, each judged. Never raises for what the machine is like: see `Snapshot.trouble`.

    Args:
        environ: For CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, which decide about slots and hide nothing here.
        root: Where /proc, /sys and /dev are looked for (tests have a fake one).
        holder_of: Who holds the lease of a UUID (`leases.Folder.holder`).
    """
    found = replace(_probe(root), host=socket.gethostname(), taken_unix=time.time())
    return judge(found, environ, holder_of)


def judge(found: Snapshot, environ: Mapping[str, str], holder_of: HolderOf = lambda uuid: None) -> Snapshot:
    """The snapshot with slots, leases and verdicts filled in."""
    seen = visible.read(environ, found.gpus)

    def judged(one: D, **more: Any) -> D:
        lease = holder_of(one.uuid) if one.uuid else None
        why = tuple(_busy(one, lease))
        return replace(one, slot=seen.slot_of(one.uuid), lease=lease, idle=not why, busy_because=why, **more)

    gpus = []
    for gpu in found.gpus:
        hidden = "its processes are hidden from you: judged by memory alone"
        new = gpu.processes is None and not gpu.error and hidden not in gpu.notes
        parts = tuple(judged(part) for part in gpu.mig)
        gpus.append(judged(gpu, mig=parts, notes=(*gpu.notes, hidden) if new else gpu.notes))
    return replace(found, gpus=tuple(gpus), visible=tuple(seen.lines(found.gpus)))


def read_recording(path: str) -> Snapshot:
    """A snapshot that `--record` wrote, as it was judged then."""
    try:
        with open(path, encoding="utf-8") as file:
            return replace(from_json(json.load(file), path), source="recorded")
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    except (ValueError, RecursionError) as error:
        why = f"is not JSON: {error}"
    raise UsageError(f"{path} {why}.", fix=["--from FILE, made by --record"])


# --- idle, or why not -------------------------------------------------------------------------------------------------


def _busy(one: Device, lease: Holder | None) -> list[str]:
    """Why it is not idle."""
    gpu = one if isinstance(one, Gpu) else None
    if gpu and gpu.error:
        return [gpu.error]
    why = [f"lease of {lease}"] if lease is not None else []
    if gpu and gpu.mig_enabled:
        why.append("MIG is on: its MIG devices are taken by their UUIDs")
    if gpu and gpu.health.compute_mode == "prohibited":
        why.append("its compute mode is prohibited: no process may compute on it")
    computing = [process for process in one.processes or () if process.kind != "graphics"]
    why += map(describe, computing)
    drawing = sum(process.memory_bytes or 0 for process in one.processes or () if process.kind == "graphics")
    limit = IDLE_BYTES_WITH_RESERVED if gpu and gpu.memory_reserved_bytes is None else IDLE_BYTES
    if one.memory_used_bytes is None:
        why.append("its memory cannot be read")
    elif not computing and not (gpu and gpu.mig_enabled) and one.memory_used_bytes - drawing >= limit:
        hidden = "by a process that cannot be seen" if one.processes is None else "and no process to be seen"
        why.append(f"{size(one.memory_used_bytes - drawing)} in use {hidden} (a container, another user's)")
    return why


def describe(process: Process) -> str:
    who = f"{process.user}, pid {process.pid}"
    if process.user is None:
        who = f"pid {process.pid} of the host (not to be seen from here)"
    memory = "" if process.memory_bytes is None else f", {size(process.memory_bytes)}"
    age = "" if process.age_seconds is None else f", for {duration(process.age_seconds)}"
    orphan = ", an orphan" if process.orphan else ""
    return f"{who}{memory}{age}{orphan}{f': {process.command}' if process.command else ''}"


def duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def size(count: int | None) -> str:
    """Bytes for people, in the binary units that nvidia-smi uses: 20.5 GiB, 512 MiB, 30.5 MiB; None is "unknown"."""
    if count is None or count < 1024:
        return "unknown" if count is None else f"{count} B"
    value, unit = next((count / one, name) for one, name in _UNITS if count >= one)
    return f"{value:.1f} {unit}" if unit == "GiB" else f"{round(value, 1):g} {unit}"


# --- the probes, and what their failures mean -------------------------------------------------------------------------


def _probe(root: str) -> Snapshot:
    """NVML's answer, or nvidia-smi's where the library is not there."""
    if sys.platform == "darwin":
        cause = "No NVIDIA GPU: this is a Mac. torch uses its GPU as mps, with one process."
        return Snapshot(trouble=Trouble("no-gpu", cause, False, ("its memory is the machine's own",)))
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        trouble = Trouble("other", "the package nvidia-ml-py is not installed", True, fix=("pip install nvidia-ml-py",))
    else:
        try:
            pynvml.nvmlInit()
            try:
                return nvml.read(pynvml, root)
            finally:
                with contextlib.suppress(pynvml.NVMLError):
                    pynvml.nvmlShutdown()
        except pynvml.NVMLError_LibraryNotFound:
            trouble = without_library(root)
        except pynvml.NVMLError as error:
            return Snapshot(trouble=_trouble(pynvml, error, root))
    return smi.read() or Snapshot(trouble=trouble)


def without_library(root: str) -> Trouble:
    """No libnvidia-ml.so.1: is there no GPU, or a GPU without its driver?"""
    folders = glob.glob(os.path.join(root, "sys/bus/pci/devices/*"))
    nvidia = [one for one in folders if _text(one, "vendor") == "0x10de" and _text(one, "class").startswith("0x03")]
    if nvidia:
        evidence = f"on the PCI bus: {', '.join(sorted(map(os.path.basename, nvidia)))}"
        fix = "install NVIDIA's driver (it brings libnvidia-ml.so.1)"
        if any(os.path.exists(os.path.join(root, mark)) for mark in (".dockerenv", "run/.containerenv")):
            fix = "start the container with its GPUs: docker run --gpus all (NVIDIA Container Toolkit)"
        return Trouble("no-driver", "There is an NVIDIA card and no driver library for it.", True, (evidence,), (fix,))
    if os.path.exists(os.path.join(root, "dev/kfd")):
        cause = "There is an AMD GPU driver here; evener counts NVIDIA GPUs only."
        return Trouble("amd", cause, False, fix=("rocm-smi shows AMD GPUs; `evener run --nproc N` starts N ranks",))
    fix = "`evener run --cpu --nproc N` starts N processes on the CPU"
    return Trouble("no-gpu", "There is no NVIDIA GPU on this machine.", False, fix=(fix,))


def _trouble(pynvml: Any, error: Any, root: str) -> Trouble:
    """What it means that NVML answers with an error."""
    nodes = sorted(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    kind, cause, more = "other", "The NVIDIA driver does not answer.", list[str]()
    dmesg = "dmesg | grep -i -e nvrm -e xid"
    fix = [f"nvidia-smi, and {dmesg}"]
    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        kind, cause = "mismatch", "The driver's kernel module and its library differ."
        loaded = loaded_driver(root)
        more = [f"the kernel has driver {loaded} loaded"] if loaded else []
        # As this process has it mapped: the file's name ends in the version.
        mapped = {line.split()[-1] for line in _text("/proc/self/maps").splitlines() if "libnvidia-ml" in line}
        more += [f"the library is {name}" for name in sorted(mapped)]
        fix = ["reboot, or unload and load the nvidia modules", "usual cause: an unattended upgrade of the driver"]
    elif isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        kind, cause = "driver-not-loaded", "The NVIDIA driver is not loaded."
        fix = ["sudo modprobe nvidia", "after a kernel upgrade: reinstall the driver (dkms)"]
        if not nodes and without_library(root).kind == "no-gpu":
            cause = "NVIDIA's library is here, but no driver is loaded, and no GPU can be seen."
            fix = ["sudo modprobe nvidia, if there is a GPU"]
    elif isinstance(error, pynvml.NVMLError_NoPermission):
        kind, cause = "no-permission", "You may not ask the NVIDIA driver."
        fix = ["ls -l /dev/nvidia*: you need read and write permission (a group such as video)"]
    elif isinstance(error, pynvml.NVMLError_Unknown) and nodes:
        kind, more = "lost-in-container", [f"device files are there: {', '.join(nodes)}"]
        fix = ["in a container: its device rules were lost (a daemon reload does that): restart it", f"else: {dmesg}"]
    return Trouble(kind, cause, True, (f"NVML: {error}", *more), tuple(fix))


def loaded_driver(root: str) -> str | None:
    """The version of the kernel's NVIDIA driver, the closed or the open one."""
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", _text(root, "proc/driver/nvidia/version"))
    return found[1] if found else None


def _text(*path: str) -> str:
    with contextlib.suppress(OSError), open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""
