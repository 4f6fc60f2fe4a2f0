"""Settings of torch that an engine needs, set while it lives and put back when it is closed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from evener.errors import UsageError


class Pins:
    """exact: everything that changes bits without changing the mathematics. tf32: matmul precision.

    torch's settings are the process's, not an engine's: the first exact engine saves them and the last restores them.
    """

    pinned: ClassVar[list[Pins]] = []
    restore: ClassVar[list[Callable[[], None]]] = []

    def __init__(self, *, exact: bool, tf32: bool, device: torch.device) -> None:
        self.exact = exact
        self.undo: list[Any] = []
        if tf32:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            self.undo.append(lambda: torch.set_float32_matmul_precision(before))
        if exact:
            if not Pins.pinned:
                self._pin(device)
            Pins.pinned.append(self)
            self.undo.append(self._unpin)

    def _pin(self, device: torch.device) -> None:
        # LayerNorm and convolution weight gradients depend on the number of threads.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        deterministic = torch.are_deterministic_algorithms_enabled()
        warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        # The module swaps its class to hold this property, which type checkers cannot see.
        deterministic_module: Any = torch.utils.deterministic
        fill = deterministic_module.fill_uninitialized_memory
        benchmark = torch.backends.cudnn.benchmark
        if device.type == "cuda" and not os.environ.get("CUBLAS_WORKSPACE_CONFIG"):
            if torch.cuda.is_initialized():
                raise UsageError(
                    "exact=True needs CUBLAS_WORKSPACE_CONFIG set before CUDA starts; CUDA is running already.",
                    fix=["export CUBLAS_WORKSPACE_CONFIG=:4096:8", "or construct Run before the first CUDA tensor"],
                )
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True)
        deterministic_module.fill_uninitialized_memory = False  # costs time and changes no result
        torch.backends.cudnn.benchmark = False

        def undo() -> None:
            torch.set_num_threads(threads)
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
            deterministic_module.fill_uninitialized_memory = fill
            torch.backends.cudnn.benchmark = benchmark

        Pins.restore.append(undo)

    def _unpin(self) -> None:
        Pins.pinned.remove(self)
        while not Pins.pinned and Pins.restore:
            Pins.restore.pop()()

    def close(self) -> None:
        while self.undo:
            self.undo.pop()()

    def fingerprint(self) -> dict[str, Any]:
        if not self.exact:
            return {"exact": False}
        return {"exact": True, "threads": 1, "deterministic": True, "fused": False, "torch": torch.__version__}
