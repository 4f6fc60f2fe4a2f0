"""`evener bench` measures what it says, checks what collectives give, and keeps what it has when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from evener import facts
from evener.cli import bench as verb
from evener.cli import main
from evener.dist.memory import DeviceMemory
from evener.errors import UsageError
from evener.measure import bench
from evener.plan.clock import Machine
from evener.plan.make import calibrated


def evener(*words, **more):
    command = [sys.executable, "-m", "evener", "bench", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, **more)


def test_products_and_collectives_of_two_processes():
    done = evener("matmul", "comm", "--cpu", "--json", "--seconds", "0.02", "--longest", "0.02")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["complete"] and answer["machine"]["device"] == "cpu" and answer["machine"]["cores"] >= 1
    products = {one["name"]: one for one in answer["results"] if one["part"] == "matmul"}
    assert set(products) == {"fp32", "bf16", "fp16"}, "TF32 is no format of a CPU"
    for one in products.values():
        assert one["flops_per_second"] == pytest.approx(2 * one["size"] ** 3 / one["seconds"])
        assert one["share_of_peak"] is None, "no table knows this CPU's peak"
    collectives = [one for one in answer["results"] if one["part"] == "comm" and "seconds" in one]
    assert {one["name"] for one in collectives} == {
        "all_reduce", "all_gather", "broadcast", "reduce", "gather", "barrier", "scatter (JSON)"
    }  # fmt: skip
    assert all(one["correct"] for one in collectives)
    of_two = [one for one in collectives if one["name"] == "all_reduce"]
    assert of_two[0]["bytes"] == 4 and all(one["bus_bytes_per_second"] == one["bytes_per_second"] for one in of_two)


def test_a_wrong_sum_is_seen():
    pattern = (torch.arange(1000) % 97).float()
    assert bench.rightly("all_reduce", pattern * 6, pattern, 1, 3)
    wrong = pattern * 6
    wrong[500] += 1
    assert not bench.rightly("all_reduce", wrong, pattern, 1, 3)
    assert bench.rightly("all_gather", [pattern, pattern * 2], pattern, 0, 2)
    assert not bench.rightly("all_gather", [pattern * 2, pattern], pattern, 0, 2), "in rank order"
    assert bench.rightly("broadcast", pattern, pattern, 1, 2)
    assert not bench.rightly("broadcast", pattern * 2, pattern, 1, 2)
    assert bench.rightly("reduce", None, pattern, 1, 2) and not bench.rightly("reduce", None, pattern, 0, 2)


def test_a_dataset_of_ones_own_and_its_page(tmp_path):
    (tmp_path / "mine.py").write_text("def make():\n    return [(i, i) for i in range(300)]\n")
    done = evener("data", "--cpu", "--seconds", "0.05", "--dataset", "mine.py:make", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "about 1 s; Ctrl-C keeps what was measured" in done.stderr
    assert "0 workers" in done.stdout and "mine.py:make" in done.stdout and "enough: num_workers=" in done.stdout
    done = evener("data", "--cpu", "--dataset", "nowhere.py:x", cwd=tmp_path)
    assert done.returncode == 2 and "no such file" in done.stderr and "Traceback" not in done.stderr
    for name, text in (("other", "has no other"), ("__name__", "a str")):
        with pytest.raises(UsageError, match=text):
            bench.dataset_of(f"{tmp_path / 'mine.py'}:{name}")


def test_what_a_process_holds_beside_torchs_allocator_is_known_only_where_it_is_alone():
    def on_a_gpu(free, reserved, others):
        return bench.beside_torch(DeviceMemory("cuda:0", 100, reserved, 100, free, 80_000, others))

    assert on_a_gpu(79_000, 400, ()) == 600, "1,000 are taken, 400 of them by the allocator"
    assert on_a_gpu(79_000, 400, ("ada: train.py",)) is None and on_a_gpu(79_000, 400, None) is None
    assert on_a_gpu(79_800, 400, ()) is None, "less is taken than torch has: a figure is wrong"
    assert on_a_gpu(None, 400, ()) is None and on_a_gpu(79_000, None, ()) is None
    assert "not known" in bench.held("NCCL", None)["note"] and "572 MiB" in bench.held("NCCL", 600_000_000)["note"]


SLOW = """
import time, torch, evener
from torch.nn import functional as F
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 500
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((64,), float(i)), i % 10
def make(): return Slow()
if __name__ == "__main__":
    net = torch.nn.Linear(64, 10)
    evener.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda m, b: F.cross_entropy(m(b[0]), b[1]), make(),
               global_batch_size=32, strategy="single", activation_checkpointing="none", precision="fp32")
"""


def test_a_measured_dataset_bounds_the_predicted_update(tmp_path):
    (tmp_path / "train.py").write_text(SLOW)
    home = {"cwd": tmp_path, "env": {**os.environ, "HOME": str(tmp_path)}}
    done = evener("data", "--cpu", "--seconds", "0.1", "--dataset", "train.py:make", "--calibrate", **home)
    assert done.returncode == 0, done.stderr
    ((name, kept),) = json.loads((tmp_path / ".cache" / "evener" / "calibration.json").read_text())["data"].items()
    assert name == "Slow, 500 rows of 264 bytes" and kept["rows_per_second"]["0"] <= 100
    plan = [sys.executable, "-m", "evener", "plan", "--gpu", "H100-80GB", "--json", "--set", "saved_activations=keep"]
    told = subprocess.run(
        [*plan, "--set=num_workers=0", "train.py"], capture_output=True, text=True, timeout=300, **home
    )
    assert told.returncode == 0, told.stderr
    chosen = json.loads(told.stdout)["chosen"]
    assert chosen["bound_by"] == "data" and chosen["data_seconds"] == pytest.approx(32 / kept["rows_per_second"]["0"])
    assert chosen["seconds_per_update"] == chosen["data_seconds"]


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "evener", "bench", "matmul", "data", "--cpu", "--seconds", "0.05", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    until = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < until:
        if any('"matmul"' in file.read_text() for file in tmp_path.glob("evener-bench-*/results.jsonl")):
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    answer = json.loads(out)
    assert process.returncode == 130 and not answer["complete"]
    assert any(one["part"] == "matmul" for one in answer["results"])
    assert not list(tmp_path.glob("evener-bench-*"))


@pytest.mark.parametrize(
    "words, text",
    [
        (["matmull"], "'matmull' is no part of the bench"),
        (["--nproc", "0"], "--nproc 0: at least 1"),
        (["--seconds", "0"], "above 0"),
        (["data", "--cpu", "--calibrate"], "what matmul, memory, comm, and data with --dataset, measure is kept"),
    ],
)
def test_bad_input(words, text, capsys):
    assert main(["bench", *words]) == 2
    assert text in capsys.readouterr().err


def test_the_page_says_what_a_reader_must_know():
    machine = {"name": "CPU", "torch": "2.13.0", "threads": 2, "load": 9.0, "cores": 2}
    matmul = {
        "part": "matmul",
        "name": "bf16",
        "size": 512,
        "flops_per_second": 2e11,
        "seconds": 0.00134,
        "spread": 0.1,
    }
    broken = {
        "part": "comm",
        "name": "all_reduce",
        "bytes": 1 << 20,
        "bytes_per_second": 1e9,
        "seconds": 0.001,
        "spread": 0.0,
    }
    lines = verb.page(
        machine,
        [{**matmul, "native": False, "share_of_peak": 0.5}, {**broken, "bus_bytes_per_second": 1e9, "correct": False}],
    )
    text = "\n".join(lines)
    assert "others work here too, so these figures are lower bounds" in text
    assert "200 GFLOP/s" in text and "NOT native: emulated" in text and "50% of the data sheet" in text
    assert "1 MiB" in text and "WRONG RESULT" in text


def test_what_was_measured_is_kept_for_the_planner(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    machine = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    kind = facts.find(machine["name"])
    results = [
        {"part": "matmul", "name": "bf16", "share_of_peak": 0.71},
        {"part": "matmul", "name": "fp32", "share_of_peak": 0.55},
        {
            "part": "memory",
            "name": "copy on the device (read + write)",
            "bytes_per_second": kind.memory_bandwidth * 0.9,
        },
        {"part": "memory", "name": "launch of one operation", "bytes_per_second": None, "seconds": 4e-6},
        {"part": "memory", **bench.held("CUDA context and kernels", 480 << 20)},
        {"part": "comm", "name": "all_reduce", "bus_bytes_per_second": kind.nvlink_bandwidth * 0.7, "seconds": 1.0},
        {"part": "comm", "name": "all_reduce", "note": "larger sizes left out"},
        {"part": "comm", **bench.held("NCCL", 900 << 20)},
    ]
    verb.keep(machine, results)
    verb.keep(machine, results[:1])  # a later bench of one part leaves the others
    there = calibrated(Machine("cuda", "one", 1, "a test", kind=kind)).calibration
    speeds = {
        "matmul": 0.71,
        "memory": pytest.approx(0.9),
        "network": pytest.approx(0.7),
        "launch_us": pytest.approx(4),
    }
    assert there == {**speeds, "context_bytes": 480 << 20, "nccl_bytes": 900 << 20}
    verb.keep(machine, [{"part": "comm", **bench.held("NCCL", None)}])  # not known: what was known stays
    assert calibrated(Machine("cuda", "one", 1, "a test", kind=kind)).calibration == there
    with pytest.raises(UsageError, match="Nonesuch is in no table"):
        verb.keep({"device": "cuda", "name": "NVIDIA Nonesuch"}, [])
    products = [{"part": "matmul", "name": "bf16", "flops_per_second": rate} for rate in (2e11, 3e11)]
    verb.keep({"device": "cpu", "name": "A CPU"}, products)
    known = json.loads((tmp_path / ".cache" / "evener" / "calibration.json").read_text())
    assert known["cpus"] == {"A CPU": {"bf16": 3e11}} and set(known["gpus"]) == {kind.name}
