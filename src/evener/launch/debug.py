"""`evener run --debug`: what is switched on to find a fault, and what it costs.

    CUDA_LAUNCH_BLOCKING=1           the line of the traceback is the line that failed (kernels are not asynchronous)
    TORCH_DISTRIBUTED_DEBUG=DETAIL   every collective is compared between ranks before it is made (DDP: see the shim)
    NCCL_DEBUG=INFO                  into one file per process in the log folder
    TORCH_FR_BUFFER_SIZE=2000        the flight recorder keeps the last collectives, and dumps them at a time-out
    PYTHONFAULTHANDLER=1             a crash in data workers leaves a Python stack too (ranks always have it)
    anomaly detection                the shim switches it on: the backward names the forward line of the first NaN

A variable that the user has set stays as it is.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# Measured on a CPU (docs/measurements.md); a GPU also loses the overlap of kernels, copies and Python.
SLOWER = "2 to 5 times slower on a CPU, on a GPU not measured"


def environment(logs: str) -> dict[str, str]:
    return {
        "CUDA_LAUNCH_BLOCKING": "1",
        "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_FILE": os.path.join(logs, "nccl.%h.%p.log"),
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": os.path.join(logs, "flight_recorder_"),
        "PYTHONFAULTHANDLER": "1",
    }


def note(environ: Mapping[str, str], *, cpu: bool) -> str:
    """One line for the user: what is on, what stays theirs, what it costs."""
    kept = sorted(name for name in environment("") if name in environ)
    yours = f"; yours stay: {', '.join(kept)}" if kept else ""
    what = "NaN traced to its forward line, collectives compared"
    return f"debug: {what}{'' if cpu else ', kernels waited for, NCCL log kept'}{yours}; {SLOWER}"
