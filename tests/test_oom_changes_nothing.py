"""Out of memory at any operation of an update, on any rank: the update is the one that would have been made without it.

The error is raised by a dispatch mode before operation i, and in another pass after it. Every i is the full form, on a
smaller model; here a sample, whose seed is printed.
"""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evener
from evener.dist.info import share
from evener.engine import Engine
from evener.engine import engine as engine_module
from evener.errors import LessonError, MemoryLimitError
from tests.models import make, mlp_rows, row_loss, seeded, token_loss, token_rows

UPDATES, ROWS = 3, 8
# How a case is made: model, rows, loss, keywords. "exact" has dropout, LayerNorm, BatchNorm, attention; "coupled" the
# same in fast mode; "fast" is rows without randomness. "small": every operation of it is hit.
CASES = {
    "exact": (make, token_rows, token_loss, {"exact": True, "slice_size": 3}),
    "coupled": (make, token_rows, token_loss, {"slice_size": 3}),
    "fast": (lambda: seeded(Normed), mlp_rows, row_loss, {"max_grad_norm": 1.0}),
    "small exact": (lambda: seeded(Small), mlp_rows, row_loss, {"exact": True, "slice_size": 3}),
    "small coupled": (lambda: seeded(Small), mlp_rows, row_loss, {"slice_size": 3}),
}


class Normed(nn.Module):
    """LayerNorm, no randomness, and a buffer that every forward moves."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3))
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x):
        with torch.no_grad():
            self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return self.body(x)


class Small(nn.Sequential):
    """LayerNorm, BatchNorm, dropout, in as few operations as there can be."""

    def __init__(self):
        super().__init__(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Dropout(0.2), nn.Linear(4, 3))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Injected(TorchDispatchMode):
    """Counts operations and raises at number `at`. Those inside of a vote or an agreement do not count: a rank that
    cannot even say that it has no memory cannot be helped."""

    def __init__(self, at=None, when="before"):
        super().__init__()
        self.at, self.when, self.count = at, when, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.endswith(("dist/comm.py", "engine/oom.py")):
                return function(*args, **(kwargs or {}))
            frame = frame.f_back
        mine, self.count = self.count, self.count + 1
        if mine == self.at and self.when == "before":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        result = function(*args, **(kwargs or {}))
        if mine == self.at:
            del result
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return result


def parts_of(engine, rows_of, update):
    """This rank's pieces of the global batch, as a run delivers them."""
    x, y = rows_of(ROWS, seed=update)
    return [(i, stop - start, (x[start:stop], y[start:stop])) for i, (start, stop) in engine.cut.numbered(ROWS)]


@contextlib.contextmanager
def noted(engine, injected, places):
    """How many operations had been made when the ranks voted, and when the optimizer's part began."""
    agree, apply = engine.ladder.agree, engine_module.apply

    def before(function):
        return lambda *args, **how: (places.append(injected.count), function(*args, **how))[1]

    with (
        mock.patch.object(engine.ladder, "agree", before(agree)),
        mock.patch.object(engine_module, "apply", before(apply)),
    ):
        yield


def train(case, hit=None, at=None, when="before", count=False):
    """(digest, parameters and buffers, events, or operation numbers: of the vote, of the optimizer, of the end)."""
    build, rows_of, loss, keywords = CASES[case]
    model = build()
    events = []
    engine = Engine(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        loss,
        device="cpu",
        precision="fp32",
        report=lambda kind, update, fields: events.append((kind, update, fields)),
        **keywords,
    )
    places = []
    try:
        for update in range(UPDATES):
            parts = parts_of(engine, rows_of, update)
            if update != hit or (at is None and not count):
                engine.step_parts(parts, ROWS)
                continue
            with Injected(at, when) as injected, noted(engine, injected, places):
                engine.step_parts(parts, ROWS)
            places.append(injected.count)
        if count:
            return places
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return engine.digest(), state, [event for event in events if event[0] == "oom"]
    finally:
        engine.close()


def check(case, want, got, where):
    digest, state, events = got
    assert len(events) >= 1, where
    if case == "fast":
        assert state.keys() == want[1].keys()
        for name, value in want[1].items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=f"{where}: {name}")
    else:
        assert digest == want[0], where


def sample(test_seed, numbers, count, salt):
    numbers = list(numbers)
    return sorted(random.Random(f"{test_seed} {salt}").sample(numbers, min(count, len(numbers))))


@contextlib.contextmanager
def frozen():
    """An error collects garbage before the update is made again: not among what torch's import has made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def at_one_rank(case, hit, number, test_seed):
    want = train(case)
    *_, optimizer, end = train(case, hit, count=True)
    with frozen():
        for at in sample(test_seed, range(end), number, f"{case} {hit}"):
            for when in ("before", "after"):
                where = f"{case}, update {hit}, {when} operation {at} of {end} (the optimizer's from {optimizer})"
                if hit and at >= optimizer:  # a proven optimizer is a lesson, or the end where nothing can be cut
                    with pytest.raises(LessonError if case == "fast" else MemoryLimitError, match="optimizer's step"):
                        train(case, hit, at, when)
                else:
                    check(case, want, train(case, hit, at, when), where)


@pytest.mark.parametrize("hit", [0, 2])
@pytest.mark.parametrize("case", ["exact", "coupled", "fast"])
def test_at_some_operations_of_one_rank(case, hit, test_seed):
    at_one_rank(case, hit, 4, test_seed)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("hit", [0, 2])
@pytest.mark.parametrize("case", ["small exact", "small coupled", "fast"])
def test_at_every_operation_of_one_rank(case, hit, test_seed):
    at_one_rank(case, hit, 1 << 30, test_seed)


def halves(at=None, when="before"):
    """Gradients between backward and apply, parameters after it, and how many operations backward made."""
    model = make()
    engine = Engine(
        model, torch.optim.AdamW(model.parameters()), token_loss, device="cpu", precision="fp32", slice_size=4,
        report=lambda *event: None,
    )  # fmt: skip
    with Injected(at, when) as injected:
        engine.backward(token_rows(8))
    gradients = [p.grad.clone() for p in model.parameters()]
    engine.apply()
    engine.close()
    return gradients, [p.detach().clone() for p in model.parameters()], injected.count


def test_at_the_last_operations_of_backward_alone():
    """What is still owed is multiplied there: a gradient must get it once."""
    *want, end = halves()
    for at in range(end - 8, end):
        for when in ("before", "after"):
            torch.testing.assert_close(halves(at, when)[:2], tuple(want), rtol=0, atol=0, msg=f"{when} {at} of {end}")


def one_rank_of(case, hit, victim, share_of, when):
    """Every rank trains; `victim` is hit at this share of what it does before the vote, or in the optimizer's step."""
    places = train(case, hit, count=True)
    mine = evener.rank() == victim
    vote, optimizer, end = places[-3:] if evener.world_size() > 1 else (places[-2], *places[-2:])
    numbers = [*range(vote), *(range(optimizer, end) if hit == 0 else ())]  # a proven optimizer is a lesson
    at = numbers[int(share_of * len(numbers))]
    return train(case, hit, at if mine else 1 << 30, when), at


def on_several(ranks, world, case, hit, victim, share_of, when):
    want = ranks(world)(train, case)
    got = ranks(world)(one_rank_of, case, hit, victim, share_of, when)
    for rank, (result, at) in enumerate(got):
        where = f"{case} on {world}: rank {victim}, update {hit}, {when} operation {at}"
        if rank == victim:
            check(case, want[rank], result, where)
        elif case == "fast":
            torch.testing.assert_close(result[1], want[rank][1], rtol=0, atol=1e-6)
    assert len({result[0] for result, _ in got}) == 1, where
    if case == "exact":
        assert got[0][0][0] == train(case)[0], where


@pytest.mark.parametrize("world", [2, 3])
def test_at_some_operations_of_one_of_several_ranks(ranks, world, test_seed):
    draw = random.Random(f"{test_seed} {world}")
    for case in ("exact", "fast"):
        for _ in range(2):
            on_several(ranks, world, case, draw.choice([0, 1]), draw.randrange(world), draw.random(), "before")


def at_each(case, hit, victim):
    """On all ranks: every operation of `victim` is hit, before and after. Returns how many there were."""
    want, places = train(case), train(case, hit, count=True)
    vote, optimizer, end = places[-3:]
    mine = [*range(vote), *(range(optimizer, end) if hit == 0 else ())]
    numbers = evener.comm.broadcast(mine, victim)
    with frozen():
        for at in numbers:
            for when in ("before", "after"):
                where = f"{case}, rank {victim}, update {hit}, {when} operation {at}"
                got = train(case, hit, at if evener.rank() == victim else 1 << 30, when)
                # An error in its optimizer's step is the victim's alone: the others have nothing to tell.
                check(case, want, got if evener.rank() == victim else (*got[:2], ["another rank's"]), where)
    return len(numbers)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("hit", [0, 1])
@pytest.mark.parametrize("case", ["small exact", "small coupled", "fast"])
def test_at_every_operation_of_one_of_several_ranks(ranks, world, case, hit, test_seed):
    """Another rank for each case, of those with rows: all of them take part in every update."""
    pieces = ROWS if case == "fast" else -(-ROWS // CASES[case][3]["slice_size"])
    busy = [rank for rank in range(world) if len(range(*share(pieces, rank, world)))]
    victim = random.Random(f"{test_seed} {world} {case} {hit}").choice(busy)
    assert min(ranks(world)(at_each, case, hit, victim)) > 30


def test_a_rank_without_rows_makes_the_update_again_too(ranks):
    """Three slices on four ranks, in an update that is not the first: the last one's error voids the others' work."""
    on_several(ranks, 4, "exact", 1, 3, 0.4, "before")


def test_the_control_fails_without_the_transaction():
    """Cut and try again, with nothing undone: if this were equal too, the tests above would prove nothing."""
    want = train("fast")
    with (
        mock.patch("evener.engine.buffers.Buffers.restore", lambda self: None),
        mock.patch("evener.engine.step.Held.put_back", lambda self: None),
    ):
        wrong = 0
        *_, end = train("fast", 0, count=True)
        for at in range(0, end, 9):
            try:
                got = train("fast", 0, at, "after")
                wrong += any(
                    not torch.allclose(got[1][name], value, rtol=0, atol=1e-6) for name, value in want[1].items()
                )
            except (KeyError, RuntimeError):
                wrong += 1
    assert wrong > 1
