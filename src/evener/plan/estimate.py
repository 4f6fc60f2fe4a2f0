"""What a trace means for one device: its peak, what no event shows, and how sure each part is.

of(trace)       Estimate: traced (or extrapolated) bytes plus the terms of workspaces.toml
support(cut)    the few cuts to trace, so that every other of the family follows (see `memory.Family`)
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from evener.plan.memory import Family, peak_of, sharded
from evener.plan.values import Alloc, Cut, Estimate, Op, Term, Trace

__all__ = ["Family", "of", "support", "workspaces"]

_SIZES = (2, 4)  # microbatches to trace: one row takes other paths (squeezed dimensions, other kernels)
_WORLDS = (2, 4)  # shards to trace: what a trace costs grows with the world


def support(cut: Cut) -> list[Cut]:
    """Two microbatches, and where parameters are sharded two world sizes. Just the cut itself where it is as small."""
    small = cut.microbatch_size <= _SIZES[0]
    sizes = [cut.microbatch_size] if small else list(_SIZES)
    worlds = [cut.world_size]
    if cut.world_size > 1 and not sharded(cut):
        worlds = [_WORLDS[0]]
    elif cut.world_size > cut.replicas * _WORLDS[1]:
        worlds = [cut.replicas * shards for shards in _WORLDS]
    cuts = [replace(cut, microbatch_size=size, world_size=worlds[0]) for size in sizes]
    return cuts + [replace(cut, microbatch_size=sizes[0], world_size=world) for world in worlds[1:]]


def of(trace: Trace) -> Estimate:
    """The estimate for one rank.

    low: what the trace shows; no term of the table is smaller than 0. high: with the largest figure of every term.
    """
    peak = peak_of(trace)
    terms = terms_of(trace)
    untraced = list(trace.untraced)
    untraced += [f"{term.name}: {term.source}" for term in terms if term.how == "guessed"]
    return Estimate(
        trace.cut,
        peak.bytes + sum(term.bytes for term in terms),
        peak.bytes + sum(term.low_bytes for term in terms),
        peak.bytes + sum(term.high_bytes for term in terms),
        peak.phase,
        peak.phases,
        peak.at_peak,
        trace.how,
        tuple(terms),
        tuple(dict.fromkeys(untraced)),
    )


@functools.cache
def workspaces() -> Mapping[str, Any]:
    """The table: what libraries allocate beside tensors, by library, with a source per row."""
    text = resources.files("evener.plan").joinpath("workspaces.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def terms_of(trace: Trace) -> list[Term]:
    """What is on the device and in no event."""
    ops: dict[str, int] = {}  # the largest result of each operation
    for event in trace.steady():
        if isinstance(event, Op):
            name = packet(event.name)
            ops[name] = max(ops.get(name, 0), event.bytes_written)
    terms = _data_parallel(trace) if trace.cut.strategy == "dp" and trace.cut.devices > 1 else []
    for row in rows_for(trace.device, trace.capability):
        largest = max((ops[name] for name in row["ops"] if name in ops), default=None)
        if largest is None:
            continue
        low, mid, high = (int(row[key] * 1024) for key in ("low_kib", "kib", "high_kib"))
        if "of_result" in row:  # the events have the middle already
            have = scratch(row, largest)
            low, mid, high = (
                int(largest * row["of_result"][0]) - have,
                0,
                int(largest * row["of_result"][2]) + high - have,
            )
        terms.append(Term(row["name"], low, mid, max(mid, high), row["how"], row["source"]))
    return terms


def rows_for(device: str, capability: tuple[int, int] | None) -> list[Mapping[str, Any]]:
    """The table's rows for a device."""
    kind = 10 * capability[0] + capability[1] if capability else 80
    return [
        row
        for row in workspaces()["row"]
        if row["device"] == device and row.get("from", 0) <= kind <= row.get("to", 999)
    ]


def scratch(row: Mapping[str, Any], result_bytes: int) -> int:
    """Bytes that a row says live inside of one operation with so large a result."""
    return int(result_bytes * row["of_result"][1]) + int(row["kib"] * 1024)


def packet(name: str) -> str:
    """`mm` of `aten.mm.default`."""
    return name.split(".")[1] if "." in name else name


def _data_parallel(trace: Trace) -> list[Term]:
    """nn.DataParallel's way, on the device that has most: the first one, which keeps the whole batch and, when the
    backward ends, receives the other replicas' gradients beside its own."""
    gradients = {event.module: 0 for event in trace.events if isinstance(event, Alloc)}
    for event in trace.steady():
        if isinstance(event, Alloc) and event.category == "gradient":
            gradients[event.module] = gradients.get(event.module, 0) + event.bytes
    size = sum(gradients.values())
    source = "summed replicas arrive beside the first device's own gradients; untested on CUDA"
    return [Term("DataParallel: gradients of the other replicas", 0, size, size, "modelled", source)]
