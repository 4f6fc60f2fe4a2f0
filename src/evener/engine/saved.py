"""`saved_activations`: what a forward keeps for its backward waits on the host, or is kept in 8 bits.

Autograd hands over every tensor that it saves and asks for it back (its saved-tensor hooks). Left as they are: the
model's parameters and buffers, views and casts of parameters, small tensors, and what has no plain memory. Memory that
several operations save (the input of q, k and v; views of one tensor) is taken once and comes back once, with the
strides it had, so that the backward runs the same kernels: "offload" changes no bit.

"int8" keeps a byte per element and a scale for every 256 of them. It takes floating-point tensors that gradients flow
through; masks, indices and statistics stay whole. An operation that saves its own output (a ReLU, a softmax) does not
say so: that is kept whole until another operation saves it too. Rounding to nearest: equal inputs give equal bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from evener.errors import UsageError

_PLAIN: tuple[type, ...] = (torch.Tensor,)  # a trace has another kind
_SMALL = 1 << 14  # bytes; below, taking a tensor away costs more than it frees
_SPREAD = 4  # a view may take so many times its own size with it
_BLOCK = 256  # elements that share a scale
_AT_ONCE = 1 << 20  # elements that are rounded at once: bounds what the rounding itself needs
_AHEAD = 2  # pieces that are on their way back before they are asked for
# Through these a tensor is still its parameter: in another shape, or as autocast's copy.
_SAME = ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "AsStrided", "ToCopy", "Expand")

Forward = Callable[[], contextlib.AbstractContextManager[Any]]


class Piece:
    """What several saved tensors are views of; back on the device from the first use to the last. `take` gives a flat
    piece of memory somewhere else, whose `back()` is the piece on its device."""

    def __init__(self, flat: torch.Tensor, take: Callable[[torch.Tensor], Any]) -> None:
        self.storage = StorageWeakRef(flat.untyped_storage())  # while this exists, nothing else gets that address
        self.away = take(flat)
        self.flat: torch.Tensor | None = None

    def get(self) -> torch.Tensor:
        if self.flat is None:
            self.flat = self.away.back()
        assert self.flat is not None
        return self.flat


class Cell:
    """What autograd holds instead of a tensor: the tensor, or a piece and which view of it the tensor is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.version = tensor._version

    def leave(self, piece: Piece, start: int) -> Cell:
        assert self.tensor is not None
        self.piece, self.view = piece, (self.tensor.shape, self.tensor.stride(), self.tensor.storage_offset() - start)
        self.tensor = None
        return self

    def get(self) -> torch.Tensor:
        if self.tensor is None:
            return self.piece.get().as_strided(*self.view)
        if self.tensor._version != self.version:  # autograd itself looks only where there are no hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)}, needed by the backward, was modified in place"
            )
        return self.tensor


class Saved:
    """Around a forward: `with saved(): ...`. `what` is "offload" or "int8"; `small` in bytes."""

    def __init__(self, what: str, model: torch.nn.Module, device: torch.device, small: int = _SMALL) -> None:
        self.what, self.model, self.device, self.small = what, model, device, small
        self.take: Callable[[torch.Tensor], Any]
        self.take = Rounded if what == "int8" else Stream(device).take if device.type == "cuda" else OnHost
        self.pieces: WeakValueDictionary[Any, Piece] = WeakValueDictionary()
        self.outputs: WeakValueDictionary[Any, Cell] = WeakValueDictionary()
        self.buffers: set[int] = set()

    def __call__(self) -> contextlib.AbstractContextManager[Any]:
        self.buffers = {buffer.untyped_storage()._cdata for buffer in self.model.buffers()}
        return torch.autograd.graph.saved_tensors_hooks(self.pack, Cell.get)

    def around(self, outer: Forward) -> Forward:
        """`outer` and this as one context."""

        @contextlib.contextmanager
        def both() -> Iterator[None]:
            with outer(), self():
                yield

        return both

    def pack(self, tensor: torch.Tensor) -> Cell:
        cell = Cell(tensor)
        span = self._span(tensor)
        if span is None:
            return cell
        storage = tensor.untyped_storage()
        where = (storage._cdata, tensor.dtype, *span)
        piece = self.pieces.get((where, tensor._version))
        view = (where, tensor.shape, tensor.stride(), tensor.storage_offset())
        if piece is None:
            if self.what == "int8" and not tensor.requires_grad:
                self.outputs[view] = cell  # its own version counter says nothing
                return cell
            flat = tensor.detach().as_strided((span[1],), (1,), span[0])
            piece = self.pieces[where, tensor._version] = Piece(flat, self.take)
        output = self.outputs.pop(view, None)
        if output is not None:
            output.leave(piece, span[0])
        return cell.leave(piece, span[0])

    def _span(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(first element, elements) of the memory to take for this tensor; None for none."""
        nbytes = tensor.nbytes
        if nbytes < self.small or type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
            return None
        if tensor.device.type != self.device.type or tensor.is_conj() or tensor.is_neg() or _of_parameter(tensor):
            return None
        if self.what == "int8" and not _can_be_rounded(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self.buffers:
            return None
        size = tensor.element_size()
        if storage.nbytes() <= _SPREAD * nbytes and storage.nbytes() % size == 0:
            return 0, storage.nbytes() // size
        span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))
        return (int(tensor.storage_offset()), span) if span * size <= _SPREAD * nbytes else None


def _of_parameter(tensor: torch.Tensor) -> bool:
    if isinstance(tensor._base, torch.nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name().removesuffix("0").removesuffix("Backward") in _SAME:
        node = node.next_functions[0][0]
    return isinstance(getattr(node, "variable", None), torch.nn.Parameter)


def _can_be_rounded(tensor: torch.Tensor) -> bool:
    # A cross entropy's gradient is the exponential of a log_softmax: it would magnify the rounding.
    return tensor.is_floating_point() and tensor.element_size() > 1 and "LogSoftmax" not in str(tensor.grad_fn)


class OnHost:
    """A copy in the host's memory; on a CPU it is just a copy."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.host, self.device = flat.to("cpu", copy=True), flat.device

    def back(self) -> torch.Tensor:
        return self.host.to(self.device)


class Rounded:
    """int8 and a scale per block. Off by at most 1/254 of the largest value of its block (1/127 for those that would
    become zero); what is not finite makes its whole block so."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.dtype, self.size = flat.dtype, flat.numel()
        wide = torch.promote_types(flat.dtype, torch.float32)
        self.parts = []
        for part in flat.split(_AT_ONCE):
            blocks = torch.nn.functional.pad(part.to(wide, copy=True), (0, -len(part) % _BLOCK)).view(-1, _BLOCK)
            scale = blocks.abs().amax(1, keepdim=True) / 127
            exact = blocks.div_(scale.clamp_min(torch.finfo(wide).tiny))
            rounded = exact.round()
            # What is not zero stays so: a ReLU's backward looks at nothing else.
            rounded = torch.where(rounded == 0, exact.sign(), rounded)
            self.parts.append((rounded.to(torch.int8), scale))

    def back(self) -> torch.Tensor:
        rounded, scale = self.parts[0]
        flat = torch.empty(self.size, dtype=self.dtype, device=rounded.device)
        for part, (rounded, scale) in zip(flat.split(_AT_ONCE), self.parts):
            part.copy_((rounded * scale).view(-1)[: len(part)])
        return flat


class Stream:
    """CUDA: copies to pinned memory and back on a stream of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.newest = 0
        self.order: WeakValueDictionary[int, Pinned] = WeakValueDictionary()

    def take(self, flat: torch.Tensor) -> Pinned:
        self.newest += 1
        pinned = self.order[self.newest] = Pinned(self, self.newest, flat)
        return pinned


class Pinned:
    def __init__(self, owner: Stream, number: int, flat: torch.Tensor) -> None:
        self.owner, self.number, self.device = owner, number, flat.device
        self.flat: torch.Tensor | None = None
        self.host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        owner.stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(owner.stream):
            self.host.copy_(flat, non_blocking=True)
        flat.record_stream(owner.stream)  # its memory is free for others when it has been read

    def start(self) -> None:
        if self.flat is None:
            with torch.cuda.stream(self.owner.stream):
                self.flat = torch.empty_like(self.host, device=self.device)
                self.flat.copy_(self.host, non_blocking=True)
                self.ready = self.owner.stream.record_event()

    def back(self) -> torch.Tensor:
        for number in range(self.number, self.number - _AHEAD - 1, -1):  # the backward goes the other way
            one = self.owner.order.get(number)
            if one is not None:
                one.start()
        assert self.flat is not None
        here = torch.cuda.current_stream(self.device)
        here.wait_event(self.ready)
        self.flat.record_stream(here)
        return self.flat


def check_saved(what: str, *, strategy: str, exact: bool, compile: bool) -> str:
    """What is done, in words ("" for nothing)."""
    if what == "keep":
        return ""
    for other, wrong, reason in (
        ('strategy="dp"', strategy == "dp", "its replicas run in threads of their own, which it does not reach"),
        ("exact=True", exact and what == "int8", "what is kept is rounded: close to the gradient, not equal"),
        ("compile=True", compile and what == "int8", "a compiled graph decides by itself what it keeps"),
    ):
        if wrong:
            instead = 'strategy="ddp"' if strategy == "dp" else 'saved_activations="offload"'
            raise UsageError(
                f'saved_activations="{what}" with {other}: {reason}.', fix=[instead, "or activation_checkpointing="]
            )
    return "activations wait on the host" if what == "offload" else ""
