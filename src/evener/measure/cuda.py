"""What CUDA would do with a step that is traced on the CPU: autocast's lists, dropout's mask, the attention kernel.

Fake CUDA tensors abort without a GPU, so the step runs on fake CPU tensors, and for the time of a trace the few places
where the CPU's composite operators go another way than CUDA's are overridden at the dispatcher. Autocast's lists are
read from the header of the torch that is installed (ATen/autocast_mode.h), not copied: they change with releases.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.measure.private import exchanged

_HALVES = (torch.float16, torch.bfloat16)
Capability = tuple[int, int]


@contextlib.contextmanager
def cuda_rules(capability: Capability, notes: list[str]) -> Iterator[None]:
    """CUDA's behaviour for CPU tensors, and `torch.autocast("cuda")` in the user's code. `notes` collects what was
    decided, `untraced:`-prefixed what could not be."""
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"[\s\S]*Overriding a previously registered kernel")
            _autocast(library, notes)
            library.impl("dropout", _dropout, "AutogradCPU")
            attention = _Attention(capability, notes)
            for key in ("AutogradCPU", "CPU"):
                library.impl("scaled_dot_product_attention", attention, key)
        init = torch.autocast.__init__

        def as_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
            init(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

        with exchanged(torch.autocast, "__init__", as_cpu):
            yield
    finally:
        library._destroy()


# ------------------------------------------------------------------------------------------------ autocast


def lists() -> dict[str, list[str]]:
    """{list: operators with overload} of the header: LOWER_PRECISION_FP, FP32, FP32_SET_OPT_DTYPE, PROMOTE.

    Raises:
        OSError, ValueError: there is no header, or not these lists in it.
    """
    path = os.path.join(os.path.dirname(torch.__file__), "include", "ATen", "autocast_mode.h")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    found = {}
    for name in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"#define AT_FORALL_{name}\(_\)((?:.*\\\n)*.*)", text)
        if body is None:
            raise ValueError(f"AT_FORALL_{name} is not in {path}")
        found[name] = [
            "aten::" + ".".join(one.replace(" ", "").split(",")) for one in re.findall(r"_\(([\w, ]+)\)", body[1])
        ]
    return found


def _autocast(library: Any, notes: list[str]) -> None:
    try:
        tables = lists()
    except (OSError, ValueError) as error:
        notes.append(
            f"untraced: CUDA's autocast lists ({error}): the CPU's were used, which keep more in half precision"
        )
        return
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = set(torch._C._dispatch_get_all_op_names())
    half = set(tables["LOWER_PRECISION_FP"])
    policies = {
        **dict.fromkeys(tables["PROMOTE"], _widest),
        **dict.fromkeys(tables["FP32"], _to_fp32),
        **{name: _to_half for name in half if name in known and not has(name, "AutocastCPU")},
    }
    for name in sorted(known):
        if not name.startswith("aten::"):
            continue
        if name in tables["FP32_SET_OPT_DTYPE"]:
            library.impl(name.removeprefix("aten::"), _with_dtype(_overload(name)), "AutocastCPU")
        elif name in policies:
            library.impl(name.removeprefix("aten::"), _cast(_overload(name), policies[name]), "AutocastCPU")
        elif has(name, "AutocastCPU") and name not in half:
            library.impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU")


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _off() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for one in values:
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.dtype != torch.float64:
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _to_fp32(values: Any) -> torch.dtype:
    return torch.float32


def _to_half(values: Any) -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def _widest(values: Any) -> torch.dtype:
    dtypes = {one.dtype for one in _tensors(values)}
    return torch.float32 if torch.float32 in dtypes or not dtypes else torch.get_autocast_dtype("cpu")


def _cast(op: Any, policy: Callable[[Any], torch.dtype]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = policy(args)

        def cast(one: Any) -> Any:
            if isinstance(one, torch.Tensor):
                return one.to(dtype) if one.is_floating_point() and one.dtype != torch.float64 else one
            return type(one)(cast(x) for x in one) if isinstance(one, list | tuple) else one

        with _off():
            return op(*map(cast, args), **{key: cast(value) for key, value in kwargs.items()})

    return run


def _with_dtype(op: Any) -> Callable[..., Any]:
    """Softmax and sums take their result's dtype as an argument: no copy in fp32 before them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("dtype") or any(isinstance(one, torch.dtype) for one in args)
        with _off():
            if not given and args[0].dtype in _HALVES:
                kwargs["dtype"] = torch.float32
            return op(*args, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------ kernels


def _dropout(x: torch.Tensor, p: float, train: bool) -> Any:
    """CUDA keeps one byte per element; the CPU's way keeps a mask of the input's dtype."""
    if not train or p == 0.0 or not x.numel():
        return torch.ops.aten.alias(x)
    if p == 1.0:
        return x * torch.zeros((), dtype=x.dtype)
    return torch.ops.aten.native_dropout(x, p, True)[0]


class _Attention:
    """scaled_dot_product_attention, by the kernel that CUDA would take for it.

    Order and conditions as torch documents and warns about them (torch.nn.attention.SDPBackend): flash, then
    memory-efficient, then math. cuDNN's kernel, which Hopper may prefer, keeps what flash keeps.
    """

    def __init__(self, capability: Capability, notes: list[str]) -> None:
        self.capability, self.notes = capability, notes

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        name, why = self.choose(q, k, v, attn_mask, enable_gqa)
        note = f"attention: {name}" + (f" ({why})" if why else "")
        if note not in self.notes:
            self.notes.append(note)
        aten = torch.ops.aten
        if name == "flash":
            width = q.shape[-1]
            scale = scale if scale is not None else width**-0.5
            if width % 8:  # the kernel reads whole groups of 8
                q, k, v = (torch.nn.functional.pad(one, (0, 8 - width % 8)) for one in (q, k, v))
            out = aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, False, scale=scale)[0]
            return out[..., :width] if out.shape[-1] != width else out
        if name == "memory-efficient":
            if attn_mask is not None and attn_mask.dtype == torch.bool:
                attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
            bias = None if attn_mask is None else attn_mask.expand(*q.shape[:-1], k.shape[-2])
            grads = any(one.requires_grad for one in (q, k, v)) and torch.is_grad_enabled()
            efficient = aten._scaled_dot_product_efficient_attention
            return efficient(q, k, v, bias, grads, dropout_p, is_causal, scale=scale)[0]
        math = functools.partial(aten._scaled_dot_product_attention_math, scale=scale, enable_gqa=enable_gqa)
        return math(q, k, v, attn_mask, dropout_p, is_causal, None)[0]

    def choose(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, gqa: bool
    ) -> tuple[str, str]:
        """(kernel, why not a better one)."""
        on = torch.backends.cuda
        half = q.dtype in _HALVES
        if q.ndim != 4:
            return "math", f"{q.ndim} dimensions"
        old, width = self.capability < (8, 0), q.shape[-1]
        flash = {
            "a mask": mask is not None,
            str(q.dtype)[6:]: not half,
            f"compute capability {self.capability[0]}.{self.capability[1]}": old,
            f"heads of {width}": width > 256 or v.shape[-1] != width,
            "switched off": not on.flash_sdp_enabled(),
        }
        efficient = {
            "grouped queries": gqa and q.shape[-3] != k.shape[-3],
            "bfloat16 before 8.0": q.dtype == torch.bfloat16 and old,
            "float64": q.dtype == torch.float64,
            "switched off": not on.mem_efficient_sdp_enabled(),
        }
        no_flash, no_efficient = ([why for why, so in reasons.items() if so] for reasons in (flash, efficient))
        if not no_flash:
            return "flash", ""
        if not no_efficient:
            return "memory-efficient", f"no flash: {', '.join(no_flash)}"
        return "math", f"no flash: {', '.join(no_flash)}; not memory-efficient: {', '.join(no_efficient)}"
