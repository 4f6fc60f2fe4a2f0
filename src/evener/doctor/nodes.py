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
from evener.launch.layout import expand
from evener.launch.meeting import addresses, is_loopback, reach

PORT = 29477
_LONGEST_LINE = 4 << 20
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 30.0


@dataclass(frozen=True)
class Members:
    """Who takes part; the first is the head. `rank` is None where nobody said which is ours."""

    names: tuple[str, ...]
    rank: int | None = None
    port: int = PORT

    def is_head(self, facts: Facts) -> bool:
        if self.rank is not None:
            return self.rank == 0
        head, names = self.names[0], {facts.hostname, facts.hostname.partition(".")[0]}
        own = {address for one in facts.interfaces for address in one["addresses"] if not one["loopback"]}
        return head in names or bool(own & {head, *addresses(head)})

    def missing(self, came: Mapping[str, Any]) -> list[str]:
        known = {name for host in came.values() for name in (host["address"], host["facts"]["hostname"])}
        known |= {name.partition(".")[0] for name in known if not name[0].isdigit()}
        return [name for name in self.names if name not in known and not set(addresses(name)) & known]


def members(given: str, environ: Mapping[str, str]) -> Members:
    """From `--nodes`: a list, or "auto": Slurm's environment. Raises UsageError."""
    names = tuple(name.strip() for name in given.split(",") if name.strip())
    if len(names) > 1:
        return Members(names)
    if given == "auto" and "SLURM_JOB_NODELIST" in environ:
        rank, port = environ.get("SLURM_NODEID"), 20000 + int(environ.get("SLURM_JOB_ID", "0")) % 40000
        return Members(tuple(expand(environ["SLURM_JOB_NODELIST"])), int(rank) if rank else None, port)
    cause = "--nodes: which hosts?" if given == "auto" else f"--nodes {given} is no list of hosts."
    fix = ["on every host: evener doctor --nodes host1,host2,host3"]
    raise UsageError(cause, fix=[*fix, "or under Slurm: srun --ntasks-per-node=1 evener doctor --nodes"])


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
            return dict(json.loads(self.file.readline(_LONGEST_LINE)))
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("no JSON object") from None


@contextlib.contextmanager
def lead(who: Members, facts: Facts, seconds: float) -> Iterator[tuple[Facts, Callable[[str], None]]]:
    """The head's part: (the facts, with those of all hosts; what tells the hosts the worst level of the report)."""
    here = next((one for one in addresses(who.names[0]) if ":" not in one and not is_loopback(one)), facts.address)
    try:
        server = socket.create_server((here, who.port), backlog=max(128, len(who.names)))
    except OSError as error:
        fix = [f"another `evener doctor --nodes` may run here: ss -ltnp 'sport = :{who.port}'"]
        raise UsageError(f"The head cannot listen on {here}:{who.port}: {error.strerror}.", fix=fix) from None
    # To itself the head is a host like any other.
    itself = dataclasses.replace(who, names=(here, *who.names[1:])), facts, seconds
    threading.Thread(target=follow, args=itself, daemon=True).start()
    lines, hosts, deadline = dict[str, _Line](), dict[str, Any](), time.monotonic() + seconds

    def send(name: str, **values: Any) -> None:
        with contextlib.suppress(OSError):  # it went away: `receive` says so
            lines[name].send(**values)

    with server:
        while len(hosts) < len(who.names) and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError, KeyError, TypeError, UsageError):  # a stranger, or one who went away
                connection, (address, _) = server.accept()
                name, line, host = _welcome(connection, address)
                name = name if name not in hosts else f"{name} ({address})"
                lines[name], hosts[name] = line, host
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
    head = f"{who.names[0]} ({here}:{who.port})"
    every = {"head": head, "seconds": seconds, "missing": who.missing(hosts), "hosts": hosts}

    def tell(worst: str) -> None:
        for name in hosts:
            send(name, worst=worst, head=facts.hostname)

    yield dataclasses.replace(facts, hosts=every), tell


def _welcome(connection: socket.socket, address: str) -> tuple[str, _Line, dict[str, Any]]:
    """A host's first words. Raises OSError, KeyError, TypeError, UsageError: it is none of evener's."""
    line = _Line(connection)
    hello = line.receive(_CONNECT_SECONDS)
    # Of another version of evener, perhaps: what it knows more is left out, what it knows less is unknown.
    seen = {one.name: hello["facts"][one.name] for one in dataclasses.fields(Facts) if one.name in hello["facts"]}
    Facts.from_json(json.dumps(seen), address)
    began = time.time()
    line.send(now=began)
    offset = line.receive(_ANSWER_SECONDS)["time"] - (began + time.time()) / 2
    at = {"address": address, "port": int(hello["port"]), "clock_seconds": round(offset, 4)}
    return str(seen["hostname"]), line, {"facts": seen, **at}


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
    deadline, head = time.monotonic() + seconds, f"the head {who.names[0]}:{who.port}"
    while True:
        try:
            connection = socket.create_connection((who.names[0], who.port), _CONNECT_SECONDS)
            break
        except OSError as failed:
            if time.monotonic() > deadline:
                return "error", f"{head} was not reached within {seconds:g} s: {failed.strerror or failed}"
            time.sleep(0.3)
    try:
        with connection, socket.create_server((connection.getsockname()[0], 0), backlog=128) as fresh:
            line = _Line(connection)
            line.send(facts=dataclasses.asdict(facts), port=fresh.getsockname()[1])
            line.receive(_ANSWER_SECONDS)
            line.send(time=time.time())
            told = line.receive(seconds + _ANSWER_SECONDS)
            line.send(
                unreachable=[name for name, at in told["peers"].items() if reach(*at) is not None],
                reverse_dns_seconds=facts.reverse_dns_seconds | reverse_dns([at[0] for at in told["peers"].values()]),
                sees_token=os.path.exists(told["token"]) if told["token"] else True,
            )
            end = line.receive(2 * _ANSWER_SECONDS)
            return str(end["worst"]), f"{end['head']} has the report: the worst of it is {end['worst']}"
    except (OSError, KeyError) as failed:
        return "error", f"{head} went away: {failed or type(failed).__name__}"
