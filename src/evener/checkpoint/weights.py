"""Weights in and out: plain names, every name accounted for, and never a part of a model."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evener.checkpoint.agree import on_main
from evener.checkpoint.foreign import read_weights
from evener.checkpoint.problems import some, unwritten
from evener.checkpoint.store import sync_directory
from evener.checkpoint.tensors import CODES, CREATE, file_pieces, opened, split, write_pieces
from evener.dist.blank import fill
from evener.errors import CheckpointError, UsageError

_PREFIXES = ("module.", "model.")


def export(model: torch.nn.Module | Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a model's (or a state_dict's) tensors as one safetensors file, with the names of the plain module.

    `model.load_state_dict(safetensors.torch.load_file(path))` reads it. Called on all ranks: rank 0 writes, its success
    or error is told to all (one broadcast). An earlier file is replaced by the whole new one or stays.

    Raises:
        CheckpointError: on all ranks: a full disk, a state that is no tensor, a model without values.
        UsageError: `path` does not end in .safetensors.
    """
    target = Path(os.path.abspath(path))
    if target.suffix != ".safetensors":
        raise UsageError(f"export() writes safetensors, not {target.name!r}.", fix=[f'"{target.stem}.safetensors"'])
    on_main(lambda: _write(model, target))


def load_weights(
    model: torch.nn.Module, path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> list[str]:
    """Load the weights that evener, transformers, accelerate, Lightning or a plain script saved. Returns notes to show.

    Reads a .safetensors file, an index of several, a .pt/.pth/.bin/.ckpt state_dict (as data, never as a pickle that
    may run code), a directory with one of these, or an evener checkpoint. Tensors are copied one by one from the
    mapped file; parameters on the meta device get their storage on `device` and stay the same objects. On each rank
    that needs it; no communication.

    Raises:
        CheckpointError: unreadable, or names and shapes do not match the model's exactly; then nothing was loaded.
    """
    tensors, notes = read_for(model, path)
    for name, target in _wanted(model).items():
        if target.is_meta:
            fill(target, tensors[name].to(device=device, dtype=target.dtype, copy=True))
        else:
            with torch.no_grad():
                target.copy_(tensors[name])
    return notes


def read_for(model: torch.nn.Module, path: str | os.PathLike[str]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a file of weights by the model's names, mapped and not copied; notes. Raises as `load_weights`."""
    wanted = _wanted(model)
    tensors, notes = read_weights(Path(path))
    tensors, said = _renamed(tensors, wanted)
    tensors, tied = _with_ties(tensors, wanted, path)
    problem = misfit(wanted, tensors, str(path))
    if problem is not None:
        raise problem
    changed: dict[str, list[str]] = {}
    for name, target in wanted.items():
        if tensors[name].dtype != target.dtype:
            kind = f"{str(tensors[name].dtype)[6:]} to {str(target.dtype)[6:]}"
            changed.setdefault(kind, []).append(name)
    notes = [*notes, *said, *tied]
    notes += [f"converted from {kind}: {some(names, 3)}" for kind, names in sorted(changed.items())]
    return tensors, notes


def _wanted(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = unwrapped(model).state_dict(keep_vars=True)
    return {_plain(name): one for name, one in held.items() if isinstance(one, torch.Tensor)}


def unwrapped(model: Any) -> Any:
    """The user's own module inside DDP, DataParallel and torch.compile; anything else as it is."""
    while True:
        if isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        elif isinstance(model, torch.nn.Module) and isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        else:
            return model


def misfit(wanted: Mapping[str, Any], given: Mapping[str, Any], what: str) -> CheckpointError | None:
    """One error that names every kind of difference between a model's names and shapes and those in `what`, or None."""
    missing = [name for name in wanted if name not in given]
    extra = [name for name in given if name not in wanted]
    shapes = []
    for name in wanted.keys() & given.keys():
        target, source = wanted[name], given[name]
        if not isinstance(target, torch.Tensor) or not isinstance(source, torch.Tensor):
            continue
        if source.shape != target.shape:
            shapes.append(f"{name} is {tuple(source.shape)}, in the model {tuple(target.shape)}")
        elif source.is_complex() and not target.is_complex():
            shapes.append(f"{name} is complex, in the model real")
    kinds = {"missing": missing, "not in the model": extra, "of another shape": sorted(shapes)}
    kinds = {kind: names for kind, names in kinds.items() if names}
    if not kinds:
        return None
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items())
    evidence = [f"{kind}: {some(names)}" for kind, names in kinds.items()]
    fix = ["build the model that these weights are for; a part of a model is never loaded"]
    return CheckpointError(f"{what} does not fit the model: {counts}.", evidence=evidence, fix=fix)


def _write(model: torch.nn.Module | Mapping[str, Any], path: Path) -> None:
    tensors: dict[str, torch.Tensor] = {}
    state = model if isinstance(model, Mapping) else unwrapped(model).state_dict()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.is_meta or value.dtype not in CODES:
            what = f"{value.dtype} on {value.device}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise CheckpointError(f"{name} is {what}: a file of weights cannot hold it.")
        tensors[_plain(name)] = value
    size = sum(one.nbytes for one in tensors.values())
    # Tied weights are written under each of their names: strict loading asks for all of them.
    names = [name for file in split(tensors, size) for name in file]
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with opened(new, CREATE) as descriptor:
            write_pieces(descriptor, file_pieces(tensors, names))
        os.replace(new, path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            new.unlink()
        if isinstance(error, OSError):
            raise unwritten(path, error, size) from error
        raise


def _plain(name: str) -> str:
    """The name without torch.compile's wrappers, which may be around the model or around parts of it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _renamed(given: dict[str, torch.Tensor], wanted: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Take off a wrapper's prefix when all names have it and then fit better; say so."""
    best = current = {_plain(name): one for name, one in given.items()}
    off = said = ["_orig_mod."] if best.keys() != given.keys() else []
    while best.keys() != wanted.keys():
        prefix = next((one for one in _PREFIXES if current and all(name.startswith(one) for name in current)), None)
        if prefix is None:
            break
        current, off = {name.removeprefix(prefix): one for name, one in current.items()}, [*off, prefix]
        if len(current.keys() ^ wanted.keys()) < len(best.keys() ^ wanted.keys()):
            best, said = current, off
    return best, [f"{' and '.join(said)} taken off the {len(given)} names in the file"] if said else []


def _with_ties(
    given: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], path: object
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Names that the model ties to one tensor: the file may leave all but one of them out, and may not contradict."""
    groups: dict[int, list[str]] = {}
    for name, target in wanted.items():
        groups.setdefault(id(target), []).append(name)
    full, absent = dict(given), []
    for names in groups.values():
        there = [name for name in names if name in given]
        for other in there[1:]:
            if not torch.equal(given[there[0]], given[other]):
                what = f"{path}: {there[0]} and {other} differ, but are one tensor in the model."
                fix = ["untie them in the model, or use the weights of a model that ties them"]
                raise CheckpointError(what, fix=fix)
        for name in names:
            if there and name not in given:
                full[name] = given[there[0]]
                absent.append(f"{name} (tied to {there[0]})")
    return full, [f"not in the file, taken from its twin: {some(absent)}"] if absent else []
