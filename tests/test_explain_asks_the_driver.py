"""What the driver said about the GPUs when a rank failed is recorded, and explains what the message alone does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.cli.explain import explain_run
from evener.errors import LaunchError
from evener.gpus import Gpu, Health, Process, Snapshot, read_recording, to_json
from tests.fakenvml import EIGHT, Fake, needs_compiler

GIB = 1024**3
# The form before 2.1, which lists no other process.
OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB (GPU 0; 79.15 GiB total capacity; 4.00 GiB already allocated; "
    "1.12 GiB free; 4.50 GiB reserved in total by PyTorch)"
)


def failed(folder: Path, kind: str, message: str, *gpus: Gpu) -> str:
    """What `evener run` says about a rank that failed so, with this answer of the driver beside its record."""
    trace = f'Traceback (most recent call last):\n  File "train.py", line 9, in <module>\n    y = model(x)\n{kind}: {message}\n'
    error = {"type": kind, "module": "builtins", "message": message, "where": None, "traceback": trace}
    ended = {"how": "exception", "code": 1, "time": 1.0, "monotonic_ns": 1, "errors": [error]}
    folder.mkdir(exist_ok=True)
    (folder / "rank0.json").write_text(json.dumps({"rank": 0, "pid": 40, "started": 1.0, "ended": ended}))
    (folder / "rank0.log").write_text("step 1\n")
    (folder / "gpus.json").write_text(json.dumps(to_json(Snapshot("570.86.15", "12.8", "nvml", gpus))) if gpus else "")
    return explain_run(LaunchError(f"rank 0 failed: {kind}", evidence=["logs"]), str(folder), 1e12, None)


def held(*processes: Process) -> Gpu:
    return Gpu(3, "GPU-3", slot=0, memory_total_bytes=80 * GIB, memory_used_bytes=78 * GIB, processes=processes)


@pytest.fixture(autouse=True)
def english(monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")


def test_who_held_the_memory_is_named_though_the_message_does_not_say(tmp_path):
    me = Process(40, "me", "python train.py", 5 * GIB)
    other = Process(77, "ann", "python big.py", 72 * GIB)
    text = failed(tmp_path, "RuntimeError", OOM, held(other, me))
    assert "oom-other-process: " in text and "Others hold 72.00 GiB of the 79.15 GiB" in text and "pid 77" in text
    assert "-p 77" in text, "the command names the process"
    kept = (tmp_path / "kernel.log").read_text()
    assert "NVML: GPU 3 (cuda:0): process 77 of ann holds 72.0 GiB" in kept
    assert "NVML: GPU 3 (cuda:0): 78.0 GiB of 80.0 GiB taken at the failure" in kept


def test_the_ranks_own_memory_is_nobody_elses(tmp_path):
    text = failed(
        tmp_path,
        "RuntimeError",
        OOM.replace("4.00 GiB already", "74.00 GiB already"),
        held(Process(40, memory_bytes=78 * GIB)),
    )
    assert "oom-other-process" not in text and "oom-capacity: " in text


def test_a_gpu_that_was_lost_is_the_cause_of_an_error_without_a_name(tmp_path):
    error = "CUDA error: unspecified launch failure"
    lost = Gpu(5, "GPU-5", slot=1, error="GPU is lost")
    assert "gpu-hardware: " in failed(tmp_path / "a", "RuntimeError", error, lost)
    worn = Gpu(5, "GPU-5", slot=1, health=Health(remapped_rows_failed=True))
    assert "gpu-hardware: " in failed(tmp_path / "b", "RuntimeError", error, worn)
    well = Gpu(5, "GPU-5", slot=1, health=Health(ecc_uncorrected_errors=0), memory_total_bytes=GIB, memory_used_bytes=0)
    assert "gpu-hardware: " not in failed(tmp_path / "c", "RuntimeError", error, well)


def test_a_driver_that_gave_no_answer_hides_nothing(tmp_path):
    assert "oom-" in failed(tmp_path, "RuntimeError", OOM)


SCRIPT = """\
import os, sys
with open(f"{sys.argv[1]}/{os.getpid()}", "w") as file:  # as a CUDA context would, this process takes memory
    file.write("0 C 5000")
raise RuntimeError(sys.argv[2])
"""


@needs_compiler
def test_evener_run_asks_while_the_failed_rank_still_holds_its_memory(tmp_path):
    fake = Fake(tmp_path, EIGHT)
    fake.occupy(os.getpid(), "0 C 72000")
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--gpus", "0,", "--share", "--lock-folder", str(tmp_path / "locks"), "--log-dir", str(tmp_path / "logs")]
    command = [sys.executable, "-m", "evener", "run", *options, "train.py", str(fake.processes), OOM]
    environ = fake.environ(LC_ALL="C")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "oom-other-process: " in done.stderr, done.stderr
    assert f"pid {os.getpid()}" in done.stderr
    (recording,) = tmp_path.glob("logs/**/gpus.json")
    (gpu,) = (one for one in read_recording(str(recording)).gpus if one.index == 0)
    rank = json.loads((recording.parent / "rank0.json").read_text())["pid"]
    assert {one.pid: one.memory_bytes for one in gpu.processes} == {os.getpid(): 72000 << 20, rank: 5000 << 20}
    again = [sys.executable, "-m", "evener", "explain", "--json", str(recording.parent)]
    answer = json.loads(
        subprocess.run(again, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100).stdout
    )
    assert answer["kind"] == "oom-other-process" and str(os.getpid()) in answer["cause"]
