"""`evener run --detach`: the run goes on in a session of its own, and a closed terminal does not end it."""

from __future__ import annotations

import os
import signal
import sys


def leave(path: str) -> None:
    """Returns in the process that goes on, whose output is in `path`. The other says how to follow it, and ends."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        print(f"evener: detached; process {pid}, output in {path}")
        print(f"  follow it: evener top, or tail -f {path}")
        print(f"  stop it, saved: kill {pid}")
        sys.stdout.flush()
        os._exit(0)
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nobody is left who could hang up; the ranks inherit it
    empty = os.open(os.devnull, os.O_RDONLY)
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target, source in ((0, empty), (1, output), (2, output)):
        os.dup2(source, target)
    os.close(empty)
    os.close(output)
