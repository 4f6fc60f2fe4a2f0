"""Leases: a claim on a GPU that lives exactly as long as a process does.

One file per UUID in a folder that all users share. The lock on it (`flock`) is the claim; the kernel drops it when the
last process that has the descriptor is gone, whatever killed it. Rules, each against a fault that was seen:

- A file is opened read-only first and only then made: another user's file in a sticky folder may not be opened for
  writing, and need not be.
- After locking, the file must still be the one at its path: a cleaner that unlinks a held file would allow a second
  grant on a new one. While held, the folder is locked too (shared): systemd-tmpfiles leaves locked folders alone.
- Files are never deleted. What a holder says about itself is in a file of its own, and only for people to read.
- One more lock, `picker.lock`, is held while somebody looks at the GPUs and takes all it needs or nothing.
- Whoever waits has a numbered ticket, locked as long as it lives: first come, first served, several GPUs included.

A lease binds those who ask for one. Everybody else is seen by what they do on the GPU, so a picker looks at both.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from evener.errors import LaunchError, UsageError
from evener.gpus import owners
from evener.gpus.values import Holder

SETTING = "/etc/evener.toml"  # [gpus] lock_folder = "...": an administrator's word, the same for everybody
# Locks of one machine must not be asked of a file server, and locks of a file server may not reach other machines.
NETWORK = ("nfs", "cifs", "smb", "9p", "lustre", "gpfs", "beegfs", "ceph", "afs", "fuse", "glusterfs", "pvfs")
PICKER_SECONDS = 60.0  # looking at eight GPUs takes well under a second; a lost one can make the driver slow


@dataclass
class Lease:
    """Held GPUs (by UUID). `close` gives them back; so does the end of every process that has `descriptors`."""

    uuids: tuple[str, ...]
    descriptors: tuple[int, ...]  # one per GPU, then the folder's
    notes: tuple[str, ...]  # paths of what the holder says about itself

    def close(self) -> None:
        for path in self.notes:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self.descriptors = self.notes = ()


@dataclass(frozen=True)
class Folder:
    """The folder of the locks. Nothing is made before somebody takes a lease."""

    path: str

    # --- reading ------------------------------------------------------------------------------------------------------

    def holder(self, uuid: str) -> Holder | None:
        """Who holds this GPU, or None. Waits for a picker at work, so that looking never makes one fail."""
        with self.serial(seconds=0.5, must=False):
            return self.holder_now(uuid)

    def holder_now(self, uuid: str) -> Holder | None:
        """The same, inside `serial`."""
        if not self._is_locked(f"{uuid}.lock"):
            return None
        for name in self._notes(uuid):  # notes of the dead are passed over
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                with open(self._path(name), encoding="utf-8") as file:
                    values = json.loads(file.read(65536))
                # In another container the process is not to be seen, and its note is all there is.
                if values["host"] == socket.gethostname() and not owners.is_alive(values["pid"], values["start"]):
                    continue
                user = owners.user_name(os.stat(self._path(name)).st_uid)
                return Holder(values["pid"], user, values["command"], values["since"], values["host"])
        return Holder()

    def waiting(self, before: float = math.inf) -> Iterator[str]:
        """Who waits and for what, first come first; only those with a smaller ticket than `before`."""
        for number in self._tickets():
            with contextlib.suppress(OSError):
                if number < before and self._is_locked(f"ticket.{number}"):
                    with open(self._path(f"ticket.{number}"), encoding="utf-8", errors="replace") as file:
                        yield file.read(500)

    def _tickets(self) -> list[int]:
        return sorted(int(name[7:]) for name in self._names(r"ticket\.[0-9]{1,18}"))

    def _notes(self, uuid: str) -> list[str]:
        return self._names(rf"{re.escape(uuid)}\..*\.json")

    def _names(self, pattern: str) -> list[str]:
        with contextlib.suppress(OSError):
            return sorted(name for name in os.listdir(self.path) if re.fullmatch(pattern, name))
        return []

    def _is_locked(self, name: str) -> bool:
        """Somebody has the lock of the file, and lives."""
        with contextlib.ExitStack() as stack:
            try:
                descriptor = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except OSError:
                return False
            stack.callback(os.close, descriptor)
            return not _try_lock(descriptor, shared=True)

    # --- taking -------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Makes the folder, for all users; refuses one that cannot keep the promise."""
        problem = None
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path)
                os.chmod(self.path, 0o1777)  # whatever the umask
            until = time.monotonic() + 0.5  # somebody may have made it a moment ago and not opened it for others yet
            while not (mine := os.access(self.path, os.W_OK | os.X_OK)) and time.monotonic() < until:
                time.sleep(0.01)
            mode = os.lstat(self.path).st_mode
            if not stat.S_ISDIR(mode):
                problem = "it is no folder"
            elif mode & 0o002 and not mode & stat.S_ISVTX:
                problem = "everybody may delete everybody's locks in it (no sticky bit)"
            elif not mine:
                problem = f"you may not write there (mode {stat.S_IMODE(mode):o})"
            elif (kind := file_system(self.path)).startswith(NETWORK):
                problem = f"it is on a network file system ({kind}), whose locks do not hold"
        except OSError as error:
            problem = str(error)
        if problem:
            fix = [f"as root: mkdir -p -m 1777 {self.path}", f"another folder for all users: {SETTING}: [gpus]"]
            fix += ['lock_folder = "/var/lock/evener"', "`evener run --no-lease` goes without"]
            raise LaunchError(f"The folder of GPU leases, {self.path}, cannot be used: {problem}.", fix=fix)

    @contextlib.contextmanager
    def serial(self, seconds: float = PICKER_SECONDS, must: bool = True) -> Iterator[None]:
        """One at a time, on this machine: whoever looks and takes. Raises LaunchError after `seconds` if it `must`."""
        until, path, descriptor = time.monotonic() + seconds, self._path("picker.lock"), None
        while must or os.path.exists(path):  # else nobody has ever picked here
            late, descriptor = time.monotonic() > until, self._acquire("picker.lock", shared=not must)
            if descriptor is not None or (late and not must):
                break
            if late:
                fix = [f"fuser -v {path} names it; a GPU whose driver hangs can be why"]
                cause = f"Another process has been choosing GPUs for {seconds:.0f} s."
                raise LaunchError(cause, evidence=[f"it holds {path}"], fix=fix)
            time.sleep(0.005)
        try:
            yield
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def take(self, uuids: Sequence[str], command: str) -> Lease | None:
        """All of these GPUs, or None when somebody has one of them. Call it inside `serial`."""
        with contextlib.ExitStack() as stack:
            taken = []
            for uuid in uuids:
                descriptor = self._acquire(f"{uuid}.lock")
                if descriptor is None:
                    return None
                stack.callback(os.close, descriptor)
                taken.append(descriptor)
            taken.append(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            stack.callback(os.close, taken[-1])
            _try_lock(taken[-1], shared=True)
            lease = Lease(tuple(uuids), tuple(taken), tuple(self._write_note(uuid, command) for uuid in uuids))
            stack.pop_all()
            return lease

    @contextlib.contextmanager
    def line_up(self, what: str) -> Iterator[int]:
        """The next place in the queue, by its number, until it is left. Enter it inside `serial`."""
        numbers = self._tickets()
        for number in numbers:  # tidy up after those who died waiting (of this user: others' may not be deleted)
            if not self._is_locked(f"ticket.{number}"):
                with contextlib.suppress(OSError):
                    os.unlink(self._path(f"ticket.{number}"))
        number = max(numbers, default=0) + 1
        path = self._path(f"ticket.{number}")
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.fchmod(descriptor, 0o644)
            while not _try_lock(descriptor):  # somebody looked at this very moment
                time.sleep(0.001)
            os.write(descriptor, what.encode()[:500])
            yield number
        finally:
            with contextlib.suppress(OSError):
                os.unlink(path)
            os.close(descriptor)

    # --- files --------------------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _open(self, name: str) -> int:
        """A descriptor of the file that is at that path now, made if it is not there."""
        path, how = self._path(name), os.O_RDONLY | os.O_CLOEXEC
        for _ in range(200):
            try:
                return os.open(path, how | os.O_NOFOLLOW)
            except FileNotFoundError:
                with contextlib.suppress(FileExistsError):
                    descriptor = os.open(path, how | os.O_CREAT | os.O_EXCL, 0o644)
                    os.fchmod(descriptor, 0o644)
                    return descriptor
            except PermissionError:  # made a moment ago under a strict umask, and not opened for others yet
                time.sleep(0.005)
        raise LaunchError(f"{path} cannot be opened.", fix=[f"ls -l {path}: it should be readable for all users"])

    def _acquire(self, name: str, shared: bool = False) -> int | None:
        """A descriptor with the lock, on the file that its path still names; None when somebody else has it."""
        while True:
            descriptor = self._open(name)
            if not _try_lock(descriptor, shared):
                os.close(descriptor)
                return None
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(descriptor).st_ino == os.stat(self._path(name)).st_ino:
                    return descriptor
            os.close(descriptor)  # a cleaner unlinked the file between the two calls

    def _write_note(self, uuid: str, command: str) -> str:
        """Says who holds it. Whatever others said is out of date now, and goes where that is allowed."""
        for name in self._notes(uuid):
            with contextlib.suppress(OSError):
                os.unlink(self._path(name))
        path = self._path(f"{uuid}.{os.getpid()}.json")
        me = owners.who(os.getpid())
        values: dict[str, object] = {"pid": os.getpid(), "start": me.start_ticks if me else None}
        values |= {"host": socket.gethostname(), "command": command[:500], "since": time.time()}
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(descriptor, 0o644)
            json.dump(values, file)
        return path


def _try_lock(descriptor: int, shared: bool = False) -> bool:
    """Whether the lock was got."""
    import fcntl

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def file_system(path: str) -> str:
    """The type of the file system that a path is on ("ext4", "tmpfs", "nfs4"); "" when it cannot be told."""
    import psutil  # type: ignore[import-untyped]

    real, parts = os.path.realpath(path), psutil.disk_partitions(all=True)
    above = [part for part in parts if os.path.commonpath([part.mountpoint, real]) == part.mountpoint]
    return str(max(above, key=lambda part: len(part.mountpoint)).fstype) if above else ""


def default_path(setting: str = SETTING) -> str:
    """The folder that every user of this machine computes alike: nothing in it depends on who asks."""
    if os.path.exists(setting):
        import tomllib

        try:
            with open(setting, "rb") as file:
                path = tomllib.load(file).get("gpus", {}).get("lock_folder", "")
        except (OSError, ValueError, AttributeError) as error:
            fix = ['[gpus]\\n lock_folder = "/var/lock/evener"']
            raise UsageError(f"{setting} cannot be read: {error}.", fix=fix) from None
        if path and isinstance(path, str) and os.path.isabs(path):
            return path
        if path != "":
            raise UsageError(f"{setting}: lock_folder = {path!r} is no absolute path.")
    with contextlib.suppress(OSError):
        if os.stat("/run/lock").st_mode & 0o1777 == 0o1777:
            return "/run/lock/evener"
    return "/tmp/evener-locks"
