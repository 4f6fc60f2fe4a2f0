"""Ranks that hold copies of one model must hold the same: silent divergence is noticed, and its first tensor named.

Data-parallel ranks all-reduce gradients, never parameters. Whatever changes a model, an optimizer or a learning rate on
one rank alone is seen by nobody and trains another model there, for ever.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from evener.dist import comm, here
from evener.engine.setup import plain_state
from evener.errors import CollectiveError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_divergence(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Compare parameters, optimizer states and learning rates of all ranks. Collective.

    One pass over the memory and one all-gather of 8 bytes per tensor; the host waits for it. Buffers are left out: they
    are made equal where it matters. For ranks that hold whole copies.

    Raises:
        CollectiveError: on all ranks; the first tensor that differs, and the ranks that hold another value than most.
    """
    named = plain_state(dict(model.named_parameters()))
    if here().world_size == 1 or any(hasattr(one, "placements") for one in named.values()):
        return  # one rank, or each has a shard of its own
    tensors: dict[str, torch.Tensor] = dict(named)
    numbers: dict[str, float] = {}
    for which, optimizer in enumerate(optimizers):
        prefix = f"optimizer {which}: " if which else "optimizer: "
        for i, group in enumerate(optimizer.param_groups):
            numbers[f"{prefix}lr of group {i}"] = float(group["lr"])
        for name, parameter in named.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{prefix}{key} of {name}"] = value
    names = [*numbers, *tensors]
    device = next(iter(named.values())).device
    sums = [torch.tensor(list(numbers.values()), dtype=torch.float64).view(torch.int64).to(device)]
    sums += [_sum_of_bits(tensor).to(device).reshape(1) for tensor in tensors.values()]
    lists = [part.tolist() for part in comm.all_gather(torch.cat(sums))]
    if all(one == lists[0] for one in lists):
        return
    every = [(name, values) for name, values in zip(names, zip(*lists)) if len(set(values)) > 1]
    name, values = every[0]
    most = Counter(values).most_common(1)[0]
    others = [rank for rank, value in enumerate(values) if value != most[0]]
    alone = most[1] > len(others)
    who = f"rank {', '.join(map(str, others))} holds another value than the rest" if alone else "no two halves agree"
    evidence = [who, f"{len(every)} of {len(names)} tensors and learning rates differ"]
    fix = [
        "look for code that changes parameters, lr or optimizer state under a rank test, or from unseeded draws",
        "no checkpoint was written of this state; the one before may hold it too",
    ]
    raise CollectiveError(f"the ranks train different models: {name} differs.", evidence=evidence, fix=fix)


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements' bit patterns as int64, wrapping: equal for equal tensors, NaNs included."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(_WHOLE[flat.element_size()]).sum(dtype=torch.int64)
