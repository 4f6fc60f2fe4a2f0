"""Which hosts make one job: from the flags and the environment to a Layout. A function of its arguments alone.

    flags                     --nodes 3 --head HOST:PORT [--node-rank R]; above everything, but never against it
    Slurm, inside of srun     SLURM_STEP_ID, SLURM_STEP_NUM_NODES, SLURM_STEP_NUM_TASKS, SLURM_STEP_NODELIST, ...
    Kubernetes (Kubeflow)     PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_RDZV_ENDPOINT; a pod's RANK, WORLD_SIZE
    SkyPilot                  SKYPILOT_NODE_IPS, SKYPILOT_NODE_RANK

Two sources that say different things are an error that quotes both: a job of half of its hosts trains something else.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from evener.errors import UsageError

PORT = 29400


@dataclass(frozen=True)
class Layout:
    """One job on several hosts, as one of its members sees it."""

    least: int  # how many members take part, at least and
    most: int  # at most; different numbers are an elastic range
    head: str  # name or address of the host that the others come to
    port: int = PORT
    rank: int | None = None  # this member's place, where known before the meeting; None: by arrival, the head's first
    names: tuple[str, ...] = ()  # of the members, by rank, where known
    source: str = "--nodes"  # where this was read, in words for the user
    task: tuple[int, int] | None = None  # (place, count) among the job's tasks on this host, where each is one rank
    nproc: int | None = None  # processes per member that the environment asks for


class Round(NamedTuple):
    """One start, as one host sees it. Ranks of this host begin at `first_rank`; `port` is for torch's store."""

    name: str  # what the others call this host
    job: str
    attempt: int
    node_rank: int
    nnodes: int
    first_rank: int
    world: int
    head: str
    port: int
    local: str
    interface: str


def read(
    environ: Mapping[str, str], nodes: str | None = None, head: str | None = None, node_rank: str | None = None
) -> Layout | None:
    """The layout; None for one host alone. Raises UsageError: not complete, or sources that contradict each other."""
    rank = None if node_rank is None else _whole(node_rank, "--node-rank")
    least, most = (0, 0) if nodes is None else _range(nodes, "--nodes")
    if most == 1:
        return None
    host, port = (None, None) if head is None else split_address(head)
    if most and host and (rank is not None or not any(name in environ for name in ("SLURM_STEP_ID", "PET_NNODES"))):
        found = []  # said in full: nothing is left to be read
    else:
        found = [one for one in (_slurm(environ, nodes), _kubernetes(environ), _skypilot(environ)) if one is not None]
    for one in found[1:]:
        _agree(found[0].source, found[0], one.source, one.least, one.most, one.rank)
    if not found or (found[0].most == 1 and not most):
        if most and host:
            return Layout(least, most, host, port or PORT, rank)
        if most or head is not None or node_rank is not None:
            one_host = "--head and --node-rank are about several hosts."
            evidence = ["neither Slurm nor Kubernetes nor SkyPilot is in the environment"]
            fix = [f"on every host: evener run --nodes {nodes or 3} --head HOST:{PORT} SCRIPT"]
            what = f"--nodes {nodes}: where do the hosts meet?" if most else one_host
            raise UsageError(what, evidence=evidence, fix=fix)
        return None
    layout = found[0]
    _agree(layout.source, layout, "the command line", least or layout.least, most or layout.most, rank)
    rank, least = layout.rank if rank is None else rank, least or layout.least
    return dataclasses.replace(layout, least=least, rank=rank, head=host or layout.head, port=port or layout.port)


def sketch(layout: Layout, nproc: int, job: str) -> Round:
    """What a round may look like, for `--dry-run`: the meeting decides. As if every member had as many processes."""
    rank, nodes, port = layout.rank or 0, layout.most, layout.port + 1
    here = (rank, nodes, rank * nproc, nodes * nproc)
    return Round("", job, 0, *here, layout.head, port, "ADDRESS", "INTERFACE")


def environ_of(layout: Layout | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of one rank per task: where a task sees the GPUs of all tasks on its host, it takes its own."""
    words = environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if layout is None or layout.task is None or len(words) != layout.task[1]:
        return dict(environ)
    return {**environ, "CUDA_VISIBLE_DEVICES": words[layout.task[0]]}


def _agree(source: str, one: Layout, other: str, least: int, most: int, rank: int | None) -> None:
    """Raises UsageError where a second source says another number of hosts, or another rank."""
    if one.most != most:
        what = f"{source} says {one.most} hosts, {other} says {most}."
    elif rank is not None and one.rank not in (None, rank):
        what = f"{source} says node rank {one.rank}, {other} says {rank}."
    else:
        return
    fix = ["leave the flags out: the environment says it all", "or say all of it: --nodes, --head and --node-rank"]
    raise UsageError(what, fix=fix)


def _slurm(environ: Mapping[str, str], nodes: str | None) -> Layout | None:
    def first(*names: str) -> str:
        return next((environ[name] for name in names if environ.get(name)), "")

    if "SLURM_STEP_ID" not in environ:
        granted = first("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
        if "SLURM_JOB_ID" in environ and granted.isdigit() and int(granted) > 1 and nodes is None:
            fix = ["srun --ntasks-per-node=1 evener run SCRIPT", "or on this node alone: evener run --nodes 1 SCRIPT"]
            evidence = [f"SLURM_JOB_NUM_NODES={granted}, and SLURM_STEP_ID is not set: srun did not start this"]
            what = f"This Slurm job has {granted} nodes, and `evener run` was started on one of them only."
            raise UsageError(what, evidence=evidence, fix=fix)
        return None
    hosts = expand(first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    count = _whole(first("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or str(len(hosts)), "SLURM_STEP_NUM_NODES")
    tasks = _whole(first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or str(count), "SLURM_STEP_NUM_TASKS")
    if tasks == 1 or not hosts:
        return None
    job, step = (int(word) if word.isdigit() else 0 for word in (first("SLURM_JOB_ID"), environ["SLURM_STEP_ID"]))
    port = 20000 + 2 * ((job + 7919 * step) % 20000)  # two ports, as good as never those of another step
    if tasks == count:
        rank = _whole(environ.get("SLURM_NODEID", ""), "SLURM_NODEID")
        return Layout(count, count, hosts[0], port, rank, tuple(hosts), f"Slurm (SLURM_STEP_NUM_NODES={count})")
    if tasks < count:
        fix = ["srun --ntasks-per-node=1 evener run SCRIPT"]
        raise UsageError(f"Slurm started {tasks} tasks on {count} nodes.", fix=fix)
    rank = _whole(environ.get("SLURM_PROCID", ""), "SLURM_PROCID")
    here = _tasks_per_node(first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    node = _whole(environ.get("SLURM_NODEID", "0"), "SLURM_NODEID")
    local = _whole(environ.get("SLURM_LOCALID", ""), "SLURM_LOCALID")
    task = (local, here[node] if node < len(here) else 1)
    names = tuple(f"task {i}" for i in range(tasks))
    return Layout(tasks, tasks, hosts[0], port, rank, names, f"Slurm (SLURM_STEP_NUM_TASKS={tasks})", task, 1)


def _kubernetes(environ: Mapping[str, str]) -> Layout | None:
    """Kubeflow: TrainJob, PyTorchJob, PyTorchJob with an elastic policy, and its form without PET_ variables."""
    count, rank = "PET_NNODES", "PET_NODE_RANK"
    if count not in environ:
        # In such a pod RANK is the pod's place and WORLD_SIZE their number; a rank of some launcher has LOCAL_RANK too.
        count, rank = "WORLD_SIZE", "RANK"
        if not {count, rank, "MASTER_ADDR", "KUBERNETES_SERVICE_HOST"} <= environ.keys() or "LOCAL_RANK" in environ:
            return None
    least, most = _range(environ[count], count)
    head, port = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR", ""), PORT
    said = environ.get("PET_MASTER_PORT") or environ.get("MASTER_PORT", "")
    if said:
        port = _whole(said, "PET_MASTER_PORT")
    if "PET_RDZV_ENDPOINT" in environ:
        head, named = split_address(environ["PET_RDZV_ENDPOINT"])
        port = named or port
    if not head and most > 1:
        fix = ["set PET_MASTER_ADDR and PET_NODE_RANK", "or evener run --nodes N --head HOST:PORT SCRIPT"]
        raise UsageError(f"{count}={environ[count]}, and nothing says where the hosts meet.", fix=fix)
    place = _whole(environ[rank], rank) if environ.get(rank) and "PET_RDZV_ENDPOINT" not in environ else None
    job = re.match(r"(.+)-(node-0-0|master-0|worker-0)(\..*)?$", head)
    names: tuple[str, ...] = ()
    if job is not None and job[2] == "master-0":
        names = (f"{job[1]}-master-0", *(f"{job[1]}-worker-{i}" for i in range(most - 1)))
    elif job is not None:
        names = tuple(f"{job[1]}-{job[2][:-1]}{i}" for i in range(most))
    words = environ.get("PET_NPROC_PER_NODE", "")
    nproc = int(words) if words.isdigit() and int(words) > 0 else None
    return Layout(least, most, head, port, place, names, f"Kubernetes ({count}={environ[count]})", nproc=nproc)


def _skypilot(environ: Mapping[str, str]) -> Layout | None:
    hosts = tuple(environ.get("SKYPILOT_NODE_IPS", "").split())
    if not hosts:
        return None
    rank = _whole(environ.get("SKYPILOT_NODE_RANK", ""), "SKYPILOT_NODE_RANK")
    return Layout(len(hosts), len(hosts), hosts[0], PORT, rank, hosts, f"SkyPilot ({len(hosts)} SKYPILOT_NODE_IPS)")


def _whole(text: str, name: str) -> int:
    if not re.fullmatch(r"\d{1,6}", text):
        raise UsageError(f"{name}={text!r} is not a number." if text else f"{name} is not set, and is needed here.")
    return int(text)


def _range(text: str, name: str) -> tuple[int, int]:
    """ "3" or "2:3" """
    first, colon, last = text.partition(":")
    least = _whole(first, name)
    most = _whole(last, name) if colon else least
    if not 1 <= least <= most:
        raise UsageError(f"{name} {text}: a number of hosts, or a range such as 2:3.")
    return least, most


def split_address(text: str) -> tuple[str, int | None]:
    """HOST, HOST:PORT, [IPv6]:PORT -> (host, port or None). Raises UsageError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^:\s]+))(?::(\d+))?", text)
    if found is None or (found[3] and not 0 < int(found[3]) < 65535):  # the next port is used too
        raise UsageError(f"{text!r} is no HOST:PORT.", fix=[f"--head host1:{PORT}; the port and the next one are used"])
    return found[1] or found[2], int(found[3]) if found[3] else None


def expand(text: str) -> list[str]:
    """Slurm's short form: "gpu[01-03,7],login" -> gpu01 gpu02 gpu03 gpu7 login"""
    found: list[str] = []
    for name, inside, tail in re.findall(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,\[\]]*)", text):
        for part in inside.split(",") if inside else [""]:
            first, _, last = part.partition("-")
            numbers = [first] if not last else [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)]
            found += [f"{name}{number}{tail}" for number in numbers]
    return found


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's short form: "2(x3),1" -> 2 2 2 1"""
    return [int(one) for one, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
