"""python -m bench [PART ...] [--quick] [--json FILE]"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

PARTS = ("step", "gpt", "ddp", "exact", "data", "checkpoint", "task", "launch", "phases", "plan", "memory")


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

    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}", flush=True)
    tables = []
    for part in args.parts or PARTS:
        for table in importlib.import_module(f"bench.{part}").run(args.quick):
            print(f"\n{table}", flush=True)
            tables.append(table.as_dict())
    if args.json:
        args.json.write_text(json.dumps(tables, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
