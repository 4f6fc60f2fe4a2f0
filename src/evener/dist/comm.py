"""`evener.comm`: collectives for a user's own code. In one process each is the identity.

Every function must be called on all ranks in the same order. Tensors travel as they are; any other value travels as
JSON (never pickle: nothing that comes over the network is unpickled). They block the host; inside `loss_fn` they need
`coupled=True`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from evener.dist.info import here
from evener.errors import CollectiveError, UsageError, one_of

_REDUCE = ("sum", "mean", "max", "min")


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1


def _wire() -> torch.device:
    """Where bytes travel: NCCL moves GPU tensors only."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _ready() -> None:
    if _alone() and here().world_size > 1:
        fix = ["construct evener.Run or evener.Engine first", "or call torch.distributed.init_process_group()"]
        raise UsageError("evener.comm needs the process group, which does not exist yet.", fix=fix)


def _to_bytes(value: Any, what: str) -> torch.Tensor:
    try:
        text = json.dumps(value, allow_nan=True)
    except (TypeError, ValueError) as error:
        what = f"{what}: a value of type {type(value).__name__} is neither a tensor nor JSON ({error})."
        raise UsageError(what, fix=["pass tensors, or numbers, strings, lists and dicts"]) from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(_wire())


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes().decode())


def _gather_bytes(data: torch.Tensor) -> list[torch.Tensor]:
    sizes = [torch.zeros(1, dtype=torch.int64, device=data.device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([data.numel()], device=data.device))
    lengths = [int(size) for size in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    parts = [torch.zeros_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return [part[:length] for part, length in zip(parts, lengths)]


def broadcast(value: Any, src: int = 0) -> Any:
    """`src`'s value on every rank. A tensor is filled in place and returned; it has one shape and dtype everywhere.

    One collective for a tensor, two for a JSON value.
    """
    _ready()
    if _alone():
        return value
    if isinstance(value, torch.Tensor):
        dist.broadcast(value, src)
        return value
    data = _to_bytes(value if dist.get_rank() == src else None, "broadcast")
    size = torch.tensor([data.numel()], device=data.device)
    dist.broadcast(size, src)
    if dist.get_rank() != src:
        data = torch.zeros(int(size), dtype=torch.uint8, device=data.device)
    dist.broadcast(data, src)
    return _from_bytes(data)


def all_reduce(value: Any, op: str = "sum") -> Any:
    """Sum, mean, max or min over all ranks, on every rank. Tensors: a new one. Numbers: a Python number (float64)."""
    one_of("op", op, _REDUCE)
    _ready()
    number = not isinstance(value, torch.Tensor)
    if number and (isinstance(value, bool) or not isinstance(value, int | float)):
        what = f"all_reduce takes a tensor or a number, not {type(value).__name__}."
        raise UsageError(what, fix=["all_gather takes any JSON"])
    if _alone():
        return value if number else value.clone()
    result = torch.tensor(value, dtype=torch.float64, device=_wire()) if number else value.detach().clone()
    how = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    dist.all_reduce(result, how)
    if op == "mean":
        # Divided here and not by ReduceOp.AVG, which gloo only has since lately and not for every dtype.
        result = result / dist.get_world_size()
    if not number:
        return result
    answer = float(result)
    return int(answer) if isinstance(value, int) and op != "mean" and abs(answer) < 2**53 else answer


def reduce(value: Any, op: str = "sum", dst: int = 0) -> Any:
    """As `all_reduce`, but the result is only meant for `dst`; the other ranks get None."""
    result = all_reduce(value, op)
    return result if here().rank == dst else None


def all_gather(value: Any) -> list[Any]:
    """Every rank's value, in rank order, on every rank. Tensors: same shape and dtype everywhere."""
    _ready()
    if _alone():
        return [value]
    if isinstance(value, torch.Tensor):
        _same_shape(value, "all_gather")
        parts = [torch.empty_like(value) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, value.contiguous())
        return parts
    return [_from_bytes(part) for part in _gather_bytes(_to_bytes(value, "all_gather"))]


def all_gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Every rank's list of integers, in rank order, on every rank: one collective. As many integers on every rank."""
    mine = torch.tensor(values, dtype=torch.int64, device=_wire())
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    every: list[list[int]] = torch.stack(parts).tolist()
    return every


def gather(value: Any, dst: int = 0) -> list[Any] | None:
    """Every rank's value, in rank order, on `dst`; None elsewhere."""
    values = all_gather(value)
    return values if here().rank == dst else None


def scatter(values: Sequence[Any] | None, src: int = 0) -> Any:
    """Item r of `src`'s list on rank r. JSON values only; the other ranks pass None."""
    _ready()
    if _alone():
        if values is None or len(values) != 1:
            raise UsageError("scatter in one process takes a list of one value.", fix=["evener.comm.scatter([value])"])
        return values[0]
    items = broadcast(list(values) if values is not None else None, src)
    if not isinstance(items, list) or len(items) != dist.get_world_size():
        given = "nothing" if items is None else f"{len(items)} values"
        what = f"scatter needs one value per rank ({dist.get_world_size()}); rank {src} gave {given}."
        raise UsageError(what, fix=[f"pass a list of {dist.get_world_size()} values on rank {src}"])
    return items[dist.get_rank()]


def barrier() -> None:
    """Return when every rank has called it."""
    _ready()
    if not _alone():
        dist.all_reduce(torch.zeros(1, device=_wire()))


def _same_shape(value: torch.Tensor, what: str) -> None:
    """A mismatch of shapes aborts the process natively in gloo, without a Python error: compare them first."""
    shapes = [_from_bytes(part) for part in _gather_bytes(_to_bytes([list(value.shape), str(value.dtype)], what))]
    if any(shape != shapes[0] for shape in shapes):
        what = f"{what}: the ranks gave tensors of different shapes or dtypes."
        evidence = [f"rank {rank}: {shape} {dtype}" for rank, (shape, dtype) in enumerate(shapes)]
        raise CollectiveError(what, evidence=evidence, fix=["pad to one shape, or gather lists (they travel as JSON)"])
