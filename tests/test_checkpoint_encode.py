"""Any nested state survives the way through JSON and tensors; what cannot is refused with its path."""

from __future__ import annotations

import collections
import enum
import json
import math
import pathlib
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from evener.checkpoint.encode import decode, encode
from evener.errors import CheckpointError

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.complex64, torch.complex128, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]


def through(state):
    tree, tensors = encode(state, "state")
    return decode(json.loads(json.dumps(tree)), tensors)


def same(one, other) -> bool:
    """Equal values of equal types, to the bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        same_kind = one.dtype == other.dtype and one.shape == other.shape
        return same_kind and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(a, b) and same(x, y) for (a, x), (b, y) in zip(one.items(), other.items())
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other))
    if isinstance(one, float):
        return struct.pack(">d", one) == struct.pack(">d", other)
    return one == other


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype is torch.bool:
        raw = bytearray(byte % 2 for byte in raw)
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = flat.view(dtype).reshape(shape)
    return tensor.transpose(0, -1) if draw(st.booleans()) and len(shape) > 1 else tensor


plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(), st.text(), st.binary()
)
keys = st.one_of(st.text(), st.integers(), st.sampled_from(["$tensor", "$dict", "a.b", "__metadata__", True, None]))
arrays = npst.arrays(
    st.sampled_from(["f8", ">f4", "f2", "i8", "u1", "?", "c16", "M8[ns]", "U3", "S2"]),
    npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3),
)
scalars = st.sampled_from(
    [np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2026-01-02", "D"), np.str_("é")]
)
torchy = st.sampled_from([torch.bfloat16, torch.device("cuda", 1), torch.device("cpu"), torch.Size([2, 0])])
sets = st.one_of(st.frozensets(st.integers() | st.text()), st.sets(st.tuples(st.text(), st.integers())))
leaves = st.one_of(plain, tensors(), arrays, scalars, torchy, sets, st.sampled_from([range(3), range(9, 1, -2)]))
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.tuples(inner, inner), st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(states)
def test_every_state_comes_back_with_its_types(state):
    assert same(through(state), state)


def test_an_optimizer_and_random_states_come_back():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    generator = np.random.default_rng(3)
    state = {
        "optimizer": optimizer.state_dict(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": generator.bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    assert same(through(state), state)
    random.setstate(through(state)["python"])
    np.random.set_state(through(state)["numpy"])


def test_a_number_too_long_for_decimal_text_comes_back():
    assert through({"n": -(7**9000)}) == {"n": -(7**9000)}


def test_ordered_and_default_dicts_come_back_as_dicts():
    got = through({"a": collections.OrderedDict(x=1), "b": collections.defaultdict(list, {3: [1]})})
    assert got == {"a": {"x": 1}, "b": {3: [1]}} and type(got["a"]) is type(got["b"]) is dict


def test_tied_tensors_are_kept_once_and_stay_tied():
    weight = torch.randn(4, 3)
    wide = torch.randn(2, dtype=torch.complex128)
    state = {"embed": weight, "head": weight, "view": weight.view(4, 3), "t": weight.t(), "w": [wide, wide]}
    _, stored = encode(state)
    got = through(state)
    assert len(stored) == 3
    assert got["embed"] is got["head"] is got["view"] and got["w"][0] is got["w"][1]
    assert torch.equal(got["t"], weight.t())


def test_names_of_tensors_tell_where_they_are_and_never_clash():
    state = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 0: {"x": torch.ones(2)}, "0": {"x": torch.zeros(2)}}
    _, stored = encode(state)
    assert list(stored) == ["a.b", "a.b#2", "0.x", "0.x#2"]
    assert same(through(state), state)


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"optimizer": {"state": {3: {"hook": len}}}}, "optimizer.state.3.hook is a builtin_function_or_method"),
        ({"a": [1, lambda: None]}, "a.1 is a function: a checkpoint cannot hold it"),
        ({"dir": pathlib.PurePosixPath("x")}, "dir is a pathlib.PurePosixPath"),
        ({"c": Colour.RED}, r"c is a .*Colour(.|\n)*save int\(value\) instead"),
        ({"p": Point(1, 2)}, r"p is a .*Point(.|\n)*save tuple\(value\) instead"),
        ({Colour.RED: 1}, "a key or member of Colour.RED|a key or member of 1 is a"),
        ({"s": {object()}}, "a key or member of s is an object"),
        ({"n": np.array([object()])}, "n is a numpy.ndarray"),
        ({"n": np.zeros(2, dtype="i4,f8")}, "n is a numpy.ndarray"),
        ({"sparse": torch.eye(2).to_sparse()}, "sparse is a torch.Tensor .*sparse_coo"),
        ({"m": torch.empty(2, device="meta")}, "m is on the meta device"),
        ({"z": 1j}, "z is a complex"),
    ],
)
def test_anything_else_is_refused_with_its_path(state, text):
    with pytest.raises(CheckpointError, match=text):
        encode(state)


def test_a_state_that_contains_itself_is_refused():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(CheckpointError, match="contain itself"):
        encode({"loop": loop})


@pytest.mark.parametrize(
    "tree",
    [
        {"$unknown": 1},
        {"$tensor": "gone"},
        {"$tensor": "t", "dtype": "load", "shape": [1]},
        {"$tensor": "t", "dtype": "complex128", "shape": [7]},
        {"$array": "t", "dtype": "O", "shape": [1]},
        {"$numpy": "O", "bytes": "AAAAAAAAAAA="},
        {"$dtype": "nn"},
        {"$device": "nowhere"},
        {"$dict": [[[1], 2]]},
        {"$bytes": "?"},
        {"$int": []},
        {"$float": "00"},
        {"$range": [0, 1, 0]},
    ],
)
def test_a_tree_that_nobody_encoded_is_refused(tree):
    with pytest.raises(CheckpointError, match="does not write"):
        decode({"x": tree}, {"t": torch.zeros(4, dtype=torch.uint8)})
