"""What one update costs in counts, which noise does not touch, and that a loop that reads nothing waits for nothing."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import random
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import evener
from evener.engine import Engine
from tests.conftest import SEED

OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
}
WARM_UP = 6  # the first updates learn what kind of loss, which metrics and which buffers there are


def tiny_mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def rows(count):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 32, generator=generator), torch.randint(0, 10, (count,), generator=generator)


def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)


@dataclass
class Counts:
    python_calls: int
    c_calls: int
    operations: int

    def __str__(self):
        return f"{self.python_calls} Python calls, {self.c_calls} C calls, {self.operations} operations"


class Operations(TorchDispatchMode):
    """Every operation that reaches the dispatcher, those of the backward and of the optimizer too."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen[str(function).rpartition(".")[0] or str(function)] += 1
        return function(*args, **(kwargs or {}))


def count(update):
    for _ in range(WARM_UP):
        update()
    events = Counter()

    def note(frame, event, argument):
        events[event] += 1

    gc.disable()  # finalizers of other tests' objects are not part of this update
    sys.setprofile(note)
    try:
        update()
    finally:
        sys.setprofile(None)
        gc.enable()
    with Operations() as operations:
        update()
    # The last C call is the setprofile that ends the counting.
    return Counts(events["call"], events["c_call"] - 1, sum(operations.seen.values()))


def bare_update(optimizer_class, *, dtype=None, clip=None):
    """The loop by hand, without asking whether the gradient is finite."""
    model, batch = tiny_mlp(), rows(8)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)

    def update():
        if dtype is None:
            loss = loss_fn(model, batch)
        else:
            with torch.autocast("cpu", dtype=dtype):
                loss = loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return update


def engine_update(optimizer_class, **keywords):
    model = tiny_mlp()
    engine = Engine(model, optimizer_class(model.parameters(), lr=1e-3), loss_fn, device="cpu", **keywords)
    return functools.partial(engine.step, rows(8))


def tiny_counts():
    return count(engine_update(torch.optim.SGD, precision="fp32")), count(bare_update(torch.optim.SGD))


def test_an_update_of_a_tiny_network_makes_few_calls():
    # In a process of its own: what other tests import (torch._dynamo) adds calls to every optimizer's step.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        ours, bare = fresh.submit(tiny_counts).result(timeout=120)
    print(f"\nSGD fp32: evener {ours}; bare loop {bare}")
    assert ours.python_calls <= 140, ours
    assert ours.c_calls <= 160, ours
    assert ours.operations <= 78, ours


def test_an_update_in_bf16_with_clipping_makes_no_more_calls_than_the_loop_by_hand():
    ours = count(engine_update(torch.optim.AdamW, precision="bf16", max_grad_norm=1.0))
    bare = count(bare_update(torch.optim.AdamW, dtype=torch.bfloat16, clip=1.0))
    print(f"\nAdamW bf16 clip: evener {ours}; bare loop {bare}")
    assert ours.python_calls <= bare.python_calls, (ours, bare)
    assert ours.c_calls <= bare.c_calls, (ours, bare)
    assert ours.operations <= bare.operations, (ours, bare)


# ------------------------------------------------------------------------------------------------ host synchronisation

# On a GPU each of these makes the host wait; on the CPU the same operations are there to be counted.
SYNCHRONISING = {
    "aten._local_scalar_dense",
    "aten.item",
    "aten.is_nonzero",
    "aten.nonzero",
    "aten.equal",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_consecutive",
}
COPIES = {"aten._to_copy", "aten.copy_"}


class Synchronisations(TorchDispatchMode):
    """Operations that make the host wait for the device, and copies from one device to another."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.operations += 1
        name = str(function).rpartition(".")[0]
        if name in SYNCHRONISING:
            self.seen[name] += 1
        if name in COPIES and self._changes_device(name, args, kwargs):
            self.seen[f"{name} to another device"] += 1
        return function(*args, **kwargs)

    @staticmethod
    def _changes_device(name, args, kwargs):
        if name == "aten.copy_":
            return args[0].device != args[1].device
        return kwargs.get("device") is not None and kwargs["device"] != args[0].device


def test_the_counter_sees_what_waits():
    tensor = torch.ones(3)
    with Synchronisations() as counter:
        tensor.sum().item()
        bool(tensor[0] > 0)
        tensor.nonzero()
        torch.equal(tensor, tensor)
        float(tensor[0])
    assert counter.seen["aten._local_scalar_dense"] >= 2
    assert counter.seen["aten.nonzero"] == 1
    assert counter.seen["aten.equal"] == 1


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_engine_step_that_is_not_read_waits_for_nothing(optimizer, precision):
    model = tiny_mlp()
    engine = Engine(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        loss_fn,
        device="cpu",
        precision=precision,
        max_grad_norm=1.0,
        microbatch_size=4,
    )
    batch = rows(8)
    for _ in range(WARM_UP):
        engine.step(batch)
    with Synchronisations() as counter:
        for _ in range(10):
            engine.step(batch)
    assert counter.operations > 100  # it did look
    assert not counter.seen


PAIRS = [(optimizer, precision) for optimizer in OPTIMIZERS for precision in ("fp32", "bf16", "fp16")]
DRAWN = random.Random(SEED).sample(PAIRS, 2)


@pytest.mark.parametrize(
    "optimizer, precision",
    [pytest.param(*pair, marks=[] if pair in DRAWN else [pytest.mark.full]) for pair in PAIRS],
)
def test_a_loop_over_updates_that_reads_nothing_waits_for_nothing(optimizer, precision, tmp_path):
    model = tiny_mlp()

    def with_metric(model, batch):
        x, y = batch
        logits = model(x)
        hits = (logits.argmax(1) == y).sum()
        return F.cross_entropy(logits, y), {"accuracy": evener.Mean(total=hits, count=len(y))}

    with evener.Run(
        model,
        OPTIMIZERS[optimizer](model.parameters()),
        with_metric,
        rows(256),
        global_batch_size=8,
        precision=precision,
        max_grad_norm=1.0,
        dir=tmp_path / "run",
    ) as run:
        updates = run.updates(updates=400)
        for _ in range(WARM_UP):
            next(updates)
        points = (tmp_path / "run" / "events.jsonl").read_text().count('"update"')
        with Synchronisations() as counter:
            for _ in range(300):
                next(updates)
        written = (tmp_path / "run" / "events.jsonl").read_text().count('"update"') - points
        updates.close()
    assert written >= 1  # points of the curves were taken meanwhile
    assert counter.operations > 3000
    assert not counter.seen
