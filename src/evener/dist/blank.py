"""Models without storage (`blank`), and the values they get afterwards (`materialise`), the same on every machine."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import Module

from evener.dist.mix import mix
from evener.errors import ModelError


@contextlib.contextmanager
def blank() -> Iterator[None]:
    """Modules built inside have parameters and buffers on the meta device: shapes and dtypes without storage.

    Initialisation inside does nothing; values come from a file of weights, or from `materialise`. No communication.
    """
    with torch.device("meta"):
        yield


def fill(target: Tensor, value: Tensor) -> None:
    """Make `target` a tensor with `value`'s storage and device while it stays the same object.

    An optimizer made before, and every module that shares it, keep it. `value` is not copied. Attributes, class and
    `requires_grad` stay; a gradient is dropped. Refused where autograd or a hook already uses the tensor.
    """
    hooks = target._backward_hooks or getattr(target, "_post_accumulate_grad_hooks", None)
    new = torch.Tensor._make_subclass(type(target), value.detach(), target.requires_grad)
    new.__dict__.update(target.__dict__)
    try:
        if hooks:
            raise RuntimeError("it has hooks, which would be lost")
        torch.utils.swap_tensors(target, new)
    except RuntimeError as error:
        what = "A parameter without storage is already in use and cannot get its values."
        fix = ["load or materialise the model before hooks are registered and before its first forward"]
        raise ModelError(what, evidence=[str(error)], fix=fix) from None


def materialise(model: Module, device: torch.device | str, seed: int, path: str = "") -> None:
    """Give every tensor of `model` that is still on the meta device its storage and its values.

    Values come from `reset_parameters()` of each module, children before parents, each under a generator seeded by
    (seed, the module's name): they do not depend on the rest of the model, the rank or the device (they are drawn on
    the CPU, then moved; the CPU holds the whole model meanwhile). What the constructors did beyond `reset_parameters`
    is not repeated. Tensors that had values keep them; tied ones stay tied and get the values of their first name;
    parameters stay the same objects. The process's random state is left as it was. On every rank; no communication.

    path: The model's name inside of a larger model, whose values these shall be. After an error (tensors that no
    reset_parameters makes, all of them named) the model is unusable.
    """
    modules = dict(model.named_modules())
    start = {id(one): one for module in modules.values() for one in _own(module).values()}
    real = {place for place, one in start.items() if not one.is_meta}
    resets = {name: reset for name, module in modules.items() if (reset := _reset_of(module)) is not None}
    owner: dict[int, str] = {}  # whose reset makes a tensor: the first module that holds it and can
    for name, module in modules.items():
        for one in _own(module).values():
            if name in resets and id(one) not in real:
                owner.setdefault(id(one), name)
    hopeless = [
        f"{name}.{key}".lstrip(".")
        for name, module in modules.items()
        for key, one in _own(module).items()
        if id(one) not in real and id(one) not in owner and not any(above in resets for above in _above(name))
    ]
    adrift = [
        f"{name}.{key}".lstrip(".")
        for name, module in modules.items()
        for key, one in vars(module).items()
        if isinstance(one, Tensor) and one.is_meta
    ]
    _refuse(hopeless, adrift)

    versions: dict[int, int] = {}
    for place, one in start.items():
        if place not in real:
            fill(one, torch.empty_like(one, device="cpu"))
            if _shows_nan(one):
                one.detach().fill_(torch.nan)  # what no reset touches is found by it
            versions[place] = one._version
    before = torch.get_rng_state()
    try:
        with torch.device("cpu"):  # the caller may still be inside `blank`
            for name, module in reversed(modules.items()):  # children first, as constructors run
                inside = [*module.parameters(), *module.buffers()]
                kept = [one for one in inside if id(one) in real]
                own = _own(module).values()
                if name in resets and (any(id(one) in versions for one in own) or (inside and not kept)):
                    kept += [one for one in own if owner.get(id(one), name) != name]
                    named = f"{path}.{name}".strip(".")
                    torch.default_generator.manual_seed(mix(seed, zlib.crc32(named.encode())))
                    _reset(module, resets[name], kept)
    finally:
        torch.set_rng_state(before)
    untouched = []
    for name, module in modules.items():
        for key, one in _own(module).items():
            # Writing through `.data` leaves the version as it was, hence the second look.
            same = one.numel() > 0 and versions.get(id(one)) == one._version
            if same and (not _shows_nan(one) or bool(one.isnan().all())):
                untouched.append(f"{name}.{key}".lstrip("."))
    _refuse(untouched, [])
    for module in modules.values():
        for one in _own(module).values():
            if id(one) not in real and one.device != torch.device(device):
                fill(one, one.to(device))


def _own(module: Module) -> dict[str, Tensor]:
    """The parameters and buffers that the module itself holds."""
    own = {**module._parameters, **module._buffers}
    return {name: one for name, one in own.items() if one is not None}


def _reset_of(module: Module) -> Callable[[], object] | None:
    # MultiheadAttention and Transformer have it under a private name only.
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    return reset if callable(reset) else None


def _above(name: str) -> Iterator[str]:
    """The names of the modules that hold the module `name`, the model itself included."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _shows_nan(one: Tensor) -> bool:
    return (one.is_floating_point() or one.is_complex()) and one.element_size() > 1


def _reset(module: Module, reset: Callable[[], object], kept: list[Tensor]) -> None:
    """Run it; `kept` tensors keep their values, and parameters that it makes anew stay the objects they were."""
    values = [one.detach().clone() for one in kept]
    held = dict(module._parameters)
    reset()
    for key, old in held.items():
        new = module._parameters[key]
        if old is not None and new is not None and new is not old:
            fill(old, new)
            module._parameters[key] = old
    for one, value in zip(kept, values):
        one.data.copy_(value)  # not counted as a change


def _refuse(unmade: list[str], adrift: list[str]) -> None:
    if not unmade and not adrift:
        return
    evidence = [f"no reset_parameters() makes: {', '.join(unmade)}"] if unmade else []
    evidence += [f"plain attributes, neither parameter nor buffer: {', '.join(adrift)}"] if adrift else []
    what = f"{len(unmade) + len(adrift)} tensors of a model built without storage would have no values."
    fix = [
        "give the module that holds them a reset_parameters() that makes them, and call it in __init__ too",
        "or build the model outside of evener.blank()",
    ]
    raise ModelError(what, evidence=evidence, fix=fix)
