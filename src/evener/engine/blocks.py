"""The blocks of a model: what is sharded, or computed again, as one piece. Found by repetition, or named."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from evener.errors import UsageError

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_LARGE = 0.01  # a layer repeated on its own is worth a message of its own from this part of the model on


def blocks_repeated(model: Module, modules: Mapping[str, Module] | None = None) -> dict[str, Module]:
    """Walking down from the model: the first modules whose class occurs at least twice and that hold other modules
    with parameters."""
    modules = modules if modules is not None else {name: one for name, one in model.named_modules() if name}
    # A block whose class was exchanged (to be computed again) is still one of its kind.
    kinds = Counter(getattr(type(one), "plain", type(one)) for one in modules.values())
    found = {n: m for n, m in modules.items() if kinds[getattr(type(m), "plain", type(m))] > 1}
    found = {n: m for n, m in found.items() if not isinstance(m, _CONTAINERS)}
    found = {n: m for n, m in found.items() if any(c is not m and c._parameters for c in m.modules())}
    return {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}


def blocks_named(model: Module, named: Sequence[Any], keyword: str) -> dict[str, Module]:
    """The modules that a list of modules, classes, or names of either means."""
    modules = {name: one for name, one in model.named_modules() if name and any(True for _ in one.parameters())}
    found: dict[str, Module] = {}
    for wanted in named:
        hits = {name: one for name, one in modules.items() if _is(wanted, name, one)}
        if not hits:
            what = f"{keyword}: {wanted!r} is no name or class of a module with parameters."
            raise UsageError(what, fix=[f"modules: {', '.join(list(modules)[:8])}, ..."])
        found |= hits
    return found


def find_blocks(model: Module, named: Sequence[Any] | None, apart: Collection[str] = ()) -> dict[str, Module]:
    """The modules that are gathered each on its own, inner ones first.

    By repetition; where no block is repeated, single layers that are large enough. A module that shares a parameter
    with another part of the model stays with the rest. So does a MultiheadAttention: it computes in another way (other
    bits) when its inputs are not one object, and FSDP would hand it copies. It calls none of its parts, either.
    """
    places = Counter(id(p) for m in model.modules() for p in m._parameters.values() if p is not None)

    def alone(module: Module) -> bool:
        inside = Counter(id(p) for m in module.modules() for p in m._parameters.values() if p is not None)
        return bool(inside) and all(places[one] == count for one, count in inside.items())

    modules = {name: one for name, one in model.named_modules() if name and name not in apart and alone(one)}
    inside = {
        id(part) for one in model.modules() if isinstance(one, torch.nn.MultiheadAttention) for part in one.modules()
    }
    modules = {name: one for name, one in modules.items() if id(one) not in inside}
    if named is not None:
        found: dict[str, Module] = {}
        for wanted in named:
            hits = blocks_named(model, [wanted], "fsdp's blocks")
            fit = {name: one for name, one in hits.items() if name in modules}
            if not fit:  # of a class, some may stay with the rest
                name, one = next(iter(hits.items()))
                why = "shares a parameter with another part of the model"
                if id(one) in inside:
                    why = "is (in) a MultiheadAttention, which stays in one piece with what is around it"
                elif name in apart:
                    why = "is a model of its own: blocks are parts of one"
                raise UsageError(f"fsdp's blocks: {name} {why}.", fix=["leave it out: it stays with the rest"])
            found |= fit
    else:
        total = sum(p.numel() for p in model.parameters())
        found = blocks_repeated(model, modules)
        if not found:
            kinds = Counter(type(one) for one in modules.values() if not isinstance(one, _CONTAINERS))
            large = {n for n, m in modules.items() if sum(p.numel() for p in m.parameters()) >= _LARGE * total}
            found = {n: m for n, m in modules.items() if kinds[type(m)] > 1 and n in large}
            found = {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}
    found = {n: m for n, m in found.items() if type(m).forward is not Module.forward}
    found |= {n: m for n, m in _of_other_dtype(model, found, modules).items() if n not in found}
    return dict(sorted(found.items(), key=lambda item: -item[0].count(".")))


def _is(wanted: Any, name: str, module: Module) -> bool:
    if isinstance(wanted, str):
        return wanted in (name, type(module).__name__)
    return isinstance(module, wanted) if isinstance(wanted, type) else module is wanted


def _of_other_dtype(model: Module, blocks: Mapping[str, Module], modules: Mapping[str, Module]) -> dict[str, Module]:
    """Modules whose parameters have another dtype than the rest of their block (a BatchNorm in fp32): FSDP wants one
    dtype per block, so they become blocks."""

    def nearest(name: str) -> str:
        return next((b for b in sorted(blocks, key=len, reverse=True) if f"{name}.".startswith(f"{b}.")), "")

    numbers: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for name, parameter in model.named_parameters():
        numbers[nearest(name)][parameter.dtype] += parameter.numel()
    odd = {}
    for name, module in modules.items():
        own = [p for p in module._parameters.values() if p is not None and p.ndim]
        usual = numbers[nearest(name)].most_common(1)
        if own and usual and all(p.dtype != usual[0][0] for p in own):
            odd[name] = module
    return odd
