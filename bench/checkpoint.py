"""419 MB of state: how long saving it keeps the training waiting, against torch.save and others."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from bench.table import Table, verdict
from evener.checkpoint import Checkpoints, store
from evener.engine import Engine

TENSORS, ELEMENTS = 100, 1_048_576  # float32: 419 MB
LIMIT = 0.3  # of torch.save


def state() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}": torch.rand(ELEMENTS, generator=generator) for i in range(TENSORS)}


def run(quick: bool) -> list[Table]:
    tensors = state()
    folder = Path(tempfile.mkdtemp(prefix="evener-bench-"))
    blocked: dict[str, list[float]] = {}
    total: dict[str, list[float]] = {}
    checkpoints = Checkpoints(folder / "evener", keep=1)

    def evener_behind(number: int) -> float:
        checkpoints.begin(number, {"engine": tensors}, {"update": number})
        done = time.perf_counter()
        if isinstance(outcome := checkpoints.behind.outcome(wait=True), Exception):
            raise outcome
        return done

    module = torch.nn.ParameterDict(tensors)
    engine = Engine(module, torch.optim.SGD(module.parameters(), lr=0.1), device="cpu", precision="fp32")

    def evener_engine(number: int) -> float:
        checkpoints.begin(number, {"engine": engine.state_dict(copy=False)}, {"update": number})
        done = time.perf_counter()
        if isinstance(outcome := checkpoints.behind.outcome(wait=True), Exception):
            raise outcome
        return done

    def evener_sync(number: int) -> float:
        store.write(folder / "sync", {"engine": tensors}, about={"update": number})
        return time.perf_counter()

    def torch_save(number: int) -> float:
        torch.save(tensors, folder / "state.pt")
        return time.perf_counter()

    def safe(number: int) -> float:
        safetensors.torch.save_file(tensors, folder / "state.safetensors")
        return time.perf_counter()

    def dcp_save(number: int) -> float:
        shutil.rmtree(folder / "dcp", ignore_errors=True)
        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
        return time.perf_counter()

    ways = {
        "evener, behind the training": evener_behind,
        "the same from an Engine, as Run saves": evener_engine,
        "evener, waited for (hashed, synced, read back)": evener_sync,
        "torch.save (no hash, no sync)": torch_save,
        "safetensors.save_file (no hash, no sync)": safe,
        "torch.distributed.checkpoint.save": dcp_save,
    }
    try:
        for turn in range(3 if quick else 9):
            for name, way in ways.items():  # interleaved: the machine's mood is shared
                began = time.perf_counter()
                done = way(turn)
                if turn:  # the first makes buffers and files
                    blocked.setdefault(name, []).append(done - began)
                    total.setdefault(name, []).append(time.perf_counter() - began)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    middle = {name: sorted(times)[len(times) // 2] for name, times in blocked.items()}
    base = middle["torch.save (no hash, no sync)"]
    table = Table("checkpoint: 419 MB of state", ["way", "training waits s", "/ torch.save", "on disk after s"])
    for name in ways:
        whole = sorted(total[name])[len(total[name]) // 2]
        table.add(name, f"{middle[name]:.3f}", f"{middle[name] / base:.2f}", f"{whole:.3f}")
    ours = middle["evener, behind the training"] / base
    table.note(verdict("training waits, evener behind / torch.save", ours, LIMIT))
    return [table]
