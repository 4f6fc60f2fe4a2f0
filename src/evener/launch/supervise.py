"""The supervisor: starts torch's elastic agent as a child, stays, and leaves nothing behind.

evener does not replace itself with the agent, because somebody has to be there when the agent is killed: a killed agent
leaves its ranks on the GPUs. Who ends whom:

    the supervisor is killed   the agent gets TERM (parent-death signal) and stops its ranks
    the agent is killed        its ranks get KILL (parent-death signal, set by the shim); the supervisor ends the rest
    a rank is killed           its forked data workers get KILL; the agent stops the other ranks
    Ctrl-C, TERM, HUP,         passed to the ranks once; after a grace period, or at the second signal, everything ends
    USR1, USR2
    another host fails         the ranks get TERM, and KILL soon after: they wait for peers that do not come

A signal goes to the ranks and not to the agent: the agent passes it to whole process groups, data workers included, and
a rank that wants to write a checkpoint before it ends then finds its data workers dead.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from evener.errors import EXIT_LESSON, EXIT_STOPPED, LaunchError
from evener.launch import failure, hang, processes, records
from evener.launch.command import Launch
from evener.launch.console import Console, say

# How long ranks may take after a signal: TERM is a batch system that wants a checkpoint (torch's agent and Slurm both
# give 30 s); USR1 and USR2 are warnings long before the end, which the sender brings about (Slurm's --signal).
GRACE_SECONDS = {signal.SIGINT: 30.0, signal.SIGTERM: 30.0, signal.SIGHUP: 30.0}
GRACE_SECONDS |= {signal.SIGUSR1: 600.0, signal.SIGUSR2: 600.0}
LOST_PEER_SECONDS = 5.0  # for ranks that wait for a host that is gone
KILL_AFTER_SECONDS = 3.0
_SWEEP_AFTER_SECONDS = 60.0
# After a good end, helper processes (semaphore trackers, loggers) are ending too: no need to hurry them at once.
SETTLE_SECONDS = 0.5


@dataclass(frozen=True)
class Ending:
    """The exit code of the job, and what to tell the user when it is not a success."""

    exit_code: int
    error: LaunchError | None = None
    stopped: bool = False  # on request: by a signal, or every rank saved and left
    victim: bool = False  # of another host: its ranks lost their peers, or were ended for it
    text: str = ""  # the error, explained


def supervise(launch: Launch, environ: Mapping[str, str], others: Callable[[], str | None] = lambda: None) -> Ending:
    """Carries out a launch and waits for its end. Call it from the main thread; it owns its signals meanwhile.

    `others` is asked about once a second whether the job's other hosts want this one's ranks ended: "failed" (there is
    nothing to wait for), "asked" (to stop) or "regroup" (save, and come back). None: no.
    """
    for note in launch.notes:
        say(note)
    with _folders(launch), contextlib.closing(Console(launch)) as console:
        return _Supervisor(launch, console, others).run(environ)


@contextlib.contextmanager
def _folders(launch: Launch) -> Iterator[None]:
    """Those of this job. The private one is locked while this process lives; those of killed launchers are removed."""
    _sweep(os.path.dirname(launch.private))
    try:
        os.makedirs(launch.logs)
        os.mkdir(launch.private, 0o700)
        for name in ("store", "beats"):
            os.mkdir(os.path.join(launch.private, name), 0o700)
        lock = os.open(os.path.join(launch.private, "lock"), os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        fix = ["--log-dir DIR puts the logs elsewhere", "TMPDIR=DIR moves the private folder"]
        raise LaunchError("The folders of this job cannot be made.", evidence=[str(error)], fix=fix) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        shutil.rmtree(launch.private, ignore_errors=True)
        os.close(lock)


def hand_over(launch: Launch, job: Mapping[str, object]) -> None:
    """What the shim and the ranks read: `job.json` and `plan.json` in the private folder."""
    job = {"supervisor": os.getpid(), "logs": launch.logs, **job}
    for name, text in (("job.json", json.dumps(job)), ("plan.json", launch.plan.to_json())):
        with open(os.path.join(launch.private, name), "w", encoding="utf-8") as file:
            file.write(text)


def _sweep(temporary: str) -> None:
    """Removes the private folders of launchers that are gone: nobody holds their lock any more."""
    for path in glob.glob(os.path.join(glob.escape(temporary), "evener-*", "lock")):
        with contextlib.suppress(OSError):  # another user's, or being removed
            if time.time() < os.stat(path).st_mtime + _SWEEP_AFTER_SECONDS:
                continue  # its ranks may still be ending, or its launcher is about to lock it
            lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(path), ignore_errors=True)
            finally:
                os.close(lock)


class _Supervisor:
    """One job: its agent, its signals, its loop. Used once."""

    def __init__(self, launch: Launch, console: Console, others: Callable[[], str | None]) -> None:
        self.launch, self.console, self.others = launch, console, others
        self.cut = False  # ended because another host failed
        self.selector = selectors.DefaultSelector()
        self.wake_read, self.wake_write = socket.socketpair()
        self.received: signal.Signals | None = None  # the first request to stop
        self.deadline = float("inf")
        self.hang = hang.Hang(os.path.join(launch.private, "beats"), launch.logs, launch.hang_after or float("inf"))
        self.hung: LaunchError | None = None
        self.waited: LaunchError | None = None  # where the ranks were when a signal came

    def run(self, environ: Mapping[str, str]) -> Ending:
        processes.adopt_orphans()
        launch = self.launch
        hand_over(launch, {"console": self.console.paths(), "cpus": launch.cpus, "debug": launch.debug})
        with self._signals():
            with open(os.path.join(launch.logs, "agent.log"), "ab") as agent_log:
                # A session of its own: Ctrl-C at the terminal reaches the supervisor alone, which passes it on once.
                self.agent = subprocess.Popen(
                    launch.command.argv,
                    env=launch.command.environ(environ),
                    stdout=agent_log,
                    stderr=agent_log,
                    start_new_session=True,
                    preexec_fn=processes.tied_to_parent(signal.SIGTERM),
                    pass_fds=launch.leased,  # if this process is killed, the claim lasts until the ranks are gone
                )
            try:
                self._watch()
            finally:
                self._end_descendants(gently=self.agent.returncode == 0 and self.received is None)
        self.console.drain()
        return self._ending()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals become bytes on a socket, read by the loop; the handlers that were there come back afterwards."""

        def handler(*_: object) -> None:
            pass  # its only use: with it, the signal is written to the wake-up socket instead of ending the process

        before: dict[signal.Signals, object] = {}
        for signum in (*GRACE_SECONDS, signal.SIGCHLD, signal.SIGWINCH):
            # `nohup` and background shells start us with signals ignored, and mean it. An ignored SIGCHLD would lose
            # the agent's exit code.
            if signum == signal.SIGCHLD or signal.getsignal(signum) is not signal.SIG_IGN:
                before[signum] = signal.signal(signum, handler)
        self.wake_read.setblocking(False)
        self.wake_write.setblocking(False)
        wake_before = signal.set_wakeup_fd(self.wake_write.fileno(), warn_on_full_buffer=False)
        self.selector.register(self.wake_read, selectors.EVENT_READ, None)
        for channel in self.console.unique():
            self.selector.register(channel.source, selectors.EVENT_READ, channel)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wake_before)
            for signum, old in before.items():
                signal.signal(signum, old)  # type: ignore[arg-type]
            self.selector.close()
            self.wake_read.close()
            self.wake_write.close()

    def _watch(self) -> None:
        """Until the agent has ended or the time after a signal is over."""
        while self.agent.returncode is None and time.monotonic() < self.deadline:
            self._turn(0.1 if self.console.followers else 1.0)
            if self.launch.hang_after and self.hung is None and self.hang.is_there(ranks := self._ranks()):
                self.hung, self.deadline = hang.described(self.launch.logs, ranks, self.hang.seconds), 0.0
            place = self.launch.logs, self.launch.nproc, self.launch.first_rank
            if self.deadline == float("inf") and records.any_left_with(EXIT_LESSON, *place):
                # The others wait for it in a collective, where no request reaches them: they are ended here.
                self.deadline = time.monotonic() + 0.5  # then TERM, and KILL 3 s later

    def _turn(self, seconds: float) -> None:
        """Waits for one thing to happen, for `seconds` at most, and deals with it."""
        wait = max(0.0, min(seconds, self.deadline - time.monotonic()))
        for key, _ in self.selector.select(wait):
            if key.data is not None:
                self.console.pump(key.data)
                continue
            with contextlib.suppress(BlockingIOError):
                for number in self.wake_read.recv(4096):
                    self._on_signal(signal.Signals(number))
        if (why := self.others()) is not None and self.received is None and not self.cut:
            self._end_for_others(why)
        self.console.follow()
        self._reap()

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGWINCH:
            self.console.resize()
            if (pid := self._ranks().get(0)) is not None:
                processes.send(pid, signal.SIGWINCH)
        elif signum in GRACE_SECONDS and self.received is not None:
            self.deadline = 0.0  # the second request: now
        elif signum in GRACE_SECONDS:
            self.received = signum
            self.deadline = time.monotonic() + GRACE_SECONDS[signum]
            what = "Ctrl-C" if signum == signal.SIGINT else signum.name
            count = f"{self.launch.nproc} process{'es' * (self.launch.nproc > 1)}"
            say(f"{what}: stopping {count} (once more to kill at once)")
            ranks = self._ranks()
            warned = signum in (signal.SIGUSR1, signal.SIGUSR2)
            if not warned and len(ranks) == self.launch.nproc and all(end.how is None for end in self._ends()):
                self.waited = hang.stopped(self.launch.logs, ranks, signum)
            self._pass_on(signum)

    def _end_for_others(self, why: str) -> None:
        signum, seconds = signal.SIGUSR1 if why == "regroup" else signal.SIGTERM, LOST_PEER_SECONDS
        if why == "failed":
            self.cut = True
        else:
            self.received, seconds = signum, GRACE_SECONDS[signum]
        self.deadline = time.monotonic() + seconds
        self._pass_on(signum)

    def _pass_on(self, signum: signal.Signals) -> None:
        ranks = self._ranks()
        for pid in ranks.values():
            processes.send(pid, signum)
        if not ranks:  # none has started yet
            processes.send(self.agent.pid, signal.SIGTERM)

    def _ranks(self) -> dict[int, int]:
        """Process id of every rank that is alive."""
        pids = records.read_pids(self.launch.logs, self.launch.nproc, self.launch.first_rank)
        return {rank: pid for rank, pid in pids.items() if processes.is_child(pid, self.agent.pid)}

    def _ends(self) -> list[records.RankEnd]:
        return records.read_ends(self.launch.logs, self.launch.nproc, self.launch.first_rank)

    def _reap(self) -> None:
        """Collects ended children: the agent, and the orphans that were adopted."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.agent.pid:
                    self.agent.returncode = os.waitstatus_to_exitcode(ended[1])

    def _end_descendants(self, *, gently: bool) -> None:
        """TERM, then KILL, for what is still running; own descendants only. The second signal skips the TERM."""
        if gently:
            self._wait_for_none(SETTLE_SECONDS)
        if self.deadline > 0.0:
            for process in processes.descendants():
                processes.send(process.pid, signal.SIGTERM)
            self.deadline = float("inf")
            self._wait_for_none(KILL_AFTER_SECONDS)
        give_up = time.monotonic() + KILL_AFTER_SECONDS  # what the kernel does not let go of even then stays
        while (left := processes.descendants()) and time.monotonic() < give_up:
            for process in left:
                processes.send(process.pid, signal.SIGKILL)
            self._turn(0.02)
        self._reap()

    def _wait_for_none(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while processes.descendants() and time.monotonic() < until and self.deadline > 0.0:
            self._turn(0.02)

    def _ending(self) -> Ending:
        ends = self._ends()
        if self.received is not None:
            # A rank that stopped in good order says so by its exit code (to be requeued, for example).
            codes = [end.code for end in ends if end.how == "exit" and end.code]
            well = all(end.how in ("finished", "exit") for end in ends)
            if well:  # nothing to look into: saved, or over
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.launch.logs, "stop.log"))
            code = 130 if self.received == signal.SIGINT else 0 if well else 128 + self.received
            return Ending(codes[0] if codes else code, None if well else self.waited, stopped=True)
        if self.hung is not None:
            return Ending(1, self.hung)
        if self.agent.returncode == 0:
            return Ending(0)
        if all(end.how == "exit" and end.code == EXIT_STOPPED for end in ends):
            return Ending(EXIT_STOPPED, stopped=True)  # one rank was asked, and all have saved
        if self.cut:
            return Ending(1, victim=True)
        found = failure.find_cause(ends)
        if found is None:
            return self._agent_failed()
        raised = found.raised
        if raised is not None and not found.absent and raised.module != "evener.errors":
            self.console.show_error(found.cause.rank, raised.traceback)
        error = failure.as_error(found, self.launch.logs, os.getcwd())
        return Ending(found.exit_code, error, victim=raised is not None and failure.is_victim(raised))

    def _agent_failed(self) -> Ending:
        """The launcher's own trouble: no rank is to blame."""
        code, path = self.agent.returncode or 0, os.path.join(self.launch.logs, "agent.log")
        how = f"ended with exit code {code}, and no rank reported an error"
        how = f"was killed by {failure.signal_name(-code)}; its ranks were stopped" if code < 0 else how
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = [line.rstrip() for line in file if line.strip() and not line.startswith("{")]
        evidence = [failure.clean(line, limit=200) for line in lines[-3:]]
        evidence.append(f"log: {failure.relative(path, os.getcwd())}")
        error = LaunchError(f"torch's elastic agent {how}", evidence=evidence)
        return Ending(128 - code if code < 0 else 1, error)
