"""`evener.memory()`: figures, what was freed, and who still holds what."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import evener
from evener.errors import UsageError

KEPT = []


def test_the_host_has_figures_and_what_is_unknown_is_said():
    (cpu,) = evener.memory().devices
    assert 0 < cpu.allocated_bytes <= cpu.peak_bytes <= cpu.total_bytes
    assert 0 < cpu.free_bytes < cpu.total_bytes
    assert cpu.reserved_bytes is None
    assert str(cpu).startswith("cpu: allocated ") and "reserved unknown" in str(cpu)


def test_release_prints_what_was_freed_and_who_holds_the_rest(capsys, request):
    gc.disable()  # by itself it may free the cycle while evener.memory is imported, before anything is counted
    request.addfinalizer(gc.enable)
    model = nn.Sequential(nn.Linear(2500, 2500, bias=False))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2500)).sum().backward()
    optimizer.step()
    KEPT.append(torch.ones(7_000_000))  # large enough to come before what other tests left
    mine, sparse = torch.ones(8_000_000), torch.eye(3).to_sparse()  # the second has no storage
    cycle = [torch.ones(20_000_000)]
    cycle.append(cycle)
    del cycle
    found = evener.memory(release=True)
    KEPT.clear()
    del sparse
    assert found.freed_bytes >= 70_000_000, found
    assert capsys.readouterr().out == f"{found}\n"
    held = "\n".join(found.held)
    assert f"30.5 MiB on cpu, {len(mine)} float32: mine in test_release_prints" in held
    assert "26.7 MiB on cpu, 7000000 float32: KEPT of tests.test_memory_says_who_holds_it" in held
    for name in ("weight of a Linear", "grad of weight of a Linear", "exp_avg of state of a Adam"):
        assert f"23.8 MiB on cpu, 2500x2500 float32: {name}" in held, held


@pytest.mark.skipif(torch.cuda.is_available(), reason="the refusals of a machine without a GPU")
@pytest.mark.parametrize("keywords", [{"limit": "2GB"}, {"snapshot": "memory.pickle"}])
def test_what_needs_a_gpu_is_refused_without_one(keywords):
    with pytest.raises(UsageError, match="is for CUDA, and there is no GPU here"):
        evener.memory(**keywords)
