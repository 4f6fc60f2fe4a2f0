"""`Epoch`: the updates of one epoch, and afterwards their exact means."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from evener.engine.tally import Tally
from evener.engine.update import Update

_FLUSH = 256  # updates whose sums are kept before they are added up: a few device operations for all of them


class Sums:
    """Adds up (total, count) pairs of many updates without reading one of them before it is asked."""

    def __init__(self, epoch: int = -1) -> None:
        self.epoch = epoch  # whose updates these are
        self.updates = 0
        self.names: Sequence[str] = ()
        self._tally = Tally()
        self._sums: list[torch.Tensor] = []
        self._total: torch.Tensor | None = None
        self._device = torch.device("cpu")

    def add(self, update: Update) -> None:
        """No communication (an update's sums are global already), no host sync."""
        self.updates += 1
        self.names = update.names
        if update.sums is not None:
            self._sums.append(update.sums)
            self._device = update.sums.device
        else:
            self._tally.entries += update.tally.entries
            self._tally.metrics += update.tally.metrics
            if update.tally.entries:
                self._device = update.tally.entries[0][2].device
        if len(self._sums) + len(self._tally.entries) >= _FLUSH:
            self._flush()

    def _flush(self) -> None:
        parts = [sums.sum(0) for sums in self._sums]
        if self._tally.entries:
            parts.append(self._tally.pack(self.names, 1, self._device)[0])
        if self._total is not None:
            parts.append(self._total.to(self._device))
        self._total = torch.stack(parts).sum(0) if parts else None
        self._tally, self._sums = Tally(), []

    def state_dict(self) -> dict[str, list[float]]:
        """(total, count) by name. Waits for the device."""
        return {name: [total, count] for name, (total, count) in self.read().items()}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        names = [name for name in state if name != "loss"]
        self._tally, self._sums, self._total = Tally(), [], None
        if state:
            pairs = [float(value) for name in names for value in state[name]]
            self.names = names
            self._total = torch.tensor([*state["loss"], 0.0, *pairs, 0.0, 0.0], dtype=torch.float64)

    def read(self) -> dict[str, tuple[float, float]]:
        """(total, count) by name: "loss", then the metrics. Waits for the device."""
        self._flush()
        if self._total is None:
            return {}
        values = self._total.tolist()
        totals, counts = [values[0], *values[3::2]], [values[1], *values[4::2]]
        return dict(zip(("loss", *self.names), zip(totals, counts)))


class Epoch:
    """One epoch: iterate it for its updates; then it holds their means.

    number: from 0. updates: how many so far, before a resume too. seconds: from the first update to the last. loss and
    metrics are exact means over all rows (or tokens) of the epoch so far, over all ranks; reading them waits for the
    device and never communicates.
    """

    def __init__(self, number: int, updates: Iterator[Update], sums: Sums) -> None:
        self.number = number
        self.seconds = 0.0
        self._iterator = updates
        self._sums = sums  # after a resume in its middle: of the updates before too

    def __iter__(self) -> Iterator[Update]:
        began = time.perf_counter()
        for update in self._iterator:
            self.seconds = time.perf_counter() - began
            yield update
            self.seconds = time.perf_counter() - began

    @property
    def updates(self) -> int:
        return self._sums.updates

    @property
    def loss(self) -> float:
        return self._mean("loss")

    @property
    def metrics(self) -> dict[str, float]:
        return {name: self._mean(name) for name in self._sums.names}

    def _mean(self, name: str) -> float:
        total, count = self._sums.read().get(name, (0.0, 0.0))
        return total / count if count else float("nan")

    def __str__(self) -> str:
        parts = [f"epoch {self.number}", f"{self.updates} updates", f"loss {self.loss:.4g}"]
        parts += [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        return " · ".join([*parts, f"{self.seconds:.1f} s"])

    def __repr__(self) -> str:
        return f"<{self}>"
