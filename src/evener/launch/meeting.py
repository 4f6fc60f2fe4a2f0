"""Where the hosts of one job meet, and stay tied as long as it runs: one listener at the head, one JSON line a message.

    host -> head   {"hello": {...}}      who it is, what it was started with, a port of its own to be tried
    head -> host   {"news": text}        who has arrived, and who is missing
                   {"check": {...}}      addresses to connect to: torch's store, and the next host; back: {"checked"}
                   {"go": {...}}         node rank, first rank, the head's address: everybody starts its agent
    host -> head   {"ended": {...}}      how its ranks ended
    head -> host   {"stop": why}         end yours: a host failed, was lost, was asked to stop, or a new one has come
                   {"verdict": {...}}    the cause for all, the exit code, and whether the job starts again
    both ways      {"beat": 1}           silence for LOST_SECONDS means a host or its cable is gone

A round is one static start of torch's agents. Hosts that come and go (an elastic range, a restart) change the next
round, not the running one, so torch's c10d rendezvous, which unpickles what any host on the network sends, is not
needed. Nothing is unpickled here; there is no authentication either: the port belongs in a private network.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from evener.errors import LaunchError
from evener.launch.console import say
from evener.launch.failure import clean
from evener.launch.layout import Layout, Round
from evener.launch.supervise import Ending

BEAT_SECONDS, CHECK_SECONDS, LOST_SECONDS = 5.0, 5.0, 30.0

# What a host may say, beside its beat. Anybody on the network can connect: what is of another form comes from no host.
_TEXT, _TEXT_OR_NONE, _COUNT_OR_NONE = (str,), (str, type(None)), (int, type(None))
_HELLO: dict[str, tuple[type, ...]] = {"name": _TEXT, "what": _TEXT, "label": _TEXT_OR_NONE, "job": _TEXT_OR_NONE}
_HELLO |= {"head": (bool,), "rank": _COUNT_OR_NONE, "port": (int,), "nproc": (int,), "attempt": (int,)}
_FORMS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": _HELLO,
    "checked": {"store": _TEXT_OR_NONE, "next": _TEXT_OR_NONE},
    "ended": {"code": (int,), "stopped": (bool,), "victim": (bool,), "text": _TEXT},
}


def check_form(message: Mapping[str, Any]) -> None:
    """Raises ConnectionError for a message of a form that no host sends."""
    for kind in message.keys() & _FORMS.keys():
        values, form = message[kind], _FORMS[kind]
        if not isinstance(values, dict) or not form.keys() <= values.keys():
            raise ConnectionError(f"its {kind} is none")
        for name, types in form.items():
            value = values[name]
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            least = 1 if name in ("port", "nproc") else -(1 << 31) if name == "code" else 0
            if not fits or (isinstance(value, int) and not least <= value < 1 << (16 if name == "port" else 31)):
                raise ConnectionError(f"its {kind} has an odd {name}")
        job = values["job"] or "-" if kind == "hello" else "-"
        if not re.fullmatch(r"[^/.\x00-\x1f][^/\x00-\x1f]{0,199}", job):  # it names folders
            raise ConnectionError("its hello has an odd job")


class Line:
    """A connection that carries JSON objects, one a line. Raises OSError when the other end is gone or silent."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(BEAT_SECONDS)
        self.connection, self.rest = connection, b""
        self.heard = self.sent = time.monotonic()

    def send(self, **values: Any) -> None:
        self.connection.sendall(json.dumps(values).encode() + b"\n")
        self.sent = time.monotonic()

    def receive(self) -> list[dict[str, Any]]:
        """What has come; sends a beat where one is due."""
        if time.monotonic() > self.sent + BEAT_SECONDS:
            self.send(beat=1)
        while select.select([self.connection], [], [], 0)[0]:
            data = self.connection.recv(1 << 16)
            if not data and b"\n" in self.rest:
                break  # its last words first
            if not data or len(self.rest) > 4 << 20:
                raise ConnectionError("it has closed the connection")
            self.rest, self.heard = self.rest + data, time.monotonic()
        if time.monotonic() > self.heard + LOST_SECONDS:
            raise ConnectionError(f"nothing was heard of it for {LOST_SECONDS:.0f} s")
        *whole, self.rest = self.rest.split(b"\n")
        try:
            return [dict(json.loads(one)) for one in whole]
        except (ValueError, TypeError, RecursionError):
            raise ConnectionError("it speaks something else") from None


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("::1", "localhost")


def addresses(name: str) -> list[str]:
    with contextlib.suppress(OSError):
        return list(dict.fromkeys(str(one[4][0]) for one in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    return []


def interface_of(address: str) -> str | None:
    """The interface that has this address; None where it is none of ours."""
    for name, its in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in its):
            return str(name)
    return None


class Verdict(NamedTuple):
    """What a round's end means for all hosts: who is to blame, the exit code, whether it goes on."""

    host: str
    code: int
    text: str
    again: bool
    why: str


class Tie:
    """A host's own side of the meeting, all of it in the calling thread; `tick` is to be called every second.

    at: The address of the head's listener, for the head itself.
    """

    def __init__(self, layout: Layout, hello: Mapping[str, Any], wait: float, restarts: int, at: str | None) -> None:
        self.layout, self.hello, self.wait_seconds, self.at = layout, dict(hello), wait, at
        self.restarts, self.losses, self.lost, self.told = restarts, 0, "", ""
        self.line: Line | None = None
        self.early: Verdict | None = None  # came while the ranks still ran: the head's own failure
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        # For others to try: nobody accepts there.
        self.port = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=both)

    def gather(self, job: str | None, attempt: int) -> Round:
        """Waits for all hosts. Raises LaunchError: not in time, refused, or a port that is closed."""
        self.met = time.monotonic()  # the last word of the head; what else listens there says none
        while True:
            try:
                return self._gather(job, attempt)
            except ConnectionError as error:
                self._lose(error)
                self._late(f"it answers, but not as a head of evener: {error}")
            time.sleep(1.0)

    def _late(self, why: str) -> None:
        """Says why the head is waited for; raises LaunchError once that has taken too long."""
        to = self.layout.head if self.at is None else self.at
        known = ", ".join(one for one in addresses(to) if one != to)
        where = f"{to}:{self.layout.port}{f' ({known})' if known else ''}"
        if time.monotonic() > self.met + self.wait_seconds:
            fix = ["start the same command there, with the same --head", "`evener doctor --nodes` looks further"]
            raise LaunchError(f"The head {where} was not reached within {self.wait_seconds:.0f} s: {why}.", fix=fix)
        if why != self.told:
            say(f"waiting for the head {where}: {why}")
            self.told = why

    def _gather(self, job: str | None, attempt: int) -> Round:
        here, port = self.layout, self.layout.port
        if self.line is None:
            self.line = Line(self._connect())
            own = {"name": socket.gethostname(), "rank": here.rank, "port": self.port.getsockname()[1]}
            self.line.send(hello={**self.hello, **own, "head": self.at is not None, "job": job, "attempt": attempt})
        limit = time.monotonic() + 2 * self.wait_seconds + 120  # the head decides; this is for a head that never does
        while time.monotonic() < limit:
            for message in self._wait():
                if message.keys() & {"news", "check", "go"}:
                    self.met = time.monotonic()
                if "news" in message:
                    say(clean(str(message["news"]), 1000))
                elif "refused" in message:
                    cause, *evidence = clean(str(message["refused"])).splitlines()
                    fix = [f"open ports {port}, {port + 1} and those above 1024 between the hosts"] if evidence else []
                    raise LaunchError(cause, evidence=[one.strip() for one in evidence], fix=fix)
                elif "check" in message:
                    self.line.send(checked={what: reach(*at) for what, at in message["check"].items()})
                elif "go" in message:
                    local = str(self.line.connection.getsockname()[0])
                    local = message["go"]["head"] if is_loopback(local) else local
                    return Round(**message["go"], local=local, interface=interface_of(local) or "")
        raise LaunchError(f"The head {here.head}:{port} does not decide.")

    def _wait(self) -> list[dict[str, Any]]:
        if self.line is None:
            raise ConnectionError(self.lost)
        select.select([self.line.connection], [], [], 1.0)
        return self.line.receive()

    def _connect(self) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self.at or self.layout.head, self.layout.port), CHECK_SECONDS)
            except OSError as error:
                self._late(_reason(error))
            time.sleep(0.5)

    def tick(self) -> str | None:
        """While the ranks run: "failed", "asked" or "regroup" when they are to be ended."""
        if self.line is None:
            return None
        try:
            for message in self.line.receive():
                if "verdict" in message:
                    self.early = Verdict(**message["verdict"])
                    return "failed"
                if "stop" in message:
                    return str(message["stop"])
        except OSError as error:
            self._lose(error)
            return "failed"
        return None

    def close(self) -> None:
        self.port.close()
        self._lose(ConnectionError())

    def _lose(self, error: OSError) -> None:
        if self.line is not None:
            self.line.connection.close()
        self.line, self.lost = None, str(error)

    def ended(self, ending: Ending) -> Verdict:
        """Tells how this host's ranks ended, and waits for what that means for all of them."""
        if self.early is not None:
            return self.early
        end = {name: getattr(ending, name) for name in ("stopped", "victim", "text")} | {"code": ending.exit_code}
        try:
            if self.line is not None:
                self.line.send(ended=end)
            while True:
                for message in self._wait():
                    if "verdict" in message:
                        return Verdict(**message["verdict"])
        except OSError as error:
            self._lose(error)
            self.losses += 1
            again = self.layout.least < self.layout.most or self.losses <= self.restarts
            head, why = f"the head {self.layout.head}:{self.layout.port}", "waiting for it to come back" * again
            return Verdict(head, ending.exit_code or 1, f"lost: {error}", again, why)


def _reason(error: OSError) -> str:
    reasons: dict[type[OSError], str] = {
        socket.gaierror: "the name is not known here",
        TimeoutError: "no answer (the host is down, or a firewall drops the port)",
        ConnectionRefusedError: "nothing listens there (not started yet, or ended)",
    }
    return reasons.get(type(error)) or error.strerror or str(error)


def reach(host: str, port: int) -> str | None:
    """None when a connection can be made, else why not."""
    try:
        socket.create_connection((host, port), CHECK_SECONDS).close()
    except OSError as error:
        return _reason(error)
    return None
