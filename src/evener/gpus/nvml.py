"""The probe through NVML (the package nvidia-ml-py): every value on its own, so that one failure hides nothing else.

Eras of the driver: before 510 there is no second version of the memory call, and `used` may include what the driver
reserves; before 510 there is no third version of the process lists; 535.43 to 535.85 filled the third version with
records of 32 bytes, where every other driver has 24.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
from collections.abc import Callable
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
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
        ("protected_memory", ctypes.c_ulonglong),
    ]


class _Reader:
    """Asks one device, remembers what was refused."""

    def __init__(self, nvml: Any, handle: Any, driver: str | None, root: str) -> None:
        self.nvml, self.handle, self.driver, self.root = nvml, handle, driver, root
        self.errors: dict[str, str] = {}

    def ask(self, function: str, *args: Any, **more: Any) -> Any:
        """The answer, or None when this GPU or driver has none. Raises Lost."""
        nvml = self.nvml
        call: Callable[..., Any] | None = getattr(nvml, function, None)
        if call is None:  # an older nvidia-ml-py
            return None
        try:
            return call(self.handle, *args, **more)
        except (nvml.NVMLError_NotSupported, nvml.NVMLError_FunctionNotFound, nvml.NVMLError_NotFound):
            return None
        except (nvml.NVMLError_GpuIsLost, nvml.NVMLError_ResetRequired) as error:
            raise Lost(str(error)) from None
        except nvml.NVMLError as error:
            self.errors[function.removeprefix("nvmlDeviceGet")] = str(error)
            return None

    def memory(self) -> tuple[int | None, int | None, int | None, int | None]:
        """(total, used, free, reserved)."""
        info = self.ask("nvmlDeviceGetMemoryInfo", version=self.nvml.nvmlMemory_v2)
        if info is not None:
            return int(info.total), int(info.used), int(info.free), int(info.reserved)
        self.errors.pop("MemoryInfo", None)
        info = self.ask("nvmlDeviceGetMemoryInfo")
        return (None,) * 4 if info is None else (int(info.total), int(info.used), int(info.free), None)

    def processes(self, kinds: tuple[str, ...] = ("Compute", "Graphics", "MPSCompute")) -> tuple[Process, ...] | None:
        """Every process once, the largest first; None when the list of computing processes cannot be read."""
        found: dict[int, tuple[int | None, str]] = {}
        for kind in kinds:
            rows = self._list(kind)
            if rows is None:
                if kind == "Compute":
                    return None
                continue
            for pid, memory in rows:
                # One that computes and draws is in both lists: it belongs to the desktop.
                name = {"Compute": "compute", "Graphics": "graphics", "MPSCompute": "mps"}[kind]
                old = found.get(pid, (None, ""))[0]
                found[pid] = (memory if old is None else old, name)
        named = [named_process(pid, memory, kind, self.root) for pid, (memory, kind) in found.items()]
        return tuple(sorted(named, key=lambda one: (-(one.memory_bytes or 0), one.pid)))

    def _list(self, kind: str) -> list[tuple[int, int | None]] | None:
        function = f"nvmlDeviceGet{kind}RunningProcesses"
        if is_535_with_long_records(self.driver):
            return self._list32(f"{function}_v3")
        rows = self.ask(f"{function}_v3")
        if rows is None and f"{kind}RunningProcesses_v3" not in self.errors:
            rows = self.ask(f"{function}_v2")
        return None if rows is None else [(int(row.pid), row.usedGpuMemory) for row in rows]

    def _list32(self, function: str) -> list[tuple[int, int | None]] | None:
        call = getattr(self.nvml.nvmlLib, function)
        count = ctypes.c_uint(64)
        while True:
            records = (_Record32 * count.value)()
            code = call(self.handle, ctypes.byref(count), records)
            if code != self.nvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            count.value = count.value * 2 + 5  # more may have started since
        if code != self.nvml.NVML_SUCCESS:
            self.errors[function.removeprefix("nvmlDeviceGet")] = str(self.nvml.NVMLError(code))
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
        nodes = self.ask("nvmlDeviceGetMemoryAffinity", 4, 0)
        numbers = [bit for bit in range(256) if nodes[bit // 64] >> bit % 64 & 1] if nodes is not None else []
        return numbers[0] if len(numbers) == 1 else None

    def health(self) -> Health:
        mode = self.ask("nvmlDeviceGetComputeMode")
        persistence = self.ask("nvmlDeviceGetPersistenceMode")
        rows = self.ask("nvmlDeviceGetRemappedRows")
        reasons = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:
            reasons = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Health(
            compute_mode=COMPUTE_MODES.get(mode, None if mode is None else str(mode)),
            persistence=None if persistence is None else bool(persistence),
            ecc_uncorrected_errors=self.ask("nvmlDeviceGetTotalEccErrors", 1, 0),
            remapped_rows_pending=None if rows is None else bool(rows[2]),
            remapped_rows_failed=None if rows is None else bool(rows[3]),
            throttle=None if reasons is None else tuple(text for bit, text in THROTTLE.items() if reasons & bit),
            pcie_width=self.ask("nvmlDeviceGetCurrPcieLinkWidth"),
            pcie_width_max=self.ask("nvmlDeviceGetMaxPcieLinkWidth"),
            pcie_generation=self.ask("nvmlDeviceGetCurrPcieLinkGeneration"),
            pcie_generation_max=self.ask("nvmlDeviceGetMaxPcieLinkGeneration"),
            power_limit_default_w=self.watts("PowerManagementDefaultLimit"),
            **self.nvlink_errors(),
        )

    def watts(self, what: str) -> float | None:
        milliwatts = self.ask(f"nvmlDeviceGet{what}")
        return None if milliwatts is None else milliwatts / 1000

    def nvlink_errors(self) -> dict[str, int | None]:
        """The error counters, summed over the active links; None without such links, or where they are not counted."""
        quiet = _Reader(self.nvml, self.handle, None, "")  # a refused counter is no note on the GPU
        active = [link for link, on in enumerate(quiet.links()) if on]
        found: dict[str, int | None] = {}
        for name, kinds in (("replays", (0,)), ("recoveries", (1,)), ("crc_errors", (2, 3))):
            counts = [quiet.ask("nvmlDeviceGetNvLinkErrorCounter", link, kind) for link in active for kind in kinds]
            found[f"nvlink_{name}"] = None if not counts or None in counts else sum(counts)
        return found

    def links(self) -> list[bool]:
        """Whether each NVLink of this GPU is active; [] where it has none."""
        states = (self.ask("nvmlDeviceGetNvLinkState", link) for link in range(18))
        return [bool(state) for state in itertools.takewhile(lambda state: state is not None, states)]


def is_535_with_long_records(driver: str | None) -> bool:
    try:
        version = tuple(int(part) for part in (driver or "").split("."))
    except ValueError:
        return False
    return (535, 43) <= version < (535, 86)


def named_process(pid: int, memory: int | None, kind: str, root: str = "/") -> Process:
    """The process with its owner, where that can be said with certainty."""
    found = owners.who(pid, root)
    if found is None or (owners.may_be_foreign(root) and owners.gpu_devices(pid, root) == () and _has_nodes(root)):
        return Process(pid, memory_bytes=memory, kind=kind)
    return Process(pid, found.user, found.command, memory, found.age_seconds, kind, orphan=found.parent == 1)


def _has_nodes(root: str) -> bool:
    """Whether there are device files that an open one could be compared with (a stand-in driver has none)."""
    import glob

    return bool(glob.glob(os.path.join(root, "dev/nvidia[0-9]*")))


def read(nvml: Any, root: str = "/") -> Snapshot:
    """Everything NVML says. `nvml` is the module, initialised; raises its NVMLError when not even a count comes."""
    driver = cuda = None
    with contextlib.suppress(nvml.NVMLError):
        driver = str(nvml.nvmlSystemGetDriverVersion())
    with contextlib.suppress(nvml.NVMLError):
        number = int(nvml.nvmlSystemGetCudaDriverVersion())
        cuda = f"{number // 1000}.{number % 1000 // 10}"
    gpus, handles = [], {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handles[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            gpus.append(Gpu(index, error=str(error)))
            continue
        gpus.append(_gpu(_Reader(nvml, handles[index], driver, root), index))
    buses = {gpu.index: gpu.pci_bus_id for gpu in gpus}
    ends = {index: _remote_ends(nvml, handle) for index, handle in handles.items()}
    links = [_link(nvml, a, b, handles, ends, buses[b]) for a in handles for b in handles if a < b]
    return Snapshot(driver, cuda, "nvml", tuple(gpus), tuple(links))


def _gpu(reader: _Reader, index: int) -> Gpu:
    values: dict[str, Any] = {}
    try:
        values["uuid"] = reader.ask("nvmlDeviceGetUUID")
        values["name"] = reader.ask("nvmlDeviceGetName")
        pci = reader.ask("nvmlDeviceGetPciInfo")
        values["pci_bus_id"] = None if pci is None else str(pci.busId)
        total, used, free, reserved = reader.memory()
        values |= {"memory_total_bytes": total, "memory_used_bytes": used}
        values |= {"memory_free_bytes": free, "memory_reserved_bytes": reserved}
        rates = reader.ask("nvmlDeviceGetUtilizationRates")
        values["utilization_percent"] = None if rates is None else int(rates.gpu)
        values["temperature_c"] = reader.ask("nvmlDeviceGetTemperature", 0)
        values |= {"power_w": reader.watts("PowerUsage"), "power_limit_w": reader.watts("EnforcedPowerLimit")}
        capability = reader.ask("nvmlDeviceGetCudaComputeCapability")
        values["compute_capability"] = None if capability is None else f"{capability[0]}.{capability[1]}"
        values["numa_node"] = reader.numa_node(values["pci_bus_id"])
        values["health"] = reader.health()
        mode = reader.ask("nvmlDeviceGetMigMode")
        values["mig_enabled"] = None if mode is None else bool(mode[0])
        values["mig"] = _mig(reader) if values["mig_enabled"] else ()
        values["processes"] = reader.processes()
    except Lost as error:
        return Gpu(index, **values, error=str(error))
    refused = [f"{what}: {why}" for what, why in reader.errors.items()]
    return Gpu(index, **values, notes=tuple(refused))


def _mig(reader: _Reader) -> tuple[MigDevice, ...]:
    found = []
    for index in range(reader.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
        handle = reader.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
        if handle is None:
            continue
        inner = _Reader(reader.nvml, handle, reader.driver, reader.root)
        total, used, free, _ = inner.memory()
        uuid, name = inner.ask("nvmlDeviceGetUUID"), inner.ask("nvmlDeviceGetName")
        found.append(MigDevice(index, uuid, name, total, used, free, inner.processes()))
    return tuple(found)


def _link(
    nvml: Any, a: int, b: int, handles: dict[int, Any], remotes: dict[int, list[str] | None], bus: str | None
) -> Link:
    one, other, ends = _Reader(nvml, handles[a], None, ""), handles[b], remotes[a]
    path, p2p = -1, -1  # what no table has
    with contextlib.suppress(Lost):
        path = _or(one.ask("nvmlDeviceGetTopologyCommonAncestor", other), -1)
        p2p = _or(one.ask("nvmlDeviceGetP2PStatus", other, 0), -1)
    reach = P2P.get(p2p, f"status {p2p}") if p2p >= 0 else None
    return Link(a, b, PATHS.get(path), None if ends is None or bus is None else ends.count(bus), reach)


def _remote_ends(nvml: Any, handle: Any) -> list[str] | None:
    """The PCI id at the end of each active NVLink (a switch's, where there is one); None without NVLink."""
    one = _Reader(nvml, handle, None, "")
    with contextlib.suppress(Lost):
        links = one.links()
        ends = [one.ask("nvmlDeviceGetNvLinkRemotePciInfo", link) for link, active in enumerate(links) if active]
        return [str(end.busId) for end in ends if end is not None] if links else None
    return []


def _or(value: Any, default: int) -> int:
    return default if value is None else int(value)
