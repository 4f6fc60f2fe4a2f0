"""Jobs that are killed and started again: ranks forked from a preloaded parent, as `evener verify` forks them.

A rank starts through the launcher's shim, in the environment that `evener run` would give it, with a log folder and a
store of its own; only torch's agent and the supervisor are missing. `Forks.start` starts one attempt; whoever started it
kills what it wants and collects the exit codes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from evener.launch import command, machine, processes, records
from evener.verify.start import PRELOADED

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "scripts" / "chaos.py"
SECONDS = 240  # that anything may take on a loaded machine
EVENER = [f"evener.{room}" for room in ("run.run", "data.workers", "engine.spread.exact", "report.live")]


def wait_for(condition, seconds=SECONDS):
    """The first true value of `condition()`; None when there is none in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = condition()
        if value:
            return value
        time.sleep(0.003)
    return None


class Forks:
    """The parent of all ranks. `start` one attempt at a time, and `codes()` before the next."""

    def __init__(self):
        program = ROOT / "src" / "evener" / "verify" / "forks.py"
        self.server = subprocess.Popen(
            [sys.executable, "-u", str(program), command.shim_path(), *PRELOADED, *EVENER],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, cwd=ROOT,
            preexec_fn=processes.tied_to_parent(signal.SIGKILL), env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip
        self.number = 0
        self.launch = None

    def start(self, folder: Path, told: dict, world: int, job: str, attempt: int) -> None:
        self.number += 1
        request = command.Request(str(SCRIPT), (json.dumps(told),), nproc=world, cpu=True, logs=str(folder / "logs"))
        name = f"{job}-{os.getpid()}-{self.number}"
        launch = command.decide(request, machine.look(machine.Gpus(())), os.environ, run_id=name, cwd=str(folder))
        plan = launch.plan.__class__(**{**vars(launch.plan), "run_id": job, "attempt": attempt})
        os.makedirs(launch.logs)
        os.makedirs(os.path.join(launch.private, "store"), 0o700)
        words = {"supervisor": os.getpid(), "logs": launch.logs, "console": {}}
        for file, text in (("job.json", json.dumps(words)), ("plan.json", plan.to_json())):
            Path(launch.private, file).write_text(text)
        argv = launch.command.argv[launch.command.argv.index(command.shim_path()) + 1 :]
        ranks = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **launch.command.environ(os.environ)}
        env |= {key: str(value) for key, value in ranks.items()}
        asked = {"nproc": world, "env": env, "argv": [word.replace("$$", "$") for word in argv], "cwd": str(folder)}
        self.launch = launch
        self.server.stdin.write(json.dumps(asked).encode() + b"\n")
        self.server.stdin.flush()

    def pids(self) -> dict[int, int]:
        return records.read_pids(self.launch.logs, self.launch.nproc)

    def ended(self) -> bool:
        return bool(select.select([self.server.stdout], [], [], 0)[0])

    def codes(self) -> list[int]:
        """Exit code by rank, once all have ended."""
        assert wait_for(self.ended), "the ranks did not end"
        codes = json.loads(self.server.stdout.readline())
        shutil.rmtree(self.launch.private, ignore_errors=True)
        return codes

    def said(self) -> str:
        return "\n".join(
            path.read_text(errors="replace")[-3000:] for path in sorted(Path(self.launch.logs).glob("*.log"))
        )

    def kill(self, first: int, draw: random.Random) -> None:
        """One rank, and a moment later the others, as the agent would."""
        pids = self.pids()
        for rank in [first, *(rank for rank in pids if rank != first)]:
            if rank in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pids[rank], signal.SIGKILL)
            if rank == first:
                time.sleep(draw.random() * 0.05)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server.pid, signal.SIGKILL)
        self.server.wait()
        self.server.stdin.close()
        self.server.stdout.close()


def made(progress: Path) -> list[str]:
    """What rank 0 noted: "begun", and the number of each update made, those that were made again included."""
    with contextlib.suppress(FileNotFoundError):
        return progress.read_text().splitlines()
    return []
