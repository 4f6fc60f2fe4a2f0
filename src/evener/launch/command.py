"""A launch as a value: from what was asked and what the machine has, to one frozen command and environment.

Nothing here starts a process, makes a folder or reads the environment: `decide` is a function of its arguments, so
`--dry-run` prints exactly what would run and tests compare it.

**Rendezvous without a listening socket.** torch's c10d rendezvous over TCP listens on every interface, without
authentication, and unpickles what it reads there. On one machine a file store in a private folder (`store_type=file`)
and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 avoid it (without the second the agent opens a TCP store for the ranks all the
same, and restarted ranks read the addresses of dead ones from it). A script's own `init_process_group()` listens.

**GPUs** were chosen (and leased) before. All stay visible to all ranks: unchanged scripts call
`torch.cuda.set_device(LOCAL_RANK)`, and NCCL needs to see its peers. With several memory nodes the shim binds a rank to
the CPUs of its GPU's (torchrun's --numa-binding needs the program numactl, and starts CUDA in the agent).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evener.errors import DeviceError, UsageError
from evener.launch import debug
from evener.launch.layout import Round
from evener.launch.machine import Machine
from evener.plan.handed import VARIABLE, LaunchPlan

TEE = ("rank0", "all", "none")


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    script: str  # a path, or a module's name when `module` is true
    args: tuple[str, ...] = ()
    module: bool = False
    nproc: int | None = None  # None: one per chosen GPU, or one
    cpu: bool = False
    bind: bool = True  # ranks to the CPUs near their GPU
    debug: bool = False  # slow, and says where a fault is
    logs: str = os.path.join("runs", "logs")
    tee: str = "rank0"
    overrides: Mapping[str, Any] = field(default_factory=dict)
    hang_after: float | None = None  # seconds
    decided: Mapping[str, Any] = field(default_factory=dict)  # by a plan, for what the script leaves open
    predicted: Mapping[str, Any] = field(default_factory=dict)  # its peaks


@dataclass(frozen=True)
class Command:
    """An argument list and how the environment differs from the caller's."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...] = ()

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        return {**{name: value for name, value in base.items() if name not in self.unset}, **self.env}

    def __str__(self) -> str:
        lines = ["env", *(f"  -u {name}" for name in self.unset)]
        lines += [f"  {name}={shlex.quote(value)}" for name, value in self.env.items()]
        return " \\\n".join([*lines, f"  {shlex.join(self.argv)}"])


@dataclass(frozen=True)
class Launch:
    """Everything that was decided; `supervise` carries it out."""

    run_id: str
    nproc: int
    tee: str
    private: str  # a folder of mode 0700 that lives as long as the job: plan, stores, console pipes
    logs: str  # the folder of this job's logs, absolute
    plan: LaunchPlan
    command: Command
    notes: tuple[str, ...] = ()  # for the user, about what was chosen for them
    cpus: tuple[tuple[int, ...], ...] = ()  # of every rank, where ranks are bound
    leased: tuple[int, ...] = ()  # descriptors that hold the lease of the GPUs; the agent gets them too
    debug: bool = False
    hang_after: float | None = None
    first_rank: int = 0  # the lowest on this host


def shim_path() -> str:
    """The file that every rank starts with. By path, so that a rank imports nothing of evener before its script."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "shim.py")


def name_run(script: str, when: str, token: str) -> str:
    """A name for files and messages: time, script, and a token against two starts in one second."""
    stem = os.path.splitext(os.path.basename(script))[0]
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "script"
    return f"{when}-{stem[:40]}-{token}"


def decide(
    request: Request,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    run_id: str,
    cwd: str,
    attempt: int = 0,
    round: Round | None = None,
) -> Launch:
    """The launch for a request on a machine; a restarted job's next `attempt` has folders and stores of its own.

    `round` is this host's place among several, as they agreed on it; the job's name and attempt are then in it.

    Raises UsageError or DeviceError when it cannot be what was meant.
    """
    if request.tee not in TEE:
        raise UsageError(f"--tee {request.tee} is not known.", fix=[f"--tee is one of: {', '.join(TEE)}"])
    nproc, why = processes(request, machine)
    job, run_id = run_id, f"{run_id}-restart{attempt}" if attempt else run_id
    if round is not None:  # hosts may share the disk of the logs, and one host may have several members
        run_id = f"{run_id}-node{round.node_rank}"
    private = os.path.join(machine.temporary, f"evener-{run_id}")
    logs = os.path.join(cwd, request.logs, run_id)
    asked: dict[str, Any] = {name: dict(getattr(request, name)) for name in ("overrides", "decided", "predicted")}
    store = None if round else os.path.join(private, "store")
    beats = None if request.hang_after is None else os.path.join(private, "beats")
    plan = LaunchPlan(job, "cpu" if request.cpu else None, store, beats, attempt=attempt, **asked)
    on_cpu = request.cpu or not machine.gpus.words
    notes = [f"{nproc} process{'es' if nproc > 1 else ''} on {'the CPU' if on_cpu else machine.gpus.text}{why}"]
    wanted = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "GLOO_SOCKET_IFNAME": machine.loopback}
    if round is None:
        env = {VARIABLE: os.path.join(private, "plan.json"), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    else:
        env = {VARIABLE: plan.to_json()}  # the value itself: hosts need not share a disk
        # By its own name a host may be 127.0.1.1: gloo and NCCL get the interface that leads to the head.
        wanted |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), round.interface)
        last = f"-{round.first_rank + nproc - 1}" if nproc > 1 else ""
        notes[0] += f", rank{'s' * bool(last)} {round.first_rank}{last} of {round.world}"
    if request.cpu:
        env["CUDA_VISIBLE_DEVICES"] = ""
        # Without it, accelerate on a machine without GPUs takes every rank for a job of its own, and says nothing.
        wanted["ACCELERATE_USE_CPU"] = "true"
    elif machine.gpus.words:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(machine.gpus.words)
    cpus = _near_cpus(request, machine, nproc)
    if cpus:
        notes.append("ranks bound to the CPUs of their GPU's memory node")
    if "OMP_NUM_THREADS" not in environ:
        threads, how = machine.usable_cpus // nproc, f"{machine.usable_cpus} usable CPUs // {nproc}"
        near = min((len(one) // cpus.count(one) for one in cpus), default=threads)
        if near < threads:
            threads, how = near, f"{near} CPUs per rank on the smallest memory node"
        env["OMP_NUM_THREADS"] = str(max(1, threads))
        notes.append(f"OMP_NUM_THREADS={max(1, threads)} ({how})")
    if request.debug:
        wanted |= debug.environment(logs)
    env |= {name: value for name, value in wanted.items() if value and name not in environ}
    # PET_* variables (Kubernetes sets them) are defaults for every option of the agent that is not given here.
    unset = tuple(sorted(name for name in environ if name.startswith("PET_")))
    command = Command(_agent(request, machine, private, nproc, run_id, round), env, unset)
    told = ("; ".join(notes), *machine.gpus.notes, *([debug.note(environ, cpu=on_cpu)] if request.debug else []))
    more: dict[str, Any] = {"cpus": cpus, "leased": machine.gpus.leased, "debug": request.debug}
    more |= {"hang_after": request.hang_after, "first_rank": round.first_rank if round else 0}
    return Launch(run_id, nproc, request.tee, private, logs, plan, command, told, **more)


def _near_cpus(request: Request, machine: Machine, nproc: int) -> tuple[tuple[int, ...], ...]:
    """The CPUs of every rank: those of its GPU's memory node. Empty unless it is clear for all of them."""
    nodes = machine.gpus.numa_nodes
    if not request.bind or len(nodes) != nproc or sum(bool(cpus) for cpus in machine.node_cpus.values()) < 2:
        return ()
    cpus = tuple(() if node is None else machine.node_cpus.get(node, ()) for node in nodes)
    return cpus if all(cpus) else ()


def processes(request: Request, machine: Machine) -> tuple[int, str]:
    """How many, and why when it was not the user who said it."""
    gpus, nproc = machine.gpus.words, request.nproc
    if nproc is not None and nproc < 1:
        fix = ["--nproc N with N >= 1, or leave it out: one process per GPU"]
        raise UsageError(f"--nproc {nproc}: at least one process is needed.", fix=fix)
    if nproc is not None and not request.cpu and gpus is not None and nproc > max(1, len(gpus)):
        seen = f"{len(gpus)} GPU{'s' * (len(gpus) != 1)}" if gpus else "no GPU"
        fix = ["add --cpu to run all processes on the CPU"]
        fix += [f"--nproc {len(gpus)}: two processes on one GPU would share its memory"] if gpus else []
        text = f"--nproc {nproc} asks for more processes than there are GPUs: {seen} chosen."
        raise DeviceError(text, evidence=[", ".join(gpus)] if gpus else [], fix=fix)
    if nproc is not None:
        return nproc, ""
    if request.cpu:
        return 1, " (--nproc N for more)"
    if gpus is None:
        fix = ["say how many processes: --nproc N", "or run on the CPU: --cpu"]
        text = "The GPUs of this machine cannot be counted."
        raise DeviceError(text, evidence=[machine.gpus.unknown_because], fix=fix)
    return (len(gpus), "") if gpus else (1, " (no GPU visible)")


def _agent(
    request: Request, machine: Machine, private: str, nproc: int, run_id: str, round: Round | None
) -> tuple[str, ...]:
    """torch's elastic agent for this machine, and the shim as the program of every rank."""
    meet: dict[str, Any]
    if round is None:
        meet = {"nnodes": 1, "nproc-per-node": nproc, "rdzv-backend": "c10d"}
        meet |= {"rdzv-endpoint": os.path.join(private, "rendezvous"), "rdzv-id": run_id}
        # The file store only ever grows: a heartbeat every 5 s, its default, is of no use to a single agent.
        meet |= {"rdzv-conf": "store_type=file,keep_alive_interval=3600", "local-addr": "127.0.0.1"}
    else:
        meet = {"nnodes": round.nnodes, "nproc-per-node": nproc, "node-rank": round.node_rank, "rdzv-backend": "static"}
        meet |= {"master-addr": round.head, "master-port": round.port, "rdzv-id": f"{round.job}-{round.attempt}"}
        meet |= {"rdzv-conf": "timeout=120", "local-addr": round.local}
    # The agent passes arguments through string.Template: a dollar sign has to be doubled to arrive as one.
    target = [arg.replace("$", "$$") for arg in (request.script, *request.args)]
    return (
        machine.python,
        "-P",  # without it a file named like a standard module in the working directory would be the agent's
        "-m",
        "torch.distributed.run",
        *(f"--{name}={value}" for name, value in meet.items()),
        "--max-restarts=0",
        "--event-log-handler=console",  # one JSON line per rank at the end: the only place where exit codes are kept
        f"--log-dir={os.path.join(private, 'elastic')}",
        "--",  # without it the agent's own parser stumbles over options of the script that begin like one of its own
        shim_path(),
        os.path.join(private, "job.json"),
        *(("-m",) if request.module else ()),
        *target,
    )
