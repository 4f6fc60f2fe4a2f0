"""The way of a batch from its reader to the device: workers if there are any, a look at it, the copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evener.data.read import Loaded, Reader
from evener.data.source import Reading, Source
from evener.data.transfer import Transfer, ahead
from evener.data.workers import Workers


class Delivery:
    """Reads jobs, here or in workers; on a device the batches are one update ahead of the one that trains."""

    def __init__(self, reader: Reader, source: Source, how: Reading, num_workers: int) -> None:
        self.timeout = how.timeout or source.timeout or 300.0
        self._reader, self._inspect = reader, how.inspect
        self._transfer = None if how.device.type == "cpu" else Transfer(how.device, how.lap)
        pin = how.device.type == "cuda"
        self.workers = Workers(reader, source, num_workers, self.timeout, how.seed, pin) if num_workers else None

    def results(self, steps: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """(plan, result) for each (plan, job), in order. With workers a newer call ends the older one."""
        loaded = map(self._look, self._reader.read_all(steps) if self.workers is None else self.workers.read(steps))
        transfer = self._transfer
        if transfer is None:
            yield from loaded
        else:
            for (plan, result), moving in ahead(loaded, lambda item: (item, transfer.start(item[1].batches))):
                result.batches = transfer.finish(*moving)
                yield plan, result

    def _look(self, item: tuple[Any, Loaded]) -> tuple[Any, Loaded]:
        if self._inspect is not None:
            for batch in item[1].batches:
                if batch is not None:
                    self._inspect(batch)
        return item

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
