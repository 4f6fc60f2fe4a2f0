"""A training in which everything that can be lost is used, and which dies where it is told to: see tests/chaos.py.

Its argument is JSON: dir, epochs, save_every, workers, and the files `progress` (a line per update made) and `result`.
Optional: no_pickle, kill {"rank", "update", "where", "call"}, break_at (an update), save_at, load_at.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import numpy
import torch
from torch.nn import functional as F

import evener
from tests.models import VOCABULARY, make, token_rows

told = json.loads(sys.argv[1])
ROWS, BATCH = 38, 12  # four updates an epoch, the last one of two rows
kill = told.get("kill") or {}
armed = {"where": ""}
seen: list[int] = []


def die(where):
    if armed["where"] == where:
        os.kill(os.getpid(), signal.SIGKILL)


class Rows(torch.utils.data.Dataset):
    """Rows with their number, under random augmentation by three libraries."""

    def __init__(self):
        self.tokens, self.labels = token_rows(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        shift = (random.randrange(3) + numpy.random.randint(3) + int(torch.randint(3, ()))) % VOCABULARY
        return (self.tokens[i] + shift) % VOCABULARY, self.labels[i], i


def loss_fn(model, batch):
    tokens, labels, ids = batch
    seen.extend(ids.tolist())
    die("forward")
    total = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
    return evener.Mean(total=total, count=(labels != -100).sum())


def metric(model, batch):
    die("evaluate")
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten(), ignore_index=-100)


def die_in_a_save():
    """At the n-th call of the writer that begins after the update."""
    left = [kill.get("call", 0)]

    def wrapped(real):
        def call(*args, **keywords):
            if armed["where"] == "save" and threading.current_thread().name == "evener-checkpoint":
                left[0] -= 1
                if left[0] < 0:
                    die("save")
            return real(*args, **keywords)

        return call

    for name in ("open", "write", "fsync", "rename", "mkdir"):
        setattr(os, name, wrapped(getattr(os, name)))


class Counter:
    value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def forbid_pickle():
    """Whatever reads a pickle from here on ends the run. Data workers use their own pipes: there are none then."""
    import pickle

    def refuse(*args, **keywords):
        raise AssertionError("a pickle was read")

    pickle.load = pickle.loads = torch.load = torch.serialization.load = refuse
    pickle.Unpickler = pickle._Unpickler = refuse
    for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"):
        setattr(torch.distributed, name, refuse)
        setattr(torch.distributed.distributed_c10d, name, refuse)


if told.get("no_pickle"):
    forbid_pickle()
if kill.get("where") == "save":
    die_in_a_save()
evener.seed(0)
model = make()
run = evener.Run(
    model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, Rows(), dir=told["dir"], global_batch_size=BATCH,
    exact=True, slice_size=2, precision="fp32", ema=0.9, max_grad_norm=1.0, num_workers=told.get("workers", 0),
    scheduler=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total),
    save_every=told["save_every"], keep_checkpoints=2, timeout=120,
)  # fmt: skip
counter = Counter()
run.register("counter", counter)
ledger = run.state.setdefault("ledger", [])
progress = os.open(told["progress"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
if run.is_main:
    os.write(progress, b"begun\n")
left_early = False
for update in run.updates(epochs=told["epochs"]):
    ids = sorted(one for rank in evener.comm.all_gather(seen) for one in rank)
    seen.clear()
    run.state["ledger"].append([update.number, update.epoch, ids])
    counter.value += int(torch.randint(1000, ()))  # the script's own draws go on where they were
    if run.is_main:
        os.write(progress, f"{update.number}\n".encode())
    if update.number == told.get("save_at"):
        run.save("mine")
    if update.number == told.get("load_at"):
        marker = f"{told['progress']}.back"  # outside of what is put back: once is enough
        if evener.comm.broadcast(os.path.isdir(f"{run.path}/checkpoints/mine") and not os.path.exists(marker)):
            if run.is_main:
                open(marker, "w").close()
            run.load("mine")
    if update.number == kill.get("update") and run.rank == kill["rank"] % run.world_size:
        armed["where"] = kill["where"]
        die("body")
    if update.number == told.get("break_at"):
        left_early = True
        break
    if update.ends_epoch:
        run.evaluate(Rows(), metric_fn=metric)
if not left_early:
    digest = run.digest()
    if run.is_main:
        with open(f"{told['result']}.tmp", "w") as file:
            json.dump({"digest": digest, "ledger": run.state["ledger"], "counter": counter.value}, file)
        os.replace(f"{told['result']}.tmp", told["result"])
run.close()
