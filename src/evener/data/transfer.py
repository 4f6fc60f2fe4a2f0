"""Batches on their way to the device. On the CPU there is no way to go: the batch is delivered as it is.

All CUDA lines of the data room are here. They have not run on a GPU yet: tests check the protocol with stand-ins.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.batch import apply, move
from evener.errors import MemoryLimitError


def pinned(batch: Any) -> Any:
    """The batch in page-locked memory; what cannot be pinned stays as it is."""
    return apply(batch, _pin, _pin)


def _pin(thing: Any) -> Any:
    able = callable(getattr(thing, "pin_memory", None)) and getattr(thing, "is_cpu", True)
    return thing.pin_memory() if able else thing


def _record(stream: torch.cuda.Stream, thing: Any) -> Any:
    """Tell the allocator that `stream` uses this, so that its memory is not reused too early."""
    if callable(getattr(thing, "record_stream", None)) and (thing.is_cuda if torch.is_tensor(thing) else True):
        thing.record_stream(stream)
    return thing


class Transfer:
    """Copies batches to `device`, one update ahead of the one that trains.

    On CUDA the copy runs on a stream of its own, from pinned memory; `finish` makes the current stream wait for it, on
    the device, without blocking the host. Elsewhere (MPS) the copy is an ordinary one.
    """

    def __init__(self, device: torch.device, lap: Callable[[str], None] | None = None) -> None:
        self.device, self._lap = device, lap
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def start(self, batches: list[Any]) -> tuple[list[Any], torch.cuda.Event | None]:
        """Begin the copies; None stays None."""
        if self._stream is None:
            return [move(batch, self.device) for batch in batches], None
        with torch.cuda.stream(self._stream):
            return [move(pinned(batch), self.device) for batch in batches], self._stream.record_event()

    def finish(self, moved: list[Any], event: torch.cuda.Event | None) -> list[Any]:
        """The batches, safe to use on the current stream from here on."""
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            if self._lap is not None:
                self._lap("")
            current.wait_event(event)
            if self._lap is not None:
                self._lap("host_to_device")
            record = functools.partial(_record, current)
            for batch in moved:
                apply(batch, record, record)
        return moved


def ahead(items: Iterator[Any], start: Callable[[Any], Any]) -> Iterator[Any]:
    """Yields `start(item)` of each, having started the next one before: one item of prefetch, in this thread.

    An error in the next item is raised after the current one was delivered, not instead of it. One that has no room
    beside the current one is started after it.
    """
    held: list[Any] = []
    while True:
        try:
            item = next(items)
            coming = [start(item)]
        except StopIteration:
            yield from held
            return
        except MemoryLimitError:
            yield from held
            held, coming = [], [start(item)]
        except Exception:
            yield from held
            raise
        yield from held
        held = coming
