"""60,000 images of 28x28 through the classic network: a loop over `Run.updates` against the same step without data."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from bench.table import Table, verdict
from bench.timing import cpu_clock, interleave

ROWS, BATCH = 60_000, 64


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def forever(loader: DataLoader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader


@contextlib.contextmanager
def contestants() -> Iterator[dict[str, Callable[[], object]]]:
    """A loop over a Run, its step alone, and a DataLoader with that step."""
    import evener
    from evener.engine import Engine

    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.rand(ROWS, 784, generator=draw), torch.randint(0, 10, (ROWS,), generator=draw))
    fixed = Engine(*make(), loss_fn, device="cpu", precision="fp32")
    behind = Engine(*make(), loss_fn, device="cpu", precision="fp32")
    batch = dataset[:BATCH]
    batches = forever(DataLoader(dataset, BATCH, shuffle=True))
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = evener.Run(*make(), loss_fn, dataset, global_batch_size=BATCH, precision="fp32", dir=folder)
        updates = trainer.updates(updates=10**9)
        yield {
            "Run.updates": lambda: next(updates),
            "compute only": lambda: fixed.step(batch),
            "DataLoader, then the same step": lambda: behind.step(next(batches)),
        }
        updates.close()
        trainer.close()


def run(quick: bool) -> list[Table]:
    # A round is a quarter of an epoch.
    count, rounds = (100, 5) if quick else (ROWS // BATCH // 4, 16)
    with contestants() as made:
        times = interleave(made, updates=count, rounds=rounds, warm_up=100, clock=cpu_clock)
    table = Table(
        f"data: {ROWS} images of 28x28 in memory, MLP 784-512-512-10, batch {BATCH}, SGD fp32, one thread, CPU time",
        ["loop", "us per update", "images per second", "throughput / compute only"],
    )
    for name in made:
        seconds = times.median(name)
        table.add(name, f"{1e6 * seconds:.0f}", f"{BATCH / seconds:.0f}", f"{times.ratio('compute only', name):.3f}")
    table.note(verdict("Run.updates / compute only", times.ratio("compute only", "Run.updates"), 0.95, at_least=True))
    table.note(times.spread())
    return [table]
