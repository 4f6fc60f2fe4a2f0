"""The doctor: facts of this machine, 38 checks over them, and what to do about what they find.

A check is a small function of a `Facts`; it yields what it saw and looks at nothing else. Its words are in checks.toml.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from evener.doctor import gpu, host, network
from evener.doctor.facts import Facts
from evener.doctor.seen import LEVELS, Faults, Finding, findings, texts

__all__ = ["CHECKS", "LEVELS", "NEED_TORCH", "OF_ALL_HOSTS", "Facts", "Finding", "TorchChild", "examine"]
__all__ += ["examine_hosts", "texts", "worst"]

# The function of a check bears its name, in one of the three files.
_FUNCTIONS: dict[str, Callable[[Facts], Faults]] = vars(gpu) | vars(host) | vars(network)
CHECKS = {name: _FUNCTIONS[name.replace("-", "_")] for name in texts()}
NEED_TORCH = {"torch-cuda", "arch-list", "collective"}
OF_ALL_HOSTS = tuple(CHECKS)[24:35]  # hostname to directory: what --nodes is about
COMPARE = {"duplicate-names", "ports", "mtu", "clock", "versions"}


def examine(facts: Facts, names: Iterable[str]) -> list[Finding]:
    """The findings of these checks, in their order; every check says at least one thing."""
    return [one for name in names for one in findings(name, CHECKS[name](facts))]


def examine_hosts(facts: Facts, names: Iterable[str]) -> list[Finding]:
    """The findings of all hosts, out of the head's facts. Some checks compare, the others are each host's own."""
    assert facts.hosts is not None
    found: list[Finding] = []
    for name in names:
        if name in COMPARE:
            found += examine(facts, [name])
            continue
        for host_name, one in facts.hosts["hosts"].items():
            own = replace(Facts.from_json(json.dumps(one["facts"]), host_name), hosts={"hosts": {}, "missing": []})
            found += [replace(seen, found=f"{host_name}: {seen.found}") for seen in examine(own, [name])]
        if name == "directory":
            found += findings(name, host.shared_directory(facts))
    return found


def worst(found: Iterable[Finding]) -> str:
    return min((one.level for one in found), key=LEVELS.index, default="ok")


class TorchChild:
    """torch in a process of its own, started at once, heard later: it may abort or hang.

    Args:
        gpus: How many to try NCCL on; 0 leaves it out.
    """

    def __init__(self, python: str, environ: Mapping[str, str], *, gpus: int = 0) -> None:
        self.words = [str(resources.files("evener").joinpath("measure", "health.py")), str(gpus)]
        self.began, argv, none = time.monotonic(), [python, "-P", *self.words], subprocess.DEVNULL
        self.process = subprocess.Popen(
            argv, stdin=none, stdout=subprocess.PIPE, stderr=none, env=dict(environ), text=True, start_new_session=True
        )

    def answer(self, seconds: float) -> dict[str, Any]:
        """What it says; {"stage", "ended"} besides when it died, or did not come to its end within `seconds`.

        Then it is "late" when it still computes, with more work on this machine than CPUs; else it "hung".
        """
        told: dict[str, Any] = {"child": " ".join(self.words)}
        try:
            before, last = 0.0, min(1.0, seconds / 4)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.communicate(timeout=max(0.0, self.began + seconds - last - time.monotonic()))
            before = self._cpu_seconds()
            output, _ = self.process.communicate(timeout=last)
        except subprocess.TimeoutExpired:
            load, cpus = os.getloadavg()[0], os.cpu_count() or 1
            told |= {"ended": "late" if self._cpu_seconds() > before and load > cpus else "hung"}
            told |= {"load": round(load, 1), "cpus": cpus}
            self.end()
            output, _ = self.process.communicate()
        for line in output.splitlines():
            with contextlib.suppress(ValueError):
                told |= json.loads(line)
        code = self.process.returncode
        if "ended" not in told and code != 0:
            told["ended"] = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return told | {"seconds": round(time.monotonic() - self.began, 1)}

    def _cpu_seconds(self) -> float:
        import psutil  # type: ignore[import-untyped]

        total = 0.0
        with contextlib.suppress(psutil.Error):
            child = psutil.Process(self.process.pid)
            for one in (child, *child.children(recursive=True)):
                total += sum(one.cpu_times()[:2])
        return total

    def end(self) -> None:
        """Its whole process group: ranks of an all-reduce that hangs must not stay behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
