"""`evener plan` and make_plan(): the cut that is chosen fits, is the best of those that do, and reaches the run."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import evener
from evener import facts
from evener.cli import main
from evener.cli.parser import parser_of
from evener.cli.plan import leading, page
from evener.config import Config
from evener.errors import ShortageError, UsageError
from evener.gpus.values import Gpu, Link, Snapshot, to_json
from evener.plan import make as making
from evener.plan import search
from evener.plan.captured import Captured
from evener.plan.clock import Machine
from evener.plan.values import Alloc, Cut, Free, Op, Trace
from evener.run.predicted import compare

GIB = 1 << 30
H100 = facts.named("H100-80GB")
KEPT = {"none": 1.0, "selective": 0.5, "full": 0.2}
SAVED = {"keep": 1.0, "offload": 0.9, "int8": 1.0}  # a model without anything that int8 changes
COST = {"none": 1.0, "selective": 1.1, "full": 1.3}


def captured(**more: object) -> Captured:
    words = {"global_batch_size": 64, "rows": 1000, "row_bytes": 0, "parameters": 1, "trainable": 1}
    return Captured(**{**words, "parameter_bytes": 4, **more})


def machine(gpus: int = 1, gib: float = 80, **more: object) -> Machine:
    return Machine("cuda", f"{gpus} x H100-80GB", int(gib * GIB), "a test", gpus, kind=H100, **more)


def model(state_gib: float, activation_gib: float):
    """Traces of a model with so much of parameters and states, and so much of activations a row."""

    def trace(cut: Cut, seconds: float | None = None) -> Trace:
        shards = cut.world_size if cut.strategy == "fsdp" else 1
        kept = activation_gib * cut.microbatch_size * KEPT[cut.activation_checkpointing] * SAVED[cut.saved_activations]
        flops = int(1e12 * cut.microbatch_size * COST[cut.activation_checkpointing])
        start = [Alloc(0, int(state_gib * GIB / shards), "parameter", "layers.0", "start")]
        update = []
        for piece in range(min(2, cut.microbatches)):
            update += [
                Alloc(1 + piece, int(kept * GIB), "activation", "layers.0", "forward"),
                Op("aten.mm.default", "forward", flops, 1 << 20, 1 << 20, "bfloat16", (1, 2, 3, 4)),
                Free(1 + piece, "backward"),
                Op("aten.mm.default", "backward", 2 * flops, 1 << 20, 1 << 20, "bfloat16", (1, 2, 3, 4)),
            ]
        pieces = min(2, cut.microbatches)
        events = (*start, *update, *(dataclasses.replace(e, id=e.id + 9) if hasattr(e, "id") else e for e in update))
        marks = (1, 1 + len(update))
        return Trace(cut, events, marks, capability=(9, 0), pieces=pieces, rows=pieces * cut.microbatch_size)

    return trace


def test_what_fits_whole_is_not_cut():
    plan = making.make(model(10, 0.5), captured(), machine(), neighbours=False)
    assert plan.chosen.cut == Cut("single", "bf16", microbatch_size=64)
    assert plan.chosen.verdict == "fits" and plan.chosen.high_bytes <= plan.machine.capacity_bytes
    assert plan.keywords == {"strategy": "single", "precision": "bf16"}


def test_less_memory_means_smaller_microbatches_before_anything_slower():
    plan = making.make(model(10, 2.0), captured(), machine(), neighbours=False)
    chosen = plan.chosen.cut
    assert chosen.activation_checkpointing == "none" and chosen.microbatch_size < 64
    assert chosen.microbatches * chosen.microbatch_size >= 64
    assert plan.keywords["microbatch_size"] == chosen.microbatch_size


def test_where_no_microbatch_fits_the_model_is_recomputed_or_sharded():
    one_row = model(10, 300.0)  # a single row's activations are larger than the device
    assert making.make(one_row, captured(), machine(), neighbours=False).chosen.cut.activation_checkpointing == "full"
    sharded = making.make(model(200, 0.1), captured(), machine(4), neighbours=False)
    assert sharded.chosen.cut.strategy == "fsdp"
    assert all(row.verdict == "does not fit" for row in sharded.cuts if row.cut.strategy == "ddp")


def test_of_cuts_whose_time_is_known_the_fastest_is_taken():
    row = search.Row(Cut("single", "bf16"), "fits", seconds_per_update=2.0)
    fast = dataclasses.replace(row, cut=Cut("single", "bf16", "full"), seconds_per_update=1.0)
    away = dataclasses.replace(row, cut=Cut("single", "bf16", saved_activations="offload"), seconds_per_update=None)
    chosen, why = search.choose([row, fast, away], "bf16")
    assert chosen is fast and why == ["the fastest of the 3 cuts in bf16 that fit; of 1 the time is not known"]
    chosen, why = search.choose([away, dataclasses.replace(row, seconds_per_update=None)], "bf16")
    assert chosen.cut == row.cut and "times are not known" in why[0]


def test_once_a_cut_fits_the_rest_has_an_end():
    late: list[str] = []

    def trace(cut: Cut, seconds: float | None) -> Trace:
        if seconds is not None:
            assert seconds <= search.ENOUGH_SECONDS
            if cut.activation_checkpointing == "full" or cut.saved_activations == "int8":
                late.append(cut.words())
                raise TimeoutError(cut.words())
        return model(10, 0.5)(cut)

    plan = making.make(trace, captured(), machine(), neighbours=False)
    (note,) = [line for line in plan.notes if line.startswith("not compared, for the sake of time (--all does)")]
    assert "recompute full" in note and "activations int8" in note and "offload" not in note
    assert {row.cut.activation_checkpointing for row in plan.cuts} == {"none", "selective"} and late
    everything = making.make(trace, captured(), machine(), neighbours=False, everything=True)
    assert "full" in {row.cut.activation_checkpointing for row in everything.cuts}


def test_nothing_fits_is_said_and_not_chosen():
    plan = making.make(model(200, 1.0), captured(), machine(), neighbours=False)
    assert plan.chosen is None and plan.keywords == {}
    assert "no cut fits" in plan.because and any("the smallest cut needs" in line for line in plan.because)
    text = "\n".join(page(plan, captured()))
    assert "no cut of this step fits" in text and "does not fit" in text


@pytest.mark.parametrize("gib, verdict", [(22.0, "does not fit"), (24.0, "tight"), (40.0, "fits")])
def test_the_verdict_keeps_the_margin_that_published_runs_ask_for(gib, verdict):
    # 23 GiB reserved and half a GiB of context; published runs reserved up to 9 % more than the replay
    row = search.price(model(23, 0.0)(Cut(precision="bf16", microbatch_size=64)), machine(gib=gib), captured())
    assert row.verdict == verdict
    assert row.peak_allocated_bytes <= row.peak_reserved_bytes < row.device_total_bytes < row.high_bytes
    assert row.low_bytes <= row.device_total_bytes


def test_what_fits_no_device_with_its_states_alone_is_not_traced():
    words = {"parameters": 7 * 10**9, "trainable": 7 * 10**9, "parameter_bytes": 28 * 10**9, "optimizers": ("AdamW",)}
    traced = []

    def trace(cut: Cut, seconds: float | None = None) -> Trace:
        traced.append(cut.strategy)
        return model(104 if cut.strategy == "ddp" else 10, 0.1)(cut)

    plan = making.make(trace, captured(**words), machine(8), neighbours=False)
    assert plan.chosen.cut.strategy == "fsdp" and set(traced) == {"fsdp"}
    row = next(row for row in plan.cuts if row.cut.strategy == "ddp")
    assert (row.verdict, row.low_bytes) == ("does not fit", 4 * 28 * 10**9)  # parameters, gradients, two moments
    text = " ".join("\n".join(page(plan, captured(**words))).split())
    assert "does not fit: ddp, bf16: parameters, gradients and optimizer state alone take 104.31 GiB" in text


def test_every_strategy_comes_before_more_is_computed_again():
    tried = [(cut.strategy, cut.activation_checkpointing) for cut in search.combinations(captured(), machine(2), 2)]
    assert tried[:4] == [("ddp", "none"), ("fsdp", "none"), ("ddp", "selective"), ("fsdp", "selective")]


def test_what_the_script_decides_stays():
    given = {"activation_checkpointing": {"value": "full", "origin": "code"}}
    given |= {"microbatch_size": {"value": 4, "origin": "flag"}, "strategy": {"value": "auto", "origin": "code"}}
    plan = making.make(model(1, 0.1), captured(given=given), machine(2), neighbours=False)
    assert {row.cut.activation_checkpointing for row in plan.cuts} == {"full"}
    assert {row.cut.microbatch_size for row in plan.cuts} == {4}
    assert {row.cut.strategy for row in plan.cuts} == {"ddp", "fsdp"}
    assert "activation_checkpointing" not in plan.keywords and plan.keywords["strategy"] == "ddp"
    assert any("microbatch_size=4 was given (flag)" in line for line in plan.because)
    sliced = making.make(model(1, 0.1), captured(slice_size=8, exact=True), machine(2), neighbours=False)
    assert {row.cut.microbatch_size for row in sliced.cuts} == {8} and "microbatch_size" not in sliced.keywords


def test_what_planning_has_no_word_for_is_refused():
    given = {"activation_checkpointing": {"value": ["blocks.0"], "origin": "code"}}
    with pytest.raises(UsageError, match=r"activation_checkpointing=\['blocks.0'\] is no word"):
        making.make(model(1, 0.1), captured(given=given), machine())


def test_more_ranks_than_rows_are_refused():
    with pytest.raises(UsageError, match="80 ranks for a global batch of 64 rows"):
        making.make(model(1, 0.1), captured(), machine(80))


def test_one_more_and_one_less_are_told_and_the_page_is_100_columns_wide():
    plan = making.make(model(30, 1.0), captured(), machine(2))
    assert [line.split(":")[0] for line in plan.neighbours] == ["3 GPUs", "1 GPU"]
    lines = list(page(plan, captured(), everything=True))
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("global batch 64 = 2 ranks x 1 microbatch x 32 · bf16")
    assert sum(line.startswith("> ") for line in lines) == 1
    saves = making.make(model(60, 40.0), captured(), machine(2), neighbours=False, everything=True)
    lines = list(page(saves, captured(), everything=True))
    assert max(map(len, lines)) <= 100 and any("offload" in line and "does not fit" in line for line in lines)
    assert not any("int8" in line for line in lines), "the same figures once more"


def test_one_more_is_a_node_of_several_and_a_process_that_shares_the_cpu():
    nodes = dataclasses.replace(machine(8), nodes=2)
    lines = making.make(model(30, 1.0), captured(), nodes).neighbours
    assert [line.split(":")[0] for line in lines] == ["24 GPUs on 3 nodes", "8 GPUs"]
    many = making.make(model(30, 1.0), captured(), dataclasses.replace(machine(2), nodes=17))
    assert many.neighbours == () and many.chosen is not None
    given = {"strategy": {"value": "fsdp", "origin": "code"}}
    lines = making.make(model(30, 1.0), captured(given=given), machine(2)).neighbours
    assert [line.partition(" on")[0] for line in lines] == ["3 GPUs: fsdp"], "fsdp on one GPU was not asked for"
    few = captured(global_batch_size=2)
    assert (
        making.make(model(30, 1.0), few, machine(2)).neighbours[0]
        == "3 GPUs: not possible, the global batch has 2 rows"
    )
    kind = facts.GpuKind("cpu", peak={"fp32": 6.0}, memory_bandwidth=12.0)
    more, less = Machine("cpu", "2 processes", 60, "a test", 2, kind=kind).neighbours()
    assert (more.gpus, more.capacity_bytes, more.kind.peak, more.kind.memory_bandwidth) == (3, 40, {"fp32": 4.0}, 8.0)
    assert (less.gpus, less.capacity_bytes, less.kind.peak, less.kind.memory_bandwidth) == (
        1,
        120,
        {"fp32": 12.0},
        24.0,
    )


def test_machines_by_name_by_recording_and_wrongly(tmp_path):
    assert making.machine_of(gpu="4090", nproc=4).name == "4 x RTX-4090"
    with pytest.raises(UsageError, match="exclude each other"):
        making.machine_of(gpu="4090", cpu=True)
    with pytest.raises(UsageError, match="--nproc 0"):
        making.machine_of(gpu="4090", nproc=0)
    gpus = [
        Gpu(i, f"GPU-{i}", "NVIDIA A100-SXM4-40GB", memory_total_bytes=40 * GIB, memory_reserved_bytes=GIB,
            compute_capability="8.0") for i in range(4)
    ]  # fmt: skip
    gpus.append(Gpu(4, "GPU-4", "Tesla T4", memory_total_bytes=15 * GIB))
    links = tuple(Link(a, b, "node", nvlinks=12) for a in range(4) for b in range(a))
    file = tmp_path / "recorded.json"
    file.write_text(json.dumps(to_json(Snapshot(source="nvml", gpus=tuple(gpus), links=links))))
    found = making.machine_of(recorded=str(file))
    assert (found.gpus, found.kind.name, found.nvlink, found.capability) == (4, "A100-40GB", True, (8, 0))
    assert found.capacity_bytes == 39 * GIB  # what the driver keeps is not ours
    with pytest.raises(ShortageError, match="has 4 x NVIDIA A100-SXM4-40GB, and 5 are asked for"):
        making.machine_of(recorded=str(file), nproc=5)
    cpu = making.machine_of(cpu=True, nproc=2)
    assert cpu.device == "cpu" and 0 < cpu.capacity_bytes < 1 << 45


@pytest.mark.parametrize(
    "words, ours, scripts",
    [
        ("--gpu 4090 --json", "--gpu 4090 --json", ""),
        ("--gpu=4090 --lr 0.1 --json", "--gpu=4090", "--lr 0.1 --json"),
        ("--json -- --gpu 0", "--json", "--gpu 0"),
        ("data.csv --gpu 0", "", "data.csv --gpu 0"),
    ],
)
def test_options_may_follow_the_script(words, ours, scripts):
    assert leading(words.split(), parser_of("plan")) == (ours.split(), scripts.split())


def test_a_calibration_and_earlier_runs_are_read_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert making.calibrated(machine()).calibration == {} and making.remembered("H100-80GB") is None
    for real in (90, 105):
        making.remember({"kind": "H100-80GB", "predicted_bytes": 100, "real_bytes": real})
    making.calibration_path().write_text(json.dumps({"gpus": {"H100-80GB": {"matmul": 0.7, "context_bytes": GIB}}}))
    measured = making.calibrated(machine())
    plan = making.make(model(10, 0.5), captured(), measured, neighbours=False)
    assert "calibrated" in plan.notes
    assert "2 planned runs on H100-80GB ended between -10.0% and +5.0% of the predicted peak" in plan.notes
    making.remember(
        {"kind": "H100-80GB", "predicted_bytes": 1, "real_bytes": 1, "predicted_seconds": 2, "real_seconds": 3}
    )
    assert "+5.0% of the predicted peak; between +50% and +50% of the predicted time (1 of them)" in making.remembered(
        "H100-80GB"
    )
    (context,) = [term for term in plan.chosen.terms if "context" in term.name]
    assert (context.bytes, context.how) == (GIB, "modelled")
    making.calibration_path().write_text("[]")
    with pytest.raises(UsageError, match="is no calibration"):
        making.calibrated(machine())


def test_a_planned_run_tells_its_peak_and_its_time_beside_what_was_predicted(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    predicted = {"device": "cpu", "kind": "cpu", "device_total_bytes": GIB, "seconds_per_update": 0.08}
    line, fields = compare(predicted, torch.device("cpu"), updates=20, seconds=2.0)
    assert line.endswith("an update took 100 ms, predicted 80 ms (+25%)") and fields["real_seconds"] == 0.1
    assert json.loads((tmp_path / ".cache" / "evener" / "peaks.jsonl").read_text()) == {"kind": "cpu", **fields}
    line, fields = compare(predicted, torch.device("cpu"), updates=2, seconds=2.0)
    assert "update" not in line and fields["real_seconds"] is None, "the first update's warm-up is half of it"
    line, fields = compare({**predicted, "device": "cuda", "peak_allocated_bytes": 5}, torch.device("cpu"), 20, 2.0)
    assert "this is cpu" in line and fields["real_bytes"] is None


def test_a_plan_fills_what_is_open_and_nothing_else():
    code = {"global_batch_size": 64, "strategy": "auto", "precision": "fp32"}
    config = Config.merge(code, plan={"strategy": "fsdp", "precision": "bf16", "microbatch_size": 8})
    assert (config.strategy, config.precision, config.microbatch_size) == ("fsdp", "fp32", 8)
    assert config.origins["strategy"] == config.origins["microbatch_size"] == "plan"


def test_a_broken_plan_file_is_one_error(tmp_path, capsys):
    file = tmp_path / "plan.json"
    (tmp_path / "train.py").touch()
    for text in ("{}", "[", '{"chosen": {}}'):
        file.write_text(text)
        assert main(["run", "--dry-run", "--cpu", "--plan", str(file), str(tmp_path / "train.py")]) == 2
        assert "is no plan" in capsys.readouterr().err
    plan = making.make(model(1, 0.1), captured(), machine(2), neighbours=False)
    file.write_text(json.dumps(plan.to_json()))
    asked = ["run", "--dry-run", "--cpu", "--plan", str(file)]
    assert main([*asked, "--nproc", "3", str(tmp_path / "train.py")]) == 2
    assert "is a plan for 2 processes, not 3" in capsys.readouterr().err
    assert main([*asked, str(tmp_path / "train.py")]) == 0
    assert '"decided": {"strategy": "ddp", "precision": "bf16"}' in capsys.readouterr().out


def step_of_a_user():
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)))
    rows = torch.randn(100, 64), torch.randint(64, (100,))
    return net, torch.optim.AdamW(net.parameters()), lambda m, b: F.cross_entropy(m(b[0]), b[1]), rows


def test_make_plan_on_objects_at_hand_leaves_them_alone():
    net, optimizer, loss_fn, rows = step_of_a_user()
    before = [parameter.clone() for parameter in net.parameters()]
    words = {"strategy": "single", "activation_checkpointing": "none", "precision": "bf16"}
    plan = evener.make_plan(net, optimizer, loss_fn, rows, gpu="H100-80GB", global_batch_size=32, **words)
    assert plan.chosen.cut == Cut("single", "bf16", microbatch_size=32) and plan.chosen.how == "traced"
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.chosen = None
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters())) and not optimizer.state
    with pytest.raises(UsageError, match="Run has no keyword 'gpuss'"):
        evener.make_plan(net, optimizer, loss_fn, rows, global_batch_size=32, gpuss="x")


SCRIPT = """
import torch, evener
from torch.nn import functional as F
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
rows = torch.randn(100, 64), torch.randint(10, (100,))
run = evener.Run(net, torch.optim.SGD(net.parameters(), lr=0.1), lambda m, b: F.cross_entropy(m(b[0]), b[1]), rows,
                 global_batch_size=32)
for update in run.updates(updates=2):
    pass
"""


def evener_(*words: str, cwd) -> subprocess.CompletedProcess[str]:
    command, home = [sys.executable, "-m", "evener", *words], {**os.environ, "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, env=home)


def test_from_a_script_to_a_plan_to_a_run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = [f"--set={word}" for word in ("activation_checkpointing=none", "strategy=single", "precision=fp32")]
    planned = evener_("plan", "--cpu", "--json", *words, "train.py", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    plan = json.loads(planned.stdout)
    (row,) = plan["cuts"]
    contract = (
        "strategy precision activation_checkpointing saved_activations microbatch_size world_size verdict at_peak"
    )
    contract += " peak_allocated_bytes peak_reserved_bytes device_total_bytes low_bytes high_bytes seconds_per_update"
    assert set(contract.split()) <= set(row) and row == plan["chosen"]
    assert row["verdict"] == "fits" and row["seconds_per_update"] is None
    assert not (tmp_path / "runs").exists()
    plan["keywords"]["microbatch_size"] = 8  # as a tighter machine would have been told
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    ran = evener_("run", "--cpu", "--plan", "plan.json", "train.py", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "global batch 32 = 1 rank x 4 microbatches x 8" in ran.stdout + ran.stderr
    config, events = (tmp_path / "runs" / "train" / name for name in ("config.json", "events.jsonl"))
    assert "fp32 · single" in ran.stdout + ran.stderr  # what was given with --set is given to the run, too
    config, events = json.loads(config.read_text()), [json.loads(line) for line in events.read_text().splitlines()]
    assert config["microbatch_size"] == {"value": 8, "origin": "plan"}
    (peak,) = [event for event in events if event["kind"] == "peak"]
    assert (
        peak["predicted_bytes"] == row["device_total_bytes"]
        and 0.3 < peak["real_bytes"] / row["device_total_bytes"] < 3
    )
    assert "peak memory" in ran.stdout + ran.stderr
    kept = json.loads((tmp_path / ".cache" / "evener" / "peaks.jsonl").read_text())
    sizes = {name: peak[name] for name in ("predicted_bytes", "real_bytes")}
    assert kept == {"kind": "cpu", **sizes, "predicted_seconds": None, "real_seconds": None}


@pytest.mark.full
def test_a_70_b_model_on_1024_gpus_takes_two_minutes_of_processor_time_and_8_gib_at_most(tmp_path):
    root, before = Path(__file__).parents[1], resource.getrusage(resource.RUSAGE_CHILDREN)
    words = ["--gpu", "H100-80GB", "--nproc", "8", "--nodes", "128", "--timeout", "1200", "--json"]
    command = [sys.executable, "-m", "evener", "plan", *words, str(root / "bench" / "plan_llama70b.py")]
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    chosen, after = json.loads(done.stdout)["chosen"], resource.getrusage(resource.RUSAGE_CHILDREN)
    made = [line for line in done.stderr.splitlines() if "tracing" in line and "activations" not in line]
    assert len(made) == 6, "two worlds for each kind of recomputation; more are left out when they take long"
    assert (chosen["strategy"], chosen["world_size"], chosen["how"]) == ("fsdp", 1024, "extrapolated")
    # parameters, gradients and two moments of 70.6e9 in fp32, over 1,024 ranks; gathered and recomputed beside them
    assert 16 * 70.6e9 / 1024 < chosen["peak_allocated_bytes"] < chosen["high_bytes"] < 80e9
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 120
    assert after.ru_maxrss < 8 << 20, "KiB"
