"""Processes of this job, and only of this job: ties between parent and child, and an orderly end.

Nothing is ever looked up by name: what is signalled is a descendant of the process that asks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

import psutil  # type: ignore[import-untyped]

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process instead of process 1 (Linux).

    So that they can still be found and ended: a data worker whose rank was killed, a rank whose agent was.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tied_to_parent(signum: int) -> Callable[[], None]:
    """A function for the child between fork and exec: it gets `signum` when the thread that started it ends (Linux).

    And it is deaf to USR1 and USR2, which a scheduler sends to every process of a job: they would end torch's agent,
    and with it the ranks that want to save. The shim makes the ranks hear again.
    """
    import ctypes

    # Loaded here, because a child between fork and exec should do as little as possible.
    libc, parent = ctypes.CDLL(None) if sys.platform == "linux" else None, os.getpid()

    def tie() -> None:
        for one in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(one, signal.SIG_IGN)
        if libc is not None:
            libc.prctl(PR_SET_PDEATHSIG, signum, 0, 0, 0)
            if os.getppid() != parent:  # it died before the call
                os._exit(1)

    return tie


def descendants() -> list[psutil.Process]:
    """Live descendants of this process, children before grandchildren; zombies are not alive."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_child(pid: int, parent: int) -> bool:
    """Whether `pid` is, at this moment, a child of `parent`: a number read from a file may have been reused."""
    try:
        return bool(psutil.Process(pid).ppid() == parent)
    except psutil.NoSuchProcess:
        return False


def send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
