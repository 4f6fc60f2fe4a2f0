"""The floating-point operations of what runs, by torch's formulas: matrix products, convolutions, attention."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"  # torch's table of formulas has it for GPUs only


def flops_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """Of one operation; 0 where torch has no formula: element by element, or a kernel that torch does not know."""
    formula, name = flop_registry.get(func.overloadpacket), func.overloadpacket.__name__
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=result))
    if name == _CPU_ATTENTION:
        return int(sdpa_flop_count(*(one.shape for one in args[:3])))
    if name == f"{_CPU_ATTENTION}_backward":
        return int(sdpa_backward_flop_count(*(one.shape for one in args[:4])))
    return 0


class FlopCounter(TorchDispatchMode):
    """Counts what runs inside of it on this process.

    Results may differ in the last bits: torch takes other formulas for some derivatives (`prod`) under such a mode.

    Attributes:
        total: Without what activation checkpointing computes a second time: that is `again`.
        why: What could not be counted; empty otherwise.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = self.again = 0
        self.why = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, torch._ops.HigherOrderOperator):
            self.why = f"{func.name()} has no formula"
            return NotImplemented
        if not set(types) <= {torch.Tensor, torch.nn.Parameter}:  # DTensor: its operations on local tensors come next
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        # In a backward only what is recomputed is recorded anew.
        recomputed = torch._C._current_graph_task_id() >= 0 and torch.is_grad_enabled()
        count = flops_of(func, args, kwargs or {}, result)
        self.again, self.total = self.again + count * recomputed, self.total + count * (not recomputed)
        return result


def uncountable(exact: bool) -> str:
    """Why no operation may be counted in this process; empty where they may.

    Compiled code runs uncompiled under a counter: other kernels, other last bits.
    """
    if exact:
        return "exact=True: torch differentiates some operations otherwise, in the last bits, while they are counted"
    dynamo = sys.modules.get("torch._dynamo.utils")
    compiled = dynamo is not None and dynamo.counters["frames"]["total"] > 0
    return "torch.compile: what was compiled cannot be counted" if compiled else ""
