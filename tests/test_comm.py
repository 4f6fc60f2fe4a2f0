"""`evener.comm`, `first`, `seed` and who this process is."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from itertools import pairwise

import numpy
import pytest
import torch

import evener
from evener.dist import Group, comm, here
from evener.errors import CollectiveError, UsageError


def everything():
    rank = evener.rank()
    world = evener.world_size()
    return {
        "broadcast": comm.broadcast({"from": rank}, src=world - 1),
        "tensor": comm.broadcast(torch.full((3,), float(rank)), src=world - 1).tolist(),
        "sum": comm.all_reduce(rank + 1),
        "mean": comm.all_reduce(float(rank), "mean"),
        "max": comm.all_reduce(torch.tensor([rank, -rank]), "max").tolist(),
        "reduce": comm.reduce(1, dst=0),
        "gather_all": comm.all_gather({"rank": rank, "text": "x" * rank}),
        "gather_tensors": [int(one) for one in comm.all_gather(torch.tensor(rank))],
        "gather": comm.gather(rank, dst=world - 1),
        "scatter": comm.scatter([10 * r for r in range(world)] if rank == 0 else None),
        "barrier": comm.barrier(),
    }


def test_collectives_on_any_world_size(ranks):
    for world in (1, 2, 3, 4):
        for rank, got in enumerate(ranks(world)(everything)):
            last = world - 1
            assert got == {
                "broadcast": {"from": last},
                "tensor": [last] * 3,
                "sum": world * (world + 1) // 2,
                "mean": last / 2,
                "max": [last, 0],
                "reduce": world if rank == 0 else None,
                "gather_all": [{"rank": r, "text": "x" * r} for r in range(world)],
                "gather_tensors": list(range(world)),
                "gather": list(range(world)) if rank == last else None,
                "scatter": 10 * rank,
                "barrier": None,
            }


def mistakes():
    texts = []
    for call in (
        lambda: comm.all_gather(torch.zeros(evener.rank() + 1)),
        lambda: comm.scatter([1] if evener.rank() == 0 else None),
    ):
        try:
            call()
            texts.append("")
        except evener.EvenerError as error:
            texts.append(str(error))
    return texts


def test_mistakes_are_named_on_every_rank(ranks):
    for shapes, scattered in ranks(2)(mistakes):
        assert "tensors of different shapes" in shapes and "rank 1: [2] torch.float32" in shapes
        assert "scatter needs one value per rank (2); rank 0 gave 1 values" in scattered


def test_what_is_neither_tensor_nor_json_is_refused(ranks):
    for text in ranks(2)(bad_values):
        assert "neither a tensor nor JSON" in text
    with pytest.raises(UsageError, match=r"all_reduce takes a tensor or a number, not str"):
        comm.all_reduce("a")
    with pytest.raises(UsageError, match=r'op="mean"'):
        comm.all_reduce(1, "means")


def bad_values():
    try:
        comm.all_gather(object())
    except evener.EvenerError as error:
        return str(error)
    return ""


def a_call_that_fails_somewhere():
    group = Group(torch.device("cpu"))
    try:
        with group.call("evaluate" if evener.rank() == 0 else "save"):
            comm.barrier()
            raise RuntimeError("Timed out waiting")
    except CollectiveError as error:
        return str(error)
    return ""


def test_different_calls_are_named(ranks):
    first, second = ranks(2)(a_call_that_fails_somewhere)
    assert "the ranks called different things" in first and "rank 1 called save instead" in first
    assert "rank 0 called evaluate instead" in second


def test_here_reads_the_launchers_variables(monkeypatch):
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    place = here()
    assert (place.rank, place.world_size, place.local_rank, place.local_world_size) == (5, 8, 1, 4)
    assert (evener.rank(), evener.world_size()) == (5, 8)
    with pytest.raises(UsageError, match="the process group, which does not exist yet"):
        comm.barrier()
    monkeypatch.setenv("RANK", "8")
    with pytest.raises(UsageError, match="RANK=8 with WORLD_SIZE=8"):
        here()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UsageError, match="RANK='one' is not a number"):
        here()


def test_no_way_to_meet_the_others(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(evener.EvenerError, match="MASTER_ADDR and MASTER_PORT is not set"):
        Group(torch.device("cpu"))


def test_seed_is_the_same_for_every_library():
    draws = []
    for _ in range(2):
        evener.seed(7)
        draws.append((random.random(), float(numpy.random.rand()), float(torch.rand(()))))
    assert draws[0] == draws[1]
    with pytest.raises(UsageError, match="from 0 to 4294967295"):
        evener.seed(-1)


def _enter(folder, fail):
    try:
        with evener.first(folder):
            began = time.time()
            cached = os.path.exists(f"{folder}/cache")
            if fail and not cached and not os.path.exists(f"{folder}/failed"):
                open(f"{folder}/failed", "w").close()
                raise OSError("download broke")
            time.sleep(0.05)
            if not cached:
                open(f"{folder}/cache", "w").close()
            with open(f"{folder}/log", "a") as log:
                log.write(f"{began} {time.time()} {cached}\n")
    except OSError:
        os._exit(1)


@pytest.mark.parametrize("fail", [False, True])
def test_first_enters_alone_and_a_failure_lets_the_next_try(tmp_path, fail):
    processes = [
        multiprocessing.get_context("fork").Process(target=_enter, args=(str(tmp_path), fail)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines = sorted(line.split() for line in (tmp_path / "log").read_text().splitlines())
    assert [cached for *_, cached in lines].count("False") == 1 and lines[0][2] == "False"
    assert all(float(before[1]) <= float(after[0]) for before, after in pairwise(lines))  # never two at once
    assert sorted(process.exitcode for process in processes) == ([0, 0, 0, 1] if fail else [0, 0, 0, 0])
    assert len(lines) == (3 if fail else 4)
