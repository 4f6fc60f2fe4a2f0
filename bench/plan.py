"""Predicted peaks against what was really allocated: plan_models.py's grid on the CPU, by the profiler's events."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.plan_models import Case, draw
from bench.table import Table, verdict

SEED = 20261130
LATER_SEED = 517204  # drawn when the planner had been fitted to the first
_CONVOLUTIONS = ("mkldnn_convolution", "convolution_backward", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_ONEDNN = (*_CONVOLUTIONS, "mm", "addmm", "bmm", "baddbmm")  # products in bf16 reorder their arguments


@dataclass(frozen=True)
class Measured:
    """Bytes. `without_scratch`: the peak without what oneDNN allocates and frees inside of one operation."""

    peak: int
    without_scratch: int


def really(case: Case) -> Measured:
    """Two real updates from nothing: the running sum of the profiler's allocation events, models and state included.

    On one thread: some kernels take scratch for each."""
    from evener import batch as batches
    from evener.engine import Engine

    rows = case.cut.microbatch_size * case.cut.microbatches
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        model, optimizer, loss_fn, batch = case.make(rows)
        sliced = any(isinstance(one, nn.modules.batchnorm._BatchNorm) for one in model.modules())
        engine = Engine(
            model,
            optimizer,
            loss_fn,
            device="cpu",
            precision=case.cut.precision,
            global_batch_size=rows,
            activation_checkpointing=case.cut.activation_checkpointing,
            loss_is="row mean",
            report=lambda *_: None,
            **{"slice_size" if sliced else "microbatch_size": case.cut.microbatch_size},
            **case.keywords,
        )
        parts = [(i, stop - start, batches.part(batch, start, stop)) for i, (start, stop) in engine.cut.numbered(rows)]
        for _ in range(2):
            engine.step_parts(parts, rows)
    torch.set_num_threads(threads)
    return _peaks(prof)


def _peaks(prof: Any) -> Measured:
    events: list[tuple[int, int, int, bool]] = []  # when, bytes, address, inside of a oneDNN operation

    def walk(node: Any, inside: Any) -> None:
        name = node.name.removeprefix("aten::")
        inside = id(node) if name in _ONEDNN else inside
        if node.typed[0] == torch._C._profiler._EventType.Allocation:
            fields = node.typed[1]
            events.append((node.start_time_ns, fields.alloc_size, fields.ptr, inside))
        for child in node.children:
            walk(child, inside)

    for root in prof.profiler.kineto_results.experimental_event_tree():
        walk(root, None)
    events.sort(key=lambda one: one[0])
    scratch: set[int] = set()
    living: dict[int, tuple[int, Any]] = {}
    for i, (_, size, address, inside) in enumerate(events):
        if size > 0:
            living[address] = (i, inside)
        else:
            born = living.pop(address, None)
            if born is not None and born[1] is not None and born[1] == inside:
                scratch |= {born[0], i}
    return Measured(_top(one[1] for one in events), _top(one[1] for i, one in enumerate(events) if i not in scratch))


def _top(sizes: Any) -> int:
    now = top = 0
    for size in sizes:
        now += size
        top = max(top, now)
    return top


def predicted(case: Case) -> tuple[int, str]:
    """Bytes, and the phase of the peak."""
    from evener.measure.trace import Step
    from evener.plan.memory import peak_of

    model, optimizer, loss_fn, batch = case.make(2)
    peak = peak_of(Step(model, optimizer, loss_fn, batch, case.keywords).trace(case.cut))
    return peak.bytes, peak.phase


def run(quick: bool) -> list[Table]:
    return [_table(8, SEED)] if quick else [_table(40, seed) for seed in (SEED, LATER_SEED)]


def _table(number: int, seed: int) -> Table:
    cases = draw(number, seed)
    table = Table(
        f"plan: {number} configurations drawn by seed {seed}, CPU, two updates from nothing, MiB",
        ["configuration", "real", "without oneDNN scratch", "predicted", "phase", "error %", "without scratch %"],
    )
    raw, errors, phases = [], [], []
    for case in cases:
        real, (expected, phase) = really(case), predicted(case)
        raw.append(100 * (expected - real.peak) / real.peak)
        errors.append(100 * (expected - real.without_scratch) / real.without_scratch)
        phases.append(phase)
        sizes = [f"{size / 2**20:.2f}" for size in (real.peak, real.without_scratch, expected)]
        table.add(case, *sizes, phase, f"{raw[-1]:+.3f}", f"{errors[-1]:+.3f}")
    table.note(verdict("median error, %", statistics.median(map(abs, errors)), 0.1))
    table.note(verdict("worst error without oneDNN scratch, %", max(map(abs, errors)), 1.0))
    table.note(f"worst error with it, %: {max(map(abs, raw)):.2f}; median {statistics.median(map(abs, raw)):.3f}")
    inside = sum(phase in ("forward", "backward") for phase in phases) / len(phases)
    table.note(verdict("share of peaks in forward or backward", inside, 2 / 3, at_least=True))
    return table
