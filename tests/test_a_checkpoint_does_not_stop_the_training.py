"""Checkpoints are written behind the training: what is saved is the state of then, and a full disk stops nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import evener
from evener.checkpoint import store, tensors
from evener.errors import CheckpointError
from tests.models import make, mlp_rows, row_loss

WORLDS = [1, 3]


def begin(folder, **keywords):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fixed = {"global_batch_size": 6, "exact": True, "slice_size": 2, "precision": "fp32", "dir": folder}
    return evener.Run(model, optimizer, row_loss, mlp_rows(36), **{**fixed, **keywords})


def events(folder, kind):
    with open(os.path.join(folder, "events.jsonl")) as file:
        return [event for event in map(json.loads, file) if event["kind"] == kind]


def test_what_is_saved_is_the_state_of_then(ranks, tmp_path):
    hold = threading.Event()
    started = threading.Event()
    real = tensors.write_pieces

    def slow(descriptor, pieces):
        if threading.current_thread().name == "evener-checkpoint":
            started.set()
            assert hold.wait(60)
        return real(descriptor, pieces)

    store.write_pieces = slow
    try:
        with begin(tmp_path / "run", save_every=2) as run:
            digests = []
            for update in run.updates(updates=4):
                digests.append(run.digest())
                if update.number == 2:
                    assert started.wait(60)  # begun before this update, of the state after two
                    assert not (tmp_path / "run" / "checkpoints" / "update-2").exists()
                    hold.set()
    finally:
        store.write_pieces = real
    with begin(tmp_path / "again", resume="never") as run:
        states, about = store.read(tmp_path / "run" / "checkpoints" / "update-2")
        run.loop.restore(states)
        assert about["update"] == 2
        assert run.digest() == digests[1]
        assert run.digest() != digests[2]


def test_a_state_dict_stays_what_it_was_and_a_save_makes_one_copy(tmp_path):
    with begin(tmp_path / "run", save_every=2) as run:
        for update in run.updates(updates=4):
            if update.number == 1:
                kept, live = run.engine.state_dict(), run.engine.state_dict(copy=False)
                before = {name: tensor.clone() for name, tensor in kept["model"].items()}
        assert all(torch.equal(kept["model"][name], before[name]) for name in before)
        assert not torch.equal(live["model"]["head.weight"], before["head.weight"])
        assert live["model"]["head.weight"].data_ptr() == run.model.head.weight.data_ptr()
        assert kept["targets"][""]["optimizer"]["state"][0]["step"] == 2


def train_and_end(folder, at):
    run = begin(folder, save_every=2, keep_checkpoints=9)
    for update in run.updates(epochs=2):
        if update.number == at:
            break
    digest = run.digest()
    run.close()
    return digest


@pytest.mark.parametrize("world", WORLDS)
def test_every_checkpoint_is_there_when_the_run_is_closed(ranks, tmp_path, world):
    digests = ranks(world)(train_and_end, str(tmp_path / "run"), 5)
    assert len(set(digests)) == 1
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["update-2", "update-4"]
    told = events(tmp_path / "run", "checkpoint")
    assert [event["update"] for event in told] == [1, 3]
    assert all(event["blocked_seconds"] >= 0 and event["seconds"] > 0 for event in told)


@contextlib.contextmanager
def small_disk(path, size):
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", path], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_keeps_the_earlier_one_and_the_training(tmp_path, capsys):
    with small_disk(tmp_path / "disk", "1m") as disk:
        filler = disk / "filler"
        run = begin(disk / "run", save_every=2)
        updates = run.updates(updates=12)
        seen = []
        for update in updates:
            seen.append(update.number)
            if update.number == 3:  # that of update 2 is written or in work
                run.saving.landed(wait=True)
                with contextlib.suppress(OSError), open(filler, "wb") as file:
                    while True:
                        file.write(b"\0" * 4096)
            if update.number == 5:
                run.saving.landed(wait=True)
                filler.unlink()
        run.close()
        assert seen == list(range(12))
        names = sorted((path.name for path in (disk / "run" / "checkpoints").iterdir()), key=lambda n: int(n[7:]))
        assert names[-1] == "update-12" and "update-4" not in names and not [n for n in names if n.startswith(".")]
    text = capsys.readouterr().out
    assert "no checkpoint of update 4: Disk full: " in text
    assert "bytes are available" in text or "are available. Training goes on; earlier ones stay." in text


def test_a_script_that_leaves_without_its_newest_checkpoint_ends_with_an_error(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        run = begin(disk / "run", save_every=2)
        for update in run.updates(updates=12):
            if update.number == 1:
                with contextlib.suppress(OSError), open(disk / "filler", "wb") as file:
                    while True:
                        file.write(b"\0" * 4096)
            if update.number == 3:
                break
        with pytest.raises(CheckpointError, match="Disk full"):
            run.close()
        (disk / "filler").unlink()


SCRIPT = """
import sys, threading, time
sys.path.insert(0, {root!r})
import os
real = os.write
def slow(descriptor, data):
    if threading.current_thread().name == "evener-checkpoint":
        time.sleep(0.2)
    return real(descriptor, data)
os.write = slow
from tests.test_a_checkpoint_does_not_stop_the_training import begin
run = begin("run", save_every=2)
for update in run.updates(updates=12):
    if update.number == 2:
        {end}
"""


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "end",
    ["break", pytest.param("raise SystemExit(0)", marks=FULL), pytest.param("raise ValueError('mine')", marks=FULL)],
)
def test_python_waits_for_a_checkpoint_that_is_being_written(tmp_path, end):
    (tmp_path / "train.py").write_text(
        SCRIPT.format(root=os.path.dirname(os.path.dirname(os.path.abspath(__file__))), end=end)
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert time.monotonic() - began > 0.3
    assert done.returncode == (1 if "ValueError" in end else 0), done.stderr
    store.read(tmp_path / "run" / "checkpoints" / "update-2")
    left = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert left == ["update-2"]
