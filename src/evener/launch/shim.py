"""The first program of every rank: tie it to its launcher, keep a record of how it ends, run the user's script.

    python shim.py JOB.json [-m] SCRIPT [ARGS...]

Run by path and of the standard library only: nothing is imported into a process that did not ask for it. The script
runs as `python SCRIPT ARGS` would run it: the same `sys.argv`, `sys.path[0]`, `__file__`, traceback and exit code, in a
fresh `__main__` that stays (for pickled classes, child processes, exit handlers).

JOB.json: {"supervisor": pid, "logs": folder, "console": {"1": path, "2": path}, "cpus": [[0, 1], ...] or [], "debug"}.
The console paths are rank 0's; `cpus` are those of each rank. The record is `rank<N>.json` in the log folder: {"rank",
"pid", "started"}, with "ended" as soon as an exception leaves the script, before exit handlers and the end of process
groups, which may take long or fail themselves: what counts is the time order between ranks.
"""

from __future__ import annotations

import _thread
import atexit
import builtins
import contextlib
import faulthandler
import io
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from typing import Any

PR_SET_PDEATHSIG = 1
INSTALLED = r"[/\\](site|dist)-packages[/\\]"
GPU_SECONDS = 10  # how long a failed rank waits for the driver at most
# Real-time signals: USR1 and USR2 are requests for a checkpoint, and belong to the user.
STACK_SIGNAL = signal.SIGRTMAX - 3 if sys.platform == "linux" else None
CALLS_SIGNAL = signal.SIGRTMAX - 4 if sys.platform == "linux" else None


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    module = sys.argv[2] == "-m"
    target, *args = sys.argv[2 + module :]
    rank = int(os.environ["RANK"])
    die_with_the_launcher(job["supervisor"])
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # torch's agent was started deaf to them, and hands that on
        signal.signal(number, signal.SIG_DFL)
    redirect(job, rank)
    if job.get("cpus"):  # before any thread is started, so that all of them inherit it
        os.sched_setaffinity(0, job["cpus"][int(os.environ["LOCAL_RANK"])])
    # A crash in C code leaves a Python stack in the log; without it a segmentation fault has no line.
    faulthandler.enable()
    answer_requests(os.path.join(job["logs"], f"rank{rank}"))
    record = Record(os.path.join(job["logs"], f"rank{rank}"), rank)
    record.write()  # from here on another rank may ask for the stack
    room = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # Python takes __file__ away before atexit
    atexit.register(let_go, room)  # the first to be registered is the last to be called
    if job.get("debug"):
        debug()
    try:
        run(target, args, as_module=module)
    except BaseException as error:
        # A request that comes twice must not end what is about to say how it ended.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        record.ended_by(error)
        as_if_uncaught(error)
        raise
    record.end("finished", 0)


def debug() -> None:
    """`evener run --debug`: the backward names the forward line of the first NaN, and DDP bears compared collectives.

    torch 2.13 crashes in DDP's constructor when the calls of its gloo group are compared: it gets one that is not.
    """
    try:
        import torch
    except ImportError:
        return
    dist: Any = torch.distributed
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    torch.autograd.set_detect_anomaly(True)
    if not dist.is_available() or dist.get_debug_level() != dist.DebugLevel.DETAIL:
        return
    plain = ddp.__init__

    def construct(self: Any, *args: Any, process_group: Any = None, **keywords: Any) -> None:
        group = process_group or dist.group.WORLD
        if "device_mesh" not in keywords and dist.get_backend(group) == "gloo":
            dist.set_debug_level(dist.DebugLevel.INFO)
            own = process_group is not None
            process_group = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=own)
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        plain(self, *args, process_group=process_group, **keywords)

    ddp.__init__ = construct


def let_go(room: str) -> None:
    """The script's own DDP model keeps its process group alive: globals are released a moment before Python does it."""
    if "torch.distributed" in sys.modules:
        let_groups_go = runpy.run_path(os.path.join(room, "ending.py"))["let_groups_go"]
        sys.modules["__main__"].__dict__.clear()
        let_groups_go(destroy=True)


def die_with_the_launcher(supervisor: int) -> None:
    """This rank is killed when the agent dies, and a process that it forks is killed when the rank dies.

    By KILL: a rank whose agent is gone cannot be told to stop by anybody, and one that ignores TERM would stay.
    """
    if sys.platform != "linux":
        return
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the call above. Then we have been adopted by the supervisor, or by whoever adopts
    # orphans here: our parent is no longer a child of the supervisor.
    if os.path.exists("/proc/self/stat") and parent_of(os.getppid()) != supervisor:
        os._exit(1)

    me, main_thread = os.getpid(), threading.get_ident()
    tie = [False]

    def before() -> None:
        # The kernel sends the signal when the *thread* that forked ends. A child of another thread may rightly outlive
        # that thread, so only children of the main thread are tied. Grandchildren are not: a daemon forks twice.
        tie[0] = os.getpid() == me and threading.get_ident() == main_thread

    def in_child() -> None:
        if tie[0]:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != me:
                os._exit(1)

    os.register_at_fork(before=before, after_in_child=in_child)


def answer_requests(path: str) -> None:
    """Whatever this rank waits for: on STACK_SIGNAL its main thread's stack goes into a file, on CALLS_SIGNAL its call.

    The first is native code; the second needs Python, and a thread of its own. No thread takes its signal otherwise.
    """
    if STACK_SIGNAL is None or CALLS_SIGNAL is None:
        return
    with contextlib.suppress(OSError):
        file = open(f"{path}.stack", "wb", buffering=0)  # noqa: SIM115  (open as long as the process lives)
        # Of the main thread alone: the handler does not hold the interpreter's lock, and another thread that goes on
        # changes its frames while they are read.
        faulthandler.register(STACK_SIGNAL, file=file, all_threads=False)
    calls = {CALLS_SIGNAL}
    signal.pthread_sigmask(signal.SIG_BLOCK, calls)

    def answer() -> None:
        while signal.sigwaitinfo(calls):
            note_call(path)

    _thread.start_new_thread(answer, ())  # one that `threading` does not count: the script sees what it would see alone


def note_call(path: str) -> None:
    """`rank<N>.calls.json`: the collective that has begun and not ended, as torch's flight recorder has it."""
    read = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_fr_trace_json", None)
    if read is not None:
        with contextlib.suppress(Exception):  # switched off, or of another torch
            entries = json.loads(read(includeCollectives=True, onlyActive=True)).get("entries", ())
            pending = next((one for one in entries if not one["retired"]), None)
            keep(f"{path}.calls.json", {"pending": pending, "newest": entries[-1] if entries else None})


def keep(path: str, values: dict[str, Any]) -> None:
    """Written whole, so that a reader or a kill in the middle never sees half of it."""
    with contextlib.suppress(OSError):  # a full disk must not replace the script's own error
        new = f"{path}.{threading.get_native_id()}.tmp"  # two threads may write one file
        with open(new, "w", encoding="utf-8") as file:
            json.dump(values, file)
        os.replace(new, path)


def ask(pid: int) -> str:
    """Asks a rank for its stack and its collective; the kernel's letter for it: R, S, D in the kernel, T stopped."""
    import ctypes

    state = stat_of(pid)[0]
    assert STACK_SIGNAL is not None and CALLS_SIGNAL is not None
    # To the main thread: a signal to the process is taken by any, and the main one may have gone on by then.
    tgkill = getattr(ctypes.CDLL(None), "tgkill", None)  # glibc since 2.30
    if tgkill is None or tgkill(pid, pid, int(STACK_SIGNAL)) != 0:
        os.kill(pid, STACK_SIGNAL)
    os.kill(pid, CALLS_SIGNAL)
    if state == "T":
        os.kill(pid, signal.SIGCONT)  # or it could neither answer nor be ended
    return state


def stat_of(pid: int) -> list[str]:
    """State, parent, ... of a process. The name before them may hold spaces and brackets."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
        return file.read().rpartition(")")[2].split()


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(stat_of(pid)[1])
    return -1


def redirect(job: dict[str, Any], rank: int) -> None:
    """Descriptors 1 and 2 to where this rank's output belongs."""
    log = os.path.join(job["logs"], f"rank{rank}.log")
    for descriptor in (1, 2):
        target = None
        path = job["console"].get(str(descriptor)) if rank == 0 else None
        if path is not None:
            with contextlib.suppress(OSError):
                # A pipe without a reader (the supervisor is gone) must fail instead of blocking, and a terminal must
                # not become this session's own: reading /dev/tty would then wait for input that never comes.
                target = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                os.set_blocking(target, True)
        if target is None:
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, descriptor)
        os.close(target)


def run(target: str, args: list[str], *, as_module: bool) -> None:
    """The script or module, in a new, permanent `__main__` as the interpreter would have made it."""
    sys.argv[:] = [target, *args]  # of a module argv[0] becomes its path below, as `python -m` does
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if as_module else os.path.dirname(os.path.realpath(target))
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __spec__=None, __package__=None)
    if as_module:
        sys.modules["__main__"] = main
        # What the interpreter itself calls for -m. The public run_module works in a temporary module, which is gone
        # when exit handlers run.
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        return
    file = os.path.abspath(target)
    with io.open_code(file) as stream:
        source = stream.read()
    main.__dict__.update(__file__=file, __cached__=None, __loader__=SourceFileLoader("__main__", file))
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec", dont_inherit=True), main.__dict__)  # noqa: S102  (the user's script: our task)


def without_own_frames(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback from the script's first frame on; None when the script was never reached (a syntax error)."""
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


def as_if_uncaught(error: BaseException) -> None:
    """Let the interpreter report `error` as it would without this file, when it is raised again."""
    if isinstance(error, SystemExit):
        return
    hook = sys.excepthook  # the script's own, if it set one
    if isinstance(error, KeyboardInterrupt) and hook is sys.__excepthook__:
        # The user stopped the job: one traceback per rank tells nothing. The record has it, the exit code stays.
        sys.excepthook = lambda kind, value, trace: None
        return
    errors = sys.modules.get("evener.errors")
    if errors is not None and isinstance(error, errors.EvenerError):  # they have their own exit codes
        trace = without_own_frames(error.__traceback__)
        hook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(error.exit_code)

    def show(kind: type[BaseException], value: BaseException, trace: types.TracebackType | None) -> None:
        trace = without_own_frames(trace)
        hook(kind, value.with_traceback(trace), trace)

    sys.excepthook = show


class Record:
    """`rank<N>.json`; `path` is without the ending."""

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self.values: dict[str, Any] = {"rank": rank, "pid": os.getpid(), "started": time.time()}

    def write(self) -> None:
        if os.getpid() == self.values["pid"]:  # a forked child that came up here is not the rank
            keep(f"{self.path}.json", self.values)

    def end(self, how: str, code: int, errors: Sequence[dict[str, Any]] = ()) -> None:
        times = {"time": time.time(), "monotonic_ns": time.monotonic_ns()}  # the second is common to all processes
        self.values["ended"] = {"how": how, "code": code, **times, "errors": list(errors)}
        self.write()

    def ended_by(self, error: BaseException) -> None:
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                self.end("exit", (error.code or 0) & 0xFF)
            else:
                self.end("exit", 1, [describe(error)])
            return
        # The outermost first. An exception that a `finally` raised on top hides the one that matters: keep the chain.
        chain: list[BaseException] = []
        step: BaseException | None = error
        while step is not None and step not in chain and len(chain) < 10:
            chain.append(step)
            step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "exception"
        # evener's own errors have exit codes of their own; for Python any exception is 1.
        code = getattr(error, "exit_code", 1) if type(error).__module__ == "evener.errors" else 1
        self.end(how, code, [describe(one) for one in chain])
        if how == "exception":
            note_call(self.path)
            self.ask_others()
            self.look_at_gpus()

    def ask_others(self) -> None:
        """What are the ranks doing that have not failed? Asked now: in a moment the launcher stops them.

        When this rank has waited for another in vain, the answer is the cause: that rank's line, or that it is stopped.
        """
        if STACK_SIGNAL is None:
            return
        states = {}
        first = self.values["rank"] - int(os.environ.get("LOCAL_RANK", "0"))
        for rank in range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
            with contextlib.suppress(OSError, ValueError, KeyError):
                with open(os.path.join(os.path.dirname(self.path), f"rank{rank}.json"), encoding="utf-8") as file:
                    other = json.load(file)
                if other["pid"] != os.getpid() and "ended" not in other:
                    states[rank] = ask(other["pid"])
        if states:
            self.values["ended"]["others"] = states
            self.write()
            time.sleep(0.1)  # a stack is written in a millisecond; a stopped process writes none

    def look_at_gpus(self) -> None:
        """`gpus.json`: who holds what on every GPU while this process has its own. The first to fail asks, by another
        process: a driver that hangs must not keep the rank.
        """
        path = os.path.join(os.path.dirname(self.path), "gpus.json")
        if not os.environ.get("CUDA_VISIBLE_DEVICES") or os.path.exists(path):
            return
        command = [sys.executable, "-P", "-m", "evener", "gpus", "--record", path]
        quiet = subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            open(path, "x").close()  # others see that somebody asks
            subprocess.run(command, stdin=quiet, stdout=quiet, stderr=quiet, timeout=GPU_SECONDS, check=False)


def describe(error: BaseException) -> dict[str, Any]:
    """One exception as plain values: type, message, the user's own line, the traceback text."""
    try:
        message = str(error)
    except Exception as failed:  # a broken __str__ is the user's, and must not hide the error
        message = f"<its message cannot be shown: {type(failed).__name__}>"
    trace = without_own_frames(error.__traceback__)
    where = the_users_line(traceback.extract_tb(trace))
    if isinstance(error, SyntaxError) and error.filename is not None:
        text = (error.text or "").strip()
        where = {"file": error.filename, "line": error.lineno or 0, "function": "", "text": text}
    return {
        "type": type(error).__qualname__,
        "module": type(error).__module__,
        "message": message,
        "where": where,
        "traceback": "".join(traceback.format_exception(type(error), error, trace, chain=False)),
    }


def the_users_line(frames: traceback.StackSummary) -> dict[str, Any] | None:
    """The innermost frame that is not in an installed package or the standard library; else the innermost."""
    if not frames:
        return None
    evener = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    library = ("<frozen", os.path.dirname(os.__file__) + os.sep, evener + os.sep)
    own = [one for one in frames if not one.filename.startswith(library) and not re.search(INSTALLED, one.filename)]
    frame = (own or frames)[-1]
    return {"file": frame.filename, "line": frame.lineno, "function": frame.name, "text": frame.line or ""}


if __name__ == "__main__":
    main()
