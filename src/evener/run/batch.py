"""One global batch of `Run.batches`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.data import Portion
from evener.engine.join import Part


@dataclass(frozen=True, slots=True)
class Batch:
    """One global batch of `Run.batches`, cut for this rank; `Run.step` takes it, once or several times."""

    portion: Portion
    parts: Sequence[Part]

    @property
    def rows(self) -> int:
        """Rows of the whole global batch."""
        return self.portion.rows

    @property
    def epoch(self) -> int:
        return self.portion.cursor.epoch

    @property
    def ends_epoch(self) -> bool:
        return self.portion.ends_epoch
