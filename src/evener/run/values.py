"""What a model starts from: weights of a file, and values for a model without storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evener.checkpoint.weights import load_weights, read_for
from evener.config import Config
from evener.dist.blank import materialise
from evener.engine.engine import Models
from evener.engine.setup import by_name
from evener.errors import ModelError, UsageError


def give_values(
    model: Models, config: Config, device: torch.device, world_size: int
) -> tuple[list[str], Callable[[Any], None] | None]:
    """Lines to show; and under fsdp what gives a blank model its values once it is sharded: no rank holds all of it."""
    models = by_name("model", model)
    modules = {name: one for name, one in models.items() if isinstance(one, torch.nn.Module)}  # others: refused later
    blank = {name: one for name, one in modules.items() if any(t.is_meta for t in (*one.parameters(), *one.buffers()))}
    later = bool(blank) and config.strategy in ("fsdp", "hsdp") and world_size > 1
    if config.weights is None:
        if not later:
            for name, one in blank.items():
                materialise(one, device, config.seed, name)
        return [], None
    if len(models) > 1:
        raise UsageError("weights= is for one model.", fix=["evener.load(dir, g=generator, d=discriminator)"])
    one = next(iter(models.values()))
    saved = one.state_dict() if blank else {}
    adrift = [name for name, buffer in one.named_buffers() if buffer.is_meta and name not in saved] if blank else []
    if adrift:
        what = f"{len(adrift)} buffers of a model built without storage are in no file of weights."
        fix = ["make them in the forward, or register them with persistent=True"]
        raise ModelError(what, evidence=[f"persistent=False: {', '.join(adrift[:8])}"], fix=fix)
    if not later:
        return load_weights(one, config.weights, device=device), None
    whole, notes = read_for(one, config.weights)
    return notes, lambda shards: shards.load_state_dict(whole)
