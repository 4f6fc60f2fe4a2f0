"""The GPUs of a machine as values: what a probe read, frozen, and the JSON contract of `evener gpus --json`.

Unknown is None (`null`), never a guess. Field names carry their unit. `to_json` and `from_json` are each other's
inverse, so a recorded file is as good as the machine it came from.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from evener.errors import UsageError

GIB = 1024**3
MIB = 1024**2
T = TypeVar("T")


@dataclass(frozen=True)
class Process:
    """A process on a GPU, as the driver lists it. `user` and the rest are None where it cannot be seen from here."""

    pid: int
    user: str | None = None
    command: str | None = None
    memory_bytes: int | None = None
    age_seconds: float | None = None
    kind: str = "compute"  # or "graphics", "mps"
    orphan: bool | None = None  # its parent is gone (process 1 has it)


@dataclass(frozen=True)
class Holder:
    """Who holds a lease, as the holder wrote it down: only that somebody does (the lock itself) is certain."""

    pid: int | None = None
    user: str | None = None
    command: str | None = None
    since_unix: float | None = None
    host: str | None = None

    def __str__(self) -> str:
        who = self.user or "somebody"
        return f"{who}{f', pid {self.pid}' if self.pid else ''}{f': {self.command}' if self.command else ''}"


@dataclass(frozen=True)
class Health:
    """What says whether a GPU is well; each None where the driver does not tell."""

    compute_mode: str | None = None  # "default", "exclusive-process", "prohibited"
    persistence: bool | None = None
    ecc_uncorrected_errors: int | None = None
    remapped_rows_pending: bool | None = None  # a reset is due
    remapped_rows_failed: bool | None = None
    throttle: tuple[str, ...] | None = None  # reasons active now: "power cap", "thermal", ...
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    power_limit_default_w: float | None = None
    nvlink_replays: int | None = None  # these three summed over all active links, since the driver was loaded
    nvlink_recoveries: int | None = None
    nvlink_crc_errors: int | None = None


@dataclass(frozen=True)
class Device:
    """What can be picked.

    Attributes:
        index: Of a GPU the driver's number, in PCI order: what nvidia-smi shows. Of a MIG device its number there.
        slot: The N of `cuda:N` for a process started here; None when it is hidden, or only CUDA knows the order.
        processes: None when they cannot be read: not the same as none.
        idle, busy_because: None and () until `look.judge` has judged.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    slot: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[Process, ...] | None = None
    lease: Holder | None = None
    idle: bool | None = None
    busy_because: tuple[str, ...] = ()


@dataclass(frozen=True)
class MigDevice(Device):
    """A slice of a GPU in MIG mode. It is picked by its UUID; CUDA uses one of them per process."""


@dataclass(frozen=True)
class Gpu(Device):
    """One GPU.

    Attributes:
        memory_reserved_bytes: What the driver keeps for itself, not counted as used. None on drivers before 510, whose
            `used` may include it.
        error: Why nothing, or not everything, could be read ("GPU is lost").
        notes: What the reader should know and does not make it busy.
    """

    memory_reserved_bytes: int | None = None
    utilization_percent: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    compute_capability: str | None = None
    pci_bus_id: str | None = None
    numa_node: int | None = None
    mig_enabled: bool | None = None
    mig: tuple[MigDevice, ...] = ()
    health: Health = Health()
    error: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """How two GPUs (by index) reach each other: `path` from "same board" to "other socket", and NVLinks between."""

    a: int
    b: int
    path: str | None = None
    nvlinks: int | None = None
    p2p: str | None = None  # "ok", or why not


@dataclass(frozen=True)
class Trouble:
    """Why there are no GPUs to show. `broken`: there should be some (exit code 4), not just none (3)."""

    kind: str  # no-gpu, amd, no-driver, driver-not-loaded, mismatch, no-permission, lost-in-container or other
    cause: str
    broken: bool
    evidence: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Snapshot:
    """All GPUs at one moment.

    Attributes:
        cuda: The newest CUDA version that the driver can serve ("12.8").
        source: "nvml", "nvidia-smi", "recorded", or "none".
        visible: How CUDA_VISIBLE_DEVICES was read, and every word of it that does not count; empty when it is unset.
        trouble: Set when the GPUs could not be asked.
    """

    driver: str | None = None
    cuda: str | None = None
    source: str = "none"
    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    visible: tuple[str, ...] = ()
    host: str | None = None
    taken_unix: float | None = None
    notes: tuple[str, ...] = ()
    trouble: Trouble | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every GPU, then every MIG device."""
        return (*self.gpus, *(part for gpu in self.gpus for part in gpu.mig))


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The contract of `evener gpus --json`: plain dicts and lists, ready for `json.dumps`."""
    return dataclasses.asdict(snapshot)


def from_json(values: Any, where: str) -> Snapshot:
    """A snapshot out of what `to_json` made; fields that are missing are unknown. Raises UsageError."""
    fix = "`evener gpus --record FILE` writes one, on the machine that has the GPUs"
    return decode(Snapshot, values, f"{where} is no recording of GPUs.", fix)


def decode(kind: type[T], values: Any, cause: str, fix: str) -> T:
    """`values` out of JSON as that dataclass, every field of its type.

    Raises UsageError with the path of the first value that does not fit.
    """
    try:
        return typing.cast(T, _read(kind, values, ""))
    except (ValueError, RecursionError) as error:
        raise UsageError(cause, evidence=[str(error)], fix=[fix]) from None


def _read(hint: Any, value: Any, path: str) -> Any:
    """`value` as the type `hint` has it. Raises ValueError with the path."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if isinstance(hint, types.UnionType):  # always "or None"
        return None if value is None else _read(inner[0], value, path)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{path or 'the file'}: an object was expected, not {type(value).__name__}")
        hints, below = typing.get_type_hints(hint), f"{path}." if path else ""
        if unknown := [name for name in value if name not in hints]:
            raise ValueError(f"{below}{unknown[0]}: not a field of {hint.__name__}")
        try:
            return hint(**{name: _read(hints[name], one, f"{below}{name}") for name, one in value.items()})
        except TypeError as error:  # a field without a default is missing
            raise ValueError(f"{path or 'the file'}: {str(error).rpartition(': ')[2]} is missing") from None
    if origin in (tuple, list):
        if not isinstance(value, list):
            raise ValueError(f"{path}: a list was expected, not {value!r}")
        return origin(_read(inner[0], one, f"{path}[{i}]") for i, one in enumerate(value))
    if origin is dict:
        return {name: _read(inner[1], one, f"{path}.{name}") for name, one in _read(dict, value, path).items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise ValueError(f"{path}: {hint.__name__} was expected, not {value!r}")
    return value
