"""Curves: TensorBoard reads what is written, a user's logger may fail, nothing is imported before the first point."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

from evener.report.curves import Curves
from evener.report.folder import RunFolder


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def folder(tmp_path, said):
    one = RunFolder(tmp_path / "run", say=said.append)
    yield one
    one.close()


def scalars(folder: RunFolder) -> dict[str, list[tuple[int, float]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's own imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(folder.path))
        reader.Reload()
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def test_tensorboard_reads_the_curves(folder, said):
    curves = Curves(folder)
    for step in range(3):
        curves.log({"loss": 1.0 / (step + 1), "lr": np.float32(0.5), "grad_norm": None}, step)
    assert scalars(folder) == {  # also before close: a killed run keeps what it logged
        "loss": [(0, 1.0), (1, 0.5), (2, pytest.approx(1 / 3))],
        "lr": [(0, 0.5), (1, 0.5), (2, 0.5)],
    }
    curves.close()
    curves.close()
    curves.log({"loss": 1.0}, 4)
    assert len(scalars(folder)["loss"]) == 3
    assert said == []


def test_numbers_that_are_not_finite_are_points_too(folder):
    Curves(folder).log({"loss": float("inf")}, 0)
    assert scalars(folder) == {"loss": [(0, float("inf"))]}


def test_a_point_that_the_disk_cut_short_does_not_hide_the_next(folder, said, monkeypatch):
    curves = Curves(folder)
    curves.log({"loss": 1.0}, 0)
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:20]))
        curves.log({"loss": 2.0}, 1)
    curves.log({"loss": 3.0}, 2)
    assert scalars(folder) == {"loss": [(0, 1.0), (2, 3.0)]}
    assert folder.failures == {"the TensorBoard curves": 1}
    assert len(said) == 1


def test_a_full_disk_is_said_once(folder, said, monkeypatch):
    curves = Curves(folder)

    def refuse(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    for step in range(3):
        curves.log({"loss": 1.0}, step)
    assert said == [
        "warning: the TensorBoard curves could not be written (No space left on device); "
        "the training goes on without it"
    ]
    assert folder.failures == {"the TensorBoard curves": 3}


def test_without_tensorboard_it_is_said_once(folder, said, monkeypatch):
    for name in list(sys.modules):
        if name.split(".")[0] == "tensorboard":
            monkeypatch.delitem(sys.modules, name)

    class Without:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] == "tensorboard":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Without(), *sys.meta_path])
    curves = Curves(folder)
    curves.log({"loss": 1.0}, 0)
    curves.log({"loss": 1.0}, 1)
    assert said == [
        "curves go to events.jsonl only: tensorboard is not installed; "
        'for TensorBoard\'s files: pip install "evener[curves]"'
    ]
    assert folder.failures == {}


def test_a_logger_replaces_tensorboard(folder):
    class Wandb:
        def __init__(self) -> None:
            self.points: list[tuple[dict[str, float], int]] = []

        def log(self, data, step=None, commit=None):
            self.points.append((data, step))

    wandb, calls = Wandb(), []
    Curves(folder, wandb).log({"loss": np.float64(1.0), "grad_norm": None}, 5)
    Curves(folder, lambda values, step: calls.append((values, step))).log({"loss": 2.0}, 6)
    assert wandb.points == [({"loss": 1.0}, 5)]
    assert calls == [({"loss": 2.0}, 6)]
    assert [file.name for file in folder.path.iterdir()] == [".lock", "events.jsonl"]


def test_a_logger_that_fails_is_said_once_and_asked_again(folder, said):
    steps = []

    def logger(values, step):
        steps.append(step)
        raise ConnectionError("no network \x1b[31m")

    curves = Curves(folder, logger)
    for step in range(3):
        curves.log({"loss": 1.0}, step)
    assert steps == [0, 1, 2]
    assert said == [
        "warning: the logger's curves could not be written (ConnectionError: no network ); "
        "the training goes on without it"
    ]
    assert folder.failures == {"the logger's curves": 3}


def test_ctrl_c_in_a_logger_is_not_swallowed(folder):
    def logger(values, step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Curves(folder, logger).log({"loss": 1.0}, 0)


def test_other_ranks_log_nothing(tmp_path):
    calls = []
    folder = RunFolder(tmp_path / "run", active=False)
    Curves(folder, lambda values, step: calls.append(step)).log({"loss": 1.0}, 0)
    Curves(folder).log({"loss": 1.0}, 0)
    assert calls == []
    assert list(tmp_path.iterdir()) == []


def test_nothing_heavy_is_imported(tmp_path):
    """Neither before the first point, nor TensorFlow or torch with it, where TensorFlow is installed."""
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow" / "__init__.py").write_text("")
    code = """
import sys
from evener.report.curves import Curves
from evener.report.folder import RunFolder
from evener.report.console import Console
import evener.report.contract
heavy = ("torch", "tensorflow", "numpy", "rich", "tensorboard")
print([name for name in heavy if name in sys.modules])
curves = Curves(RunFolder("run"))
print([name for name in heavy if name in sys.modules])
curves.log({"loss": 1.0}, 0)
print([name for name in heavy if name in sys.modules])
import threading
print(threading.active_count())
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=True
    )
    assert done.stdout.splitlines() == ["[]", "[]", "['numpy', 'tensorboard']", "1"]
