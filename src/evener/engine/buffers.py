"""Buffers that the forward changes (BatchNorm's running statistics): one value per update, whatever the cut.

Every piece starts from the update's initial buffers; afterwards a float buffer is the row-weighted mean over pieces
and ranks, an integer one advances once. A skipped update leaves them as they were. Models whose buffers never change
(masks, rotary tables) pay only a check of version counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from evener.dist import comm
from evener.engine.setup import plain_name
from evener.engine.spread import Spread
from evener.errors import ModelError


class Slot:
    """One buffer: where it lives, the object and version last seen, and the value the current update started from."""

    __slots__ = ("name", "owner", "tensor", "value", "version")

    def __init__(self, owner: dict[str, torch.Tensor | None], name: str) -> None:
        self.owner, self.name = owner, name
        self.remember()

    def now(self) -> torch.Tensor:
        tensor = self.owner[self.name]
        if tensor is None:
            raise ModelError(f"buffer {self.name} became None.", fix=["keep a tensor in it, zeros for example"])
        return tensor

    def remember(self) -> None:
        now = self.now()
        self.value = now.detach().clone()
        self.tensor, self.version = now, now._version

    def changed(self) -> bool:
        # Either written in place, or replaced (self.average = 0.9 * self.average + ...).
        now = self.now()
        return now is not self.tensor or now._version != self.version


class Buffers:
    """All buffers of a model, through one update: begin, (after_forward, after_backward) per piece, finish.

    Called on all ranks; `finish` communicates when some buffer changes (one sum, and one gather where there are
    integer ones). Which buffers change is learned in the first update and agreed there.
    """

    def __init__(self, model: torch.nn.Module, *, world_size: int) -> None:
        self.slots: list[Slot] = []
        self.names: list[str] = []
        self.absent: list[tuple[dict[str, torch.Tensor | None], str, str]] = []
        self.changing: set[int] = set()  # positions in slots
        self.unsaved: set[str] = set()  # names of those with persistent=False
        self.first: dict[str, torch.Tensor] = {}  # of these, what those held that began to change in a later update
        for path, module in model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is None:
                    self.absent.append((module._buffers, name, f"{path}.{name}" if path else name))
                    continue
                # Running statistics count as changing even while a layer is frozen: it may be unfrozen later.
                if isinstance(module, torch.nn.modules.batchnorm._NormBase):
                    self.changing.add(len(self.slots))
                self.slots.append(Slot(module._buffers, name))
                self.names.append(plain_name(f"{path}.{name}" if path else name))
                if name in module._non_persistent_buffers_set:
                    self.unsaved.add(self.names[-1])
        self.any = bool(self.slots or self.absent)
        self.world_size = world_size
        self.agree: Callable[[Any], Any] = _union
        self.learning = bool(self.slots)
        self.flats: dict[int, torch.Tensor] = {}
        self.counters: torch.Tensor | None = None
        self.old: tuple[torch.Tensor, torch.Tensor] | None = None
        self.begun = False
        self._use(range(len(self.slots)))  # everything, until the first update shows which ones change

    def _use(self, positions: Iterable[int]) -> None:
        used = [self.slots[i] for i in positions]
        self.floats = [slot for slot in used if slot.value.is_floating_point()]
        self.integers = [slot for slot in used if not slot.value.is_floating_point()]

    def begin(self) -> None:
        self.flats, self.counters, self.old, self.begun = {}, None, None, False
        used = [*self.floats, *self.integers]
        for slot in self.slots:
            if slot.changed():  # by the user between updates, or by loading a state
                slot.remember()
        if used and not self.learning:
            # BatchNorm's kernel writes its statistics without touching the version counter: take them anyway.
            torch._foreach_copy_([slot.value for slot in used], [slot.tensor for slot in used])
            for slot in used:
                slot.version = slot.tensor._version
        self.begun = True

    def left_out(self, saved: Iterable[str]) -> dict[str, torch.Tensor]:
        """Clones of the buffers that change in training and are not among the saved names (persistent=False); before
        the first update, of all that are not: which ones will change is not known yet."""
        names, may_change = set(saved), range(len(self.slots)) if self.learning else sorted(self.changing)
        return {self.names[i]: self.slots[i].now().clone() for i in may_change if self.names[i] not in names}

    def put_back(self, values: Mapping[str, torch.Tensor]) -> None:
        values = {**self.first, **values}
        for name, slot in zip(self.names, self.slots):
            if name in values and not torch.equal(now := slot.now(), value := values[name].to(now.device)):
                now.copy_(value)  # a constant one may be expanded, and could not be written

    def after_forward(self, number: int, rows: int) -> None:
        """Take this piece's values. Here and not after the backward: recomputation would advance them again."""
        if not self.slots:
            return
        for owner, key, name in self.absent:
            if owner[key] is not None:
                what = f"buffer {name} was None when training began and is made in the forward."
                evidence = ["a value that one piece makes cannot be the same for all pieces and ranks"]
                fix = ["register it with its shape: self.register_buffer(name, torch.zeros(...))"]
                raise ModelError(what, evidence=evidence, fix=fix)
        changed = {i for i, slot in enumerate(self.slots) if slot.changed()}
        if not changed <= self.changing:
            if not self.learning and self.world_size > 1:
                what = "buffers that were constant in the first update changed in a later one."
                fix = ["let every buffer that changes in training change from the first update on"]
                raise ModelError(what, evidence=[self.names[i] for i in sorted(changed - self.changing)], fix=fix)
            if not self.learning:
                new = {self.names[i]: self.slots[i].value.clone() for i in changed - self.changing}
                self.first |= {name: value for name, value in new.items() if name in self.unsaved}
            self.changing |= changed
            if not self.learning:
                self._use(sorted(self.changing))
                self.flats = {}
        if self.floats:
            self.flats[number] = _flat([slot.now() for slot in self.floats]) * rows
        if self.integers and self.counters is None:
            self.counters = _flat([slot.now() for slot in self.integers])

    def after_backward(self) -> None:
        """Put the initial values back, for the next piece. Not before: BatchNorm saves its statistics for backward."""
        used = [*self.floats, *self.integers]
        if self.learning:  # not the constant ones: an expanded one cannot be written
            used = [slot for i, slot in enumerate(self.slots) if i in self.changing or slot.changed()]
        if used:
            torch._foreach_copy_([slot.tensor for slot in used], [slot.value for slot in used])
            for slot in used:
                slot.owner[slot.name] = slot.tensor
                slot.version = slot.tensor._version

    def finish(self, spread: Spread, rows: int, nominal: int) -> None:
        """The update's values: the mean over pieces and ranks. `rows`: of the whole global batch, as delivered;
        `nominal`: as the order gave them."""
        if not self.slots:
            return
        if self.learning:
            self.changing = set(self.agree(sorted(self.changing)))
            self._drop_constant()
        if not rows:
            return
        new = old = _flat([slot.value for slot in self.floats])
        if self.floats:
            new = spread.fold(self.flats, nominal, old) / rows
        counters = old_counters = _flat([slot.value for slot in self.integers])
        if self.integers:
            counters = self.counters if self.counters is not None else old_counters
            if self.world_size > 1:
                counters = self._first_rank_with_rows(counters)
        self.old = (old, old_counters)  # before anything is written: from here on `rewind` can undo it
        self._write((new, counters))

    def _drop_constant(self) -> None:
        """End of learning: what did not change on any rank leaves this update's vectors, and later ones."""
        floats, integers = self.floats, self.integers
        self._use(sorted(self.changing))
        self.flats = {number: _keep(flat, floats, self.floats) for number, flat in self.flats.items()}
        if self.counters is not None:
            self.counters = _keep(self.counters, integers, self.integers)
        self.learning = False

    def _first_rank_with_rows(self, values: torch.Tensor) -> torch.Tensor:
        # Every rank with rows has the same counters; one without rows did not advance them.
        flag = torch.full((1,), int(self.counters is not None), device=values.device, dtype=values.dtype)
        mine = torch.cat([flag, values])
        every = torch.empty(self.world_size, mine.numel(), device=mine.device, dtype=mine.dtype)
        dist.all_gather(list(every.unbind(0)), mine)
        return every.index_select(0, every[:, 0].argmax().view(1))[0, 1:]

    def rewind(self) -> None:
        """Back to the values the open update started from: it is computed again."""
        if self.old is not None:
            self._write(self.old)

    def restore(self) -> None:
        """Back to the values the update began with, wherever it failed; nothing where it had not begun."""
        if self.old is not None:
            self.rewind()
        elif self.begun:
            self.after_backward()

    def undo_if(self, found: torch.Tensor) -> None:
        """Back to the initial values where the update is skipped; decided on the device, no host sync."""
        self.begun = False
        if self.old is None:
            return
        now = (_flat([slot.value for slot in slots]) for slots in (self.floats, self.integers))
        self._write([torch.where(found.bool(), old, new) if len(old) else old for old, new in zip(self.old, now)])
        self.old = None

    def _write(self, flats: Iterable[torch.Tensor]) -> None:
        for slots, flat in zip((self.floats, self.integers), flats):
            if not slots:
                continue
            parts = flat.split([slot.value.numel() for slot in slots])
            shaped = [part.view_as(slot.value).to(slot.value.dtype) for part, slot in zip(parts, slots)]
            torch._foreach_copy_([slot.value for slot in slots], shaped)
            torch._foreach_copy_([slot.tensor for slot in slots], shaped)
            for slot in slots:
                slot.owner[slot.name] = slot.tensor
                slot.version = slot.tensor._version


def _union(positions: list[int]) -> list[int]:
    return sorted({position for one in comm.all_gather(positions) for position in one})


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One vector: float32 (float64 where a buffer is), or int64 for integers and flags."""
    if not tensors:
        return torch.zeros(0)
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    if not flat.is_floating_point():
        return flat.to(torch.int64)
    return flat if flat.dtype == torch.float64 else flat.float()


def _keep(flat: torch.Tensor, slots: list[Slot], kept: list[Slot]) -> torch.Tensor:
    parts = dict(zip(map(id, slots), flat.split([slot.value.numel() for slot in slots])))
    return torch.cat([parts[id(slot)] for slot in kept]) if kept else flat[:0]
