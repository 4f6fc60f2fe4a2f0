"""The head of the meeting: who has come, when to go, whose failure it was, whether there is another round."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from evener.errors import LaunchError
from evener.launch.console import say
from evener.launch.failure import clean
from evener.launch.layout import Layout
from evener.launch.meeting import (
    BEAT_SECONDS,
    CHECK_SECONDS,
    LOST_SECONDS,
    Line,
    Tie,
    addresses,
    check_form,
    interface_of,
    is_loopback,
)
from evener.launch.restart import LONGEST_SECONDS, Attempt, seconds_to_wait, why_again
from evener.launch.supervise import Ending

SETTLE_SECONDS = 10.0  # an elastic job that has enough hosts waits so long for one more
END_SECONDS = 120.0  # from the first bad end on; hosts that are asked to stop need 15 s
LOST = {"code": 1, "stopped": False, "victim": False, "lost": True}  # the end of ranks that are not heard of


@contextlib.contextmanager
def join(layout: Layout, job: str, nproc: int, what: str, wait: float, restarts: int, longest: float) -> Iterator[Tie]:
    """This host's tie to the others, and the head's own side where this host is the head."""
    server, head, at = listen(layout), None, None
    if server is not None:
        head = Head(layout, server, job, wait, restarts, longest)
        head.start()
        at = str(server.getsockname()[0]).replace("0.0.0.0", "127.0.0.1")
    label = None if layout.task is None else f"task {layout.rank}"
    tie = Tie(layout, {"nproc": nproc, "what": what, "label": label}, wait, restarts, at)
    try:
        yield tie
    finally:
        tie.close()
        if head is not None:
            head.finished = True
            head.join(BEAT_SECONDS * 2)


def listen(layout: Layout) -> socket.socket | None:
    """The meeting's listener when this host is its head; None when it is another's."""
    known = addresses(layout.head)
    own = [one for one in known if interface_of(one) is not None and not is_loopback(one)]
    name = socket.gethostname()
    itself = is_loopback(layout.head) or layout.head.partition(".")[0] == name.partition(".")[0]
    if layout.rank not in (None, 0) or (layout.rank is None and not own and not itself):
        return None
    at = own[0] if own else "127.0.0.1" if is_loopback(layout.head) else ""
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
        what = f"The head cannot listen on {at or 'port'}:{layout.port}: {error.strerror or error}."
        raise LaunchError(what, fix=["another port, the same on every host: --head HOST:PORT"]) from None


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

    def __init__(
        self,
        layout: Layout,
        server: socket.socket,
        job: str,
        wait: float,
        restarts: int,
        longest: float = LONGEST_SECONDS,
    ) -> None:
        super().__init__(daemon=True)
        self.layout, self.server, self.job, self.wait_seconds = layout, server, job, wait
        self.restarts, self.longest = restarts, longest
        self.elastic = layout.least < layout.most
        self.attempt, self.attempts = 0, list[Attempt]()
        self.guests: list[_Guest] = []
        self.known: list[str] = []  # the names of the last round
        self.finished = False

    def run(self) -> None:
        wait = 0.0
        try:
            while True:
                here = self._gather(wait)
                if self._check(here):
                    wait = self._play(here)
        except _OverError:
            pass
        except Exception as error:  # nobody may wait for a head that decides nothing
            at = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({at.name}:{at.lineno})"
            text = f"The hosts' meeting broke, a fault of evener: {what}."
            verdict = {"host": "the head", "code": 1, "text": text, "again": False, "why": ""}
            self._send(self.guests, refused=text, verdict=verdict)  # one for those that gather, one for those that run
        self.server.close()
        connections = [guest.line.connection for guest in self.guests]
        for one in connections:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)
        for one in connections:  # closed at once, a line that is still being written to would lose its last words
            with one, contextlib.suppress(OSError):
                while one.recv(1 << 16):
                    pass

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
                    check_form(message)
                    told.append((guest, message))
                    if "hello" in message and not guest.name:
                        self._welcome(guest, message["hello"])
            except Exception as error:  # whatever one of them sends, the others go on
                guest.gone = str(error)
                self.guests.remove(guest)
                guest.line.connection.close()
        return told

    def _named(self) -> list[_Guest]:
        return [guest for guest in self.guests if guest.name]

    def _welcome(self, guest: _Guest, hello: dict[str, Any]) -> None:
        # What came over the network is shown on terminals.
        hello |= {key: clean(str(hello[key]), 200) for key in ("name", "what")}
        label, rank, most = " ".join(filter(None, (hello["name"], hello["label"]))), hello["rank"], self.layout.most
        others, wrong = self._named(), ""
        taken = [one.name for one in others if rank is not None and one.hello["rank"] == rank]
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
        self.address = next((one for one in own if not is_loopback(one)), own[0])
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
                to_address = self.address if is_loopback(to.address) else to.address
                self._send([guest], check={"store": at, "next": (to_address, to.hello["port"])})
            while waiting := [one for one in here if one not in answers and not one.gone]:
                answers |= {one: told["checked"] for one, told in self._pump() if "checked" in told and one in here}
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
            ends |= {one: told["ended"] for one, told in self._pump() if "ended" in told and one in here}
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
            self.attempts.append(Attempt(Ending(end["code"], error, stopped=end["stopped"]), seconds))
            answer = seconds_to_wait(self.attempts, self.restarts, self.longest)
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
