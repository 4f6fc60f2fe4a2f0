"""CUDA_VISIBLE_DEVICES means what torch says it means, for every text; and what does not count is explained."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evener.gpus import visible
from evener.gpus.values import Gpu, MigDevice
from tests.fakenvml import EIGHT, Fake, needs_compiler

UUIDS = ("GPU-8f2e11aa", "GPU-8f2e22bb", "GPU-1c00", "GPU-77aa")
FOUR = tuple(Gpu(i, uuid=uuid, name="A100") for i, uuid in enumerate(UUIDS))
MIXED = tuple(Gpu(i, uuid=uuid, name=f"kind {i % 2}") for i, uuid in enumerate(UUIDS))

# Texts near the edges of the grammar, and texts far from it.
numbers = st.sampled_from(
    ["0", "1", "2", "3", "4", "17", "-1", "-0", "+1", "01", "1gpu2", "2ampere", " 1", "1 ", "", "x", "1.5"]
)
ids = st.sampled_from(
    [*UUIDS, "GPU-8f2e", "GPU-8f2e1", "GPU-1", "GPU-", "GPU-zz", " GPU-1c00", "gpu-1c00", "MIG-1", "MIG-1/2", "0"]
)
texts = st.one_of(
    st.lists(numbers, max_size=5).map(",".join),
    st.lists(ids, max_size=4).map(",".join),
    st.lists(st.one_of(numbers, ids), max_size=4).map(",".join),
    st.text(alphabet="0123456789+-, GPUMIGabcx/", max_size=12),
)


def oracle(value: str | None) -> list[int] | list[str]:
    import torch

    with mock.patch.dict(os.environ):
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if value is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
        return torch.cuda._parse_visible_devices()


def ordinals(words: list[str]) -> list[int]:
    import torch

    return torch.cuda._transform_uuid_to_ordinals(words, list(UUIDS))


@settings(max_examples=250, deadline=None)
@given(texts)
@example("1,0,1")
@example("2,-1,3")
@example("1gpu2,2ampere")
@example("GPU-8f2e11aa,0")
@example("GPU-8f2e11aa, GPU-1c00")
@example("")
@example("-1")
def test_the_words_that_count_are_torchs(value):
    try:
        expected = oracle(value)
    except ValueError:  # torch itself stumbles over a lone sign
        assert "+" in value or "-" in value
        visible.parse(value)
        return
    counted, ended = visible.parse(value)
    assert counted == expected
    # Whatever was dropped is said, and only then.
    dropped = len(expected) < len(value.split(","))
    assert bool(ended) == (dropped and value.strip() not in ("", "-1"))


@settings(max_examples=250, deadline=None)
@given(texts)
def test_the_slots_are_torchs(value):
    try:
        words = oracle(value)
    except ValueError:
        return
    if words and isinstance(words[0], str):
        if words[0].startswith("MIG-"):
            return  # torch does not resolve them
        expected = ordinals(words)
    else:
        expected = words
        for at, index in enumerate(words):  # torch trims the list at the first index that is not there
            if index >= len(FOUR):
                expected = words[:at]
                break
    seen = visible.read({"CUDA_VISIBLE_DEVICES": value}, FOUR)
    assert seen.slots == tuple(UUIDS[index] for index in expected)
    # Both ways: a slot's GPU has that slot, and every other GPU has none.
    for gpu in FOUR:
        slot = seen.slot_of(gpu.uuid)
        assert (slot is None) == (gpu.index not in expected)
        assert slot is None or (seen.slots[slot] == gpu.uuid and expected[slot] == gpu.index)
    assert bool(seen.because) == (len(expected) < len(value.split(",")) and value.strip() not in ("", "-1"))


@settings(max_examples=100, deadline=None)
@given(st.permutations(UUIDS), st.integers(1, 4))
def test_what_evener_exports_means_exactly_those_gpus(order, count):
    chosen = tuple(order[:count])
    assert visible.read(visible.to_variable(chosen), MIXED).slots == chosen


VALUES = [
    None,
    "",
    "0,3",
    "3,9,1",
    "1,1",
    "-1",
    "GPU-fa4e0005,GPU-fa4e0001",
    "GPU-fa4e000",
    "GPU-fa4e0002,GPU-fa4e0002-",
]


@needs_compiler
def test_torch_counts_the_same_devices_on_the_same_driver(tmp_path):
    program = f"""
import os, torch
from evener.gpus import look_at_gpus
for value in {VALUES!r}:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if value is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = value
    slots = [gpu.slot for gpu in look_at_gpus(os.environ).gpus if gpu.slot is not None]
    print(repr(value), torch.cuda._device_count_nvml(), len(slots))
"""
    environ = Fake(tmp_path, EIGHT).environ()
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    rows = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()]
    assert len(rows) == len(VALUES) and all(theirs == ours for _, theirs, ours in rows), done.stdout


def test_mixed_gpus_have_no_known_slots_unless_the_order_is_said():
    assert visible.read({}, MIXED).slots == (None,) * 4
    assert "CUDA_DEVICE_ORDER is not PCI_BUS_ID" in visible.read({}, MIXED).because[0]
    assert visible.read({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, MIXED).slots == UUIDS
    assert visible.read({"CUDA_VISIBLE_DEVICES": "1"}, MIXED).slots == (None,)
    assert visible.read({"CUDA_VISIBLE_DEVICES": "GPU-1c"}, MIXED).slots == ("GPU-1c00",), "a UUID needs no order"
    lost = (*FOUR[:3], Gpu(3, error="GPU is lost"))
    assert visible.read({}, lost).slots == (*UUIDS[:3], None), "a lost GPU does not make the others unknown"


def test_mig_devices_are_found_by_uuid():
    parts = (MigDevice(0, uuid="MIG-aa"), MigDevice(1, uuid="MIG-bb"))
    gpus = (FOUR[0], Gpu(1, uuid="GPU-8f2e22bb", name="A100", mig=parts))
    assert visible.read({"CUDA_VISIBLE_DEVICES": "MIG-bb"}, gpus).slots == ("MIG-bb",)
    two = visible.read({"CUDA_VISIBLE_DEVICES": "MIG-aa,MIG-bb"}, gpus)
    assert two.slots == ("MIG-aa", "MIG-bb") and "one MIG device per process" in two.because[0]
    assert visible.read({"CUDA_VISIBLE_DEVICES": "MIG-zz"}, gpus).slots == ()


@pytest.mark.parametrize(
    "value, words",
    [
        ("0,9", ["9 is not there (GPUs 0 to 3)", "the list ends before it"]),
        ("2,-1,3", ["'-1' is negative", "what follows it does not count"]),
        ("1,0,1", ["1 is there twice, which hides every GPU"]),
        ("GPU-8f2e", ["GPU-8f2e means 2 GPUs"]),
        ("GPU-beef", ["GPU-beef is no GPU of this machine"]),
        ("GPU-1c00, GPU-77aa", ["begins with a space"]),
        ("GPU-1c00,0", ["'0' does not begin with GPU-"]),
        ("GPU-1c,GPU-1c00", ["already there, which hides every GPU"]),
        ("0,GPU-1c00", ["'GPU-1c00' is no index"]),
        ("none", ["'none' is no index"]),
    ],
)
def test_a_word_that_does_not_count_is_explained(value, words):
    lines = visible.read({"CUDA_VISIBLE_DEVICES": value}, FOUR).lines(FOUR)
    assert lines[0].startswith(f"CUDA_VISIBLE_DEVICES={value}: ")
    for word in words:
        assert word in "\n".join(lines)


def test_invalid_device_ids_name_the_slot_that_was_meant():
    seen = visible.read({"CUDA_VISIBLE_DEVICES": "2,3"}, FOUR)
    assert visible.explain_slots([0, 1], seen, FOUR) is None
    text = str(visible.explain_slots([2, 3], seen, FOUR))
    assert text.splitlines() == [
        "cuda:2, cuda:3: no such device here; there are cuda:0 to cuda:1.",
        "  CUDA_VISIBLE_DEVICES=2,3: cuda:0 is GPU 2, cuda:1 is GPU 3",
        "  fix: GPU 3 of nvidia-smi is cuda:1 here",
        "       GPU 2 of nvidia-smi is cuda:0 here",
        "       torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever nvidia-smi calls it",
    ]
    hidden = str(visible.explain_slots([5], visible.read({"CUDA_VISIBLE_DEVICES": "0"}, FOUR), FOUR))
    assert "cuda:5: no such device here; there is cuda:0 only." in hidden
    hidden = str(visible.explain_slots([1], visible.read({"CUDA_VISIBLE_DEVICES": "0"}, FOUR), FOUR))
    assert "GPU 1 of nvidia-smi is hidden here: add it to CUDA_VISIBLE_DEVICES" in hidden
    none = str(visible.explain_slots([0], visible.read({"CUDA_VISIBLE_DEVICES": ""}, FOUR), FOUR))
    assert "cuda:0: no such device here; there are none." in none and "no GPU is visible" in none
