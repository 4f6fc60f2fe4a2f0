"""One evening on evener, accelerate and Fabric: the same network, data and batch. Statements, results, speed.

Each loop is written as its library's own examples are, and yields after every update. 1,437 digits in global batches of
64 do not come out even: the last batch of an epoch has 29 rows. On two processes, two microbatches each.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bench.ranks import on_ranks
from bench.table import Table, verdict
from bench.timing import Timings, interleave, wall_clock

WORLD_SIZE, ROWS, BATCH, ACCUMULATE = 2, 1437, 64, 2
UPDATES = -(-ROWS // BATCH)  # of one epoch, as one process counts them


class Parts:
    """Model, optimizer, schedule and data, the same for everybody, and what the loop does with them."""

    def __init__(self, lr: float) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images[:ROWS], dtype=torch.float32).flatten(1) / 16
        self.data = TensorDataset(images, torch.tensor(digits.target[:ROWS]))
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=10**6)
        self.rows = 0  # that went through the loss, on this rank
        self.gradients: list[torch.Tensor] = []  # that the optimizer saw
        self.keep = False

    def loss(self, model: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.rows += len(labels)
        return F.cross_entropy(model(images), labels)

    def watch(self, *_: object) -> None:
        if self.keep:
            self.gradients.append(torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]))


def with_evener(parts: Parts, epochs: int) -> Iterator[None]:
    import evener

    def loss_fn(model: Any, batch: Any) -> torch.Tensor:
        images, labels = batch
        return parts.loss(model, images, labels)

    keywords = {
        "global_batch_size": BATCH,
        "microbatch_size": BATCH // dist.get_world_size() // ACCUMULATE,
        "order": "sequential",
    }
    run = evener.Run(
        parts.model,
        parts.optimizer,
        loss_fn,
        parts.data,
        scheduler=parts.schedule,
        precision="fp32",
        dir=tempfile.mkdtemp(),
        **keywords,
    )
    for _update in run.updates(epochs=epochs):
        yield


def with_accelerate(parts: Parts, epochs: int) -> Iterator[None]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE)
    loader = DataLoader(parts.data, batch_size=BATCH // accelerator.num_processes // ACCUMULATE)
    model, optimizer, loader, schedule = accelerator.prepare(parts.model, parts.optimizer, loader, parts.schedule)
    for _epoch in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = parts.loss(model, images, labels)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                yield


def with_fabric(parts: Parts, epochs: int) -> Iterator[None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()
    loader = DataLoader(parts.data, batch_size=BATCH // fabric.world_size // ACCUMULATE)
    model, optimizer = fabric.setup(parts.model, parts.optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _epoch in range(epochs):
        for i, (images, labels) in enumerate(loader):
            last = (i + 1) % ACCUMULATE == 0
            with fabric.no_backward_sync(model, enabled=not last):
                loss = parts.loss(model, images, labels)
                fabric.backward(loss / ACCUMULATE)
            if last:
                optimizer.step()
                parts.schedule.step()
                optimizer.zero_grad()
                yield


LOOPS: dict[str, Callable[[Parts, int], Iterator[None]]] = {
    "evener": with_evener,
    "accelerate": with_accelerate,
    "fabric": with_fabric,
}


def statements(loop: Callable[..., Any]) -> int:
    """Statements, which no formatter changes, without the imports and the `yield`s."""
    tree = ast.parse(inspect.getsource(loop)).body[0]
    counted = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and node is not tree]
    yields = [node for node in counted if isinstance(node, ast.Expr) and isinstance(node.value, ast.Yield)]
    imports = [node for node in counted if isinstance(node, ast.Import | ast.ImportFrom)]
    return len(counted) - len(yields) - len(imports)


def one_epoch(name: str) -> dict[str, float]:
    """What the loop does in one epoch, with a learning rate of 0 so that every gradient is of the same parameters."""
    parts = Parts(lr=0.0)
    parts.optimizer.register_step_pre_hook(parts.watch)
    parts.keep = True
    with contextlib.redirect_stdout(io.StringIO()):
        updates = sum(1 for _ in LOOPS[name](parts, 1))
    rows = torch.tensor(parts.rows)
    dist.all_reduce(rows)
    start = (updates - 1) * BATCH  # of the rows of the last update
    images, labels = parts.data[start : start + BATCH]
    model = Parts(lr=0.0).model
    F.cross_entropy(model(images), labels).backward()
    right = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    got = parts.gradients[-1]
    return {
        "rows": int(rows),
        "updates": updates,
        "schedule": parts.schedule.last_epoch,
        "rows of the last": len(labels),
        "size": float(got @ right / (right @ right)),  # 1 for the right gradient
        "error": float((got - right).norm() / right.norm()),
    }


def speed(rounds: int) -> Timings:
    parts = {name: Parts(lr=0.1) for name in LOOPS}
    with contextlib.redirect_stdout(io.StringIO()):
        loops = {name: loop(parts[name], 10**6) for name, loop in LOOPS.items()}
        contestants = {name: functools.partial(next, loop) for name, loop in loops.items()}
        return interleave(contestants, updates=46, rounds=rounds, warm_up=50, clock=wall_clock, between=dist.barrier)


def run(quick: bool) -> list[Table]:
    results = Table(
        f"task: one epoch of {ROWS} rows on {WORLD_SIZE} processes, batches of {BATCH}, {ACCUMULATE} microbatches each",
        ["loop", "rows trained", "updates", "schedule steps", "last gradient / right one", "its error"],
    )
    results.add("right", ROWS, UPDATES, UPDATES, "1.00", "0.00")
    found = {name: on_ranks(WORLD_SIZE, one_epoch, name) for name in LOOPS}
    for name, one in found.items():
        results.add(name, one["rows"], one["updates"], one["schedule"], f"{one['size']:.2f}", f"{one['error']:.2g}")
    results.note("the last gradient: of the epoch's last update, against the mean loss over the rows that are due")
    if found["fabric"]["updates"] < UPDATES:
        results.note("the usual `(i + 1) % 2 == 0` leaves fabric's last microbatch to the next epoch's first update")
    times = on_ranks(WORLD_SIZE, speed, 3 if quick else 12)
    cost = Table(
        "task: the same evening on three libraries", ["loop", "statements", "ms per update", "evener's time / loop's"]
    )
    for name, loop in LOOPS.items():
        ratio = times.ratio("evener", name)
        cost.add(name, statements(loop), f"{1e3 * times.median(name):.2f}", f"{ratio:.3f}")
    best = max(times.ratio("evener", name) for name in ("accelerate", "fabric"))
    cost.note(verdict("evener's time / the faster of the two", best, 1.0))
    cost.note(
        "wall time of pairs in the same two processes; evener also computes the norm, the finite vote and the log"
    )
    cost.note(times.spread())
    return [results, cost]
