"""The data position and its algebra: integers only, free of rank, world size and worker count.

An update never crosses the end of an epoch: the last one is shorter, or with `drop_last` left out. A cursor may stand
at any offset, not only at multiples of the global batch: a run may resume with another size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evener.errors import DataError


class Mark(NamedTuple):
    """Where one rank's reading of a stream stands: after `rows` rows of its own of the epoch, all of them used by
    updates. state: the dataset's `state_dict`, if it has one, `back` rows before. after: a checksum of the row that
    came next. ended: the epoch has no more rows on this rank.
    """

    rows: int = 0
    state: Any = None
    after: int | None = None
    ended: bool = False
    back: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where the next update starts: the epoch, and how many rows of its order are already used.

    `mark` is beside the two integers, for streams only: how this rank gets there.
    """

    epoch: int = 0
    offset: int = 0
    mark: Mark | None = field(default=None, compare=False)


def updates_in(length: int, global_batch_size: int, drop_last: bool) -> int:
    """How many updates `length` rows make (of a whole epoch, or of what is left of one)."""
    return length // global_batch_size if drop_last else -(-length // global_batch_size)


def rows_at(offset: int, length: int, global_batch_size: int, drop_last: bool) -> int:
    """Rows of the update that starts at `offset`; 0 when the epoch has no update left there."""
    left = length - offset
    if left >= global_batch_size and offset >= 0:
        return global_batch_size
    if left < 0 or offset < 0:
        fix = ["resume with the dataset and order that the checkpoint was written with", "or start anew"]
        raise DataError(f"the data position is row {offset} of an epoch that has {length} rows.", fix=fix)
    return 0 if drop_last else left


def following(cursor: Cursor, rows: int, length: int, global_batch_size: int, drop_last: bool) -> Cursor:
    """Where the next update starts after one of `rows` rows at `cursor`; (epoch + 1, 0) after the last of an epoch."""
    offset = cursor.offset + rows
    if rows_at(offset, length, global_batch_size, drop_last):
        return Cursor(cursor.epoch, offset)
    return Cursor(cursor.epoch + 1, 0)


def no_update(epoch: int, length: int, global_batch_size: int) -> DataError:
    """The error for an epoch that is smaller than one update under `drop_last`."""
    return DataError(
        f"epoch {epoch} has {length} rows, less than one global batch of {global_batch_size}, and drop_last=True"
        " leaves them out: no update would ever come.",
        fix=[f"global_batch_size={max(1, length)} or less", "or drop_last=False: the last update is then shorter"],
    )
