"""Batches on their way to the device. On the CPU there is no way to go: the batch is delivered as it is.

All CUDA lines of the data room are here. They have not run on a GPU yet: tests check the protocol with stand-ins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from evener.batch import apply, move

Item = TypeVar("Item")


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory; what cannot be pinned stays as it is."""
    return apply(batch, lambda t: t.pin_memory() if t.is_cpu else t, _pinned_object)


def _pinned_object(other: Any) -> Any:
    return other.pin_memory() if callable(getattr(other, "pin_memory", None)) else other


def _record(batch: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that `stream` uses these tensors, so that their memory is not reused too early."""

    def tensor(t: torch.Tensor) -> torch.Tensor:
        if t.is_cuda:
            t.record_stream(stream)
        return t

    def other(thing: Any) -> Any:
        if callable(getattr(thing, "record_stream", None)):
            thing.record_stream(stream)
        return thing

    apply(batch, tensor, other)


class Transfer:
    """Copies batches to `device`, one update ahead of the one that trains.

    On CUDA the copy runs on a stream of its own, from pinned memory; `finish` makes the current stream wait for it, on
    the device, without blocking the host. Elsewhere (MPS) the copy is an ordinary one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batches: list[Any]) -> tuple[list[Any], torch.cuda.Event | None]:
        """Begin the copies; None stays None."""
        if self._stream is None:
            return [move(batch, self.device) for batch in batches], None
        with torch.cuda.stream(self._stream):
            moved = [move(pinned(batch), self.device) for batch in batches]
            return moved, self._stream.record_event()

    def finish(self, moved: list[Any], event: torch.cuda.Event | None) -> list[Any]:
        """The batches, safe to use on the current stream from here on."""
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            for batch in moved:
                _record(batch, current)
        return moved


def ahead(items: Iterator[Item], start: Callable[[Item], Item]) -> Iterator[Item]:
    """Yields `start(item)` of each, having started the next one before: one item of prefetch, in this thread.

    An error in the next item is raised after the current one was delivered, not instead of it.
    """
    held: Item | None = None
    while True:
        try:
            coming = start(next(items))
        except StopIteration:
            if held is not None:
                yield held
            return
        except Exception:
            if held is not None:
                yield held
            raise
        if held is not None:
            yield held
        held = coming
