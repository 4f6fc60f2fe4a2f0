"""Who a process id is: user, command, age, parent; read from /proc (`root` is another / in tests).

A driver knows no process namespaces and always gives the host's ids. Inside a container such an id may be nobody, or
somebody else; where that can be told it is, and otherwise the process stays unnamed.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

HOST_PID_NAMESPACE = "pid:[4026531836]"  # a constant of the kernel: the first namespace's inode


@dataclass(frozen=True)
class Who:
    user: str
    command: str
    age_seconds: float
    parent: int
    start_ticks: int  # with the pid, names this process and not a later one of the same number
    session: int


def who(pid: int, root: str = "/") -> Who | None:
    """The live process of that number, or None: gone, a zombie (it holds nothing any more), or not to be seen."""

    def text(*names: str) -> str:
        return Path(root, "proc", *names).read_text(encoding="utf-8", errors="replace")

    try:
        fields = text(str(pid), "stat").rpartition(")")[2].split()
        uid = int(text(str(pid), "status").partition("\nUid:")[2].split()[0])
        command = " ".join(word for word in text(str(pid), "cmdline").split("\0") if word)
        start = int(fields[19])
        age = max(0.0, float(text("uptime").split()[0]) - start / os.sysconf("SC_CLK_TCK"))
        return None if fields[0] in "ZX" else Who(user_name(uid), command, age, int(fields[1]), start, int(fields[3]))
    except (OSError, ValueError, IndexError):
        return None


def user_name(uid: int) -> str:
    with contextlib.suppress(ImportError, KeyError):
        import pwd

        return pwd.getpwuid(uid).pw_name
    return str(uid)


def is_alive(pid: int, start_ticks: int | None) -> bool:
    """Whether that very process lives: the number may have been given to another one since."""
    found = who(pid)
    return found is not None and start_ticks in (None, found.start_ticks)


def gpu_devices(pid: int, root: str = "/") -> tuple[str, ...] | None:
    """The device files of NVIDIA's that the process has open; None when its files cannot be read."""
    folder, found = os.path.join(root, "proc", str(pid), "fd"), set()
    try:
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(os.path.join(folder, name)))
    except OSError:
        return None
    return tuple(sorted(target for target in found if target.startswith("/dev/nvidia")))


def device_holders(root: str = "/") -> tuple[list[tuple[int, Who, tuple[str, ...]]], int]:
    """Every process that keeps GPU device files open, whether the driver lists it or not: (pid, who, files).

    And how many processes could not be looked into (other users': root can).
    """
    found, hidden = [], 0
    for pid in sorted(int(name) for name in os.listdir(os.path.join(root, "proc")) if name.isdecimal()):
        devices = gpu_devices(pid, root)
        one = who(pid, root) if devices != () else None
        if one is not None and devices is None:
            hidden += 1
        elif one is not None and devices is not None:
            found.append((pid, one, devices))
    return found, hidden


def may_be_foreign(root: str = "/") -> bool:
    """Whether ids from the driver may mean other processes than ours: inside a container with its own numbers."""
    with contextlib.suppress(OSError):
        return os.readlink(os.path.join(root, "proc/self/ns/pid")) != HOST_PID_NAMESPACE
    return False
