"""What the machine can tell at the moment of a failure: the kernel's messages and kills, full disks.

Everything here may be refused (containers, dmesg_restrict, macOS); what cannot be read is left out.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Sequence

from evener.explain.read import Raw, Selection

_WORTH = re.compile(r"Killed process|[Oo]ut of memory|oom-kill|NVRM: Xid|fallen off the bus|segfault at|I/O error")


def oom_kills() -> int | None:
    """How many processes the kernel has killed for this job's memory limit; None when it does not say."""
    counts = []
    for path in ("/sys/fs/cgroup/memory.events", *glob.glob("/sys/fs/cgroup/memory/memory.oom_control")):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            counts += [int(n) for n in re.findall(r"^oom_kill (\d+)", file.read(), re.MULTILINE)]
    return sum(counts) if counts else None


def kernel_messages(since_seconds: float) -> list[str] | None:
    """The kernel's lines on kills, GPUs and disks since a moment of `time.monotonic()`; None: unreadable."""
    found: list[str] | None = None
    with contextlib.suppress(OSError):
        source = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
        found = []
        try:
            while True:  # one record a read, until there is none: then BlockingIOError
                head, _, text = os.read(source, 8192).decode("utf-8", "replace").partition(";")
                fields = head.split(",")
                if len(fields) > 2 and int(fields[2]) / 1e6 >= since_seconds and _WORTH.search(text):
                    found.append(text.splitlines()[0])
        finally:
            os.close(source)
    return found


def testimony(since_seconds: float, kills_before: int | None, folder: str, more: Sequence[str] = ()) -> Selection:
    """All of it, and `more`, as a text of its own, to be read with the logs of a run that has just failed."""
    said = Selection("kernel")
    messages, kills = kernel_messages(since_seconds), oom_kills()
    lines = [f"kernel: {text}" for text in messages or ()]
    if kills is not None and kills_before is not None and kills > kills_before:
        lines.append(f"kernel: Memory cgroup out of memory: {kills - kills_before} killed since the start of this run")
    elif messages is not None and not any("ill" in text for text in messages):
        lines.append("kernel: no process was killed for want of memory since the start of this run")
    with contextlib.suppress(OSError):
        disk = os.statvfs(folder)
        if disk.f_bavail * disk.f_frsize < 1 << 16:
            lines.append(f"kernel: No space left on device: '{folder}'")
    said.lines = [Raw("kernel", number, line) for number, line in enumerate([*lines, *more], 1)]
    return said
