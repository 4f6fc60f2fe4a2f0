"""A program that has imported torch once and then forks the ranks of one trial after the other.

    python -u forks.py SHIM MODULE...

Importing torch costs seconds, and a proof starts the script a dozen times. A fork begins where a fresh rank of `evener
run` stands after `import torch`: same environment, same shim, generators seeded anew. What only a fresh interpreter
shows (the order of sets, for one) is left to the launcher's trials. Standard library only, run by path.

One JSON line on stdin is one trial: {"nproc", "env", "argv": [job.json, script, ...], "cwd"}. The answer on stdout is
the list of exit codes by rank (negative: a signal). stdin closed: the end. Whoever started it kills its process group
when it wants to stop: a rank dies with this process (the shim sees to that), and its data workers with the rank.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import time
from typing import Any

GRACE_SECONDS = 5.0  # for the other ranks to say what they saw, when one has ended badly


def main() -> None:
    shim, *modules = sys.argv[1:]
    sys.path.pop(0)  # this file's folder
    for name in modules:
        with contextlib.suppress(ImportError):  # then the script imports it, or does without
            importlib.import_module(name)
    while line := read_line():
        job = json.loads(line)
        pids: dict[int, int] = {}
        for rank in range(job["nproc"]):
            pid = os.fork()
            if pid == 0:
                become(job, rank, shim)
                return
            pids[pid] = rank
        codes = wait(pids)
        os.write(1, (json.dumps([codes[rank] for rank in range(job["nproc"])]) + "\n").encode())


def read_line() -> bytes:
    """Unbuffered: a fork must not hold lines that are meant for this process."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def become(job: dict[str, Any], rank: int, shim: str) -> None:
    """From here on this process is the rank; it returns where a rank's interpreter would end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.environ.clear()
    os.environ.update(job["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    os.chdir(job["cwd"])
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.seed()  # as of a fresh process: unpredictable
        optimizers = importlib.import_module("torch.optim.optimizer")
        optimizers.register_optimizer_step_pre_hook(leave_without_run)
    if numpy is not None:
        numpy.random.seed()
    sys.argv[:] = [shim, *job["argv"]]
    sys.path.insert(0, "")  # the shim puts the script's folder there
    spec = importlib.util.spec_from_file_location("evener_shim", shim)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()


def leave_without_run(*_: Any) -> None:
    """A script that trains and has not even imported Run would go on until its time is over."""
    if "evener.run.run" not in sys.modules:
        raise SystemExit(0)


def wait(pids: dict[int, int]) -> dict[int, int]:
    """Exit code of every rank. After the first bad one the others have a few seconds."""
    codes: dict[int, int] = {}
    deadline = float("inf")
    while len(codes) < len(pids):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            codes[pids[pid]] = code = os.waitstatus_to_exitcode(status)
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS) if code else deadline
        elif pid == 0:
            if time.monotonic() > deadline:
                for one in [pid for pid, rank in pids.items() if rank not in codes]:
                    os.kill(one, signal.SIGKILL)
                deadline = float("inf")
            time.sleep(0.005)
    return codes


if __name__ == "__main__":
    main()
