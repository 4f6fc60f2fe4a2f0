"""Settings of torch that an engine needs, set while it lives and put back when it is closed."""

from __future__ import annotations

import os
import weakref
from typing import Any, ClassVar

import torch

from evener.errors import UsageError

# Intra-op threads (LayerNorm's and convolution's weight gradients depend on them), deterministic algorithms, those only
# warned about, new memory filled (that costs time), cuDNN's benchmark.
_Settings = tuple[int, bool, bool, bool, bool]
_HELD: _Settings = (1, True, False, False, False)


class Pins:
    """exact: everything that changes bits without changing the mathematics. tf32: matmul precision.

    torch's settings are the process's, not an engine's: the first exact engine saves them and the last restores them.
    """

    pinned: ClassVar[int] = 0
    before: ClassVar[_Settings] = _HELD

    def __init__(self, *, exact: bool, tf32: bool, device: torch.device) -> None:
        self.exact = exact
        self.matmul = torch.get_float32_matmul_precision() if tf32 else None
        if tf32:
            torch.set_float32_matmul_precision("high")
        if not exact:
            return
        if not Pins.pinned:
            if device.type == "cuda" and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
                if torch.cuda.is_initialized():
                    what = "exact=True needs CUBLAS_WORKSPACE_CONFIG set before CUDA starts; CUDA is running already."
                    fix = ["export CUBLAS_WORKSPACE_CONFIG=:4096:8", "or construct Run before the first CUDA tensor"]
                    raise UsageError(what, fix=fix)
                os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
            Pins.before = _now()
        Pins.pinned += 1
        self._unpin = weakref.finalize(self, _unpin)  # a constructor that fails later has nobody who closes
        self._unpin.atexit = False
        self.hold()

    def check(self) -> None:
        """After every exact forward: one on several threads has other bits already."""
        threads, deterministic, *_ = _now()
        if (threads, deterministic) != _HELD[:2]:
            found = f"{threads} threads, deterministic algorithms {'on' if deterministic else 'off'}"
            fix = ["take torch.set_num_threads (or the library that calls it) out of loss_fn", "exact=False"]
            raise UsageError(f"loss_fn changes what exact=True holds: {found} after it.", fix=fix)

    def hold(self) -> None:
        """Before every exact update: a script or a library may have changed what the whole process shares."""
        if _now() != _HELD:
            _set(*_HELD)

    def close(self) -> None:
        if self.matmul is not None:
            torch.set_float32_matmul_precision(self.matmul)
            self.matmul = None
        if self.exact:
            self._unpin()

    def fingerprint(self) -> dict[str, Any]:
        if not self.exact:
            return {"exact": False}
        return {"exact": True, "threads": 1, "deterministic": True, "fused": False, "torch": torch.__version__}


def _unpin() -> None:
    Pins.pinned -= 1
    if not Pins.pinned:
        _set(*Pins.before)


def _module() -> Any:
    return torch.utils.deterministic  # it swaps its class to hold a property, which type checkers cannot see


def _now() -> _Settings:
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill, benchmark = _module().fill_uninitialized_memory, torch.backends.cudnn.benchmark
    return torch.get_num_threads(), deterministic, warn_only, fill, benchmark


def _set(threads: int, deterministic: bool, warn_only: bool, fill: bool, benchmark: bool) -> None:
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    _module().fill_uninitialized_memory = fill
    torch.backends.cudnn.benchmark = benchmark
