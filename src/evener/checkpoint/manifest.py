"""The manifest of a checkpoint: what every file must be, what it is about, and the states without their tensors."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from evener.checkpoint.problems import some
from evener.checkpoint.tensors import Record, opened, side_by_side
from evener.errors import CheckpointError

FORMAT, VERSION = "evener checkpoint", 1
MANIFEST = "manifest.json"
OURS = re.compile(r"manifest\.json|tensors-[0-9]{5,}\.safetensors")
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')


def seal(about: Mapping[str, Any], files: Mapping[str, Record], states: Any) -> bytes:
    """The text. It begins with the hash of its own rest, so that a changed bit anywhere in it is noticed."""
    listed = {name: record._asdict() for name, record in files.items()}
    body = {"format": FORMAT, "version": VERSION, "about": dict(about), "files": listed, "states": states}
    rest = json.dumps(body, separators=(",", ":")).encode()[1:]
    return b'{"sha256": "' + hashlib.sha256(rest).hexdigest().encode() + b'",\n' + rest


def check(path: Path) -> dict[str, Any]:
    """Compare every file with the manifest; return the manifest. Changes nothing. Raises CheckpointError as `read`."""
    manifest = read_manifest(path)
    side_by_side([partial(_check_file, path, *item) for item in manifest["files"].items()], len(manifest["files"]) > 1)
    return manifest


@contextlib.contextmanager
def _regular(path: Path) -> Iterator[io.BufferedReader]:
    """A regular file, to be read: no link is followed, and a pipe does not make us wait."""
    with contextlib.ExitStack() as stack:
        try:
            descriptor = stack.enter_context(opened(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing: the checkpoint is torn, or none.") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be opened: {error.strerror} (links are not followed).") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path} is not a regular file.")
        yield stack.enter_context(open(descriptor, "rb", closefd=False))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest alone, its own hash checked; no other file is opened. Raises CheckpointError as `check`."""
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    where = path / MANIFEST
    with _regular(where) as file:
        data = file.read()
    seal = _SEAL.match(data)
    if seal is None:
        raise CheckpointError(f"{where} was not written by evener, or its first line is damaged.")
    if hashlib.sha256(data[seal.end() :]).hexdigest().encode() != seal[1]:
        raise CheckpointError(f"{where} is corrupt: its sha256 differs from the one in its first line.")
    try:
        manifest = json.loads(b"{" + data[seal.end() :])
        known = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
        files = {str(name): Record(int(one["bytes"]), str(one["sha256"])) for name, one in manifest["files"].items()}
        about, states = manifest["about"], manifest["states"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CheckpointError(f"{where} is not a manifest that evener writes.") from None
    if not known:
        found = f"{manifest['format']!r} {manifest['version']!r}"
        fix = ["use the version of evener that wrote it, or a later one"]
        raise CheckpointError(f"{where} is of format {found}; this evener reads {FORMAT!r} {VERSION}.", fix=fix)
    bad = [name for name in files if not OURS.fullmatch(name) or name == MANIFEST]
    if bad:
        raise CheckpointError(f"{where} names files that no checkpoint has: {some(map(repr, bad))}.")
    return {"about": about, "states": states, "files": files}


def _check_file(path: Path, name: str, wanted: Record) -> None:
    with _regular(path / name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != wanted.bytes:
            raise CheckpointError(f"{path / name} has {size:,} bytes, the manifest says {wanted.bytes:,}.")
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wanted.sha256:
        said = f"its sha256 is {found[:16]}..., the manifest says {wanted.sha256[:16]}..."
        raise CheckpointError(f"{path / name} is corrupt: {said}")
