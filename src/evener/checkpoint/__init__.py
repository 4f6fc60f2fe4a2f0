"""Room `checkpoint`: what a run needs to continue, on disk, whole or not at all; and weights that come in and go out.

`save` and `load` are the checkpoint format for users of `Engine`; `Run` uses `Checkpoints`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only

from evener.checkpoint import store
from evener.checkpoint.agree import on_all, on_main
from evener.checkpoint.folder import Checkpoints as Checkpoints
from evener.checkpoint.problems import some
from evener.checkpoint.weights import export as export
from evener.checkpoint.weights import load_weights as load_weights
from evener.checkpoint.weights import misfit, unwrapped
from evener.dist import here
from evener.dist.blank import fill
from evener.errors import CheckpointError, UsageError, nearest

__all__ = ["Checkpoints", "export", "load", "load_weights", "save"]


def save(dir: str | os.PathLike[str], /, **objects: Any) -> None:
    """Save objects that have `state_dict()`, and plain dicts, as one checkpoint in the directory `dir`.

    Called on all ranks; rank 0's objects are written, and its success or error is told to all (one broadcast). An
    earlier checkpoint in `dir` is replaced only by the whole new one. Models are saved without the wrappers of DDP and
    torch.compile.

        evener.save("runs/last", engine=engine, extra={"best": 0.93})

    Raises:
        CheckpointError: on all ranks: something in a state that cannot be saved, a full disk, `dir` is something else.
        UsageError: nothing to save, or an object without a `state_dict()`.
    """
    _is_path(dir)
    if not objects:
        raise UsageError("evener.save() was given nothing to save.", fix=["evener.save(dir, engine=engine)"])
    states = {name: _state(name, thing) for name, thing in objects.items()}
    versions = {"torch": str(torch.__version__), "numpy": numpy.__version__}
    about = {"versions": versions, "world_size": here().world_size}
    on_main(lambda: store.write(dir, states, about=about))


def load(dir: str | os.PathLike[str], /, **objects: Any) -> dict[str, Any]:
    """Load what `save` wrote into the objects of the same names. Returns the states of plain dicts by name.

    Called on all ranks; each reads and checks the files itself, and an error on one is raised on all (one gather).
    Every name of the checkpoint must be given, and no other; for a state that was a plain dict give any dict.

        extra = evener.load("runs/last", engine=engine, extra={})["extra"]

    Raises:
        CheckpointError: no whole checkpoint, names that do not match, or an object that refuses its state. Models are
            compared before anything is loaded; after a refusal by another object, the ones before it are loaded.
    """
    _is_path(dir)
    path = Path(os.path.abspath(dir))
    on_main(lambda: store.recover(path) if path.parent.is_dir() else None)

    def act() -> dict[str, Any]:
        states, _ = store.read(path)
        _same_names(path, list(states), list(objects))
        modules = {name: unwrapped(one) for name, one in objects.items() if isinstance(one, torch.nn.Module)}
        for name, module in modules.items():
            problem = misfit(module.state_dict(), states[name], f"{name} in {path}")
            if problem is not None:
                raise problem
        plain = {}
        for name, thing in objects.items():
            if name in modules:
                for one in modules[name].state_dict(keep_vars=True).values():
                    if isinstance(one, torch.Tensor) and one.is_meta:
                        fill(one, torch.empty_like(one, device="cpu"))
                modules[name].load_state_dict(states[name])  # copies into the parameters
            elif isinstance(thing, Mapping):
                plain[name] = _own(states[name])
            else:
                _method(name, thing, "load_state_dict")
                try:
                    thing.load_state_dict(_own(states[name]))
                except Exception as error:
                    text = f"{name} does not accept its state from the checkpoint."
                    raise CheckpointError(text, evidence=[f"{type(error).__name__}: {error}"]) from error
        return plain

    return on_all(act)


def _is_path(dir: object) -> None:
    if not isinstance(dir, str | os.PathLike):
        raise UsageError(f"{dir!r} is not a path.", fix=['the directory comes first: "runs/last"'])


def _method(name: str, thing: Any, method: str) -> None:
    if not callable(getattr(thing, method, None)):
        fix = [f"{name}=<an object with state_dict() and load_state_dict()>", f"{name}={{...}} (a dict of values)"]
        raise UsageError(f"{name}= is a {type(thing).__name__}: it has no {method}().", fix=fix)


def _state(name: str, thing: Any) -> Any:
    if isinstance(thing, Mapping):
        return dict(thing)
    _method(name, thing, "state_dict")
    return unwrapped(thing).state_dict()


def _same_names(path: Path, saved: list[str], given: list[str]) -> None:
    missing = [name for name in given if name not in saved]
    extra = [name for name in saved if name not in given]
    if not missing and not extra:
        return
    evidence = [f"not in the checkpoint: {some(missing)}"] if missing else []
    evidence += [f"in the checkpoint and not given: {some(extra)}"] if extra else []
    close = {name: nearest(name, extra) for name in missing}
    fix = [f"{close[name]}=, not {name}=" for name in missing if close[name]] or [f"it holds {some(saved)}: name these"]
    raise CheckpointError(f"The names do not match those in {path}.", evidence=evidence, fix=fix)


def _own(state: Any) -> Any:
    """The state with copies of its tensors: optimizers keep what they are given, and it is mapped from a file."""
    clone = functools.cache(torch.Tensor.clone)  # one tensor under two names stays one
    return tree_map_only(torch.Tensor, clone, state)
