"""`exact=True`: the gradient's sum is a fixed binary tree over slices, whoever computed which slice.

Slice gradients are taken one by one. Node (level, index) is the sum of slices [index * 2**level, (index+1) * 2**level);
a node whose sibling lies beyond the last slice is promoted. A rank ends with nodes that every rank can name from the
number of slices and the world size alone. Over ranks: an all-to-all of chunks brings every node of a chunk to one rank,
which finishes the tree there, and an all-gather returns the roots. Bucket layout does not matter; NaN and Inf travel
through the same sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from evener.dist.info import share
from evener.engine.spread import Spread, Tensors, all_reduce, batched, existing, no_wait, shaped

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


@dataclass(slots=True)
class Sum:
    """The sum of some slices: gradients in parameter order, and for each the number of slices that had one."""

    gradients: list[torch.Tensor]
    used: list[int]

    def add(self, other: Sum) -> Sum:
        torch._foreach_add_(self.gradients, other.gradients)
        self.used = [mine + theirs for mine, theirs in zip(self.used, other.used)]
        return self


def _add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left.add_(right)


class Bucket:
    """Some parameters of one dtype that travel together, each followed at the end by how many slices used it.

    The buffers live as long as the engine: fresh memory would cost more than the copy into it.
    """

    def __init__(self, members: list[int], parameters: Sequence[torch.nn.Parameter], rank: int, world: int) -> None:
        self.members, self.rank, self.world = members, rank, world
        like = parameters[members[0]]
        self.sizes = [*(parameters[i].numel() for i in members), len(members)]
        self.likes = [parameters[i] for i in members]
        self.chunk = -(-sum(self.sizes) // world)
        self.rows = torch.zeros(0, world * self.chunk, dtype=like.dtype, device=like.device)  # one per own node
        self.whole = self.rows.new_empty(world * self.chunk)
        self.received = self.rows.new_empty(0)

    def held(self) -> list[torch.Tensor]:
        return [self.rows, self.whole, self.received]

    def combine(self, nodes: dict[Node, Sum], leaves: int) -> list[torch.Tensor | None]:
        """The roots of the tree over all ranks, as views; None where no slice used the parameter. Two collectives."""
        held = [nodes_after(leaves, *share(leaves, rank, self.world)) for rank in range(self.world)]
        mine = held[self.rank]
        if len(self.rows) != len(mine):
            self.rows = self.rows.new_zeros(len(mine), self.whole.numel())
        for row, node in zip(self.rows, mine):
            *views, used = row[: sum(self.sizes)].split(self.sizes)
            of = nodes[node]
            torch._foreach_copy_(
                [shaped(view, like) for view, like in zip(views, self.likes)], [of.gradients[i] for i in self.members]
            )
            used.copy_(torch.tensor([of.used[i] for i in self.members]))
        root = exchange(self.rows, held, self.rank, leaves, self.received, self.whole)
        *views, used = root[: sum(self.sizes)].split(self.sizes)
        # A rank that used everything itself knows the answer; reading waits for the device.
        sure = bool(mine) and all(any(nodes[node].used[i] for node in mine) for i in self.members)
        flags = [1.0] * len(self.members) if sure else used.tolist()
        return [shaped(view, like) if flag else None for view, like, flag in zip(views, self.likes, flags)]


def exchange(
    rows: torch.Tensor, held: list[list[Node]], rank: int, leaves: int, received: torch.Tensor, whole: torch.Tensor
) -> torch.Tensor:
    """The root over all ranks' nodes, on every rank. Called on all ranks; an all-to-all and an all-gather.

    rows: (own nodes, world * chunk), in the order of held[rank]. Chunk c of every node goes to rank c, which finishes
    the tree for it. `received` and `whole` are buffers to use; `whole` is returned.
    """
    world = len(held)
    chunk = whole.numel() // world
    send = rows.view(-1) if len(rows) == 1 else rows.view(-1, world, chunk).transpose(0, 1).reshape(-1)
    sizes = [len(nodes) * chunk for nodes in held]
    received.resize_(sum(sizes))
    dist.all_to_all_single(received, send, sizes, [len(rows) * chunk] * world)
    tree = Tree(leaves, _add)
    for nodes, part in zip(held, received.split(sizes)):
        for node, value in zip(nodes, part.split(chunk)):
            tree.push(node, value)
    (root,) = tree.stash.values()
    dist.all_gather(list(whole.view(world, chunk).unbind(0)), root)
    return whole


class Exact(Spread):
    """The tree over slices, for one process (nothing is communicated) and for many."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, rank: int, world_size: int, slice_size: int
    ) -> None:
        super().__init__(parameters)
        self.name = "ddp" if world_size > 1 else "single"
        self.rank, self.world_size, self.slice_size = rank, world_size, slice_size
        self.leaves = 1
        self.tree = Tree(1, Sum.add)
        self.pushed: set[int] = set()
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        # Bounds the exchange's memory; bits do not depend on it.
        kinds = batched(parameters if world_size > 1 else (), lambda one: one.dtype, _BYTES)
        self.buckets = [Bucket([index[id(one)] for one in same], parameters, rank, world_size) for _, same in kinds]

    def slots(self, rows: int) -> int:
        return max(1, -(-rows // self.slice_size))

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.leaves = self.slots(rows)
        self.tree = Tree(self.leaves, Sum.add)
        self.pushed.clear()

    def after_backward(self, number: int) -> None:
        gradients, used = [], []
        for parameter in self.parameters:
            gradient = parameter.grad
            used.append(int(gradient is not None))
            # A missing gradient is zeros, added like any other: -0.0 + 0.0 must come out alike everywhere.
            gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
            parameter.grad = None
        self.pushed.add(number)
        self.tree.push((0, number), Sum(gradients, used))

    def finish(self) -> list[torch.Tensor]:
        for number in range(*share(self.leaves, self.rank, self.world_size)):
            if number not in self.pushed:  # a slice whose rows could not be read is zeros
                zeros = [torch.zeros_like(parameter) for parameter in self.parameters]
                self.tree.push((0, number), Sum(zeros, [0] * len(zeros)))
        nodes: dict[Node, Sum] = self.tree.stash
        self.tree = Tree(1, Sum.add)
        if self.world_size == 1:
            (root,) = nodes.values()
            for parameter, gradient, count in zip(self.parameters, root.gradients, root.used):
                parameter.grad = gradient if count else None
        for bucket in self.buckets:
            for i, whole in zip(bucket.members, bucket.combine(nodes, self.leaves)):
                self.parameters[i].grad = whole
        return existing(self.parameters)

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], object]:
        # One row per slice and zeros elsewhere: the all-reduce moves values, it does not round.
        return all_reduce(vector, overlap=overlap) if self.world_size > 1 else no_wait

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        leaves, world = self.slots(rows), self.world_size
        tree = Tree(leaves, _add)
        for number in range(*share(leaves, self.rank, world)):
            tree.push((0, number), flats[number].clone() if number in flats else torch.zeros_like(like))
        if world == 1:
            (root,) = tree.stash.values()
            return root  # type: ignore[no-any-return]
        held = [nodes_after(leaves, *share(leaves, rank, world)) for rank in range(world)]
        chunk = -(-like.numel() // world)
        send = like.new_zeros(len(tree.stash), world * chunk)
        for row, node in zip(send, held[self.rank]):
            row[: like.numel()] = tree.stash[node]
        return exchange(send, held, self.rank, leaves, like.new_empty(0), like.new_empty(world * chunk))[: like.numel()]

    def norm(self, gradients: Tensors) -> torch.Tensor:
        """Norms of rows (along dimension 0, which sharding never splits), then of those, in a fixed order."""
        if not gradients:
            return torch.zeros(())
        norm: torch.Tensor = torch.linalg.vector_norm(torch.cat([row_norms(gradient) for gradient in gradients]))
        return norm


def row_norms(gradient: torch.Tensor) -> torch.Tensor:
    """Along dimension 0, in at least float32: the same for a row wherever it is computed."""
    wide = gradient.float() if gradient.dtype in (torch.float16, torch.bfloat16) else gradient
    return torch.linalg.vector_norm(wide.flatten(1), dim=1) if wide.ndim > 1 else wide.abs().reshape(-1)
