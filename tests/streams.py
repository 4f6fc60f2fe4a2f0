"""Streams as people write them, for the tests: shuffled, sharded, with and without a state, and wrong in many ways."""

from __future__ import annotations

import random

import torch
from torch.utils.data import IterableDataset, get_worker_info


class Numbers(IterableDataset):
    """Rows 0 .. rows-1, shuffled anew in every epoch by Python's generator, under noise from torch's."""

    def __init__(self, rows, shuffled=True):
        self.rows, self.shuffled, self.pulled = rows, shuffled, 0

    def ids(self):
        ids = list(range(self.rows))
        if self.shuffled:
            random.shuffle(ids)
        return ids

    def row(self, i):
        self.pulled += 1
        return torch.tensor([float(i), *torch.randn(3).tolist()]), i % 3

    def __iter__(self):
        for i in self.ids():
            yield self.row(i)


class WithState(Numbers):
    """Knows where it is, and goes there without reading."""

    def __init__(self, rows):
        super().__init__(rows)
        self.at, self.epoch, self.order = 0, 0, None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = random.Random(self.epoch).sample(range(self.rows), self.rows)
        while self.at < self.rows:
            i = order[self.at]
            self.at += 1
            yield self.row(i)
        self.at = 0

    def state_dict(self):
        return {"at": self.at, "as a tensor": torch.tensor([self.at])}

    def load_state_dict(self, state):
        assert state["as a tensor"].tolist() == [state["at"]]
        self.at = state["at"]


class AllIsState(WithState):
    """Its state is whatever it has."""

    def row(self, i):
        return torch.tensor([float(i), *torch.randn(3).tolist()]), i % 3

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, state):
        vars(self).update(state)


class ShuffledWithState(Numbers):
    """Shuffles in its body by the seeded generators, and goes to where it was in that order."""

    at = start = 0

    def __iter__(self):
        ids = self.ids()
        start, self.start = self.start, 0
        for at in range(start, self.rows):
            self.at = at + 1
            yield self.row(ids[at])

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]


class Anew(WithState):
    """Begins anew whenever it is iterated, and knows where it is."""

    def __iter__(self):
        self.at = 0
        yield from super().__iter__()


class Mine(Numbers):
    """The rows of one rank: those from `rank` on in steps of `world`, and `less` of them missing at the end."""

    def __init__(self, rows, rank, world, less=0):
        super().__init__(rows)
        self.rank, self.world, self.less = rank, world, less

    def ids(self):
        ids = list(range(self.rank, self.rows, self.world))
        ids = ids[: len(ids) - self.less]
        random.shuffle(ids)
        return ids


class MineWithState(WithState):
    def __init__(self, rows, rank, world, less=0):
        super().__init__(len(range(rank, rows, world)) - less)
        self.rank, self.world = rank, world

    def row(self, i):
        return super().row(self.rank + i * self.world)


class ByWorkers(Numbers):
    """Shards itself over the workers of a DataLoader."""

    def ids(self):
        info = get_worker_info()
        return range(self.rows) if info is None else range(info.id, self.rows, info.num_workers)


class Breaks(Numbers):
    def __iter__(self):
        yield from (self.row(i) for i in range(10))
        raise OSError("the shard is gone")


class Forgets(WithState):
    """Stays where load_state_dict put it: every later epoch begins there."""

    def __iter__(self):
        for at in range(self.at, self.rows):
            self.at = at + 1
            yield torch.tensor([float(at)] * 4), 0
        self.at = self.start

    start = 0

    def load_state_dict(self, state):
        self.at = self.start = state["at"]


class Lags(WithState):
    """Counts a row after it was yielded: the state of a moment after the row does not have it."""

    def __iter__(self):
        while self.at < self.rows:
            yield torch.tensor([float(self.at)] * 4), 0
            self.at += 1
        self.at = 0
