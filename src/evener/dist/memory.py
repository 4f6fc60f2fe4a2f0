"""`evener.memory()`: what this process holds, what others hold, what is free; a limit, a release, a snapshot.

Figures are this process's own devices; nothing is communicated. What cannot be known is None, and shown as unknown.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch

from evener.errors import UsageError
from evener.gpus import look_at_gpus
from evener.gpus.look import describe
from evener.gpus.look import size as in_words
from evener.gpus.pick import parse_size

_SHOWN = 8  # tensors of what is still held


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on one device; None: not known.

    Attributes:
        allocated: In tensors of this process. On the CPU: resident, whatever holds it (RSS).
        reserved: Held by torch's allocator, tensors included. On the CPU None.
        peak: The most that was allocated at once since the process began (or the peak was reset).
        free, total: Of the device, after all processes; on the CPU what can be had without swapping.
        others: Who else holds memory there, in words; None where that cannot be seen.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int | None
    peak_bytes: int | None
    free_bytes: int | None
    total_bytes: int | None
    others: tuple[str, ...] | None = None

    def __str__(self) -> str:
        named = ("allocated", "reserved", "peak", "free", "total")
        words = [f"{name} {in_words(getattr(self, f'{name}_bytes'))}" for name in named]
        return "\n".join([f"{self.device}: {', '.join(words)}", *(f"  also there: {who}" for who in self.others or ())])


@dataclass(frozen=True)
class Memory:
    """By device, and after `release=True` what was freed and what is still held. Printing it shows a table."""

    devices: tuple[DeviceMemory, ...]
    freed_bytes: int | None = None
    held: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [str(one) for one in self.devices]
        if self.freed_bytes is not None:
            lines.append(
                f"freed {in_words(self.freed_bytes)}; still held by tensors:" + ("" if self.held else " nothing")
            )
        return "\n".join([*lines, *(f"  {one}" for one in self.held)])


def memory(
    *, limit: str | int | None = None, release: bool = False, snapshot: str | os.PathLike[str] | None = None
) -> Memory:
    """What memory there is and who holds it: the CPU's, and that of every GPU that this process has used.

    Args:
        limit: This process may allocate no more on its current GPU: bytes, "20GB", "20GiB". More is an out-of-memory
            error, so a shared GPU stays shared, and a small one can be tried out on a large one.
        release: Free what nobody holds (collect cycles, give caches back), and print how much that was, what is still
            held and by whom.
        snapshot: A file for PyTorch's memory viewer (pytorch.org/memory_viz): every block and where it was allocated,
            recorded from the first call on; from then on also written at every out-of-memory error, as
            <name>-oom<suffix>. On CUDA only.

    Raises:
        UsageError: a limit or a snapshot without a GPU, or a size that is none.
    """
    for word, given in (("limit", limit), ("snapshot", snapshot)):
        if given is not None and not torch.cuda.is_available():
            fix = ["leave it out", *(["ulimit -v limits a process's memory on the host"] if word == "limit" else [])]
            raise UsageError(f"memory({word}={given!r}) is for CUDA, and there is no GPU here.", fix=fix)
    if limit is not None:
        _limit(limit)
    if snapshot is not None:
        _record(Path(snapshot))
    if not release:
        return Memory(tuple(_devices()))
    before = _mine()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    answer = Memory(tuple(_devices()), max(0, before - _mine()), tuple(_holders()))
    sys.stdout.write(f"{answer}\n")
    return answer


def _mine() -> int:
    """Bytes of this process: resident on the host, and reserved on the GPUs that it has used."""
    rss: int = psutil.Process().memory_info().rss
    used = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return rss + sum(torch.cuda.memory_reserved(slot) for slot in used)


def _devices() -> Iterator[DeviceMemory]:
    host, rss = psutil.virtual_memory(), psutil.Process().memory_info().rss
    yield DeviceMemory("cpu", rss, None, _host_peak(rss), host.available, host.total)
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return  # asking CUDA would make a context, which takes 300 MiB and more
    seen = {gpu.uuid: gpu for gpu in look_at_gpus(os.environ).gpus}
    for slot in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(slot)
        gpu = seen.get(f"GPU-{torch.cuda.get_device_properties(slot).uuid}")
        listed = None if gpu is None or gpu.processes is None else gpu.processes
        others = None if listed is None else tuple(describe(one) for one in listed if one.pid != os.getpid())
        allocated, reserved = torch.cuda.memory_allocated(slot), torch.cuda.memory_reserved(slot)
        peak = torch.cuda.max_memory_allocated(slot)
        yield DeviceMemory(f"cuda:{slot}", allocated, reserved, peak, free, total, others)


def _host_peak(now: int) -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(now, most if sys.platform == "darwin" else 1024 * most)  # the kernel's own account is a little late


def _limit(limit: str | int) -> None:
    total = torch.cuda.mem_get_info()[1]
    size = parse_size(limit, "memory(limit=)") if isinstance(limit, str) else limit
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size <= total:
        fix = [f"more than 0, at most the GPU's {in_words(total)}"]
        raise UsageError(f"memory(limit={limit!r}): not a size that this GPU has.", fix=fix)
    torch.cuda.set_per_process_memory_fraction(size / total)


def _record(path: Path) -> None:
    """Start recording where that has not begun; write what there is. torch's own recorder does both."""
    recorder: Any = torch.cuda.memory
    native: Any = torch._C
    if not recorder._snapshot()["device_traces"] or not any(recorder._snapshot()["device_traces"]):
        recorder._record_memory_history(max_entries=100_000)
        at_oom = str(path.with_name(f"{path.stem}-oom{path.suffix}"))
        native._cuda_attach_out_of_memory_observer(lambda *_: recorder._dump_snapshot(at_oom))
    recorder._dump_snapshot(str(path))


def _holders() -> Iterator[str]:
    """The largest live tensors, one line for each storage, with the names that hold them."""
    held: dict[int, list[torch.Tensor]] = {}  # by storage: views hold it as well
    gradient_of: dict[int, torch.Tensor] = {}
    for one in gc.get_objects():
        # type(), not isinstance(): proxies and lazy modules answer that by doing something.
        if issubclass(type(one), torch.Tensor) and type(one) is not torch._subclasses.FakeTensor and not one.is_meta:
            with suppress(NotImplementedError, RuntimeError):  # sparse ones and wrappers have no storage of their own
                held.setdefault(one.untyped_storage().data_ptr(), []).append(one)
            if one.is_leaf and one.grad is not None:
                gradient_of[id(one.grad)] = one
    held.pop(0, None)  # empty ones
    sizes = {where: tensors[0].untyped_storage().nbytes() for where, tensors in held.items()}
    for where in sorted(sizes, key=lambda one: -sizes[one])[:_SHOWN]:
        names = [name for one in held[where] for name in _names(one)]
        names += [
            f"grad of {name}" for one in held[where] if id(one) in gradient_of for name in _names(gradient_of[id(one)])
        ]
        one = held[where][0]
        shape, kind = "x".join(map(str, one.shape)) or "one number", str(one.dtype).removeprefix("torch.")
        who = ", ".join(list(dict.fromkeys(names))[:3]) or "nobody that Python knows (a graph, or native code)"
        yield f"{in_words(sizes[where])} on {one.device}, {shape} {kind}: {who}"


def _names(tensor: torch.Tensor) -> list[str]:
    """`weight of a Linear`, `exp_avg of an optimizer's state`, `loss in train (train.py:12)`, `kept of __main__`."""
    names, frame = [], sys._getframe(1)
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "<module>":
            place = f"{frame.f_code.co_name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"
            names += [f"{name} in {place}" for name, value in frame.f_locals.items() if value is tensor]
    for holder in gc.get_referrers(tensor):
        if type(holder) in (list, tuple):
            names += [_owner(one, holder) for one in gc.get_referrers(holder)]
        else:
            names.append(_owner(holder, tensor))
    return [name for name in names if name]


def _owner(holder: Any, value: Any, depth: int = 3) -> str:
    """The name of `value` in a dict or an object, and whose that is; "" where nothing with a name has it."""
    inside = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    key = next((key for key, one in inside.items() if one is value), None) if isinstance(inside, dict) else None
    if key is None:  # it is a key itself, or not there by name
        return ""
    if not isinstance(holder, dict):
        return f"{key} of a {type(holder).__name__}"
    if "__builtins__" in holder:
        return f"{key} of {holder.get('__name__')}"
    for one in gc.get_referrers(holder) if depth else ():
        if getattr(one, "__dict__", None) is holder:
            return f"{key} of a {type(one).__name__}"
        above = _owner(one, holder, depth - 1)  # a module's _parameters, an optimizer's state
        if above and isinstance(key, str):
            return f"{key} of {above.partition(' of ')[2] if above.startswith('_') else above}"
        if above:
            return above
    return ""
