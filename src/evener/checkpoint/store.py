"""One checkpoint: a directory that is there whole or not at all.

    update-500/manifest.json               format, files with size and sha256, about, the states without their tensors
    update-500/tensors-00001.safetensors   at most 2 GiB each

`.update-500.<8 hex digits>.tmp` is one being written, `.old` an earlier one stepping aside for it. The writer holds a
lock on the manifest in `.tmp`, which the kernel drops when it dies: that is how `recover` tells a leftover from work in
progress. Nothing here communicates.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from evener.checkpoint.encode import decode, encode
from evener.checkpoint.manifest import MANIFEST, OURS, check, seal
from evener.checkpoint.problems import some, unwritten
from evener.checkpoint.tensors import CREATE, Record, file_pieces, open_file, opened, split, write_pieces
from evener.errors import CheckpointError

_LEFTOVER = re.compile(r"\.(.+)\.([0-9a-f]{8})\.(tmp|old)")
_FILE_BYTES = 2 << 30


def write(path: str | os.PathLike[str], states: Mapping[str, Any], *, about: Mapping[str, Any]) -> None:
    """Write `states` as the checkpoint `path`, durably. Called on one rank.

    Whatever happens meanwhile (an error, a kill, a power cut), `path` is afterwards the earlier checkpoint or the new
    one, whole; between two renames it can be missing until `recover` has put the earlier one back. `states` (see
    `encode`) may not change until this returns; `about`: JSON values, readable without the tensors.

    Raises:
        CheckpointError: a state that cannot be held, a disk that is full or refuses, or `path` is something else.
    """
    put(path, *encoded(states, about), about)


def encoded(states: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[Any, dict[str, torch.Tensor]]:
    """(JSON tree, tensors by name) of what `write` is given; the tensors are the live ones. Raises as `write`."""
    try:
        json.dumps(about)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"about= of a checkpoint is not JSON: {error}.") from None
    if not all(isinstance(name, str) and name and not name.startswith("$") for name in states):
        raise CheckpointError(f"States have names: strings without a leading $, not {some(map(repr, states))}.")
    return encode(dict(states))


def put(path: str | os.PathLike[str], tree: Any, tensors: Mapping[str, torch.Tensor], about: Mapping[str, Any]) -> None:
    """What `write` does once the states are encoded; any thread of one rank."""
    path = Path(os.path.abspath(path))
    token = secrets.token_hex(4)
    new, aside = (path.with_name(f".{path.name}.{token}.{kind}") for kind in ("tmp", "old"))
    needed = sum(tensor.nbytes for tensor in tensors.values()) + (1 << 16)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        _refuse_foreign(path)
        try:
            new.mkdir()
            with opened(new / MANIFEST, CREATE) as manifest:
                _lock(manifest)
                files: dict[str, Record] = {}
                for number, names in enumerate(split(tensors, _FILE_BYTES), 1):
                    name = f"tensors-{number:05d}.safetensors"
                    with opened(new / name, CREATE) as file:
                        files[name] = write_pieces(file, file_pieces(tensors, names))
                write_pieces(manifest, [seal(about, files, tree)])
                sync_directory(new)
                check(new)
                _take_place(new, path, aside)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise unwritten(path, error, needed) from error


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(states, about) of a checkpoint, after every byte of it was checked. Any rank alone.

    Tensors are on the CPU and mapped from the files: copy what is kept, and nothing is copied twice.

    Raises:
        CheckpointError: nothing there, torn, corrupt, foreign, or of a later format; it names the file.
    """
    path = Path(path)
    manifest = check(path)
    tensors: dict[str, torch.Tensor] = {}
    for name in manifest["files"]:
        for key, tensor in open_file(path / name).items():
            if key in tensors:
                raise CheckpointError(f"{path / name} holds {key}, which another file holds too.")
            tensors[key] = tensor
    states = decode(manifest["states"], tensors)
    if not isinstance(states, dict):
        raise CheckpointError(f"{path / MANIFEST} holds no states.")
    return states, manifest["about"]


def recover(path: Path) -> None:
    """Finish what killed writers of `path` left: put an earlier checkpoint back, remove what was never completed.

    One rank alone. What a living writer holds is left to it.
    """
    for entry in list(path.parent.iterdir()):
        match = _LEFTOVER.fullmatch(entry.name)
        if match is None or match[1] != path.name or _alive(entry.with_suffix(".tmp")):
            continue
        if entry.suffix == ".old" and not os.path.lexists(path):
            os.rename(entry, path)
            sync_directory(path.parent)
        else:
            shutil.rmtree(entry, ignore_errors=True)


def leftovers(folder: Path) -> set[str]:
    """Names of checkpoints in `folder` whose writers left something behind, or are writing now."""
    matches = (_LEFTOVER.fullmatch(entry.name) for entry in folder.iterdir())
    return {match[1] for match in matches if match is not None}


def remove(path: Path) -> None:
    """Remove a checkpoint: first its name, so that a kill in between leaves no torn one."""
    gone = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    os.rename(path, gone)
    shutil.rmtree(gone)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable, where the file system can; Windows opens no directories."""
    with contextlib.suppress(PermissionError), opened(path.resolve(), os.O_RDONLY) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
                raise


def _take_place(new: Path, path: Path, aside: Path) -> None:
    stepped = os.path.lexists(path)
    if stepped:
        os.rename(path, aside)
    try:
        os.rename(new, path)
    except BaseException:
        if stepped:
            os.rename(aside, path)
        raise
    sync_directory(path.parent)


def _refuse_foreign(path: Path) -> None:
    """Saving over an earlier checkpoint removes it: make sure that nothing else is removed."""
    if not os.path.lexists(path):
        return
    others = [path.name]
    if path.is_dir() and not path.is_symlink():
        others = sorted(name for name in os.listdir(path) if not OURS.fullmatch(name))
    if others:
        what = f"{path} is not only a checkpoint: saving there would remove what it holds."
        raise CheckpointError(what, evidence=[f"it holds {some(others)}"], fix=["save to a new name"])


def _lock(descriptor: int) -> bool:
    """True when nobody else holds the lock (or this system has none: then a folder has one writer by agreement)."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):
        return True
    return True


def _alive(new: Path) -> bool:
    try:
        with opened(new / MANIFEST, os.O_RDWR) as manifest:
            return not _lock(manifest)
    except OSError:
        return False
