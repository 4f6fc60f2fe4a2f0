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
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil  # type: ignore[import-untyped]

from evener.errors import LaunchError
from evener.launch.console import say
from evener.launch.layout import Layout, Round
from evener.launch.restart import Attempt, seconds_to_wait, why_again
from evener.launch.supervise import Ending

BEAT_SECONDS, LOST_SECONDS = 5.0, 30.0
SETTLE_SECONDS = 10.0  # an elastic job that has enough hosts waits so long for one more
END_SECONDS = 120.0  # from the first bad end on; hosts that are asked to stop need 15 s
CHECK_SECONDS = 5.0


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
        except (ValueError, TypeError):
            raise ConnectionError("it speaks something else") from None


def _bare(address: str) -> bool:
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


def listen(layout: Layout) -> socket.socket | None:
    """The meeting's listener when this host is its head; None when it is another's."""
    known = addresses(layout.head)
    own = [one for one in known if interface_of(one) is not None and not _bare(one)]
    name = socket.gethostname()
    itself = _bare(layout.head) or layout.head.partition(".")[0] == name.partition(".")[0]
    if layout.rank not in (None, 0) or (layout.rank is None and not own and not itself):
        return None
    at = own[0] if own else "127.0.0.1" if _bare(layout.head) else ""
    if not at:
        say(f"the name {layout.head} is {', '.join(known) or 'not known'} here: other hosts are met on every interface")
    try:
        family = socket.AF_INET6 if ":" in at else socket.AF_INET
        return socket.create_server((at, layout.port), family=family, backlog=max(128, layout.most))
    except OSError as error:
        if layout.rank is None and error.errno in (98, 48):  # in use: by the head, if this is one more on its host
            return None
        raise LaunchError(
            f"The head cannot listen on {at or 'port'}:{layout.port}: {error.strerror or error}.",
            fix=["another port, the same on every host: --head HOST:PORT"],
        ) from None


@dataclass(eq=False)
class _Guest:
    """A host, as the head sees it."""

    line: Line
    address: str
    since: float
    hello: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    checked: dict[str, str | None] | None = None
    ended: dict[str, Any] | None = None
    playing: bool = False  # takes part in this round


class Head(threading.Thread):
    """The meeting's own side: who is here, when to go, who failed first. A thread of the head's launcher."""

    def __init__(self, layout: Layout, server: socket.socket, job: str, wait_seconds: float, restarts: int) -> None:
        super().__init__(daemon=True)
        self.layout, self.server, self.job, self.wait_seconds = layout, server, job, wait_seconds
        self.restarts, self.attempt, self.attempts = restarts, 0, list[Attempt]()
        self.guests: list[_Guest] = []
        self.store: socket.socket | None = None
        self.known: list[str] = []  # the names of the last round
        self.finished = False
        self._gather(0.0)

    def run(self) -> None:
        phases: dict[str, Callable[[float], None]] = {
            "gather": self._tick_gather, "check": self._tick_check, "run": self._tick_run,
        }  # fmt: skip
        while not self.finished:
            lines = [guest.line.connection for guest in self.guests]
            ready, _, _ = select.select([self.server, *lines], [], [], 0.5)
            if self.server in ready:
                with contextlib.suppress(OSError):
                    connection, address = self.server.accept()
                    self.guests.append(_Guest(Line(connection), str(address[0]), time.monotonic()))
            for guest in list(self.guests):
                try:
                    for message in guest.line.receive():
                        self._on(guest, message)
                except (OSError, KeyError, TypeError, ValueError) as error:
                    self._lose(guest, str(error))
            phases[self.phase](time.monotonic())
        self.server.close()
        for guest in self.guests:  # closed at once, a line that is still being written to would lose its last words
            with contextlib.suppress(OSError):
                guest.line.connection.shutdown(socket.SHUT_WR)
                while guest.line.connection.recv(1 << 16):
                    pass
            guest.line.connection.close()

    def _send(self, guests: list[_Guest], **values: Any) -> None:
        for guest in list(guests):
            with contextlib.suppress(OSError):  # it went away: the next `receive` says so
                guest.line.send(**values)

    def _known(self) -> list[_Guest]:
        return [guest for guest in self.guests if guest.name]

    def _on(self, guest: _Guest, message: Mapping[str, Any]) -> None:
        if "hello" in message and not guest.name:
            self._welcome(guest, message["hello"])
        elif "checked" in message:
            guest.checked = message["checked"]
        elif "ended" in message and guest.playing:
            guest.ended = message["ended"]
            if guest.ended["code"] != 0 or guest.ended["stopped"]:
                self._bad(guest.name, guest.ended)

    def _bad(self, name: str, end: dict[str, Any]) -> None:
        """A host's ranks have not ended well: all others are to end too."""
        if not self.bad:
            self.first_bad = time.monotonic()
            still = [one for one in self._known() if one.playing and one.ended is None]
            self._send(still, stop="asked" if end["stopped"] else "failed")
        self.bad.append((name, end))

    def _lose(self, guest: _Guest, why: str) -> None:
        self.guests.remove(guest)
        guest.line.connection.close()
        if guest.playing and guest.ended is None and self.phase == "run":
            text = f"lost: {why}"
            end = {"code": 1, "stopped": False, "victim": False, "lost": True, "text": text, "seconds": 1e9}
            self._bad(guest.name, end)
        elif guest.name and self.phase == "check":
            self._gather(0.0)
        elif guest.name and self.phase == "gather":
            self._send(self._known(), news=f"{guest.name} has left; {self._arrived()}")

    def _welcome(self, guest: _Guest, hello: dict[str, Any]) -> None:
        label = str(hello["name"]) if hello["label"] is None else f"{hello['name']} {hello['label']}"
        same = [one for one in self._known() if one.name.partition(" (")[0] == label]
        first = next(iter(self._known()), None)
        wrong = ""
        if first is not None and hello["what"] != first.hello["what"]:
            wrong = f"it was started with another command: {hello['what']} here, {first.hello['what']} on {first.name}"
        taken = [one.name for one in self._known() if hello["rank"] is not None and one.hello["rank"] == hello["rank"]]
        if taken and not wrong:
            wrong = f"node rank {hello['rank']} is taken by {taken[0]}"
        if hello["rank"] is not None and hello["rank"] >= self.layout.most:
            wrong = f"node rank {hello['rank']} of {self.layout.most} hosts: ranks run from 0 to {self.layout.most - 1}"
        if wrong:
            self._send([guest], refused=f"{label} cannot take part: {wrong}.")
            return
        guest.name, guest.hello = label if not same else f"{label} ({len(same) + 1})", hello
        self.attempt = max(self.attempt, int(hello["attempt"]))
        self.job = hello["job"] or self.job
        self.arrival = guest.since = time.monotonic()
        if self.phase == "run":
            elastic = self.layout.least < self.layout.most
            if elastic and not self.bad and sum(one.playing for one in self.guests) < self.layout.most:
                self.regroup = True
                self._send([one for one in self.guests if one.playing and one.ended is None], stop="regroup")
        else:
            self._send(self._known(), news=self._arrived())
            if self.phase == "check":
                self._gather(0.0)

    # --- one round ------------------------------------------------------------------------------------------------

    def _gather(self, wait: float) -> None:
        now = time.monotonic()
        self.phase, self.not_before, self.deadline, self.arrival = (
            "gather",
            now + wait,
            now + wait + self.wait_seconds,
            now,
        )
        self.bad: list[tuple[str, dict[str, Any]]] = []
        self.regroup = False
        if self.store is not None:
            self.store.close()
            self.store = None
        for guest in self.guests:
            guest.checked, guest.ended, guest.playing = None, None, False

    def _arrived(self) -> str:
        here = self._known()
        names = [name for rank, name in enumerate(self.layout.names) if rank not in {one.hello["rank"] for one in here}]
        if not self.layout.names or all(one.hello["rank"] is None for one in here):
            came = {one.name for one in here}
            names = [name for name in self.layout.names or self.known if name not in came]
        wanted = (
            self.layout.most if self.layout.least == self.layout.most else f"{self.layout.least} to {self.layout.most}"
        )
        text = f"{len(here)} of {wanted} {'tasks' if self.layout.task else 'hosts'} arrived"
        missing = names[: max(0, self.layout.most - len(here))]
        if missing:
            return f"{text}: missing {', '.join(missing)}"
        return f"{text}: {', '.join(one.name for one in here)}"

    def _tick_gather(self, now: float) -> None:
        here = self._known()
        enough = len(here) >= self.layout.least
        settled = enough and self.layout.least < self.layout.most and now > self.arrival + SETTLE_SECONDS
        if now >= self.not_before and (len(here) >= self.layout.most or settled or (enough and now > self.deadline)):
            self._check(here[: self.layout.most])
        elif now > self.deadline:
            self._refuse(f"{self._arrived()}, within {self.wait_seconds:.0f} s.")

    def _refuse(self, text: str) -> None:
        self._send(self.guests, refused=text)
        self.finished = True

    def _check(self, here: list[_Guest]) -> None:
        """Before anything is started: does every host reach the store's port, and the next host?"""
        here.sort(key=lambda one: (one.hello["rank"] if one.hello["rank"] is not None else self.layout.most, one.since))
        if self.layout.rank is None:  # the head's own first: torch's store listens where node rank 0 is
            here.sort(key=lambda one: not one.hello["head"])
        own = [str(one.line.connection.getsockname()[0]) for one in here]
        self.address = next((one for one in own if not _bare(one)), own[0])
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        at = (self.address, self.layout.port + 1)
        try:
            self.store = socket.create_server(at, family=family, backlog=128)
        except OSError as error:
            self._refuse(f"The head cannot listen on {at[0]}:{at[1]}, the port for torch's store: {error.strerror}.")
            return
        self.phase, self.deadline = "check", time.monotonic() + 6 * CHECK_SECONDS
        for place, guest in enumerate(here):
            guest.playing = True
            after = here[(place + 1) % len(here)]
            to = self.address if _bare(after.address) else after.address
            self._send([guest], check={"store": [*at], "next": [to, after.hello["port"]]})
        self.here = here

    def _tick_check(self, now: float) -> None:
        waiting = [one.name for one in self.here if one.checked is None]
        if waiting:
            if now > self.deadline:
                self._refuse(f"No answer from {', '.join(waiting)}.")
            return
        wrong = []
        for place, guest in enumerate(self.here):
            after, checked = self.here[(place + 1) % len(self.here)], guest.checked or {}
            if checked["store"]:
                wrong.append(f"{guest.name} does not reach {self.address}:{self.layout.port + 1}: {checked['store']}")
            if checked["next"] and place != (place + 1) % len(self.here):
                wrong.append(f"{guest.name} does not reach {after.name} on a free port: {checked['next']}")
        if wrong:
            self._refuse("Hosts do not reach each other:\n" + "\n".join(wrong))
            return
        assert self.store is not None
        self.store.close()
        self.store, self.phase, self.started = None, "run", now
        self.known = [one.name for one in self.here]
        sizes = [int(one.hello["nproc"]) for one in self.here]
        for place, guest in enumerate(self.here):
            self._send([guest], go={
                "name": guest.name, "job": self.job, "attempt": self.attempt, "node_rank": place,
                "nnodes": len(sizes), "first_rank": sum(sizes[:place]), "world": sum(sizes),
                "head": self.address, "port": self.layout.port + 1,
            })  # fmt: skip

    def _tick_run(self, now: float) -> None:
        playing = [one for one in self.guests if one.playing]
        if self.bad and now > self.first_bad + END_SECONDS:
            for guest in [one for one in playing if one.ended is None]:
                self._lose(guest, f"its ranks did not end within {END_SECONDS:.0f} s")
            return
        late = [one for one in self._known() if not one.playing and now > one.since + 2 * LOST_SECONDS]
        self._send(
            late if not self.bad and not self.regroup else [],
            refused=f"The job runs without it: {', '.join(self.known)}.",
        )
        if any(one.ended is None for one in playing):
            return
        real = [one for one in self.bad if not one[1]["victim"]]
        well: dict[str, Any] = {"code": 0, "stopped": False, "text": ""}
        name, end = next(iter(real or self.bad), ("", well))
        lost = [one for one, its in self.bad if its.get("lost")]
        again, why = None, ""
        if self.regroup and all(its["stopped"] or its["victim"] for _, its in self.bad):
            again, why = 0.0, "more hosts have come"
        elif lost and self.layout.least < self.layout.most:
            again, why = 1.0, f"without {', '.join(lost)}"
        elif self.bad:
            error = LaunchError(end["text"]) if end["text"] else None
            self.attempts.append(
                Attempt(Ending(end["code"], error, stopped=end["stopped"]), min(now - self.started, end["seconds"]))
            )
            wait = seconds_to_wait(self.attempts, self.restarts)
            again, why = (
                (wait, why_again(self.attempts, self.restarts)) if isinstance(wait, float) else (None, wait or "")
            )
        if again:
            why += f" in {again:.0f} s"
        verdict = {"host": name, "code": end["code"], "text": end["text"], "again": again is not None, "why": why}
        self._send([one for one in self.guests if one.playing], verdict=verdict)
        if again is None:
            self.finished = True
        else:
            self.attempt += 1
            self._gather(again)


@dataclass(frozen=True)
class Verdict:
    """What a round's end means for all hosts: who is to blame, the exit code, whether it goes on."""

    host: str
    code: int
    text: str
    again: bool
    why: str


@contextlib.contextmanager
def join(layout: Layout, job: str, wait: float, restarts: int, nproc: int, what: str) -> Iterator[Tie]:
    """This host's tie to the others, and the head's own side where this host is the head."""
    server, head = listen(layout), None
    if server is not None:
        head = Head(layout, server, job, wait, restarts)
        head.start()
    label = None if layout.task is None else f"task {layout.rank}"
    tie = Tie(layout, {"nproc": nproc, "what": what, "label": label}, wait, restarts, head)
    try:
        yield tie
    finally:
        tie.port.close()
        if tie.line is not None:
            tie.line.connection.close()
        if head is not None:
            head.finished = True
            head.join(BEAT_SECONDS * 2)


class Tie:
    """A host's own side of the meeting, all of it in the calling thread; `tick` is to be called every second."""

    def __init__(self, layout: Layout, hello: Mapping[str, Any], wait: float, restarts: int, head: Head | None) -> None:
        self.layout, self.hello, self.wait_seconds, self.head = layout, dict(hello), wait, head
        self.restarts, self.losses, self.lost = restarts, 0, ""
        self.line: Line | None = None
        self.port = socket.create_server(("", 0), backlog=128)  # for others to try: nobody accepts there

    def gather(self, job: str | None, attempt: int) -> Round:
        """Waits for all hosts. Raises LaunchError: not in time, refused, or a port that is closed."""
        while True:
            with contextlib.suppress(ConnectionError):
                return self._gather(job, attempt)
            self.line = None
            time.sleep(1.0)

    def _gather(self, job: str | None, attempt: int) -> Round:
        if self.line is None:
            self.line, self.lost = Line(self._connect()), ""
            own = {
                "name": socket.gethostname(),
                "rank": self.layout.rank,
                "head": self.head is not None,
                "port": self.port.getsockname()[1],
            }
            self.line.send(hello={**self.hello, **own, "job": job, "attempt": attempt})
        limit = time.monotonic() + 2 * self.wait_seconds + 120  # the head decides; this is for a head that never does
        while time.monotonic() < limit:
            select.select([self.line.connection], [], [], 1.0)
            for message in self.line.receive():
                if "news" in message:
                    say(message["news"])
                elif "refused" in message:
                    cause, *evidence = message["refused"].splitlines()
                    port = self.layout.port
                    fix = [f"open ports {port}, {port + 1} and those above 1024 between the hosts"]
                    raise LaunchError(cause, evidence=evidence, fix=fix if evidence else [])
                elif "check" in message:
                    self.line.send(checked={what: reach(*at) for what, at in message["check"].items()})
                elif "go" in message:
                    local = str(self.line.connection.getsockname()[0])
                    local = message["go"]["head"] if _bare(local) else local
                    return Round(**message["go"], local=local, interface=interface_of(local) or "")
        raise LaunchError(f"The head {self.layout.head}:{self.layout.port} does not decide.")

    def _connect(self) -> socket.socket:
        at = (
            "127.0.0.1" if self.head is not None and not _own(self.head.server) else self.layout.head,
            self.layout.port,
        )
        if self.head is not None and _own(self.head.server):
            at = (_own(self.head.server), self.layout.port)
        deadline, told = time.monotonic() + self.wait_seconds, ""
        while True:
            why = ""
            try:
                return socket.create_connection(at, CHECK_SECONDS)
            except OSError as error:
                why = _reason(error)
            where = f"{self.layout.head}:{self.layout.port}"
            known = [one for one in addresses(self.layout.head) if one != self.layout.head]
            where += f" ({', '.join(known)})" if known else ""
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"The head {where} was not reached within {self.wait_seconds:.0f} s: {why}.",
                    fix=[
                        "start the same command there, with the same --head",
                        "`evener doctor --nodes` looks at names, ports and interfaces",
                    ],
                )
            if why != told:
                say(f"waiting for the head {where}: {why}")
                told = why
            time.sleep(0.5)

    def tick(self) -> str | None:
        """While the ranks run: "failed", "asked" or "regroup" when they are to be ended."""
        if self.line is None:
            return None
        try:
            for message in self.line.receive():
                if "stop" in message:
                    return str(message["stop"])
        except OSError as error:
            self.line.connection.close()
            self.line, self.lost = None, str(error)
            return "failed"
        return None

    def ended(self, ending: Ending, text: str, seconds: float) -> Verdict:
        """Tells how this host's ranks ended, and waits for what that means for all of them."""
        end = {"code": ending.exit_code, "stopped": ending.stopped, "victim": ending.victim, "text": text}
        try:
            if self.line is None:
                raise ConnectionError(self.lost)
            self.line.send(ended={**end, "seconds": seconds})
            while True:
                select.select([self.line.connection], [], [], 1.0)
                for message in self.line.receive():
                    if "verdict" in message:
                        return Verdict(**message["verdict"])
        except OSError as error:
            if self.line is not None:
                self.line.connection.close()
            self.line = None
            self.losses += 1
            again = self.layout.least < self.layout.most or self.losses <= self.restarts
            why = "waiting for it to come back" if again else ""
            return Verdict(
                f"the head {self.layout.head}:{self.layout.port}", ending.exit_code or 1, f"lost: {error}", again, why
            )


def _own(server: socket.socket) -> str:
    address = str(server.getsockname()[0])
    return "" if address in ("0.0.0.0", "::") else address


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return "the name is not known here"
    if isinstance(error, TimeoutError):
        return "no answer (the host is down, or a firewall drops the port)"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there (not started yet, or ended)"
    return error.strerror or str(error)


def reach(host: str, port: int) -> str | None:
    """None when a connection can be made, else why not."""
    try:
        socket.create_connection((host, port), CHECK_SECONDS).close()
    except OSError as error:
        return _reason(error)
    return None
