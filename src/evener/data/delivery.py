"""From a reader to the device: worker processes where there are any, the look at each batch, the copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from evener.data.source import Source
from evener.data.transfer import Transfer, ahead
from evener.data.workers import Reader, Workers
from evener.errors import UsageError


class Delivery:
    """Reads jobs, here or in workers, and brings their batches to the device, one update ahead of the one that trains.

    Args:
        timeout: Seconds to wait for a worker; None is what a DataLoader said, else 300.
        inspect: Called with every batch, in order, before it is copied to the device; may raise.

    Raises:
        UsageError: timeout out of range.
    """

    def __init__(
        self,
        reader: Reader,
        source: Source,
        *,
        num_workers: int,
        timeout: float | None,
        seed: int,
        device: torch.device,
        inspect: Callable[[Any], None] | None,
    ) -> None:
        timeout = timeout if timeout is not None else source.timeout or 300.0
        if timeout <= 0:
            raise UsageError(f"timeout={timeout!r}: seconds to wait for a data worker.", fix=["timeout=300"])
        self._reader, self._inspect, self.timeout = reader, inspect, timeout
        self._transfer = None if device.type == "cpu" else Transfer(device)
        self.workers: Workers | None = None
        if num_workers:
            self.workers = Workers(
                reader,
                count=num_workers,
                timeout=timeout,
                seed=seed,
                prefetch=source.prefetch_factor,
                pin=device.type == "cuda",
                worker_init_fn=source.worker_init_fn,
                context=source.multiprocessing_context,
            )

    def results(self, steps: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """(step, its result) in order. With workers one iteration at a time: a newer call ends the older one."""
        loaded = self._reader.read_all(steps) if self.workers is None else self.workers.read(steps)
        transfer = self._transfer
        if transfer is None:
            for step, result in loaded:
                self._look(result.batches)
                yield step, result
            return

        def start(item: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            step, result, _ = item
            self._look(result.batches)
            result.batches, event = transfer.start(result.batches)
            return step, result, event

        for step, result, event in ahead(((step, result, None) for step, result in loaded), start):
            result.batches = transfer.finish(result.batches, event)
            yield step, result

    def _look(self, batches: list[Any]) -> None:
        if self._inspect is not None:
            for batch in batches:
                if batch is not None:
                    self._inspect(batch)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
