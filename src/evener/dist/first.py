"""`with evener.first():` one process of a node at a time, the first one alone: downloads, caches, unpacking."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def first(name: str = "") -> Iterator[None]:
    """One process of this machine runs the block while the others wait; they run it one after another when it is done.

    The first one downloads; the others find the cache. A file lock does it (released by the kernel when a process
    dies), so it works before any process group and is not a collective: a rank that never comes blocks nobody, and an
    exception inside lets the next process try.

    Args:
        name: Processes with the same name exclude each other; by default those of this script, run by this user.
    """
    if sys.platform == "win32":  # one process there: nothing to order
        yield
        return
    import fcntl

    key = hashlib.sha256((name or os.path.abspath(sys.argv[0])).encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"evener-first-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / key, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
