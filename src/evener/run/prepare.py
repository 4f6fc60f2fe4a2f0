"""Between the feed and the engine: `prepare` for every slice, and a look at what the user's functions made of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from evener import batch as batches
from evener.config import Config
from evener.dist.mix import mix
from evener.engine import Engine
from evener.errors import DataError

_PREPARE = 3  # a stream of randomness of its own, apart from the model's


class Preparing:
    """Makes a slice ready for the loss. `collate_fn`: what a DataLoader said."""

    def __init__(self, config: Config, engine: Engine, collate_fn: Any) -> None:
        self.config, self.engine = config, engine
        custom = {"collate_fn": config.collate_fn or collate_fn, "prepare": config.prepare}
        self.makers = [what for what, given in custom.items() if given is not None]

    def __call__(self, given: Any, number: int, rows: int) -> Any:
        """Slice `number` of the next update."""
        config, engine = self.config, self.engine
        batch = batches.aligned(given) if config.exact else given
        if config.prepare is not None:
            generator = torch.Generator(device=engine.device)
            generator.manual_seed(mix(config.seed, engine.number, _PREPARE, number))
            batch = config.prepare(batch, generator)
        if self.makers:
            self._count(given, batch, rows)
        return batch

    def _count(self, given: Any, batch: Any, rows: int) -> None:
        """The user's collate_fn or prepare may not lose rows: they would count although nothing was learnt from them.

        A batch of one row may be rows packed together, as long as the loss is not a mean over rows.
        """
        found = batches.counted(batch, rows, self.config.split)
        if found is None or found >= rows or (found == 1 and not self.engine.rows_weigh):
            return
        before = batches.counted(given, rows, self.config.split)
        lost_before = "collate_fn" in self.makers and before is not None and before < rows
        who = "collate_fn" if lost_before else self.makers[-1]
        fix = ["return a row for every row given"]
        fix += ['rows that cannot be read: on_bad_sample="skip" leaves them out, and they are counted right']
        fix += ["a batch whose first dimension is not its rows: split=f(batch, start, stop)"]
        raise DataError(f"{who} was given {rows} rows and returned a batch of {found}.", fix=fix)

    def look(self, batch: Any) -> None:
        """Notes labels of -100, for a scalar loss that may not have them. Every batch, before it is copied."""
        labels = batch.get("labels") if self.engine.watches_labels and isinstance(batch, Mapping) else None
        if not isinstance(labels, torch.Tensor) or labels.dtype not in (torch.int64, torch.int32, torch.int16):
            return
        # As an array: no operation that a profile or a sync counter would see.
        if (labels.numpy() == -100).any():
            self.engine.note_ignored_labels()
