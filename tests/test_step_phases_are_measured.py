"""Every run says where its step's time goes, on every rank, and the parts add up to what the clock said."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.report.events import read_events
from evener.run.phases import PHASES, DevicePhases, phases_of


class SlowRows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((4,), float(index)), torch.tensor(1.0)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.03)
        return gradient


class SlowSGD(torch.optim.SGD):
    def step(self, *args, **kwargs):
        time.sleep(0.01)
        return super().step(*args, **kwargs)


def loss_fn(model, batch):
    x, y = batch
    time.sleep(0.02)
    return F.mse_loss(SlowBackward.apply(model(x)).squeeze(1), y)


def train(folder, forward_sleep=0.0):
    def loss(model, batch):
        time.sleep(forward_sleep)
        return loss_fn(model, batch)

    model = nn.Linear(4, 1)
    run = evener.Run(
        model, SlowSGD(model.parameters(), lr=1e-3), loss, SlowRows(), global_batch_size=4, dir=folder, save_every=None
    )
    for _ in run.updates(updates=4):
        time.sleep(0.015)
    run.close()
    return run.path


def total(path):
    """The sums of all `phases` events of one file: (updates, seconds, split), and the last of them."""
    found = [event for event in read_events(path) if event["kind"] == "phases"]
    assert all(event["updates"] == event["measured_updates"] and set(event["split"]) == set(PHASES) for event in found)
    split = {name: sum(event["split"][name] for event in found) for name in PHASES}
    return sum(event["updates"] for event in found), sum(event["seconds"] for event in found), split, found[-1]


def test_time_is_booked_where_it_was_spent(tmp_path):
    updates, seconds, split, event = total(train(tmp_path / "run") / "events.jsonl")
    assert updates == 4 and event["rank"] == 0
    assert sum(split.values()) == pytest.approx(seconds, abs=1e-3)  # nothing counted twice, nothing lost
    # What slept is a floor (rows may be read side by side); a loaded machine only adds to it.
    floors = {"data_wait": 0.04, "forward": 0.08, "backward": 0.12, "optimizer": 0.04, "body": 0.045}
    for name, floor in floors.items():
        assert split[name] >= floor, (name, split)
    assert split["host_to_device"] == 0.0, "a CPU copies nothing to itself"
    assert event["memory_bytes"] > 50 << 20


def _slow_rank(folder):
    return str(train(folder, forward_sleep=0.3 if evener.rank() == 1 else 0.0))


def test_each_rank_leaves_its_own_times(ranks, tmp_path):
    ranks(2)(_slow_rank, str(tmp_path / "run"))
    (_, _, fast, zero), (_, _, slow, one) = (
        total(tmp_path / "run" / name) for name in ("events.jsonl", "events-rank1.jsonl")
    )
    assert (zero["rank"], one["rank"]) == (0, 1)
    # What slept is a floor; who waited for whom in the rest of the time, the machine's load decides too.
    assert slow["forward"] > 1.2 and fast["forward"] > 0.08 and fast["reduction"] > 0 and slow["reduction"] > 0


class Marks:
    """Stands in for CUDA's events: times are put in by hand, and passed ones are those up to `now`."""

    def __init__(self):
        self.times, self.now = [], float("inf")

    def __call__(self):
        marks, time_ms = self, self.times.pop(0)

        class Event:
            at = time_ms

            def query(self):
                return self.at <= marks.now

            def elapsed_time(self, later):
                return later.at - self.at

        return Event()


def test_device_marks_are_read_only_when_they_have_passed():
    marks = Marks()
    phases = DevicePhases(marks)
    marks.times = [0.0, 40.0, 41.0, 50.0, 60.0, 90.0, 94.0, 100.0]
    phases.lap("optimizer")  # the end of an update: the next one is marked
    for name in ("", "host_to_device", "", "forward", "backward", "reduction", "optimizer"):
        phases.lap(name)
    phases.lap("")  # not due: marks nothing, or the list above would be empty
    marks.now = 99.0
    assert phases.take(0.6, 0.5, 0.1, 10) is None
    marks.now = 100.0
    split, updates = phases.take(0.3, 0.5, 0.1, 10)
    expected = {"host_to_device": 1, "forward": 10, "backward": 30, "reduction": 4, "optimizer": 6}
    # idle for 49 ms, of which the host waited 30 for rows, and was 10 in the body
    expected |= {"data_wait": 30, "body": 10, "other": 9}
    assert updates == 1 and {name: round(1000 * value) for name, value in split.items()} == expected
    assert phases.take(0.0, 0.0, 0.0, 1) is None


def test_a_device_without_such_marks_says_nothing():
    assert phases_of(torch.device("mps")) is None


def test_tokens_a_second_are_said_where_the_loss_counts_them(tmp_path):
    data = torch.randn(32, 4)
    model = nn.Linear(4, 1)

    def tokens(model, batch):
        return evener.Mean(total=model(batch).square().sum(), count=10 * len(batch))

    run = evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), tokens, data, global_batch_size=8, dir=tmp_path
    )
    for _ in run.updates(updates=3):
        pass
    run.close()
    points = [event for event in read_events(run.path / "events.jsonl") if event["kind"] == "update"]
    assert points
    for point in points:
        assert point["count_per_second"] == pytest.approx(10 * point["rows_per_second"])
