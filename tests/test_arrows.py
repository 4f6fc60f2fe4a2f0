"""The arrows between rooms: which may import which. The table is the design's; the code is read, not run.

Imports inside functions count: a hidden arrow is an arrow. Imports under TYPE_CHECKING count where a room that works
without torch would point at one that does not. The lazy table in `evener/__init__.py` is no import, but
`from evener import Mean` in a room counts as an import of the room where Mean lives.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "evener"

TORCH_FREE = {
    "errors",
    "config",
    "facts",
    "gpus",
    "plan",
    "launch",
    "explain",
    "lint",
    "report",
    "doctor",
    "cli",
    "verify",
    "ending",
    "limits",
}
TORCH = {"run", "engine", "data", "checkpoint", "dist", "measure", "batch"}

# room -> what it may import, besides `errors` (the bottom) and itself. "report.events" is that module alone.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "config": set(),
    "facts": set(),
    "gpus": {"facts"},
    "plan": {"gpus", "facts", "config"},
    "launch": {"plan"},
    "explain": set(),
    "lint": set(),
    "report": set(),
    "doctor": {"gpus", "facts"},
    "verify": {"launch", "plan"},
    "cli": TORCH_FREE - {"cli"},
    "run": {"engine", "data", "checkpoint", "dist", "report.events", "explain", "plan", "gpus", "config"},
    "engine": {"dist", "config"},
    "checkpoint": {"dist"},
    "data": {"dist"},
    "dist": set(),
    "measure": {"engine", "plan", "facts", "config"},
    "batch": set(),
    "ending": set(),
    "limits": set(),
}
# Arrows that the code has and the design's first table had not; the reasons are in docs/decisions.md.
BEYOND_THE_DESIGN: dict[str, set[str]] = {
    "engine": {"batch"},  # looking at nested batches: one small file below the rooms with torch
    "data": {"batch", "limits"},
    # ending: what a process must drop before Python ends, one file for the group and for the shim;
    # gpus: evener.device() takes an idle GPU under a lease, and explains CUDA_VISIBLE_DEVICES;
    # limits: CPUs are counted in one way, by whoever starts processes or threads
    "dist": {"ending", "gpus", "limits"},
    "launch": {"ending", "limits"},
    "plan": {"limits"},  # the memory of a process, where no GPU is planned for
    "doctor": {"launch", "limits"},  # launch: one reader of Slurm's host lists
    # a traced step gets batches of its own; the bench measures evener.comm, and rows as a run reads them
    "measure": {"batch", "data", "dist", "limits"},
    "run": {"batch", "report", "measure"},  # the console, curves and run folder; a captured Run's step is traced
}
# Files beside the rooms. A helper file such as config_checks.py belongs to the room that its name begins with.
TOP = {"__init__": {"errors"}, "__main__": {"cli"}}


@dataclass(frozen=True)
class Import:
    file: Path
    line: int
    target: str  # "evener.plan.handed"
    type_checking: bool


def imports_of(file: Path, root: Path, lazy: dict[str, str]) -> list[Import]:
    """The imports of evener's own modules in one file, relative ones resolved."""
    package = ["evener", *file.relative_to(root).with_suffix("").parts]
    package = package[:-1]  # the package that holds the module; for __init__.py that is the package itself
    tree = ast.parse(file.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = []
    for node in ast.walk(tree):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            targets = [f"{base}.{alias.name}" for alias in node.names]
        for target in targets:
            if target.split(".")[0] == "evener":
                name = target.removeprefix("evener.")
                found.append(Import(file, node.lineno, lazy.get(name, target), id(node) in guarded))
    return found


def lazy_names(root: Path) -> dict[str, str]:
    """Public name -> "evener.room.Name", from the table in `__init__.py`."""
    for node in ast.walk(ast.parse((root / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "_WHERE" for t in node.targets):
            return {name: f"{where}.{name}" for name, where in ast.literal_eval(node.value).items()}
    return {}


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module below evener, given as ("engine", "mean") or ("config_checks",)."""
    first = parts[0]
    return next((room for room in ARROWS if first == room or first.startswith(f"{room}_")), first)


def violations(root: Path, beyond: dict[str, set[str]] | None = None) -> list[str]:
    """One line per import that no arrow allows."""
    lazy = lazy_names(root)
    arrows = {room: targets | (beyond or {}).get(room, set()) for room, targets in ARROWS.items()}
    wrong = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        top = len(parts) == 1 and parts[0] in TOP
        room = parts[0] if top else room_of(parts)
        for one in imports_of(file, root, lazy):
            target_parts = tuple(one.target.split(".")[1:])
            if not target_parts or target_parts[0] in ("__version__", "EvenerError"):
                continue
            target = room_of(target_parts)
            if top and one.type_checking:  # the types of the lazy table
                continue
            allowed = TOP[room] if top else arrows.get(room)
            where = f"{file.relative_to(root)}:{one.line}"
            if allowed is None:
                wrong.append(f"{where}: {room!r} is no room of the design")
                break
            if target in ("errors", room) or target in allowed:
                continue
            if any(".".join(target_parts[:n]) in allowed for n in range(1, len(target_parts) + 1)):
                continue
            if one.type_checking and not (room in TORCH_FREE and target in TORCH):
                continue
            wrong.append(f"{where}: {room} -> {target} ({one.target})")
    return wrong


def test_rooms_import_only_along_the_arrows():
    assert violations(SOURCE, BEYOND_THE_DESIGN) == []


def test_the_table_itself_has_no_torch_behind_a_torch_free_room_and_no_circle():
    for room in TORCH_FREE:
        assert not {target.partition(".")[0] for target in ARROWS[room]} & TORCH, room
    done: set[str] = set()
    while len(done) < len(ARROWS):
        ready = {room for room, to in ARROWS.items() if {one.partition(".")[0] for one in to} - {"errors"} <= done}
        assert ready - done, f"a circle among {sorted(set(ARROWS) - done)}"
        done |= ready


PLANTED = [
    ("launch/a.py", "from evener.engine import Engine", "launch -> engine"),
    ("launch/a.py", "def f():\n    import evener.engine.step", "launch -> engine"),
    ("launch/a.py", "from evener import Engine", "launch -> engine"),
    (
        "explain/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from evener.run import Run",
        "explain -> run",
    ),
    ("engine/a.py", "from ..run import Run", "engine -> run"),
    ("engine/spread/a.py", "from ...data import order", "engine -> data"),
    ("run/a.py", "from evener.report import html", "run -> report"),
    ("config_checks.py", "import evener.plan", "config -> plan"),
    ("utils/a.py", "import evener.errors", "no room"),
]
ALLOWED = [
    ("launch/a.py", "from evener.plan.handed import LaunchPlan\nfrom evener import EvenerError, __version__"),
    ("run/a.py", "from evener.report.events import Event\nfrom evener.report import events"),
    ("engine/a.py", "from . import b\nfrom evener.errors import EvenerError\nfrom evener import comm"),
    ("data/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from evener.engine import Engine"),
    ("__main__.py", "from evener.cli import main"),
]
INIT = '_WHERE = {"Engine": "evener.engine", "comm": "evener.dist"}\n'


def tree(folder: Path, name: str, source: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(INIT)
    (folder / name).write_text(source + "\n")
    return folder


@pytest.mark.parametrize("name, source, expected", PLANTED)
def test_a_planted_arrow_is_found(tmp_path, name, source, expected):
    (found,) = violations(tree(tmp_path, name, source))
    assert expected in found


@pytest.mark.parametrize("name, source", ALLOWED)
def test_an_allowed_arrow_is_not(tmp_path, name, source):
    assert violations(tree(tmp_path, name, source)) == []
