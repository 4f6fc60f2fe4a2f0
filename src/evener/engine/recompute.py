"""Activation checkpointing: what the backward needs is computed again instead of kept. Gradients stay equal to the bit.

A block keeps its identity and names; only its class is exchanged while an engine lives. Recomputation is the
non-reentrant one of torch, under the random state of its forward; buffers that it advances again are put back by the
step. Under fsdp the block's parameters are gathered once for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.nn import Module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from evener.engine.batchnorm import Exchanged, Undo, exchange
from evener.engine.blocks import blocks_named, blocks_repeated
from evener.errors import UsageError

MODES = ("none", "full", "selective", "every:2", "segments:4", "auto")
LATER = "recompute when memory runs out"

# Kept by "selective": what costs far more to compute than to keep. Everything else is computed again.
_KEPT = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


class _Recomputed(Module):
    plain: ClassVar[type]
    contexts: ClassVar[Any]  # a function without arguments, or None
    segments: ClassVar[int]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Exchanged.blank, (self.plain,), self.__dict__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = super().forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        if not self.segments:
            return self._again(forward, *args, **kwargs)
        (value,) = args
        layers = list(self.children())
        for i in range(self.segments):
            part = layers[i * len(layers) // self.segments : (i + 1) * len(layers) // self.segments]
            run = functools.partial(_in_turn, part)
            # The last one's backward comes first: it would be computed again at once.
            value = self._again(run, value) if i < self.segments - 1 else run(value)
        return value

    def _again(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        how: dict[str, Any] = {"context_fn": self.contexts} if self.contexts is not None else {}
        return checkpoint(forward, *args, use_reentrant=False, **how, **kwargs)


def _in_turn(layers: Sequence[Module], value: Any) -> Any:
    for layer in layers:
        value = layer(value)
    return value


def recompute(model: Module, what: Any) -> tuple[list[Any], str]:
    """Returns handles that undo it, and what was done in words ("" for nothing).

    Args:
        what: None or "none"; "full" (every repeated block), "selective" (the same, matrix products and attention kept),
            "every:k" (every k-th block), "segments:n" (the largest Sequential in n parts), "auto" (nothing yet), or a
            list of modules, classes, or names of either."""
    if what is None or what == "none":
        return [], ""
    if what == "auto":
        return [], LATER
    if not isinstance(what, str):
        named = list(what) if isinstance(what, list | tuple | set) else [what]
        found = blocks_named(model, named, "activation_checkpointing")
        found = {n: m for n, m in found.items() if not any(n.startswith(f"{other}.") for other in found)}
        return _exchange(found.values()), f"recompute {len(found)} named modules"
    word, _, number = what.partition(":")
    if word not in ("full", "selective", "every", "segments") or (word in ("every", "segments")) != (
        number.isdecimal() and int(number) > 0
    ):
        fix = [f"activation_checkpointing is one of: {', '.join(MODES)}, or a list of modules or classes"]
        raise UsageError(f"activation_checkpointing={what!r} is not known.", fix=fix)
    if word == "segments":
        return _segments(model, int(number)), f"recompute in {number} segments"
    own: Any = model
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if word == "full" and callable(enable):  # Hugging Face's models know their own blocks
        if getattr(model, "is_gradient_checkpointing", False):  # the script's own doing stays
            return [], "recompute full (the model's own)"
        try:
            enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        except ValueError as error:  # a model that does not support it has the method too
            raise UsageError(
                f'activation_checkpointing="full": {type(model).__name__} refuses: {str(error).splitlines()[0]}',
                fix=['name modules or classes: activation_checkpointing=["encoder.layer.0"]', 'or "every:1"'],
            ) from None
        return [Undo(own.gradient_checkpointing_disable)], "recompute full (the model's own)"
    found = blocks_repeated(model)
    if not found:
        raise UsageError(
            f"activation_checkpointing={what!r}: the model has no block that occurs at least twice.",
            fix=['name modules or classes: activation_checkpointing=["encoder.layer1"]', 'or "segments:n"'],
        )
    blocks = list(found.values())[:: int(number or 1)]
    return _exchange(blocks, contexts=_selective if word == "selective" else None), f"recompute {what}"


def _segments(model: Module, number: int) -> list[Any]:
    sequential = torch.nn.Sequential
    chains = [m for m in model.modules() if isinstance(m, sequential) and type(m).forward is sequential.forward]
    longest = max(chains, key=len, default=None)
    if longest is None or len(longest) < number:
        has = f"the longest Sequential has {len(longest)} layers" if longest is not None else "there is no Sequential"
        what = f'activation_checkpointing="segments:{number}": {has}.'
        raise UsageError(what, fix=["a smaller number", 'or "full", or a list of modules'])
    return _exchange([longest], segments=number)


def _exchange(blocks: Any, *, contexts: Callable[[], Any] | None = None, segments: int = 0) -> list[Any]:
    members = {"contexts": staticmethod(contexts) if contexts else None, "segments": segments}
    return exchange(blocks, _Recomputed, members)


def _selective() -> Any:
    kept = {getattr(torch.ops.aten, name) for name in _KEPT if hasattr(torch.ops.aten, name)}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        keep = getattr(operation, "overloadpacket", None) in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
