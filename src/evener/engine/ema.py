"""A running average of the weights, for evaluation and export."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from evener.engine.setup import load_plain, plain_name, plain_state
from evener.engine.shards import Shards


class Ema:
    """average <- decay * average + (1 - decay) * weights after every update that was not skipped; buffers are copied.

    `module` is a copy of the model (or of the ModuleDict of several) that shares nothing with it; `shards` and `twin`
    are the two where parameters are sharded. Ranks hold equal weights, so nothing is communicated; the skip is decided
    on the device, so nothing waits.
    """

    def __init__(
        self, model: torch.nn.Module, decay: float, shards: Shards | None = None, twin: Shards | None = None
    ) -> None:
        self.decay = float(decay)
        self.shards = twin
        self.module = twin.model if twin is not None else copy.deepcopy(model).requires_grad_(False)
        held = twin.named() if twin is not None else dict(self.module.named_parameters())
        mine = {name: p for name, p in held.items() if p.is_floating_point()}
        # Half precision would round an average's small steps away: there it is kept in fp32, beside the module.
        self.wide = {name: p.float() for name, p in mine.items() if p.dtype in (torch.float16, torch.bfloat16)}
        self.average: list[torch.Tensor] = [self.wide.get(name, p) for name, p in mine.items()]
        self.rounded: list[torch.Tensor] = [mine[name] for name in self.wide]
        theirs = shards.named().values() if shards is not None else model.parameters()
        self.weights: list[torch.Tensor] = [p for p in theirs if p.is_floating_point()]
        self.buffers = list(zip(self.module.buffers(), model.buffers()))

    def _of(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if len(parameters) == len(self.weights):
            return self.average, self.weights
        ids = {id(parameter) for parameter in parameters}
        pairs = [(mine, theirs) for mine, theirs in zip(self.average, self.weights) if id(theirs) in ids]
        return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]

    @torch.no_grad()
    def update(self, found: torch.Tensor, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Move the average of the parameters that were just updated.

        `found` (0 or 1, on the device) says that the update was skipped: then nothing moves.
        """
        average, weights = self._of(parameters)
        move = (1.0 - found) * (1.0 - self.decay)
        steps = list(torch._foreach_sub(weights, average))
        # A skipped update has finite weights, so 0 times the difference is 0.
        torch._foreach_mul_(steps, move)
        torch._foreach_add_(average, steps)
        if self.wide:
            torch._foreach_copy_(self.rounded, list(self.wide.values()))
        for mine, theirs in self.buffers:
            mine.copy_(theirs)

    def state_dict(self) -> dict[str, Any]:
        if self.shards is not None:
            whole = self.shards.state_dict()
            return {
                **whole,
                **{name: self.shards.kept(self.shards.shards[name], one) for name, one in self.wide.items()},
            }
        state = {name: self.wide.get(name, tensor) for name, tensor in self.module.state_dict().items()}
        return plain_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.shards is not None:
            self.shards.load_state_dict(state)
        else:
            load_plain(self.module, state)
        for name, average in self.wide.items():
            whole = state[plain_name(name)]
            average.copy_(whole if self.shards is None else self.shards.cut(self.shards.shards[name], whole))
