"""The private parts of torch that tracing stands on, all in one place, each tried out before it is relied on.

What is used and is no public promise of torch: fake tensors (`torch._subclasses`), the fake process group
(`torch.testing._internal.distributed`), the identity swap of tensors (`torch._C._swap_tensor_impl`), the autograd node
in work and its sequence number, `UntypedStorage.resize_` as FSDP's way to free. `check()` runs each on a small case
(0.1 s) and returns what does not work with this torch; the tests run it on every version. Where fake tensors work and
a lesser part does not, planning goes on without it and says so; where they do not, planning is refused.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from evener.errors import EvenerError

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = ["DATA_DEPENDENT", "FakeTensor", "TorchDispatchMode"]


def fake_mode() -> FakeTensorMode:
    """Tensors made inside have shape, strides, dtype and a storage of the right size, and no memory. Real tensors
    that meet them (a closure's class weights) are taken for fake ones."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def faked(tensor: torch.Tensor) -> None:
    """Exchange a tensor (a parameter, a buffer, an optimizer's state; real or on meta) for a fake one on the CPU, under
    the active fake mode. The object stays the same, so modules, optimizers and closures that hold it keep holding it.
    """
    plain = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    new: Any = torch.nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain
    old: Any = tensor
    old.grad = None
    # torch.utils.swap_tensors would refuse, because the fake mode keeps weak references to its tensors.
    old.__class__, new.__class__ = new.__class__, old.__class__
    old.__dict__, new.__dict__ = {**old.__dict__, **new.__dict__}, {}
    torch._C._swap_tensor_impl(old, new)


@contextlib.contextmanager
def exchanged(owner: Any, name: str, new: Any) -> Iterator[None]:
    """`owner.name` is `new` for a while."""
    old = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, old)


def outside(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, on real tensors also while a mode is active."""

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return call(*args, **kwargs)

    return wrapped


@contextlib.contextmanager
def one_rank_of(world_size: int) -> Iterator[None]:
    """Rank 0 of so many, in a process group that moves nothing. For one process that has none.

    Device meshes are made outside of fake mode, because they read their own ranks.
    """
    import torch.distributed.device_mesh as meshes
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

    if world_size == 1:
        yield
        return
    store = torch._C._distributed_c10d.HashStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=world_size)
    try:
        mesh = exchanged(meshes, "init_device_mesh", outside(meshes.init_device_mesh))
        with mesh, exchanged(dist, "new_group", outside(dist.new_group)):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def models_stay() -> Iterator[None]:
    """`Module.to(device)` does nothing: fake parameters are where they belong, and cannot be moved."""
    with exchanged(torch.nn.Module, "to", lambda self, *args, **kwargs: self):
        yield


@contextlib.contextmanager
def resizes_seen(saw: Callable[[Any, int], None]) -> Iterator[None]:
    """`saw(storage, bytes)` for every `UntypedStorage.resize_`: FSDP frees and makes gathered parameters that way,
    beside the dispatcher."""
    resize = torch.UntypedStorage.resize_

    def seen(self: Any, size: int) -> Any:
        result = resize(self, size)
        saw(self, size)
        return result

    with exchanged(torch.UntypedStorage, "resize_", seen):
        yield


def next_node() -> int:
    """The sequence number that the next autograd node of this thread will get."""
    number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
    return number


def node_in_work() -> int | None:
    """The sequence number of the autograd node whose backward runs; None outside of a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def work_done() -> Any:
    """What a collective returns that has nothing left to do, as operators return it."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def is_group(one: Any) -> bool:
    return isinstance(one, torch.ScriptObject) and "ProcessGroup" in str(one._type())


def size_of_group(boxed: Any) -> int:
    from torch._C._distributed_c10d import ProcessGroup

    return int(ProcessGroup.unbox(boxed).size())


# ------------------------------------------------------------------------------------------------ the self-test


@functools.cache
def check() -> dict[str, str]:
    """{part: what is wrong with it}; empty where everything works with this torch. Nothing is left behind."""
    wrong: dict[str, str] = {}
    tests = {"fake tensors": _fakes, "module names in the backward": _nodes, "resized storage": _sizes}
    if not dist.is_initialized():
        tests["the fake process group"] = _ranks
    for name, test in tests.items():
        try:
            test()
        except Exception as error:  # whatever another torch does
            wrong[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return wrong


def refuse_if_broken(wrong: dict[str, str], world_size: int) -> list[str]:
    """What planning goes on without, in words.

    Raises:
        EvenerError: what is broken is needed.
    """
    needed = {"fake tensors", "resized storage", *(["the fake process group"] if world_size > 1 else [])}
    broken = sorted(needed & set(wrong))
    if broken:
        raise EvenerError(
            f"planning needs a private part of torch that does not work in {torch.__version__}: {', '.join(broken)}.",
            evidence=[wrong[name] for name in broken],
            fix=["plan with the torch that evener was developed on (2.13)", "the run itself does not need it"],
        )
    return [f"{name} could not be used with torch {torch.__version__}: {why}" for name, why in wrong.items()]


def _fakes() -> None:
    layer = torch.nn.Linear(3, 2)
    before = layer.weight
    with fake_mode():
        for one in (layer.weight, layer.bias):
            faked(one)
        output = layer(torch.empty(5, 3))
        died: list[int] = []
        watch = weakref.ref(output.untyped_storage(), lambda _: died.append(1))
        output.sum().backward()
        assert layer.weight is before and before.grad is not None, "a swapped parameter got no gradient"
        assert output.untyped_storage().nbytes() == 40, "a fake storage has another size"
        assert watch() is not None
        del output
        assert died, "a storage did not die with its tensor"
        scale = torch.empty(2).sum()
        try:
            scale.item()
        except DATA_DEPENDENT:
            return
        raise AssertionError("a value that does not exist was read")


def _nodes() -> None:
    seen: list[int | None] = []
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True)
        start = next_node()
        y = x * 2
        y.register_hook(lambda gradient: seen.append(node_in_work()))
        y.sum().backward()
    assert y.grad_fn is not None and y.grad_fn._sequence_nr() == start, "sequence numbers"
    assert seen and node_in_work() is None


def _sizes() -> None:
    seen: list[int] = []
    with resizes_seen(lambda storage, size: seen.append(size)), fake_mode():
        tensor = torch.empty(8)
        tensor.untyped_storage().resize_(0)
        assert tensor.untyped_storage().nbytes() == 0
        tensor.untyped_storage().resize_(32)
    assert seen == [0, 32]


def _ranks() -> None:
    with one_rank_of(2):
        assert dist.get_world_size() == 2 and work_done() is not None
