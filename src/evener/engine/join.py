"""Where the forward communicates (synchronised BatchNorm, fsdp), every rank runs the same number of forwards.

The number is agreed before the first. A rank that has fewer pieces than another joins in, after its own, with rows of
weight 0 (two, because BatchNorm refuses one): it takes part in what forward and backward exchange, and leaves no trace
in gradients, buffers, statistics or losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from evener import batch as batches
from evener.dist import comm
from evener.engine.cut import Cut
from evener.errors import DataError

Part = tuple[int, int, Any]  # slice or microbatch number (negative: joins with weight 0), rows, batch
IDLE = -1


class Join:
    """The ranks' common sequence of forwards. `fill` is called on all ranks.

    inside: Between the first forward of an update and the end of its last backward. Outside of it nothing communicates.
    idle: The piece in work has weight 0 on this rank.
    numbers: Of the pieces of this update, by rank; rank r's step k is numbers[r][k], IDLE from its end on.
    """

    def __init__(self, cut: Cut, split: batches.Split | None, device: torch.device) -> None:
        self.cut, self.split, self.device = cut, split, device
        self.inside = self.idle = False
        self.numbers: list[list[int]] = []
        self.group = dist.group.WORLD
        self.rows: tuple[int, Any] | None = None  # what to join in with
        self.have = [False] * cut.world_size  # which ranks keep such rows, known to all

    def own_group(self) -> Join:
        """Give what the forward exchanges a group of its own: gradient buckets that are on their way meanwhile may then
        start in another order on another rank. Collective; `remove` gives it back."""
        self.group = dist.new_group()
        return self

    def remove(self) -> None:
        dist.destroy_process_group(self.group)

    def fill(self, parts: Sequence[Part], rows: int | None) -> list[Part]:
        """This rank's pieces, with as many forwards as the rank with most has. Without communication where `rows` (of
        the whole update, delivered as they were cut) says it; else the ranks tell each other.

        Raises:
            DataError: on all ranks: a rank without rows needs one, and the batch is of a kind that cannot be sent.
        """
        world = self.cut.world_size
        if rows is not None:
            cuts = [replace(self.cut, rank=rank) for rank in range(world)]
            self.numbers = [[number for number, _ in cut.numbered(rows)] for cut in cuts]
        else:
            self.numbers = comm.all_gather([number for number, _, _ in parts])
        most = max(map(len, self.numbers))
        if parts and self.rows is None:
            number = min(2, parts[0][1])
            first = batches.part(parts[0][2], 0, number, self.split)
            self.rows = number, batches.apply(first, torch.clone)  # a view would keep the whole batch
        self.have = [have or bool(mine) for have, mine in zip(self.have, self.numbers)]
        if any(len(mine) < most and not have for mine, have in zip(self.numbers, self.have)):
            self._send_rows(self.have.index(True))
        idle = most - len(parts)
        self.numbers = [mine + [IDLE] * (most - len(mine)) for mine in self.numbers]
        return [*parts, *[(IDLE, *self.rows) for _ in range(idle) if self.rows is not None]]

    def _send_rows(self, src: int) -> None:
        """Rows from rank `src` to the ranks that never had any; what they look like travels as JSON."""
        tensors: list[torch.Tensor] = []
        number, rows = self.rows if self.rows is not None else (0, None)
        leaves, spec = tree_flatten(rows)
        tensors = [leaf.contiguous() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        kinds = [_described(leaf) for leaf in leaves]
        try:
            tree = treespec_dumps(spec) if None not in kinds else None
        except (NotImplementedError, TypeError):  # a container that has no JSON
            tree = None
        tree, kinds, kind, number = comm.broadcast([tree, kinds, type(rows).__name__, number], src)
        if tree is None:
            raise DataError(
                f"rank {self.have.index(False)} has no rows in the first update, and its forward communicates.",
                evidence=[f"a {kind} cannot be sent to it from rank {src}"],
                fix=[
                    "make the batch of tensors in tuples, lists and dicts with text keys",
                    "or give every rank rows in the first update",
                ],
            )
        if self.cut.rank != src:
            leaves = [
                torch.empty(shape, dtype=getattr(torch, what), device=self.device) if shape is not None else what
                for what, shape in kinds
            ]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for tensor in tensors:
            # As bytes: not every backend moves every dtype.
            comm.broadcast(tensor.contiguous().reshape(-1).view(torch.uint8), src)
        if self.rows is None:
            self.rows = number, tree_unflatten(leaves, treespec_loads(tree))
        self.have = [True] * len(self.have)


def _described(leaf: Any) -> list[Any] | None:
    """For the other ranks: [dtype, shape] of a tensor, [value, None]; None for what JSON has not."""
    if isinstance(leaf, torch.Tensor):
        return [str(leaf.dtype)[6:], list(leaf.shape)]
    return [leaf, None] if leaf is None or type(leaf) in (str, int, float, bool) else None
