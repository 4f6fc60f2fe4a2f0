"""What leaves a run while it trains: points for a logger of one's own, and a trace of some updates."""

from __future__ import annotations

import contextlib
import io
import json

import pytest
import torch

import evener
from tests.models import make, mlp_rows, row_loss


def new_run(folder, **keywords):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": 8, "precision": "fp32", "dir": folder, **keywords}
    return evener.Run(model, optimizer, row_loss, mlp_rows(40), **keywords)


class Logger:
    def __init__(self, fails=False):
        self.points, self.fails = [], fails

    def log(self, values, step):
        if self.fails:
            raise ConnectionError("the server is away")
        self.points.append((step, values))


def logged(folder, kind, fails=False):
    logger = Logger(fails)
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        new_run(folder, logger=logger if kind == "object" else logger.log) as run,
    ):
        for update in run.updates(updates=6):
            run.log({"mine": 10 * update.number, "tensor": torch.tensor(1.5)})
            if update.number % 2:
                run.evaluate(mlp_rows(5))
        result = logger.points, run.rank, run.digest(), dict(run._out.folder.failures)
    return *result, said.getvalue()


@pytest.mark.parametrize("kind", ["object", "function"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_logger_gets_every_point_in_order_on_rank_0_only(ranks, tmp_path, world, kind):
    for points, rank, *_ in ranks(world)(logged, str(tmp_path / "run"), kind):
        if rank:
            assert points == []
            continue
        steps = [step for step, _ in points]
        assert steps == sorted(steps)  # W&B drops a point that comes after a later one
        assert [(step, values["mine"]) for step, values in points if "mine" in values] == [
            (n, 10.0 * n) for n in range(6)
        ]
        assert [step for step, values in points if "evaluate/loss" in values] == [1, 3, 5]
        assert {"train/loss", "train/accuracy", "train/lr"} <= set().union(*(values for _, values in points))
        assert all(type(value) is float for _, values in points for value in values.values())
    assert not list((tmp_path / "run").glob("events.out.tfevents*"))  # a logger replaces TensorBoard's files


@pytest.mark.parametrize("world", [1, 2])
def test_a_logger_that_fails_does_not_end_the_training(ranks, tmp_path, world):
    good = ranks(world)(logged, str(tmp_path / "good"), "object")
    bad = ranks(world)(logged, str(tmp_path / "bad"), "object", True)
    assert [one[2] for one in good] == [one[2] for one in bad]
    assert bad[0][3]["the logger's curves"] >= 6
    assert (
        "".join(one[4] for one in bad).count(
            "the logger's curves could not be written (ConnectionError: the server is away)"
        )
        == 1
    )


def profiled(folder, updates, total, leave_at=None):
    with contextlib.redirect_stdout(io.StringIO()) as said, new_run(folder, profile=updates) as run:
        for update in run.updates(updates=total):
            if update.number == leave_at:
                break
        digest = run.digest()
    return digest, [line for line in said.getvalue().splitlines() if line.startswith("trace of")]


@pytest.mark.parametrize("world", [1, 2])
def test_a_trace_per_rank_and_its_cost_is_said_once(ranks, tmp_path, world):
    plain = ranks(world)(profiled, str(tmp_path / "plain"), None, 8)
    results = ranks(world)(profiled, str(tmp_path / "run"), range(2, 5), 8)
    assert [digest for digest, _ in results] == [digest for digest, _ in plain]
    (said,) = [line for _, lines in results for line in lines]
    assert said.startswith("trace of 3 updates: ") and " ms each instead of " in said
    for rank in range(world):
        trace = json.loads((tmp_path / "run" / f"rank{rank}.pt.trace.json").read_text())
        complete = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)
        names = [event["name"] for event in complete]
        assert {"aten::addmm", "aten::gelu", "aten::tanh_backward"} <= set(names)
        assert names.count("aten::gelu") == 3  # one forward of each update
    assert len(list((tmp_path / "run").glob("*.trace.json"))) == world


def test_a_loop_that_ends_or_is_left_inside_of_the_range_still_writes(tmp_path):
    for name, total, leave_at, count in (("ended", 4, None, 2), ("left", 8, 2, 1)):
        _, (said,) = profiled(tmp_path / name, range(2, 50), total, leave_at)
        assert json.loads((tmp_path / name / "rank0.pt.trace.json").read_text())["traceEvents"]
        assert said.startswith(f"trace of {count} update")
