"""One look at the GPUs: which probe, what went wrong, who holds what, and whether each is idle, or why not."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from evener.errors import UsageError
from evener.gpus import nvml, smi, visible
from evener.gpus.values import GIB, MIB, Gpu, Holder, MigDevice, Process, Snapshot, Trouble, from_json

SOURCES = ("auto", "nvml", "nvidia-smi")
IDLE_BYTES = 200 * MIB  # a GPU with no process has a few MiB in use; a CUDA context alone takes 300 and more
# Drivers before 510 may count what they reserve as used; a GPU that trains holds more than this.
IDLE_BYTES_WITH_RESERVED = GIB


def look(
    environ: Mapping[str, str],
    *,
    source: str = "auto",
    root: str = "/",
    holder_of: Callable[[str], Holder | None] = lambda uuid: None,
) -> Snapshot:
    """The GPUs of this machine now, each judged. Never raises for what the machine is like: see `Snapshot.trouble`.

    Args:
        environ: For CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER, which decide about slots and hide nothing here.
        source: "nvml", "nvidia-smi", or "auto": the first, and the second where the library is not there.
        root: Where /proc, /sys and /dev are looked for (tests have a fake one).
        holder_of: Who holds the lease of a UUID (`leases.Folder.holder`).
    """
    found = _probe(source, root)
    found = dataclasses.replace(found, host=socket.gethostname(), taken_unix=time.time())
    return judge(found, environ, holder_of)


def judge(
    found: Snapshot, environ: Mapping[str, str], holder_of: Callable[[str], Holder | None] = lambda uuid: None
) -> Snapshot:
    """The snapshot with slots, leases and verdicts filled in."""
    seen = visible.read(environ, found.gpus)
    gpus = []
    for gpu in found.gpus:
        parts = []
        for part in gpu.mig:
            lease = holder_of(part.uuid) if part.uuid else None
            busy = tuple(_busy_mig(part, lease))
            slot = seen.slot_of(part.uuid)
            parts.append(dataclasses.replace(part, lease=lease, slot=slot, idle=not busy, busy_because=busy))
        lease = holder_of(gpu.uuid) if gpu.uuid else None
        why, notes = _busy(gpu, lease)
        notes = [*gpu.notes, *(note for note in notes if note not in gpu.notes)]
        judged: dict[str, Any] = {
            "slot": seen.slot_of(gpu.uuid),
            "lease": lease,
            "idle": not why,
            "busy_because": tuple(why),
        }
        gpus.append(dataclasses.replace(gpu, mig=tuple(parts), notes=tuple(notes), **judged))
    return dataclasses.replace(found, gpus=tuple(gpus), visible=tuple(seen.lines(found.gpus)))


def read_recording(path: str) -> Snapshot:
    """A snapshot that `--record` wrote, as it was judged then."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path} cannot be read: {why}.", fix=["--from FILE, made by --record"]) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.", fix=["--from FILE, made by --record"]) from None
    return dataclasses.replace(from_json(values, path), source="recorded")


# --- idle, or why not -------------------------------------------------------------------------------------------------


def _busy(gpu: Gpu, lease: Holder | None) -> tuple[list[str], list[str]]:
    """(why it is not idle, what the reader should know besides)."""
    if gpu.error:
        return [gpu.error], []
    why, notes = [], []
    if lease is not None:
        why.append(f"lease of {lease}")
    if gpu.mig_enabled:
        why.append("MIG is on: its MIG devices are taken by their UUIDs")
    if gpu.health.compute_mode == "prohibited":
        why.append("its compute mode is prohibited: no process may compute on it")
    computing = [one for one in gpu.processes or () if one.kind != "graphics"]
    why += [describe(one) for one in computing]
    if gpu.processes is None:
        notes.append("its processes are hidden from you: judged by memory alone")
    drawing = sum(one.memory_bytes or 0 for one in gpu.processes or () if one.kind == "graphics")
    limit = IDLE_BYTES if gpu.memory_reserved_bytes is not None else IDLE_BYTES_WITH_RESERVED
    if gpu.memory_used_bytes is None:
        why.append("its memory cannot be read")
    elif not computing and not gpu.mig_enabled and gpu.memory_used_bytes - drawing >= limit:
        hidden = "by a process that cannot be seen" if gpu.processes is None else "and no process to be seen"
        why.append(f"{size(gpu.memory_used_bytes - drawing)} in use {hidden} (a container, another user's)")
    return why, notes


def _busy_mig(part: MigDevice, lease: Holder | None) -> list[str]:
    why = [f"lease of {lease}"] if lease is not None else []
    why += [describe(one) for one in part.processes or ()]
    if part.memory_used_bytes is None:
        why.append("its memory cannot be read")
    elif not part.processes and part.memory_used_bytes >= IDLE_BYTES:
        why.append(f"{size(part.memory_used_bytes)} in use and no process to be seen")
    return why


def describe(process: Process) -> str:
    if process.user is None:
        who = f"pid {process.pid} of the host (not to be seen from here)"
    else:
        who = f"{process.user}, pid {process.pid}"
    memory = "" if process.memory_bytes is None else f", {size(process.memory_bytes)}"
    age = "" if process.age_seconds is None else f", for {duration(process.age_seconds)}"
    orphan = ", an orphan" if process.orphan else ""
    return f"{who}{memory}{age}{orphan}{f': {process.command}' if process.command else ''}"


def duration(seconds: float) -> str:
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def size(count: int) -> str:
    """Bytes for people, in the binary units that nvidia-smi uses."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"


# --- the probes, and what their failures mean -------------------------------------------------------------------------


def _probe(source: str, root: str) -> Snapshot:
    if sys.platform == "darwin":
        cause = "No NVIDIA GPU: this is a Mac. torch uses Apple's GPU as device mps, with one process."
        return Snapshot(trouble=Trouble("no-gpu", cause, False, ("its memory is the machine's own",)))
    if source == "nvidia-smi":
        return smi.read() if smi.there() else Snapshot(trouble=_no_tool())
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        why = "the package nvidia-ml-py is not installed"
        return _by_tool(source, Trouble("other", why, True, fix=("pip install nvidia-ml-py",)))
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound:
        return _by_tool(source, without_library(root))
    except pynvml.NVMLError as error:
        return Snapshot(trouble=_trouble(pynvml, error, root))
    try:
        return nvml.read(pynvml, root)
    except pynvml.NVMLError as error:
        return Snapshot(trouble=_trouble(pynvml, error, root))
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _by_tool(source: str, trouble: Trouble) -> Snapshot:
    """nvidia-smi where the library cannot be asked and nobody insisted on it."""
    found = smi.read() if source == "auto" and smi.there() else None
    return found if found is not None and found.trouble is None else Snapshot(trouble=trouble)


def _no_tool() -> Trouble:
    return Trouble("no-driver", "there is no nvidia-smi on the PATH", False, fix=("install NVIDIA's driver",))


def without_library(root: str) -> Trouble:
    """No libnvidia-ml.so.1: is there no GPU, or a GPU without its driver?"""
    cards = []
    for vendor in glob.glob(os.path.join(root, "sys/bus/pci/devices/*/vendor")):
        with contextlib.suppress(OSError):
            folder = os.path.dirname(vendor)
            if _text(vendor) == "0x10de" and (_text(os.path.join(folder, "class")) or "").startswith("0x03"):
                cards.append(os.path.basename(folder))
    if cards:
        evidence = f"on the PCI bus: {', '.join(sorted(cards))}"
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
    text = f"NVML: {error}"
    nodes = sorted(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))
    dmesg = "dmesg | grep -i -e nvrm -e xid"

    def broken(kind: str, cause: str, fix: list[str], evidence: list[str] | None = None) -> Trouble:
        return Trouble(kind, cause, True, (text, *(evidence or [])), tuple(fix))

    if isinstance(error, pynvml.NVMLError_LibRmVersionMismatch):
        loaded = _loaded_driver(root)
        evidence = [f"the kernel has driver {loaded} loaded"] if loaded else []
        evidence += [f"the library is {name}" for name in _mapped_libraries()]
        fix = ["reboot, or unload and load the nvidia modules", "usual cause: an unattended upgrade of the driver"]
        return broken("mismatch", "The driver's kernel module and its library differ.", fix, evidence)
    if isinstance(error, pynvml.NVMLError_DriverNotLoaded):
        if not nodes and without_library(root).kind == "no-gpu":
            cause = "NVIDIA's library is here, but no driver is loaded, and no GPU can be seen."
            return broken("driver-not-loaded", cause, ["sudo modprobe nvidia, if there is a GPU"])
        fix = ["sudo modprobe nvidia", "after a kernel upgrade: reinstall the driver (dkms)"]
        return broken("driver-not-loaded", "The NVIDIA driver is not loaded.", fix)
    if isinstance(error, pynvml.NVMLError_NoPermission):
        fix = ["ls -l /dev/nvidia*: you need read and write permission (a group such as video)"]
        return broken("no-permission", "You may not ask the NVIDIA driver.", fix)
    if isinstance(error, pynvml.NVMLError_Unknown) and nodes:
        fix = ["in a container: its device rules were lost (a daemon reload does that): restart it", f"else: {dmesg}"]
        evidence = [f"device files are there: {', '.join(nodes)}"]
        return broken("lost-in-container", "The NVIDIA driver does not answer.", fix, evidence)
    return broken("other", "The NVIDIA driver does not answer.", [f"nvidia-smi, and {dmesg}"])


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _loaded_driver(root: str) -> str | None:
    match = re.search(r"Module\s+([\d.]+)", _text(os.path.join(root, "proc/driver/nvidia/version")) or "")
    return match[1] if match else None


def _mapped_libraries() -> list[str]:
    """The file behind libnvidia-ml.so.1, whose name ends in the version, as this process has it mapped."""
    names = {line.split()[-1] for line in (_text("/proc/self/maps") or "").splitlines() if "libnvidia-ml" in line}
    return sorted(names)
