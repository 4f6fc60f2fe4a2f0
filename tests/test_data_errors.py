"""What is refused, with the text that helps; bad rows by name; workers that die, hang, or outlive their rank."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import re
import signal
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from evener.data import Cursor, Order, source_of
from evener.errors import DataError, UsageError, WorkerError
from tests.test_data_feed import Batched, Plain, feed, no_worker_is_left, read, rows_of  # noqa: F401 (a fixture)


def refused(data) -> DataError:
    with pytest.raises(DataError) as caught:
        source_of(data)
    return caught.value


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    def __getitem__(self, i: int):
        return i


def test_what_is_not_a_dataset_is_refused():
    for data, says in [
        (Stream(), "Stream is a stream"),
        ((i for i in range(3)), "generator is a stream"),
        (DataLoader(Stream()), "Stream is a stream"),
        (NoLength(), "define __len__"),
        ([], "empty"),
        (TensorDataset(torch.ones(0, 3)), "empty"),
        (torch.ones(0), "empty"),
        (Subset(TensorDataset(torch.ones(3)), []), "empty"),
        (Subset(TensorDataset(torch.ones(3)), [3]), "from 0 to 2"),
        (torch.tensor(1.0), "the first dimension is the rows"),
        ("data/train", "a str is not a dataset"),
        (17, "a int is not a dataset"),
        ({"train": [1], "test": [2]}, 'data["train"]'),
        (([1, 2], [3, 4]), "a tuple is not a dataset"),
        ((np.array(["a"]), torch.ones(1)), "make every part a tensor"),
        ([torch.ones(2), torch.ones(2)], "can mean 2 columns or 2 rows"),
    ]:
        assert says in str(refused(data)), data


class Negative(Plain):
    def __len__(self):
        return -3  # noqa: PLE0303  (the user's mistake that is tested)


class Unready(Plain):
    def __len__(self):
        return self.index.size


def test_a_length_that_is_none_is_named():
    text = str(refused(Negative(3)))
    assert "Negative.__len__ failed: ValueError: __len__() should return >= 0." in text and "an integer from 1" in text
    assert "Unready.__len__ failed: AttributeError:" in str(refused(Unready(3)))


def test_columns_of_different_lengths_are_refused_by_name():
    text = str(refused({"image": torch.ones(3, 2), "label": torch.ones(4)}))
    assert "'image': [3, 2]" in text and "'label': [4]" in text
    assert "tensor 1: [4]" in str(refused((torch.ones(3, 2), torch.ones(4))))


def recipe(error: DataError, **names):
    """The error's `order=` line, executed as a user would paste it."""
    line = next(line for line in error.fix if line.startswith("order="))
    scope = {"torch": torch, **names}
    for extra in error.fix:
        if "from evener" in extra:
            exec(extra.removeprefix("with "), scope)  # noqa: S102 (our own text)
    return eval(line.removeprefix("order="), scope)


def test_foreign_samplers_are_refused_with_a_recipe_that_works():
    dataset = Plain(20)
    weights = torch.tensor([1.0] * 10 + [0.0] * 10)
    own = [3, 1, 2]
    for sampler, size, names in [
        (WeightedRandomSampler(weights, 30), 30, {"weights": weights}),
        (WeightedRandomSampler(weights, 5, replacement=False), 5, {"weights": weights}),
        (RandomSampler(dataset, replacement=True, num_samples=40), 40, {}),
        (RandomSampler(dataset, num_samples=7), 7, {}),
        (SequentialSampler(range(5)), 5, {}),
        (own, 3, {"sampler": own}),
    ]:
        error = refused(DataLoader(dataset, sampler=sampler))
        order = Order(20, 9, recipe(error, dataset=dataset, **names))
        first = order.indices(0, 0, order.length(0))
        assert len(first) == size
        assert np.array_equal(first, Order(20, 9, order.kind).indices(0, 0, size))
        if isinstance(sampler, WeightedRandomSampler | RandomSampler):
            assert not np.array_equal(first, order.indices(1, 0, size))
            assert not np.array_equal(first, Order(20, 8, order.kind).indices(0, 0, size))
        if isinstance(sampler, WeightedRandomSampler):
            assert first.max() < 10
    buckets = BatchSampler([4, 2, 0], 2, False)

    class Bucketed(BatchSampler):
        pass

    error = refused(DataLoader(dataset, batch_sampler=Bucketed([4, 2, 0], 2, False)))
    assert "Bucketed" in error.cause
    order = recipe(error, batch_sampler=buckets)
    assert Order(20, 1, order).indices(0, 0, 3).tolist() == [4, 2, 0]


def test_samplers_that_evener_makes_needless_are_refused():
    sampler = DistributedSampler(Plain(8), num_replicas=2, rank=0, shuffle=False)
    text = str(refused(DataLoader(Plain(8), sampler=sampler)))
    assert "evener shards by itself" in text and 'loader.dataset, with order="sequential"' in text
    text = str(refused(DataLoader(Plain(8), sampler=SubsetRandomSampler([1, 2]))))
    assert "torch.utils.data.Subset(dataset, indices)" in text
    assert "returns whole batches" in str(refused(DataLoader(Plain(8), batch_size=None)))


def test_epochs_without_an_update_and_positions_outside_are_refused():
    with pytest.raises(
        DataError, match=r"epoch 0 has 7 rows, less than one global batch of 8, .*no update would ever come"
    ):
        next(feed(Plain(7), drop_last=True).portions(Cursor()))
    with pytest.raises(DataError, match="row 9 of an epoch that has 8 rows"):
        next(feed(Plain(8)).portions(Cursor(0, 9)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Plain(20), (torch.arange(20),)])
def test_an_order_that_breaks_later_breaks_later(data, workers):
    one = feed(data, kind=lambda seed, epoch: range(20) if epoch == 0 else [99], workers=workers)
    delivered = []
    with pytest.raises(DataError, match="position 0: 99"):
        for portion in one.portions(Cursor()):
            delivered.append(portion.rows)
    assert delivered == [8, 8, 4]
    one.close()


class Bad(Plain):
    """Rows 5 and 11 cannot be read."""

    def __getitem__(self, i: int):
        if i in (5, 11):
            raise ValueError(f"broken jpeg {i}")
        return super().__getitem__(i)


class BatchedBad(Bad):
    def __getitems__(self, ids: list[int]):
        return [self[i] for i in ids]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Bad(20), BatchedBad(20)])
def test_a_bad_row_is_named(dataset, workers):
    one = feed(dataset, kind="sequential", workers=workers)
    with pytest.raises(DataError) as caught:
        next(one.portions(Cursor(4, 0)))
    one.close()
    text = str(caught.value)
    assert "row 5 of the dataset could not be read (epoch 4): ValueError: broken jpeg 5" in text
    assert "test_data_errors.py:" in text and "in __getitem__" in text
    assert "dataset[5] shows it" in text and 'on_bad_sample="skip"' in text
    assert "broken jpeg 5" in str(caught.value.__cause__)
    if workers:
        assert "Traceback" in str(caught.value.__cause__)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("dataset", [Bad(20), BatchedBad(20)])
def test_skipped_rows_are_left_out_counted_and_named(dataset, workers):
    one = feed(dataset, kind="sequential", workers=workers, on_bad_sample="skip", pieces=4)
    portions = list(one.portions(Cursor(), epochs=1))
    one.close()
    assert [[row[0] for row in update] for update in rows_of(portions)] == [
        [0, 1, 2, 3, 4, 6, 7],
        [8, 9, 10, 12, 13, 14, 15],
        [16, 17, 18, 19],
    ]
    assert [[piece.rows for piece in p.pieces] for p in portions] == [[2, 2, 1, 2], [2, 1, 2, 2], [1, 1, 1, 1]]
    assert [p.rows for p in portions] == [8, 8, 4]
    assert [p.skipped for p in portions] == [
        ((5, "ValueError: broken jpeg 5"),),
        ((11, "ValueError: broken jpeg 11"),),
        (),
    ]


def test_a_piece_of_skipped_rows_has_no_batch():
    one = feed(Bad(20), kind=lambda seed, epoch: [5, 11, 3, 4], size=4, pieces=2, on_bad_sample="skip")
    portion = next(one.portions(Cursor()))
    assert [(piece.rows, piece.batch is None) for piece in portion.pieces] == [(0, True), (2, False)]
    assert [i for i, _ in portion.skipped] == [5, 11]


class OnlyTogether(Batched):
    def __getitems__(self, ids: list[int]):
        if len(ids) > 1:
            raise KeyError("too many")
        return [self[i] for i in ids]


class Short(Batched):
    def __getitems__(self, ids: list[int]):
        return [self[i] for i in ids][1:]


class NotReally(Batched):
    def __getitems__(self, ids: list[int]):
        raise NotImplementedError


def test_a_batched_read_that_fails_is_told_from_a_bad_row():
    with pytest.raises(DataError) as caught:
        read(OnlyTogether(8), kind="sequential")
    assert "OnlyTogether.__getitems__ failed for rows that can be read one by one" in str(caught.value)
    assert "rows 0, 1, 2, 3, 4, 5, 6, 7" in str(caught.value)
    with pytest.raises(DataError, match="returned 7 rows for 8 indices"):
        read(Short(8))
    assert read(NotReally(8)) == read(Plain(8))


def test_rows_that_do_not_collate_are_named_with_their_shape():
    rows = [(torch.ones(2 + (i == 3)), {"label": i}) for i in range(8)]
    with pytest.raises(DataError) as caught:
        read(rows, kind="sequential", pieces=2)
    text = str(caught.value)
    assert "4 rows could not be put together by default_collate (epoch 0): RuntimeError: stack expects" in text
    assert "rows 0, 1, 2, 3" in text and "the first is tuple of (Tensor [2], dict of ('label': int))" in text
    assert "pass a collate_fn that pads them" in text


# torch's SIGCHLD handler may raise while torch itself opens temporary files (it counts descriptors after a broken
# connection): one of them is then closed by the collector, which is only a warning, and only here an error.
interrupted = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Killed(Plain):
    """Reading row 21 kills the process that reads it."""

    def __getitem__(self, i: int):
        if i == 21:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)


@interrupted
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_is_named_with_the_rows_it_had(workers):
    one = feed(Killed(64), kind="sequential", workers=workers)
    with pytest.raises(WorkerError) as caught:
        list(one.portions(Cursor()))
    text = str(caught.value)
    dead = int(re.search(r"a data worker died \(pid (\d+)\)\.", text)[1])
    assert f"worker 0, pid {dead}: killed by SIGKILL" in text
    assert "16, 17, 18, 19, 20, 21, 22, 23" in text
    assert "out-of-memory killer" in text and "num_workers=0" in text
    assert not psutil.pid_exists(dead)
    one.close()


@interrupted
def test_a_worker_that_dies_does_not_interrupt_the_step_but_the_next_wait():
    one = feed(Plain(640), workers=2)
    portions = one.portions(Cursor())
    next(portions)
    os.kill(one._delivery.workers._iterator._workers[1].pid, signal.SIGKILL)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:  # a training step: torch's own handler would raise in here
        pass
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        next(portions)
    # Other DataLoaders of the user are still watched by torch, and a new pass gets new workers.
    assert rows_of(one.portions(Cursor(), epochs=1)) == read(Plain(640), epochs=1)
    killed = one._delivery.workers._iterator._workers[0]
    os.kill(killed.pid, signal.SIGKILL)
    killed.join(60)
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        next(one.portions(Cursor()))
    one.close()


@interrupted
def test_a_worker_that_dies_before_its_greeting_is_dead_and_not_one_that_could_not_start():
    one = feed(Plain(64), workers=2, timeout=2)
    list(one.portions(Cursor(), epochs=1))
    first = one._delivery.workers._iterator._workers[0].pid
    os.kill(first, signal.SIGSTOP)  # alive when the pass begins, and gone before it has greeted
    later = threading.Timer(0.5, os.kill, (first, signal.SIGKILL))
    later.start()
    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        next(one.portions(Cursor()))
    later.join()
    one.close()


class Slow(Plain):
    def __getitem__(self, i: int):
        if i == 10:
            time.sleep(1000)
        return super().__getitem__(i)


def test_a_hanging_worker_is_named_with_the_rows_waited_for():
    one = feed(Slow(64), kind="sequential", workers=2, timeout=0.7)
    portions = one.portions(Cursor())
    next(portions)
    pids = [p.pid for p in one._delivery.workers._iterator._workers]
    began = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        next(portions)
    assert 0.6 < time.monotonic() - began < 60  # not for ever
    text = str(caught.value)
    assert "a data worker gave no batch within 0.7 s." in text
    assert f"worker 1, pid {pids[1]}" in text
    assert "waited for rows 8, 9, 10, 11, 12, 13, 14, 15" in text
    assert "num_workers=0 reads the same rows in this process" in text
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_closing_with_a_busy_worker_does_not_wait_for_it():
    one = feed(Slow(64), kind="sequential", workers=1)
    next(one.portions(Cursor()))
    began = time.monotonic()
    one.close()
    assert time.monotonic() - began < 60  # the row takes 1000 s


def test_workers_that_cannot_start_say_why():
    loader = DataLoader(Plain(8), num_workers=1, multiprocessing_context="spawn", collate_fn=lambda rows: rows)
    with pytest.warns(UserWarning, match="pickle"), pytest.raises(WorkerError, match="could not start"):
        next(feed(loader, workers="auto").portions(Cursor()))

    def fails(worker: int) -> None:
        raise OSError("no such share")

    with pytest.raises(WorkerError, match="no such share"):
        next(feed(DataLoader(Plain(8), num_workers=1, worker_init_fn=fails), workers="auto").portions(Cursor()))


def test_an_older_pass_ends_when_a_newer_one_begins():
    one = feed(Plain(64), workers=1)
    old = one.portions(Cursor())
    next(old)
    next(one.portions(Cursor()))
    with pytest.raises(UsageError, match="ended by a newer call"):
        next(old)
    one.close()


def a_rank(pipe, by_signal: bool) -> None:
    """A rank with two workers, one of them stuck in a row."""
    one = feed(Slow(64), kind="sequential", workers=2)
    loader = one._delivery.workers._loader
    assert loader.worker_init_fn.by_signal
    loader.worker_init_fn = dataclasses.replace(loader.worker_init_fn, by_signal=by_signal)
    portions = one.portions(Cursor())
    next(portions)
    pipe.send([p.pid for p in one._delivery.workers._iterator._workers])
    time.sleep(1000)


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
@pytest.mark.parametrize("by_signal", [True, False])
def test_workers_die_with_their_rank(by_signal):
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    rank = context.Process(target=a_rank, args=(there, by_signal))
    rank.start()
    assert here.poll(60)
    workers = [psutil.Process(pid) for pid in here.recv()]
    assert len(workers) == 2
    rank.kill()
    rank.join()
    end = time.monotonic() + 30
    while (alive := [w for w in workers if lives(w)]) and time.monotonic() < end:
        time.sleep(0.02)
    for worker in alive:
        worker.kill()
    assert not alive


def lives(process: psutil.Process) -> bool:
    # Orphans may stay zombies where nobody reaps them (a container without an init).
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
