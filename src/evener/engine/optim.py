"""What an optimizer can do, found out once: skip on the device, or one scalar read per update."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evener.errors import OptimizerError, refuse_prepared

# These have fused kernels that take `found_inf`: a skipped update is skipped on the device, nothing waits for the host.
_FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


def prepare(optimizer: torch.optim.Optimizer, *, exact: bool) -> bool:
    """Whether this optimizer skips on the device. Turns fused kernels on where the user left the choice to torch, and
    off in exact mode (fused Adam gives other bits on shards than on whole tensors)."""
    needed = [
        name
        # of the class: a schedule replaces the instance's step by a wrapper
        for name, parameter in inspect.signature(type(optimizer).step).parameters.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed or isinstance(optimizer, torch.optim.LBFGS):
        what = f"{type(optimizer).__name__}.step needs a closure: it evaluates the loss several times per update."
        raise OptimizerError(what, fix=["use an optimizer that takes one gradient (SGD, Adam, AdamW, ...)"])
    if type(optimizer) not in _FUSED:
        return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    if exact:
        for group in optimizer.param_groups:
            group["fused"] = False
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return False
    groups = optimizer.param_groups
    if all(group.get("fused") for group in groups):
        return True
    decided = any(
        one.get("fused") is not None or one.get("foreach") is not None or one.get("differentiable") for one in groups
    )
    if decided or not _kernels_here(type(optimizer), [p for group in groups for p in group["params"]]):
        return False
    for group in groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    # What the constructor does for fused=True.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = True  # type: ignore[attr-defined]
    for parameter, state in optimizer.state.items():
        step = state.get("step")
        if isinstance(step, torch.Tensor):  # fused kernels keep the step count on the device
            state["step"] = step.to(parameter.device, torch.float32)
    return True


def _kernels_here(kind: type[torch.optim.Optimizer], parameters: Sequence[torch.Tensor]) -> bool:
    """Try: one update of one element, on the same device and dtype, with a set flag, must change nothing."""
    for device, dtype in {(parameter.device, parameter.dtype) for parameter in parameters}:
        if not dtype.is_floating_point:
            return False
        try:
            probe = torch.nn.Parameter(torch.ones(1, device=device, dtype=dtype))
            probe.grad = torch.ones_like(probe)
            optimizer: Any = kind([probe], lr=1.0, fused=True)  # type: ignore[call-arg]
            optimizer.found_inf = torch.ones((), device=device)
            optimizer.grad_scale = None
            optimizer.step()
        except (RuntimeError, TypeError, ValueError):
            return False
        if device.type == "cpu" and probe.item() != 1.0:
            return False
    return True


def check_parameters(
    named: Mapping[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> list[torch.nn.Parameter]:
    """The parameters that both train and are in the optimizer, in the model's order; `named`: the model's."""
    refuse_prepared("optimizer", optimizer, "prepared.optimizer", OptimizerError)
    if not isinstance(optimizer, torch.optim.Optimizer):
        what = f"the optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer."
        raise OptimizerError(what, fix=["optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)"])
    known = {id(parameter) for parameter in named.values()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    foreign = [parameter for parameter in held if id(parameter) not in known]
    if foreign:
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in foreign[:4])
        what = f"{len(foreign)} of the optimizer's {len(held)} parameters do not belong to the model."
        fix = [
            "make the optimizer from the model that you pass, after any surgery on it",
            "put a trainable loss or a second network into one module: torch.nn.ModuleDict",
        ]
        raise OptimizerError(what, evidence=[f"shapes: {shapes}{', ...' if len(foreign) > 4 else ''}"], fix=fix)
    inside = {id(parameter) for parameter in held}
    training = [p for p in named.values() if p.requires_grad and id(p) in inside]
    if not training:
        what = "none of the optimizer's parameters trains: all have requires_grad=False."
        raise OptimizerError(what, fix=["set requires_grad=True on what should train"])
    return training


def check_rowwise(optimizer: torch.optim.Optimizer) -> None:
    """Try: a few updates of a small tensor, whole and as two halves of its rows, must come to the same."""
    for group in optimizer.param_groups:
        dims = max((p.ndim for p in group["params"]), default=0)
        if not dims:
            continue
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(4, *[3] * (dims - 1), generator=generator, dtype=torch.float64)
        gradients = [torch.randn(start.shape, generator=generator, dtype=torch.float64) for _ in range(3)]
        try:
            (whole,) = _try(optimizer, group, [start], [[gradient] for gradient in gradients])
            halves = _try(optimizer, group, list(start.split(2)), [list(g.split(2)) for g in gradients])
            same, why = torch.allclose(whole, torch.cat(halves), rtol=1e-9, atol=1e-12), "the two differ"
        except Exception as error:
            same, why = False, f"{type(error).__name__}: {error}"
        if not same:
            what = f"{type(optimizer).__name__} looks at whole tensors; under fsdp it would see the rows of one rank."
            fix = ["an element-wise optimizer (AdamW, SGD, ...)", 'or strategy="ddp"']
            raise OptimizerError(what, evidence=[f"tried on a small tensor, whole and as two halves: {why}"], fix=fix)


def _try(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    start: Sequence[torch.Tensor],
    gradients: Sequence[list[torch.Tensor]],
) -> list[torch.Tensor]:
    probe = object.__new__(type(optimizer))  # with every attribute that a subclass keeps, unlike copy.copy
    vars(probe).update(vars(optimizer))
    vars(probe).pop("step", None)  # a schedule's wrapper, which counts steps
    probe._optimizer_step_pre_hooks = OrderedDict()
    probe._optimizer_step_post_hooks = OrderedDict()
    parameters = [torch.nn.Parameter(one.clone()) for one in start]
    settings = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
    probe.param_groups = [{**settings, "params": parameters, "fused": None, "capturable": False}]
    probe.state = defaultdict(dict)
    for step in gradients:
        for parameter, gradient in zip(parameters, step):
            parameter.grad = gradient.clone()
        probe.step()
    return [parameter.detach() for parameter in parameters]
