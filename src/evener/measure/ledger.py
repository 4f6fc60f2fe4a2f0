"""Which storages live when, and why: a dispatch mode that writes the events of a `Trace` while a step runs.

A storage begins to live when an operation returns a tensor on one that was not known, and ends when Python's last
reference and autograd's are gone: a weak reference on the storage says so. Nothing is estimated here. What a kernel
allocates for itself inside one operation is not seen.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from evener.measure import private
from evener.measure.flops import flops_of
from evener.plan import memory
from evener.plan.values import Alloc, Collective, Event, Free, Op

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_KNOWN = (torch.Tensor, torch.nn.Parameter, private.FakeTensor)
_TORCHS = ("aten", "prims", "profiler", "fsdp", "c10d", "_c10d_functional", "_dtensor", "inductor", "mkldnn", "onednn")
_RNN = torch.ops.aten.mkldnn_rnn_layer.default


class _Life:
    """One storage's life. `category` and `module` may be found out later than its allocation."""

    __slots__ = ("bytes", "category", "id", "module", "phase", "ref")

    def __init__(self, id: int, bytes: int, category: str, module: str, phase: str) -> None:
        self.id, self.bytes, self.category, self.module, self.phase = id, bytes, category, module, phase
        self.ref: Any = None


class Ledger(private.TorchDispatchMode):
    """Enter it inside of a fake mode; `phase` is set by who knows where the step stands.

    names: path of each module of the model, by id.
    scratch: rows of the table of workspaces, for what lives inside of one operation.
    """

    def __init__(self, names: dict[int, str], scratch: Sequence[Mapping[str, Any]] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names = names
        self.scratch = {name: row for row in scratch if "of_result" in row for name in row["ops"]}
        self.phase = "start"
        self.events: list[_Life | Event] = []
        self.outside: list[_Life] = []  # real tensors that the step uses and that lived before
        self.living: dict[int, _Life] = {}  # by the storage's address
        self.count = 0
        self.recent: list[_Life] = []  # of this forward, or of this recomputation
        self.stack: list[str] = []
        self.numbers: list[int] = []  # of autograd nodes, where the module changes, and the module from there on
        self.modules: list[str] = []
        self.suspects: dict[int, Any] = {}  # storages under a weak reference of torch's, which hides their death
        self.foreign: set[str] = set()  # operations of others than torch
        self.additions: list[tuple[int, set[int]]] = []  # where gradients may have met, and what was added

    # ------------------------------------------------------------------------------------------------ where we are

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Everything it hooks into, for the time of the trace."""
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)
        with private.resizes_seen(self._resized), self:
            try:
                yield
            finally:
                before.remove()
                after.remove()

    def _enter(self, module: Any, args: Any) -> None:
        name = self.names.get(id(module))
        if name is None:
            name = self.stack[-1] if self.stack else ""
        if not self.stack and self.phase == "backward":
            self.recent = []  # a block begins to be computed again
        self.stack.append(name)
        self._mark()

    def _leave(self, module: Any, args: Any, output: Any) -> None:
        if self.stack:
            self.stack.pop()
        self._mark()
        if not self.stack and self.phase == "backward":
            self.keep_for_backward()

    def _mark(self) -> None:
        number, name = private.next_node(), self.stack[-1] if self.stack else ""
        if self.numbers and self.numbers[-1] == number:
            self.modules[-1] = name
        else:
            self.numbers.append(number)
            self.modules.append(name)

    def module(self) -> str:
        """The module in work; in a backward the one whose forward made the node in work."""
        if self.stack or self.phase != "backward":
            return self.stack[-1] if self.stack else ""
        number = private.node_in_work()
        if number is None or not self.numbers:
            return ""
        return self.modules[max(0, bisect.bisect_right(self.numbers, number) - 1)]

    def begin(self, phase: str) -> None:
        self.phase = phase
        if phase == "forward":
            self.recent, self.stack = [], []

    def keep_for_backward(self) -> None:
        """A forward is over: what it made and is still alive is kept for the backward."""
        for life in self.recent:
            if life.category == "temporary" and life.ref is not None:
                life.category = "activation"
        self.recent = []

    # ------------------------------------------------------------------------------------------------ storages

    def tag(self, tensor: torch.Tensor, category: str, module: str | None = None) -> None:
        """Say what a tensor's storage is, from its allocation on."""
        life = self.living.get(tensor.untyped_storage()._cdata)
        if life is not None:
            life.category = category
            life.module = life.module if module is None else module

    def _take(self, tensor: torch.Tensor, module: str | None = None) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.living and tensor.device.type != "meta":
            size = storage.nbytes()
            if size:
                self._born(storage, size, "temporary", module)

    def _born(self, storage: Any, size: int, category: str, module: str | None = None) -> None:
        key = storage._cdata
        self.count += 1
        life = _Life(self.count, size, category, self.module() if module is None else module, self.phase)
        life.ref = weakref.ref(storage, lambda _: self._died(key, life))
        self.living[key] = life
        self.events.append(life)
        self.recent.append(life)

    def _died(self, key: int, life: _Life) -> None:
        if life.ref is not None:
            life.ref = None
            if self.living.get(key) is life:
                del self.living[key]
            self.suspects.pop(key, None)
            self.events.append(Free(life.id, self.phase))

    def _resized(self, storage: Any, size: int) -> None:
        life = self.living.get(storage._cdata)
        if life is not None and life.bytes != size:
            life.category = "parameter"
            self._died(storage._cdata, life)
            life = None
        if life is None and size:
            self._born(storage, size, "parameter")

    def weak(self) -> type:
        """StorageWeakRef, whose storages are asked at every operation whether they still live."""
        suspects, living = self.suspects, self.living

        class Watched(StorageWeakRef):
            def __init__(self, storage: Any) -> None:
                super().__init__(storage)  # type: ignore[no-untyped-call]
                if storage._cdata in living:
                    suspects[storage._cdata] = self

        return Watched

    def noting(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """`call`, whose results are tensors that no operation makes."""

        def noted() -> Any:
            result = call()
            for one in _tensors((result,)):
                self._take(one)
            return result

        return noted

    def _outside(self, tensor: torch.Tensor) -> None:
        """A real tensor, or one on another device, that the step meets: it is on the device already."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.living or tensor.device.type == "meta" or not storage.nbytes() or not tensor.ndim:
            return
        self.count += 1
        life = _Life(self.count, storage.nbytes(), "buffer", "", "start")
        life.ref = weakref.ref(storage, lambda _: self._died(key, life))
        self.living[key] = life
        self.outside.append(life)

    # ------------------------------------------------------------------------------------------------ operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for key in [key for key, ref in self.suspects.items() if ref.expired()]:
            self._died(key, self.living[key])
        if func.namespace == "prim":  # a look at a fake tensor's device
            return func(*args, **kwargs)
        for kind in types:
            if kind not in _KNOWN:
                return NotImplemented  # a DTensor: its own operations on plain tensors come by later
        if func.namespace == "c10d":
            return self._collective(func, args)
        inputs = list(_tensors(args))
        if kwargs:
            inputs += _tensors(tuple(kwargs.values()))
        for one in inputs:
            if type(one) is not private.FakeTensor:
                self._outside(one)
        if func.overloadpacket is torch.ops.aten.set_:  # a fake tensor's cache would keep the storage for ever
            with private.exchanged(args[0].fake_mode, "cache_enabled", False):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if func is _RNN:
            result = (*result[:3], torch.empty(_rnn_workspace(args), dtype=torch.uint8))
        outputs = list(_tensors((result,)))
        for one, owner in zip(outputs, self._owners(args, inputs, len(outputs))):
            self._take(one, owner)
        if func.namespace not in _TORCHS:
            self.foreign.add(str(func))
        if not func.is_view and (outputs or (inputs and func.overloadpacket.__name__.endswith("_"))):
            self._op(func, args, kwargs, result, inputs, outputs)
        return result

    def _owners(self, args: Any, inputs: list[Any], number: int) -> list[str | None]:
        """Outside of forward and backward (an optimizer, a norm): whose module results are of, by what they are made
        from; of a list, one by one."""
        if self.stack or self.phase in ("forward", "backward"):
            return [None] * number
        lists = [one for one in args if isinstance(one, list | tuple) and len(one) == number > 1]
        lists = [one for one in lists if all(isinstance(part, torch.Tensor) for part in one)]
        modules: list[str | None] = []
        for sources in zip(*lists[:1]) if lists else [inputs] * number:
            lives = [self.living.get(one.untyped_storage()._cdata) for one in sources]
            found = {life.module for life in lives if life is not None}
            modules.append(found.pop() if len(found) == 1 else "")
        return modules

    def unknown(self, device: str) -> list[str]:
        """What the step ran that allocates unseen, one line each."""
        lines = [f"{name}: what this operation allocates inside is not seen" for name in sorted(self.foreign)]
        if device == "cuda" and any(isinstance(one, Op) and "mkldnn_rnn" in one.name for one in self.events):
            lines.append("cuDNN's recurrent layers: what oneDNN keeps for them was taken")
        return lines

    def _op(self, func: Any, args: Any, kwargs: Any, result: Any, inputs: list[Any], outputs: list[Any]) -> None:
        name, flops = func.overloadpacket.__name__, flops_of(func, args, kwargs, result)
        shape: tuple[int, ...] = ()
        if name in _PRODUCTS:
            left, right = [one for one in inputs if one.ndim > 1][-2:]
            shape = (left.shape[0] if left.ndim == 3 else 1, left.shape[-2], left.shape[-1], right.shape[-1])
        floats = [one.dtype for one in inputs or outputs if one.is_floating_point()]
        dtype = max(floats, key=lambda one: one.itemsize) if floats else (outputs or inputs)[0].dtype
        seen: set[int] = set()
        read = sum(_once(one, seen) for one in inputs)
        written = sum(_once(one, seen) for one in outputs)
        if written == 0 and name.endswith("_"):  # in place; an optimizer's kernels return nothing
            changed = [i for i, one in enumerate(func._schema.arguments) if one.alias_info and one.alias_info.is_write]
            written = sum(_once(one, set()) for i in changed if i < len(args) for one in _tensors((args[i],)))
        if name == "add" and self.phase == "backward" and not self.stack and len(inputs) == 2:
            size = outputs[0].untyped_storage().nbytes()
            lives = [self.living.get(one.untyped_storage()._cdata) for one in inputs]
            self.additions.append((len(self.events), {one.id for one in lives if one and one.bytes == size}))
        if name in self.scratch:
            size = memory.scratch(self.scratch[name], written)
            if size:
                self.count += 1
                self.events.append(Alloc(self.count, size, "temporary", self.module(), self.phase))
                self.events.append(Free(self.count, self.phase))
        self.events.append(Op(str(func), self.phase, flops, read, written, str(dtype).removeprefix("torch."), shape))

    def _collective(self, func: Any, args: Any) -> Any:
        kind = func.overloadpacket.__name__.strip("_").replace("_base", "")
        sides = [list(_tensors((one,))) for one in args[:2]]
        for side in sides:
            for one in side:
                life = self.living.get(one.untyped_storage()._cdata)
                if life is not None and life.category in ("temporary", "activation"):
                    life.category = "communication"
        size = max(sum(one.numel() * one.element_size() for one in side) for side in sides)
        group = next((private.size_of_group(one) for one in args if private.is_group(one)), 1)
        names = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
        if size:
            waits = not _asked_async(func, args)
            self.events.append(Collective(names.get(kind, kind), size, group, self.phase, waits))
        done = private.work_done()
        return (args[0], done) if len(func._schema.returns) == 2 else done

    # ------------------------------------------------------------------------------------------------ the result

    def _accumulate_in_place(self) -> None:
        """Where two gradients meet, autograd adds into one that nobody else holds; of fake ones it makes a third.

        Such an addition is one whose operand of the same size dies at once. The death comes before the birth then.
        """
        events = self.events
        for i, operands in self.additions:
            new, j = events[i - 1], i + 1
            while j < len(events):
                old = events[j]
                if not isinstance(old, Free):
                    break
                if old.id in operands and isinstance(new, _Life):
                    events[i - 1 : j + 1] = [old, new, *events[i:j]]
                    break
                j += 1

    def leave_out(self, before: int) -> int:
        """Forget what lived and died before a position: while an engine is made that is the host's memory, not a
        GPU's. Returns the new position."""
        dead = {one.id for one in self.events[:before] if isinstance(one, Free)}
        kept = [one for one in self.events[:before] if not (isinstance(one, _Life | Free) and one.id in dead)]
        self.events[:before] = kept
        gone = before - len(kept)
        self.additions = [(i - gone, ids) for i, ids in self.additions]
        return len(kept)

    def finished(self, marks: list[int]) -> tuple[tuple[Event, ...], list[int]]:
        """All events in order, and where the given positions are now that what lived before comes first."""
        before = [Alloc(one.id, one.bytes, one.category, one.module, one.phase) for one in self.outside]
        self._accumulate_in_place()
        after: list[Event] = []
        dead: list[Free] = []
        updates: list[int] = []
        for i, one in enumerate([*self.events, None]):
            if not isinstance(one, Free) or i in marks:
                # Deaths at one moment come in some hash table's order: by number they are the same in every trace.
                dead.sort(key=lambda free: free.id)
                after += dead
                dead = []
            updates += [len(before) + len(after)] * marks.count(i)
            if isinstance(one, Free):
                dead.append(one)
            elif isinstance(one, _Life):
                after.append(Alloc(one.id, one.bytes, one.category, one.module, one.phase))
            elif one is not None and updates:  # what is computed before the first update is no part of one
                after.append(one)
        return (*before, *after), updates


def _rnn_workspace(args: Any) -> int:
    """Bytes that oneDNN keeps between a recurrent layer's forward and its backward. No shape function knows them: one
    layer is run on zeros, with at most 2**22 inputs; what is more is taken in proportion."""
    x = args[0]
    rows = max(1, min(x.shape[1], 2**22 // max(1, x.shape[0] * x.shape[2])))

    def zeros(i: int, one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        shape = {0: (x.shape[0], rows, x.shape[2]), 5: (rows, *one.shape[1:]), 6: (rows, *one.shape[1:])}
        return torch.zeros(shape.get(i, one.shape), dtype=one.dtype)

    real = private.outside(lambda: _RNN(*(zeros(i, one) for i, one in enumerate(args))))
    return int(real()[3].numel() * x.shape[1] / rows)


def _tensors(values: Any) -> Iterator[Any]:
    for one in values:
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, list | tuple):
            yield from _tensors(one)


def _once(one: Any, seen: set[int]) -> int:
    key = one.untyped_storage()._cdata
    if key in seen:
        return 0
    seen.add(key)
    size: int = min(one.numel() * one.element_size(), one.untyped_storage().nbytes())
    return size


def _asked_async(func: Any, args: Any) -> bool:
    positions = [i for i, one in enumerate(func._schema.arguments) if one.name == "async_op"]
    return bool(positions) and (positions[0] >= len(args) or bool(args[positions[0]]))
