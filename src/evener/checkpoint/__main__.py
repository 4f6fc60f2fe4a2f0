"""`evener checkpoint ls | verify | export`, as a process of its own: this room has torch, the command line has not."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evener.checkpoint import store
from evener.checkpoint.manifest import MANIFEST, check, read_manifest
from evener.checkpoint.weights import export as write_weights
from evener.errors import CheckpointError, EvenerError, UsageError, nearest


def main(given: Mapping[str, Any]) -> int:
    """`given`: what the command line parsed (cli/checkpoint.py); the exit code."""
    args = argparse.Namespace(**{**given, "dir": Path(given["dir"])})
    try:
        return export(args) if args.action == "export" else show(args, every_byte=args.action == "verify")
    except EvenerError as error:
        print(f"evener: {error}", file=sys.stderr)
        return error.exit_code


def show(args: argparse.Namespace, *, every_byte: bool) -> int:
    """`ls`, or `verify`, which fails when one is not whole."""
    rows = [about(path) for path in found(args.dir)]
    columns = {"name": "checkpoint", "update": "update", "bytes": "bytes", "torch": "torch", "problem": ""}
    if every_byte:
        columns = {"name": "checkpoint", "update": "update", "bytes": "bytes", "result": "every byte"}
        for row in rows:
            try:
                check(Path(row["path"]))
            except CheckpointError as error:
                row["problem"] = error.cause
            row["whole"] = row["problem"] is None
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        table([{**row, "result": f"REFUSED: {row['problem']}" if row["problem"] else "whole"} for row in rows], columns)
    return CheckpointError.exit_code if every_byte and any(row["problem"] for row in rows) else 0


def export(args: argparse.Namespace) -> int:
    path, states = newest_whole(args.dir)
    engine = states.get("engine")
    if not isinstance(engine, dict) or "model" not in engine:
        raise CheckpointError(f"{path} holds no model of a Run.", evidence=[f"it holds {', '.join(states)}"])
    weights: Mapping[str, Any] = engine["ema" if args.ema else "model"]
    if weights is None:
        raise UsageError(f"{path} holds no average of the weights: the run had no ema=.")
    names = sorted(engine["targets"])
    if args.model is not None:
        weights = {k.removeprefix(f"{args.model}."): v for k, v in weights.items() if k.startswith(f"{args.model}.")}
        if not weights or names == [""]:
            close = nearest(args.model, names)
            raise UsageError(f"there is no model {args.model!r} in {path}.", fix=[f"--model {close}"] if close else [])
    tensors = {name: one for name, one in weights.items() if isinstance(one, torch.Tensor)}
    write_weights(tensors, args.file)
    total = sum(one.numel() for one in tensors.values())
    print(f"{path}\n  -> {args.file}: {len(tensors)} tensors, {total:,} values")
    return 0


def found(path: Path) -> list[Path]:
    """The checkpoints under a run directory or a folder of them, newest first, or the one at `path`."""
    if (path / MANIFEST).exists():
        return [path]
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        raise UsageError(f"there is no directory {path}.", fix=near(path))
    inside = [one for one in folder.iterdir() if (one / MANIFEST).exists() and not one.name.startswith(".")]
    if not inside:
        fix = ["give a run directory, its checkpoints folder, or one checkpoint"]
        raise UsageError(f"{path} holds no checkpoint.", fix=fix)
    return sorted(inside, key=lambda one: -(one / MANIFEST).stat().st_mtime)


def near(path: Path) -> list[str]:
    """Runs beside the one that is not there, the most alike first; else what to give."""
    runs = [one.name for one in path.parent.glob("*") if (one / "checkpoints").is_dir()]
    close = nearest(path.name, runs)
    named = [close] if close else sorted(runs)[:5]
    return [str(path.parent / one) for one in named] or [
        "give a run directory, its checkpoints folder, or one checkpoint"
    ]


def newest_whole(path: Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that is whole, and its states: each is read once, and checked as it is read."""
    refused = []
    for one in found(path):
        try:
            return one, store.read(one)[0]
        except CheckpointError as error:
            refused.append(error.cause)
            print(f"refused: {error.cause}", file=sys.stderr)
    raise CheckpointError(f"no whole checkpoint in {path}.", evidence=refused)


def about(path: Path) -> dict[str, Any]:
    """One row; unknown is None."""
    row: dict[str, Any] = {"name": path.name, "path": str(path)}
    row |= dict.fromkeys(("update", "bytes", "torch", "problem"))
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        return {**row, "problem": error.cause}
    said = manifest["about"]
    size = sum(record.bytes for record in manifest["files"].values()) + (path / MANIFEST).stat().st_size
    return {**row, "update": said.get("update"), "bytes": size, "torch": (said.get("versions") or {}).get("torch")}


def table(rows: list[dict[str, Any]], columns: Mapping[str, str]) -> None:
    cells = [list(columns.values())]
    for row in rows:
        values = [row[key] for key in columns]
        cells.append([f"{v:,}" if isinstance(v, int) else "" if v is None else str(v) for v in values])
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths)).rstrip())


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
