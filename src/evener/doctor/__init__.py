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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from typing import Any

from evener.doctor import gpu, host, network
from evener.doctor.facts import Facts
from evener.doctor.seen import LEVELS, Finding, Seen, finding, page, texts

# In the order of checks.toml.
CHECKS: dict[str, Callable[[Facts], Iterator[Seen]]] = {
    "driver-match": gpu.driver_match,
    "nvml": gpu.nvml,
    "lost-gpu": gpu.lost_gpu,
    "torch-cuda": gpu.torch_cuda,
    "arch-list": gpu.arch_list,
    "visible-devices": gpu.visible_devices,
    "device-order": gpu.device_order,
    "pynvml": host.nvml_package,
    "hidden-memory": gpu.hidden_memory,
    "orphans": host.orphans,
    "mig": gpu.mig,
    "compute-mode": gpu.compute_mode,
    "throttling": gpu.throttling,
    "ecc": gpu.ecc,
    "pcie": gpu.pcie,
    "topology": gpu.topology,
    "peer-access": gpu.peer_access,
    "shared-memory": host.shared_memory,
    "memlock": host.memlock,
    "open-files": host.open_files,
    "cpus": host.cpus,
    "memory-limit": host.memory_limit,
    "omp-threads": host.omp_threads,
    "numa": gpu.numa,
    "hostname": network.hostname,
    "reverse-dns": network.reverse_dns,
    "duplicate-names": network.duplicate_names,
    "interfaces": network.interfaces,
    "ports": network.ports,
    "mtu": network.mtu,
    "clock": network.clock,
    "versions": network.versions,
    "nccl-variables": network.nccl_variables,
    "infiniband": network.infiniband,
    "directory": host.directory,
    "lock-directory": host.lock_directory,
    "left-over": host.left_over,
    "collective": gpu.collective,
}
NEED_TORCH = {"torch-cuda", "arch-list", "collective"}
COMPARE = {"duplicate-names", "ports", "mtu", "clock", "versions"}
OF_ALL_HOSTS = tuple(CHECKS)[24:35]  # hostname to directory: what --nodes is about


def examine(facts: Facts, names: Iterable[str]) -> list[Finding]:
    """The findings of these checks, in their order; every check says at least one thing."""
    return [finding(name, seen) for name in names for seen in CHECKS[name](facts)]


def examine_hosts(facts: Facts, names: Iterable[str]) -> list[Finding]:
    """The findings of all hosts, out of the head's facts. Some checks compare, the others are each host's own."""
    assert facts.hosts is not None
    found: list[Finding] = []
    for name in names:
        if name in COMPARE:
            found += [finding(name, seen) for seen in CHECKS[name](facts)]
            continue
        for host_name, one in facts.hosts["hosts"].items():
            own = Facts.from_json(json.dumps(one["facts"] | {"hosts": None}), host_name)
            own = replace(own, hosts={"hosts": {}, "missing": []})
            each = [finding(name, seen) for seen in CHECKS[name](own)]
            found += [replace(seen, found=f"{host_name}: {seen.found}") for seen in each]
        if name == "directory":
            found += [finding(name, seen) for seen in host.shared_directory(facts)]
    return found


def worst(findings: Iterable[Finding]) -> str:
    return min((one.level for one in findings), key=LEVELS.index, default="ok")


class TorchChild:
    """torch in a process of its own, started at once, heard later: it may abort or hang.

    Args:
        gpus: How many to try NCCL on; 0 leaves it out.
    """

    def __init__(self, python: str, environ: Mapping[str, str], *, gpus: int = 0) -> None:
        self.path = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "measure", "health.py")
        self.gpus, self.began = gpus, time.monotonic()
        self.process = subprocess.Popen(
            [python, "-P", self.path, str(gpus)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env=dict(environ),
            text=True,
            start_new_session=True,
        )

    def answer(self, seconds: float) -> dict[str, Any]:
        """What it says; {"stage", "ended"} besides when it died, or did not come to its end within `seconds`."""
        told: dict[str, Any] = {"child": f"{self.path} {self.gpus}"}
        try:
            output, _ = self.process.communicate(timeout=max(0.0, self.began + seconds - time.monotonic()))
        except subprocess.TimeoutExpired:
            told["ended"] = "hung"
            self.end()
            output, _ = self.process.communicate()
        for line in output.splitlines():
            with contextlib.suppress(ValueError):
                told |= json.loads(line)
        code = self.process.returncode
        if "ended" not in told and code != 0:
            told["ended"] = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
        return told | {"seconds": round(time.monotonic() - self.began, 1)}

    def end(self) -> None:
        """Its whole process group: ranks of an all-reduce that hangs must not stay behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


def document() -> str:
    """docs/doctor.md: made of the checks, so that it cannot say anything else."""
    head = resources.files("evener.doctor").joinpath("page.md").read_text(encoding="utf-8")
    return head + "\n\n".join(page(name) for name in texts()) + "\n"


__all__ = [
    "CHECKS",
    "LEVELS",
    "NEED_TORCH",
    "OF_ALL_HOSTS",
    "Facts",
    "Finding",
    "TorchChild",
    "document",
    "examine",
    "examine_hosts",
    "page",
    "texts",
    "worst",
]
