"""Facts with a source per row: what GPUs are (`gpus.toml`), what a process costs beside its tensors (`overheads.toml`).

Unknown is None, never a guess. Standard library only.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from evener.errors import UsageError, nearest

GIB = 1024**3
MIB = 1024**2


@dataclass(frozen=True)
class GpuKind:
    """One kind of GPU. Peaks are dense FLOP/s; bandwidths are bytes/s, links in one direction.

    Attributes:
        usable_bytes: What torch sees as total capacity; None where no source gives it (then see `capacity_bytes`).
        peak: FLOP/s by "fp32" (no matrix units), "tf32", "bf16", "fp16"; what is missing is unknown, or not native.
    """

    name: str
    aka: tuple[str, ...] = ()
    memory_bytes: int = 0
    usable_bytes: int | None = None
    compute_capability: str | None = None
    peak: Mapping[str, float] = field(default_factory=dict)
    memory_bandwidth: float | None = None
    nvlink_bandwidth: float | None = None
    pcie_bandwidth: float | None = None
    source: str = ""
    usable_source: str = ""

    @property
    def capacity_bytes(self) -> int:
        """`usable_bytes`; where that is unknown the sheet's memory less the largest loss of any kind that is known."""
        if self.usable_bytes is not None:
            return self.usable_bytes
        return int(self.memory_bytes * min(one.usable_bytes / one.memory_bytes for one in known() if one.usable_bytes))


@functools.cache
def known() -> tuple[GpuKind, ...]:
    """Every kind of the shipped table."""
    return kinds_of(_table("gpus.toml"), "gpus.toml")


@functools.cache
def overheads() -> dict[str, Any]:
    return _table("overheads.toml")


def kinds_of(table: Mapping[str, Any], where: str) -> tuple[GpuKind, ...]:
    """The kinds of one TOML table `[[gpu]]`, checked: every row has a name, a memory and a source."""
    kinds = []
    rows = table.get("gpu")
    for row in rows if isinstance(rows, list) else ():
        try:
            usable, peaks = row.get("usable_gib"), row.get("peak_tflops", {})
            speeds = [
                None if (v := row.get(f"{k}_gb_per_s")) is None else v * 1e9 for k in ("memory", "nvlink", "pcie")
            ]
            kinds.append(
                GpuKind(
                    name=row["name"],
                    aka=tuple(row.get("aka", ())),
                    memory_bytes=int(row["memory_gb"] * 10**9),
                    usable_bytes=None if usable is None else int(usable * GIB),
                    compute_capability=row.get("compute_capability"),
                    peak={name: tflops * 1e12 for name, tflops in peaks.items()},
                    memory_bandwidth=speeds[0],
                    nvlink_bandwidth=speeds[1],
                    pcie_bandwidth=speeds[2],
                    source=row["source"],
                    usable_source=row.get("usable_source", ""),
                )
            )
        except (KeyError, TypeError, AttributeError) as error:
            fix = ["a row has name, memory_gb, source, and what is known of the rest: docs/plan.md"]
            raise UsageError(f"{where} has a row that is no GPU.", evidence=[f"{row}: {error!r}"], fix=fix) from None
    if not kinds:
        raise UsageError(f"{where} has no [[gpu]] row.", fix=["docs/plan.md shows one"])
    return tuple(kinds)


def kinds_from(path: str) -> tuple[GpuKind, ...]:
    """The kinds of a user's own file, in the format of the shipped table."""
    try:
        return kinds_of(tomllib.loads(Path(path).read_text(encoding="utf-8")), path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a table of GPUs.", evidence=[str(error)]) from None


def find(name: str, kinds: tuple[GpuKind, ...] | None = None) -> GpuKind | None:
    """The kind that a driver or a person calls so, or None. Marks, case and the vendor's name do not count."""
    key = _key(name)
    for kind in known() if kinds is None else kinds:
        if key in {_key(one) for one in (kind.name, *kind.aka)}:
            return kind
    return None


def named(name: str) -> GpuKind:
    """The kind of `--gpu NAME`; UsageError with the nearest of the known names."""
    kind = find(name)
    if kind is None:
        names = [one.name for one in known()]
        close = nearest(name.upper(), names)
        own = "a GPU of your own: --gpu FILE.toml, in the format of docs/plan.md"
        fix = [*([f"--gpu {close}"] if close else []), f"known: {', '.join(names)}", own]
        raise UsageError(f"no facts about a GPU {name!r}.", fix=fix)
    return kind


def _key(name: str) -> str:
    return re.sub(r"nvidia|tesla|geforce|[^a-z0-9]", "", name.lower())


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files(__name__).joinpath(name).read_text(encoding="utf-8"))
