"""Any nested state becomes (a JSON tree, {name: tensor}) and back, without pickle.

What JSON has stands for itself. The rest is an object with one key that starts with "$": {"$tuple": [...]},
{"$tensor": name}. A dict with such keys of its own, or with keys that are not strings, is written as a list of pairs.
Tensors that are the same view of the same memory (tied weights) are written once and come back as one tensor.
OrderedDict and defaultdict come back as dict; tensors come back on the CPU, without a gradient.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from evener.checkpoint.tensors import CODES
from evener.errors import CheckpointError

_DEEPEST = 100  # levels; beyond it a state contains itself, or would exhaust the stack of a JSON reader
_NUMPY_KINDS = "biufcSUmM"  # numpy dtypes that are plain bytes: no objects, no structures
_KEYS = (str, int, bool, float, type(None), tuple)


def _dtype(name: str) -> torch.dtype:
    value = getattr(torch, name, None)
    if not isinstance(value, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return value


# Values without parts: type -> tag, to JSON, and back.
_LEAVES: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    int: ("$int", hex, lambda text: int(text, 16)),  # Python refuses to read decimal numbers of more than 4300 digits
    # As bits: a NaN keeps its sign and payload.
    float: ("$float", lambda v: struct.pack(">d", v).hex(), lambda v: struct.unpack(">d", bytes.fromhex(v))[0]),
    bytes: ("$bytes", lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    range: ("$range", lambda v: [v.start, v.stop, v.step], lambda v: range(*v)),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", lambda v: str(v).removeprefix("torch."), _dtype),
    torch.device: ("$device", str, torch.device),
}
_LEAF_OF = {tag: back for tag, _, back in _LEAVES.values()}
_GROUPS: dict[str, type] = {"$tuple": tuple, "$set": set, "$frozenset": frozenset}


def encode(state: Any, path: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """The JSON tree of `state` and its tensors by name. The tensors are `state`'s own memory, not copies.

    state: dicts, lists, tuples, sets, None, bool, int, float, str, bytes, range, numpy scalars and arrays, tensors,
    torch.dtype, torch.device, torch.Size, nested in any way; anything else is a CheckpointError that names the path to
    it. path: what the names inside the state begin with.
    """
    encoder = _Encoder()
    return encoder.tree(state, path, 0), encoder.tensors


def decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The state that `encode` was given. Builds nothing but the types listed there, whatever the tree says.

    Raises:
        CheckpointError: the tree was not made by `encode`, or a tensor is missing.
    """
    try:
        return _Decoder(tensors).state(tree)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError, struct.error) as error:
        text = "The manifest holds something that evener does not write."
        raise CheckpointError(text, evidence=[f"{type(error).__name__}: {error}"]) from None


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._seen: dict[tuple[Any, ...], str] = {}

    def tree(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        plain = (kind is int and value.bit_length() <= 64) or (kind is float and math.isfinite(value))
        if value is None or kind in (bool, str) or plain:
            return value
        if depth > _DEEPEST:
            fix = ["does a part of it contain itself?"]
            raise CheckpointError(f"{path[:60]}... is nested more than {_DEEPEST} levels deep.", fix=fix)
        if kind in _LEAVES:
            tag, to_json, _ = _LEAVES[kind]
            return {tag: to_json(value)}
        if kind in (dict, OrderedDict, defaultdict):
            return self._dict(value, path, depth)
        if kind is list:
            return self._items(value, path, depth)
        if kind is tuple:
            return {"$tuple": self._items(value, path, depth)}
        if kind in (set, frozenset):
            items = [self._key(item, path, depth) for item in value]
            return {f"${kind.__name__}": sorted(items, key=json.dumps)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.generic | np.ndarray):
            return self._numpy(value, path)
        raise _refused(value, path)

    def _items(self, values: Any, path: str, depth: int) -> list[Any]:
        return [self.tree(value, f"{path}.{i}", depth + 1) for i, value in enumerate(values)]

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        if plain:
            return {key: self.tree(item, f"{path}.{key}" if path else key, depth + 1) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            pairs.append([self._key(key, inner, depth), self.tree(item, inner, depth + 1)])
        return {"$dict": pairs}

    def _key(self, key: Any, path: str, depth: int) -> Any:
        for part in key if type(key) is tuple else (key,):
            if type(part) not in _KEYS:
                raise _refused(part, f"a key or member of {path}")
        return self.tree(key, path, depth + 1)

    def _store(self, tensor: torch.Tensor, path: str) -> str:
        wanted = name = (path or "tensor").encode("utf-8", "backslashreplace").decode()
        count = 1
        while name in self.tensors or name == "__metadata__":  # {"a.b": x, "a": {"b": y}}; a word of safetensors
            count += 1
            name = f"{wanted}#{count}"
        self.tensors[name] = tensor
        return name

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        own = type(value) in (torch.Tensor, torch.nn.Parameter)
        if not own or value.layout is not torch.strided or value.is_quantized:
            raise _refused(value, path)
        if value.is_meta:
            fix = ["materialise the model first"]
            raise CheckpointError(f"{path} is on the meta device: it has no values.", fix=fix)
        value = value.detach().resolve_conj().resolve_neg()
        view = (value.device, value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        name = self._seen.get(view) if value.numel() else None
        native = value.dtype in CODES
        if name is None:
            try:
                name = self._store(value if native else value.contiguous().reshape(-1).view(torch.uint8), path)
            except RuntimeError:  # a dtype without a byte view
                raise _refused(value, path) from None
            if value.numel():
                self._seen[view] = name
        if native:
            return {"$tensor": name}
        return {"$tensor": name, "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}

    def _numpy(self, value: Any, path: str) -> Any:
        scalar, dtype = isinstance(value, np.generic), value.dtype
        if dtype.kind not in _NUMPY_KINDS or not dtype.itemsize or not (scalar or type(value) is np.ndarray):
            raise _refused(value, path)
        if scalar:
            return {"$numpy": value.dtype.str, "bytes": base64.b64encode(value.tobytes()).decode()}
        data = torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), np.uint8))
        return {"$array": self._store(data, path), "dtype": value.dtype.str, "shape": list(value.shape)}


def _refused(value: Any, path: str) -> CheckpointError:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    article = "an" if name[0] in "aeiou" else "a"
    if isinstance(value, torch.Tensor):
        name += f" ({value.layout}, {value.dtype})"
    fix = ["keep numbers, strings, bytes, lists, tuples, dicts, sets, numpy arrays and tensors in a state"]
    base = next((one for one in (bool, int, float, str, bytes, tuple, list, dict) if isinstance(value, one)), None)
    if base is not None:
        fix.insert(0, f"save {base.__name__}(value) instead: nothing may come back as another type than it was")
    return CheckpointError(f"{path or 'the state'} is {article} {name}: a checkpoint cannot hold it.", fix=fix)


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._viewed: dict[str, torch.Tensor] = {}  # tensors stored as bytes, made once: tied ones stay tied

    def state(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.state(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        tag = next((key for key in tree if key.startswith("$")), None)
        if tag is None:
            return {key: self.state(item) for key, item in tree.items()}
        return self._tagged(tag, tree[tag], tree)

    def _tagged(self, tag: str, value: Any, tree: dict[str, Any]) -> Any:
        if tag in _LEAF_OF:
            return _LEAF_OF[tag](value)
        if tag in _GROUPS:
            return _GROUPS[tag](self.state(value))
        if tag == "$dict":
            return {self.state(key): self.state(item) for key, item in value}
        if tag == "$tensor":
            return self._tensor(value, tree)
        if tag == "$array":
            data = self._tensors[value].clone().numpy()  # a copy is aligned, and does not hold the file
            return data.view(_numpy_dtype(tree["dtype"])).reshape(tree["shape"])
        if tag == "$numpy":
            return np.frombuffer(base64.b64decode(tree["bytes"], validate=True), _numpy_dtype(value))[0]
        raise ValueError(f"unknown tag {tag!r}")

    def _tensor(self, name: str, tree: dict[str, Any]) -> torch.Tensor:
        if "dtype" not in tree:
            return self._tensors[name]
        if name not in self._viewed:
            self._viewed[name] = self._tensors[name].clone().view(_dtype(tree["dtype"])).reshape(tree["shape"])
        return self._viewed[name]


def _numpy_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMPY_KINDS or not dtype.itemsize:
        raise ValueError(f"unknown numpy dtype {name!r}")
    return dtype
