"""What the numbers are: master, compute and reduce dtypes, decided once, checked against the device, and said."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from typing import Any

import torch

from evener import batch as batches
from evener import config_checks as checks
from evener.errors import PrecisionError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
_WORDS = {dtype: word for word, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Precision:
    """A decided precision.

    name: the effective precision, one of fp32 tf32 bf16 fp16 bf16-true fp16-true.
    compute: autocast's dtype, or None for no autocast.
    param: the dtype parameters are cast to, or None to leave them as they are.
    reduce: the dtype gradients are summed over ranks in, or None for the gradient's own.
    output: the dtype floating outputs of the model are cast to, or None.
    scaler: whether the loss is scaled (fp16's exponent range is small).
    because: why, one line; said in the contract.
    by_part: given as {"param", "reduce", "output"}: fsdp then gathers parameters in the compute dtype.
    """

    name: str
    requested: str
    compute: torch.dtype | None = None
    param: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None
    scaler: bool = False
    because: str = ""
    by_part: bool = False

    def words(self, master: torch.dtype) -> dict[str, Any]:
        """For the contract line: master, compute and reduce dtypes in words, and whether the loss is scaled."""
        master = self.param or master
        return {
            "name": self.name,
            "master": word(master),
            "compute": word(self.compute or master),
            "reduce": word(self.reduce or master),
            "scaler": self.scaler,
        }


_PLAIN = {
    "fp32": Precision("fp32", "fp32"),
    "tf32": Precision("tf32", "tf32", because="float32 storage, matmuls rounded to TF32 where the hardware has it"),
    "bf16": Precision("bf16", "bf16", compute=torch.bfloat16),
    "fp16": Precision("fp16", "fp16", compute=torch.float16, scaler=True),
    "bf16-true": Precision("bf16-true", "bf16-true", param=torch.bfloat16, because="no fp32 master weights"),
    "fp16-true": Precision(
        "fp16-true", "fp16-true", None, torch.float16, scaler=True,
        because="no fp32 master weights: small updates vanish",
    ),
}  # fmt: skip
# NVIDIA Apex's opt levels in today's words (its amp is retired).
_APEX = {
    "O0": ("fp32", "O0 is plain fp32"),
    "O1": ("fp16", "O1 is fp16 autocast with dynamic loss scaling"),
    "O2": (
        "fp16",
        "O2's fp32 master weights are your parameters themselves: they stay fp32, autocast casts per operation and "
        "BatchNorm stays fp32",
    ),
    "O3": (
        "fp16-true",
        "O3 has no master weights: an update smaller than 1/2048 of a weight is lost; prefer O1 or bf16",
    ),
}


def word(dtype: torch.dtype) -> str:
    return _WORDS.get(dtype, str(dtype).removeprefix("torch."))


def bf16_is_native(device: torch.device) -> bool:
    """Whether bf16 matmuls run in hardware. Elsewhere torch emulates them, several times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0) if torch.version.hip is None else True
    if device.type == "cpu" and platform.machine() in ("x86_64", "AMD64"):
        return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
    return False


def decide(spec: object, device: torch.device) -> Precision:
    """The precision for what was asked, on this device.

    `auto` takes what is fast and supported here: native bf16 on GPUs that have it, fp16 with a scaler on older ones,
    fp32 on CPUs without native bf16 (autocast is about 6 times slower there) and on MPS."""
    name = checks.precision("precision", spec)
    if isinstance(name, dict):
        reduce, output = (DTYPES.get(name.get(part, "")) for part in ("reduce", "output"))
        base = decide(name.get("param", "fp32"), device)
        return replace(base, requested=repr(name), reduce=reduce, output=output, because="as given", by_part=True)
    if name == "auto":
        return _auto(device)
    if name in _APEX:
        plain, because = _APEX[name]
        return replace(decide(plain, device), requested=name, because=because)
    if name in ("bf16", "bf16-true"):
        _check_bf16(name, device)
    if name == "fp16" and device.type == "mps":
        raise PrecisionError('precision="fp16" has no gradient scaler on MPS.', fix=['precision="fp32"'])
    return _PLAIN[name]


def _check_bf16(name: str, device: torch.device) -> None:
    # On a CPU emulation is slow but gives what was asked for; a GPU without bf16 lacks some kernels altogether.
    if device.type == "cuda" and not bf16_is_native(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise PrecisionError(
            f'precision="{name}": {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) has no '
            "native bf16; it starts with 8.0 (Ampere).",
            fix=['precision="fp16" (with a loss scaler, which evener owns)', 'or precision="auto"'],
        )
    if device.type == "mps":
        raise PrecisionError(f'precision="{name}" is not supported on MPS.', fix=['precision="fp32"'])


def _auto(device: torch.device) -> Precision:
    kind = {"cuda": "GPU", "cpu": "CPU"}.get(device.type, device.type.upper())
    if device.type in ("cuda", "cpu") and bf16_is_native(device):
        return replace(_PLAIN["bf16"], requested="auto", because=f"auto: this {kind} has native bf16")
    plain = _PLAIN["fp16" if device.type == "cuda" else "fp32"]
    return replace(plain, requested="auto", because=f"auto: no native bf16 on this {kind}")


def refuse_autocast(device: torch.device) -> None:
    """An autocast around the loop would compute in another precision than the contract line says."""
    if torch.is_autocast_enabled(device.type):
        dtype = word(torch.get_autocast_dtype(device.type))
        what = f"torch.autocast ({dtype}) is on around the loop; precision= decides what is computed in which dtype."
        fix = [f'remove it and say precision="{dtype}"', "or put it inside loss_fn, around what needs it"]
        raise PrecisionError(what, fix=fix)


def cast_parameters(model: torch.nn.Module, dtype: torch.dtype) -> list[str]:
    """Cast fp32 parameters and buffers to `dtype` in place; returns the names kept in fp32.

    Kept: BatchNorm (its running statistics need the range), and what the model names in `_keep_in_fp32_modules`
    (Hugging Face's word for it). Parameter objects stay the same, so the optimizer keeps holding them.
    """
    keep = tuple(getattr(model, "_keep_in_fp32_modules", None) or ())
    kept: list[str] = []
    for path, module in model.named_modules():
        names = path.split(".")
        is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if is_norm or any(word in names for word in keep):
            kept += [f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == torch.float32:
                module._buffers[name] = buffer.to(dtype)
    return kept


def cast_hooks(model: torch.nn.Module, precision: Precision) -> list[Any]:
    """Handles of hooks: float32 inputs follow parameters of another dtype, and floating outputs are cast as asked."""

    def cast_input(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        def follow(leaf: torch.Tensor) -> torch.Tensor:
            return leaf.to(precision.param) if leaf.dtype == torch.float32 else leaf

        return batches.apply(args, follow), batches.apply(kwargs, follow)

    def cast_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
        return batches.apply(output, lambda leaf: leaf.to(precision.output) if leaf.is_floating_point() else leaf)

    hooks: list[Any] = []
    if precision.param is not None:
        hooks.append(model.register_forward_pre_hook(cast_input, with_kwargs=True))
    if precision.output is not None:
        hooks.append(model.register_forward_hook(cast_output))
    return hooks
