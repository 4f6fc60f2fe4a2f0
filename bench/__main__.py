"""python -m bench [PART ...] [--quick] [--json FILE]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

PARTS = ("step", "gpt", "ddp", "fsdp", "exact", "data", "checkpoint", "task", "launch", "phases", "plan", "memory")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Paired comparisons; no part changes a file.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: a look, not a measurement")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the tables to FILE")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")

    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # everything here is about the CPU
    import torch

    from bench.table import Table
    from evener.dist.info import cpu_name
    from evener.limits import usable_cpus

    before, tables = os.getloadavg()[0], []
    for part in args.parts or PARTS:
        for table in importlib.import_module(f"bench.{part}").run(args.quick):
            print(f"\n{table}", flush=True)
            tables.append(table.as_dict())
    where = f"{cpu_name()}, {usable_cpus()} cores, torch {torch.__version__}, Python {platform.python_version()}"
    load = f"load {before:.1f} before and {os.getloadavg()[0]:.1f} after"
    targets = Table(f"all targets: {where}; {load}", ["table", "measured, target, verdict"])
    for one in tables:
        for note in one["notes"]:
            if "(target" in note:
                targets.add(one["title"].partition(":")[0], note)
    print(f"\n{targets}", flush=True)
    if args.json:
        args.json.write_text(json.dumps([*tables, targets.as_dict()], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
