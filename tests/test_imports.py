"""The import diet: what may be imported by importing evener, or a room that works without torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HEAVY = ("torch", "numpy", "rich", "psutil", "pynvml", "safetensors", "tensorboard", "multiprocessing", "asyncio")
# What a torch-free room may import beyond the standard library; torch and numpy are never among them.
TORCH_FREE_ROOMS = {
    "evener.errors": (),
    "evener.config": (),
    "evener.facts": (),
    "evener.gpus": ("psutil", "pynvml"),
    "evener.plan": (),
    "evener.plan.handed": (),
    "evener.launch": (),
    "evener.launch.command": (),
    "evener.launch.supervise": ("psutil", "multiprocessing"),
    "evener.explain": (),
    "evener.lint": (),
    "evener.report": ("rich",),
    "evener.doctor": ("psutil", "pynvml"),
    "evener.verify": (),
    "evener.verify.start": ("psutil", "multiprocessing"),
    "evener.verify.proof": ("psutil", "multiprocessing"),
    "evener.cli": (),
    "evener.cli.run": (),
    "evener.cli.doctor": (),
    "evener.cli.top": (),
    "evener.report.live": ("psutil",),
    "evener.report.page": (),
    "evener.cli.report": (),
}


def imported_by(code: str) -> set[str]:
    """Top-level packages in a fresh interpreter after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split()[-10000:])


def test_import_evener_imports_nothing_heavy():
    found = imported_by("import evener; evener.EvenerError; evener.__version__; dir(evener)")
    assert not found & set(HEAVY)


BUILT = {room: allowed for room, allowed in TORCH_FREE_ROOMS.items() if importlib.util.find_spec(room) is not None}


@pytest.mark.parametrize("room, allowed", BUILT.items(), ids=BUILT)
def test_a_torch_free_room_imports_no_torch(room, allowed):
    assert not imported_by(f"import {room}") & (set(HEAVY) - set(allowed))


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["--version"], ["run", "--cpu", "--dry-run", __file__]]
)
def test_the_command_line_imports_nothing_heavy_to_explain_itself(words):
    call = f"import contextlib\nfrom evener.cli import main\nwith contextlib.suppress(SystemExit): main({words!r})"
    assert not imported_by(call) & set(HEAVY)
