"""All hosts together: who came, who reaches whom, and what differs between them.

The head listens on its own address, for a limited time, and takes one JSON line from each host; nothing is unpickled.
torch's TCPStore would do as well, but listens on every interface and costs each host an import of torch.

    host -> head   {"facts", "port"}                     its facts, and a fresh port that it listens on
    head -> host   {"now"}, host -> head {"time"}        the clock, against half the round trip
    head -> host   {"peers": {name: [address, port]}, "token"}
    host -> head   {"unreachable", "reverse_dns_seconds", "sees_token"}
    head -> host   {"worst", "head"}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from evener.doctor.facts import Facts, reverse_dns
from evener.errors import UsageError
from evener.launch.layout import expand as expand

PORT = 29477
FIELDS = dataclasses.fields(Facts)
_LONGEST_LINE = 4 << 20
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0


@dataclass(frozen=True)
class Members:
    """Who takes part. `names` is empty where only a number is known, `rank` None where nobody said which is ours."""

    count: int
    head: str
    port: int = PORT
    names: tuple[str, ...] = ()
    rank: int | None = None

    def is_head(self, facts: Facts) -> bool:
        if self.rank is not None:
            return self.rank == 0
        names = {facts.hostname, facts.hostname.partition(".")[0]}
        own = {address for one in facts.interfaces for address in one["addresses"] if not one["loopback"]}
        return self.head in names or bool(own & {self.head, *addresses(self.head)})


def members(given: str, head: str | None, environ: Mapping[str, str]) -> Members:
    """From `--nodes` (a list, a number, or "auto": the environment) and `--head`. Raises UsageError."""
    host, colon, port = (head or "").partition(":")
    if colon and not (port.isdigit() and 0 < int(port) < 65536):
        raise UsageError(f"--head {head}: {port!r} is no port.", fix=["--head HOST, or HOST:PORT"])
    at = int(port) if port.isdigit() else PORT
    if "," in given:
        names = tuple(name.strip() for name in given.split(",") if name.strip())
        return Members(len(names), host or names[0], at, names)
    if given.isdigit() and int(given) > 1 and host:
        return Members(int(given), host, at)
    if given == "auto" and "SLURM_JOB_NODELIST" in environ:
        names = tuple(expand(environ["SLURM_JOB_NODELIST"]))
        at = at if port else 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 40000
        rank = environ.get("SLURM_NODEID")
        return Members(len(names), host or names[0], at, names, int(rank) if rank else None)
    for prefix in ("PET_", ""):
        count, rank = environ.get(f"{prefix}NNODES", ""), environ.get(f"{prefix}NODE_RANK", "")
        if given == "auto" and count.isdigit() and rank.isdigit() and f"{prefix}MASTER_ADDR" in environ:
            return Members(int(count), host or environ[f"{prefix}MASTER_ADDR"], at, rank=int(rank))
    raise UsageError(
        "--nodes: which hosts?" if given == "auto" else f"--nodes {given} is no list of hosts.",
        evidence=["neither Slurm nor NNODES, NODE_RANK and MASTER_ADDR are in the environment"] * (given == "auto"),
        fix=[
            "on every host: evener doctor --nodes host1,host2,host3",
            "or: evener doctor --nodes 3 --head host1",
            "or under Slurm: srun --ntasks-per-node=1 evener doctor --nodes",
        ],
    )


def addresses(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return [str(one[4][0]) for one in socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)]
    return []


class _Line:
    """A connection that carries JSON, one object a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.file = connection, connection.makefile("rb")

    def send(self, **values: Any) -> None:
        self.connection.sendall(json.dumps(values).encode() + b"\n")

    def receive(self, seconds: float) -> dict[str, Any]:
        """Raises OSError: nothing came, or no JSON object."""
        self.connection.settimeout(seconds)
        try:
            value = json.loads(self.file.readline(_LONGEST_LINE))
        except ValueError:
            raise ConnectionError("no JSON line") from None
        if not isinstance(value, dict):
            raise ConnectionError("no JSON object")
        return value


def _unreachable(peers: Mapping[str, tuple[str, int]]) -> list[str]:
    found = []
    for name, (address, port) in peers.items():
        try:
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
        except OSError:
            found.append(name)
    return found


@contextlib.contextmanager
def lead(who: Members, facts: Facts, seconds: float) -> Iterator[tuple[Facts, Callable[[str], None]]]:
    """The head's part: (the facts, with those of all hosts; what tells the hosts the worst level of the report)."""
    here = next((one for one in addresses(who.head) if not one.startswith("127.")), facts.address)
    try:
        server = socket.create_server((here, who.port), backlog=max(128, who.count))
    except OSError as error:
        cause = f"The head cannot listen on {here}:{who.port}: {error.strerror or error}."
        raise UsageError(cause, fix=["--head HOST:PORT with a free port, the same on every host"]) from None
    # To itself the head is a host like any other.
    itself = (dataclasses.replace(who, head=here), facts, seconds)
    threading.Thread(target=follow, args=itself, daemon=True).start()
    lines: dict[str, _Line] = {}
    hosts: dict[str, Any] = {}

    def send(name: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # it went away: `receive` says so
            lines[name].send(**values)

    deadline = time.monotonic() + seconds
    with server:
        while len(hosts) < who.count and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, KeyError, TypeError, UsageError):  # a stranger, or one who went away
                connection, (address, _) = server.accept()
                line = _Line(connection)
                hello = line.receive(_CONNECT_SECONDS)
                # Of another version of evener, perhaps: what it knows more is left out, what it knows less is unknown.
                seen = {one.name: hello["facts"][one.name] for one in FIELDS if one.name in hello["facts"]}
                Facts.from_json(json.dumps(seen), address)
                began = time.time()
                line.send(now=began)
                offset = line.receive(_ANSWER_SECONDS)["time"] - (began + time.time()) / 2
                name = str(seen["hostname"])
                name = name if name not in hosts else f"{name} ({address})"
                at = {"address": address, "port": int(hello["port"]), "clock_seconds": round(offset, 4)}
                lines[name], hosts[name] = line, {"facts": seen, **at}
    with _token((facts.directory or {}).get("place")) as token:
        for name in hosts:
            send(name, peers={to: (at["address"], at["port"]) for to, at in hosts.items() if to != name}, token=token)
        for name, host in hosts.items():
            try:
                told = lines[name].receive(_ANSWER_SECONDS)
                host |= {key: told[key] for key in ("unreachable", "sees_token")}
                host["facts"]["reverse_dns_seconds"] = told["reverse_dns_seconds"]
            except (OSError, KeyError):
                host["unreachable"] = ["the head, after its first word"]
    hosts = dict(sorted(hosts.items(), key=lambda item: item[1]["address"] != here))
    every = {"head": f"{who.head} ({here}:{who.port})", "seconds": seconds, "missing": _missing(who, hosts)}

    def tell(worst: str) -> None:
        for name in hosts:
            send(name, worst=worst, head=facts.hostname)

    yield dataclasses.replace(facts, hosts=every | {"hosts": hosts}), tell


def _missing(who: Members, hosts: Mapping[str, Any]) -> list[str]:
    if not who.names:
        left = who.count - len(hosts)
        return [f"{left} of {who.count} hosts (--nodes host1,host2,... names them)"] if left > 0 else []
    came = {one["address"] for one in hosts.values()} | {one["facts"]["hostname"] for one in hosts.values()}
    came |= {name.partition(".")[0] for name in came if not name[0].isdigit()}
    return [name for name in who.names if name not in came and not set(addresses(name)) & came]


@contextlib.contextmanager
def _token(folder: str | None) -> Iterator[str]:
    """A file beside the checkpoints: who sees it has the same directory. "" where none can be made."""
    with contextlib.ExitStack() as stack:
        name = ""
        with contextlib.suppress(OSError):  # the check `directory` says why
            if folder is not None:
                name = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".evener-doctor-")).name
        yield name


def follow(who: Members, facts: Facts, seconds: float) -> tuple[str, str]:
    """Another host's part: (the worst level of the report, a line that says where it is)."""
    deadline, error = time.monotonic() + seconds, "it did not answer"
    while True:
        try:
            connection = socket.create_connection((who.head, who.port), _CONNECT_SECONDS)
            break
        except OSError as failed:
            error = failed.strerror or str(failed)
            if time.monotonic() > deadline:
                return "error", f"the head {who.head}:{who.port} was not reached within {seconds:g} s: {error}"
            time.sleep(0.3)
    try:
        with connection, socket.create_server((connection.getsockname()[0], 0), backlog=128) as fresh:
            line = _Line(connection)
            line.send(facts=dataclasses.asdict(facts), port=fresh.getsockname()[1])
            line.receive(_ANSWER_SECONDS)
            line.send(time=time.time())
            told = line.receive(seconds + _ANSWER_SECONDS)
            line.send(
                unreachable=_unreachable(told["peers"]),
                reverse_dns_seconds=facts.reverse_dns_seconds | reverse_dns([at[0] for at in told["peers"].values()]),
                sees_token=os.path.exists(told["token"]) if told["token"] else True,
            )
            end = line.receive(2 * _ANSWER_SECONDS)
            return str(end["worst"]), f"{end['head']} has the report: the worst of it is {end['worst']}"
    except (OSError, KeyError) as failed:
        return "error", f"the head {who.head}:{who.port} went away: {failed or type(failed).__name__}"
