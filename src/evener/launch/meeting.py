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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

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
LOST = {"code": 1, "stopped": False, "victim": False, "lost": True}  # how a host's ranks end that is not heard of


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
        server = socket.create_server((at, layout.port), family=family, backlog=max(128, layout.most))
        where = f"{at}:{layout.port} ({interface_of(at)})" if at else f"port {layout.port}"
        say(f"hosts meet at {where}, torch's store at port {layout.port + 1}: no password, so a private network only")
        return server
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
    gone: str = ""


class _OverError(Exception):
    """Nothing is left to be decided."""


class Head(threading.Thread):
    """The meeting's own side: who is here, when to go, who failed first. A thread of the head's launcher."""

    def __init__(self, layout: Layout, server: socket.socket, job: str, wait_seconds: float, restarts: int) -> None:
        super().__init__(daemon=True)
        self.layout, self.server, self.job, self.wait_seconds, self.restarts = (
            layout,
            server,
            job,
            wait_seconds,
            restarts,
        )
        self.elastic = layout.least < layout.most
        self.attempt, self.attempts = 0, list[Attempt]()
        self.guests: list[_Guest] = []
        self.known: list[str] = []  # the names of the last round
        self.finished = False

    def run(self) -> None:
        wait = 0.0
        with contextlib.suppress(_OverError):
            while True:
                here = self._gather(wait)
                if self._check(here):
                    wait = self._play(here)
        self.server.close()
        for guest in self.guests:  # closed at once, a line that is still being written to would lose its last words
            with contextlib.suppress(OSError):
                guest.line.connection.shutdown(socket.SHUT_WR)
                while guest.line.connection.recv(1 << 16):
                    pass
            guest.line.connection.close()

    def _send(self, guests: Iterable[_Guest], **values: Any) -> None:
        for guest in guests:
            with contextlib.suppress(OSError):  # it went away: the next `receive` says so
                guest.line.send(**values)

    def _refuse(self, text: str) -> NoReturn:
        self._send(self.guests, refused=text)
        raise _OverError

    def _pump(self) -> list[tuple[_Guest, dict[str, Any]]]:
        """What has been said, half a second at most. Hosts that come are taken up, hosts that are gone marked."""
        if self.finished:
            raise _OverError
        ready, _, _ = select.select([self.server, *(guest.line.connection for guest in self.guests)], [], [], 0.5)
        if self.server in ready:
            with contextlib.suppress(OSError):
                connection, address = self.server.accept()
                self.guests.append(_Guest(Line(connection), str(address[0]), time.monotonic()))
        told = []
        for guest in list(self.guests):
            try:
                for message in guest.line.receive():
                    told.append((guest, message))
                    if "hello" in message and not guest.name:
                        self._welcome(guest, message["hello"])
            except (OSError, KeyError, TypeError, ValueError) as error:
                guest.gone = str(error)
                self.guests.remove(guest)
                guest.line.connection.close()
        return told

    def _named(self) -> list[_Guest]:
        return [guest for guest in self.guests if guest.name]

    def _welcome(self, guest: _Guest, hello: dict[str, Any]) -> None:
        label, rank, most = " ".join(filter(None, (hello["name"], hello["label"]))), hello["rank"], self.layout.most
        others = self._named()
        taken = [one.name for one in others if rank is not None and one.hello["rank"] == rank]
        wrong = ""
        if others and hello["what"] != others[0].hello["what"]:
            first = others[0]
            wrong = f"it was started with another command: {hello['what']} here, {first.hello['what']} on {first.name}"
        elif taken:
            wrong = f"node rank {rank} is taken by {taken[0]}"
        elif rank is not None and rank >= most:
            wrong = f"node rank {rank} of {most} hosts: ranks run from 0 to {most - 1}"
        if wrong:
            self._send([guest], refused=f"{label} cannot take part: {wrong}.")
            return
        same = sum(one.name.partition(" (")[0] == label for one in others)
        guest.name, guest.hello, guest.since = f"{label} ({same + 1})" if same else label, hello, time.monotonic()
        self.attempt, self.job = max(self.attempt, int(hello["attempt"])), hello["job"] or self.job

    # --- one round: gather, check, play -------------------------------------------------------------------------------

    def _arrived(self, here: list[_Guest]) -> str:
        ranks, came = {one.hello["rank"] for one in here}, {one.name for one in here}
        names = [one for rank, one in enumerate(self.layout.names) if rank not in ranks]
        if not self.layout.names or ranks == {None}:
            names = [one for one in self.layout.names or self.known if one not in came]
        missing = names[: max(0, self.layout.most - len(here))]
        wanted = f"{self.layout.least} to {self.layout.most}" if self.elastic else self.layout.most
        text = f"{len(here)} of {wanted} {'tasks' if self.layout.task else 'hosts'} arrived"
        return f"{text}: missing {', '.join(missing)}" if missing else f"{text}: {', '.join(one.name for one in here)}"

    def _gather(self, wait: float) -> list[_Guest]:
        """The hosts of the next round, by node rank: all, or enough of them when no more have come for a while."""
        start, told = time.monotonic() + wait, ""
        while True:
            self._pump()
            here, now = self._named(), time.monotonic()
            if here and (text := self._arrived(here)) != told:
                self._send(here, news=text)
                told = text
            late = now > start + self.wait_seconds
            settled = self.elastic and now > max([start, *(one.since for one in here)]) + SETTLE_SECONDS
            if len(here) >= self.layout.most or (len(here) >= self.layout.least and (settled or late)):
                if now >= start:
                    break
            elif late:
                self._refuse(f"{self._arrived(here)}, within {self.wait_seconds:.0f} s.")
        last = self.layout.most
        # Where ranks are not given the head is first: torch's store listens where node rank 0 is.
        here.sort(key=lambda one: (last if one.hello["rank"] is None else one.hello["rank"], not one.hello["head"]))
        own = [str(one.line.connection.getsockname()[0]) for one in here]
        self.address = next((one for one in own if not _bare(one)), own[0])
        return here[:last]

    def _check(self, here: list[_Guest]) -> bool:
        """Before anything is started: does every host reach the store's port, and the next host? False: one left."""
        at = (self.address, self.layout.port + 1)
        try:
            store = socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET, backlog=128)
        except OSError as error:
            self._refuse(f"The head cannot listen on {at[0]}:{at[1]}, the port for torch's store: {error.strerror}.")
        after = dict(zip(here, [*here[1:], here[0]]))
        answers: dict[_Guest, dict[str, str | None]] = {}
        deadline = time.monotonic() + 6 * CHECK_SECONDS
        with store:
            for guest, to in after.items():
                to_address = self.address if _bare(to.address) else to.address
                self._send([guest], check={"store": at, "next": (to_address, to.hello["port"])})
            while waiting := [one for one in here if one not in answers and not one.gone]:
                answers |= {guest: message["checked"] for guest, message in self._pump() if "checked" in message}
                if time.monotonic() > deadline:
                    self._refuse(f"No answer from {', '.join(one.name for one in waiting)}.")
        wrong = [
            f"{one.name} does not reach {at[0]}:{at[1]}: {its['store']}" for one, its in answers.items() if its["store"]
        ]
        for one, its in answers.items():
            if its["next"]:
                wrong.append(f"{one.name} does not reach {after[one].name} on a free port: {its['next']}")
        if wrong:
            self._refuse("Hosts do not reach each other:\n" + "\n".join(wrong))
        return len(answers) == len(here)

    def _play(self, here: list[_Guest]) -> float:
        """One start, until the ranks of all hosts have ended. The seconds to wait before the next one."""
        self.known, sizes = [one.name for one in here], [int(one.hello["nproc"]) for one in here]
        every = {"job": self.job, "attempt": self.attempt, "nnodes": len(here), "world": sum(sizes)}
        every |= {"head": self.address, "port": self.layout.port + 1}
        for place, guest in enumerate(here):
            own = {"name": guest.name, "node_rank": place, "first_rank": sum(sizes[:place])}
            self._send([guest], go={**every, **own})
        started, asked, regroup = time.monotonic(), float("inf"), False
        ends: dict[_Guest, dict[str, Any]] = {}  # in the order in which they were heard of
        while running := [one for one in here if one not in ends]:
            ends |= {guest: message["ended"] for guest, message in self._pump() if "ended" in message}
            now = time.monotonic()
            for guest in running:
                if guest not in ends and (guest.gone or now > asked + END_SECONDS):
                    why = guest.gone or f"its ranks did not end within {END_SECONDS:.0f} s"
                    ends[guest] = {**LOST, "text": f"lost: {why}"}
            bad = [end for end in ends.values() if end["code"] != 0 or end["stopped"]]
            late = [one for one in self._named() if one not in here]
            if bad and asked == float("inf"):
                asked = now
                self._send(running, stop="asked" if bad[0]["stopped"] else "failed")
            elif late and not bad and not regroup and self.elastic and len(here) < self.layout.most:
                regroup = True
                self._send(running, stop="regroup")
            elif not bad and not regroup:
                late = [one for one in late if now > one.since + 2 * LOST_SECONDS]
                self._send(late, refused=f"The job runs without it: {', '.join(self.known)}.")
        return self._judge(ends, regroup, time.monotonic() - started)

    def _judge(self, ends: dict[_Guest, dict[str, Any]], regroup: bool, seconds: float) -> float:
        """Tells all hosts the cause and whether there is another round; the seconds before it."""
        bad = [(guest.name, end) for guest, end in ends.items() if end["code"] != 0 or end["stopped"]]
        well: dict[str, Any] = {"code": 0, "text": ""}
        name, end = next((one for one in bad if not one[1]["victim"]), bad[0] if bad else ("", well))
        lost = [one for one, its in bad if its.get("lost")]
        wait: float | None = None
        why = ""
        if regroup and all(its["stopped"] or its["victim"] for _, its in bad):
            wait, why = 0.0, "more hosts have come"
        elif lost and self.elastic:
            wait, why = 1.0, f"without {', '.join(lost)}"
        elif bad:
            error = LaunchError(end["text"]) if end["text"] else None
            ending = Ending(end["code"], error, stopped=end["stopped"])
            self.attempts.append(Attempt(ending, seconds))
            answer = seconds_to_wait(self.attempts, self.restarts)
            if isinstance(answer, float):
                wait, why = answer, why_again(self.attempts, self.restarts)
            else:
                why = answer or ""
        if wait is not None:
            why += f" in {wait:.0f} s"
        verdict = {"host": name, "code": end["code"], "text": end["text"], "again": wait is not None, "why": why}
        self._send(ends, verdict=verdict)
        if wait is None:
            raise _OverError
        self.attempt += 1
        return wait


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
        tie._lose(ConnectionError())
        if head is not None:
            head.finished = True
            head.join(BEAT_SECONDS * 2)


class Tie:
    """A host's own side of the meeting, all of it in the calling thread; `tick` is to be called every second."""

    def __init__(self, layout: Layout, hello: Mapping[str, Any], wait: float, restarts: int, head: Head | None) -> None:
        self.layout, self.hello, self.wait_seconds, self.head = layout, dict(hello), wait, head
        self.restarts, self.losses, self.lost = restarts, 0, ""
        self.line: Line | None = None
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        # For others to try: nobody accepts there.
        self.port = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=both)

    def gather(self, job: str | None, attempt: int) -> Round:
        """Waits for all hosts. Raises LaunchError: not in time, refused, or a port that is closed."""
        while True:
            with contextlib.suppress(ConnectionError):
                return self._gather(job, attempt)
            self._lose(ConnectionError())
            time.sleep(1.0)

    def _gather(self, job: str | None, attempt: int) -> Round:
        here, port = self.layout, self.layout.port
        if self.line is None:
            self.line = Line(self._connect())
            own = {"name": socket.gethostname(), "rank": here.rank, "port": self.port.getsockname()[1]}
            self.line.send(hello={**self.hello, **own, "head": self.head is not None, "job": job, "attempt": attempt})
        limit = time.monotonic() + 2 * self.wait_seconds + 120  # the head decides; this is for a head that never does
        while time.monotonic() < limit:
            for message in self._wait():
                if "news" in message:
                    say(message["news"])
                elif "refused" in message:
                    cause, *evidence = message["refused"].splitlines()
                    fix = [f"open ports {port}, {port + 1} and those above 1024 between the hosts"] if evidence else []
                    raise LaunchError(cause, evidence=evidence, fix=fix)
                elif "check" in message:
                    self.line.send(checked={what: reach(*at) for what, at in message["check"].items()})
                elif "go" in message:
                    local = str(self.line.connection.getsockname()[0])
                    local = message["go"]["head"] if _bare(local) else local
                    return Round(**message["go"], local=local, interface=interface_of(local) or "")
        raise LaunchError(f"The head {here.head}:{port} does not decide.")

    def _wait(self) -> list[dict[str, Any]]:
        if self.line is None:
            raise ConnectionError(self.lost)
        select.select([self.line.connection], [], [], 1.0)
        return self.line.receive()

    def _connect(self) -> socket.socket:
        to = self.layout.head
        if self.head is not None:  # to itself: where it listens, on one address or on all of them
            own = str(self.head.server.getsockname()[0])
            to = "127.0.0.1" if own == "0.0.0.0" else own
        deadline, told = time.monotonic() + self.wait_seconds, ""
        while True:
            why = ""
            try:
                return socket.create_connection((to, self.layout.port), CHECK_SECONDS)
            except OSError as error:
                why = _reason(error)
            known = ", ".join(one for one in addresses(to) if one != to)
            where = f"{to}:{self.layout.port}{f' ({known})' if known else ''}"
            if time.monotonic() > deadline:
                fix = ["start the same command there, with the same --head", "`evener doctor --nodes` looks further"]
                raise LaunchError(f"The head {where} was not reached within {self.wait_seconds:.0f} s: {why}.", fix=fix)
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
            self._lose(error)
            return "failed"
        return None

    def _lose(self, error: OSError) -> None:
        if self.line is not None:
            self.line.connection.close()
        self.line, self.lost = None, str(error)

    def ended(self, ending: Ending, text: str) -> Verdict:
        """Tells how this host's ranks ended, and waits for what that means for all of them."""
        end = {"code": ending.exit_code, "stopped": ending.stopped, "victim": ending.victim, "text": text}
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
            head, why = (
                f"the head {self.layout.head}:{self.layout.port}",
                "waiting for it to come back" if again else "",
            )
            return Verdict(head, ending.exit_code or 1, f"lost: {error}", again, why)


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
