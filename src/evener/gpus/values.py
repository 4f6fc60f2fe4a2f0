"""The GPUs of a machine as values: what a probe read, frozen, and the JSON contract of `evener gpus --json`.

Unknown is None (`null`), never a guess. Field names carry their unit. `to_json` and `from_json` are each other's
inverse, so a recorded file is as good as the machine it came from.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any

from evener.errors import UsageError

GIB = 1024**3
MIB = 1024**2


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
    """Who holds a lease. Only `held` is certain (the lock itself); the rest is what the holder wrote down."""

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
class MigDevice:
    """A slice of a GPU in MIG mode. It is picked by its UUID; CUDA uses one of them per process."""

    index: int
    uuid: str | None = None
    name: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
    processes: tuple[Process, ...] | None = None
    slot: int | None = None
    lease: Holder | None = None
    idle: bool | None = None
    busy_because: tuple[str, ...] = ()


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: The driver's number, in PCI order: what nvidia-smi shows.
        slot: The number inside CUDA_VISIBLE_DEVICES that a process started here would use (`cuda:SLOT`); None when it
            is hidden there, or when CUDA's own order is not known.
        memory_reserved_bytes: What the driver keeps for itself, not counted as used. None on drivers before 510, whose
            `used` may include it.
        processes: None when they cannot be read: not the same as none.
        idle: None until `evener.gpus.look` has judged.
        error: Why nothing, or not everything, could be read ("GPU is lost").
        notes: What the reader should know and does not make it busy.
    """

    index: int
    uuid: str | None = None
    name: str | None = None
    slot: int | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    memory_free_bytes: int | None = None
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
    processes: tuple[Process, ...] | None = None
    lease: Holder | None = None
    idle: bool | None = None
    busy_because: tuple[str, ...] = ()
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
    """Why there are no GPUs to show.

    Attributes:
        kind: "no-gpu", "amd", "no-driver", "driver-not-loaded", "mismatch", "no-permission", "lost-in-container" or
            "other".
        broken: There should be some (exit code 4), not just none (3).
    """

    kind: str
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


def to_json(snapshot: Snapshot) -> dict[str, Any]:
    """The contract of `evener gpus --json`: plain dicts and lists, ready for `json.dumps`."""
    return dataclasses.asdict(snapshot)


def from_json(values: Any, where: str) -> Snapshot:
    """A snapshot out of what `to_json` made, checked field by field; fields that are missing are unknown.

    Raises UsageError with the path of the first value that does not fit.
    """
    try:
        return typing.cast(Snapshot, _build(Snapshot, values, "", typing.get_type_hints(Snapshot)))
    except _Misfit as error:
        raise UsageError(
            f"{where} is no recording of GPUs.",
            evidence=[str(error)],
            fix=["`evener gpus --record FILE` writes one, on the machine that has the GPUs"],
        ) from None


class _Misfit(ValueError):
    pass


def _build(kind: Any, value: Any, path: str, hints: dict[str, Any]) -> Any:
    if not isinstance(value, dict):
        raise _Misfit(f"{path or 'the file'}: an object was expected, not {type(value).__name__}")
    known = {field.name for field in dataclasses.fields(kind)}
    for name in value:
        if name not in known:
            raise _Misfit(f"{path}{name}: not a field of {kind.__name__}")
    try:
        return kind(**{name: _read(hints[name], one, f"{path}{name}") for name, one in value.items()})
    except TypeError as error:  # a field without a default is missing
        raise _Misfit(f"{path or 'the file'}: {str(error).rpartition(': ')[2]} is missing") from None


def _read(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None:
            return None
        hint = typing.get_args(hint)[0]
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{path}.", typing.get_type_hints(hint))
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list):
            raise _Misfit(f"{path}: a list was expected, not {value!r}")
        inner = typing.get_args(hint)[0]
        return tuple(_read(inner, one, f"{path}[{i}]") for i, one in enumerate(value))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _Misfit(f"{path}: {hint.__name__} was expected, not {value!r}")
    return value
