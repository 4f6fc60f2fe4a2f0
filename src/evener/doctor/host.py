"""Checks of this host: packages, shared memory, limits, CPUs, memory, disks, locks, left-overs."""

from __future__ import annotations

from typing import Any

from evener.doctor.facts import Facts
from evener.doctor.seen import Faults, Skipped, Unknown, error, warning
from evener.gpus.leases import NETWORK
from evener.gpus.look import size

GIB = 1 << 30
_UNLIMITED = 1e18
# What a rank and a data worker need: judgements, for a job of which nothing is known.
_RANK_BYTES, _WORKER_BYTES = 2 * GIB, GIB // 2
_RANK_FILES, _WORKER_FILES = 256, 32  # sockets and libraries; pipes, and tensors on their way
_SLOW_FSYNC_SECONDS = 1.0


def known(value: Any, what: str) -> Any:
    """`value`; a check that has nothing to look at ends here."""
    if value is None:
        raise Unknown(f"{what} could not be looked at")
    return value


def _named(processes: list[dict[str, Any]]) -> tuple[str, str]:
    """In words, and as arguments of kill."""
    words = "; ".join(f"pid {one['pid']} ({one['command'][:60]})" for one in processes)
    return words, " ".join(str(one["pid"]) for one in processes)


def nvml_package(f: Facts) -> Faults:
    version = f.packages.get("pynvml", "12")
    if int(version.partition(".")[0]) < 12:  # later ones have no module of their own any more
        yield warning(f"pynvml {version} owns the module that nvidia-ml-py brings", "uninstall")
    return "nvidia-ml-py has the module pynvml to itself"


def orphans(f: Facts) -> Faults:
    if holders := [one for one in known(f.left_over, "processes") if one["gpu"]]:
        words, pids = _named(holders)
        yield error(f"their parent is gone and they hold a GPU: {words}", "kill", pids=pids)
    return "none"


def shared_memory(f: Facts) -> Faults:
    total, free = known(f.shm_total_bytes, "/dev/shm"), f.shm_free_bytes or 0
    found = f"/dev/shm has {size(total)}, {size(free)} free"
    if f.workers == 0:
        return f"{found}; no data workers need it"
    if total < GIB:
        yield (error if f.workers and total <= 64 << 20 else warning)(found, "docker", size="8g")
    elif free < GIB / 2:
        yield warning(found, "free", left=f"ls -l /dev/shm; {size(total - free)} in use", total=size(total))
    return found


def memlock(f: Facts) -> Faults:
    if not f.infiniband:
        raise Skipped("no InfiniBand here")
    if (limit := known(f.memlock_bytes, "the limit")) < _UNLIMITED:
        devices = ", ".join(sorted({one["device"] for one in f.infiniband}))
        yield error(f"at most {size(int(limit))} may be pinned, with InfiniBand {devices}", "unlimited")
    return "unlimited"


def open_files(f: Facts) -> Faults:
    limit, workers = known(f.nofile, "the limit"), 4 if f.workers is None else f.workers
    needed = _RANK_FILES + 2 * f.ranks + workers * _WORKER_FILES
    found = f"{limit:.0f} open files per process, {workers} data workers{' (assumed)' * (f.workers is None)}"
    if limit < needed:
        yield warning(f"{found} may need {needed}", "raise", hard=f"{f.nofile_hard or 0:.0f}")
    return found if limit < _UNLIMITED else "unlimited"


def cpus(f: Facts) -> Faults:
    usable = known(f.usable_cpus, "CPUs")
    found = f"{usable} of {f.host_cpus or '?'} CPUs may be used, for {f.ranks} rank{'s' * (f.ranks > 1)}"
    if f.workers is not None:
        found += f" with {f.workers} data worker{'s' * (f.workers != 1)} each"
    if f.ranks * (1 + (f.workers or 0)) > usable:
        yield warning(found, "fewer", workers=max(0, usable // f.ranks - 1), usable=usable, ranks=f.ranks)
    elif f.host_cpus and usable * 2 <= f.host_cpus and f.workers is None:
        yield warning(found, "count", host=f.host_cpus)
    return found


def memory_limit(f: Facts) -> Faults:
    if (limit := f.memory_limit_bytes) is None:
        return "no limit below the machine's own memory"
    used, told = f.memory_used_bytes, f.memory_needed_bytes is not None
    needed = f.memory_needed_bytes or f.ranks * (_RANK_BYTES + (f.workers or 0) * _WORKER_BYTES)
    in_use = "" if used is None else f", {size(used)} in use"
    found = f"limit {size(limit)}{in_use}; the job needs {'about ' * (not told)}{size(needed)}"
    if needed > limit:
        yield (error if told else warning)(found, "raise", needed=size(needed))
    elif used is not None and used > 0.9 * limit:
        yield warning(found, "free", limit=size(limit))
    return found


def omp_threads(f: Facts) -> Faults:
    usable, value = known(f.usable_cpus, "CPUs"), f.environ.get("OMP_NUM_THREADS")
    fill = {"threads": max(1, usable // f.ranks), "usable": usable, "ranks": f.ranks}
    if value is None:
        if f.ranks > 1 and "RANK" in f.environ:
            yield warning(f"unset: each of {f.ranks} ranks starts {usable} threads", "set", **fill)
        return f"unset; `evener run` will set {fill['threads']}"
    if not value.isdigit() or int(value) < 1:
        yield warning(f"OMP_NUM_THREADS={value} is no number of threads", "set", **fill)
    elif int(value) * f.ranks > usable:
        yield warning(f"OMP_NUM_THREADS={value} x {f.ranks} ranks on {usable} usable CPUs", "set", **fill)
    elif int(value) == 1 and fill["threads"] >= 4:
        yield warning(f"OMP_NUM_THREADS=1, and every rank could have {fill['threads']}", "set", **fill)
    return f"OMP_NUM_THREADS={value}"


def directory(f: Facts) -> Faults:
    d = known(f.directory, "it")
    path, told = d["path"], f.memory_needed_bytes
    if d["reason"]:
        yield error(f"{path} cannot be written", "elsewhere", path=path, reason=d["reason"])
        return ""
    free, needed, seconds = d["free_bytes"], GIB if told is None else 3 * told, d["fsync_seconds"]
    found = f"{path}: {size(free)} free on {d['filesystem'] or 'an unknown file system'}"
    if free < needed:
        yield error(found, "space", path=path, free=size(free), needed=size(needed))
    if seconds > _SLOW_FSYNC_SECONDS:
        yield warning(f"{found}; an fsync of 1 MiB takes {seconds:.1f} s", "slow", seconds=f"{seconds:.1f}")
    return f"{found}, fsync {1000 * seconds:.0f} ms"


def shared_directory(f: Facts) -> Faults:
    """Part of `directory`, for all hosts together."""
    hosts, path = (f.hosts or {})["hosts"], (f.directory or {}).get("path")
    if others := ", ".join(host for host, one in hosts.items() if one.get("sees_token") is False):
        yield error(f"{path} is not the same on all hosts", "private", path=path, hosts=others)
    return f"{path} is the same on all hosts"


def lock_directory(f: Facts) -> Faults:
    lock = known(f.locks, "it")
    path, kind, mode = lock["path"], lock["filesystem"] or "", lock["mode"]
    if kind.startswith(NETWORK):
        yield error(f"{path} is on {kind}, a network file system", "network", path=path, filesystem=kind)
    elif lock["lock"]:
        yield error(f"{path}: {lock['lock']}", "admin", path=path)
    elif mode not in (None, "1777"):
        yield warning(f"{path} has mode {mode}: other users cannot lock there", "admin", path=path)
    return f"{path}{' (not there yet)' * (mode is None)}: locks work"


def left_over(f: Facts) -> Faults:
    if alone := [one for one in known(f.left_over, "processes") if not one["gpu"]]:  # the others are said by `orphans`
        words, pids = _named(alone)
        found = f"launchers or ranks without a parent (unless you put them into the background): {words}"
        yield warning(found, "kill", pids=pids)
    if port := f.port_29500:
        who = f"process {port['pid']}" if port["pid"] else "a process that is hidden from you"
        yield warning(f"port 29500 is taken by {who}", "port" if port["mine"] else "foreign", pid=port["pid"])
    return "port 29500 is free; no launcher or rank without its parent"
