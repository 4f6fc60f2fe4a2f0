"""What goes wrong without an error is said once: growing memory, many skips, stray tensors, a CPU beside GPUs."""

from __future__ import annotations

import glob
import random

import pytest
import torch

import evener
from evener.run.silent import Growth, cpu_beside_gpus, strays
from tests.models import make, mlp_rows, row_loss

MIB = 1 << 20


def said(samples):
    growth = Growth()
    return [line for update, used in enumerate(samples) if (line := growth.add(update * 10, used))]


def test_memory_that_only_grows_is_said_once_with_its_rate():
    lines = said([(1000 + 10 * second) * MIB for second in range(60)])
    assert len(lines) == 1
    assert "140 MiB in 140 updates, 1,024 KiB each" in lines[0] and "loss.item()" in lines[0]


@pytest.mark.parametrize(
    "samples",
    [
        [1000 * MIB] * 60,
        [(1000 + min(300, 100 * second)) * MIB for second in range(60)],  # warms up, then stays
        [(1000 + 30 * (second % 10)) * MIB for second in range(60)],  # given back now and then
        [(100_000 + 10 * second) * MIB for second in range(30)],  # little of what there is
    ],
    ids=["flat", "plateau", "saw", "small share"],
)
def test_ordinary_memory_says_nothing(samples):
    assert said(samples) == []


def test_noise_alone_says_nothing(test_seed):
    draw = random.Random(test_seed)
    assert said([(1000 + draw.randrange(200)) * MIB for _ in range(500)]) == []


def test_a_list_of_losses_with_their_graphs_is_found_in_a_real_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("evener.run.pulse._SECONDS", 0.0)  # a sample with every update
    monkeypatch.setattr("evener.run.silent._LEAST_SHARE", 0.01)
    kept = []

    def loss_fn(model, batch):
        kept.append((model(batch[0]), torch.zeros(2 * MIB)))  # 8 MiB that nobody needs
        return row_loss(model, batch)

    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with evener.Run(model, optimizer, loss_fn, mlp_rows(36), global_batch_size=6, dir=tmp_path / "run") as run:
        for _ in run.updates(updates=40):
            pass
    assert capsys.readouterr().out.count("memory in use grows with every update: ") == 1
    assert "memory in use grows" in (tmp_path / "run" / "events.jsonl").read_text()


def test_the_twentieth_skipped_update_is_said(tmp_path, capsys):
    def loss_fn(model, batch):
        loss, metrics = row_loss(model, batch)
        return loss * float("nan"), metrics

    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with evener.Run(
        model,
        optimizer,
        loss_fn,
        mlp_rows(36),
        global_batch_size=6,
        precision="fp32",
        on_nonfinite="skip",
        dir=tmp_path / "run",
    ) as run:
        for _ in run.updates(updates=30):
            pass
    text = capsys.readouterr().out
    assert text.count("20 updates were skipped so far, the last is 19: ") == 1 and "max_grad_norm=" in text


def test_tensors_that_stay_behind_are_named():
    model = make("mlp")
    model.table = torch.zeros(3)
    model.register_buffer("kept", torch.zeros(3))
    assert list(strays(model, torch.device("cpu"))) == []
    (line,) = strays(model, torch.device("cuda"))
    assert line == "table is a tensor on cpu that does not move with its model: register_buffer('table', ...)"


def test_a_cpu_beside_gpus_says_why(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"])
    line = cpu_beside_gpus(torch.device("cpu"), False)
    assert line is not None and line.startswith("on the CPU, beside 2 NVIDIA GPUs: this torch (")
    assert "was built without CUDA" in line
    assert cpu_beside_gpus(torch.device("cpu"), True) is None
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cpu_beside_gpus(torch.device("cpu"), False) is None
