"""Safetensors files: written here as a stream, read by the library.

The library's writer wants every tensor of a file on the host at once, does not sync and returns no hash. This one holds
one tensor at a time (GPU tensors are copied one by one), hashes while the disk works, and syncs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from evener.errors import CheckpointError

# The dtypes that every reader of safetensors since 0.4 knows, and complex64.
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
CREATE = os.O_CREAT | os.O_EXCL | os.O_RDWR  # never opens what is there already
_PIECE = 1 << 26  # bytes of one write
_WORTH = 1 << 20  # bytes whose hash is worth a thread


class Record(NamedTuple):
    """What a file must be when it is read again."""

    bytes: int
    sha256: str


def split(tensors: Mapping[str, torch.Tensor], limit: int) -> list[list[str]]:
    """The names, cut into files of at most `limit` bytes each (a larger tensor has a file to itself).

    Wide dtypes come first, so that every tensor starts at a multiple of its item size and can be mapped.
    """
    files: list[list[str]] = []
    room = 0
    for name in sorted(tensors, key=lambda name: -tensors[name].element_size()):
        if not files or tensors[name].nbytes > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= tensors[name].nbytes
    return files


def file_pieces(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> Iterator[bytes | memoryview]:
    """A safetensors file as pieces to write one after the other. `names` are sorted as `split` sorts them."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % 64)  # the data starts at a multiple of 64
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of `path`, for as long as needed; no link is followed."""
    descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def write_pieces(descriptor: int, pieces: Iterable[bytes | memoryview]) -> Record:
    """Write all of them and sync. Does not close the descriptor. Raises OSError as the disk does."""
    total, digest = 0, hashlib.sha256()
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            part, rest = rest[:_PIECE], rest[_PIECE:]
            total += len(part)
            side_by_side([partial(digest.update, part), partial(_write_all, descriptor, part)], len(part) > _WORTH)
    os.fsync(descriptor)
    return Record(total, digest.hexdigest())


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]


def side_by_side(actions: Iterable[Callable[[], None]], threads: bool) -> None:
    """Do all of them, in at most four threads or one after the other; the first error is raised when all have ended.

    Not an executor: those take no work once Python begins to end, which is when a last checkpoint may be written.
    """
    if not threads:
        for action in actions:
            action()
        return
    errors: list[BaseException] = []
    waiting = deque(actions)

    def work() -> None:
        while waiting and not errors:
            try:
                waiting.popleft()()
            except IndexError:  # another thread was faster
                return
            except BaseException as error:
                errors.append(error)

    others = [threading.Thread(target=work, name="evener-file") for _ in range(min(4, len(waiting)) - 1)]
    for thread in others:
        thread.start()
    work()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]


def open_file(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file's tensors, mapped: nothing is read before it is used; the file never changes through them."""
    try:
        with safe_open(str(path), "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file.", evidence=[str(error)]) from None
