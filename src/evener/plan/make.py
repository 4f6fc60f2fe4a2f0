"""From what was asked to a plan: the machine, the cuts, the choice. Nothing here needs torch or a GPU."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evener import facts
from evener.errors import EvenerError, ShortageError, UsageError
from evener.facts import GIB
from evener.gpus import look
from evener.gpus.values import Gpu, Snapshot
from evener.limits import memory_limit
from evener.plan import search
from evener.plan.captured import Captured
from evener.plan.clock import DataRate, Machine
from evener.plan.search import Book, Plan, Row, Tracer
from evener.plan.values import Cut

# Keywords of Run that a plan decides; what the script gives itself stays.
DECIDED = ("strategy", "precision", "microbatch_size", "activation_checkpointing", "saved_activations")
_WRITES_ONE = ["evener plan --json SCRIPT > plan.json writes one"]
_FEW_NODES = 16  # of more, one node changes a rank's share by a few percent, and its rows are other traces
_NEIGHBOURS = 30.0  # seconds for what one GPU more or less would change
_RETRACED = 8  # the chosen cut is traced as it is on so many ranks at most: what a trace costs grows with the world


def machine_of(
    *, gpu: str | None = None, recorded: str | None = None, cpu: bool = False, nproc: int | None = None, nodes: int = 1
) -> Machine:
    """The devices to plan for: a kind by name or file, a recording of `evener gpus --record`, or this machine.

    nproc: GPUs (processes) on each node; None: one for a named kind, all of one kind that a recording or machine has.
    """
    if sum((gpu is not None, recorded is not None, cpu)) > 1:
        raise UsageError("--gpu, --gpus and --cpu exclude each other.", fix=["give one of them, or none: this machine"])
    for option, value in (("--nproc", nproc), ("--nodes", nodes)):
        if value is not None and value < 1:
            raise UsageError(f"{option} {value}: at least 1.", fix=[f"{option} 1"])
    if gpu is not None:
        kind, count = facts.kinds_from(gpu)[0] if gpu.endswith(".toml") else facts.named(gpu), nproc or 1
        source = kind.usable_source or f"the sheet's memory less what other kinds lose: {kind.source}"
        return Machine("cuda", _named(count, nodes, kind.name), kind.capacity_bytes, source, count, nodes, kind)
    if recorded is not None:
        return _of_snapshot(look.read_recording(recorded), nproc, nodes, recorded)
    if not cpu:
        snapshot = look.look(os.environ)
        if snapshot.gpus:
            return _of_snapshot(snapshot, nproc, nodes, "this machine")
        trouble = snapshot.trouble
        if trouble is not None and trouble.broken:
            raise ShortageError(trouble.cause, evidence=trouble.evidence, fix=[*trouble.fix, "--gpu NAME, or --cpu"])
    return _this_cpu(nproc or 1, nodes)


def _named(nproc: int, nodes: int, name: str) -> str:
    return f"{nodes} x {nproc} x {name}" if nodes > 1 else f"{nproc} x {name}"


def _of_snapshot(snapshot: Snapshot, nproc: int | None, nodes: int, where: str) -> Machine:
    """The most frequent kind of the GPUs; capacity is what the emptiest of the chosen ones has, as the driver says."""
    able = [one for one in snapshot.gpus if one.error is None and one.memory_total_bytes and not one.mig_enabled]
    if not able:
        raise ShortageError(f"{where} has no GPU that could be planned for.", fix=["--gpu NAME plans for any kind"])
    name = Counter(one.name for one in able).most_common(1)[0][0] or "unknown"
    same = [one for one in able if (one.name or "unknown") == name]
    if nproc is not None and nproc > len(same):
        raise ShortageError(
            f"{where} has {len(same)} x {name}, and {nproc} are asked for.", fix=["--gpu NAME --nproc N"]
        )
    same = sorted(same, key=_room, reverse=True)[: nproc or len(same)]
    total, cc = min(one.memory_total_bytes or 0 for one in same), same[0].compute_capability
    kind = facts.find(name) or facts.GpuKind(name, memory_bytes=total, compute_capability=cc, source=where)
    ids = {one.index for one in same}
    between = [one for one in snapshot.links if one.a in ids and one.b in ids]
    nvlink = all(one.nvlinks for one in between) if between else None
    capacity, source = min(_room(one) for one in same), f"{where}: the driver's total less its own part"
    if kind.usable_bytes is not None:
        capacity, source = min(capacity, kind.usable_bytes), f"{where}, and {kind.usable_source}"
    return Machine("cuda", _named(len(same), nodes, name), capacity, source, len(same), nodes, kind, nvlink)


def _room(one: Gpu) -> int:
    return (one.memory_total_bytes or 0) - (one.memory_reserved_bytes or 0)


def _this_cpu(nproc: int, nodes: int) -> Machine:
    import psutil  # type: ignore[import-untyped]

    total, source = int(psutil.virtual_memory().total), "this machine's memory"
    limit, _ = memory_limit()
    if limit is not None and limit < total:
        total, source = limit, "this process's memory limit"
    share = "" if nproc == 1 else f", shared by {nproc} processes"
    name = f"{nproc} process{'es' if nproc > 1 else ''} on the CPU"
    return Machine("cpu", name, total // nproc, source + share, nproc, nodes)


def calibration_path() -> Path:
    """Where what was measured on this user's devices is kept."""
    return Path.home() / ".cache" / "evener" / "calibration.json"


def calibrated(machine: Machine, path: Path | None = None, *, cpu: str = "") -> Machine:
    """The machine with what a calibration file says of its kind, or of a `cpu` so called; unchanged without one."""
    where = path or calibration_path()
    if path is None and not where.is_file():
        return machine
    try:
        known = json.loads(where.read_text(encoding="utf-8"))
        on_cpu = machine.device == "cpu"
        found = known.get("cpus", {}).get(cpu, {}) if on_cpu else known["gpus"].get(machine.kind_name, {})
        values = {name: float(value) for name, value in found.items() if isinstance(value, int | float)}
        data = {name: _rate(one) for name, one in known.get("data", {}).items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{where} is no calibration.", evidence=[repr(error)], fix=["delete it"]) from None
    machine = replace(machine, data=data)
    if on_cpu and values:  # no sheet: what was measured is the peak, and processes share it
        peak = {name: values[name] / machine.gpus for name in ("fp32", "bf16", "fp16") if name in values}
        memory, network = (values.get(f"{name}_bytes_per_second") for name in ("memory", "network"))
        memory = memory and memory / machine.gpus
        kind = facts.GpuKind("cpu", peak=peak, memory_bandwidth=memory, pcie_bandwidth=network, source="measured here")
        fresh = values.get("fresh_bytes_per_second", 0.0) / machine.gpus
        values = {
            "matmul": 1.0,
            "memory": 1.0,
            "network": 1.0,
            "launch_us": values.get("launch_us", 0.0),
            "fresh": fresh,
        }
        return replace(machine, kind=kind, calibration=values)
    return replace(machine, calibration=values)


def _rate(kept: Mapping[str, Any]) -> DataRate:
    rates = {int(workers): float(rate) for workers, rate in kept["rows_per_second"].items()}
    if 0 not in rates or min(rates.values()) <= 0:
        raise ValueError(rates)
    return DataRate(rates, int(kept["cores"]), str(kept["cpu"]))


def make(
    tracer: Tracer,
    captured: Captured,
    machine: Machine,
    *,
    say: Callable[[str], None] = lambda line: None,
    neighbours: bool = True,
    everything: bool = False,
) -> Plan:
    """The plan for a captured step on a machine.

    Raises EvenerError when not one cut can be traced: with the first reason.
    """
    world = machine.gpus * machine.nodes
    if world > captured.global_batch_size:
        raise UsageError(
            f"{world} ranks for a global batch of {captured.global_batch_size} rows: some would never have one.",
            fix=[f"--nproc {max(1, captured.global_batch_size // machine.nodes)} or less"],
        )
    for name in DECIDED:
        if not isinstance(value := captured.asked(name), str | int | None):
            fix = [f"evener plan --set {name}=... plans one of the words", "leave it open, or to a word, in the script"]
            raise UsageError(f"{name}={value!r} is no word: planning compares words.", fix=fix)
    book = Book(tracer, say)
    rows, left = search.rows_of(book, captured, machine, world, everything=everything)
    if not book.made and book.refused:
        raise next(iter(book.refused.values()))
    precision, saved = search.natural_precision(captured, machine), captured.asked("saved_activations")
    chosen, because = search.choose(rows, precision, saved)
    if chosen is not None and chosen.how != "traced" and chosen.cut.world_size <= _RETRACED:
        book.until = None
        with suppress(EvenerError):  # the chosen one is traced as it is; everything else may follow from others
            exact = search.price(book.traced(chosen.cut), machine, captured)
            rows = [exact if row is chosen else row for row in rows]
            if exact.verdict in ("fits", chosen.verdict):
                chosen = exact
            else:
                chosen, because = search.choose(rows, precision, saved)
    if chosen is not None:
        because += search.fragments(book.trace(chosen.cut), chosen, machine)
    others: tuple[str, ...] = ()
    if neighbours and machine.nodes <= _FEW_NODES and (strategy := captured.asked("strategy")) != "single":
        book.progress, book.until = "", None if everything else time.monotonic() + _NEIGHBOURS
        near = [one for one in machine.neighbours() if strategy is None or one.gpus * one.nodes > 1]
        others = tuple(search.neighbour(book, captured, one) for one in near)
    return Plan(
        chosen,
        (*because, *_reasons(chosen, rows, captured, machine)),
        tuple(rows),
        machine,
        captured.global_batch_size,
        neighbours=others,
        untraced=tuple(dict.fromkeys(line for row in rows for line in row.untraced)),
        notes=_notes(rows, left, captured, machine),
        keywords=_keywords(chosen, captured),
        overrides={name: one["value"] for name, one in captured.given.items() if one["origin"] == "flag"},
    )


def _reasons(chosen: Row | None, rows: list[Row], captured: Captured, machine: Machine) -> list[str]:
    room = f"{machine.capacity_bytes / GIB:.2f} GiB usable ({machine.capacity_from})"
    if chosen is None:
        least = min((size for row in rows if (size := row.device_total_bytes or row.low_bytes)), default=None)
        return [room, f"the smallest cut needs {search.amount(least)}"] if least else [room]
    lines = [f"{search.amount(chosen.device_total_bytes)} (up to {search.amount(chosen.high_bytes)}) of {room}"]
    if chosen.bound_by == "data":
        reading = search.duration(chosen.data_seconds)
        lines.append(
            f"reading its rows takes {reading} an update, longer than computing: more num_workers, cheaper rows"
        )
    for name in DECIDED:
        if captured.asked(name) is not None:
            lines.append(f"{name}={captured.given[name]['value']!r} was given ({captured.given[name]['origin']})")
    if captured.slice_size is not None:
        lines.append(f"a piece is one slice of {captured.slice_size} rows: exact or coupled code is never cut further")
    return lines


def _notes(rows: list[Row], left: list[Cut], captured: Captured, machine: Machine) -> tuple[str, ...]:
    names = [one.words().rpartition(",")[0] for one in left]
    notes = [f"not compared, for the sake of time (--all does): {'; '.join(names)}"] * bool(left)
    told: dict[str, list[str]] = {}
    for row in rows:
        for line in row.notes:
            told.setdefault(line, []).append(row.cut.precision)
    every = {row.cut.precision for row in rows if row.notes}
    notes += [
        line if every == set(of) else f"{line}, in {' and '.join(dict.fromkeys(of))}" for line, of in told.items()
    ]
    if captured.on_cpu:
        where = ", ".join(captured.on_cpu[:4])
        notes.append(f"the script says cuda before its Run ({where}): taken for the CPU here; leave the device to Run")
    if (past := remembered(machine.kind_name)) is not None:
        notes.append(past)
    guessed = {term.name for row in rows for term in row.terms if term.how == "guessed"}
    if guessed:
        notes.append(f"ranges of the shipped table, not measured on this kind of machine: {', '.join(sorted(guessed))}")
    return tuple(dict.fromkeys(notes))


def _keywords(chosen: Row | None, captured: Captured) -> dict[str, Any]:
    """What `evener run --plan` hands to Run: only factors that the script leaves open."""
    if chosen is None:
        return {}
    values = {name: getattr(chosen.cut, name) for name in DECIDED if captured.asked(name) is None}
    plain = {"activation_checkpointing": "none", "saved_activations": "keep"}
    if chosen.cut.microbatches == 1 or captured.slice_size is not None:
        values.pop("microbatch_size", None)
    return {name: value for name, value in values.items() if value != plain.get(name)}


def read_plan_file(path: str) -> tuple[int | None, dict[str, dict[str, Any]]]:
    """A file that `evener plan --json` wrote: its ranks on one node, and what is handed to the run."""
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _no_plan(path, error) from None
    return planned_of(values, path)


def planned_of(values: Any, path: str) -> tuple[int | None, dict[str, dict[str, Any]]]:
    """`read_plan_file`, of what the file at `path` says."""
    try:
        keywords, overrides, chosen = values["keywords"], values["overrides"], values["chosen"]
        if chosen is None:
            raise UsageError(f"{path} has no chosen cut: nothing fits.", evidence=values["because"], fix=_WRITES_ONE)
        ranks, where = chosen["world_size"], values["machine"]
        names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_total_bytes", "seconds_per_update")
        figures = {name: chosen[name] for name in names}
    except (KeyError, TypeError) as error:
        raise _no_plan(path, error) from None
    predicted = {**figures, "kind": where.get("kind"), "device": where.get("device")}
    planned = {"overrides": dict(overrides), "decided": dict(keywords), "predicted": predicted}
    return None if where.get("nodes", 1) > 1 else int(ranks), planned


def _no_plan(path: str, error: Exception) -> UsageError:
    return UsageError(f"{path} is no plan.", evidence=[str(error) or repr(error)], fix=_WRITES_ONE)


def remember(entry: Mapping[str, Any]) -> None:
    """Keep a run's peak and time beside the predicted ones, next to the calibration; a full disk forgets it."""
    where = calibration_path().with_name("peaks.jsonl")
    with suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        with open(where, "a", encoding="utf-8") as file:
            file.write(json.dumps(dict(entry)) + "\n")


def remembered(kind: str) -> str | None:
    """How predictions for this kind of device came out, in one line; None where no planned run has ended on it."""
    with suppress(OSError, ValueError, KeyError, TypeError, IndexError):
        lines = calibration_path().with_name("peaks.jsonl").read_text("utf-8").splitlines()
        entries = [one for one in map(json.loads, lines) if one["kind"] == kind]
        off = sorted(one["real_bytes"] / one["predicted_bytes"] - 1 for one in entries)
        runs = f"{len(off)} planned run{'s' * (len(off) > 1)} on {kind}"
        line = f"{runs} ended between {off[0]:+.1%} and {off[-1]:+.1%} of the predicted peak"
        timed = [one for one in entries if one.get("real_seconds") and one.get("predicted_seconds")]
        if late := sorted(one["real_seconds"] / one["predicted_seconds"] - 1 for one in timed):
            line += f"; between {late[0]:+.0%} and {late[-1]:+.0%} of the predicted time ({len(late)} of them)"
        return line
    return None
