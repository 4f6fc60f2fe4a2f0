"""Checks of this host: packages, shared memory, limits, CPUs, memory, disks, locks, left-overs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.seen import Seen, error, ok, skipped, unknown, warning
from evener.gpus.leases import NETWORK

GIB = 1 << 30
_UNLIMITED = 1e18
# What a rank and a data worker need of the host's memory: judgements, for a job of which nothing is known.
_RANK_BYTES, _WORKER_BYTES = 2 * GIB, GIB // 2
_FILES_PER_RANK, _FILES_PER_WORKER = 256, 32  # sockets and libraries; pipes, and tensors on their way
_SLOW_FSYNC_SECONDS = 1.0


def size(value: float) -> str:
    """In GiB or MiB, as people say it."""
    if value >= GIB / 2:
        return f"{value / GIB:.1f} GiB" if value < 10 * GIB else f"{value / GIB:.0f} GiB"
    return f"{value / (1 << 20):.0f} MiB"


def named(processes: list[dict[str, Any]]) -> str:
    return "; ".join(f"pid {one['pid']} ({one['command'][:60]})" for one in processes)


def pids(processes: list[dict[str, Any]]) -> str:
    return " ".join(str(one["pid"]) for one in processes)


def nvml_package(f: Facts) -> Iterator[Seen]:
    version = f.packages.get("pynvml")
    if version is None:
        yield ok("pynvml is not installed beside nvidia-ml-py")
    elif int(version.partition(".")[0]) >= 12:
        yield ok(f"pynvml {version} has no module of its own any more")
    else:
        yield warning(f"pynvml {version} owns the module that nvidia-ml-py brings", "uninstall")


def orphans(f: Facts) -> Iterator[Seen]:
    if f.left_over is None:
        yield unknown("the processes could not be looked at")
    elif holders := [one for one in f.left_over if one["gpu"]]:
        yield error(f"their parent is gone and they hold a GPU: {named(holders)}", "kill", pids=pids(holders))
    else:
        yield ok("none")


def shared_memory(f: Facts) -> Iterator[Seen]:
    if f.shm_total_bytes is None or f.shm_free_bytes is None:
        yield unknown("there is no /dev/shm")
        return
    found = f"/dev/shm has {size(f.shm_total_bytes)}, {size(f.shm_free_bytes)} free"
    if f.workers == 0:
        yield ok(f"{found}; no data workers need it")
    elif f.shm_total_bytes < GIB:
        level = error if f.workers and f.shm_total_bytes <= 64 << 20 else warning
        yield level(found, "docker", size="8g")
    elif f.shm_free_bytes < GIB / 2:
        left = f"ls -l /dev/shm; {size(f.shm_total_bytes - f.shm_free_bytes)} in use"
        yield warning(found, "free", left=left, total=size(f.shm_total_bytes))
    else:
        yield ok(found)


def memlock(f: Facts) -> Iterator[Seen]:
    if not f.infiniband:
        yield skipped("no InfiniBand here")
    elif f.memlock_bytes is None:
        yield unknown("the limit could not be read")
    elif f.memlock_bytes >= _UNLIMITED:
        yield ok("unlimited")
    else:
        yield error(f"at most {size(f.memlock_bytes)} may be pinned, with InfiniBand {names(f)}", "unlimited")


def names(f: Facts) -> str:
    return ", ".join(sorted({one["device"] for one in f.infiniband}))


def open_files(f: Facts) -> Iterator[Seen]:
    if f.nofile is None:
        yield unknown("the limit could not be read")
        return
    workers = 4 if f.workers is None else f.workers
    needed = _FILES_PER_RANK + 2 * f.ranks + workers * _FILES_PER_WORKER
    soft = "unlimited" if f.nofile >= _UNLIMITED else f"{f.nofile:.0f}"
    found = f"{soft} open files per process; {workers} data workers{' (assumed)' if f.workers is None else ''}"
    if f.nofile < needed:
        hard = "unlimited" if (f.nofile_hard or 0) >= _UNLIMITED else f"{f.nofile_hard or 0:.0f}"
        yield warning(f"{found} may need {needed}", "raise", hard=hard)
    else:
        yield ok(found)


def cpus(f: Facts) -> Iterator[Seen]:
    if f.usable_cpus is None:
        yield unknown("the usable CPUs could not be counted")
        return
    found = f"{f.usable_cpus} of {f.host_cpus or '?'} CPUs may be used, for {f.ranks} rank{'s' * (f.ranks > 1)}"
    if f.workers is not None:
        found += f" with {f.workers} data worker{'s' * (f.workers != 1)} each"
    wanted = f.ranks * (1 + (f.workers or 0))
    if wanted > f.usable_cpus:
        fits = max(0, f.usable_cpus // f.ranks - 1)
        yield warning(found, "fewer", workers=fits, usable=f.usable_cpus, ranks=f.ranks)
    elif f.host_cpus and f.usable_cpus * 2 <= f.host_cpus and f.workers is None:
        yield warning(found, "count", host=f.host_cpus)
    else:
        yield ok(found)


def memory_limit(f: Facts) -> Iterator[Seen]:
    if f.memory_limit_bytes is None:
        yield ok("no limit below the machine's own memory")
        return
    limit, used = f.memory_limit_bytes, f.memory_used_bytes
    guess = f.ranks * (_RANK_BYTES + (f.workers or 0) * _WORKER_BYTES)
    needed = f.memory_needed_bytes if f.memory_needed_bytes is not None else guess
    in_use = "" if used is None else f", {size(used)} in use"
    found = f"limit {size(limit)}{in_use}; the job needs {'about ' * (f.memory_needed_bytes is None)}{size(needed)}"
    if needed > limit:
        level = warning if f.memory_needed_bytes is None else error
        yield level(found, "raise", needed=size(needed))
    elif used is not None and used > 0.9 * limit:  # page cache counts as used, and is given back
        yield warning(found, "free", limit=size(limit))
    else:
        yield ok(found)


def omp_threads(f: Facts) -> Iterator[Seen]:
    if f.usable_cpus is None:
        yield unknown("the usable CPUs could not be counted")
        return
    value = f.environ.get("OMP_NUM_THREADS")
    share = max(1, f.usable_cpus // f.ranks)
    fill = {"threads": share, "usable": f.usable_cpus, "ranks": f.ranks}
    if value is None:
        if f.ranks > 1 and "RANK" in f.environ:
            yield warning(f"unset: each of {f.ranks} ranks starts {f.usable_cpus} threads", "set", **fill)
        else:
            yield ok(f"unset; `evener run` will set {share}")
    elif not value.isdigit() or int(value) < 1:
        yield warning(f"OMP_NUM_THREADS={value} is no number of threads", "set", **fill)
    elif int(value) * f.ranks > f.usable_cpus:
        yield warning(f"OMP_NUM_THREADS={value} x {f.ranks} ranks on {f.usable_cpus} usable CPUs", "set", **fill)
    elif int(value) == 1 and share >= 4:
        yield warning(f"OMP_NUM_THREADS=1, and every rank could have {share}", "set", **fill)
    else:
        yield ok(f"OMP_NUM_THREADS={value}")


def directory(f: Facts) -> Iterator[Seen]:
    d = f.directory
    if d is None:
        yield unknown("not looked at")
        return
    if d["reason"]:
        yield error(f"{d['path']} cannot be written", "elsewhere", path=d["path"], reason=d["reason"])
        return
    seconds = d["fsync_seconds"]
    found = f"{d['path']}: {size(d['free_bytes'])} free on {d['filesystem'] or 'an unknown file system'}"
    needed = 3 * f.memory_needed_bytes if f.memory_needed_bytes is not None else GIB
    seen = False
    if d["free_bytes"] < needed:
        seen, free = True, size(d["free_bytes"])
        yield error(found, "space", path=d["path"], free=free, needed=size(needed))
    if seconds > _SLOW_FSYNC_SECONDS:
        seen = True
        yield warning(f"{found}; an fsync of 1 MiB takes {seconds:.1f} s", "slow", seconds=f"{seconds:.1f}")
    if not seen:
        yield ok(f"{found}, fsync {1000 * seconds:.0f} ms")


def shared_directory(f: Facts) -> Iterator[Seen]:
    """Part of `directory`, for all hosts together."""
    hosts, path = (f.hosts or {})["hosts"], (f.directory or {}).get("path")
    others = ", ".join(host for host, one in hosts.items() if one.get("sees_token") is False)
    if others:
        yield error(f"{path} is not the same on all hosts", "private", path=path, hosts=others)


def lock_directory(f: Facts) -> Iterator[Seen]:
    lock = f.locks
    if lock is None:
        yield unknown("not looked at")
    elif (lock["filesystem"] or "").startswith(NETWORK):
        fill = {"path": lock["path"], "filesystem": lock["filesystem"]}
        yield error(f"{lock['path']} is on {lock['filesystem']}, a network file system", "network", **fill)
    elif lock["lock"]:
        yield error(f"{lock['path']}: {lock['lock']}", "admin", path=lock["path"])
    elif lock["mode"] not in (None, "1777"):
        found = f"{lock['path']} has mode {lock['mode']}: other users cannot lock there"
        yield warning(found, "admin", path=lock["path"])
    else:
        yield ok(f"{lock['path']}{' (not there yet)' if lock['mode'] is None else ''}: locks work")


def left_over(f: Facts) -> Iterator[Seen]:
    if f.left_over is None and f.port_29500 is None:
        yield unknown("not looked at")
        return
    seen = False
    if alone := [one for one in f.left_over or () if not one["gpu"]]:  # the others are said by `orphans`
        seen = True
        found = f"launchers or ranks without a parent (unless you put them into the background): {named(alone)}"
        yield warning(found, "kill", pids=pids(alone))
    if f.port_29500:
        seen = True
        pid = f.port_29500["pid"]
        found = f"port 29500 is taken by {f'process {pid}' if pid else 'a process that is hidden from you'}"
        yield warning(found, "port" if f.port_29500["mine"] else "foreign", pid=pid)
    if not seen:
        yield ok("port 29500 is free; no launcher or rank without its parent")
