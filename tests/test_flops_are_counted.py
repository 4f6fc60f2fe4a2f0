"""A run counts the operations of one update without changing a bit; a report makes a utilisation of it, or says why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import evener
from evener.cli import main
from evener.measure.flops import FlopCounter
from evener.report.events import read_events
from tests.fakenvml import Fake, needs_compiler
from tests.test_report_tells_the_whole_story import phases, start, told, update, write

ROWS, IN, HIDDEN, OUT = 16, 12, 20, 5
# Products: forward twice (2 operations a multiply-add), gradients of both weights, and of the hidden values only.
OF_A_ROW = 2 * (2 * (IN * HIDDEN + HIDDEN * OUT) + HIDDEN * OUT)


@pytest.fixture(autouse=True)
def nothing_was_compiled_before():
    """A file of tests before this one may have compiled something in this process; then nothing would be counted."""
    if "torch._dynamo.utils" in sys.modules:
        sys.modules["torch._dynamo.utils"].counters.clear()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUT))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def run_of(folder: Path, model: nn.Module | None = None, loss=loss_fn, **more) -> evener.Run:
    model = model or mlp()
    draw = torch.Generator().manual_seed(1)
    data = torch.randn(64, IN, generator=draw), torch.randint(0, OUT, (64,), generator=draw)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": ROWS, "dir": folder, "precision": "fp32", **more}
    return evener.Run(model, optimizer, loss, data, **keywords)


def counted(run: evener.Run) -> dict:
    (event,) = [event for event in read_events(run.path / "events.jsonl") if event["kind"] == "flops"]
    return event


def test_products_are_counted_and_what_is_recomputed_is_not():
    model, x = mlp(), torch.randn(ROWS, IN)
    with FlopCounter() as plain:
        model(x).sum().backward()
    with FlopCounter() as recomputed:
        checkpoint(model, x, use_reentrant=False).sum().backward()
    assert plain.total == recomputed.total == ROWS * OF_A_ROW and plain.again == 0
    # the last layer's output is not needed again, and torch stops before it
    assert recomputed.again == 2 * ROWS * IN * HIDDEN


def test_attention_on_a_cpu_counts_too():
    q, k, v = (torch.randn(2, 3, 8, 4, requires_grad=True) for _ in range(3))
    with FlopCounter() as counter:
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    product = 2 * 2 * 3 * 8 * 8 * 4
    assert counter.total == 2 * product + 5 * product  # the backward makes the scores once more


class Image(torch.Tensor):
    """A subclass without a dispatch of its own, as torchvision's are."""


def test_tensors_of_other_types_go_their_way():
    images, weight = torch.randn(2, 4).as_subclass(Image), nn.Parameter(torch.randn(4, 4))
    with FlopCounter() as counter:
        out = images @ weight
        out.sum().backward()
    assert counter.total == 2 * 2 * 2 * 4 * 4 and isinstance(out, Image)


def product_loss(model, batch):
    """torch's derivative of `prod` has other last bits under a dispatch mode."""
    h = model(batch[0])
    return F.cross_entropy(h * (h.sigmoid() + 0.5).prod(1, keepdim=True), batch[1])


def test_exact_mode_is_not_counted_and_a_resumed_run_has_its_bits(tmp_path):
    with run_of(tmp_path / "whole", loss=product_loss, exact=True, microbatch_size=4) as run:
        list(run.updates(updates=6))
        whole, event = run.digest(), counted(run)
    assert event["flops"] is None and "exact=True" in event["why"]
    with (
        pytest.raises(evener.Stopped),
        run_of(tmp_path / "run", loss=product_loss, exact=True, microbatch_size=4) as run,
    ):
        for update in run.updates(updates=6):
            if update.number == 2:
                run.stop()
    with run_of(tmp_path / "run", loss=product_loss, exact=True, microbatch_size=4) as run:
        list(run.updates(updates=6))
        assert run.digest() == whole


def test_one_update_is_counted(tmp_path):
    digests = []
    for name in ("counted", "not"):
        with run_of(tmp_path / name, microbatch_size=4) as run:
            if name == "not":
                run._counts_at = -1
            for _ in run.updates(updates=5):
                pass
            digests.append(run.digest())
            if name == "counted":
                event = counted(run)
    assert digests[0] == digests[1]
    assert (event["update"], event["flops"], event["rows"], event["format"]) == (1, ROWS * OF_A_ROW, ROWS, "fp32")


def test_an_update_that_was_made_twice_is_not_the_one_that_counts(tmp_path):
    with run_of(tmp_path / "run") as run:
        for number, _ in enumerate(run.updates(updates=4)):
            if number == 0:
                run._report("oom", 1, {"phase": "forward", "ranks": [0], "microbatch_size": 8})
        assert (counted(run)["update"], counted(run)["flops"]) == (2, ROWS * OF_A_ROW)


def test_what_was_compiled_is_left_alone_and_said(tmp_path, capsys):
    torch._dynamo.reset()
    model = mlp()

    @torch.compile(backend="eager")
    def forward(x):
        return model(x)

    with run_of(tmp_path / "run", model, lambda model, batch: F.cross_entropy(forward(batch[0]), batch[1])) as run:
        for _ in run.updates(updates=3):
            pass
        event = counted(run)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert event["flops"] is None and "torch.compile" in event["why"]
    capsys.readouterr()
    one = told(run.path, capsys)
    assert one["model_flops_utilization"] is None and "torch.compile" in one["model_flops_utilization_is"]


def of(folder: Path, device: str, name: str, flops: int | None, **more) -> Path:
    event = {"t": 2.0, "kind": "flops", "update": 1, "flops": flops, "rows": 10, "format": "bf16", "why": None}
    return write(folder, start(1.0, device=device, device_name=name, **more), update(0, 2.0), update(1, 3.0), event)


def test_the_share_of_the_peak_is_of_a_sheet_or_of_a_calibration_or_unknown(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    gpu = told(of(tmp_path / "gpu", "cuda:0", "NVIDIA A100-SXM4-80GB", 10 * 10**12), capsys)  # two ranks, 100 rows/s
    assert gpu["model_flops_utilization"] == pytest.approx(100 * 10**12 / (2 * 312e12))
    assert "data sheet of NVIDIA A100-SXM4-80GB says for bf16" in gpu["model_flops_utilization_is"]
    other = told(of(tmp_path / "other", "cuda:0", "NVIDIA Nonesuch", 10**12), capsys)
    assert other["model_flops_utilization"] is None and "no data sheet" in other["model_flops_utilization_is"]
    cpu = of(tmp_path / "cpu", "cpu", "A CPU", 10**9, machines=1)
    assert "`evener bench matmul --cpu --calibrate`" in told(cpu, capsys)["model_flops_utilization_is"]
    (tmp_path / ".cache" / "evener").mkdir(parents=True)
    known = {"gpus": {}, "cpus": {"A CPU": {"bf16": 1e11}}}
    (tmp_path / ".cache" / "evener" / "calibration.json").write_text(json.dumps(known))
    assert told(cpu, capsys)["model_flops_utilization"] == pytest.approx(0.1)
    assert told(cpu, capsys)["flops_per_row"] == 10**8
    nothing = write(tmp_path / "short", start(1.0), update(0, 2.0))
    assert "those of its second update" in told(nothing, capsys)["model_flops_utilization_is"]
    assert main(["report", str(cpu), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "10.0%" in page and "One row needs 100" in page


def test_how_busy_a_gpu_was_is_in_the_record_of_its_rank(tmp_path, capsys):
    folder = write(tmp_path / "run", start(1.0), update(0, 2.0), update(9, 10.0))
    event = phases(9.0, 9, 10, forward=2.0)
    write(folder, {**event, "gpu_utilization_percent": 90}, {**event, "update": 19, "gpu_utilization_percent": 80.0})
    write(folder, {**event, "gpu_utilization_percent": 20}, {**event, "gpu_utilization_percent": "x"}, rank=1)
    write(folder, {**event, "gpu_utilization_percent": None}, rank=2)
    one = told(folder, capsys)
    assert [rank["gpu_utilization_percent"] for rank in one["ranks"]] == [85.0, 20.0, None]
    assert any("The GPU of rank 1 did something in 20% of the time" in line for line in one["findings"])


BUSY = """
import sys, time
from evener.run.busy import Busy
busy = Busy(sys.argv[1], seconds=0.01)
end = time.monotonic() + 60
while busy.is_alive() and not busy.percents and time.monotonic() < end:
    time.sleep(0.01)
print(busy.take())
busy.ended.set()
busy.join(60)
print(busy.is_alive())
"""


@needs_compiler
def test_the_driver_is_asked_and_one_that_does_not_tell_is_unknown(tmp_path):
    uuids = {"tells": "GPU-aaaaaaaa-0000-0000-0000-000000000000", "is none": "GPU-bbbbbbbb-0000-0000-0000-000000000000"}
    fake = Fake(tmp_path, f"gpu 0 uuid={uuids['tells']} util=97")
    found = {}
    for name, uuid in uuids.items():
        done = subprocess.run(
            [sys.executable, "-c", BUSY, uuid], env=fake.environ(), capture_output=True, text=True, check=True
        )
        found[name] = done.stdout.split()
        assert done.stderr == ""
    assert found == {"tells": ["97.0", "False"], "is none": ["None", "False"]}
