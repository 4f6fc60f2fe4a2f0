"""The run directory: config.json, events.jsonl, the curves. One per run, made by rank 0, never one run into another's.

What cannot be made at the start ends the run with one clear error, before anything was computed. What fails later
(a full disk in the night) is said once, counted, and never ends a training.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from evener.errors import EvenerError, UsageError
from evener.report.events import Events
from evener.report.text import clean, format_count

Say = Callable[[str], None]


class RunFolder:
    """The directory of one run. On ranks that are not `active` (all but 0) the same object, which writes nothing.

    `dir`: as given by the user; None makes `runs/<script>` or its next free `runs/<script>-2`. A given one that holds
    the events of an earlier run stays as it is: this run gets the next free `<dir>-2`, and `say` prints so.
    `continues`: it is that of a run which goes on, and its files are appended to.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None,
        *,
        active: bool = True,
        say: Say = lambda line: None,
        continues: bool = False,
    ) -> None:
        self.active, self.say = active, say
        self.path: Path | None = None  # None where not active
        self.failures: dict[str, int] = {}  # what could not be written since the start, by name: {"events.jsonl": 12}
        self._events: Events | None = None
        self._lock = -1
        if not active:
            return
        wanted = Path("runs") / script_name() if dir is None else _named(Path(dir))
        try:
            self.path, self._lock = (wanted, _hold(wanted)) if continues else _claim(wanted, fresh=dir is None)
            self._events = Events(self.path / "events.jsonl")
        except OSError as error:
            raise _cannot_start(wanted, error) from None
        if dir is not None and self.path != wanted:
            say(f"{clean(wanted)} holds an earlier run: this one goes to {clean(self.path)}")

    def write_config(self, config: Mapping[str, Any]) -> None:
        """config.json, whole or not at all. EvenerError when it cannot be written: this is still the start."""
        if self.path is not None:
            try:
                write_json(self.path / "config.json", config)
            except OSError as error:
                raise _cannot_start(self.path, error) from None

    def event(self, kind: str, *, update: int | None = None, rank: int = 0, **fields: Any) -> None:
        """One line of events.jsonl (see `events.KINDS`). A disk that refuses it is reported once, and counted."""
        if self._events is not None:
            try:
                self._events.write(kind, update=update, rank=rank, **fields)
            except OSError as error:
                self.failed("events.jsonl", error)

    def failed(self, what: str, error: BaseException) -> None:
        """Count a failure of a writer; the first of each is said."""
        self.failures[what] = self.failures.get(what, 0) + 1
        if self.failures[what] == 1:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            self.say(f"warning: {what} could not be written ({clean(reason)}); the training goes on without it")

    def close(self) -> None:
        """Close the files; say how much is missing when something is. A second call does nothing."""
        if self._events is None:
            return
        self._events.close()
        self._events = None
        if self._lock >= 0:
            os.close(self._lock)
        for what, times in self.failures.items():
            if times > 1:
                self.say(f"warning: {what} could not be written {format_count(times)} times")


def script_name() -> str:
    """The name of the running script without `.py`; "notebook" and "run" where there is none."""
    script = Path(sys.argv[0] if sys.argv else "")
    if script.name.startswith(("ipykernel", "colab_kernel")) or "ipykernel" in script.parts:
        return "notebook"
    stem = script.absolute().parent.name if script.name == "__main__.py" else script.stem
    return "run" if script.name in ("", "-c", "-m", "-") else stem or "run"


def write_json(path: Path, value: object) -> None:
    write_whole(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode("ascii"))


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that a reader, or the next start after a power cut, sees the old or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with contextlib.suppress(OSError):  # some file systems cannot sync a directory; the file itself is safe
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_json(folder: str | os.PathLike[str], names: str, *keys: str) -> list[dict[str, Any]]:
    """The JSON objects in the files of `folder` that `names` (a pattern) fits and that have these keys.

    A file that cannot be read, or is being written, has none.
    """
    found = []
    for path in glob.glob(os.path.join(glob.escape(os.fspath(folder)), names)):
        if not os.path.isfile(path):  # a pipe would be waited for
            continue
        with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
            value = json.load(file)
            if isinstance(value, dict) and set(keys) <= set(value):
                found.append(value)
    return found


def in_use(path: Path) -> str:
    """Which run that is not closed owns this directory: "process 123 of host"; empty where none does."""
    descriptor = _hold(path, make=False)
    if descriptor >= 0:
        os.close(descriptor)
    if descriptor != _TAKEN:
        return ""
    with contextlib.suppress(OSError, ValueError):
        if words := (path / ".lock").read_text(encoding="utf-8").strip():
            return clean(words)
    return "a process"


_TAKEN, _NO_LOCKS = -2, -1


def _hold(path: Path, *, make: bool = True) -> int:
    """A descriptor that holds the lock of `path` until it is closed, else a number below 0."""
    if sys.platform == "win32":
        return _NO_LOCKS
    import fcntl

    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if make else 0), 0o666)
    except OSError:  # never locked, or a directory that only others may write to
        return _NO_LOCKS
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # held by somebody, or a file system without locks
        os.close(descriptor)
        return _TAKEN if isinstance(error, BlockingIOError) else _NO_LOCKS
    if make:
        with contextlib.suppress(OSError):  # only for the words of `in_use`
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} of {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _named(path: Path) -> Path:
    """`path` with a last part that a `-2` can be put behind: "." and ".." are named, "~" is the home directory."""
    path = path.expanduser()
    path = Path(os.path.abspath(path)) if path.name in ("", "..") else path
    if not path.name:
        raise UsageError(f"dir={str(path)!r} is the root of the file system.", fix=['dir="runs/digits"'])
    return path


def _claim(wanted: Path, fresh: bool) -> tuple[Path, int]:
    """Make `wanted`, or the first of its `-2`, `-3`, ... that no run has; return it and its lock.

    A run owns the directory whose events.jsonl it created: the kernel lets one process create it. One that is locked
    by nobody and without an event is what a killed start left: it is taken. `fresh`: one that was there never is.
    """
    for number in itertools.count(1):
        path = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            path.mkdir(parents=True, exist_ok=not fresh)
        except FileExistsError:
            if number == 1 and not fresh:
                raise UsageError(f"dir={str(path)!r} is a file.", fix=["name a directory that may be made"]) from None
            continue
        lock, events = _hold(path), path / "events.jsonl"
        if lock == _TAKEN:
            continue
        try:
            os.close(os.open(events, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError:
            if lock == _NO_LOCKS or events.stat().st_size:
                if lock >= 0:
                    os.close(lock)
                continue
        return path, lock
    raise AssertionError("itertools.count ends")


def _cannot_start(path: Path, error: OSError) -> EvenerError:
    fixes = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space, or give dir= on another disk")
    fixes |= dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give dir= a directory that you may write to")
    fix = fixes.get(error.errno or 0, "give dir= a directory that can be made")
    found = clean(error.strerror or error) + (f": {clean(error.filename)}" if error.filename else "")
    return EvenerError(f"The run directory {clean(path)} cannot be written.", evidence=[found], fix=[fix])
