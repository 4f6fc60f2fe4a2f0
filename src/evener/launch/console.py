"""Where rank 0's output goes: to the console and into its log file, byte for byte.

Rank 0 writes into a terminal of our own when the launcher's output is a terminal (progress bars ask for one), and into
a named pipe otherwise; this module reads there, writes to the console, and keeps a copy. Standard output and standard
error stay apart when the launcher's are apart, and share one channel (so keep their order) when they are one file.

Every other rank writes to its file alone; with `tee="all"` those files are followed and shown line by line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

from evener.launch.failure import clean

if TYPE_CHECKING:
    from evener.launch.command import Launch

CHUNK = 1 << 16


class Channel:
    """One way from rank 0 to a descriptor of ours: `path` is what rank 0 opens."""

    def __init__(self, descriptor: int, folder: str) -> None:
        self.descriptor = descriptor
        self.path = os.path.join(folder, f"console{descriptor}")
        self.kept = -1  # a terminal's other end stays open here, so that reading never sees an end of file
        if os.isatty(descriptor):
            with contextlib.suppress(OSError):  # no /dev/pts here: a pipe will do
                self._open_terminal()
        self.terminal = self.kept >= 0
        if not self.terminal:
            os.mkfifo(self.path, 0o600)
            self.source = os.open(self.path, os.O_RDWR | os.O_NONBLOCK)
        self.copy_window_size()

    def _open_terminal(self) -> None:
        import termios

        source, kept = os.openpty()
        try:
            self.path = os.ttyname(kept)
        except OSError:
            os.close(source)
            os.close(kept)
            raise
        self.source, self.kept = source, kept
        # No output processing in the inner terminal: the outer one does it, and the log gets the bytes as written.
        modes = termios.tcgetattr(kept)
        modes[1] &= ~termios.OPOST
        termios.tcsetattr(kept, termios.TCSANOW, modes)
        os.set_blocking(source, False)

    def copy_window_size(self) -> None:
        if self.terminal:
            import termios

            with contextlib.suppress(OSError, termios.error):
                termios.tcsetwinsize(self.kept, termios.tcgetwinsize(self.descriptor))

    def read(self) -> bytes:
        """What is there now; empty when nothing is."""
        try:
            return os.read(self.source, CHUNK)
        except OSError:  # EAGAIN, or EIO of a terminal that nobody has open
            return b""

    def close(self) -> None:
        for descriptor in (self.source, self.kept):
            if descriptor >= 0:
                os.close(descriptor)


class Follower:
    """Shows what is added to one rank's log file, in whole lines, each marked with the rank."""

    def __init__(self, path: str, rank: int) -> None:
        self.path, self.mark = path, f"[rank {rank}] ".encode()
        self.position, self.rest = 0, b""

    def lines(self, *, last: bool = False) -> bytes:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                data = file.read()
        except OSError:  # the rank has not started yet
            return b""
        self.position += len(data)
        whole, newline, self.rest = (self.rest + data).rpartition(b"\n")
        text = whole + newline
        if last and self.rest:
            text, self.rest = text + self.rest + b"\n", b""
        # Not splitlines(): it also cuts at the carriage returns of progress bars.
        return b"".join(self.mark + line + b"\n" for line in text.split(b"\n")[:-1])


class Console:
    """The channels of rank 0 and the followers of the others, pumped by the supervisor's loop."""

    def __init__(self, launch: Launch) -> None:
        ranks = range(launch.first_rank, launch.first_rank + launch.nproc)
        self.log: BinaryIO | None = None
        self.channels: dict[int, Channel] = {}
        self.silenced: set[int] = set()
        self.line_open_since: float | None = None  # rank 0 is in the middle of a line
        if launch.tee != "none" and 0 in ranks:
            self.log = open(os.path.join(launch.logs, "rank0.log"), "ab", buffering=0)  # noqa: SIM115  (in close())
            for descriptor in (1, 2):
                with contextlib.suppress(OSError):  # a descriptor that is closed has no channel: rank 0 uses its file
                    self.channels[descriptor] = self._channel(descriptor, launch.private)
        followed = [rank for rank in ranks if rank > 0 and launch.tee == "all"]
        self.followers = [Follower(os.path.join(launch.logs, f"rank{rank}.log"), rank) for rank in followed]
        self.shown = set(ranks) if launch.tee == "none" else {0 for _ in self.channels} | set(followed)

    def _channel(self, descriptor: int, folder: str) -> Channel:
        first = self.channels.get(1)
        if first is not None:
            same = os.path.samestat(os.fstat(1), os.fstat(descriptor))
            if same or (first.terminal and os.isatty(descriptor)):
                return first
        return Channel(descriptor, folder)

    def paths(self) -> dict[str, str]:
        """For the shim: the path behind each descriptor of rank 0."""
        return {str(descriptor): channel.path for descriptor, channel in self.channels.items()}

    def unique(self) -> list[Channel]:
        return list({channel.source: channel for channel in self.channels.values()}.values())

    def pump(self, channel: Channel) -> bool:
        """Passes on what rank 0 wrote; whether there was anything."""
        data = channel.read()
        if not data:
            return False
        if self.log is not None:
            with contextlib.suppress(OSError):  # a full disk costs the copy, not the run
                self.log.write(data)
        self._show(channel.descriptor, data)
        self.line_open_since = None if data.endswith(b"\n") else time.monotonic()
        return True

    def follow(self, *, last: bool = False) -> None:
        """The other ranks' new lines, but not into a line that rank 0 is writing (unless it takes long to end it)."""
        if self.line_open_since is not None and not last and time.monotonic() < self.line_open_since + 1.0:
            return
        for follower in self.followers:
            self._show(1, follower.lines(last=last))

    def drain(self) -> None:
        """Everything that is still on its way; no process writes any more."""
        if any(channel.terminal for channel in self.unique()):
            time.sleep(0.02)  # a terminal hands its last output on a moment after it was written
        for channel in self.unique():
            while self.pump(channel):
                pass
        self.follow(last=True)

    def show_error(self, rank: int, text: str) -> None:
        """The traceback of the rank that failed, unless its output has been shown here, or is not wanted."""
        for line in text.rstrip().splitlines() if rank not in self.shown else ():
            indent = line[: len(line) - len(line.lstrip(" "))]
            say(indent + clean(line), mark=f"[rank {rank}] ")

    def resize(self) -> None:
        for channel in self.unique():
            channel.copy_window_size()

    def close(self) -> None:
        for channel in self.unique():
            channel.close()
        self.channels = {}
        if self.log is not None:
            self.log.close()

    def _show(self, descriptor: int, data: bytes) -> None:
        if descriptor in self.silenced:
            return
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(descriptor, view) :]
        except OSError:  # `| head` has closed it, or the terminal is gone: the run goes on, the log has everything
            self.silenced.add(descriptor)


def say(text: str, mark: str = "evener: ") -> None:
    """One line of evener's own, on standard error; never an error when nobody listens."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{mark}{text}\n")
        sys.stderr.flush()
