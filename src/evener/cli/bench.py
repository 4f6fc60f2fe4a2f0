"""`evener bench`: what this machine does, in figures. Processes that have torch measure; the command line has not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.cli.parser import parser_of, texts_of
from evener.errors import UsageError

PARTS: dict[str, tuple[str, float]] = texts_of("bench")["parts"]  # what it measures, and seconds on a CPU
Result = Mapping[str, Any]
_RATE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
_SIZE = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))
_TIME = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def main(argv: Sequence[str]) -> int:
    from evener.gpus import look

    options = parser_of("bench")
    options.description = "\n".join([options.description or "", *(f"  {name:8} {PARTS[name][0]}" for name in PARTS)])
    given = options.parse_args(argv)
    for part in given.parts:
        if part not in (*PARTS, "all"):
            raise UsageError(f"{part!r} is no part of the bench.", fix=[f"one of {', '.join(PARTS)}, all"])
    parts = list(PARTS) if not given.parts or "all" in given.parts else list(dict.fromkeys(given.parts))
    if given.nproc is not None and given.nproc < 1:
        raise UsageError(f"--nproc {given.nproc}: at least 1.")
    if not given.seconds > 0 or not given.longest > 0:
        raise UsageError("--seconds and --longest are above 0.")
    gpus = 0 if given.cpu else len(look.look(os.environ).gpus)
    if given.calibrate and not {"matmul", "memory", "comm", *["data"] * bool(given.dataset)} & set(parts):
        fix = ["evener bench matmul memory --calibrate", "evener bench data --dataset FILE.py:NAME --calibrate"]
        raise UsageError("--calibrate: what matmul, memory, comm, and data with --dataset, measure is kept.", fix=fix)
    asked = {name: getattr(given, name) for name in ("seconds", "longest", "dataset")}
    asked |= {"cpu": gpus == 0, "show": not given.json or sys.stderr.isatty()}
    if asked["show"]:
        expected = sum(PARTS[part][1] for part in parts) * given.seconds / 0.5
        print(f"evener bench: about {expected:.0f} s; Ctrl-C keeps what was measured", file=sys.stderr)
    groups: dict[int, list[str]] = {}  # what needs several processes runs under the launcher, the rest in one
    for part in parts:
        groups.setdefault(given.nproc or (max(2, gpus) if part == "comm" else 1), []).append(part)
    code, machine, results = 0, dict[str, Any](), list[Result]()
    with tempfile.TemporaryDirectory(prefix="evener-bench-") as folder:
        file = Path(folder, "results.jsonl")
        for nproc, some in groups.items():
            code = code or measure(nproc, {**asked, "parts": some, "file": str(file)}, folder)
        for one in map(json.loads, file.read_text("utf-8").splitlines() if file.exists() else ()):
            if one["part"] == "machine":
                machine = machine or one
            else:
                results.append(one)
    if given.calibrate and code == 0:
        keep(machine, results)
    if given.json:
        print(json.dumps({"machine": machine, "results": results, "complete": code == 0}, indent=2))
    elif results:
        print("\n".join(page(machine, results)))
        if code:
            print("\ninterrupted: the rest was not measured" if code == 130 else "\nthe rest could not be measured")
    return code


def measure(nproc: int, asked: Mapping[str, Any], folder: str) -> int:
    """The exit code of the processes that measure; 130 when Ctrl-C ended them."""
    module = ["-m", "evener.measure.bench", json.dumps(asked)]
    run = ["-m", "evener", "run", "--nproc", str(nproc), "--log-dir", os.path.join(folder, "logs")]
    run += ["--cpu"] * bool(asked["cpu"])
    command = [sys.executable, *(run if nproc > 1 else []), *module]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL if nproc > 1 else None)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # a terminal has sent it already; a program has not
        process.wait()
        return 130


def calibration(machine: Mapping[str, Any], results: Sequence[Result]) -> tuple[str, str, dict[str, float]]:
    """ "gpus", the kind, and its measured shares of the sheet's peak, bandwidth and links; or "cpus", the name, and the
    FLOP/s per format and bytes/s, for there is no sheet."""
    from evener import facts

    name = machine.get("name", "this device")
    found: dict[str, float] = {}
    products = [one for one in results if one["part"] == "matmul"]
    copies = [one["bytes_per_second"] for one in results if one.get("name", "").startswith("copy on")]
    buses = [one["bus_bytes_per_second"] for one in results if one["name"] == "all_reduce" and "note" not in one]
    for one in results:
        if one["name"] == "launch of one operation":
            found["launch_us"] = one["seconds"] * 1e6
        if one.get("held_bytes"):
            found["nccl_bytes" if one["part"] == "comm" else "context_bytes"] = one["held_bytes"]
    if machine.get("device") == "cpu":
        for speed, measured in (("memory", copies), ("network", buses)):
            found |= {f"{speed}_bytes_per_second": max(measured)} if measured else {}
        fresh = [one["bytes_per_second"] for one in results if one.get("name", "").startswith("into memory")]
        if fresh and copies and fresh[0] < max(copies):  # what the kernel takes to hand out pages, beside the copy
            found["fresh_bytes_per_second"] = 1 / (2 / fresh[0] - 2 / max(copies))
        for one in products:
            found[one["name"]] = max(found.get(one["name"], 0.0), one["flops_per_second"])
        return "cpus", name, found
    if (kind := facts.find(name)) is None:
        raise UsageError(f"--calibrate: {name} is in no table of peaks.")
    if shares := [one["share_of_peak"] for one in products if one.get("share_of_peak")]:
        found["matmul"] = max(shares)
    if copies and kind.memory_bandwidth:
        found["memory"] = max(copies) / kind.memory_bandwidth
    link = kind.nvlink_bandwidth or kind.pcie_bandwidth
    if buses and link:
        found["network"] = max(buses) / link
    return "gpus", kind.name, found


def data_rates(results: Sequence[Result]) -> tuple[str, dict[str, Any]] | None:
    """What a calibration calls the dataset that `--dataset` gave, and its rows per second by number of workers."""
    rows = [one for one in results if one["part"] == "data"]
    if not rows or "dataset" not in (last := rows[-1]):
        return None
    rates = {str(one["workers"]): one["rows_per_second"] for one in rows if "workers" in one}
    return last["dataset"], {"rows_per_second": rates, "cores": last["cores"], "cpu": last["cpu"]}


def keep(machine: Mapping[str, Any], results: Sequence[Result]) -> None:
    from evener.plan.make import calibration_path
    from evener.report.folder import write_json

    path = calibration_path()
    known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for devices in ("gpus", "cpus", "data"):
        known.setdefault(devices, {})
    kept = dict[str, Mapping[str, float]]()
    if (rows := data_rates(results)) is not None:
        name, known["data"][name] = rows
        kept[name] = {f"{workers} workers": rate for workers, rate in rows[1]["rows_per_second"].items()}
    if any(one["part"] in ("matmul", "memory", "comm") for one in results) or not kept:
        where, name, found = calibration(machine, results)
        known[where][name] = {**known[where].get(name, {}), **found}
        kept[name] = found
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, known)
    for name, values in kept.items():
        print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in values.items())} -> {path}", file=sys.stderr)


def page(machine: Mapping[str, Any], results: Sequence[Result]) -> list[str]:
    load, cores = machine["load"], machine["cores"]
    lines = [f"{machine['name']} · torch {machine['torch']} · {machine['threads']} threads"]
    if load is not None and load > 0.5 * cores:
        lines.append(f"load {load:.1f} on {cores} cores: others work here too, so these figures are lower bounds")
    for part, (about, _) in PARTS.items():
        rows = [cells(part, one) for one in results if one["part"] == part]
        full = max(map(len, rows), default=0)  # a row of fewer cells (a note) is not padded
        widths = [max(len(row[i]) for row in rows if len(row) == full) for i in range(full)]
        lines += ["", f"{part}: {about}"] if rows else []
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return lines


def cells(part: str, one: Result) -> list[str]:
    """One result as the cells of its line."""
    name = one["name"]
    if "note" in one:
        return [name, one["note"]]
    rows = f"{one['rows_per_second']:,.0f} rows/s" if "rows_per_second" in one else ""
    if part == "data":
        enough = one.get("recommended_workers")
        return [f"{one['workers']} workers", rows, name] if enough is None else [f"enough: num_workers={enough}", rows]
    time = [scaled(one["seconds"], _TIME), f"+-{one['spread'] / 2:.0%}"]
    moved, flops, bus = (one.get(f"{key}_per_second") for key in ("bytes", "flops", "bus_bytes"))
    rate = scaled(moved, _RATE) + "B/s" if moved else scaled(flops, _RATE) + "FLOP/s" if flops else ""
    if part == "matmul":
        native = {True: "native", False: "NOT native: emulated", None: ""}[one["native"]]
        share = "" if one["share_of_peak"] is None else f"{one['share_of_peak']:.0%} of the data sheet"
        return [name, f"{one['size']} x {one['size']}", rate, *time, native, share]
    if part == "memory":
        return [name, rate, *time]
    if part == "comm":
        right = "right" if one["correct"] else "WRONG RESULT"
        return [name, scaled(one["bytes"], _SIZE), *time, rate, f"bus {scaled(bus, _RATE)}B/s" if bus else "", right]
    return [name, one["precision"], *time, rows, rate, f"{one['share_of_roofline']:.0%} of the fastest product"]


def scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    step, unit = next((one for one in units if value >= one[0]), units[-1])
    return f"{value / step:.3g} {unit}" if value < 1000 * step else f"{value / step:.0f} {unit}"
