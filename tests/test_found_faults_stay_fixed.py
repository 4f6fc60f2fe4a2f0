"""Faults that somebody found by trying to break evener, each with the right value."""

from __future__ import annotations

import copy
import random
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.errors import ModelError, UsageError
from evener.run.words import contract_of
from tests.models import seeded

ROWS, BATCH = 45, 15


def columns(seed: int = 0):
    """Five float columns: a row of 20 bytes, so that slices start at addresses that are no multiple of 16."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, 5, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def row_mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(3, 100).t())  # a transposed parameter
        self.norm = nn.GroupNorm(2, 4)

    def forward(self, x):
        images = F.pad(x, (0, 45))[:, :50].reshape(-1, 2, 5, 5)
        return self.norm(self.conv(images)).flatten(1) @ self.turned


class Noisy(nn.Module):
    """Randomness of Python and numpy inside the forward."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, x):
        return self.net(x) * (1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand()))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
    "norms": lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
    "channels_last": ChannelsLast,
    "noisy": Noisy,
}


def exact_digest(kind, through_run, tmp):
    model = seeded(MODELS[kind])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if through_run:
        with evener.Run(
            model, optimizer, row_mean, columns(), global_batch_size=BATCH, exact=True, slice_size=3, precision="fp32",
            dir=f"{tmp}/{evener.world_size()}",
        ) as run:  # fmt: skip
            for _ in run.updates(epochs=2):
                pass
            return run.digest(), run.evaluate(columns(1), batch_size=7)["loss"]
    engine = evener.Engine(model, optimizer, row_mean, device="cpu", exact=True, slice_size=3, precision="fp32")
    x, y = columns()
    world, rank = evener.world_size(), evener.rank()
    start, stop = (3 * (part * 5 // world) for part in (rank, rank + 1))
    for k in range(3):
        offset = k * BATCH
        part = (x[offset + start : offset + stop], y[offset + start : offset + stop])
        engine.step(part if stop > start else None)
    digest = engine.digest()
    engine.close()
    return digest, None


@pytest.mark.parametrize("through_run", [True, False])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_exact_does_not_depend_on_where_a_slice_lies_in_memory(ranks, tmp_path, kind, through_run):
    results = {world: set(ranks(world)(exact_digest, kind, through_run, str(tmp_path))) for world in (1, 2, 3, 4, 6)}
    assert len(set.union(*results.values())) == 1, results


def by_hand(change):
    model = seeded(MODELS["mlp"])
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters() if change == "group" else model.parameters(), lr=0.1)
    x, y = columns()
    for k in range(6):
        if k == 3:
            late(change, model, optimizer)
        optimizer.zero_grad()
        row_mean(model, (x, y)).backward()
        optimizer.step()
    return model.state_dict()


def late(change, model, optimizer):
    model[0].requires_grad_(True)
    if change == "group":
        optimizer.add_param_group({"params": list(model[0].parameters())})


def by_engine(change):
    model = seeded(MODELS["mlp"])
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[2].parameters() if change == "group" else model.parameters(), lr=0.1)
    engine = evener.Engine(model, optimizer, row_mean, device="cpu", precision="fp32", report=lambda *event: None)
    x, y = columns()
    world, rank = evener.world_size(), evener.rank()
    mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
    for k in range(6):
        if k == 3:
            late(change, model, optimizer)
        engine.step((x[mine], y[mine]))
    engine.digest()  # ranks agree
    engine.close()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("change", ["unfreeze", "group"])
def test_parameters_that_join_later_are_reduced_and_cleared(ranks, change):
    expected = by_hand(change)
    for world in (1, 2, 3):
        for got in ranks(world)(by_engine, change):
            for name, tensor in expected.items():
                torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def run_of(tmp_path, model=None, optimizer=None, loss_fn=row_mean, **keywords):
    model = model if model is not None else seeded(MODELS["norms"])
    optimizer = optimizer if optimizer is not None else torch.optim.AdamW(model.parameters(), lr=0.01)
    keywords = {"global_batch_size": BATCH, "precision": "fp32", "dir": tmp_path / "run", "save_every": 1, **keywords}
    return evener.Run(model, optimizer, loss_fn, columns(), **keywords)


def half_done(tmp_path):
    run = run_of(tmp_path)
    for update in run.updates(epochs=2):
        if update.number == 2:
            run.stop()
            break
    run.save("aside")
    run.loop.save(run.number)
    run.loop.ended = False
    run.close()


def other_groups():
    model = seeded(MODELS["norms"])
    return model, torch.optim.AdamW([{"params": model[3].parameters()}, {"params": model[:3].parameters()}], lr=0.01)


def swapped():
    model = seeded(MODELS["norms"])
    return model, torch.optim.AdamW(list(model.parameters())[::-1], lr=0.01)


def frozen():
    model = seeded(MODELS["norms"])
    model[0].requires_grad_(False)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def double():
    model = seeded(MODELS["norms"]).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def another_buffer():
    model = seeded(MODELS["norms"])
    model.register_buffer("more", torch.zeros(2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (other_groups, "optimizer parameters"),
        (swapped, "optimizer parameters"),
        (frozen, "parameter 0.weight: (8, 5) float32, now (8, 5) float32, frozen"),
        (double, "parameter 0.weight: (8, 5) float32, now (8, 5) float64"),
        (another_buffer, "buffer more: None, now (2,) float32"),
    ],
)
def test_a_changed_training_starts_a_new_directory_and_says_why(tmp_path, capsys, build, said):
    half_done(tmp_path)
    model, optimizer = build()
    with run_of(tmp_path, model, optimizer) as run:
        assert Path(run.dir).name == "run-2" and run.number == 0
    assert said in capsys.readouterr().out


def test_another_schedule_is_another_training(tmp_path, capsys):
    def with_steps(size, folder):
        model = seeded(MODELS["mlp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return run_of(folder, model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, size))

    with with_steps(2, tmp_path) as run:
        next(run.updates(epochs=2))
        run.loop.save(run.number)
        run.loop.ended = False
    with with_steps(3, tmp_path) as run:
        assert Path(run.dir).name == "run-2"
    assert "'step_size': 2" in capsys.readouterr().out


def test_state_of_other_groups_is_refused_by_the_engine():
    model, optimizer = other_groups()
    engine = evener.Engine(model, optimizer, row_mean, device="cpu", precision="fp32", coupled=False)
    engine.step(columns())
    state = engine.state_dict()
    other = seeded(MODELS["norms"])
    engine = evener.Engine(
        other, torch.optim.AdamW(other.parameters()), row_mean, device="cpu", precision="fp32", coupled=False
    )
    with pytest.raises(UsageError, match="optimizer groups hold other parameters"):
        engine.load_state_dict(state)


def test_every_fold_of_a_loop_trains(tmp_path):
    made = []
    for _ in range(3):
        run = run_of(tmp_path)  # never closed
        made.append(len(list(run.updates(epochs=2))))
    assert made == [6, 6, 6]


def test_a_loop_that_was_left_by_break_is_finished(tmp_path):
    names = []
    for _ in range(2):
        with run_of(tmp_path) as run:
            for update in run.updates(epochs=4):
                if update.number == 2:
                    break
            names.append((Path(run.dir).name, run.number))
    assert names == [("run", 3), ("run-2", 3)]


class Replacing(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(5, 3)
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("late", None)

    def forward(self, x):
        out = self.net(x)
        if not self.training:
            self.last = out.detach().mean(0)
            self.late = torch.ones(1)
        return out


def test_evaluate_puts_replaced_buffers_back(tmp_path):
    model = Replacing()
    with run_of(tmp_path, model) as run:
        next(run.updates(epochs=1))
        before = run.digest()
        run.evaluate(columns())
        assert run.digest() == before and model.late is None and torch.equal(model.last, torch.zeros(3))


def test_a_caught_error_of_loss_fn_loses_no_batch_and_no_statistics(tmp_path):
    calls = []

    def failing(model, batch):
        loss = row_mean(model, batch)
        calls.append(len(batch[1]))
        if len(calls) == 2:
            raise ValueError("unlucky")
        return loss

    model = seeded(MODELS["norms"])
    with run_of(tmp_path, model, loss_fn=failing, slice_size=BATCH) as run:
        numbers = []
        for _ in range(2):
            statistics = None
            try:
                for update in run.updates(epochs=1):
                    numbers.append(update.number)
                    statistics = copy.deepcopy(dict(model.named_buffers()))
            except ValueError:
                assert all(torch.equal(value, statistics[name]) for name, value in model.named_buffers())
        assert numbers == [0, 1, 2]


def test_names_are_words(tmp_path):
    with run_of(tmp_path) as run:
        with pytest.raises(UsageError, match="checkpoints of your own have names"):
            run.save(100)
        with pytest.raises(UsageError, match="cannot be the name of a checkpoint"):
            run.save("update-3")


def test_buffers_that_are_not_persistent_are_resumed(tmp_path):
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(5, 3)
            self.register_buffer("average", torch.zeros(3), persistent=False)

        def forward(self, x):
            out = self.net(x)
            if self.training:
                self.average.mul_(0.9).add_(out.detach().mean(0), alpha=0.1)
            return out

    model = seeded(Hidden)
    with run_of(tmp_path, model) as run:
        list(run.updates(updates=2))
        expected = model.average.clone()
        run.loop.ended = False
    again = seeded(Hidden)
    with run_of(tmp_path, again) as run:
        assert run.number == 2 and torch.equal(again.average, expected)


def test_layers_that_cannot_keep_the_promise_are_refused():
    sparse = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(15, 3))
    with pytest.raises(ModelError, match="makes sparse gradients"):
        evener.Engine(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1), row_mean, device="cpu")
    bounded = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Flatten(), nn.Linear(15, 3))
    with pytest.raises(ModelError, match="rewrites its weights in the forward"):
        evener.Engine(
            bounded, torch.optim.SGD(bounded.parameters(), lr=0.1), row_mean, device="cpu", exact=True, slice_size=2
        )


def closed_and_opened_again():
    digests = []
    for _ in range(3):
        model = seeded(MODELS["mlp"])
        engine = evener.Engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), row_mean, device="cpu", precision="fp32"
        )
        engine.step(columns())
        digests.append(engine.digest())
        engine.close()
    return digests


def test_one_engine_after_another(ranks):
    for world in (1, 3):
        for digests in ranks(world)(closed_and_opened_again):
            assert len(set(digests)) == 1


def said(folder, size, microbatch_size):
    model = seeded(lambda: nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {"global_batch_size": size, "microbatch_size": microbatch_size, "precision": "fp32", "dir": folder}
    with evener.Run(model, optimizer, row_mean, columns(), **keywords) as run:
        return contract_of(run.config, run.engine, ROWS).split(" · ")[0]


def test_the_contract_line_holds_the_fullest_rank_whichever_it_is(ranks, tmp_path):
    """It took the largest piece of the first rank with the most pieces: 3 ranks x up to 10 for a batch of 32."""
    for size, microbatch_size, line in (
        (32, None, "global batch 32 = 3 ranks x 1 microbatch x up to 11"),
        (20, None, "global batch 20 = 3 ranks x 1 microbatch x up to 7"),
        (32, 10, "global batch 32 = 3 ranks x up to 2 microbatches x up to 10"),
    ):
        assert ranks(3)(said, str(tmp_path / f"{size}-{microbatch_size}"), size, microbatch_size) == [line] * 3
