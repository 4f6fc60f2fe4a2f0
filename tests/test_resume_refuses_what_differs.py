"""A checkpoint continues the run that it is of: what differs is named; other rows only on request; other code is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evener
from evener.errors import UsageError
from tests.models import MLP, make, mlp_rows, row_loss

lrs = torch.optim.lr_scheduler
ROWS = 36


def start(folder, *, model=None, optimizer=torch.optim.AdamW, groups=None, rows=ROWS, scheduler=None, **keywords):
    model = model if model is not None else make("mlp")
    made = optimizer(groups(model) if groups else model.parameters(), **keywords.pop("options", {"lr": 0.01}))
    fixed = {"global_batch_size": 6, "exact": True, "slice_size": 2, "precision": "fp32", "dir": folder / "run"}
    schedule = scheduler(made) if scheduler else None
    return evener.Run(model, made, row_loss, mlp_rows(rows), **{**fixed, "scheduler": schedule, **keywords})


def interrupted(folder, stop_after=4, **keywords):
    with start(folder, **keywords) as run:
        with pytest.raises(evener.Stopped):
            for update in run.updates(updates=20):
                if update.number == stop_after - 1:
                    run.stop()
        return run.digest()


def two_groups(model, weight_decay=0.1):
    return [{"params": model.body.parameters(), "weight_decay": weight_decay}, {"params": model.head.parameters()}]


def steps(size):
    return lambda optimizer: lrs.StepLR(optimizer, size)


FP16 = {"precision": "fp16", "exact": False, "slice_size": None}
CASES = {  # what it was (beyond the usual), what it is now, what is said
    "seed": ({}, {"seed": 7}, "seed: 0, now 7"),
    "global batch": ({}, {"global_batch_size": 12}, "global_batch_size: 6, now 12"),
    "slice size": ({}, {"slice_size": 3}, "slice_size: 2, now 3"),
    "precision": ({}, {"precision": "bf16"}, "precision: 'fp32', now 'bf16'"),
    "optimizer class": ({}, {"optimizer": torch.optim.SGD}, "optimizer: 'AdamW', now 'SGD'"),
    "optimizer groups": ({}, {"groups": two_groups}, "optimizer parameters: "),
    "a group's setting": ({"groups": two_groups}, {"groups": lambda m: two_groups(m, 0.2)}, "optimizer group 0 weight_decay: 0.1, now 0.2"),
    "learning rate": ({}, {"options": {"lr": 0.02}}, "optimizer group 0 lr: 0.01, now 0.02"),
    "schedule": ({"scheduler": steps(3)}, {"scheduler": lambda o: lrs.ConstantLR(o)}, "schedule: 'StepLR', now 'ConstantLR'"),
    "no schedule": ({"scheduler": steps(3)}, {}, "schedule: 'StepLR', now None"),
    "schedule settings": ({"scheduler": steps(3)}, {"scheduler": steps(4)}, "schedule settings: {'step_size': 3"),
    "dataset length": ({}, {"rows": 40}, "dataset rows: 36, now 40"),
    "shapes": ({}, {"model": MLP(hidden=9)}, "parameter body.0.weight: (8, 5) float32, now (9, 5) float32"),
    "nothing": ({}, {"model": make("mlp").requires_grad_(True)}, None),
    "loss scale": (FP16, {**FP16, "scaler": {"growth_interval": 7}}, "optimizer loss scale: "),
    "ema": ({}, {"ema": 0.9}, "ema: None, now 0.9"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_differs_is_named(tmp_path, case, capsys):
    then, now, said = CASES[case]
    interrupted(tmp_path, **then)
    capsys.readouterr()
    if said is None:  # the control: an equal model continues
        with start(tmp_path, **now, resume="must") as run:
            assert run.number == 4
        return
    with pytest.raises(UsageError, match=r"nothing in .* can be continued") as caught:
        start(tmp_path, **now, resume="must")
    assert said in str(caught.value), str(caught.value)
    with start(tmp_path, **now) as run:  # auto: another run, beside it
        assert (run.number, Path(run.dir).name) == (0, "run-2")
    out = capsys.readouterr().out
    assert "run is another run:" in out and said in out, out


def with_function(folder, function, updates, **keywords):
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fixed = {"global_batch_size": 6, "precision": "fp32", "dir": folder / "run", "scheduler": function}
    with evener.Run(model, optimizer, row_loss, mlp_rows(ROWS), **fixed, **keywords) as run:
        for update in run.updates(updates=updates):
            if update.number == 3:
                run.stop()


def test_a_schedule_that_a_function_makes_is_compared_when_it_is_made(tmp_path):
    def cosine(optimizer, total):
        return lrs.CosineAnnealingLR(optimizer, total)

    with pytest.raises(evener.Stopped):
        with_function(tmp_path, cosine, 20)
    with pytest.raises(UsageError, match="LinearLR that scheduler= made is not the one of the checkpoint") as caught:
        with_function(tmp_path, lambda optimizer, total: lrs.LinearLR(optimizer, total_iters=total), 20)
    assert "kind: 'CosineAnnealingLR', now 'LinearLR'" in str(caught.value)
    with pytest.raises(UsageError, match="T_max: 20, now 30"):
        with_function(tmp_path, cosine, 30)
    with_function(tmp_path, cosine, 20)


def test_other_rows_on_request_begin_with_the_next_epoch(tmp_path, capsys):
    interrupted(tmp_path, stop_after=8, rows=ROWS)  # six updates an epoch: in the middle of epoch 1
    with pytest.raises(UsageError, match="accept_changed_data=True"):
        start(tmp_path, rows=48, resume="must")
    with start(tmp_path, rows=48, accept_changed_data=True, resume="must") as run:
        out = capsys.readouterr().out
        assert "36 rows then, 48 now: accepted; their order begins with epoch 2" in out, out
        assert (run.number, run.loop.cursor.epoch, run.loop.cursor.offset) == (8, 2, 0)
        epochs = [(update.epoch, update.rows) for update in run.updates(epochs=3)]
    assert epochs == [(2, 6)] * 8
    capsys.readouterr()
    # What was accepted is now the run's: the flag left in a command changes nothing, and rows are not skipped again.
    interrupted(tmp_path / "2", stop_after=8)
    interrupted(tmp_path / "2", stop_after=11, rows=48, accept_changed_data=True)
    with start(tmp_path / "2", rows=48, accept_changed_data=True, resume="must") as run:
        assert (run.number, run.loop.cursor.epoch, run.loop.cursor.offset) == (11, 2, 18)
    assert "rows then" not in capsys.readouterr().out.rpartition("stopped after 11 updates")[2]


def test_nothing_else_is_accepted_with_the_rows(tmp_path):
    interrupted(tmp_path)
    with pytest.raises(UsageError, match="seed: 0, now 1"):
        start(tmp_path, rows=48, seed=1, accept_changed_data=True, resume="must")


def test_layers_without_parameters_and_other_hardware_are_said_and_continued(tmp_path, capsys, monkeypatch):
    interrupted(tmp_path)
    model = make("mlp")
    model.body[1] = nn.ReLU()
    monkeypatch.setattr("evener.run.saving.hardware", lambda device: "another")
    capsys.readouterr()
    with start(tmp_path, model=model, resume="must") as run:
        assert run.number == 4
    out = capsys.readouterr().out
    assert "changed since the checkpoint, and continued all the same:" in out
    assert "layer body.1: 'Tanh()', now 'ReLU()'" in out
    assert "close from here on, not exact:" in out and "now 'another'" in out


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.test_resume_refuses_what_differs import *
run = start(Path("."), rows={rows})
print("AT", run.number, run.loop.cursor.epoch, run.loop.cursor.offset)
for update in run.updates(updates={updates}):
    if update.number == 2:
        run.stop()
"""


def test_the_flag_reaches_the_ranks(tmp_path, capsys):
    from evener.cli import main

    (tmp_path / "train.py").write_text("")
    assert main(["run", "--cpu", "--accept-changed-data", "--dry-run", str(tmp_path / "train.py")]) == 0
    assert '"overrides": {"accept_changed_data": true}' in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.skipif(sys.platform == "win32", reason="evener run")
def test_the_flag_of_evener_run_and_a_changed_script(tmp_path):
    def launch(rows, *words):
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        (tmp_path / "train.py").write_text(SCRIPT.format(root=root, rows=rows, updates=9))
        return subprocess.run(
            [sys.executable, "-m", "evener", "run", "--cpu", *words, "train.py"], cwd=tmp_path, capture_output=True,
            text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    assert launch(36).returncode == 75
    done = launch(42, "--accept-changed-data")
    assert done.returncode == 0, done.stderr
    assert "AT 3 1 0" in done.stdout, done.stdout
    assert "the script has changed" in done.stdout
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["accept_changed_data"] == {"value": True, "origin": "flag"}
