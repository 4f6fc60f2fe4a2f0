"""What the data room knows about processes: how workers start, end with their rank, and are watched."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C import _error_if_any_worker_fails, _remove_worker_pids, _set_worker_pids

from evener.limits import usable_cpus

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Start:
    """Runs first in each worker: it will end with its rank, even out of a stuck row; then the user's worker_init_fn.

    A batch system that stops a job sends TERM to its workers too, and the rank still wants rows for the update in work:
    they leave that request to the rank, which ends them by KILL.

    The kernel's parent-death signal is sent when the *thread* that started the worker ends, and under a fork server the
    parent is that server. `by_signal` is for where both are the rank itself; elsewhere a thread watches.
    """

    parent: int
    by_signal: bool
    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        if self.by_signal:
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self.parent:  # it died before the line above
                os._exit(1)
        else:
            threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()
        # Not SIG_IGN, which programs that it starts would inherit.
        signal.signal(signal.SIGTERM, lambda signum, frame: None)
        if self.then is not None:
            self.then(worker)


def started_by(context: Any, then: Callable[[int], None] | None) -> Start:
    """The `Start` for workers that this thread starts with a multiprocessing context (None: the default one)."""
    method = getattr(context, "get_start_method", start_method)()
    main = threading.current_thread() is threading.main_thread()
    return Start(os.getpid(), sys.platform == "linux" and method != "forkserver" and main, then)


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)


@contextlib.contextmanager
def watched(iterator: Any) -> Iterator[None]:
    """Lets torch's SIGCHLD handler speak up about dead workers while we wait for them, and at no other time.

    The handler raises RuntimeError in whatever the main thread is doing when a worker dies: in the middle of an
    optimizer step, say. Within a wait that is welcome (even a read of half a message is interrupted); so the workers
    are only made known to it here, and those that died before are found on entering.
    """
    _set_worker_pids(id(iterator), tuple(worker.pid for worker in iterator._workers))
    try:
        _error_if_any_worker_fails()
        yield
    finally:
        _remove_worker_pids(id(iterator))


def start_method() -> str:
    """How this process starts children, without fixing it as `multiprocessing.get_start_method()` would."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def automatic_count(in_memory: bool, local_world_size: int) -> int:
    """`num_workers="auto"`: 0 for data in memory, else up to 4 of this process's CPUs, which the local ranks share.

    Also 0 where workers cannot start: in a daemonic process, and where processes are spawned (macOS, Windows, fork
    servers) from a notebook or from a script without `if __name__ == "__main__":`.
    """
    startable = not multiprocessing.current_process().daemon and (start_method() == "fork" or _has_main_guard())
    if in_memory or not startable:
        return 0
    return min(4, usable_cpus() // max(1, local_world_size))


def _has_main_guard() -> bool:
    script = getattr(sys.modules["__main__"], "__file__", None)
    try:
        text = Path(script).read_text(encoding="utf-8", errors="replace") if script else ""
    except OSError:
        return False
    return re.search(r"__name__\s*==\s*['\"]__main__['\"]", text) is not None
