"""Stopping on request: the update in work is finished and saved, then the process ends with the requeue code."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from evener.errors import EXIT_STOPPED


class Stopped(SystemExit):
    """Raised inside the loop on every rank when a stop was asked for, after the checkpoint is written.

    A SystemExit, so that a script which does not catch it ends with exit code 75: "start me again and I continue".
    """

    def __init__(self, reason: str) -> None:
        super().__init__(EXIT_STOPPED)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@contextlib.contextmanager
def stop_signals(ask: Callable[[str], None]) -> Iterator[None]:
    """While the loop runs, TERM, INT, USR1 and USR2 call `ask(name)`; the second INT or TERM acts at once, as before.

    Handlers are put back afterwards. Outside of the main thread nothing can be installed, and nothing is. A scheduler
    signals every process of a job, and the launcher passes the signal on: the same TERM twice within a second is one
    request, and USR1 or USR2 that were asked for stay ignored, or the second would end a process that has just saved.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = [name for name in ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
    before: dict[int, Any] = {}
    first: dict[int, float] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        ask(signal.Signals(number).name)
        now = time.monotonic()
        if number == signal.SIGTERM and now < first.setdefault(number, now) + 1.0:
            return
        if number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, before[number])  # the second one means now
            if number in first:
                os.kill(os.getpid(), number)
        else:
            signal.signal(number, signal.SIG_IGN)

    for name in names:
        number = getattr(signal, name)
        before[number] = signal.getsignal(number)  # known before the handler may need it
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:  # not where another loop has put its own in front
                signal.signal(number, handler)
