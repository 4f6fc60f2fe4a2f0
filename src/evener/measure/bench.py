"""What this machine does, in figures: `evener bench`. Run as `python -m evener.measure.bench JSON`, once per rank.

Every result is appended to a file as soon as it is there, so that an interrupted bench has told what it measured. A
figure is a median over samples of at least 20 ms each; its spread is the distance from the tenth to the ninetieth
percentile.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from evener import batch as batches
from evener import facts
from evener.data import Cursor, Feed, Order, source_of
from evener.data.source import Source
from evener.dist import comm, info
from evener.dist.device import device as choose_device
from evener.dist.memory import DeviceMemory, memory
from evener.engine import Engine
from evener.engine.precision import bf16_is_native
from evener.errors import EvenerError, UsageError
from evener.limits import usable_cpus
from evener.measure.flops import FlopCounter
from evener.plan.captured import dataset_words

_SAMPLE_SECONDS = 0.02
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Bench:
    """One bench on one rank, of what the command line asked for."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.seconds: float = asked["seconds"]
        self.device = torch.device("cpu") if asked["cpu"] else choose_device()
        self.first = info.here().rank == 0

    def run(self) -> None:
        self.tell(part="machine", **self.machine())
        for part in self.asked["parts"]:
            for result in getattr(self, part)():
                self.tell(part=part, **result)

    def tell(self, **result: Any) -> None:
        if self.first:
            with open(self.asked["file"], "a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")

    def show(self, text: str) -> None:
        if self.first and self.asked["show"]:
            sys.stderr.write(f"  {text} ...\n")

    def times(self, call: Callable[[], object], *, together: bool = False) -> dict[str, Any]:
        """Seconds of one call: median, spread and how many samples. `together`: collective; the slowest rank counts."""

        def sample(calls: int) -> float:
            if together:
                comm.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            if self.device.type != "cpu":
                torch.accelerator.synchronize(self.device)
            seconds = (time.perf_counter() - began) / calls
            return float(comm.all_reduce(seconds, "max")) if together else seconds

        sample(1)  # connections, caches, allocator
        once = sample(1)
        calls = max(1, math.ceil(_SAMPLE_SECONDS / max(once, 1e-7)))
        samples = [sample(calls) for _ in range(max(3, min(50, int(self.seconds / max(once * calls, 1e-6)))))]
        low, *_, high = statistics.quantiles(samples, n=10, method="inclusive")
        median = statistics.median(samples)
        return {"seconds": median, "spread": (high - low) / median, "samples": len(samples)}

    def machine(self) -> dict[str, Any]:
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else info.cpu_name()
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        told = {"device": self.device.type, "name": name, "torch": torch.__version__, "load": load}
        threads, world = torch.get_num_threads(), info.here().world_size
        return told | {"threads": threads, "cores": usable_cpus(), "world_size": world}

    def native(self, name: str) -> bool | None:
        """Whether the hardware multiplies in this format; None where torch does not tell."""
        if name == "bf16":
            return bf16_is_native(self.device)
        if self.device.type == "cuda" and torch.version.hip is None:
            return torch.cuda.get_device_capability(self.device) >= {"tf32": (8, 0), "fp16": (7, 0)}.get(name, (0, 0))
        return True if name == "fp32" else None

    def matmul(self) -> Iterator[dict[str, Any]]:
        """Square products, at the largest of a few sizes that takes no more than a fifth of the time for one figure."""
        kind = facts.find(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        before = torch.get_float32_matmul_precision()
        for name, dtype in DTYPES.items():
            if name == "tf32" and self.device.type != "cuda":
                continue
            self.show(f"matrix product in {name}")
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            try:
                rate, peak = 0.0, kind.peak.get(name) if kind is not None else None
                for size in (512, 1024, 2048, 4096, 8192, 16384):
                    if rate and 2 * size**3 / rate > self.seconds / 5:
                        break
                    a, b = (torch.randn(size, size, device=self.device).to(dtype) for _ in range(2))
                    taken = self.times(functools.partial(torch.matmul, a, b))
                    rate = 2 * size**3 / taken["seconds"]
                    share = None if peak is None else rate / peak
                    said = {"name": name, "size": size, "native": self.native(name), "share_of_peak": share}
                    yield said | {"flops_per_second": rate, **taken}
            finally:
                torch.set_float32_matmul_precision(before)

    def memory(self) -> Iterator[dict[str, Any]]:
        size = (1 << 30) if self.device.type == "cuda" else (1 << 28)
        one, other = (torch.zeros(size // 4, device=self.device) for _ in range(2))
        self.show("copies")
        moved: dict[str, tuple[Callable[[], object], int]] = {
            "copy on the device (read + write)": (lambda: other.copy_(one), 2 * size),
            "read (sum)": (lambda: one.sum(), size),
            "write (fill)": (lambda: other.fill_(1.0), size),
            "into memory that is fresh (read + write)": (lambda: one + 1.0, 2 * size),
        }
        if self.device.type == "cuda":
            pinned, pageable = torch.zeros(size // 16, pin_memory=True), torch.zeros(size // 16)
            there = torch.zeros(size // 16, device=self.device)
            moved |= {
                "pinned host to device": (lambda: there.copy_(pinned, non_blocking=True), size // 4),
                "device to pinned host": (lambda: pinned.copy_(there, non_blocking=True), size // 4),
                "pageable host to device": (lambda: there.copy_(pageable), size // 4),
            }
        for name, (call, count) in moved.items():
            taken = self.times(call)
            yield {"name": name, "bytes": count, "bytes_per_second": count / taken["seconds"], **taken}
        self.show("one small operation after the other")
        little = torch.ones(1, device=self.device, requires_grad=True)

        def step() -> None:  # as a step does it, with what autograd notes of each, and its backward
            functools.reduce(torch.mul, [little] * 33).backward()

        taken = self.times(step)
        taken["seconds"] /= 128  # 32 products; in the backward two more of each, and a sum
        yield {"name": "launch of one operation", "bytes": 4, "bytes_per_second": None, **taken}
        if self.device.type == "cuda":  # after a whole step: kernels are loaded when they are first used
            _, model, batch = next(networks())
            optimizer = torch.optim.AdamW(model.to(self.device).parameters(), lr=1e-4)
            Engine(model, optimizer, loss_fn, device=self.device).step(tuple(part.to(self.device) for part in batch))
            yield held("CUDA context and kernels", self.beside())

    def beside(self) -> int | None:
        torch.accelerator.synchronize(self.device)
        here = f"cuda:{torch.accelerator.current_device_index() if self.device.index is None else self.device.index}"
        return beside_torch(next(one for one in memory().devices if one.device == here))

    def comm(self) -> Iterator[dict[str, Any]]:
        """Every collective of evener.comm. `bus` is what the busiest link carries, as NVIDIA's nccl-tests count it."""
        world = info.here().world_size
        if world == 1:
            yield {"name": "none", "note": "one process: every collective is the identity; --nproc 2 measures"}
            return
        group, before = nn.Linear(1, 1), None
        if self.device.type == "cuda":
            torch.ones(1, device=self.device).add_(1)  # now there is a context
            before = self.beside()
        Engine(group, torch.optim.SGD(group.parameters(), lr=0.0), device=self.device)  # makes or adopts the group
        rank, part = info.here().rank, (world - 1) / world
        factors = {"all_reduce": 2 * part, "all_gather": part, "broadcast": 1.0, "reduce": 1.0, "gather": part}
        for name, factor in factors.items():
            self.show(f"{name} over {world} ranks")
            gathers, call = name in ("all_gather", "gather"), getattr(comm, name)
            for power in range(2, 31, 4):
                count = max(4, (1 << power) // world // 4 * 4) if gathers else 1 << power
                pattern = (torch.arange(count // 4, device=self.device) % 97).float()
                values = pattern * (rank + 1)  # small integers: their sums are exact
                correct = rightly(name, call(values.clone()), pattern, rank, world)
                correct = bool(comm.all_reduce(int(correct), "min"))
                taken = self.times(functools.partial(call, values), together=True)
                whole = count * world if gathers else count
                rate = whole / taken["seconds"]
                rates = {"bytes_per_second": rate, "bus_bytes_per_second": rate * factor}
                yield {"name": name, "bytes": whole, **rates, "correct": correct, **taken}
                slow = bool(comm.all_reduce(int(taken["seconds"] * 16 > self.asked["longest"]), "max"))
                if slow and power < 30:
                    yield {"name": name, "note": f"larger sizes left out: over {self.asked['longest']:g} s a call"}
                    break
        if self.device.type == "cuda":
            after = self.beside()
            yield held("NCCL", None if before is None or after is None else after - before)
        self.show("barrier, scatter of JSON")
        yield {"name": "barrier", "bytes": 4, "correct": True, **self.times(comm.barrier, together=True)}
        items = [{"rank": i, "text": "x" * 100} for i in range(world)] if rank == 0 else None
        correct = bool(comm.all_reduce(int(comm.scatter(items) == {"rank": rank, "text": "x" * 100}), "min"))
        taken = self.times(lambda: comm.scatter(items), together=True)
        yield {"name": "scatter (JSON)", "bytes": 130 * world, "correct": correct, **taken}

    def data(self) -> Iterator[dict[str, Any]]:
        dataset, said = dataset_of(self.asked["dataset"])
        source, cores = source_of(dataset), usable_cpus()
        rates: dict[int, float] = {}
        (piece,) = next(feed(source, 2, 0).portions(Cursor(0, 0))).pieces
        row_bytes = sum(leaf.nbytes for _, leaf in batches.leaves(piece.batch)) // piece.rows
        words = dataset_words(type(source.dataset).__name__, source.rows, row_bytes)
        for workers in sorted({0, 1, 2, 4, 8, 16, cores} & set(range(cores + 1))):
            self.show(f"{said}, {workers} workers")
            with contextlib.closing(feed(source, 32, workers)) as reader:
                portions, rows_per_second = reader.portions(Cursor(0, 0)), []
                for _ in range(3):  # in the first the workers start
                    rows, began = 0, time.perf_counter()
                    while time.perf_counter() - began < self.seconds:
                        rows += next(portions).rows
                    rows_per_second.append(rows / (time.perf_counter() - began))
            rates[workers] = statistics.median(rows_per_second[1:])
            yield {"name": said, "workers": workers, "rows_per_second": rates[workers]}
        enough = min(count for count, rate in rates.items() if rate >= 0.95 * max(rates.values()))
        about = {"dataset": words, "cpu": info.cpu_name(), "cores": cores} if self.asked["dataset"] else {}
        yield {"name": said, "recommended_workers": enough, "rows_per_second": rates[enough], **about}

    def step(self) -> Iterator[dict[str, Any]]:
        """One update of two networks; the share is (FLOPs / the fastest product measured here) / time."""
        name = "bf16" if self.native("bf16") else "fp32"
        a = torch.randn(2048 if self.device.type == "cpu" else 8192, device=self.device).to(DTYPES[name])
        square = a.expand(len(a), len(a)).contiguous()
        self.show(f"matrix product in {name}, to compare with")
        peak = 2 * len(a) ** 3 / self.times(lambda: square @ square)["seconds"]
        for title, model, batch in networks():
            self.show(f"one update of a {title}")
            model, batch = model.to(self.device), tuple(part.to(self.device) for part in batch)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            engine = Engine(model, optimizer, loss_fn, device=self.device, precision=name)
            with FlopCounter() as counter:
                engine.step(batch)
            taken = self.times(functools.partial(engine.step, batch), together=True)
            rate, rows = counter.total / taken["seconds"], len(batch[0]) * info.here().world_size
            told = {"name": title, "precision": name, "flops": counter.total, "flops_per_second": rate}
            yield told | {"share_of_roofline": rate / peak, "rows_per_second": rows / taken["seconds"], **taken}


def beside_torch(one: DeviceMemory) -> int | None:
    """Bytes of a GPU that this process takes beside torch's allocator; None where others hold some, or may."""
    if one.others != () or one.free_bytes is None or one.total_bytes is None or one.reserved_bytes is None:
        return None
    held = one.total_bytes - one.free_bytes - one.reserved_bytes
    return held if held > 0 else None


def held(name: str, count: int | None) -> dict[str, Any]:
    """A result without a time."""
    if count is None or count <= 0:
        return {"name": name, "held_bytes": None, "note": "not known: others hold memory of this GPU, or may"}
    return {"name": name, "held_bytes": count, "note": f"{count / facts.MIB:,.0f} MiB beside torch's allocator"}


def feed(source: Source, rows: int, workers: int) -> Feed:
    """As a run reads: tensors in memory are gathered, other rows are fetched one by one."""
    how: dict[str, Any] = {"drop_last": False, "rank": 0, "world_size": 1, "device": torch.device("cpu"), "seed": 0}
    how |= {"cut": lambda here: [(0, here)], "num_workers": workers, "global_batch_size": min(rows, source.rows)}
    return Feed(source, Order(source.rows, 0, source.order or "shuffle"), **how)


def rightly(name: str, got: Any, pattern: torch.Tensor, rank: int, world: int) -> bool:
    """Whether a collective gave what it must, of `pattern * (rank + 1)` on every rank."""
    parts, total = [pattern * (i + 1) for i in range(world)], pattern * (world * (world + 1) // 2)
    right: Any = {"all_reduce": total, "reduce": total, "broadcast": pattern}.get(name, parts)
    if name in ("reduce", "gather") and rank != 0:
        right = None
    if right is None or got is None or not isinstance(right, list):
        return got is right or (right is not None and got is not None and torch.equal(got, right))
    return len(got) == world and all(map(torch.equal, got, right))


class Compressed(Dataset[tuple[torch.Tensor, int]]):
    """Stands in for small images: 3 x 64 x 64 bytes, decompressed, scaled and flipped per row, in memory."""

    def __init__(self) -> None:
        smooth = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        images = F.interpolate(smooth, size=(64, 64), mode="bilinear").mul(255).to(torch.uint8)
        self.packed = [zlib.compress(image.numpy().tobytes(), 6) for image in images]

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        data = torch.frombuffer(bytearray(zlib.decompress(self.packed[i % 16])), dtype=torch.uint8)
        image = data.view(3, 64, 64).float().div_(255).sub_(0.45).div_(0.22)
        return (image.flip(2) if i % 2 else image), i % 10


def dataset_of(spec: str | None) -> tuple[Any, str]:
    """The user's dataset, FILE.py:NAME (a dataset, or a function that makes one), or the one made here."""
    if spec is None:
        return Compressed(), "3 x 64 x 64 images, decompressed and scaled"
    path, _, name = spec.rpartition(":")
    if not path or not Path(path).is_file():
        raise UsageError(f"--dataset {spec}: no such file.", fix=["--dataset FILE.py:NAME, a dataset or a function"])
    loaded = importlib.util.spec_from_file_location("evener_bench_dataset", path)
    assert loaded is not None and loaded.loader is not None
    module = importlib.util.module_from_spec(loaded)
    sys.modules[loaded.name] = module  # data workers look classes up by their module
    loaded.loader.exec_module(module)
    found = getattr(module, name, None)
    if found is None:
        raise UsageError(f"--dataset {spec}: {path} has no {name}.")
    found = found() if callable(found) and not hasattr(found, "__getitem__") else found
    if isinstance(found, str) or not hasattr(found, "__len__") or not hasattr(found, "__getitem__"):
        raise UsageError(f"--dataset {spec} is a {type(found).__name__}, without len() and [i].")
    return found, spec


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


class Residual(nn.Sequential):
    def __init__(self, width: int) -> None:
        half = [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width)]
        super().__init__(*half, nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False), nn.GroupNorm(8, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + super().forward(x))  # type: ignore[no-untyped-call]


def networks() -> Iterator[tuple[str, nn.Module, tuple[torch.Tensor, ...]]]:
    """Name, model, and (inputs, labels)."""
    draw = torch.Generator().manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    gpt = nn.Sequential(nn.Embedding(1024, 256), body, nn.Linear(256, 1024))
    tokens = torch.randint(0, 1024, (8, 129), generator=draw)
    yield "small GPT (4 layers, width 256, 8 x 128 tokens)", gpt, (tokens[:, :-1], tokens[:, 1:])
    blocks = [Residual(64) for _ in range(4)]
    net = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    images, labels = torch.randn(16, 3, 64, 64, generator=draw), torch.randint(0, 10, (16,), generator=draw)
    yield "small residual network (9 convolutions, 16 x 64 x 64)", net, (images, labels)


def main(given: str) -> int:
    try:
        Bench(json.loads(given)).run()
    except EvenerError as error:
        if info.here().rank == 0:
            sys.stderr.write(f"evener: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
