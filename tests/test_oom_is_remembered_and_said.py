"""After an out-of-memory error: the cut is remembered per shape, grows back after a calm, and everything is said."""

from __future__ import annotations

import json
import random
from unittest import mock

import pytest
import torch

import evener
from evener.engine import Engine
from evener.engine.oom import PROVEN
from evener.errors import LessonError, MemoryLimitError
from tests.models import make, mlp_rows, row_loss, token_loss, token_rows
from tests.test_call_counts import Synchronisations


class Memory:
    """A loss that fits so many rows; it notes how many it was given."""

    def __init__(self, rows, loss=row_loss):
        self.fits, self.loss, self.seen = rows, loss, []

    def __call__(self, model, batch):
        rows = len(batch[0])
        self.seen.append(rows)
        if rows * batch[0][0].numel() > self.fits * 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.loss(model, batch)

    def taken(self):
        seen, self.seen = self.seen, []
        return seen


def engine_for(loss, events=None, **keywords):
    model = make("mlp")
    report = (lambda *event: None) if events is None else (lambda *event: events.append(event))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Engine(model, optimizer, loss, device="cpu", precision="fp32", report=report, **keywords)


def test_it_is_halved_until_it_fits_and_stays_so():
    loss = Memory(3)
    engine = engine_for(loss)
    assert engine.step(mlp_rows(12)).microbatches == 4
    assert loss.taken() == [12, 6, 3, 3, 3, 3]
    engine.step(mlp_rows(12))
    assert loss.taken() == [3, 3, 3, 3]
    engine.step(mlp_rows(2))  # the end of an epoch
    assert loss.taken() == [2]


def test_another_shape_has_its_own_size():
    loss = Memory(6)

    def summed(model, batch):  # rows of any width
        return row_loss(model, (batch[0].reshape(len(batch[0]), -1, 5).mean(1), batch[1]))

    loss.loss = summed
    engine = engine_for(loss)
    engine.step(mlp_rows(12))
    assert loss.taken() == [12, 6, 6]
    x, y = mlp_rows(12)
    engine.step((x.repeat(1, 3), y))
    assert loss.taken() == [6, 3, 2, 2, 2, 2, 2, 2]
    engine.step(mlp_rows(12))
    assert loss.taken() == [6, 6]  # what the wide rows needed is not asked of the narrow ones


def test_after_a_calm_it_grows_back_and_a_failure_makes_the_next_calm_longer():
    events = []
    loss = Memory(3)
    engine = engine_for(loss, events)
    engine.ladder.calm = 4
    for _ in range(4):
        engine.step(mlp_rows(12))
    assert loss.taken() == [12, 6, *[3] * 16]
    engine.step(mlp_rows(12))
    assert loss.taken() == [6, 3, 3, 3, 3]
    loss.fits = 100
    sizes = [engine.step(mlp_rows(12)).microbatches for _ in range(17)]
    assert sizes == [4] * 7 + [2] * 8 + [1] * 2  # twice as long, now
    told = [(kind, update, fields["microbatch_size"]) for kind, update, fields in events]
    assert told == [("oom", 0, 6), ("oom", 0, 3), ("grow", 4, 6), ("oom", 4, 3), ("grow", 12, 6), ("grow", 20, None)]


def test_a_run_says_it_in_an_event_and_in_the_contract_line(tmp_path, capsys):
    model, loss = make("mlp"), Memory(2)
    with evener.Run(
        model, torch.optim.AdamW(model.parameters()), loss, mlp_rows(24), global_batch_size=8, precision="fp32",
        dir=tmp_path / "run", save_every=None,
    ) as run:  # fmt: skip
        for _ in run.updates(updates=2):
            pass
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    splits = [event for event in events if event["kind"] == "oom"]
    assert [event["microbatch_size"] for event in splits] == [4, 2]
    assert all(event["update"] == 0 and event["ranks"] == [0] and event["phase"] == "forward" for event in splits)
    lines = [event["line"].split(" · ")[0] for event in events if event["kind"] == "contract"]
    assert lines == [f"global batch 8 = 1 rank x {n} microbatch{'es' if n > 1 else ''} x {8 // n}" for n in (1, 2, 4)]
    shown = capsys.readouterr().out
    assert "update 0: out of memory in the forward on rank 0; made again, microbatches of 4 rows" in shown
    assert "global batch 8 = 1 rank x 4 microbatches x 2" in shown


def refused(engine, batch):
    with pytest.raises(MemoryLimitError) as caught:
        engine.step(batch)
    assert caught.value.exit_code == 67
    return str(caught.value)


def test_one_row_that_does_not_fit_is_the_end():
    events = []
    loss = Memory(0)
    text = refused(engine_for(loss, events), mlp_rows(4))
    assert loss.taken() == [4, 2, 1, 1]  # once more, with all cached memory freed
    assert text.startswith("Out of memory in the forward of 1 row.\n  CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert "a single row does not fit" in text and 'fix: activation_checkpointing="full"' in text
    assert 'strategy="fsdp"' in text


def test_a_slice_is_never_cut():
    loss = Memory(0, token_loss)
    model = make()
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, device="cpu", precision="fp32", exact=True,
        slice_size=4, report=lambda *event: None,
    )  # fmt: skip
    try:
        text = refused(engine, token_rows(8))
    finally:
        engine.close()
    assert loss.taken() == [4, 4]
    assert "a slice is computed alone, whatever fits" in text
    assert "slice_size=2: another slice is another result with dropout or BatchNorm" in text


def test_a_slice_of_one_row_is_not_advised_to_be_cut():
    model = make()
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), Memory(0, token_loss), device="cpu", precision="fp32",
        exact=True, slice_size=1, report=lambda *event: None,
    )  # fmt: skip
    try:
        text = refused(engine, token_rows(2))
    finally:
        engine.close()
    assert text.startswith("Out of memory in the forward of 1 row.")
    assert "a slice is computed alone" in text and "microbatch_size" not in text and "slice_size=" not in text


def test_out_of_memory_in_before_step_is_said_to_be_there():
    events, calls = [], []

    def before_step(model):
        calls.append(1)
        if len(calls) in (1, 4):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine = engine_for(row_loss, events, before_step=before_step)
    engine.step(mlp_rows(8))  # made again: what it changes is kept until the optimizer has stepped
    assert [fields["phase"] for kind, _, fields in events if kind == "oom"] == ["before_step"]
    engine.step(mlp_rows(8))
    with pytest.raises(LessonError) as caught:
        engine.step(mlp_rows(8))
    text = str(caught.value)
    assert text.startswith("Out of memory in before_step.\n")
    assert "before_step may have changed a part of the gradients already" in text
    assert "optimizer had" not in text and "microbatch_size=4" in text


def test_out_of_memory_in_the_schedule_is_said_to_be_there():
    class Schedule:
        def step(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    engine = engine_for(row_loss, scheduler=Schedule())
    engine.step(mlp_rows(8))
    with pytest.raises(MemoryLimitError) as caught:
        engine.step(mlp_rows(8))
    text = str(caught.value)
    assert text.startswith("Out of memory in the schedule's step.\n  CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert "may have been stepped already" in text and "newest checkpoint" in text


def test_batchnorm_that_sees_whole_microbatches_is_not_cut():
    loss = Memory(0, token_loss)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(model, optimizer, loss, device="cpu", precision="fp32", coupled=False, report=lambda *event: None)
    text = refused(engine, token_rows(8))
    assert loss.taken() == [8, 8]
    assert "BatchNorm would see fewer rows" in text and "microbatch_size=4 in the script, knowing that" in text


def test_what_is_no_batch_of_rows_is_not_cut():
    """Images in a list: rows are its items, not the first dimension of each of them."""
    seen = []

    def loss_fn(model, batch):
        seen.append(len(batch["x"]))
        if len(seen) < 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return row_loss(model, (torch.stack(batch["x"])[:, 0], batch["y"]))[0]

    engine = engine_for(loss_fn)
    batch = {"x": [torch.randn(3, 5) for _ in range(3)], "y": torch.zeros(3, dtype=torch.int64)}
    text = refused_parts(engine, [(0, 3, batch)], 3)
    assert seen == [3, 3] and "need split=f(batch, start, stop)" in text


def refused_parts(engine, parts, rows):
    with pytest.raises(MemoryLimitError) as caught:
        engine.step_parts(parts, rows)
    return str(caught.value)


def test_other_errors_are_no_lack_of_memory():
    def loss_fn(model, batch):
        return model(batch[0] @ torch.ones(7, 2)).mean()

    engine = engine_for(loss_fn)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes"):
        engine.step(mlp_rows(4))


def test_the_host_running_out_of_memory_counts_too():
    """What torch raises on the CPU is no OutOfMemoryError."""

    def loss_fn(model, batch):
        if len(batch[0]) > 2:
            torch.empty(1 << 46)
        return row_loss(model, batch)

    assert engine_for(loss_fn).step(mlp_rows(8)).microbatches == 4


# ------------------------------------------------------------------------------------------- several ranks, no cost


def collectives(updates):
    """(collectives, what the host waits for) in each update, and whether the cut is proven at the end."""
    model = make("mlp")
    engine = Engine(
        model, torch.optim.AdamW(model.parameters()), row_loss, device="cpu", precision="fp32", microbatch_size=2,
        report=lambda *event: None,
    )  # fmt: skip
    counts = []
    for k in range(updates):
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profile, Synchronisations() as waits:
            engine.step(mlp_rows(4, seed=k))
        counts.append((sum(event.name.startswith("gloo:") for event in profile.events()), sum(waits.seen.values())))
    trust = engine.targets[""].trust
    engine.close()
    return counts, trust == PROVEN


def test_a_proven_cut_costs_no_collective_and_no_wait(ranks):
    for counts, proven in ranks(2)(collectives, 5):
        assert proven
        # The first agrees on what there is, and votes; the second votes; then there are the sums and one bucket.
        assert counts[1][0] == 3 and counts[2:] == [(2, 0)] * 3, counts


def remembered(fits, updates):
    """Uneven ranks: only the last has too little memory; all take its cut."""
    loss = Memory(fits if evener.rank() == evener.world_size() - 1 else 100)
    events = []
    engine = engine_for(loss, events)
    cuts = []
    for k in range(updates):
        engine.step(mlp_rows(8, seed=k))
        cuts.append(loss.taken())
    engine.close()
    return cuts, [(fields["ranks"], fields["microbatch_size"]) for kind, _, fields in events if kind == "oom"]


def test_all_ranks_take_the_smallest_cut(ranks):
    for cuts, events in ranks(3)(remembered, 4, 3):
        assert cuts == [[8, 4, 4], [4, 4], [4, 4]]
        assert events == [([2], 4)]


def test_the_end_is_the_end_on_all_ranks(ranks):
    from tests.pool import RankFailed

    with pytest.raises(RankFailed) as caught:
        ranks(2)(remembered, 0, 1)
    text = str(caught.value)
    assert text.count("Out of memory in the forward of 1 row on rank 1.") >= 2
    assert "rank 1 has the error's own words" in text


def test_drawn_limits_give_the_same_update(test_seed):
    """Whatever fits: the update is the same within rounding."""
    draw = random.Random(test_seed)
    whole = engine_for(Memory(100))
    whole.step(mlp_rows(11))
    for fits in draw.sample(range(1, 11), 3):
        engine = engine_for(Memory(fits))
        update = engine.step(mlp_rows(11))
        assert update.rows == 11
        for one, other in zip(engine.model.parameters(), whole.model.parameters()):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def tight(updates):
    """Whether the cut is proven after each update on a device that never has room to spare."""
    with mock.patch("evener.engine.oom._is_tight", lambda device: evener.rank() == 1):
        engine = engine_for(Memory(100))
        proven = []
        for k in range(updates):
            engine.step(mlp_rows(4, seed=k))
            proven.append(engine.targets[""].trust == PROVEN)
        engine.close()
    return proven


def test_without_headroom_on_some_rank_it_takes_longer_to_prove(ranks):
    assert ranks(2)(tight, 10) == [[False] * 8 + [True] * 2] * 2
