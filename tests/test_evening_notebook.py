"""Runs that begin, end and begin again in one process: cells, folds, functions, exceptions, breaks."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evener
from evener.errors import UsageError
from tests.models import make, mlp_rows, row_loss, token_loss, token_rows

FINISHED = "finished"


def new_run(folder, model=None, optimizer=None, **keywords):
    model = model if model is not None else make("mlp")
    optimizer = optimizer if optimizer is not None else torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": 8, "precision": "fp32", "dir": folder, **keywords}
    return evener.Run(model, optimizer, row_loss, mlp_rows(20), **keywords)


def numbers(run, updates=4):
    return [update.number for update in run.updates(updates=updates)]


@pytest.mark.parametrize("close", [True, False])
def test_folds_of_one_script_do_not_continue_each_other(tmp_path, close):
    kept, names = [], []
    for _ in range(3):
        run = new_run(tmp_path / "fold")
        assert numbers(run) == [0, 1, 2, 3]
        names.append(run.path.name)
        if close:
            run.close()
        kept.append(run)
    assert names == ["fold", "fold-2", "fold-3"]
    for run in kept:
        run.close()
    assert all((tmp_path / name / FINISHED).exists() for name in names)


def test_an_old_error_in_a_notebook_does_not_make_a_finished_run_unfinished(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_value", ValueError("a typo, three cells ago"), raising=False)
    for name in ("run", "run-2"):
        with new_run(tmp_path / "run") as run:
            assert numbers(run) == [0, 1, 2, 3] and run.path.name == name
        assert (tmp_path / name / FINISHED).exists()


def test_an_error_after_the_loop_leaves_the_run_to_be_continued(tmp_path, monkeypatch):
    run = new_run(tmp_path / "run")
    numbers(run)
    monkeypatch.setattr(sys, "last_value", ValueError("in the line after the loop"), raising=False)
    run.close()
    assert not (tmp_path / "run" / FINISHED).exists()


def cell(model, optimizer, folder, **keywords):
    run = new_run(folder, model, optimizer, **keywords)
    for _ in run.updates(updates=4):
        pass
    return run


def bits(model, optimizer):
    values = [*model.state_dict().values()]
    for state in optimizer.state_dict()["state"].values():
        values += [v.float().reshape(-1) for v in state.values() if isinstance(v, torch.Tensor)]
    return [v.clone() for v in values]


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_cell_run_twice_trains_as_two_processes_would(ranks, tmp_path, close, exact, kind):
    keywords = {"exact": True, "slice_size": 2} if exact else {}
    model = make("mlp")
    optimizer = kind(model.parameters(), lr=1e-2)
    runs = []
    for _ in range(2):
        runs.append(cell(model, optimizer, tmp_path / "run", **keywords))
        if close:
            runs[-1].close()
    again = make("mlp")
    second = kind(again.parameters(), lr=1e-2)
    cell(again, second, tmp_path / "first", **keywords).close()
    fresh = make("mlp")
    fresh.load_state_dict(again.state_dict())
    third = kind(fresh.parameters(), lr=1e-2)
    third.load_state_dict(second.state_dict())
    cell(fresh, third, tmp_path / "second", **keywords).close()
    assert all(torch.equal(a, b) for a, b in zip(bits(model, optimizer), bits(fresh, third)))
    for run in runs:
        run.close()


def test_the_process_is_left_as_it_was(tmp_path):
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with new_run(tmp_path / "run", exact=True, slice_size=2) as run:
        numbers(run)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, deterministic)


def test_settings_that_are_half_as_exact_mode_wants_them_are_all_held_and_put_back(tmp_path):
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    try:
        with new_run(tmp_path / "run", exact=True, slice_size=2) as run:
            numbers(run, 1)
            held = (torch.backends.cudnn.benchmark, torch.is_deterministic_algorithms_warn_only_enabled())
        left = (torch.backends.cudnn.benchmark, torch.is_deterministic_algorithms_warn_only_enabled())
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.benchmark = benchmark
    assert (held, left) == ((False, False), (True, True))


def test_the_process_is_left_as_it_was_by_a_run_that_could_not_start(tmp_path):
    with new_run(tmp_path / "run") as run:
        numbers(run)
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.raises(UsageError, match="is a finished run"):
        new_run(tmp_path / "run", exact=True, slice_size=2, resume="must")
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (threads, deterministic)


def test_two_exact_runs_side_by_side(tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        first = new_run(tmp_path / "a", exact=True, slice_size=2)
        second = new_run(tmp_path / "b", exact=True, slice_size=2)
        first.close()
        pinned = torch.get_num_threads() == 1 and torch.are_deterministic_algorithms_enabled()
        second.close()
        restored = torch.get_num_threads() == 2 and not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(False)
    assert pinned and restored


def test_frozen_statistics_thaw_with_the_next_run(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    with new_run(tmp_path / "a", model, batchnorm="frozen") as run:
        numbers(run)
    assert int(model[1].num_batches_tracked) == 0
    model.train()
    with new_run(tmp_path / "b", model) as run:
        numbers(run)
    assert int(model[1].num_batches_tracked) == 4


def test_an_exact_run_leaves_the_choice_of_kernels_open(tmp_path):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cell(model, optimizer, tmp_path / "a", exact=True, slice_size=2).close()
    run = cell(model, optimizer, tmp_path / "b")
    skips = next(iter(run.engine.targets.values())).skips_on_device
    run.close()
    assert skips


def test_a_run_of_a_function_is_collected_with_its_model(tmp_path):
    def train(close):
        run = new_run(tmp_path / "run", ema=0.9, num_workers=0)
        numbers(run)
        if close:
            run.close()
        return weakref.ref(run), weakref.ref(run.model), weakref.ref(run.ema)

    for close in (True, False):
        references = train(close)
        gc.collect()
        assert [one() for one in references] == [None] * 3
    assert (tmp_path / "run" / FINISHED).exists() and (tmp_path / "run-2" / FINISHED).exists()


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    alone = []
    for name in ("a", "b"):
        with new_run(tmp_path / name, seed=len(alone)) as run:
            numbers(run)
            alone.append(run.digest())
    one, two = (new_run(tmp_path / name, seed=seed, resume="never") for seed, name in enumerate("ab"))
    for _ in zip(one.updates(updates=4), two.updates(updates=4)):
        one.evaluate(mlp_rows(5))
    list(one.updates(updates=4)), list(two.updates(updates=4))
    assert [one.digest(), two.digest()] == alone
    one.close(), two.close()


def test_an_exception_in_the_body_leaves_a_run_that_is_continued(tmp_path):
    with pytest.raises(RuntimeError, match="in the body"), new_run(tmp_path / "run", save_every=2) as run:
        for update in run.updates(updates=6):
            if update.number == 4:
                raise RuntimeError("in the body")
    assert not (tmp_path / "run" / FINISHED).exists()
    with new_run(tmp_path / "run", save_every=2, resume="must") as run:
        assert run.number == 4 and numbers(run, 6) == [4, 5]
    assert (tmp_path / "run" / FINISHED).exists()


def test_break_leaves_the_loop_and_the_next_loop_goes_on(tmp_path):
    with new_run(tmp_path / "run", save_every=2) as run:
        for update in run.updates(updates=6):
            if update.number == 4:
                break
        assert run.number == 5
        assert numbers(run, 6) == [5]
        for epoch in run.epochs(4):
            for _update in epoch:
                break  # the rest of the epoch is still trained
        assert run.number == 12


def test_a_closed_run_says_so(tmp_path):
    run = new_run(tmp_path / "run")
    numbers(run)
    run.close()
    run.close()
    with pytest.raises(UsageError, match="this run is closed"):
        numbers(run, 8)


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def keeping(folder):
    """Everything that a script may keep, put back by load() inside of the loop."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = evener.Run(
        model, optimizer, token_loss, token_rows(30), global_batch_size=12, exact=True, slice_size=2, precision="fp32",
        dir=folder, order="sequential",
    )  # fmt: skip
    with run:
        counter = Counter()
        run.register("counter", counter)
        seen, digests, back = [], [], False
        for update in run.updates(epochs=3):
            counter.value += 1
            run.state["last"] = update.number
            seen.append((update.number, update.rows))
            if update.number == 3:
                run.save("three")
                digests.append(run.digest())
            if update.number == 6 and not back:
                back = True
                run.load("three")
                digests.append(run.digest())
                assert counter.value == 4 and run.state["last"] == 3 and run.number == 4
        run.print("only one rank says this")
        run.export(f"{folder}/weights.safetensors")
        return seen, digests, run.digest(), counter.value


@pytest.mark.parametrize("world", [1, 3])
def test_register_state_save_load_export(ranks, tmp_path, world):
    results = ranks(world)(keeping, str(tmp_path / "run"))
    seen, digests, _, counter = results[0]
    assert all(result == results[0] for result in results)
    rows = [12, 12, 6]
    assert seen == [(n, rows[n % 3]) for n in (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8)]
    assert digests[0] == digests[1] and counter == 9
    make().load_state_dict(load_file(tmp_path / "run" / "weights.safetensors"))


def going_back(folder, back_at, keywords):
    """A run with a schedule; after update `back_at` (once) everything is put back to what it was after update 1."""
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=9)
    rates = {}
    with evener.Run(
        model, optimizer, row_loss, mlp_rows(30), global_batch_size=12, precision="fp32", dir=folder,
        scheduler=schedule, ema=0.9, **keywords,
    ) as run:  # fmt: skip
        for update in run.updates(epochs=3):
            if update.number == 1 and not rates.get(back_at):
                run.save("one")
            rates.setdefault(update.number, []).append(float(optimizer.param_groups[0]["lr"]))
            if update.number == back_at and len(rates[back_at]) == 1:
                run.load("one")
        return rates, run.digest(), schedule.last_epoch


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("keywords", [{"exact": True, "slice_size": 2}, {"sync_every": 3}])
def test_load_takes_back_what_the_last_update_still_had_to_do(ranks, tmp_path, world, keywords):
    """Its schedule step, and how far local SGD had drifted: in the middle (4) and at the end (5) of an epoch."""
    straight = ranks(world)(going_back, str(tmp_path / "straight"), None, keywords)[0]
    for back_at in (3, 4, 5):
        rates, digest, steps = ranks(world)(going_back, str(tmp_path / f"{back_at}"), back_at, keywords)[0]
        assert (digest, steps) == straight[1:], back_at
        assert {number: seen[-1] for number, seen in rates.items()} == {n: r[0] for n, r in straight[0].items()}


def test_what_register_load_and_save_refuse(tmp_path):
    with new_run(tmp_path / "run") as run:
        with pytest.raises(UsageError, match="has no state_dict"):
            run.register("x", object())
        with pytest.raises(evener.EvenerError, match=r"nothing|not there|no checkpoint|missing"):
            run.load("never-saved")
        with pytest.raises(UsageError, match="cannot be the name"):
            run.save("../outside")


def test_epochs_count_their_own_rows_after_load(tmp_path):
    with new_run(tmp_path / "run", exact=True, slice_size=2) as run:
        losses = {}
        back = False
        for epoch in run.epochs(3):
            for _update in epoch:
                pass
            losses.setdefault(epoch.number, []).append(epoch.loss)
            if epoch.number == 0 and not back:
                run.save("first")
            if epoch.number == 1 and not back:
                back = True
                run.load("first")
    assert {number: len(values) for number, values in losses.items()} == {0: 1, 1: 2, 2: 1}
    assert losses[1][0] == losses[1][1]


def test_stop_from_the_body_and_again(tmp_path):
    for expected in ([0, 1, 2], [3, 4, 5]):
        seen = []
        with pytest.raises(evener.Stopped) as stopped, new_run(tmp_path / "run") as run:
            for update in run.updates(updates=20):
                seen.append(update.number)
                if len(seen) == 3:
                    run.stop("lunch")
        assert stopped.value.reason == "lunch" and stopped.value.code == 75 and seen == expected
    assert sorted(path.name for path in Path(tmp_path, "run", "checkpoints").iterdir()) == ["update-3", "update-6"]
