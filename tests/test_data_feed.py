"""What a feed delivers is a function of (dataset, order, seed): not of ranks, cuts, workers, prefetch or resumes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import namedtuple

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from evener.batch import move
from evener.data import Cursor, Feed, Order, rng, source_of, updates_in
from evener.data.transfer import Transfer, ahead, pinned
from evener.dist.info import share
from evener.dist.mix import mix
from evener.errors import MemoryLimitError

CPU = torch.device("cpu")
START = Cursor()


class Plain(Dataset):
    """(index, its square) with no randomness."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, i: int):
        return i, torch.tensor([float(i), i * i])


class Drawing(Plain):
    """A dataset with random transforms that draws from all three global generators."""

    def __getitem__(self, i: int):
        return i, torch.rand(2), random.random(), np.random.rand(), torch.initial_seed() % 1000


class Batched(Plain):
    """Reads rows together, and counts how often."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.calls = 0

    def __getitems__(self, ids: list[int]):
        self.calls += 1
        return [self[i] for i in ids]


class BatchedDrawing(Drawing):
    """Reads rows together and draws: from one stream for all of them, so it would depend on the cut."""

    def __getitems__(self, ids: list[int]):
        return [self[i] for i in ids]


class SometimesDrawing(Batched):
    """Draws for few of its rows only, and from numpy only."""

    def __getitem__(self, i: int):
        return i, np.random.rand() if i % 7 == 0 else 0.0


def feed(
    data, kind="shuffle", *, rank=0, world=1, pieces=1, size=8, drop_last=False, workers=0, seed=3, **more
) -> Feed:
    source = source_of(data)

    def cut(rows: int):
        start, stop = share(rows, rank, world)
        parts = [share(stop - start, k, pieces) for k in range(pieces)]
        return [(start + a, start + b) for a, b in parts]

    return Feed(
        source,
        Order(source.rows, seed, kind),
        global_batch_size=size,
        drop_last=drop_last,
        rank=rank,
        world_size=world,
        cut=cut,
        device=more.pop("device", CPU),
        num_workers=workers,
        seed=seed,
        **more,
    )


def columns(batch) -> list[list]:
    """The batch's columns as plain lists."""
    if isinstance(batch, dict):
        batch = list(batch.values())
    batch = batch if isinstance(batch, list | tuple) else [batch]
    return [column.tolist() for column in batch]


def rows_of(portions) -> list[list[tuple]]:
    """Per update, this rank's rows in order, each row a tuple of plain values."""
    return [
        [row for p in portion.pieces if p.batch is not None for row in zip(*columns(p.batch))] for portion in portions
    ]


def read(data, *, epochs=2, cursor=START, updates=None, **more) -> list[list[tuple]]:
    one = feed(data, **more)
    try:
        return rows_of(one.portions(cursor, epochs=epochs, updates=updates))
    finally:
        one.close()


def over_ranks(data, world: int, **more) -> list[list[tuple]]:
    parts = [read(data, rank=rank, world=world, **more) for rank in range(world)]
    return [[row for part in update for row in part] for update in zip(*parts)]


def children() -> list[psutil.Process]:
    """This process's children, without the servers that multiprocessing keeps for itself."""
    servers = ("forkserver", "resource_tracker")
    return [p for p in psutil.Process().children() if not any(name in " ".join(p.cmdline()) for name in servers)]


@pytest.fixture(autouse=True)
def no_worker_is_left():
    before = set(children())
    yield
    left = set(children()) - before
    assert not left, f"the test left processes behind: {left}"


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_union_over_ranks_is_the_same_in_every_cut(data):
    rows, size = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 20))
    drop_last = data.draw(st.booleans()) and rows >= size
    world, pieces = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    dataset = data.draw(st.sampled_from([Plain, Drawing, Batched, BatchedDrawing, SometimesDrawing]))(rows)
    kind = data.draw(st.sampled_from(["shuffle", "sequential", lambda seed, epoch: [0, *range(rows), rows - 1]]))
    given_ = {"kind": kind, "size": size, "drop_last": drop_last}
    alone = read(dataset, **given_)
    assert over_ranks(dataset, world, pieces=pieces, **given_) == alone
    length = Order(rows, 3, kind).length(0)
    assert len(alone) == 2 * updates_in(length, size, drop_last)
    delivered = [row[0] for update in alone[: len(alone) // 2] for row in update]
    expected = Order(rows, 3, kind).indices(0, 0, length)[: len(delivered)].tolist()
    assert delivered == expected


@pytest.mark.parametrize("dataset", [Drawing(50), BatchedDrawing(50), SometimesDrawing(50)])
def test_workers_change_nothing(dataset):
    alone = read(dataset)
    assert read(dataset, workers=1, pieces=3) == alone
    assert read(dataset, workers=3) == alone
    assert over_ranks(dataset, 2, workers=1) == alone


def test_random_rows_differ_between_rows_epochs_and_seeds():
    drawn = [row[1:4] for seed in (3, 4) for update in read(Drawing(40), seed=seed) for row in update]
    flat = [x for row in drawn for x in (*row[0], row[1], row[2])]
    assert len(flat) == 2 * 2 * 40 * 4 and len(set(flat)) == len(flat)
    assert abs(np.mean(flat) - 0.5) < 0.05


def test_torch_and_numpy_which_share_a_generator_are_not_seeded_alike():
    before = rng.states()
    with rng.kept():
        rng.seed_all(mix(1, 2, 3))
        # Both run MT19937, whose first state word is the 32-bit seed.
        assert np.random.get_state()[1][0] != torch.initial_seed() % 2**32
        assert not rng.same(rng.states(), before)
    assert rng.same(rng.states(), before)


def test_a_row_that_an_order_repeats_is_drawn_anew():
    rows = [row for update in read(Drawing(4), kind=lambda seed, epoch: [2] * 20, epochs=1) for row in update]
    assert len({tuple(row[1]) for row in rows}) == 20


def test_a_resume_at_any_update_continues_the_same_run():
    dataset = Drawing(45)
    whole = list(feed(dataset).portions(Cursor(), epochs=3))
    rows = rows_of(whole)
    for k in (0, 1, 5, 6, 11, 17):
        start = Cursor() if k == 0 else whole[k - 1].next
        assert start == whole[k].cursor
        assert read(dataset, cursor=start, epochs=None, updates=18 - k) == rows[k:]
        assert over_ranks(dataset, 3, cursor=start, epochs=None, updates=min(2, 18 - k)) == rows[k : k + 2]
    assert [p.ends_epoch for p in whole] == [p.next.offset == 0 for p in whole] == [i % 6 == 5 for i in range(18)]


def test_epochs_counts_the_epoch_that_the_cursor_stands_in():
    one = feed(Plain(20))
    assert [p.cursor for p in one.portions(Cursor(4, 8), epochs=1)] == [Cursor(4, 8), Cursor(4, 16)]
    assert next(one.portions(Cursor(4, 20), epochs=2)).cursor == Cursor(5, 0)
    assert len(list(one.portions(Cursor(), epochs=2, updates=4))) == 4
    assert one.updates_in(0) == 3


def test_a_portion_says_what_it_is():
    one = feed(Plain(20), rank=1, world=3, pieces=2)
    portions = list(one.portions(Cursor(), epochs=1))
    assert [p.rows for p in portions] == [8, 8, 4]
    assert [(x.start, x.stop, x.rows) for x in portions[0].pieces] == [(2, 3, 1), (3, 5, 2)]
    alone = rows_of(feed(Plain(20)).portions(Cursor(), epochs=1))
    for portion, update in zip(portions, alone):
        assert portion.ids().tolist() == [row[0] for row in update]
    assert portions[0].ids().tolist() == Order(20, 3).indices(0, 0, 8).tolist()
    assert portions[0].skipped == ()


def test_a_rank_without_rows_gets_portions_without_batches():
    portions = list(feed(Plain(9), rank=0, world=4, size=8, workers=1).portions(Cursor(), epochs=1))
    assert [[x.rows for x in p.pieces] for p in portions] == [[2], [0]]
    assert portions[1].pieces[0].batch is None and portions[1].rows == 1


def test_every_row_counts_once_in_an_evaluation_on_any_world_size():
    for world in (1, 2, 3, 5, 16):
        seen = [row[0] for update in over_ranks(Plain(37), world, kind="sequential", epochs=1) for row in update]
        assert seen == list(range(37))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Drawing(20), BatchedDrawing(20), Batched(20), TensorDataset(torch.rand(20, 2))])
def test_the_callers_generators_are_left_as_they_were(dataset, workers):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    expected = torch.rand(3).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    read(
        dataset,
        workers=workers,
        collate_fn=lambda rows: [random.random(), np.random.rand(), torch.rand(1)] and torch.zeros(1),
    )
    assert (torch.rand(3).tolist(), random.random(), np.random.rand()) == expected


def test_rows_are_read_together_until_they_draw():
    calm = Batched(64)
    read(calm, epochs=1)
    assert calm.calls == 8
    some = SometimesDrawing(64)
    read(some, epochs=1)
    assert some.calls > 56  # one batch tried together, then row by row
    subset = Batched(64)
    read(Subset(subset, range(10, 40)), epochs=1, size=10)
    assert subset.calls == 3


def test_tensors_are_gathered_into_what_a_dataloader_would_give():
    x, y = torch.rand(30, 2, 3), torch.arange(30)
    forms = [
        TensorDataset(x, y),
        (x, y),
        {"x": x, "y": y},
        (x.numpy(), y.numpy()),
        x,
        x.numpy(),
        Subset(TensorDataset(x, y), [5, 3, -1, 3, 8]),
        Subset(Subset(TensorDataset(x, y), range(20)), [7, 2, 1]),
    ]
    for data in forms:
        source = source_of(data)
        assert source.in_memory
        ids = Order(source.rows, 3).indices(0, 0, min(8, source.rows)).tolist()
        batch = next(feed(data).portions(Cursor())).pieces[0].batch
        expected = default_collate([source.dataset[i] for i in ids])
        assert _equal(batch, expected)
        if isinstance(data, Dataset):
            assert _equal(batch, default_collate([data[i] for i in ids]))
            assert type(batch) is list
        elif isinstance(data, tuple | dict):
            assert type(batch) is type(data)


def _equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(_equal, a, b))


def test_pieces_of_tensors_are_views_of_one_gather():
    portion = next(feed((torch.rand(30, 4), torch.arange(30)), pieces=4).portions(Cursor()))
    xs = [piece.batch[0] for piece in portion.pieces]
    assert len({x.untyped_storage().data_ptr() for x in xs}) == 1
    assert torch.equal(torch.cat([piece.batch[1] for piece in portion.pieces]), torch.from_numpy(portion.ids()))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 200), st.booleans())
def test_gathering_ahead_changes_nothing(world, pieces, size, long_rows):
    x = torch.arange(300.0)[:, None].expand(300, 20_000 if long_rows else 1)  # rows of 80 kB, or of 4 bytes
    parts = [
        list(feed((x,), rank=r, world=world, pieces=pieces, size=size).portions(START, epochs=2)) for r in range(world)
    ]
    for update in zip(*parts):
        got = [p.batch[0][:, 0] for portion in update for p in portion.pieces if p.batch is not None]
        assert torch.cat(got).tolist() == update[0].ids().tolist()


def test_the_dataset_is_never_handed_out_itself():
    x = torch.rand(8, 2)
    kept = x.clone()
    for portion in feed(x, kind="sequential").portions(Cursor(), epochs=1):
        portion.pieces[0].batch.zero_()
    assert torch.equal(x, kept)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_random_collate_fn_is_seeded_by_its_position(workers):
    def noisy(rows):
        return [
            torch.tensor([row[0] for row in rows]),
            torch.rand(len(rows)),
            torch.tensor([random.random()] * len(rows)),
        ]

    for data in (Plain(30), TensorDataset(torch.arange(30))):
        first = read(data, collate_fn=noisy, pieces=2)
        assert read(data, collate_fn=noisy, pieces=2, workers=workers) == first
        assert len({row[1] for update in first for row in update}) == 60


def test_samples_are_collated_as_torch_does():
    Point = namedtuple("Point", "x y")
    rows = [
        {"a": np.float32(i), "b": [i, float(i)], "c": "s", "d": Point(torch.ones(2), np.zeros(3))} for i in range(12)
    ]
    batch = next(feed(rows, kind="sequential").portions(Cursor())).pieces[0].batch
    expected = default_collate(rows[:8])
    assert batch["c"] == expected["c"] and type(batch["d"]).__name__ == "Point"
    assert _equal([batch["a"], *batch["b"], *batch["d"]], [expected["a"], *expected["b"], *expected["d"]])


def test_a_dataloader_is_taken_for_its_dataset_collation_and_workers():
    def collate(rows):
        return torch.tensor([row[0] for row in rows])

    loader = DataLoader(
        Plain(20), batch_size=5, shuffle=True, collate_fn=collate, num_workers=1, timeout=9, drop_last=True
    )
    source = source_of(loader)
    assert (source.rows, source.order, source.num_workers, source.timeout) == (20, "shuffle", 1, 9)
    assert source.collate_fn is collate and source.dataset is loader.dataset
    assert "batch_size=5 is not used" in source.notes[0] and "drop_last" in source.notes[1]
    memory = DataLoader(TensorDataset(torch.ones(20)), num_workers=1, generator=torch.Generator())
    assert feed(memory, workers="auto").num_workers == 0
    assert [note.split("'s ")[1].split("=")[0].split(" ")[0] for note in source_of(memory).notes] == [
        "batch_size",
        "num_workers",
        "generator",
    ]
    assert source_of(DataLoader(Plain(20))).order == "sequential"
    assert source_of(DataLoader(Plain(20))).collate_fn is None
    one = feed(loader, workers="auto")
    assert one.num_workers == 1
    assert [len(update) for update in rows_of(one.portions(Cursor(), epochs=1))] == [8, 8, 4]
    one.close()


def test_automatic_workers_are_zero_for_data_in_memory(monkeypatch):
    import multiprocessing

    from evener.data import processes

    monkeypatch.setattr(processes, "usable_cpus", lambda: 16)
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "fork")
    assert feed(torch.rand(4, 1), workers="auto").num_workers == 0
    assert source_of([(1, 2)] * 4).in_memory and source_of(Subset([1, 2, 3], [0])).in_memory
    assert not source_of(Plain(3)).in_memory
    assert processes.automatic_count(False, 1) == 4
    assert processes.automatic_count(False, 8) == 2
    assert processes.automatic_count(False, 32) == 0
    assert processes.automatic_count(True, 1) == 0
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    monkeypatch.setattr(processes, "_has_main_guard", lambda: False)
    assert processes.automatic_count(False, 1) == 0
    monkeypatch.setattr(processes, "_has_main_guard", lambda: True)
    assert processes.automatic_count(False, 1) == 4


class AboutWorkers(Plain):
    def __getitem__(self, i: int):
        import os

        return i, os.getpid(), torch.get_num_threads()


def test_workers_are_kept_between_passes_and_run_one_thread():
    started = []
    one = feed(AboutWorkers(32), workers=2)
    one._delivery.workers._loader.worker_init_fn = dataclasses.replace(
        one._delivery.workers._loader.worker_init_fn, then=started.append
    )
    passes = [rows_of(one.portions(Cursor(e, 0), epochs=1)) for e in range(3)]
    pids = [{row[1] for update in rows for row in update} for rows in passes]
    assert pids[0] == pids[1] == pids[2] and len(pids[0]) == 2
    assert {row[2] for update in passes[0] for row in update} == {1}
    one.close()
    one.close()


def test_leaving_in_the_middle_and_starting_again_is_allowed():
    one = feed(Drawing(64), workers=2)
    for portion in one.portions(Cursor()):
        if portion.cursor.offset == 16:
            break
    assert rows_of(one.portions(Cursor(), epochs=1)) == read(Drawing(64), epochs=1)
    one.close()


def test_spawned_workers_deliver_the_same():
    loader = DataLoader(Drawing(24), num_workers=1, multiprocessing_context="spawn")
    one = feed(loader, workers="auto")
    try:
        assert rows_of(one.portions(Cursor(), epochs=1)) == read(Drawing(24), epochs=1)
    finally:
        one.close()


def test_inspect_sees_every_batch_of_this_rank_before_it_moves():
    seen = []
    one = feed(Plain(20), rank=0, world=2, pieces=2, inspect=seen.append, device=torch.device("meta"))
    portions = list(one.portions(Cursor(), epochs=1))
    assert [len(batch[0]) for batch in seen] == [2, 2, 2, 2, 1, 1]
    assert all(batch[1].device == CPU for batch in seen)
    assert all(piece.batch[1].is_meta for portion in portions for piece in portion.pieces)


@dataclasses.dataclass
class Pair:
    left: torch.Tensor
    text: str


class Moves:
    def __init__(self, device="cpu") -> None:
        self.device = device

    def to(self, device):
        return Moves(str(device))


def test_nested_batches_move_as_a_whole():
    Point = namedtuple("Point", "x y")
    t = torch.ones(2)
    batch = {
        "a": [t, (t, 3)],
        "b": Point(t, "s"),
        "c": Pair(t, "text"),
        "d": Moves(),
        "e": pack_sequence([t]),
        "f": None,
    }
    moved = move(batch, torch.device("meta"))
    assert moved["a"][0].is_meta and moved["a"][1][0].is_meta and moved["a"][1][1] == 3
    assert type(moved["b"]) is Point and moved["b"].x.is_meta and moved["b"].y == "s"
    assert type(moved["c"]) is Pair and moved["c"].left.is_meta and moved["c"].text == "text"
    assert moved["d"].device == "meta" and moved["f"] is None
    assert type(moved["e"]) is PackedSequence and moved["e"].data.is_meta and not moved["e"].batch_sizes.is_meta
    assert not batch["a"][0].is_meta


def test_the_cpu_delivers_batches_as_they_were_made():
    made = []

    def collate(rows):
        made.append(object())
        return made[-1]

    delivered = [p.pieces[0].batch for p in feed(Plain(20), collate_fn=collate).portions(Cursor(), epochs=1)]
    assert all(a is b for a, b in zip(delivered, made))


def test_the_next_update_is_started_one_ahead_and_its_error_waits():
    log = []

    def items():
        yield from range(3)
        raise KeyError("broken")

    def start(i):
        log.append(f"start {i}")
        return i

    with pytest.raises(KeyError):
        for i in ahead(items(), start):
            log.append(f"train {i}")
    assert log == ["start 0", "start 1", "train 0", "start 2", "train 1", "train 2"]
    assert list(ahead(iter([]), start)) == [] and list(ahead(iter([1]), start)) == [1]


class Large:
    """A batch for which there is no memory the first times that it is copied."""

    def __init__(self, failures):
        self.failures, self.tensor = failures, torch.ones(3)

    def to(self, device):
        if self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return self.tensor.to(device)


def test_a_batch_that_does_not_fit_beside_the_one_before_is_copied_after_it():
    device, log = torch.device("meta"), []
    assert move(Large(1), device).is_meta  # memory was freed
    with pytest.raises(MemoryLimitError) as caught:
        move([torch.ones(2**18), Large(2)], device)
    assert str(caught.value) == (
        "Out of memory while a rank's batch of 1.0 MiB is copied to meta.\n"
        "  CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "  fix: more processes: each copies its own rows only\n"
        "       a smaller global_batch_size, or shorter rows"
    )
    transfer = Transfer(device)

    def start(batch):
        log.append("start")
        return transfer.start([batch])[0][0]

    for batch in ahead(iter([Large(0), Large(2)]), start):
        log.append("train" if batch.is_meta else "?")
    assert log == ["start", "start", "train", "start", "train"]


def test_a_cuda_transfer_copies_on_its_own_stream_and_the_trainer_waits(monkeypatch):
    log = []

    class Stream:
        def record_event(self):
            log.append("event")
            return "the event"

        def wait_event(self, event):
            log.append(f"wait for {event}")

    @contextlib.contextmanager
    def on(stream):
        log.append("on the copy stream")
        yield
        log.append("off")

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: log.append("pin") or self.clone())
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    transfer = Transfer(torch.device("meta"))
    transfer._stream = Stream()
    moved, event = transfer.start([[torch.ones(2), "text"], None])
    assert log == ["on the copy stream", "pin", "event", "off"]
    assert transfer.finish(moved, event)[0][0].is_meta and moved[1] is None and moved[0][1] == "text"
    assert log[4:] == ["wait for the event"]
    assert pinned(Moves()).device == "cpu"
