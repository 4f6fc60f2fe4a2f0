"""What goes wrong without an error, watched during ordinary runs; each is said once.

Gradients that reach nothing, many skipped updates and falling loss scales are the engine's to see. Here: a CPU where a
GPU was meant, tensors that stay on another device than their model, memory that grows with every update.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator

import torch

_SAMPLES, _SETTLING = 15, 3
_LEAST_BYTES, _LEAST_SHARE = 64 << 20, 0.1


def cpu_beside_gpus(device: torch.device, asked: bool) -> str | None:
    """Why this run is on the CPU of a machine with NVIDIA GPUs, when nobody asked for it."""
    cards = glob.glob("/dev/nvidia[0-9]*")
    if device.type != "cpu" or asked or not cards or os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        why = f"this torch ({torch.__version__}) was built without CUDA"
    else:
        why = "torch cannot use its driver"
    return f"on the CPU, beside {len(cards)} NVIDIA GPU{'s' * (len(cards) != 1)}: {why}. `evener doctor` says more"


def strays(model: torch.nn.Module, device: torch.device) -> Iterator[str]:
    """Tensors kept in plain attributes of modules, on another device than the model's."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and not value.is_meta and value.device.type != device.type:
                where = f"{path}.{name}".lstrip(".")
                fix = f"register_buffer({name!r}, ...)"
                yield f"{where} is a tensor on {value.device} that does not move with its model: {fix}"


class Growth:
    """Memory in use, sampled about once a second: says so once when it only ever grows."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int]] = []  # update, bytes
        self.skip = _SETTLING
        self.said = False

    def add(self, update: int, used_bytes: int) -> str | None:
        """A line to show, or None."""
        if self.said or self.skip > 0:
            self.skip -= 1
            return None
        if self.samples and used_bytes < self.samples[-1][1]:
            self.samples.clear()  # something was given back
        self.samples.append((update, used_bytes))
        if len(self.samples) < _SAMPLES:
            return None
        (first, low), (last, high), half = self.samples[0], self.samples[-1], self.samples[_SAMPLES // 2][1]
        grown = high - low
        del self.samples[0]
        if grown < max(_LEAST_BYTES, _LEAST_SHARE * low) or high - half < grown / 3 or last == first:
            return None
        self.said, updates = True, last - first
        much = f"{grown / 2**20:,.0f} MiB in {updates:,} updates, {grown / updates / 2**10:,.0f} KiB each"
        keeps = "a list that keeps losses or outputs keeps their graphs, loss.item() or tensor.detach() do not"
        return f"memory in use grows with every update: {much}. Unless rows are being cached: {keeps}"
