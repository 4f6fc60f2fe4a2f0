"""Randomness inside an update is derived, not drawn: from (seed, update, slice) or (seed, update, rank, microbatch).

The generators' states are put back after the update, so that a user's own draws between updates are untouched.
"""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch

from evener.dist.mix import mix

_FAST, _EXACT = 1, 2


class Randomness:
    """Torch's default generators of the CPU and of `device`; per slice also Python's `random` and numpy's.

    Those two are drawn from in a forward by few, and cost 20 microseconds: only where bits are promised.
    """

    def __init__(self, seed: int, device: torch.device, *, rank: int, per_slice: bool) -> None:
        self.seed = seed
        # A slice's randomness must not depend on who computes it; a microbatch's must differ between ranks.
        self.stream = (_EXACT, 0) if per_slice else (_FAST, rank)
        self.per_slice = per_slice
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()
            self.generators.append(torch.cuda.default_generators[device.index or 0])
        elif device.type == "mps":
            self.generators.append(torch.mps._get_default_mps_generator())

    def torch_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self.generators]

    def set_torch_states(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self.generators, states):
            generator.set_state(state)

    def save(self) -> Any:
        """What `restore` puts back, after an update."""
        if not self.per_slice:
            return self.torch_states(), None, None
        return self.torch_states(), random.getstate(), numpy.random.get_state()

    def restore(self, saved: Any) -> None:
        states, python, numpys = saved
        self.set_torch_states(states)
        if python is not None:
            random.setstate(python)
            numpy.random.set_state(numpys)

    def begin_piece(self, update: int, number: int) -> None:
        """Seed for slice (or microbatch) `number` of `update`. About 3 microseconds; no host sync."""
        # torch.manual_seed would also visit every other backend, at 100 times the cost.
        value = mix(self.seed, update, *self.stream, number)
        for generator in self.generators:
            generator.manual_seed(value)
        if self.per_slice:
            random.seed(value)
            numpy.random.seed(value & 0xFFFFFFFF)
