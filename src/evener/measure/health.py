"""Does torch work here? Run by path in a child process by `evener doctor`, because it may abort or hang.

    python health.py GPUS          GPUS: how many to try NCCL on; 0 leaves it out

One JSON object a line on standard output; `{"stage": NAME}` comes before what may not return, so that the reader knows
where it ended. Nothing of evener is imported. Processes are forked before CUDA is touched.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from typing import Any

_ELEMENTS = 1 << 21  # float32: 8 MiB
_SECONDS = 20.0


def main(gpus: int) -> None:
    tell(stage="import")
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # whatever an installation can be broken by
        tell(import_error=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    tell(version=torch.__version__, cuda=torch.version.cuda)
    if dist.is_available():
        tell(stage="gloo")
        tell(gloo=all_reduce("gloo", 2))
        if gpus > 1:
            tell(stage="nccl")
            tell(nccl=all_reduce("nccl", gpus))
    tell(stage="cuda")
    if torch.version.cuda is not None:
        tell(**cuda())
    tell(stage="done")


def tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def cuda() -> dict[str, Any]:
    """What CUDA says, a real multiplication on every device included."""
    import torch

    available = torch.cuda.is_available()
    told: dict[str, Any] = {"available": available, "arch_list": torch.cuda.get_arch_list()}
    told |= {"devices": torch.cuda.device_count(), "nccl_version": ".".join(map(str, torch.cuda.nccl.version()))}
    try:
        torch.cuda.init()
        for index in range(told["devices"]):
            one = torch.ones(64, 64, device=f"cuda:{index}")
            if float((one @ one).sum()) != 64.0**3:
                raise RuntimeError(f"cuda:{index} multiplies wrongly")
    except Exception as error:  # any kind: the text is the finding
        told |= {"cuda_error": str(error).splitlines()[0], "available": False}
    return told


def all_reduce(backend: str, ranks: int) -> dict[str, Any]:
    """An all-reduce and every pair's exchange of known values, on `ranks` forked processes."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="evener-doctor-") as folder:
        processes = [fork.Process(target=one_rank, args=(backend, rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        told: list[dict[str, Any]] = []
        for rank, process in enumerate(processes):
            try:
                with open(os.path.join(folder, f"{rank}.json"), encoding="utf-8") as file:
                    told.append(json.load(file))
            except OSError:
                told.append({"error": f"rank {rank} ended with exit code {process.exitcode}, without a word"})
    errors = [one["error"] for one in told if one.get("error")]
    wrong = [one["wrong"] for one in told if one.get("wrong")]
    pairs = {name: speed for one in told for name, speed in one.get("pairs", {}).items()}
    speeds = [one["bytes_per_second"] for one in told if "bytes_per_second" in one]
    told_by_all = {"error": errors[0] if errors else "", "wrong": ", ".join(wrong)}
    return {"ranks": ranks, "bytes_per_second": min(speeds, default=0.0), "pairs": pairs, **told_by_all}


def one_rank(backend: str, rank: int, ranks: int, folder: str) -> None:
    result: dict[str, Any] = {}
    try:
        result = measured(backend, rank, ranks, folder)
    except Exception as error:  # any kind: the text is the finding
        result = {"error": f"rank {rank}: {str(error).splitlines()[0] if str(error) else type(error).__name__}"}
    with open(os.path.join(folder, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)
    os._exit(0)  # no clean-up of a group whose other half may be gone


def measured(backend: str, rank: int, ranks: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if backend == "gloo":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    device = torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    where = f"file://{folder}/store"
    dist.init_process_group(backend, where, timedelta(seconds=_SECONDS), ranks, rank)
    pattern = (torch.arange(_ELEMENTS, device=device) % 97).float()  # small integers: their sums are exact
    result: dict[str, Any] = {"bytes_per_second": 0.0}
    for _ in range(2):  # the first makes the connections
        values = pattern * (rank + 1)
        seconds = timed(device, lambda values=values: dist.all_reduce(values))
        result["bytes_per_second"] = values.nbytes / seconds
    if not torch.equal(values, pattern * (ranks * (ranks + 1) // 2)):
        result["wrong"] = f"on rank {rank}"
    pairs: dict[str, float] = {}
    for a in range(ranks):
        for b in range(a + 1, ranks):
            dist.barrier()
            if rank == a:
                dist.send(pattern, b)
            elif rank == b:
                values = torch.zeros_like(pattern)
                pairs[f"{a}-{b}"] = values.nbytes / timed(device, lambda values=values, a=a: dist.recv(values, a))
                if not torch.equal(values, pattern):
                    result["wrong"] = f"between {a} and {b}"
    dist.barrier()
    return result | {"pairs": pairs}


def timed(device: Any, call: Any) -> float:
    import torch

    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9)


if __name__ == "__main__":
    main(int(sys.argv[1]))
