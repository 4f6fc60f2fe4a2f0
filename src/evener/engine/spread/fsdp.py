"""Parameters, gradients and optimizer state sharded over ranks (FSDP2); every rank runs the same number of forwards.

Gradients are summed, never averaged, by one reduce-scatter per block and microbatch: they stay sharded while they
accumulate. In exact mode the reduce-scatter is an all-to-all of slice gradients into the tree of exact.py, each rank
folding it for the rows that it keeps. What no dimension can split (0-dimensional parameters) is summed as under ddp.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter

from evener.engine.join import Join
from evener.engine.spread import Spread, Tensors, existing, norm_of
from evener.engine.spread.ddp import DDP
from evener.engine.spread.exact import Exact, Tree, row_norms
from evener.engine.tally import as_loss

if TYPE_CHECKING:
    from evener.engine.engine import Engine


class FSDP(Spread):
    """`strategy="fsdp"` and `"hsdp"` (copies of the model, each sharded over some ranks)."""

    name = "fsdp"

    def __init__(self, parameters: Sequence[torch.nn.Parameter], engine: Engine) -> None:
        super().__init__(parameters)
        shards, join, slice_size = engine.shards, engine.join, engine.cut.slice_size if engine.batch.exact else None
        assert shards is not None and join is not None
        self.alone = engine.alone  # no other optimizer's parameters are in the graph
        self.copies = shards.world // shards.among
        self.shards, self.join = shards, join
        self.pieces = [shards.by_local[id(parameter)] for parameter in parameters]
        self.loose = [one.local for one in self.pieces if one.rows is None]
        self.exact = slice_size is not None
        self.inner: Exact | DDP
        if slice_size is None:
            self.inner = DDP(self.loose)
        else:
            self.inner = Exact(self.loose, rank=shards.rank, world_size=shards.world, slice_size=slice_size)
        self.keeps = shards.options.accumulate == "keep" and not self.exact
        self.used = [False] * len(self.pieces)
        self.index = {id(one): i for i, one in enumerate(self.pieces)}
        self.step = 0
        self.handed: Tensors = []
        self.square = torch.zeros(())
        self.hooks: list[Any] = []
        self.whole: list[Callable[[], None]] = []  # called for what is in no block
        self.trees: list[_Tree] = []
        self.late: tuple[torch.Tensor, torch.Event, array[int]] | None = None
        self.poison: torch.Tensor | None = None
        for number, (part, inside) in enumerate(shards.gathered_by(), 1):
            # One for all optimizers: they take turns.
            if number not in shards.summed:
                kind = _Sum if slice_size is None else _Tree
                shards.summed[number] = kind(join, shards.log, number, keeps=self.keeps)
            summed = shards.summed[number]
            if isinstance(summed, _Tree):
                self.trees.append(summed)
            part.set_custom_reduce_scatter(summed)
            watched = [one for one in inside if id(one) in self.index]
            # After FSDP's own hook, which has gathered the parameters.
            hook = _Watch(watched, [self._mark(self.index[id(one)]) for one in watched])
            target = shards.root if part is shards.model else part
            self.hooks.append(hook)
            if target is shards.root:
                self.whole.append(hook.forward)
                shards.root.before.append(hook.forward)
            else:
                self.hooks.append(part.register_forward_pre_hook(hook))

    def _mark(self, i: int) -> Callable[[Any], None]:
        def used(_: Any) -> None:
            # Rows of weight 0 may use what no row of the update does: a gradient of zeros would still be a step.
            self.used[i] = self.used[i] or not self.join.idle

        return used

    def slots(self, rows: int) -> int:
        return self.inner.slots(rows)

    def begin(self, rows: int) -> None:
        super().begin(rows)
        self.shards.reshard()
        self.clear()
        if not self.alone:
            self.shards.attend(self.pieces)
        self.handed = []  # or the last update's gradients would live through this one's forward and backward
        self.inner.begin(rows)
        self.used = [False] * len(self.pieces)
        self.step = 0
        del self.shards.log[:]
        for tree in self.trees:
            tree.begin(self.slots(rows))

    def clear(self) -> None:
        self.shards.clear(None if self.alone else self.pieces)

    def forward(self, loss_fn: Callable[..., Any], model: Any, batch: Any, rows: int) -> Any:
        def compute() -> Any:
            output = loss_fn(model, batch)
            # FSDP looks for the tensors whose backward is to come, and does not find one inside of a Mean.
            return as_loss(output, rows)[0].value, output

        return self.shards.call(compute)[1]

    def before_backward(self, last: bool) -> None:
        self.step += 1
        last = self.step == len(self.join.numbers[0])  # of all ranks, who joins in included
        if self.keeps:
            self.shards.root.set_requires_gradient_sync(last)
        elif self.copies > 1:  # between copies once per update
            self.shards.root.set_requires_all_reduce(last)
        self.inner.before_backward(False)

    def after_backward(self, number: int) -> None:
        if number >= 0 and self.loose:
            self.inner.after_backward(number)
        for tree in self.trees:
            tree.push([numbers[self.step - 1] for numbers in self.join.numbers])

    def finish(self) -> Tensors:
        """One small sum over ranks: the squares of what each holds, who used which parameter, and the order of each
        rank's collectives.

        Raises:
            ModelError: on all ranks: they ran different blocks, and so received each other's. On a device an update
                later, so that nothing waits; the update itself is skipped as not finite.
        """
        for tree in self.trees:
            tree.finish()
        if self.loose:
            self.inner.finish()
        mine = self._squares(self.gradients())
        flags = torch.tensor(self.used, device=mine.device).to(mine.dtype)
        order = [0] * self.shards.world
        order[self.shards.rank] = self.shards.order()
        told = torch.cat([mine, flags, torch.tensor(order, device=mine.device).to(mine.dtype)])
        dist.all_reduce(told)
        self.compare(told[-len(order) :])
        self.square = told[0]
        # Only a rank that did not use a parameter has to ask whether another one did: reading waits for the device.
        unused = [i for i, one in enumerate(self.pieces) if one.rows is not None and not self.used[i]]
        elsewhere = told[1 : 1 + len(flags)].tolist() if unused else []
        for i in unused:
            if not elsewhere[i]:
                self.parameters[i].grad = self.pieces[i].source.grad = None
        self.handed = existing(self.parameters)
        return self.handed

    def compare(self, orders: torch.Tensor) -> None:
        """See `Shards.refuse`; on a device one update later."""
        if self.late is not None:
            differs, landed, log = self.late
            landed.synchronize()
            if differs.item():
                self.shards.refuse(log)
        differs = (orders != orders[0]).any()
        if differs.device.type != "cpu":
            self.poison = torch.zeros_like(orders[0]).masked_fill_(differs, torch.nan)
            host, landed = differs.to("cpu", non_blocking=True), torch.Event(differs.device)
            landed.record()
            self.late = host, landed, self.shards.log[:]
        elif differs:
            self.shards.refuse(self.shards.log)

    def gradients(self) -> Tensors:
        """As `.grad` of the model's parameters is now: a user may have replaced it."""
        for parameter, one in zip(self.parameters, self.pieces):
            if one.rows is not None:
                parameter.grad = None if one.source.grad is None else one.source.grad.to_local()
        return existing(self.parameters)

    def sum_(self, vector: torch.Tensor, *, overlap: bool) -> Callable[[], object]:
        return self.inner.sum_(vector, overlap=overlap)

    def fold(self, flats: dict[int, torch.Tensor], rows: int, like: torch.Tensor) -> torch.Tensor:
        return self.inner.fold(flats, rows, like)

    def _squares(self, gradients: Tensors) -> torch.Tensor:
        """The sum of squares of what this rank alone holds (1 element): what is whole everywhere counts on rank 0."""
        whole = {id(parameter.grad) for parameter in self.loose} if self.shards.rank else set()
        mine = [gradient for gradient in gradients if id(gradient) not in whole and gradient.numel()]
        mine = mine if self.shards.copy == 0 else []  # what another copy of the model holds is the same
        wide = torch.float32 if self.shards.device.type == "mps" else torch.float64
        if not mine:
            return torch.zeros(1, dtype=wide, device=self.shards.device)
        return norm_of(mine).to(wide).square().view(1)

    def norm(self, gradients: Tensors) -> torch.Tensor:
        """The true global norm. Communicates where `finish` has not done so: for gradients that were changed since, and
        in exact mode, where the norms of all rows are brought together and summed in one order."""
        dtype = torch.promote_types(gradients[0].dtype, torch.float32) if gradients else torch.float32
        if self.exact:
            norm = self._norm_of_rows(dtype)
        else:
            square = self.square
            if gradients is not self.handed:
                square = self._squares(gradients)[0]
                dist.all_reduce(square)
            norm = square.sqrt().to(dtype)
        return norm if self.poison is None else norm + self.poison.to(norm.dtype)

    def _norm_of_rows(self, dtype: torch.dtype) -> torch.Tensor:
        pieces = [(p.grad, one) for p, one in zip(self.parameters, self.pieces) if p.grad is not None]
        sizes = [one.shape[0] if one.rows is not None else 1 for _, one in pieces]
        if not pieces:
            return torch.zeros(())
        rows = torch.zeros(sum(sizes), dtype=dtype, device=self.shards.device)
        for part, (gradient, one) in zip(rows.split(sizes), pieces):
            assert gradient is not None
            norms = row_norms(gradient)
            if one.rows is not None:
                part[slice(*one.rows)] = norms
            elif self.shards.rank == 0:
                part.copy_(norms)
        dist.all_reduce(rows)  # zeros elsewhere: it moves values, it does not round
        norm: torch.Tensor = torch.linalg.vector_norm(rows)
        return norm

    def close(self) -> None:
        self.inner.close()
        self.shards.root.before = [hook for hook in self.shards.root.before if hook not in self.whole]
        for hook in self.hooks:
            hook.remove()


class _Watch:
    """Sees which of a block's parameters receive a gradient on this rank. Called when they are gathered."""

    def __init__(self, pieces: Sequence[Any], marks: Sequence[Callable[[Any], None]]) -> None:
        self.waiting = list(zip(pieces, marks))
        self.handles: list[Any] = []

    def __call__(self, module: Any, args: Any) -> None:
        self.forward()

    def forward(self) -> None:
        if not self.waiting:
            return
        for one, mark in self.waiting:
            if one.source.requires_grad:
                self.handles.append(one.source.register_post_accumulate_grad_hook(mark))
        self.waiting = [(one, mark) for one, mark in self.waiting if not one.source.requires_grad]

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class Gather(DefaultAllGather):
    """FSDP's own, written down."""

    def __init__(self, log: array[int], number: int) -> None:
        super().__init__()
        self.log, self.number = log, number

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.log.append(self.number)
        return super().__call__(output_tensor, input_tensor, group, async_op)


class _Sum(DefaultReduceScatter):
    """FSDP's own, except that a rank of weight 0 adds zeros: 0 times what is not finite is not 0. Where gradients are
    kept between microbatches, what it adds is its own earlier ones.
    """

    def __init__(self, join: Join, log: array[int], number: int, *, keeps: bool) -> None:
        super().__init__()
        self.join, self.keeps, self.log, self.number = join, keeps, log, number

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.log.append(-self.number)
        if self.join.idle and not self.keeps:
            input_tensor.zero_()
        return super().__call__(output_tensor, input_tensor, group, op, async_op)


class _Tree(_Sum):
    """Exact mode: every rank receives its chunk of every slice's gradient and folds them in the fixed tree.

    FSDP sees zeros until `finish`, which writes the root into the memory that its gradients are views of.
    """

    def begin(self, leaves: int) -> None:
        self.tree = Tree(leaves, lambda left, right: left.add_(right))
        self.missing = set(range(leaves))
        self.received: torch.Tensor | None = None
        self.output: torch.Tensor | None = None

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        self.log.append(-self.number)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        # A block that is called twice is reduced twice: both belong to the same slice.
        self.received = received if self.received is None else self.received.add_(received)
        output_tensor.zero_()
        if self.output is None:
            self.output = output_tensor

    def push(self, numbers: Sequence[int]) -> None:
        """A step is over: rank r's part of what was received is of slice numbers[r]; nothing of one that joined in."""
        received, self.received = self.received, None
        if received is None:
            return
        for number, part in zip(numbers, received.chunk(len(numbers))):
            if number >= 0:
                self.missing.discard(number)
                self.tree.push((0, number), part)
        inside = [node for node, value in self.tree.stash.items() if value._base is received]
        if len(inside) < len(numbers):
            for node in inside:  # a view would keep the other ranks' parts too
                self.tree.stash[node] = self.tree.stash[node].clone()

    def finish(self) -> None:
        if self.output is None:
            return
        for number in sorted(self.missing):  # not computed by anyone, or without this block
            self.tree.push((0, number), torch.zeros_like(self.output))
        (root,) = self.tree.stash.values()
        self.output.copy_(root)
        self.begin(1)
