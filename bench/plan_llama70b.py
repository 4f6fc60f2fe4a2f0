"""A 70 B Llama-shaped model, never with storage, for the planner:

PYTHONPATH=. evener plan --gpu H100-80GB --nproc 8 --nodes 128 bench/plan_llama70b.py

python -m bench.plan_llama70b measure      the same, and what it took: wall clock, processor time, memory
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

import evener
from bench.plan_published import SIZES, Llama, loss_deleting_logits


def measure() -> int:
    """Plans this file as above; prints seconds, CPU seconds, and the memory of the processes that did it."""
    words = ["--gpu", "H100-80GB", "--nproc", "8", "--nodes", "128", "--timeout", "1200"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    began, load, most = time.monotonic(), os.getloadavg()[0], 0
    command = [sys.executable, "-m", "evener", "plan", *words, __file__]
    process = psutil.Popen(command, env={**os.environ, "PYTHONPATH": path})
    while True:
        try:
            code = process.wait(0.5)
            break
        except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
            most = max(most, sum(map(resident, [process, *process.children(recursive=True)])))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    largest = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"{time.monotonic() - began:.0f} s on the clock, {used.ru_utime + used.ru_stime:.0f} s of processor time")
    print(
        f"largest process {largest / 2**30:.2f} GiB, all together at most {most / 2**30:.2f} GiB (shared pages twice)"
    )
    print(f"load at the start {load:.1f} on {os.cpu_count()} cores")
    return int(code)


def resident(process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


def main() -> None:
    with evener.blank():
        model = Llama(*SIZES["70B"], "all")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    rows = torch.zeros(4096, 4097, dtype=torch.int64)
    evener.Run(model, optimizer, loss_deleting_logits, rows, global_batch_size=1024, max_grad_norm=1.0)


if __name__ == "__main__":
    sys.exit(measure() if sys.argv[1:] == ["measure"] else main())
