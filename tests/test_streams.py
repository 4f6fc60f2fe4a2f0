"""A stream trains as a dataset does: every row once, on any world size, after any resume; what cannot be kept is said."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import evener
from evener.data import Cursor, make_feed, source_of
from evener.dist.info import here, share
from evener.errors import DataError, EvenerError, UsageError
from tests import streams
from tests.models import seeded


def feed(data, *, stream="split", size=8, drop_last=False, seed=3, pieces=1, **more):
    place = here()

    def cut(rows):
        start, stop = share(rows, place.rank, place.world_size)
        return [(start + a, start + b) for a, b in (share(stop - start, k, pieces) for k in range(pieces)) if a < b]

    return make_feed(
        source_of(data, stream), stream=stream, order=None, global_batch_size=size, drop_last=drop_last, seed=seed,
        rank=place.rank, world_size=place.world_size, cut=cut, device=torch.device("cpu"), **more,
    )  # fmt: skip


def rows_of(portions):
    """Per update, this rank's rows as tuples."""
    return [
        [tuple(row.tolist()) for piece in portion.pieces if piece.rows for row in piece.batch[0]]
        for portion in portions
    ]


def read(make, args=(), cursor=None, updates=None, epochs=2, **how):
    """Rows of this rank per update, whether each ends its epoch, and what was said."""
    said = []
    one = feed(make(*args), say=said.append, **how)
    try:
        portions = list(one.portions(cursor or Cursor(), epochs=None if updates else epochs, updates=updates))
        return rows_of(portions), [(p.rows, p.planned, p.ends_epoch) for p in portions], said
    finally:
        one.close()


def sharded(make, rows, less, **how):
    """As `read`, for a stream of this rank's own."""
    place = here()
    return read(make, (rows, place.rank, place.world_size, less if place.rank == 0 else 0), stream="mine", **how)


def text_of(function, *args, **how):
    try:
        function(*args, **how)
    except EvenerError as error:
        return str(error)
    return None


def union(parts):
    """Per update, the rows of all ranks in rank order."""
    return [[row for part in update for row in part] for update in zip(*(rows for rows, *_ in parts))]


# ---------------------------------------------------------------------------------------------------- split


@pytest.mark.parametrize("drop_last", [False, True])
def test_split_gives_the_same_global_batches_on_any_world_size(ranks, drop_last):
    alone, kinds, _ = read(streams.Numbers, (29,), drop_last=drop_last)
    assert [(rows, ends) for rows, _, ends in kinds] == (
        [(8, False), (8, False), (8, True)] * 2 if drop_last else [(8, False), (8, False), (8, False), (5, True)] * 2
    )
    first, second = (
        [row[0] for update in half for row in update] for half in (alone[: len(alone) // 2], alone[len(alone) // 2 :])
    )
    assert len(set(first)) == len(first) == (24 if drop_last else 29) and first != second
    assert len({row[1] for update in alone for row in update}) == 2 * len(first)  # noise of its own for every row
    for world in (2, 3, 4):
        parts = ranks(world)(read, streams.Numbers, (29,), drop_last=drop_last, pieces=2)
        assert union(parts) == alone
        assert all(part[1] == kinds for part in parts)


def test_a_worker_and_a_self_sharding_stream_change_nothing():
    for make in (streams.Numbers, streams.WithState, streams.ByWorkers):
        alone = read(make, (29,))
        assert read(make, (29,), num_workers=1) == alone
        assert len({row[0] for update in alone[0][:4] for row in update}) == 29
        loader = DataLoader(make(29), batch_size=4, num_workers=2)
        source = source_of(loader, "split")
        assert any("num_workers=2 is 1" in note for note in source.notes)
        assert read(lambda loader=loader: loader) == alone


def test_the_callers_generators_are_left_as_they_were():
    random.seed(5)
    torch.manual_seed(5)
    expected = random.random(), torch.rand(2).tolist()
    random.seed(5)
    torch.manual_seed(5)
    read(streams.Numbers, (29,))
    assert (random.random(), torch.rand(2).tolist()) == expected


def resumed(make, args, at, how, **more):
    """The rows from update `at` on: read through, and after going back to the cursor there; and what was pulled."""
    data = make(*args)
    one = feed(data, **how)
    portions = list(one.portions(Cursor(), epochs=3))
    whole, cursor = rows_of(portions), portions[at].cursor
    anew, said = make(*args), []
    again = feed(anew, say=said.append, **how, **more)
    rest = rows_of(again.portions(cursor, epochs=3 - cursor.epoch))
    again.close()
    return whole[at:], rest, getattr(anew, "pulled", None), said


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_resume_at_any_update_gives_the_rest(workers, drop_last):
    for at in (0, 1, 3, 4, 6) if not workers else (3,):
        how = {"drop_last": drop_last}
        expected, rest, pulled, said = resumed(streams.Numbers, (29,), at, how, num_workers=workers)
        assert rest == expected
        used = 8 * (at % (3 if drop_last else 4))
        assert [line.split()[:2] for line in said] == ([["reads", str(used)], ["read", str(used)]] if used else [])
        expected, rest, pulled, said = resumed(streams.WithState, (29,), at, how, num_workers=workers)
        assert rest == expected and said == []
        if not workers:  # one row before is read a second time, and no other
            assert pulled == 29 * (3 - at // (3 if drop_last else 4)) - used + bool(used)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_body_that_shuffles_gives_the_same_order_after_its_state_was_loaded(workers):
    for size, at in ((8, 1), (8, 2), (8, 5), (1, 1), (1, 2), (1, 30), (1, 40)) if not workers else ((8, 2),):
        for drop_last in (False, True):
            how = {"size": size, "drop_last": drop_last}
            expected, rest, pulled, said = resumed(streams.ShuffledWithState, (29,), at, how, num_workers=workers)
            assert rest == expected and said == []
            if not workers:
                per_epoch = 29 // size if drop_last else -(-29 // size)
                assert pulled == 29 * (3 - at // per_epoch) - size * (at % per_epoch) + 1


def test_a_resume_of_a_resume_gives_the_rest():
    one = feed(streams.ShuffledWithState(29), size=4)
    expected = rows_of(one.portions(Cursor(), epochs=2))
    given, cursor = [], Cursor()
    while cursor.epoch < 2:
        portions = list(feed(streams.ShuffledWithState(29), size=4).portions(cursor, updates=2))
        given += rows_of(portions)
        cursor = portions[-1].next
    assert given == expected


def test_the_state_is_that_of_one_row_before_the_rows_that_updates_used():
    for workers in (0, 1):
        one = feed(streams.WithState(29), num_workers=workers)
        portions = one.portions(Cursor(), epochs=1)
        marks = [next(portions).next.mark for _ in range(3)]
        assert [(mark.rows, mark.state["at"], mark.back) for mark in marks] == [(8, 7, 1), (16, 15, 1), (24, 23, 1)]
        one.close()


def test_a_second_loop_goes_on_without_reading_again():
    data = streams.Numbers(29)
    one = feed(data)
    first = list(one.portions(Cursor(), updates=2))
    rest = list(one.portions(first[-1].next, epochs=1))
    assert sorted(row[0] for update in rows_of([*first, *rest]) for row in update) == list(range(29))
    assert data.pulled == 29


def test_a_generator_trains_for_one_epoch():
    def rows():
        return (torch.tensor([float(i)] * 4) for i in range(20))

    one = feed((row, 0) for row in rows())
    assert [portion.rows for portion in one.portions(Cursor(), epochs=1)] == [8, 8, 4]
    with pytest.raises(DataError, match="it can be iterated once, and epoch 1 would begin it anew"):
        next(one.portions(Cursor(1)))


# ---------------------------------------------------------------------------------------------------- mine


@pytest.mark.parametrize("make", [streams.Mine, streams.MineWithState])
def test_mine_uses_every_row_of_every_rank_once_and_ends_when_all_have_ended(ranks, make):
    for world in (1, 2, 3, 4):
        less = 5 if world > 1 else 0
        parts = ranks(world)(sharded, make, 40, less)
        assert all(part[1] == parts[0][1] for part in parts)
        ends = [kind[2] for kind in parts[0][1]]
        half = ends.index(True) + 1
        for half_rows in (union(parts)[:half], union(parts)[half:]):
            numbers = [row[0] for update in half_rows for row in update]
            assert len(numbers) == len(set(numbers)) == 40 - less
        assert [rows for rows, _, _ in parts[0][1]] == [len(update) for update in union(parts)]
        if world in (2, 4):  # where it is a whole update less
            assert parts[0][2] == [
                "the stream of rank 0 has come to its end in epoch 0: the others go on with smaller updates"
            ]


def test_mine_with_drop_last_ends_with_the_first_stream(ranks):
    parts = ranks(3)(sharded, streams.Mine, 60, 9, drop_last=True, size=9)
    assert [rows for rows, _, _ in parts[0][1]] == [9, 9, 9] * 2
    assert parts[0][2][0].endswith("rank 0 has come to its end in epoch 0: the rest of the others is left out")
    numbers = [row[0] for update in union(parts)[:3] for row in update]
    assert len(set(numbers)) == 27


def own_resumed(make, at):
    place = here()
    args = (45, place.rank, place.world_size, 8 if place.rank == 0 else 0)
    return resumed(make, args, at, {"stream": "mine"})


@pytest.mark.parametrize("make", [streams.Mine, streams.MineWithState])
def test_mine_resumes_on_as_many_ranks(ranks, make):
    for at in (1, 4, 8):  # at 4 rank 0 has nothing left
        answers = ranks(3)(own_resumed, make, at)
        for expected, rest, *_ in answers:
            assert rest == expected
        again = [any(line.startswith("read ") for line in said) for *_, said in answers]
        assert again == ([at != 4, True, True] if make is streams.Mine else [False] * 3)


# ---------------------------------------------------------------------------------------------------- a whole Run


def mean_loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x / 10), y), {"sum": evener.Mean(total=x[:, 0].sum(), count=len(x))}


def train(folder, kind, stop_at=None, epochs=3, **keywords):
    place = here()
    data = {
        "split": lambda: streams.Numbers(50),
        "split with state": lambda: streams.WithState(50),
        "split that shuffles": lambda: streams.ShuffledWithState(50),
        "mine": lambda: streams.Mine(50, place.rank, place.world_size, 4 if place.rank == 0 else 0),
        "mine with state": lambda: streams.MineWithState(50, place.rank, place.world_size),
    }[kind]()
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": 12, "precision": "fp32", "exact": True, "dir": folder} | keywords
    run = evener.Run(model, optimizer, mean_loss, data, stream=kind.split()[0], **keywords)
    means = []
    try:
        for epoch in run.epochs(epochs):
            for update in epoch:
                if update.number == stop_at:
                    run.stop()
            means.append(epoch.metrics["sum"])
        return run.digest(), [round(mean, 4) for mean in means]
    except evener.Stopped:
        return None
    finally:
        run.close()


@pytest.mark.parametrize(
    ("kind", "first", "second", "workers"),
    [
        ("split", 1, 3, 0),
        pytest.param("split", 3, 1, 0, marks=pytest.mark.full),
        pytest.param("split", 2, 2, 1, marks=pytest.mark.full),  # starting a data worker takes seconds
        pytest.param("split with state", 1, 4, 0, marks=pytest.mark.full),
        ("split with state", 3, 1, 0),
        ("split that shuffles", 1, 2, 0),
    ],
)
def test_split_stopped_and_resumed_elsewhere_ends_equal(ranks, tmp_path, kind, first, second, workers):
    whole = ranks(1)(train, str(tmp_path / "whole"), kind)[0]
    assert whole[1] == [24.5] * 3
    at = 7 if workers else 5
    assert ranks(first)(train, str(tmp_path / "run"), kind, at) == [None] * first
    answers = ranks(second)(train, str(tmp_path / "run"), kind, num_workers=workers)
    assert [digest for digest, _ in answers] == [whole[0]] * second


@pytest.mark.parametrize("kind", ["mine", "mine with state"])
def test_mine_stopped_and_resumed_ends_equal_and_another_world_size_is_refused(ranks, tmp_path, kind):
    whole = ranks(3)(train, str(tmp_path / "whole"), kind)
    assert len(set(map(str, whole))) == 1
    folder = str(tmp_path / "run")
    assert ranks(3)(train, folder, kind, 5) == [None] * 3
    for text in ranks(2)(text_of, train, folder, kind):
        assert 'written by 3 ranks in the middle of an epoch, each with a stream of its own (stream="mine")' in text
        assert "start 3 processes" in text and 'stream="split" can be resumed' in text
    assert [answer[0] for answer in ranks(3)(train, folder, kind)] == [whole[0][0]] * 3


def test_mine_goes_on_with_any_number_of_ranks_at_an_epochs_end(ranks, tmp_path):
    folder = str(tmp_path / "run")
    # 50 rows on 3 ranks are 5 updates; a stop that is asked for in one comes after the next
    assert ranks(3)(train, folder, "mine with state", 3) == [None] * 3
    answers = ranks(2)(train, folder, "mine with state")
    assert answers[0][1] == [24.5, 24.5] and answers[0] == answers[1]


def test_mine_in_fast_mode_counts_every_row_once(ranks, tmp_path):
    answers = ranks(3)(train, str(tmp_path / "run"), "mine", exact=False)
    assert [means for _, means in answers] == [[round((sum(range(50)) - 39 - 42 - 45 - 48) / 46, 4)] * 3] * 3


def scheduled(folder, **loop):
    model = seeded(lambda: torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evener.Run(
        model, optimizer, mean_loss, streams.Numbers(30), global_batch_size=8, stream="split", precision="fp32",
        scheduler=lambda o, total: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total), dir=folder,
    ) as run:  # fmt: skip
        return [(update.epoch, update.rows, round(float(update.lr), 3)) for update in run.updates(**loop)]


def test_a_schedule_of_the_total_needs_updates(tmp_path):
    text = text_of(scheduled, tmp_path / "a", epochs=2)
    assert "the length of a stream is not known" in text and "run.updates(updates=50_000)" in text
    updates = scheduled(tmp_path / "b", updates=6)
    assert [rows for _, rows, _ in updates] == [8, 8, 8, 6, 8, 8] and updates[-1][0] == 1
    assert updates[0][2] == 0.1 and updates[-1][2] == 0.025


def measured(workers="auto"):
    model = seeded(lambda: torch.nn.Linear(4, 3))
    with evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, torch.ones(8, 4), global_batch_size=8,
        resume="never", precision="fp32", exact=True, save_every=None, num_workers=workers,
    ) as run:  # fmt: skip
        rows = streams.Numbers(21, shuffled=False)
        means = run.evaluate(rows, batch_size=4)
        return means, run.predict(rows, lambda model, batch: batch[0][:, 0], batch_size=4).tolist()


def test_evaluate_and_predict_take_a_stream(ranks, tmp_path, monkeypatch):
    alone = ranks(1)(inside, str(tmp_path), measured)[0]
    assert alone[0]["sum"] == 10 and alone[1] == list(range(21))
    assert ranks(3)(inside, str(tmp_path), measured) == [alone] * 3
    assert ranks(1)(inside, str(tmp_path), measured, 2) == [alone]  # a number of the run's, for its own dataset


@pytest.mark.parametrize("make", [streams.Numbers, streams.WithState])
def test_evaluating_the_stream_that_trains_changes_nothing_or_is_refused(tmp_path, make):
    data = make(30)
    model = seeded(lambda: torch.nn.Linear(4, 3))
    with evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, data, global_batch_size=8, stream="split",
        precision="fp32", dir=tmp_path / "run", save_every=None,
    ) as run:  # fmt: skip
        sums = []
        for update in run.updates(epochs=1):
            sums.append(update.metrics["sum"] * update.rows)
            if make is streams.WithState:
                with pytest.raises(UsageError, match="trains on this very WithState"):
                    run.evaluate(data)
            assert run.evaluate(make(30))["sum"] == pytest.approx(14.5)
            assert make is streams.WithState or run.evaluate(data)["sum"] == pytest.approx(14.5)
        assert sum(sums) == pytest.approx(sum(range(30)))


class BadState(streams.WithState):
    def state_dict(self):
        raise RuntimeError("no state today")


def bad_state():
    try:
        list(feed(BadState(20) if here().rank == 1 else streams.WithState(20)).portions(Cursor(), epochs=1))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_a_rank_that_fails_in_its_own_way_stops_all(ranks):
    texts = ranks(2)(bad_state)
    assert texts[1] == "RuntimeError: no state today" and "the stream of rank 1 failed at row 0" in texts[0]


def inside(folder, function, *args):
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return function(*args)
    finally:
        os.chdir(before)


# ---------------------------------------------------------------------------------------------------- bad input


def run_with(data, **keywords):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with evener.Run(
        model, optimizer, mean_loss, data, global_batch_size=8, precision="fp32", resume="never", save_every=None,
        **keywords,
    ) as run:  # fmt: skip
        for _ in run.updates(epochs=2):
            pass


def test_mistakes_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [(torch.ones(4), 0)] * 20
    for error, data, keywords, says in [
        (DataError, streams.Numbers(9), {}, ['stream="split": every rank reads all', 'stream="mine"', "list(stream)"]),
        (UsageError, rows, {"stream": "split"}, ["a list has rows with numbers", "leave stream= out"]),
        (UsageError, streams.Numbers(9), {"stream": "spilt"}, ['stream="split"']),
        (UsageError, streams.Numbers(9), {"stream": "split", "order": "sequential"}, ["shuffle inside of the stream"]),
        (UsageError, streams.Numbers(9), {"stream": "split", "num_workers": 2}, ["num_workers=1 reads ahead"]),
        (UsageError, streams.Numbers(9), {"stream": "mine", "on_bad_sample": "skip"}, ["inside of the stream"]),
        (DataError, DataLoader(streams.Numbers(9), batch_size=None), {"stream": "split"}, ["returns whole batches"]),
        (DataError, streams.Numbers(0), {"stream": "split"}, ["Numbers gave no row in epoch 0", "at least one row"]),
        (DataError, Once(), {"stream": "split"}, ["Once gave no row in epoch 1", "must begin anew"]),
        (DataError, iter(rows), {"stream": "split"}, ["is a list_iterator: it can be iterated once, and epoch 1"]),
        (DataError, streams.Numbers(7), {"stream": "split", "drop_last": True}, ["no update would ever come"]),
        (
            DataError,
            streams.Breaks(20),
            {"stream": "split"},
            ["row 10 of the stream", "the shard is gone", "streams.py"],
        ),
        (DataError, streams.Breaks(20), {"stream": "split", "num_workers": 1}, ["row 10 of the stream"]),
        (DataError, Unlike(), {"stream": "split"}, ["8 rows could not be put together", "rows 0, 1, 2"]),
    ]:
        with pytest.raises(error) as caught:
            run_with(data, **keywords)
        for text in says:
            assert text in str(caught.value), (data, keywords, str(caught.value))


class Once(torch.utils.data.IterableDataset):
    """Keeps its iterator: the second epoch finds it empty."""

    def __init__(self):
        self.rows = iter([(torch.ones(4), 0)] * 20)

    def __iter__(self):
        return self.rows


class Unlike(torch.utils.data.IterableDataset):
    def __iter__(self):
        return (torch.ones(1 + i % 2) for i in range(20))


def disagree(kind):
    place = here()
    data, stream, size = {
        "lengths": (streams.Numbers(20 + 2 * place.rank, shuffled=False), "split", 8),
        "rows": (streams.Mine(60, place.rank, place.world_size), "split", 8),
        "same": (streams.Numbers(40, shuffled=False), "mine", 8),
        "one fails": ((streams.Breaks if place.rank == 1 else streams.Numbers)(20, shuffled=False), "split", 8),
        "no part": (streams.Numbers(40), "mine", 1),
    }[kind]
    return text_of(lambda: list(feed(data, stream=stream, size=size).portions(Cursor(), epochs=1)))


def test_ranks_whose_streams_do_not_fit_together_all_say_so(ranks):
    texts = ranks(3)(disagree, "lengths")
    assert len(set(texts)) == 1 and "other lengths on the ranks, at row 16 of epoch 0" in texts[0]
    assert "rank 0: 4 rows, the end" in texts[0] and "rank 2: 8 rows, the end" in texts[0]
    texts = ranks(3)(disagree, "rows")
    assert len(set(texts)) == 1 and 'stream="split": rank 1 reads other rows than rank 0, at row 0' in texts[0]
    assert 'stream="mine": each rank reads rows of its own' in texts[0]
    texts = ranks(3)(disagree, "no part")
    assert len(set(texts)) == 1 and "no part for every one of 3 ranks" in texts[0]
    texts = ranks(3)(disagree, "one fails")
    assert "row 10 of the stream could not be read" in texts[1]
    assert texts[0] == texts[2] and "the stream of rank 1 failed at row 8" in texts[0]


def alike():
    # without noise, which is drawn anew on every rank
    rows = [(torch.full((4,), float(i)), 0) for i in range(40)]
    return text_of(lambda: list(feed(Listed(rows), stream="mine").portions(Cursor(), epochs=1)))


class Listed(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_mine_that_is_not_sharded_is_noticed(ranks):
    texts = ranks(2)(alike)
    assert len(set(texts)) == 1 and "ranks 0 and 1 read the same rows, at row 0" in texts[0]
    assert "evener.world_size()-th" in texts[0]


def go_back(make, exact, at=1):
    portions = list(feed(make(29)).portions(Cursor(), epochs=1))
    said = []
    return text_of(
        lambda: list(feed(make(29), say=said.append, exact=exact).portions(portions[at].cursor, epochs=2))
    ), said


class Unseeded(streams.Numbers):
    """Another order at every reading. No row keeps its place: a draw would leave the compared one there at times."""

    turns = itertools.count()

    def ids(self):
        turn = next(self.turns) % self.rows
        return [*range(turn, self.rows), *range(turn)]


@pytest.mark.parametrize("make", [streams.Lags, Unseeded])
def test_a_stream_that_does_not_go_back_to_where_it_was_is_noticed(make):
    text, said = go_back(make, exact=True)
    assert "another row than when the checkpoint was written, at row 8 of epoch 0" in text
    text, said = go_back(make, exact=False)
    assert text is None and any("warning: the stream goes on with another row" in line for line in said)


def test_a_stream_that_stays_where_it_was_loaded_is_noticed():
    text, _ = go_back(streams.Forgets, exact=False)
    assert "the stream begins epoch 1 in the middle: where its load_state_dict had put epoch 0" in text


@pytest.mark.parametrize("make", [streams.WithState, streams.AllIsState, streams.Anew])
def test_a_second_run_on_a_stream_that_the_first_left_in_the_middle_says_so(tmp_path, capsys, make):
    def run_on(data, name, updates):
        model = seeded(lambda: torch.nn.Linear(4, 3))
        with evener.Run(
            model, torch.optim.SGD(model.parameters(), lr=0.1), mean_loss, data, global_batch_size=8, stream="split",
            precision="fp32", dir=tmp_path / name, save_every=None, resume="never",
        ) as run:  # fmt: skip
            rows = [update.rows for update in run.updates(updates=updates)]
        return rows, f"warning: epoch 0 of the {make.__name__} (rank 0) begins in another" in capsys.readouterr().out

    data, whole = make(30), [8, 8, 8, 6]
    assert run_on(data, "one", 4) == (whole, False) and run_on(data, "two", 5) == ([*whole, 8], False)
    if make is not streams.Anew:  # it begins at its tenth row: one was read ahead
        assert run_on(data, "three", 4) == ([8, 8, 5, 8], True)
        data.at = 0
    assert run_on(data, "four", 4) == (whole, False)
    assert run_on(make(30), "five", 4) == (whole, False)


def test_a_stream_that_got_shorter_is_noticed():
    portions = list(feed(streams.Numbers(29, shuffled=False)).portions(Cursor(), epochs=1))
    with pytest.raises(DataError, match="ended after 9 rows of epoch 0; the checkpoint was written after 16"):
        list(feed(streams.Numbers(9, shuffled=False)).portions(portions[2].cursor))
