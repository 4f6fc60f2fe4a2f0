"""Every row of the facts has a source, no peak is the doubled one "with sparsity", and unknown stays unknown."""

from __future__ import annotations

import pytest

from evener import facts
from evener.errors import UsageError

GPUS = facts.known()
# Dense matrix FLOP/s in 16 bit per FLOP/s in fp32 outside of the matrix units, at most, by compute capability: a peak
# with 2:4 sparsity would be twice that. GeForce has half of it in 8.6 and 8.9.
DENSE_RATIO = {"7.0": 8.1, "7.5": 8.1, "8.0": 16.1, "8.6": 4.05, "8.9": 4.05, "9.0": 14.9, "10.0": 30.1, "12.0": 4.05}


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_a_row_is_plausible(gpu):
    assert gpu.source and (gpu.usable_bytes is None) == (not gpu.usable_source)
    assert 0.85 < gpu.capacity_bytes / 2**30 / (gpu.memory_bytes / 1e9) <= 1.0  # "80 GB" are GiB, or nearly
    assert gpu.compute_capability in DENSE_RATIO
    peak = gpu.peak
    if not peak:
        return
    low = peak.get("bf16", peak["fp16"])
    assert peak["fp16"] == low
    assert low / peak["fp32"] <= DENSE_RATIO[gpu.compute_capability], "a sparse peak?"
    assert peak["fp32"] <= peak.get("tf32", peak["fp32"]) <= low / 1.9
    assert 50 < low / gpu.memory_bandwidth < 450, "FLOP per byte: wrong units, or a sparse peak"
    assert ("bf16" in peak) == (float(gpu.compute_capability) >= 8.0)  # native from Ampere on
    for link in (gpu.nvlink_bandwidth, gpu.pcie_bandwidth):
        assert link is None or 10e9 < link < gpu.memory_bandwidth


def test_the_kinds_that_were_asked_for_are_there_and_names_are_not_ambiguous():
    asked = "3090 4090 5090 T4 V100-16GB V100-32GB A10 L4 L40S A6000 A100-40GB A100-80GB H100-PCIe H100-80GB H200 B200"
    assert all(facts.named(word) for word in asked.split())
    driver = {
        "NVIDIA H100 80GB HBM3": "H100-80GB",
        "NVIDIA H100 PCIe": "H100-PCIe",
        "NVIDIA A100-SXM4-40GB": "A100-40GB",
        "NVIDIA A100 80GB PCIe": "A100-PCIE-80GB",
        "Tesla T4": "T4",
        "Tesla V100-SXM2-32GB": "V100-32GB",
        "NVIDIA GeForce RTX 4090": "RTX-4090",
        "NVIDIA RTX A6000": "A6000",
        "NVIDIA L40S": "L40S",
    }
    assert {name: facts.named(name).name for name in driver} == driver
    keys = [facts._key(word) for gpu in GPUS for word in {gpu.name, *gpu.aka}]
    assert len({(gpu.name) for gpu in GPUS}) == len(GPUS)
    owners = {key: {gpu.name for gpu in GPUS for w in (gpu.name, *gpu.aka) if facts._key(w) == key} for key in keys}
    assert all(len(names) == 1 for names in owners.values())


def test_every_overhead_has_a_source_and_a_range():
    for name, row in facts.overheads().items():
        for one in row.values() if name == "efficiency" else [row]:
            assert one["source"], name
            if "mid" in one:
                assert one["low"] <= one["mid"] <= one["high"] and one["kind"] in ("reported", "guess"), name


def test_an_unknown_gpu_is_an_error_with_the_nearest_name():
    with pytest.raises(UsageError) as error:
        facts.named("h100-80g")
    assert "no facts about a GPU 'h100-80g'" in str(error.value) and "--gpu H100-80GB" in str(error.value)
    assert facts.find("Radeon RX 7900") is None


def test_a_file_of_your_own(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[[gpu]]\nname = "X1"\nmemory_gb = 64\nsource = "the box"\n')
    (mine,) = facts.kinds_from(str(file))
    assert mine.memory_bytes == 64e9 and mine.peak == {} and mine.memory_bandwidth is None
    assert mine.capacity_bytes < mine.memory_bytes * 1.0
    file.write_text('[[gpu]]\nname = "X1"\n')
    with pytest.raises(UsageError, match="a row that is no GPU"):
        facts.kinds_from(str(file))
    file.write_text("what = [")
    with pytest.raises(UsageError, match="cannot be read"):
        facts.kinds_from(str(file))
