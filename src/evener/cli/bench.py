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

from evener.cli.parser import Parser
from evener.errors import UsageError

PARTS = {
    "matmul": "matrix products per number format, and which formats are native",
    "memory": "copies on the device and between host and device, and what it costs to start one operation",
    "comm": "every collective of evener.comm from 4 B to 1 GiB, results checked (several processes)",
    "data": "rows per second by number of data workers, and how many are enough",
    "step": "one update of a small GPT and of a small residual network, against the fastest product",
}
DESCRIPTION = (
    "Measure what this machine does. Figures are medians; the spread and the load of the machine are said.\n\n"
)
DESCRIPTION += "\n".join(f"  {name:8} {line}" for name, line in PARTS.items())
EXAMPLES = """\
examples:
  evener bench                                 everything; about a minute on a CPU
  evener bench matmul memory                   two parts
  evener bench comm --nproc 4 --cpu            collectives of four processes over gloo
  evener bench data --dataset train.py:make    your own dataset: a name in a file, or a function that makes it
  evener bench step --nproc 2 --json           one object, for a program
  evener bench matmul memory --calibrate       `evener plan` prices time with this GPU's own figures
Ctrl-C ends it and shows what has been measured so far.
"""


def parser() -> Parser:
    options = Parser(prog="evener bench", description=DESCRIPTION, epilog=EXAMPLES)
    add = options.add_argument
    add("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}, all (default: all)")
    add("--nproc", metavar="N", type=int, help="processes (default: one; comm: one per GPU, or 2 on the CPU)")
    add("--cpu", action="store_true", help="measure the CPU although there are GPUs")
    add("--seconds", metavar="S", type=float, default=0.5, help="about how long one figure is measured (default: 0.5)")
    add("--longest", metavar="S", type=float, default=2.0, help="no larger sizes once a call takes this (default: 2)")
    add("--dataset", metavar="FILE.py:NAME", help="what `data` reads, in place of small images that are made here")
    add("--calibrate", action="store_true", help="keep what was measured of this kind of GPU for `evener plan`")
    add("--json", action="store_true", help="one object: machine, and a list of results")
    return options


def main(argv: Sequence[str]) -> int:
    given = parser().parse_args(argv)
    parts = list(dict.fromkeys(given.parts or ["all"]))
    for part in parts:
        if part not in (*PARTS, "all"):
            raise UsageError(f"{part!r} is no part of the bench.", fix=[f"one of {', '.join(PARTS)}, all"])
    if "all" in parts:
        parts = list(PARTS)
    if given.nproc is not None and given.nproc < 1:
        raise UsageError(f"--nproc {given.nproc}: at least 1.")
    if not given.seconds > 0 or not given.longest > 0:
        raise UsageError("--seconds and --longest are above 0.")
    code, gpus = 0, 0 if given.cpu else gpus_here()
    if given.calibrate and gpus == 0:
        raise UsageError("--calibrate: there is no GPU to measure, and time is planned for GPUs only.")
    asked: dict[str, Any] = {
        "seconds": given.seconds,
        "longest": given.longest,
        "cpu": gpus == 0,
        "dataset": given.dataset,
    }
    asked["show"] = not given.json or sys.stderr.isatty()
    with tempfile.TemporaryDirectory(prefix="evener-bench-") as folder:
        file = Path(folder, "results.jsonl")
        # What needs several processes runs under the launcher, the rest in one.
        groups: dict[int, list[str]] = {}
        for part in parts:
            nproc = given.nproc or (max(2, gpus) if part == "comm" else 1)
            groups.setdefault(nproc, []).append(part)
        for nproc, some in groups.items():
            code = measure(nproc, {**asked, "parts": some, "file": str(file)}, folder)
            if code:
                break
        results = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    machine: dict[str, Any] = next((one for one in results if one["part"] == "machine"), {})
    results = [one for one in results if one["part"] != "machine"]
    if given.calibrate and code == 0:
        keep(machine, results)
    if given.json:
        print(json.dumps({"machine": machine, "results": results, "complete": code == 0}, indent=2))
    elif results:
        print("\n".join(page(machine, results)))
        if code:
            print("\ninterrupted: the rest was not measured" if code == 130 else "\nthe rest could not be measured")
    return code


def gpus_here() -> int:
    from evener.gpus import look

    return len(look.look(os.environ).gpus)


def measure(nproc: int, asked: Mapping[str, Any], folder: str) -> int:
    """The exit code of the processes that measure; 130 when Ctrl-C ended them."""
    module = ["-m", "evener.measure.bench", json.dumps(asked)]
    command = [sys.executable, *module]
    if nproc > 1:
        run = ["-m", "evener", "run", "--nproc", str(nproc), "--log-dir", os.path.join(folder, "logs")]
        command = [sys.executable, *run, *(["--cpu"] if asked["cpu"] else []), *module]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL if nproc > 1 else None)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)  # a terminal has sent it already; a program has not
        process.wait()
        return 130


def calibration(machine: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, float]]:
    """The kind of GPU, and its measured share of the sheet's peak, of its bandwidth and of its links."""
    from evener import facts

    kind = facts.find(machine.get("name", "")) if machine.get("device") == "cuda" else None
    if kind is None:
        raise UsageError(f"--calibrate: {machine.get('name', 'this device')} is in no table of peaks.")
    found: dict[str, float] = {}
    if shares := [one["share_of_peak"] for one in results if one.get("share_of_peak")]:
        found["matmul"] = max(shares)
    for one in results:
        if one["part"] == "memory" and one["name"].startswith("copy on the device") and kind.memory_bandwidth:
            found["memory"] = one["bytes_per_second"] / kind.memory_bandwidth
        if one["part"] == "memory" and one["bytes_per_second"] is None:
            found["launch_us"] = one["seconds"] * 1e6
    link = kind.nvlink_bandwidth or kind.pcie_bandwidth
    buses = [one["bus_bytes_per_second"] for one in results if one["part"] == "comm" and one["name"] == "all_reduce"]
    if buses and link:
        found["network"] = max(buses) / link
    return kind.name, found


def keep(machine: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> None:
    from evener.plan.make import calibration_path
    from evener.report.folder import write_json

    name, found = calibration(machine, results)
    path = calibration_path()
    known: dict[str, Any] = {"gpus": {}}
    if path.is_file():
        known = json.loads(path.read_text(encoding="utf-8"))
    known["gpus"][name] = {**known["gpus"].get(name, {}), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, known)
    print(f"{name}: {', '.join(f'{key} {value:.3g}' for key, value in found.items())} -> {path}", file=sys.stderr)


def page(machine: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> list[str]:
    load, cores = machine["load"], machine["cores"]
    lines = [f"{machine['name']} · torch {machine['torch']} · {machine['threads']} threads"]
    if load is not None and load > 0.5 * cores:
        lines.append(f"load {load:.1f} on {cores} cores: others work here too, so these figures are lower bounds")
    for part, about in PARTS.items():
        rows = [one for one in results if one["part"] == part]
        if rows:
            lines += ["", f"{part}: {about}", *table([cells(part, one) for one in rows])]
    return lines


def cells(part: str, one: Mapping[str, Any]) -> list[str]:
    """One result as the cells of its line."""
    if "note" in one:
        return [one["name"], one["note"]]
    time = [duration(one["seconds"]), f"+-{one['spread'] / 2:.0%}"] if "seconds" in one else []
    if part == "matmul":
        native = {True: "native", False: "NOT native: emulated", None: ""}[one["native"]]
        share = "" if one["share_of_peak"] is None else f"{one['share_of_peak']:.0%} of the data sheet"
        return [
            one["name"],
            f"{one['size']} x {one['size']}",
            scaled(one["flops_per_second"], "FLOP/s"),
            *time,
            native,
            share,
        ]
    if part == "memory":
        rate = one["bytes_per_second"]
        return [one["name"], "" if rate is None else scaled(rate, "B/s"), *time]
    if part == "comm":
        rate = [scaled(one[key], "B/s") if key in one else "" for key in ("bytes_per_second", "bus_bytes_per_second")]
        bus = f"bus {rate[1]}" if rate[1] else ""
        return [one["name"], size(one["bytes"]), *time, rate[0], bus, "right" if one["correct"] else "WRONG RESULT"]
    if part == "data":
        if "recommended_workers" in one:
            return [f"enough: num_workers={one['recommended_workers']}", f"{one['rows_per_second']:,.0f} rows/s"]
        return [f"{one['workers']} workers", f"{one['rows_per_second']:,.0f} rows/s", one["name"]]
    share = f"{one['share_of_roofline']:.0%} of the fastest product"
    return [
        one["name"],
        one["precision"],
        *time,
        f"{one['rows_per_second']:,.0f} rows/s",
        scaled(one["flops_per_second"], "FLOP/s"),
        share,
    ]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned; a row of fewer cells (a note) is not padded."""
    full = max(len(row) for row in rows)
    widths = [max(len(row[i]) for row in rows if len(row) == full) for i in range(full)]
    return ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def scaled(value: float, unit: str) -> str:
    for step, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= step:
            return f"{value / step:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(count: int) -> str:
    for step, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= step:
            return f"{count / step:.4g} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    for step, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= step:
            return f"{seconds / step:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
