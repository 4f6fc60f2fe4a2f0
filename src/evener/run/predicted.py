"""At the end of a planned run: the peak and the time that were predicted against those that came."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from typing import Any

import torch

from evener.gpus.look import size
from evener.plan.make import remember
from evener.plan.search import duration

_ENOUGH = 10  # updates; of fewer, the first one's warm-up is most


def compare(
    predicted: Mapping[str, Any], device: torch.device, updates: int, seconds: float
) -> tuple[str, dict[str, Any]]:
    """(a line, the fields of the event). On CUDA what torch allocated on this rank; on the CPU the whole process.

    `seconds`: of so many updates, with waiting for rows, without the loop's body; the host's clock (untested on CUDA).
    Another device than the plan's is not compared: then the line says so and the real bytes are null.
    """
    expected = predicted["peak_allocated_bytes" if device.type == "cuda" else "device_total_bytes"]
    if device.type != predicted["device"]:
        other = f"memory was planned for {predicted['kind']}, and this is {device.type}"
        return other, {"predicted_bytes": expected, "real_bytes": None}
    if device.type == "cuda":
        real = torch.cuda.max_memory_allocated(device)
    else:
        real = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    took, expected_seconds = seconds / updates if updates >= _ENOUGH else None, predicted.get("seconds_per_update")
    fields = {"predicted_bytes": expected, "real_bytes": real}
    fields |= {"predicted_seconds": expected_seconds, "real_seconds": took}
    remember({"kind": predicted["kind"], **fields})
    line = f"peak memory {size(real)}, predicted {size(expected)} ({real / expected - 1:+.1%})"
    if took and expected_seconds:
        off = f"predicted {duration(expected_seconds)} ({took / expected_seconds - 1:+.0%})"
        line += f"; an update took {duration(took)}, {off}"
    return line, fields
