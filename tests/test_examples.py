"""The examples are run as a newcomer runs them, and print what they promise."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import runpy
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evener.errors import EvenerError

EXAMPLES = Path(__file__).parent.parent / "examples"
needs_sklearn = pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")


def run_example(folder, name, *arguments, seconds, launcher=("-m", "evener", "run", "--nproc", "2", "--cpu")):
    """Standard output of an example on two processes, started in `folder`; at most `seconds` long."""
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=seconds,
        env={name: value for name, value in os.environ.items() if not name.startswith("EVENER_")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy_in(output):
    return float(re.search(r"test accuracy ([\d.]+) %", output)[1])


@needs_sklearn
def test_digits_reaches_97_percent(tmp_path):
    output = run_example(tmp_path, "digits.py", seconds=180)
    assert "global batch 64 = 2 ranks x 1 microbatch x 32" in output
    assert accuracy_in(output) >= 97.0, output
    folder = re.search(r"tensorboard --logdir (\S+)", output)[1]
    assert (tmp_path / folder / "events.jsonl").exists()


@pytest.mark.full
@needs_sklearn
def test_digits_stops_after_the_epochs_asked_for(tmp_path):
    output = run_example(tmp_path, "digits.py", "--epochs", 2, "--batch", 48, seconds=120)
    assert "global batch 48 = 2 ranks x 1 microbatch x 24" in output
    assert "update 60/60" in output  # 1,437 rows in batches of 48
    assert accuracy_in(output) > 50.0


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}i", *values.shape)
    content = header + values.to(torch.uint8).numpy().tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_digits_reads_the_files_of_mnist_plain_and_compressed(tmp_path):
    """Ten bright rows at ten places: what the network cannot miss if images and labels are read in the right order."""
    generator = torch.Generator().manual_seed(0)
    for part, count, ending in (("train", 400, ""), ("t10k", 101, ".gz")):
        labels = torch.randint(0, 10, (count,), generator=generator)
        images = torch.randint(0, 40, (count, 28, 28), generator=generator)
        images[torch.arange(count), 4 + 2 * labels] = 255
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{ending}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{ending}", labels)
    output = run_example(tmp_path, "digits.py", "--mnist", tmp_path, "--epochs", 4, seconds=120)
    assert accuracy_in(output) == 100.0, output


def test_gpt_learns_evaluates_and_writes(tmp_path):
    small = ("--updates", 40, "--batch", 8, "--length", 32, "--width", 32, "--layers", 2, "--heads", 2)
    output = run_example(tmp_path, "gpt.py", *small, "--lr", 1e-2, seconds=150)
    assert "global batch 8 = 2 ranks x 1 microbatch x 4" in output
    first = float(re.search(r"update 1/40 · loss ([\d.]+)", output)[1])
    nats, bits = map(float, re.search(r"update 40: ([\d.]+) nats per byte here, ([\d.]+) bits", output).groups())
    assert 5.0 < first < 6.5  # no better than guessing among 256 bytes
    assert nats < 3.6
    assert bits < 5.6
    _, _, written = output.partition("def ")
    assert len(written) >= 250, output


def shown_in_the_readme(word):
    """The block of the README that has this command, its first line left out."""
    text = (EXAMPLES.parent / "README.md").read_text("utf-8")
    return re.search(rf"\$ [^\n]*{re.escape(word)}[^\n]*\n(.*?)^```$", text, re.M | re.S)[1]


def test_the_broken_old_script_is_told_as_the_readme_shows(tmp_path):
    command = [sys.executable, "-m", "evener", "run", "--nproc", "2", "--cpu", "--tee", "none"]
    done = subprocess.run(
        [*command, "--log-dir", str(tmp_path), "examples/broken/old.py"], cwd=EXAMPLES.parent, capture_output=True, text=True,
        timeout=300, env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip
    shown = shown_in_the_readme("broken/old.py").splitlines()
    assert done.returncode == 1
    for line in (*shown[1:3], *shown[5:12]):
        assert line in done.stderr.splitlines(), line


def test_the_broken_labels_are_refused_as_the_readme_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["labels.py"])
    with pytest.raises(EvenerError) as raised:
        runpy.run_path(str(EXAMPLES / "broken" / "labels.py"), run_name="__main__")
    assert str(raised.value).splitlines()[:4] == [
        line.removeprefix("evener: ") for line in shown_in_the_readme("broken/labels.py").splitlines()[:4]
    ]


@pytest.mark.full
def test_verify_finds_both_mistakes_as_the_readme_shows(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "evener", "verify", str(EXAMPLES / "broken" / "counts.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    for line in shown_in_the_readme("broken/counts.py").splitlines():
        if line.startswith(("2 processes", "killed", "  likely", "      or")):
            assert line in done.stdout.splitlines(), line


@pytest.mark.parametrize(
    "launcher",
    [(), ("-m", "torch.distributed.run", "--nproc-per-node", "2")],
    ids=["python", "torchrun"],
)
def test_gpt_runs_under_python_and_torchrun_too(launcher, tmp_path):
    tiny = ("--updates", 3, "--batch", 6, "--length", 16, "--width", 16, "--layers", 1, "--heads", 2)
    output = run_example(tmp_path, "gpt.py", *tiny, seconds=400, launcher=launcher)
    assert f"global batch 6 = {'2 ranks' if launcher else '1 rank'} x" in output
    assert "bits per byte on new text" in output
