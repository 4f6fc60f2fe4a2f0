"""The probe through NVML (the package nvidia-ml-py): every value on its own, so that one failure hides nothing else.

Eras of the driver: before 510 there is no second version of the memory call, and `used` may include what the driver
reserves; before 510 there is no third version of the process lists; 535.43 to 535.85 filled the third version with
records of 32 bytes, where every other driver has 24.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import itertools
import os
import re
from typing import Any

from evener.gpus import owners
from evener.gpus.values import Gpu, Health, Link, MigDevice, Process, Snapshot

COMPUTE_MODES = {0: "default", 1: "exclusive-thread", 2: "prohibited", 3: "exclusive-process"}
PATHS = {0: "same board", 10: "one PCIe switch", 20: "several PCIe switches"}
PATHS |= {30: "one host bridge", 40: "one socket", 50: "other socket"}
P2P = {0: "ok", 1: "chipset not supported", 2: "GPU not supported", 3: "IOH topology not supported", 4: "disabled"}
# nvmlClocksEventReasons: only those that slow a GPU that has work (1 is "idle", 2 "application clocks").
THROTTLE = {0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost"}
THROTTLE |= {0x20: "thermal (software)", 0x40: "thermal (hardware)", 0x80: "power brake"}


class Lost(Exception):
    """The GPU answers nothing any more."""


class _Record32(ctypes.Structure):
    """pid, memory, GPU instance, compute instance, protected memory."""

    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong)]
    _fields_ += [("instances", ctypes.c_uint * 2), ("protected_memory", ctypes.c_ulonglong)]


class _Reader:
    """Asks one device, remembers what was refused."""

    def __init__(self, nvml: Any, handle: Any, driver: str | None = None, root: str = "/") -> None:
        self.nvml, self.handle, self.driver, self.root = nvml, handle, driver, root
        self.errors: dict[str, str] = {}

    def ask(self, what: str, *args: Any, **more: Any) -> Any:
        """The answer of nvmlDeviceGet..., or None when this GPU, driver or nvidia-ml-py has none. Raises Lost."""
        nvml = self.nvml
        try:
            return getattr(nvml, f"nvmlDeviceGet{what}", lambda *_: None)(self.handle, *args, **more)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotFound):
            return None
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            raise Lost(str(error)) from None
        except nvml.NVMLError as error:
            self.errors[what] = str(error)
            return None

    def device(self, found: dict[str, Any]) -> dict[str, Any]:
        """What a GPU and a MIG device have in common, put into `found` as it comes: a lost GPU may know its name."""
        found["uuid"] = self.ask("UUID")
        found["name"] = self.ask("Name")
        memory, reserved = self.ask("MemoryInfo", version=self.nvml.nvmlMemory_v2), True
        if memory is None:
            self.errors.pop("MemoryInfo", None)
            memory, reserved = self.ask("MemoryInfo"), False
        for name in ("total", "used", "free", *["reserved"] * reserved):
            found[f"memory_{name}_bytes"] = None if memory is None else int(getattr(memory, name))
        return found

    def processes(self) -> tuple[Process, ...] | None:
        """Every process once, the largest first; None when the list of computing processes cannot be read."""
        found: dict[int, tuple[int | None, str]] = {}
        # One that computes and draws is in both lists: it belongs to the desktop.
        for name, kind in (("Compute", "compute"), ("Graphics", "graphics"), ("MPSCompute", "mps")):
            rows = self._list(f"{name}RunningProcesses")
            if rows is None and kind == "compute":
                return None
            for pid, memory in rows or ():
                old = found.get(pid, (None, ""))[0]
                found[pid] = (memory if old is None else old, kind)
        named = [named_process(pid, memory, kind, self.root) for pid, (memory, kind) in found.items()]
        return tuple(sorted(named, key=lambda one: (-(one.memory_bytes or 0), one.pid)))

    def _list(self, what: str) -> list[tuple[int, int | None]] | None:
        version = re.match(r"535\.(\d+)\b", self.driver or "")
        if version is not None and 43 <= int(version[1]) < 86:  # records of 32 bytes
            return self._list32(f"{what}_v3")
        rows = self.ask(f"{what}_v3")
        if rows is None and f"{what}_v3" not in self.errors:
            rows = self.ask(f"{what}_v2")
        return None if rows is None else [(int(row.pid), row.usedGpuMemory) for row in rows]

    def _list32(self, what: str) -> list[tuple[int, int | None]] | None:
        call, count = getattr(self.nvml.nvmlLib, f"nvmlDeviceGet{what}"), ctypes.c_uint(64)
        while True:
            records = (_Record32 * count.value)()
            code = call(self.handle, ctypes.byref(count), records)
            if code != self.nvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            count.value = count.value * 2 + 5  # more may have started since
        if code != self.nvml.NVML_SUCCESS:
            self.errors[what] = str(self.nvml.NVMLError(code))
            return None
        nothing = 2**64 - 1
        return [(one.pid, None if one.memory == nothing else one.memory) for one in records[: count.value]]

    def numa_node(self, bus: str | None) -> int | None:
        """The memory node whose CPUs are near: the kernel's word, else the driver's.

        Not nvmlDeviceGetNumaNodeId: that is the node which a GPU's own memory is, on machines that have such.
        """
        domain, _, rest = (bus or "").lower().partition(":")
        with contextlib.suppress(OSError, ValueError):
            path = os.path.join(self.root, "sys/bus/pci/devices", f"{domain[-4:]}:{rest}", "numa_node")
            with open(path, encoding="ascii") as file:
                node = int(file.read())
            return node if node >= 0 else None
        nodes = self.ask("MemoryAffinity", 4, 0) or ()
        numbers = [64 * at + bit for at, word in enumerate(nodes) for bit in range(64) if word >> bit & 1]
        return numbers[0] if len(numbers) == 1 else None

    def health(self) -> Health:
        mode, persistence, rows = self.ask("ComputeMode"), self.ask("PersistenceMode"), self.ask("RemappedRows")
        reasons = self.ask("CurrentClocksEventReasons")
        if reasons is None:
            reasons = self.ask("CurrentClocksThrottleReasons")
        return Health(
            compute_mode=COMPUTE_MODES.get(mode, None if mode is None else str(mode)),
            persistence=None if persistence is None else bool(persistence),
            ecc_uncorrected_errors=self.ask("TotalEccErrors", 1, 0),
            remapped_rows_pending=None if rows is None else bool(rows[2]),
            remapped_rows_failed=None if rows is None else bool(rows[3]),
            throttle=None if reasons is None else tuple(text for bit, text in THROTTLE.items() if reasons & bit),
            pcie_width=self.ask("CurrPcieLinkWidth"),
            pcie_width_max=self.ask("MaxPcieLinkWidth"),
            pcie_generation=self.ask("CurrPcieLinkGeneration"),
            pcie_generation_max=self.ask("MaxPcieLinkGeneration"),
            power_limit_default_w=self.watts("PowerManagementDefaultLimit"),
            **self.nvlink_errors(),
        )

    def watts(self, what: str) -> float | None:
        milliwatts = self.ask(what)
        return None if milliwatts is None else milliwatts / 1000

    def nvlink_errors(self) -> dict[str, int | None]:
        """The error counters, summed over the active links; None without such links, or where they are not counted."""
        quiet = _Reader(self.nvml, self.handle)  # a refused counter is no note on the GPU
        found: dict[str, int | None] = {}
        for name, kinds in (("replays", (0,)), ("recoveries", (1,)), ("crc_errors", (2, 3))):
            counts = [quiet.ask("NvLinkErrorCounter", link, kind) for link in quiet.links() or () for kind in kinds]
            found[f"nvlink_{name}"] = None if not counts or None in counts else sum(counts)
        return found

    def links(self) -> list[int] | None:
        """The numbers of the active NVLinks; None for a GPU that has none at all."""
        states = (self.ask("NvLinkState", link) for link in range(18))
        there = list(itertools.takewhile(lambda state: state is not None, states))
        return [link for link, state in enumerate(there) if state] if there else None

    def remote_ends(self) -> list[str] | None:
        """The PCI id at the end of each active NVLink (a switch's, where there is one); None without NVLink."""
        links = self.links()
        ends = [self.ask("NvLinkRemotePciInfo", link) for link in links or ()]
        return None if links is None else [str(end.busId) for end in ends if end is not None]


def named_process(pid: int, memory: int | None, kind: str, root: str = "/") -> Process:
    """The process with its owner, where that can be said with certainty.

    In a container the number may be another process's. That one has no GPU open; a stand-in driver has no device files.
    """
    found = owners.who(pid, root)
    foreign = found is not None and owners.may_be_foreign(root) and owners.gpu_devices(pid, root) == ()
    if found is None or (foreign and glob.glob(os.path.join(root, "dev/nvidia[0-9]*"))):
        return Process(pid, memory_bytes=memory, kind=kind)
    return Process(pid, found.user, found.command, memory, found.age_seconds, kind, orphan=found.parent == 1)


def read(nvml: Any, root: str = "/") -> Snapshot:
    """Everything NVML says. `nvml` is the module, initialised; raises its NVMLError when not even a count comes."""
    driver = cuda = None
    with contextlib.suppress(nvml.NVMLError):
        driver = str(nvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(nvml.NVMLError):
        number = int(nvml.nvmlSystemGetCudaDriverVersion())
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    gpus, readers = [], {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            readers[index] = _Reader(nvml, nvml.nvmlDeviceGetHandleByIndex(index), driver, root)
        except nvml.NVMLError as error:
            gpus.append(Gpu(index, error=str(error)))
        else:
            gpus.append(_gpu(readers[index], index))
    links = []
    for a, one in readers.items():
        ends = None
        with contextlib.suppress(Lost):
            ends = one.remote_ends()
        links += [_link(one, ends, other, a, gpus[b]) for b, other in readers.items() if a < b]
    return Snapshot(driver, cuda, "nvml", tuple(gpus), tuple(links))


def _gpu(reader: _Reader, index: int) -> Gpu:
    values: dict[str, Any] = {}
    try:
        reader.device(values)
        pci, rates, capability = (reader.ask(what) for what in ("PciInfo", "UtilizationRates", "CudaComputeCapability"))
        values["pci_bus_id"] = None if pci is None else str(pci.busId)
        values["utilization_percent"] = None if rates is None else int(rates.gpu)
        values["compute_capability"] = None if capability is None else f"{capability[0]}.{capability[1]}"
        values["temperature_c"] = reader.ask("Temperature", 0)
        values |= {"power_w": reader.watts("PowerUsage"), "power_limit_w": reader.watts("EnforcedPowerLimit")}
        values |= {"numa_node": reader.numa_node(values["pci_bus_id"]), "health": reader.health()}
        mode = reader.ask("MigMode")
        values["mig_enabled"] = None if mode is None else bool(mode[0])
        values["mig"] = _mig(reader) if values["mig_enabled"] else ()
        values["processes"] = reader.processes()
    except Lost as error:
        return Gpu(index, **values, error=str(error))
    return Gpu(index, **values, notes=tuple(f"{what}: {why}" for what, why in reader.errors.items()))


def _mig(reader: _Reader) -> tuple[MigDevice, ...]:
    found = []
    for index in range(reader.ask("MaxMigDeviceCount") or 0):
        handle = reader.ask("MigDeviceHandleByIndex", index)
        if handle is not None:
            inner = _Reader(reader.nvml, handle, reader.driver, reader.root)
            values = inner.device({})
            values.pop("memory_reserved_bytes", None)
            found.append(MigDevice(index, **values, processes=inner.processes()))
    return tuple(found)


def _link(one: _Reader, ends: list[str] | None, other: _Reader, a: int, b: Gpu) -> Link:
    path: Any = None
    p2p: Any = None
    with contextlib.suppress(Lost):
        path = one.ask("TopologyCommonAncestor", other.handle)
        p2p = one.ask("P2PStatus", other.handle, 0)
    nvlinks = None if ends is None or b.pci_bus_id is None else ends.count(b.pci_bus_id)
    return Link(a, b.index, PATHS.get(path), nvlinks, None if p2p is None else P2P.get(p2p, f"status {p2p}"))
