"""Killed or stopped anywhere, started again on any number of processes: the bits of an uninterrupted run."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import psutil
import pytest
import torch
from torch.nn import functional as F

import evener
from evener.errors import UsageError
from tests.models import VOCABULARY, make, token_rows

EPOCHS, ROWS, BATCH = 3, 50, 12


class Tokens(torch.utils.data.Dataset):
    """Rows with random augmentation, drawn from three libraries."""

    def __init__(self) -> None:
        self.tokens, self.labels = token_rows(ROWS)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        shift = (random.randrange(3) + numpy.random.randint(3) + int(torch.randint(3, ()))) % VOCABULARY
        return (self.tokens[i] + shift) % VOCABULARY, self.labels[i]


def token_loss(model, batch):
    tokens, labels = batch
    logits = model(tokens)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    hits = ((logits.argmax(-1) == labels) & (labels != -100)).sum()
    count = (labels != -100).sum()
    return evener.Mean(total=total, count=count), {"accuracy": evener.Mean(total=hits, count=count)}


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def new_run(folder, precision="fp32", **keywords):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"dir": folder, "global_batch_size": BATCH, "exact": True, "slice_size": 2, "save_every": 4, **keywords}
    schedule = keywords.pop(
        "scheduler", lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total)
    )
    return evener.Run(
        model, optimizer, token_loss, Tokens(), precision=precision, scheduler=schedule, ema=0.9, **keywords
    )


def evening(folder, stop_at=None, fail_at=None, precision="fp32", keywords=None):
    """A whole evening's script. Returns what a reader of it would see at its end, or why it ended early."""
    run = new_run(folder, precision, **(keywords or {}))
    counter = Counter()
    run.register("counter", counter)
    trail = run.state.setdefault("trail", [])
    try:
        for epoch in run.epochs(EPOCHS):
            for update in epoch:
                counter.value += update.number
                trail.append([update.number, update.epoch, round(update.loss, 6), update.lr])
                if update.number == stop_at:
                    run.stop("enough for today")
                if update.number == fail_at:
                    raise RuntimeError("the power went")
            trail.append(
                ["epoch", epoch.number, epoch.updates, round(epoch.loss, 6), round(epoch.metrics["accuracy"], 6)]
            )
            score = run.evaluate(token_rows(9, seed=5))["accuracy"]
            if score >= run.state.get("best", 0):
                run.state["best"] = score
                run.save(name="best")
        return "finished", run.digest(), trail, counter.value, run.state["best"], Path(run.path).name
    except evener.Stopped as stopped:
        return "stopped", stopped.code, stopped.reason
    except RuntimeError as error:
        run.loop.ended = False  # it would have ended a script
        return "failed", str(error)
    finally:
        run.close()


def summary(result):
    """Without epoch rows that a resume in the middle cannot count: their number of updates in this process."""
    state, digest, trail, counter, best, _name = result
    return state, digest, [row if row[0] != "epoch" else row[:2] + row[3:] for row in trail], counter, best


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    results = ranks(1)(evening, str(tmp_path_factory.mktemp("whole") / "run"))
    assert results[0][0] == "finished" and len([row for row in results[0][2] if row[0] != "epoch"]) == 15
    return summary(results[0])


@pytest.mark.parametrize(("first", "second", "at"), [(1, 1, 6), (4, 3, 3), (3, 4, 4), (2, 6, 9), (3, 3, 14), (1, 2, 0)])
def test_stopped_and_started_on_another_number_of_processes(ranks, tmp_path, uninterrupted, first, second, at):
    folder = str(tmp_path / "run")
    stopped = ranks(first)(evening, folder, at)
    if stopped[0][0] == "stopped":
        assert set(stopped) == {("stopped", 75, "enough for today")}
        results = ranks(second)(evening, folder)
        assert {result[5] for result in results} == {"run"}  # in the same directory
    else:
        assert at == 14  # asked after the last update: the loop came to its end first
        results = stopped
    assert all(summary(result) == uninterrupted for result in results)


@pytest.mark.parametrize(("first", "second", "at"), [(1, 3, 7), (4, 2, 13), (3, 3, 4)])
def test_died_and_started_again(ranks, tmp_path, uninterrupted, first, second, at):
    folder = str(tmp_path / "run")
    assert set(ranks(first)(evening, folder, None, at)) == {("failed", "the power went")}
    results = ranks(second)(evening, folder)
    assert all(summary(result) == uninterrupted for result in results)


def test_several_stops_with_another_cut_each_time(ranks, tmp_path, uninterrupted):
    folder = str(tmp_path / "run")
    for world, at, keywords in ((2, 2, {"microbatch_size": 4}), (3, 5, {"num_workers": 1}), (1, 11, {}), (4, None, {})):
        results = ranks(world)(evening, folder, at, None, "fp32", keywords)
    assert all(summary(result) == uninterrupted for result in results)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_with_its_scaler(ranks, tmp_path, precision):
    whole = ranks(2)(evening, str(tmp_path / "whole"), None, None, precision)
    ranks(3)(evening, str(tmp_path / "run"), 6, None, precision)
    again = ranks(2)(evening, str(tmp_path / "run"), None, None, precision)
    assert [summary(one) for one in again] == [summary(one) for one in whole]


def resumed_with(folder, keywords):
    try:
        run = new_run(folder, **keywords)
    except UsageError as error:
        return "refused", str(error)
    name, number = Path(run.path).name, run.number
    run.close()
    return name, number


def said_in(folder):
    events = [json.loads(line) for line in Path(folder, "events.jsonl").read_text().splitlines()]
    return [event["text"] for event in events if event["kind"] == "warning"]


def test_resume_auto_must_never(ranks, tmp_path):
    folder = str(tmp_path / "digits")
    assert ranks(2)(resumed_with, folder, {"resume": "must"})[0][0] == "refused"
    ranks(2)(evening, folder, 5)
    for name, number in ranks(2)(resumed_with, folder, {}):
        assert (name, number) == ("digits", 7)  # the request travels with the next update's losses
    changed = {"max_grad_norm": 0.5, "seed": 7}
    kind, text = ranks(1)(resumed_with, folder, {**changed, "resume": "must"})[0]
    assert kind == "refused" and "seed: 0, now 7" in text and "max_grad_norm: None, now 0.5" in text
    assert ranks(1)(resumed_with, folder, changed)[0] == ("digits-2", 0)
    said = said_in(f"{folder}-2")
    assert said[0].endswith("digits is another run:") and "  seed: 0, now 7" in said
    assert ranks(1)(resumed_with, folder, {"resume": "never"})[0] == ("digits-3", 0)
    # the first one can still be continued, and once finished a new start begins anew
    assert ranks(1)(evening, folder)[0][0] == "finished"
    assert ranks(1)(resumed_with, folder, {})[0] == ("digits-4", 0)


def test_keep_checkpoints_and_best(ranks, tmp_path):
    folder = tmp_path / "run"
    ranks(1)(evening, str(folder), None, None, "fp32", {"keep_checkpoints": 2, "save_every": 3})
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best", "update-12", "update-15"]


def test_a_torn_newest_checkpoint_is_named_and_the_previous_used(ranks, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    ranks(2)(evening, str(folder), None, 10)
    newest = folder / "checkpoints" / "update-8"
    shard = next(path for path in newest.iterdir() if path.suffix == ".safetensors")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    results = ranks(2)(evening, str(folder))
    said = said_in(folder)
    assert any("checkpoint update-8 is refused" in line for line in said)
    assert "checkpoint update-4 is used instead" in said
    assert all(summary(result) == uninterrupted for result in results)


SCRIPT = """
import sys, time
sys.path.insert(0, {root!r})
from tests.test_resume_is_bitwise import new_run
import torch
torch.set_num_threads(1)
run = new_run("run", **{keywords!r})
for update in run.updates(epochs=3):
    print("update", update.number, flush=True)
    time.sleep({pause})
print("digest", run.digest(), flush=True)
run.close()
"""


def launch(tmp_path, command, pause=0.0, keywords=None):
    (tmp_path / "train.py").write_text(
        SCRIPT.format(root=str(Path(__file__).parents[1]), pause=pause, keywords=keywords or {})
    )
    return subprocess.Popen(
        [sys.executable, *command, "train.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


def digest_in(output):
    return next(line.split()[1] for line in output.splitlines() if line.startswith("digest"))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", pytest.param("SIGUSR1", marks=pytest.mark.full)])
def test_a_signal_saves_and_ends_with_the_requeue_code(tmp_path, name):
    process = launch(tmp_path, [], pause="update.number > 1")  # a second each: the signal comes before the end
    for line in process.stdout:
        if line == "update 2\n":
            process.send_signal(getattr(signal, name))
            break
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 75, output
    assert f"{name}: stops after this update and saves" in output and "start it again to continue" in output
    again = launch(tmp_path, [])
    output, _ = again.communicate(timeout=120)
    assert again.returncode == 0 and "update 2\n" not in output and "continues run after" in output, output
    (tmp_path / "whole").mkdir()
    whole = launch(tmp_path / "whole", [])
    assert digest_in(whole.communicate(timeout=120)[0]) == digest_in(output)


def test_killed_under_evener_run_and_started_on_another_number(tmp_path):
    waits = "600 * (update.number == 6)"  # it is killed there, however late that is
    process = launch(tmp_path, ["-m", "evener", "run", "--cpu", "--nproc", "3"], pause=waits)
    for line in process.stdout:
        if line == "update 6\n":
            below = psutil.Process(process.pid).children(recursive=True)
            until = time.monotonic() + 60
            while not (tmp_path / "run" / "checkpoints" / "update-4").exists() and time.monotonic() < until:
                time.sleep(0.1)  # it is written behind the training
            process.kill()
            break
    process.communicate(timeout=60)
    psutil.wait_procs(below, timeout=60)
    again = launch(tmp_path, ["-m", "evener", "run", "--cpu", "--nproc", "2"])
    output, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "continues run after 4 updates" in output, output
    (tmp_path / "whole").mkdir()
    whole = launch(tmp_path / "whole", [])
    assert digest_in(whole.communicate(timeout=120)[0]) == digest_in(output)
