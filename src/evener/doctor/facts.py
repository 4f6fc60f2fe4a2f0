"""Facts: everything that the checks look at, gathered once. Checks are functions of it and look at nothing else.

What cannot be found out is None. A fact sheet is plain JSON (`evener doctor --record`, `--from`), so that a sick
machine can be judged elsewhere: tests do that. `root` is where /proc, /sys, /etc and /dev are looked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from evener.errors import UsageError
from evener.gpus import leases, owners
from evener.gpus.look import loaded_driver
from evener.gpus.values import Snapshot, decode
from evener.limits import memory_limit, node_cpus, usable_cpus

# What may be in a record that somebody sends around: settings, no secrets.
_SETTINGS = re.compile(
    r"(CUDA|NCCL|TORCH_NCCL|GLOO|TP|OMP|MKL|NVIDIA|PYTORCH|UCX)_|MASTER_|LD_LIBRARY_PATH$|RANK$|WORLD_SIZE$"
)
_LIBRARIES = ("usr/lib/x86_64-linux-gnu", "usr/lib/aarch64-linux-gnu", "usr/lib64", "usr/local/nvidia/lib64", "usr/lib")
_PACKAGES = ("torch", "evener", "numpy", "pynvml", "nvidia-ml-py", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
_LAUNCHERS = ("torch.distributed.run", "torchrun", "accelerate launch", "evener/launch/shim.py")
_TOO_SLOW_SECONDS = 3.0
T = TypeVar("T")


@dataclass(frozen=True)
class Facts:
    """One host. Sizes are bytes; what is not known is None, and an empty list means: looked, and there is none.

    Attributes:
        ranks, workers: Processes on this host, and data workers of each (None: nobody said); `memory_needed_bytes` of
            the whole job on this host, from --memory.
        gpus: What the probe of `evener gpus` read.
        torch: What the torch child said (see evener/measure/health.py); {"stage", "ended"} when it died or hung.
        hosts: With --nodes: the other hosts' facts and what they saw of each other (see evener.doctor.nodes).
    """

    hostname: str = ""
    python: str = "python"
    environ: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    workers: int | None = None
    memory_needed_bytes: int | None = None
    packages: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    kernel_driver: str | None = None
    nvml_library: str | None = None
    device_files: list[str] = field(default_factory=list)
    gpus: Snapshot = field(default_factory=Snapshot)
    kernel_log: list[str] | None = None
    kernel_command_line: str | None = None
    acs_bridges: list[str] | None = None
    torch: dict[str, Any] | None = None
    shm_total_bytes: int | None = None
    shm_free_bytes: int | None = None
    memlock_bytes: float | None = None
    nofile: float | None = None
    nofile_hard: float | None = None
    usable_cpus: int | None = None
    host_cpus: int | None = None
    node_cpus: dict[str, list[int]] = field(default_factory=dict)  # usable CPUs by memory node
    memory_limit_bytes: int | None = None
    memory_used_bytes: int | None = None
    own_addresses: list[str] | None = None  # that the host's own name leads to
    reverse_dns_seconds: dict[str, float] = field(default_factory=dict)
    interfaces: list[dict[str, Any]] = field(default_factory=list)
    default_interface: str | None = None
    can_listen: str | None = None  # "" when it can, else why not
    infiniband: list[dict[str, str]] = field(default_factory=list)
    ibverbs: bool | None = None
    nccl_files: dict[str, list[str]] = field(default_factory=dict)
    directory: dict[str, Any] | None = None
    locks: dict[str, Any] | None = None
    port_29500: dict[str, Any] | None = None  # {} when it is free
    left_over: list[dict[str, Any]] | None = None
    hosts: dict[str, Any] | None = None

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str, where: str) -> Facts:
        """Raises UsageError: no fact sheet, or one of another version."""
        cause = f"{where} is no fact sheet of evener doctor."
        fix = "write one with `evener doctor --record FILE`, of the same version of evener"
        try:
            return decode(Facts, json.loads(text), cause, fix)
        except (ValueError, RecursionError) as error:
            raise UsageError(cause, evidence=[str(error)], fix=[fix]) from None

    @property
    def routed(self) -> dict[str, Any] | None:
        """The interface that leads out of this host; without a route the only one that is up."""
        out = [one for one in self.interfaces if one["up"] and not one["loopback"]]
        named = [one for one in out if one["name"] == self.default_interface]
        return named[0] if named else out[0] if len(out) == 1 else None

    @property
    def address(self) -> str:
        addresses = self.routed["addresses"] if self.routed else []
        return str(addresses[0]) if addresses else "ADDRESS"


def gather(environ: Mapping[str, str], *, root: str = "/", directory: str = "runs", **known: Any) -> Facts:
    """This host's facts; `known` are those that somebody else found out (GPUs, the torch child, wishes)."""
    at, real = Path(root), os.path.abspath(root) == "/"
    files, files_hard = _limits(at, "Max open files")
    limit, used = memory_limit(root)
    values: dict[str, Any] = {
        "hostname": _text(at / "proc/sys/kernel/hostname") or socket.gethostname(),
        "python": sys.executable,
        "environ": {name: value for name, value in environ.items() if _SETTINGS.match(name)},
        "packages": _packages(),
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
        "kernel_driver": loaded_driver(root),
        "nvml_library": _nvml_library(at, environ.get("LD_LIBRARY_PATH", "") if real else ""),
        "device_files": sorted(path.name for path in at.glob("dev/nvidia[0-9]*")),
        "kernel_log": _kernel_log(_output("dmesg") if real else _text(at / "var/log/kern.log")),
        "kernel_command_line": _text(at / "proc/cmdline"),
        "memlock_bytes": _limits(at, "Max locked memory")[0],
        "nofile": files,
        "nofile_hard": files_hard,
        "usable_cpus": usable_cpus(root),
        "host_cpus": (_text(at / "proc/cpuinfo") or "").count("processor\t") or os.cpu_count(),
        "node_cpus": {str(node): list(cpus) for node, cpus in node_cpus(root).items()},
        "memory_limit_bytes": limit,
        "memory_used_bytes": used,
        "default_interface": _found(r"(?m)^(\S+)\t0{8}(?:\t\S+){5}\t0{8}\b", at / "proc/net/route"),
        "infiniband": [
            {"device": one.parts[-4], "port": one.parts[-2], "state": _found(r": *(\S.*)", one) or "unknown"}
            for one in sorted(at.glob("sys/class/infiniband/*/ports/*/state"))
        ],
        "ibverbs": any(True for place in _LIBRARIES for _ in at.glob(f"{place}/libibverbs.so*")),
        "nccl_files": _nccl_files(at, environ.get("HOME")),
        "locks": _locks(at),
        "left_over": _left_over(root),
    }
    with contextlib.suppress(OSError):
        shm = os.statvfs(at / "dev/shm")
        values |= {"shm_total_bytes": shm.f_frsize * shm.f_blocks, "shm_free_bytes": shm.f_frsize * shm.f_bavail}
    if real:
        values |= {"acs_bridges": _acs_bridges(), "own_addresses": _own_addresses(values["hostname"])}
        values |= {"interfaces": _interfaces(), "directory": look_at_directory(directory), "port_29500": _port(29500)}
        address = Facts(**values).address
        addresses = [] if address == "ADDRESS" else [address]
        values |= {"reverse_dns_seconds": reverse_dns(addresses), "can_listen": _can_listen(addresses)}
    return Facts(**(values | known))


def _text(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return None


def _found(pattern: str, path: Path) -> str | None:
    match = re.search(pattern, _text(path) or "")
    return match[1] if match else None


def _limits(at: Path, name: str) -> tuple[float | None, float | None]:
    """Soft and hard."""
    match = re.search(rf"{name}\s+(\S+)\s+(\S+)", _text(at / "proc/self/limits") or "")
    soft, hard = (1e18 if one == "unlimited" else float(one) for one in match.groups()) if match else (None, None)
    return soft, hard


def _packages() -> dict[str, str]:
    from importlib import metadata

    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _output(*argv: str, seconds: float = 2.0) -> str | None:
    """What a small tool prints; None when it is not there, fails, or takes too long."""
    if shutil.which(argv[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=seconds, check=True)
        return done.stdout.strip()
    return None


def _nvml_library(at: Path, own: str) -> str | None:
    """The version in the name of the file that libnvidia-ml.so.1 leads to."""
    for place in (*filter(None, own.split(":")), *_LIBRARIES):
        if (path := at / place / "libnvidia-ml.so.1").exists():
            name = re.search(r"\.so\.(\d+[\d.]*\.\d+)$", os.path.realpath(path))
            return name[1] if name else None
    return None


def _kernel_log(text: str | None) -> list[str] | None:
    """The kernel's lines about NVIDIA faults; None when this user may not read the log."""
    said = re.findall(r"(?m)^.*(?:NVRM: Xid|fallen off the bus).*$", text or "")
    return None if text is None else [line.strip() for line in said[-20:]]


def _acs_bridges() -> list[str] | None:
    """PCI bridges that redirect peer traffic through the root complex. Needs root for the capability."""
    text = _output("lspci", "-vvv", seconds=3.0)
    if text is None or "ACSCtl" not in text:
        return None
    return re.findall(r"^(\S+) (?:(?!\n\S)[\s\S])*?ACSCtl:\s*SrcValid\+", text, re.MULTILINE)


def within(seconds: float, look: Callable[..., T], *words: object) -> tuple[T | None, float]:
    """(the answer or None, seconds that it took): a name server that does not answer must not hold the doctor up."""
    answer, began = list[T](), time.monotonic()

    def ask() -> None:
        with contextlib.suppress(OSError):
            answer.append(look(*words))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return (answer[0] if answer else None), round(time.monotonic() - began, 3)


def _own_addresses(name: str) -> list[str]:
    answer, _ = within(_TOO_SLOW_SECONDS, socket.getaddrinfo, name, None, 0, socket.SOCK_STREAM)
    return sorted({str(one[4][0]) for one in answer or ()})


def reverse_dns(addresses: list[str]) -> dict[str, float]:
    """Seconds that the name behind each address takes; no more than 3 are waited."""
    return {one: within(_TOO_SLOW_SECONDS, socket.getnameinfo, (one, 0), 0)[1] for one in addresses}


def _interfaces() -> list[dict[str, Any]]:
    import psutil  # type: ignore[import-untyped]

    found, addresses = [], psutil.net_if_addrs()
    for name, state in sorted(psutil.net_if_stats().items()):
        own = [one.address for one in addresses.get(name, []) if one.family == socket.AF_INET]
        one = {"name": name, "up": bool(state.isup), "mtu": state.mtu, "loopback": name.startswith("lo")}
        found.append(one | {"addresses": own})
    return found


def _can_listen(addresses: list[str]) -> str:
    try:
        for address in ("127.0.0.1", *addresses):
            with socket.create_server((address, 0)) as server, socket.create_connection(server.getsockname(), 2):
                pass
    except OSError as error:
        return f"{address}: {error.strerror or error}"
    return ""


def _nccl_files(at: Path, home: str | None) -> dict[str, list[str]]:
    names = ["etc/nccl.conf", *([f"{home.lstrip('/')}/.nccl.conf"] if home else [])]
    texts = {f"/{name}": text for name in names if (text := _text(at / name)) is not None}
    return {name: re.findall(r"(?m)^\s*([^#\s][^\n]*=.*?)\s*$", text) for name, text in texts.items()}


def look_at_directory(path: str) -> dict[str, Any]:
    """Whether a checkpoint could be written below `path`; the nearest folder that exists is tried."""
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    facts: dict[str, Any] = {"path": str(Path(path).absolute()), "place": str(place), "reason": ""}
    try:
        disk = os.statvfs(place)
        facts |= {"free_bytes": disk.f_frsize * disk.f_bavail, "filesystem": leases.file_system(str(place))}
        with tempfile.NamedTemporaryFile(dir=place, prefix=".evener-doctor-", buffering=0) as file:
            began = time.monotonic()
            file.write(bytes(1 << 20))
            os.fsync(file.fileno())
            facts["fsync_seconds"] = round(time.monotonic() - began, 4)
    except OSError as error:
        facts["reason"] = error.strerror or str(error)
    return facts


def _port(port: int) -> dict[str, Any]:
    """Who listens on a port: {} when nobody does, {"pid": None} when the process is hidden."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                mine = one.pid is not None and psutil.Process(one.pid).uids().real == os.getuid()
                return {"pid": one.pid, "mine": mine}
        return {}
    with socket.socket() as probe:  # macOS shows the connections to root alone
        return {"pid": None, "mine": False} if probe.connect_ex(("127.0.0.1", port)) == 0 else {}


def _left_over(root: str) -> list[dict[str, Any]] | None:
    """My processes without a parent that launch ranks, are ranks, or hold a GPU; None without a /proc.

    What shares the session of process 1 is no orphan: a container's first program started it.
    """
    found, me = [], owners.user_name(os.getuid())
    for pid in sorted(int(path.name) for path in Path(root).glob("proc/[0-9]*")):
        one = owners.who(pid, root)
        if one is None or one.user != me or one.parent != 1 or one.session in (0, 1):
            continue
        gpu = any(re.fullmatch(r"/dev/nvidia\d+", file) for file in owners.gpu_devices(pid, root) or ())
        if gpu or any(word in one.command for word in _LAUNCHERS):
            found.append({"pid": pid, "command": one.command[:200], "gpu": gpu})
    return found if os.path.isdir(os.path.join(root, "proc")) else None


def _locks(at: Path) -> dict[str, Any]:
    """Where GPU leases are kept, and whether a lock can be had there."""
    import fcntl

    facts: dict[str, Any] = {"path": "", "mode": None, "lock": "", "filesystem": None}
    try:
        facts["path"] = leases.default_path(str(at / leases.SETTING.lstrip("/")))
        path = at / facts["path"].lstrip("/")
        facts["filesystem"] = leases.file_system(str(path))
        facts["mode"] = f"{path.stat().st_mode & 0o7777:o}"
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor := os.open(path, os.O_RDONLY))
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        pass  # made by the first lease
    except (OSError, UsageError) as error:
        facts["lock"] = str(error)
    return facts
