"""An update that was begun and not made, a future that load() took back, a loop that was left: nothing of it stays."""

from __future__ import annotations

import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.errors import NonFiniteError, UsageError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def rows(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def new_run(folder, **keywords):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    keywords = {"global_batch_size": 4, "exact": True, "slice_size": 2, "precision": "fp32", **keywords}
    return evener.Run(model, optimizer, loss_fn, rows(16), dir=folder, **keywords)


def new_engine(**keywords):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evener.Engine(model, optimizer, loss_fn, device="cpu", precision="fp32", slice_size=4, **keywords)


class Oops(Exception):
    """Of a hook of the user's."""


def hooked(folder, fails_at):
    calls = []

    def before_step(model):
        calls.append(1)
        if len(calls) - 1 == fails_at:
            raise Oops

    with new_run(folder, before_step=before_step) as run:
        while True:
            try:
                for _ in run.updates(epochs=2):
                    pass
                return run.digest()
            except Oops:
                pass


@pytest.mark.parametrize("world", [1, 2, 3])
def test_an_update_whose_hook_raised_is_made_again_from_the_same_buffers(ranks, tmp_path, world):
    straight = hooked(str(tmp_path / "straight"), None)
    assert ranks(world)(hooked, str(tmp_path / "fails"), 3) == [straight] * world


def test_an_update_that_is_refused_by_the_one_before_leaves_the_buffers():
    engine = new_engine(on_nonfinite="stop:1", report=lambda *event: None)
    engine.step(rows(8))
    buffers = [one.clone() for one in engine.model.buffers()]
    bad = rows(8)
    bad[0][0] = float("nan")
    engine.step(bad)
    with pytest.raises(NonFiniteError):
        engine.step(rows(8))
    assert all(torch.equal(one, before) for one, before in zip(engine.model.buffers(), buffers))
    engine.close()


def test_a_backward_without_its_apply_leaves_nothing():
    straight = new_engine()
    for seed in (0, 1):
        straight.step(rows(8, seed))
    engine = new_engine()
    engine.step(rows(8, 0))
    state = engine.state_dict()
    engine.backward(rows(8, 3))
    with pytest.raises(UsageError, match="half an update is no state"):
        engine.state_dict()
    engine.step(rows(8, 1))
    assert engine.digest() == straight.digest()
    engine.backward(rows(8, 3))
    engine.load_state_dict(state)
    with pytest.raises(UsageError, match=r"apply\(\) without a backward"):
        engine.apply()
    engine.step(rows(8, 1))
    assert engine.digest() == straight.digest()
    for one in (straight, engine):
        one.close()


def means(folder, back_at=None, stop=False):
    seen, numbers = [], []
    with new_run(folder) as run:
        for epoch in run.epochs(2):
            for update in epoch:
                numbers.append(update.number)
                if update.number == 0:
                    run.save("one")
                if update.number == back_at and numbers.count(back_at) == 1:
                    run.load("one")
                    if stop:
                        run.stop("enough")
            seen.append((epoch.number, epoch.updates, epoch.loss))
    return seen


def test_an_epoch_has_the_mean_of_its_own_updates_after_load_and_after_a_resume(tmp_path):
    straight = means(tmp_path / "straight")
    for back_at in (2, 3):
        assert means(tmp_path / f"{back_at}", back_at) == straight
    with pytest.raises(evener.Stopped):
        means(tmp_path / "stopped", 2, stop=True)
    assert means(tmp_path / "stopped") == straight


def test_an_epoch_counts_the_updates_of_other_loops_in_it(tmp_path):
    with new_run(tmp_path / "run") as run:
        losses = {0: [], 1: [], 2: []}
        for epoch in run.epochs(3):
            for update in epoch:
                losses[0].append(update.loss)
                if update.number == 1:
                    break
            break
        for update in run.updates(updates=6):
            losses[update.epoch].append(update.loss)
        for epoch in run.epochs(3):
            losses[epoch.number] += [update.loss for update in epoch]
            assert epoch.updates == len(losses[epoch.number]) == 4
            assert epoch.loss == pytest.approx(sum(losses[epoch.number]) / 4)


def test_a_loop_of_epochs_that_was_left_is_over(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    with new_run(tmp_path / "run") as run:
        for epoch in run.epochs(5):
            for update in epoch:
                if update.number == 2:
                    break
            break
        assert signal.getsignal(signal.SIGINT) is before and run.loop.ended
        del epoch
    assert (tmp_path / "run" / "finished").exists()


def test_a_batch_of_the_time_before_load_is_refused(tmp_path):
    with new_run(tmp_path / "run") as run:
        for batch in run.batches(epochs=1):
            if run.number == 1:
                run.save("one")
            if run.number == 2:
                run.load("one")
                with pytest.raises(UsageError, match="this batch is of the time before"):
                    run.step(batch)
                break
            run.step(batch)
