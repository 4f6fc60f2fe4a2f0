"""What the operating system's refusals mean for checkpoints, and how many names are shown."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from evener.errors import CheckpointError


def some(names: Iterable[object], most: int = 5) -> str:
    """The first few of many names, and how many more there are."""
    every = [str(name) for name in names]
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"


def unwritten(path: Path, error: OSError, needed: int) -> CheckpointError:
    """Why `path` could not be written. Called after what was begun is removed: the free space is what a retry finds."""
    reason = error.strerror or str(error)
    evidence = [f"{reason}: {error.filename}" if error.filename else reason]
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = "an unknown number"
        with contextlib.suppress(OSError):
            free = f"{shutil.disk_usage(path.parent).free:,}"
        fix = "free some space, keep fewer checkpoints, or use another disk"
        cause = f"Disk full: {path} needs {needed:,} bytes, {free} are available."
        return CheckpointError(cause, evidence=evidence, fix=[fix])
    fix = "write to a directory that can be written to"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = f"write to a directory that user {os.getuid() if hasattr(os, 'getuid') else ''} may write to"
    return CheckpointError(f"{path} could not be written.", evidence=evidence, fix=[fix])
