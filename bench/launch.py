"""How long until something happens: from the command line to the first update on two processes, and imports."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.table import Table, verdict

SCRIPT = """\
import time
import torch
import evener

model = torch.nn.Linear(4, 2)
data = torch.randn(64, 4), torch.randint(0, 2, (64,))
loss_fn = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
run = evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data, global_batch_size=8)
for update in run.updates(updates=1):
    print(f"first update at {time.time()!r}", flush=True)
run.close()
"""
LAUNCHERS = {
    "evener run": ["-m", "evener", "run", "--nproc", "2", "--cpu"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
}
IMPORTS = {
    "import torch": "import torch",
    "import evener": "import evener",
    "import evener; evener.Run": "import evener; evener.Run",
    "import accelerate": "from accelerate import Accelerator",
    "import lightning.fabric": "from lightning.fabric import Fabric",
}
# One process per child, ended at once: what is counted is the import, not the interpreter's own clean-up.
MEASURED = (
    "import os, time; began = time.process_time(); {}; print(time.process_time() - began, flush=True); os._exit(0)"
)


def first_update(launcher: str, script: Path) -> tuple[float, int]:
    """Seconds from the start of the launcher to the first update of the first rank that made one, and its exit code."""
    began = time.time()
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], str(script)],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    times = [float(found) for found in re.findall(r"first update at ([\d.]+)", done.stdout)]
    if not times:
        raise RuntimeError(f"{launcher} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return min(times) - began, done.returncode


def import_seconds(statement: str) -> float:
    """CPU seconds of the statement in a fresh interpreter."""
    command = [sys.executable, "-W", "ignore", "-c", MEASURED.format(statement)]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()[-1])


def launches(rounds: int) -> Table:
    seconds: dict[str, list[float]] = {name: [] for name in LAUNCHERS}
    failed = dict.fromkeys(LAUNCHERS, 0)
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first.py"
        script.write_text(SCRIPT)
        for _ in range(rounds):
            for name in LAUNCHERS:
                taken, code = first_update(name, script)
                seconds[name].append(taken)
                failed[name] += code != 0
    table = Table(
        "launch: seconds from the command to the first update, two processes",
        ["launcher", "seconds", "ended badly afterwards"],
    )
    for name in LAUNCHERS:
        table.add(name, f"{statistics.median(seconds[name]):.2f}", f"{failed[name]} of {rounds}")
    difference = statistics.median(a - b for a, b in zip(*seconds.values()))
    table.note(verdict("evener run - torchrun, seconds", difference, 0.5))
    return table


def imports(rounds: int) -> Table:
    seconds: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for statement in IMPORTS.values():
        import_seconds(statement)  # compiles what is not compiled yet
    for _ in range(rounds):
        for name, statement in IMPORTS.items():
            seconds[name].append(import_seconds(statement))
    table = Table("import: CPU seconds in a fresh process", ["statement", "seconds", "/ import torch"])
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds["import torch"])) for name in IMPORTS
    }
    for name in IMPORTS:
        table.add(name, f"{statistics.median(seconds[name]):.2f}", f"{ratios[name]:.2f}")
    table.note(verdict("import evener; evener.Run / import torch", ratios["import evener; evener.Run"], 1.15))
    return table


def run(quick: bool) -> list[Table]:
    return [imports(2 if quick else 7), launches(1 if quick else 7)]
