"""A checkpoint written behind the training: the state is copied to the host now, the disk is waited for elsewhere.

What blocks is one copy of the state into memory that is kept for the next time (fresh memory costs more than the copy:
the kernel has to clear it). On rank 0's host this holds the state a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch

from evener.errors import CheckpointError


class Behind:
    """At most one write at a time, of rank 0. Nothing here communicates."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._outcome: list[str] | CheckpointError | None = None

    def copied(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors' values now, on the host; valid until the next call. Waits for the device.

        The writer before must have ended: it reads the same memory.
        """
        assert self._thread is None
        kept, self._copies = self._copies, {}
        on_device = False
        for name, tensor in tensors.items():
            copy = kept.pop(name, None)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # Only pinned memory is copied to without a stop after each tensor.
                copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            copy.copy_(tensor, non_blocking=True)
            on_device = on_device or tensor.device.type != "cpu"
            self._copies[name] = copy
        if on_device:
            torch.accelerator.synchronize()
        return dict(self._copies)

    def start(self, write: Callable[[], list[str]]) -> None:
        """Run `write` in a thread. Python waits for it when it ends, so a script's last checkpoint is whole."""

        def act() -> None:
            try:
                self._outcome = write()
            except CheckpointError as error:
                self._outcome = error
            except Exception as error:
                self._outcome = CheckpointError(f"a checkpoint could not be written: {type(error).__name__}: {error}")

        self._thread = threading.Thread(target=act, name="evener-checkpoint")
        self._thread.start()

    def outcome(self, *, wait: bool) -> list[str] | CheckpointError | None:
        """What became of the last write, told once: notes or an error. None: nothing, or (unless `wait`) not yet."""
        if self._thread is None or (not wait and self._thread.is_alive()):
            return None
        self._thread.join()
        self._thread = None
        outcome, self._outcome = self._outcome, None
        return outcome
