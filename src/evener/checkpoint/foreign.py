"""Weights that others wrote: from a file or directory to {name: tensor}, mapped where the format allows it.

Nothing is unpickled beyond what `torch.load(weights_only=True)` accepts: a pickle can run code.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from evener.checkpoint import store
from evener.checkpoint.manifest import MANIFEST
from evener.checkpoint.problems import some
from evener.checkpoint.tensors import open_file
from evener.errors import CheckpointError

_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
# As the usual savers name them: transformers, accelerate, diffusers.
_KNOWN = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_INSIDE = ("state_dict", "model", "model_state_dict", "engine")


def read_weights(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a weights file or directory, on the CPU, and notes on what was taken.

    Raises:
        CheckpointError: not there, unreadable, a pickle with more than data in it, or not clear which file is meant.
    """
    if path.is_dir():
        return _directory(path)
    if not path.is_file():
        raise CheckpointError(f"There are no weights at {path}.")
    if path.name.endswith(".index.json"):
        return _index(path), []
    if path.suffix == ".safetensors":
        return open_file(path), []
    if path.suffix in _PICKLES:
        return _tensors_in(_unpickled(path), path)
    fix = [f"give a .safetensors file, a .index.json, one of {' '.join(_PICKLES)}, or a directory with such"]
    raise CheckpointError(f"{path} is of no kind that is read.", fix=fix)


def _directory(path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    if (path / MANIFEST).exists():
        return _tensors_in(store.read(path)[0], path)
    names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
    kinds = [[name for name in names if name.endswith(end)] for end in (".index.json", ".safetensors", _PICKLES)]
    known = next((name for name in _KNOWN if name in names), None)
    found = [known] if known else next((kind for kind in kinds if kind), [])
    if len(found) != 1:
        cause = f"{path} holds several files of weights." if found else f"{path} holds no weights."
        raise CheckpointError(cause, evidence=[f"it holds {some(found or names)}"], fix=["give the path of one file"])
    tensors, notes = read_weights(path / found[0])
    numbered = re.compile(r"(model|pytorch_model)_\d+\.(safetensors|bin)")  # accelerate's second model, third, ...
    others = [name for name in names if numbered.fullmatch(name)]
    if others:
        notes = [*notes, f"{path} holds several models: {found[0]} is taken, not {some(others)}"]
    return tensors, [f"weights from {path / found[0]}", *notes]


def _index(path: Path) -> dict[str, torch.Tensor]:
    try:
        where = json.loads(path.read_bytes())["weight_map"]
        names = sorted({str(name) for name in where.values()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{path} is not an index of weights: it has no weight_map.") from None
    for name in names:
        # A name from a file that anybody may have written: it must stay in this directory.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", name) or not name.endswith((".safetensors", *_PICKLES)):
            raise CheckpointError(f"{path} names {name!r}: only weights files beside the index are read.")
    files = {name: read_weights(path.with_name(name))[0] for name in names}
    missing = [f"{key} (in {name})" for key, name in where.items() if key not in files[name]]
    if missing:
        raise CheckpointError(f"{path} names tensors that its files do not hold: {some(missing)}.")
    return {key: files[name][key] for key, name in where.items()}


def _unpickled(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of what it is about to refuse
            # Old files are not zip archives and cannot be mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global:?|class) ([A-Za-z_][\w]*(?:\.\w+)+)", str(error))
        evidence, fix = [str(error).splitlines()[0]], ["ask for a .safetensors file"]
        if found:
            evidence = [f"it needs {found[1]}"]
            fix += [f"or, if you know and trust {found[1]}, allow that one name and keep only the weights:"]
            fix += [f"with torch.serialization.safe_globals([{found[1]}]):"]
            fix += [f'    torch.save(torch.load("{path}", weights_only=True)["state_dict"], "weights.pt")']
        why = "it is not read, because unpickling it can run any code"
        what = f"{path} is a pickle with more than tensors in it; {why}."
        raise CheckpointError(what, evidence=evidence, fix=fix) from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise CheckpointError(f"{path} cannot be read.", evidence=[f"{type(error).__name__}: {reason}"]) from None


def _tensors_in(state: Any, path: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Go down to the dict of tensors that a training script's checkpoint holds."""
    way: list[str] = []
    while isinstance(state, dict) and (odd := [str(k) for k, v in state.items() if not isinstance(v, torch.Tensor)]):
        inside = [key for key in _INSIDE if isinstance(state.get(key), dict)]
        if len(inside) != 1:
            what = f"{path} holds no state_dict where one is looked for ({', '.join(_INSIDE[:3])})."
            evidence = [f"{'.'.join(way) or 'at the top'}: {some(state)}", f"not tensors: {some(odd)}"]
            fix = ["save the weights alone: evener's run.export(path), or safetensors.torch.save_file"]
            raise CheckpointError(what, evidence=evidence, fix=fix)
        way.append(inside[0])
        state = state[inside[0]]
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path} holds no weights, but a {type(state).__name__}.")
    return {str(key): value for key, value in state.items()}, [f'weights from "{".".join(way)}"'] if way else []
