"""Plans that `evener plan` has made here: `evener run` of the same script on as many of the same devices takes them up.

A plan decides cuts and never results, so one that is out of date costs time or memory; a changed script makes it void.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.errors import UsageError


def folder() -> Path:
    return Path.home() / ".cache" / "evener" / "plans"


def place(script: Sequence[str], overrides: Sequence[str], kind: str, nproc: int) -> Path:
    """The file of a plan. script: its path and its arguments; overrides: words of `--set`; kind: "cpu", or a GPU's."""
    what = [os.path.realpath(script[0]), *script[1:], "--set", *sorted(overrides), kind, str(nproc)]
    return folder() / f"{hashlib.sha256(json.dumps(what).encode()).hexdigest()[:20]}.json"


def dated(script: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a plan: it, the script that it was made of, and when."""
    return {**plan, "script": _hash(script), "made": time.time()}


def find(where: Path, script: str) -> tuple[dict[str, Any], str]:
    """What it hands to the ranks, as of `read_plan_file`, and what is said about it; ({}, "") where there is none."""
    if not where.is_file():
        return {}, ""
    from evener.plan.make import planned_of

    try:
        kept = json.loads(where.read_text(encoding="utf-8"))
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(kept["made"]))
        if kept["script"] != _hash(script):
            return {}, f"the plan of {made} is not used: {script} was changed since; `evener plan` makes another"
        planned = planned_of(kept, str(where))[1]
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return {}, f"{where} is no plan of this version and is not used; `evener plan` makes another"
    cut = ", ".join(f"{name}={value}" for name, value in planned["decided"].items())
    return planned, f"{cut or 'nothing to cut'}: as `evener plan` chose on {made}; --plan none leaves that out"


def _hash(script: str) -> str:
    return hashlib.sha256(Path(script).read_bytes()).hexdigest()
