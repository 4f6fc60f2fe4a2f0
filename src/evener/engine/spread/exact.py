"""`exact=True`: the gradient's sum is a fixed binary tree over slices, whoever computed which slice.

Slice gradients are taken one by one. Node (level, index) is the sum of slices [index * 2**level, (index+1) * 2**level);
a node whose sibling lies beyond the last slice is promoted. A rank ends with nodes that every rank can name from the
number of slices and the world size alone. Over ranks: an all-to-all of chunks brings every node of a chunk to one rank,
which finishes the tree there, and an all-gather returns the roots. Bucket layout does not matter; NaN and Inf travel
through the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.dist.info import share
from evener.engine.spread import Tensors, existing, no_wait
from evener.engine.spread.single import Single

Node = tuple[int, int]  # level, index
Add = Callable[[Any, Any], Any]

_BYTES = 32 << 20


class Tree:
    """Folds values that arrive in any order into the fixed binary tree over `leaves` leaves."""

    def __init__(self, leaves: int, add: Add) -> None:
        self.leaves, self.add = leaves, add
        self.stash: dict[Node, Any] = {}

    def push(self, node: Node, value: Any) -> None:
        level, index = node
        while True:
            width = -(-self.leaves // (1 << level))  # nodes on this level
            if width == 1:
                break
            sibling = (level, index ^ 1)
            if (index ^ 1) >= width:
                pass  # no sibling: promoted as it is
            elif sibling in self.stash:
                other = self.stash.pop(sibling)
                value = self.add(other, value) if index & 1 else self.add(value, other)
            else:
                break
            level, index = level + 1, index >> 1
        self.stash[(level, index)] = value


def nodes_after(leaves: int, first: int, last: int) -> list[Node]:
    """The nodes left when leaves first..last-1 were folded: known to every rank without communication."""
    tree = Tree(leaves, lambda left, right: None)
    for i in range(first, last):
        tree.push((0, i), None)
    return sorted(tree.stash)


def _add_lists(left: list[torch.Tensor], right: list[torch.Tensor]) -> list[torch.Tensor]:
    torch._foreach_add_(left, right)
    return left


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class Exact(Single):
    """The tree over slices, for one process (nothing is communicated) and for many."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        rank: int,
        world_size: int,
        slice_size: int,
    ) -> None:
        super().__init__(parameters)
        self.name = "ddp" if world_size > 1 else "single"
        self.rank, self.world_size, self.slice_size = rank, world_size, slice_size
        self.leaves = 1
        self.tree = Tree(1, _add_lists)
        self.used = [False] * len(parameters)
        self.pushed: set[int] = set()

    def slots(self, rows: int) -> int:
        return max(1, -(-rows // self.slice_size))

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.leaves = self.slots(rows)
        self.tree = Tree(self.leaves, _add_lists)
        self.used = [False] * len(self.parameters)
        self.pushed.clear()

    def after_backward(self, number: int) -> None:
        gradients = []
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                # A missing gradient is zeros, added like any other: -0.0 + 0.0 must come out alike everywhere.
                gradient = torch.zeros_like(parameter)
            else:
                self.used[i] = True
                parameter.grad = None
            gradients.append(gradient)
        self.pushed.add(number)
        self.tree.push((0, number), gradients)

    def finish(self) -> list[torch.Tensor]:
        for number in range(*share(self.leaves, self.rank, self.world_size)):
            if number not in self.pushed:  # a slice whose rows could not be read is zeros
                self.tree.push((0, number), [torch.zeros_like(parameter) for parameter in self.parameters])
        nodes, used = self.tree.stash, self.used
        self.tree = Tree(1, _add_lists)
        if self.world_size > 1:
            flags = torch.tensor(used, dtype=torch.int32, device=self.parameters[0].device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)
            if not all(used):  # reading waits for the device; a rank that used everything knows the answer
                used = [bool(flag) for flag in flags.tolist()]
        for members in self._buckets():
            parameters = [self.parameters[i] for i in members]
            if self.world_size == 1:
                roots = [next(iter(nodes.values()))[i] for i in members]
            else:
                flats = {node: torch.cat([values[i].view(-1) for i in members]) for node, values in nodes.items()}
                length = sum(parameter.numel() for parameter in parameters)
                root = self._combine(flats, self.leaves, length, parameters[0])
                parts = root.split([parameter.numel() for parameter in parameters])
                roots = [part.view_as(parameter) for part, parameter in zip(parts, parameters)]
            for i, parameter, gradient in zip(members, parameters, roots):
                if used[i]:
                    parameter.grad = gradient
        return existing(self.parameters)

    def _combine(self, flats: dict[Node, torch.Tensor], leaves: int, length: int, like: torch.Tensor) -> torch.Tensor:
        """The root over all ranks' nodes, each a vector of `length`. Two collectives; called on all ranks."""
        world = self.world_size
        held = [nodes_after(leaves, *share(leaves, rank, world)) for rank in range(world)]
        mine = held[self.rank]
        chunk = -(-length // world)
        send = torch.zeros(world, len(mine), chunk, dtype=like.dtype, device=like.device)
        for k, node in enumerate(mine):
            # Chunk c of every node goes to rank c, which finishes the tree for it.
            padded = torch.nn.functional.pad(flats[node], (0, world * chunk - length))
            send[:, k] = padded.view(world, chunk)
        sizes = [len(nodes) * chunk for nodes in held]
        received = torch.empty(sum(sizes), dtype=like.dtype, device=like.device)
        dist.all_to_all_single(received, send.view(-1), sizes, [len(mine) * chunk] * world)
        tree = Tree(leaves, _add)
        for nodes, part in zip(held, received.split(sizes)):
            for node, value in zip(nodes, part.view(len(nodes), chunk) if nodes else ()):
                tree.push(node, value)
        (root,) = tree.stash.values()
        whole = torch.empty(world * chunk, dtype=like.dtype, device=like.device)
        dist.all_gather(list(whole.view(world, chunk).unbind(0)), root.contiguous())
        return whole[:length]

    def _buckets(self) -> Iterable[list[int]]:
        """Parameters of one dtype, about 32 MiB at a time: bounds the exchange's memory. Bits do not depend on it."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for i, parameter in enumerate(self.parameters):
            by_dtype.setdefault(parameter.dtype, []).append(i)
        for same in by_dtype.values():
            bucket: list[int] = []
            size = 0
            for i in same:
                bucket.append(i)
                size += self.parameters[i].numel() * self.parameters[i].element_size()
                if size >= _BYTES:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], None]:
        # One row per slice and zeros elsewhere: the all-reduce moves values, it does not round.
        if self.world_size > 1:
            dist.all_reduce(vector)
        return no_wait

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        leaves = self.slots(rows)
        tree = Tree(leaves, _add)
        for number in range(*share(leaves, self.rank, self.world_size)):
            tree.push((0, number), flats[number].clone() if number in flats else torch.zeros_like(like))
        if self.world_size == 1:
            (root,) = tree.stash.values()
            return root  # type: ignore[no-any-return]
        return self._combine(tree.stash, leaves, like.numel(), like)

    def norm(self, gradients: Tensors) -> torch.Tensor:
        """Norms of rows (along dimension 0, which sharding never splits), then of those, in a fixed order."""
        if not gradients:
            return torch.zeros(())
        rows = []
        for gradient in gradients:
            whole = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
            rows.append(torch.linalg.vector_norm(whole.flatten(1), dim=1) if whole.ndim > 1 else whole.abs().view(-1))
        norm: torch.Tensor = torch.linalg.vector_norm(torch.cat(rows))
        return norm
