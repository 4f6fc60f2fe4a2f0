"""`Update`: what one optimizer step was. Reading a value never communicates; it may wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evener.engine.tally import Tally, width


@dataclass(slots=True, repr=False, eq=False)
class Update:
    """One update, numbered from 0.

    number, epoch, microbatches, seconds and ends_epoch are plain values. loss, metrics, count, rows, grad_norm, lr,
    scale and skipped live on the device until they are read: reading one waits for the device (a host sync), never for
    another rank, because the sums were reduced inside the step.
    """

    number: int
    tally: Tally
    sums: torch.Tensor | None
    names: Sequence[str]
    _rows: int | None
    microbatches: int
    _lr: float | torch.Tensor
    _norm: Any
    _found: Any
    _scale: Any
    seconds: float
    epoch: int = 0
    ends_epoch: bool = False
    _read: list[float] | None = None

    def vector(self) -> torch.Tensor:
        """The update's sums, its norm and its flag as one vector on the device; no host sync."""
        sums = self.sums
        if sums is None:
            if self.tally.entries:
                device = self.tally.entries[0][2].device
                sums = self.tally.pack(self.names, 1, device)
            else:
                sums = torch.zeros(1, width(self.names))
        extra = [value for value in (self._norm, self._found, self._scale) if value is not None]
        return torch.cat([sums.sum(0), torch.stack([value.to(sums.dtype) for value in extra])])

    def landed(self, values: list[float]) -> None:
        """The host's copy of `vector()` has arrived: reading no longer waits."""
        columns = width(self.names)
        self._read = values[:columns]
        extra: list[float | None] = [*values[columns:], None]
        self._norm, self._found, self._scale = extra[:3]

    def _values(self) -> list[float]:
        if self._read is None:
            self.landed(self.vector().tolist())
            assert self._read is not None
        return self._read

    @property
    def loss(self) -> float:
        """The optimised loss: the mean over the global batch (nan when it counted nothing)."""
        values = self._values()
        return values[0] / values[1] if values[1] else float("nan")

    @property
    def count(self) -> float:
        """The loss's denominator over all ranks: rows, or what `Mean(count=)` counted."""
        return self._values()[1]

    @property
    def rows(self) -> int:
        """Rows of the global batch that were computed, over all ranks."""
        return self._rows if self._rows is not None else round(self._values()[2])

    @property
    def metrics(self) -> dict[str, float]:
        """Exact means over the global batch, by name."""
        values = self._values()
        pairs = zip(self.names, values[3::2], values[4::2])
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    @property
    def grad_norm(self) -> float:
        """The global 2-norm of the gradient before clipping, after unscaling."""
        return float(self._norm)

    @property
    def lr(self) -> float:
        """The learning rate this update was made with (of the first parameter group)."""
        return float(self._lr)

    @property
    def scale(self) -> float:
        """The loss scale of this update; 1 without a scaler."""
        return float(self._scale) if self._scale is not None else 1.0

    @property
    def skipped(self) -> bool:
        """True when the update changed nothing: gradients not finite, or nothing to count."""
        return bool(self._found)

    def __str__(self) -> str:
        parts = [f"update {self.number}", f"loss {self.loss:.4g}"]
        parts += [f"{name} {value:.4g}" for name, value in self.metrics.items()]
        parts += [f"lr {self.lr:.3g}", f"grad norm {self.grad_norm:.3g}"]
        if self.skipped:
            parts.append("skipped")
        return " · ".join(parts)

    def __repr__(self) -> str:
        return f"<{self}>"
