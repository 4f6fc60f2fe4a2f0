"""A sign of life for `evener run --hang-after`: a file of this rank that is touched while a constructor or loop works.

It is gone outside of them: how long a script's own work takes is nobody's business. Without --hang-after there is none.
"""

from __future__ import annotations

import contextlib
import os
import time

_SECONDS = 0.2


class Beat:
    """Call it where something was done: a clock reading, and five times a second 2 us for the file."""

    def __init__(self, folder: str | None, rank: int) -> None:
        self.path = os.path.join(folder, f"rank{rank}") if folder is not None else ""
        self.due = 0.0

    def begin(self) -> None:
        """From now on somebody waits for the next call."""
        if self.path:
            with contextlib.suppress(OSError):  # the launcher is on another machine, or gone
                os.close(os.open(self.path, os.O_CREAT | os.O_WRONLY, 0o600))
                os.utime(self.path)

    def end(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    def __call__(self) -> None:
        if self.path and (now := time.monotonic()) >= self.due:
            self.due = now + _SECONDS
            with contextlib.suppress(OSError):
                os.utime(self.path)
