"""The ways in which a run of two ranks breaks, the same for plain torch, accelerate and Lightning."""

import ctypes
import os
import resource
import signal
import sys
import time
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import _get_default_group, _set_pg_timeout

CLASSES = 3


class Rows(torch.utils.data.Dataset):
    """Features and labels; the rows of the ways that break in the data are as these want them."""

    def __init__(self, how):
        self.label = CLASSES if how == "label" and os.environ.get("RANK", os.environ.get("LOCAL_RANK")) == "1" else 0
        self.width = 1 << 20 if how == "shm" else 4
        self.parse = (lambda row: row) if how == "pickle" else None

    def __len__(self):
        return 400

    def __getitem__(self, row):
        return torch.ones(self.width), self.label


def loader(how):
    workers = {"shm": {"num_workers": 1}, "files": {"num_workers": 1}}
    workers["pickle"] = {"num_workers": 1, "multiprocessing_context": "spawn"}
    return torch.utils.data.DataLoader(Rows(how), batch_size=2, **workers.get(how, {}))


class Model(torch.nn.Module):
    """The second layer takes no part when the way is "unused"; a buffer that fills a small disk when it is "disk"."""

    def __init__(self, how):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, CLASSES), torch.nn.Linear(4, CLASSES)
        self.how = how
        self.register_buffer("large", torch.zeros(1 << 20 if how == "disk" else 1))

    def forward(self, x):
        return self.used(x) if self.how == "unused" else self.used(x) + self.unused(x)


def optimizer(model, groups=1):
    layers = [model.used, model.unused] if groups == 2 else [model]
    return torch.optim.Adam([{"params": list(layer.parameters())} for layer in layers], lr=0.1)


def tear(path):
    """A file as an interrupted save leaves it."""
    os.truncate(path, os.path.getsize(path) // 2)


def load_labels(row):
    raise KeyError(f"labels of row {row}")


KEPT = []


def few_files():
    """Twenty more than are open now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard))


def in_the_step(how, rank, step, batch):
    """What happens between two steps of one rank."""
    if how == "files":
        KEPT.extend([batch, open(os.devnull)])  # noqa: SIM115
        if step == 0:
            few_files()
    if step != 1:
        return
    if how in ("hangs", "evicted"):  # only now: a busy machine may start slowly
        seconds = float(os.environ.get("BREAKS_TIMEOUT", "5"))
        _set_pg_timeout(timedelta(seconds=seconds), _get_default_group())
    if rank != 1:
        return
    if how == "raises":
        load_labels(17)
    if how in ("cleans", "evicted"):
        try:
            load_labels(17)
        finally:  # an upload, a logger: the victims wait for it, or end before it is over
            time.sleep(3 if how == "cleans" else 300)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "segfault":
        ctypes.string_at(0)
    if how == "exits":
        os._exit(0)
    if how.startswith("leaves"):
        sys.exit(3 if how == "leaves-3" else 0)
    if how == "hangs":
        print("asleep", rank, flush=True)
        time.sleep(300)
