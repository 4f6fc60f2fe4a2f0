"""`run.load(name)` puts everything back: what follows is a straight run's, and a restart goes on from there."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from torch import nn

import evener
from evener.checkpoint import Checkpoints
from tests.models import make, mlp_rows, row_loss


class Averaging(nn.Module):
    """A buffer that no state_dict holds moves with every training forward, from update `begins` on."""

    def __init__(self, begins: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.forwards, self.begins = nn.Linear(5, 3), 0, 4 * begins  # 4 pieces each
        self.register_buffer("average", torch.zeros(3), persistent=False)
        self.register_buffer("scale", torch.ones(1).expand(3), persistent=False)  # cannot be written in place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.training:
            self.forwards += 1
            if self.forwards > self.begins:
                self.average.mul_(0.5).add_(0.5 * y.detach().mean(0))
        return (y - self.average) * self.scale


def new(folder, model=None, **more):
    model = model or make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    how = {"global_batch_size": 4, "microbatch_size": 4, "precision": "fp32", "exact": True, "dir": folder, **more}
    return evener.Run(model, optimizer, row_loss, mlp_rows(16), **how)


def played(run, load_at=None):
    """(learning rate per update, digest) of 8 updates; "start", saved before, is loaded in the body of `load_at`."""
    rates, loaded = {}, load_at is None
    run.save("start")
    for update in run.updates(updates=8):
        rates[update.number] = update.lr
        if update.number == load_at and not loaded:
            loaded = True
            run.load("start")
    return rates, run.digest()


def warm_up(optimizer, total):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / total)


def test_a_schedule_of_the_total_is_made_anew_after_a_load_of_before_it(tmp_path):
    with new(tmp_path / "straight", scheduler=warm_up) as run:
        straight = played(run)
    assert straight[0] == pytest.approx({number: 0.05 * (number + 1) / 8 for number in range(8)})
    with new(tmp_path / "loaded", scheduler=warm_up) as run:
        assert played(run, load_at=3) == straight
        # Between loops it is made with the length of the next one.
        run.load("start")
        assert run.scheduler is None
        rates = [update.lr for update in run.updates(updates=4)]
        assert rates == pytest.approx([0.0125, 0.025, 0.0375, 0.05])
        run.save("made")
        made = run.scheduler
        run.load("made")
        assert run.scheduler is made and run.engine.targets[""].schedule.made["kind"] == "LambdaLR"


@pytest.mark.parametrize("begins", [0, 3])
def test_buffers_that_no_state_dict_holds_go_back_too(tmp_path, begins):
    """Saved before anybody knows which change; and one that begins to change when others are known (update 3)."""
    with new(tmp_path / "straight", model=Averaging(begins)) as run:
        straight = played(run)
    model = Averaging(begins)
    with new(tmp_path / "loaded", model=model) as run:
        run.save("start")
        first = model.average.clone()
        for number, update in enumerate(run.updates(updates=8), 1):
            if begins and update.number == 1:
                run.save("start")
            if number == 6:
                assert not torch.equal(model.average, first)
                run.load("start")
                assert torch.equal(model.average, first)
                model.forwards = 4 * run.number
        assert run.digest() == straight[1]


def test_a_restart_goes_on_with_what_followed_the_load(tmp_path):
    run, seen = new(tmp_path / "run", save_every=1, keep_checkpoints=2), []
    with pytest.raises(evener.Stopped):
        for update in run.updates(epochs=5):
            seen.append(update.number)
            if update.number == 2:
                run.save("good")  # of update 3
            if update.number == 8 and seen.count(8) == 1:
                run.load("good")
                # Nothing has taken their place yet: they stay.
                assert {"update-7", "update-8"} <= set(os.listdir(run.path / "checkpoints"))
                run.optimizer.param_groups[0]["lr"] = 0.001
            if seen.count(4) == 2:
                run.stop("enough")
                digest = run.digest()
    run.close()
    assert sorted(os.listdir(run.path / "checkpoints")) == ["good", "update-4", "update-5"]
    with new(tmp_path / "run", save_every=1, keep_checkpoints=2) as again:
        assert (again.path, again.number, again.digest()) == (run.path, 5, digest)
        assert again.optimizer.param_groups[0]["lr"] == 0.001


def test_periods_count_from_the_update_that_load_went_back_to(tmp_path):
    saved, seen = [], []
    with new(tmp_path / "run", save_every=2, keep_checkpoints=9) as run:
        write = run.saving.write
        run.saving.write = lambda name, *given, **how: (saved.append(name), write(name, *given, **how))
        for update in run.updates(updates=10):
            seen.append(update.number)
            if update.number == 1:
                run.save("good")
            if update.number == 8 and seen.count(8) == 1:
                run.load("good")
    assert saved == ["good", 2, 4, 6, 8, 4, 6, 8, 10, 10]


def state(value: int) -> dict[str, object]:
    return {"w": torch.full((2,), float(value))}


def test_what_was_abandoned_is_no_fallback(tmp_path):
    """Killed before the abandoned ones were removed, a restart still tells them from what was written later."""
    points = Checkpoints(tmp_path, keep=5)
    for number in (1, 2, 5, 8):
        points.save(number, state(number), {})
    shutil.copytree(tmp_path, kept := tmp_path.with_name("kept"))
    points.reached = 1  # what `load` says
    assert points.newest() == (tmp_path / "update-8", [])
    points.begin(3, state(30), {})
    assert points.behind.outcome(wait=True) == []
    assert sorted(os.listdir(tmp_path)) == ["update-1", "update-3"]  # 2 is beyond what was gone back to
    for name in ("update-5", "update-8"):  # as a kill right after the renaming leaves it
        shutil.copytree(kept / name, tmp_path / name)
    again = Checkpoints(tmp_path, keep=5)
    assert again.newest() == (tmp_path / "update-3", [])
    os.truncate(tmp_path / "update-3" / "tensors-00001.safetensors", 1)
    path, notes = again.newest()
    assert path == tmp_path / "update-1" and "update-3 is refused" in notes[0]
    again.reached = 1
    again.save("best", state(1), {})  # a named one removes nothing
    assert len(os.listdir(tmp_path)) == 5
    again.save(4, state(4), {})
    assert sorted(os.listdir(tmp_path)) == ["best", "update-1", "update-4"]
    assert Checkpoints(tmp_path, keep=5).newest() == (tmp_path / "update-4", [])


def test_after_a_failed_write_the_next_one_puts_an_end_to_the_same(tmp_path, monkeypatch):
    points = Checkpoints(tmp_path, keep=5)
    for number in (1, 3, 6):
        points.save(number, state(number), {})
    points.reached = 1
    with monkeypatch.context() as patch, pytest.raises(evener.EvenerError):
        patch.setattr(os, "fsync", full)
        points.save(4, state(4), {})
    assert sorted(os.listdir(tmp_path)) == ["update-1", "update-3", "update-6"]
    points.save(5, state(5), {})
    assert sorted(os.listdir(tmp_path)) == ["update-1", "update-5"]


def full(descriptor: int) -> None:
    raise OSError(28, "No space left on device")
