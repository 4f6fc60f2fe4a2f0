"""Predicted time follows the written algebra, is a range, and is unknown where a sheet does not say what it takes."""

from __future__ import annotations

import dataclasses
import json

import pytest

from evener import facts
from evener.cli.bench import calibration
from evener.errors import UsageError
from evener.plan.captured import Captured
from evener.plan.clock import (
    DataRate,
    Machine,
    Pace,
    Seconds,
    collective_seconds,
    operation_seconds,
    seconds,
    with_data,
)
from evener.plan.make import calibrated
from evener.plan.values import Collective, Cut, Op, Trace

H100, MID = facts.named("H100-80GB"), Pace.of("mid", {})


def machine(kind: str = "H100-80GB", gpus: int = 1, nodes: int = 1, **more: object) -> Machine:
    gpu = facts.named(kind)
    return Machine("cuda", kind, gpu.capacity_bytes, "test", gpus, nodes, gpu, **more)


def product(n: int, dtype: str = "bfloat16", phase: str = "forward") -> Op:
    width = {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]
    return Op("aten.mm.default", phase, 2 * n**3, 2 * n * n * width, n * n * width, dtype, (1, n, n, n))


def trace(*steady: object, cut: Cut | None = None, pieces: int = 1) -> Trace:
    return Trace(cut or Cut(precision="bf16"), tuple(steady), (0, 0), capability=(9, 0), pieces=pieces)


def test_a_large_product_is_bound_by_flops_and_a_sum_by_bytes():
    n = 8192
    assert operation_seconds(product(n), H100, MID) == pytest.approx(2e-6 + 2 * n**3 / (989.4e12 * 0.65))
    addition = Op("aten.add.Tensor", "forward", 0, 2 << 30, 1 << 30, "bfloat16")
    assert operation_seconds(addition, H100, MID) == pytest.approx(2e-6 + (3 << 30) / (3350e9 * 0.8))


def test_many_small_operations_take_the_hosts_time():
    small = Op("aten.add.Tensor", "forward", 0, 1024, 512, "float32")
    took = seconds(trace(*[small] * 1000), machine())
    assert took.mid == pytest.approx(1000 * MID.launch, rel=0.01)
    assert took.low < took.mid < took.high


def test_tf32_uses_the_matrix_units_for_products_alone():
    mm, add = product(4096, "float32"), Op("aten.add.Tensor", "forward", 4096, 8, 8, "float32")
    assert operation_seconds(mm, H100, MID, tf32=True) < operation_seconds(mm, H100, MID) / 5
    assert operation_seconds(add, H100, MID, tf32=True) == operation_seconds(add, H100, MID)


def test_the_ring_moves_what_the_algebra_says():
    size, link, alpha = 1 << 30, 450e9 * 0.7, 4e-6
    cut, box = Cut("ddp", world_size=8), machine(gpus=8)
    assert collective_seconds(Collective("all_gather", size, 8, "forward"), cut, box, MID) == pytest.approx(
        7 / 8 * size / link + 7 * alpha
    )
    assert collective_seconds(Collective("all_reduce", size, 8, "reduce"), cut, box, MID) == pytest.approx(
        2 * (7 / 8 * size / link + 7 * alpha)
    )
    two = collective_seconds(
        Collective("all_reduce", size, 16, "reduce"), Cut("ddp", world_size=16), machine(gpus=8, nodes=2), MID
    )
    between = 2 * (1 / 2 * (size / 8) / (25e9 * 0.7) + 15e-6)
    assert two == pytest.approx(2 * (7 / 8 * size / link + 7 * alpha) + between)


def test_hsdp_reduces_between_nodes_and_gathers_inside():
    cut, boxes = Cut("hsdp", world_size=16, replicas=2), machine(gpus=8, nodes=2)
    gather = collective_seconds(Collective("all_gather", 1 << 30, 8, "forward"), cut, boxes, MID)
    assert gather == pytest.approx(7 / 8 * (1 << 30) / (450e9 * 0.7) + 7 * 4e-6)
    reduce = collective_seconds(Collective("all_reduce", 1 << 30, 2, "reduce"), cut, boxes, MID)
    assert reduce == pytest.approx(2 * (1 / 2 * (1 << 30) / (25e9 * 0.7) + 15e-6))  # every rank's shards, over the net


def test_pcie_where_no_board_connects_the_gpus_and_a_recording_may_say_otherwise():
    assert machine("RTX-3090", gpus=2).links == ("pcie", 32e9)
    assert machine("RTX-3090", gpus=2, nvlink=True).links == ("nvlink", 56.25e9)
    assert machine("A100-80GB", gpus=2).links == ("nvlink", 300e9)
    assert machine("A100-80GB", gpus=2, nvlink=False).links == ("pcie", 32e9)


def test_a_reduction_that_overlaps_costs_less_than_one_that_waits():
    cut = Cut("ddp", "bf16", world_size=8)
    work = [product(8192, phase="backward")] * 4
    bucket = Collective("all_reduce", 1 << 28, 8, "backward")
    over = seconds(trace(*work[:2], bucket, *work[2:], cut=cut), machine(gpus=8)).mid
    waits = seconds(trace(*work[:2], dataclasses.replace(bucket, waits=True), *work[2:], cut=cut), machine(gpus=8)).mid
    alone = seconds(trace(*work, cut=cut), machine(gpus=8)).mid
    assert over == pytest.approx(alone)
    assert waits > over + 0.9 * collective_seconds(bucket, cut, machine(gpus=8), MID)


def test_the_next_blocks_gather_starts_with_this_block():
    cut = Cut("fsdp", "bf16", world_size=8)
    gather, block = Collective("all_gather", 1 << 28, 8, "forward", waits=True), product(8192)
    box = machine(gpus=8)
    moved, computed = collective_seconds(gather, cut, box, MID), operation_seconds(block, H100, MID)
    assert moved < computed
    took = seconds(trace(*[gather, block] * 4, cut=cut), box).mid
    assert took == pytest.approx(moved + 4 * computed, rel=0.01)  # only the first is waited for


def test_offloaded_activations_travel_over_pcie_behind_what_is_computed():
    away, back = Collective("to_host", 1 << 30, 1, "forward"), Collective("to_device", 1 << 30, 1, "backward")
    little, much = [product(512)], [product(8192)] * 50
    travel = (1 << 30) / (H100.pcie_bandwidth * MID.memory)
    took = seconds(trace(*little, away, back, product(512, phase="backward")), machine()).mid
    assert 2 * travel < took < 2.05 * travel
    hidden = seconds(trace(away, *much, back, *much), machine()).mid
    assert hidden == pytest.approx(seconds(trace(*much, *much), machine()).mid) and hidden > 2 * travel
    lone = dataclasses.replace(machine(), kind=dataclasses.replace(H100, pcie_bandwidth=None))
    assert "no PCIe bandwidth is known" in seconds(trace(away, *little), lone).because[0]
    assert seconds(trace(*little), lone).mid is not None


def test_microbatches_that_were_not_traced_repeat_the_last_but_one():
    work = [product(4096), product(4096, phase="backward")] * 2
    one = seconds(trace(*work[:2]), machine()).mid
    ten = seconds(trace(*work, cut=Cut(precision="bf16", microbatches=10), pieces=2), machine()).mid
    assert ten == pytest.approx(10 * one)


@pytest.mark.parametrize(
    "kind, dtype, why", [("T4", "bfloat16", "no known peak for bf16"), ("H100-96GB", "bfloat16", "no speeds")]
)
def test_what_no_sheet_says_makes_the_time_unknown(kind, dtype, why):
    took = seconds(trace(product(512, dtype)), machine(kind))
    assert (took.low, took.mid, took.high) == (None, None, None)
    assert why in took.because[0]


def test_the_cpu_and_an_unknown_gpu_have_no_time():
    cpu = Machine("cpu", "the CPU", 1 << 30, "test")
    assert seconds(trace(product(512)), cpu).mid is None
    unknown = Machine(
        "cuda", "1 x Frobnicator", 1 << 30, "test", kind=facts.GpuKind("Frobnicator", memory_bytes=1 << 30)
    )
    assert "no speeds are known of 1 x Frobnicator" in seconds(trace(product(512)), unknown).because


def test_a_calibration_narrows_the_range_and_an_uncalibrated_time_says_so():
    work = trace(product(8192))
    rough, measured = seconds(work, machine()), seconds(work, machine(calibration={"matmul": 0.7, "memory": 0.9}))
    assert rough.high / rough.low > 1.9 > measured.high / measured.low
    assert "not measured here" in rough.because[0] and measured.because == ("calibrated",)


def test_a_calibrated_cpu_has_a_time_that_its_processes_share(tmp_path):
    file = tmp_path / "calibration.json"
    bench = [
        {"part": "matmul", "name": "fp32", "flops_per_second": 1e11},
        {"part": "memory", "name": "copy on the device (read + write)", "bytes_per_second": 1e10},
        {"part": "memory", "name": "launch of one operation", "bytes_per_second": None, "seconds": 5e-6},
        {"part": "memory", "name": "into memory that is fresh (read + write)", "bytes_per_second": 2.5e9},
        {"part": "comm", "name": "all_reduce", "bus_bytes_per_second": 1e9},
    ]
    where, name, measured = calibration({"device": "cpu", "name": "A CPU"}, bench)
    file.write_text(json.dumps({where: {name: measured}}))
    one, two = (calibrated(Machine("cpu", "the CPU", 1 << 30, "test", gpus=n), file, cpu="A CPU") for n in (1, 2))
    work = trace(product(1024, "float32"))
    alone, shared = seconds(work, one), seconds(work, two)
    assert alone.mid == pytest.approx(5e-6 + 2e-6 + 2 * 1024**3 / 1e11)
    assert shared.mid - 7e-6 == pytest.approx(2 * (alone.mid - 7e-6))
    attention = Op("aten._scaled_dot_product_flash_attention_for_cpu.default", "forward", 10**9, 8, 8, "float32")
    assert seconds(trace(attention), one).mid == pytest.approx(7e-6 + 1e9 / 1e11), "in the CPU's fp32"
    assert seconds(trace(product(512)), one).because == ("cpu has no known peak for bf16",)
    # A result that the kernel has to find pages for takes as long as was measured; in place nothing is new.
    size = 256 << 20
    large = Op("aten.add.Tensor", "forward", 0, size, size, "float32")
    assert seconds(trace(large), one).mid == pytest.approx(2 * size / 2.5e9, rel=1e-4)
    inside = dataclasses.replace(large, name="aten.add_.Tensor")
    assert seconds(trace(inside), one).mid == pytest.approx(2 * size / 1e10, rel=1e-3)
    took = seconds(trace(large), one)
    assert took.high / took.low > 2, "steps differ from benchmarks"
    ring = Collective("all_reduce", 1 << 20, 2, "reduce", waits=True)
    took = seconds(trace(product(1024, "float32"), ring, cut=Cut("ddp", world_size=2)), two)
    assert took.mid > shared.mid + (1 << 20) / 1e9


# ------------------------------------------------------------------------------------------------ reading rows

ROWS = "Photos, 1000 rows of 600 bytes"
RATE = DataRate({0: 1000.0, 1: 900.0, 2: 1800.0, 4: 3000.0}, cores=4, cpu="A CPU")
STEP = Seconds(0.09, 0.1, 0.12)


def reading(workers: int | None, batch: int = 360, dataset: str = ROWS) -> Captured:
    words = {"rows": 1000, "row_bytes": 600, "parameters": 1, "trainable": 1, "parameter_bytes": 4}
    return Captured(global_batch_size=batch, **words, dataset=dataset, num_workers=workers)


def test_an_update_takes_as_long_as_the_slower_of_computing_and_reading():
    slow, data, bound = with_data(STEP, Cut(), machine(data={ROWS: RATE}), reading(2))
    assert (data, bound, slow.mid) == (360 / 1800, "data", 360 / 1800)
    assert slow.low < slow.mid < slow.high and "1,800 rows/s" in slow.because[-1] and "A CPU" in slow.because[-1]
    fast, data, bound = with_data(STEP, Cut(), machine(data={ROWS: RATE}), reading(2, batch=18))
    assert (data, bound) == (18 / 1800, "compute") and (fast.low, fast.mid, fast.high) == (0.09, 0.1, 0.12)


def test_a_cpu_that_reads_its_rows_itself_does_one_after_the_other():
    cpu = Machine("cpu", "the CPU", 1 << 30, "test", data={ROWS: RATE})
    assert with_data(STEP, Cut(), cpu, reading(0))[0].mid == pytest.approx(0.1 + 0.36)
    assert with_data(STEP, Cut(), machine(data={ROWS: RATE}), reading(0))[0].mid == 0.36, "a GPU computes meanwhile"


@pytest.mark.parametrize(
    "ranks, workers, rate",
    [
        (1, 1, 900),
        (1, 3, 1800),
        (2, 2, 3000),
        (8, 4, 3000),
        (2, 0, 2000),
        (8, 0, 4000),
        (1, None, 3000),
        (2, None, 3000),
    ],
)
def test_ranks_of_a_machine_share_its_cores(ranks, workers, rate):
    assert RATE.of(ranks, workers)[0] == rate
    boxes = machine(gpus=ranks, nodes=2, data={ROWS: RATE})
    assert with_data(STEP, Cut("ddp", world_size=2 * ranks), boxes, reading(workers))[1] == 360 / (2 * rate)


def test_a_rate_or_a_time_that_is_not_known_stays_unknown():
    took, data, bound = with_data(
        STEP, Cut(), machine(data={ROWS: RATE}), reading(2, dataset="Photos, 999 rows of 600 bytes")
    )
    assert (took.mid, data, bound) == (
        0.1,
        None,
        None,
    ) and "its rate was not measured for this dataset" in took.because[-1]
    took, data, bound = with_data(Seconds(None, None, None), Cut(), machine(data={ROWS: RATE}), reading(2))
    assert (took.mid, data, bound) == (None, 0.2, None)


@pytest.mark.parametrize("kept", [{"rows_per_second": {"1": 9.0}}, {"rows_per_second": {"0": 0}}, 7])
def test_broken_rates_are_an_error(tmp_path, kept):
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({"gpus": {}, "data": {ROWS: kept}}))
    with pytest.raises(UsageError, match="is no calibration"):
        calibrated(machine(), file)
