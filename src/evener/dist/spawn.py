"""`evener.spawn(fn, nproc)`: a function on several processes of this machine, from a notebook, a prompt or a script.

Fresh interpreters, not forks: they work after CUDA, OpenMP threads or autograd have run in the notebook. The function
travels by value (cloudpickle), with what it refers to, so it may be defined in a cell. The ranks meet in a file store.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import linecache
import os
import selectors
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from evener.dist.info import here
from evener.errors import EvenerError, LaunchError, UsageError
from evener.limits import usable_cpus

_START = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from evener.dist.spawn import rank_main; rank_main()"
_GRACE = 3.0  # seconds that the others get after a first failure, to say what they saw
_STOP = 60.0  # seconds to save and end after Ctrl-C


def spawn(
    fn: Callable[..., Any], nproc: int, args: Sequence[Any] = (), *, cpu: bool = False, timeout: float = 600.0
) -> list[Any]:
    """Call `fn(*args)` on `nproc` new processes that train together. Returns their results in rank order.

    In there `evener.rank()` counts, a process group exists, and `Run` uses it. What `fn` refers to is copied: a model
    of the notebook stays as it was, so return what you want back (numbers, `run.model.state_dict()`), or export it.
    Large data is better opened inside. What ranks print appears here, that of ranks other than 0 with their number.
    Ctrl-C lets the ranks save and end; a second one kills them. None outlives this process.

    Args:
        cpu: Hide the GPUs.
        timeout: Seconds until a collective with a missing rank fails.

    Raises:
        UsageError: `fn` or `args` cannot be copied, or this process is itself a rank of several.
        LaunchError: a rank failed; the first one's error, its line, and the others as consequences. An EvenerError
            keeps its type.
    """
    payload = _packed(fn, nproc, args)
    with tempfile.TemporaryDirectory(prefix="evener-spawn-") as store:  # mode 0700
        ranks: list[_Rank] = []
        try:
            for rank in range(nproc):
                ranks.append(_Rank(rank, nproc, store, payload, cpu=cpu, timeout=timeout))
            _wait(ranks)
        finally:
            for one in ranks:
                one.close()
    failed = [one for one in ranks if one.kind != "result"]
    if failed:
        raise _error(failed, nproc, fn)
    return [one.value for one in ranks]


def _packed(fn: Callable[..., Any], nproc: int, args: Sequence[Any]) -> bytes:
    if sys.platform == "win32":
        raise UsageError("spawn() needs several processes; on Windows evener trains in one.", fix=["call fn() itself"])
    if not callable(fn):
        raise UsageError(f"spawn() calls a function, not a {type(fn).__name__}.", fix=["evener.spawn(train, 2)"])
    if isinstance(nproc, bool) or not isinstance(nproc, int) or nproc < 1:
        raise UsageError(f"nproc={nproc!r}: a whole number of processes, at least 1.", fix=["evener.spawn(train, 2)"])
    if not isinstance(args, list | tuple):
        raise UsageError(f"args={args!r}: a tuple of fn's arguments.", fix=["evener.spawn(train, 2, (0.1,))"])
    name = getattr(fn, "__name__", "fn")
    with contextlib.suppress(ValueError):  # a built-in does not say what it takes
        try:
            inspect.signature(fn).bind(*args)
        except TypeError as error:
            fix = ["evener.spawn(fn, nproc, args): fn(*args) is called; the rank is evener.rank()"]
            raise UsageError(f"{name} cannot be called with args={tuple(args)!r}: {error}.", fix=fix) from None
    if here().world_size > 1:
        fix = ["call it from a notebook or a plain `python`", "or start the script with `evener run`, without spawn"]
        raise UsageError(f"spawn() inside a job of {here().world_size} processes.", fix=fix)
    try:
        return bytes(cloudpickle.dumps((fn, tuple(args), sys.argv)))
    except Exception as error:
        what = f"{name}, or what it refers to, cannot be copied to another process."
        fix = ["make it inside the function: files, locks, generators, a Run", "or pass it as one of args"]
        raise UsageError(what, evidence=[f"{type(error).__name__}: {error}"], fix=fix) from error


class _Rank:
    """One process: started with the payload on its stdin (whose end tells it that we are gone), read until it ends."""

    def __init__(self, rank: int, nproc: int, store: str, payload: bytes, *, cpu: bool, timeout: float) -> None:
        self.rank = rank
        self.kind, self.when, self.value, self.text = "", 0.0, None, ""
        self.frames: list[tuple[str, int, str, str]] = []
        self.received, self.line = bytearray(), b""
        self.result, theirs = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(sys.path), str(theirs), store, str(timeout)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs,),
            start_new_session=True,  # Ctrl-C is ours to pass on
            env=_environment(rank, nproc, cpu),
        )
        os.close(theirs)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output = self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # ended before it read: its exit code says more
            self.process.stdin.write(payload)
            self.process.stdin.flush()

    def read_output(self) -> bytes:
        data = os.read(self.output.fileno(), 1 << 16)
        *lines, self.line = (self.line + data).split(b"\n")
        if not data and self.line:
            lines, self.line = [self.line], b""
        for line in lines:
            text = line.decode(errors="replace")
            sys.stdout.write(f"rank {self.rank}: {text}\n" if self.rank else f"{text}\n")
        sys.stdout.flush()
        return data

    def read_result(self) -> bytes:
        data = os.read(self.result, 1 << 20)
        self.received += data
        if not self.kind and len(self.received) >= 8:
            (length,) = struct.unpack("!Q", self.received[:8])
            if len(self.received) >= 8 + length:
                try:
                    self.kind, self.when, self.value, self.text, self.frames = cloudpickle.loads(
                        memoryview(self.received)[8:]
                    )
                except Exception as error:
                    self.kind, self.text = "error", f"its result cannot be read here: {type(error).__name__}: {error}"
        return data

    def ended(self) -> None:
        """The process is gone: what it left is read; without a word from it, its exit code is the news."""
        for descriptor, read in ((self.output.fileno(), self.read_output), (self.result, self.read_result)):
            os.set_blocking(descriptor, False)  # a process that it started may still hold the other end
            with contextlib.suppress(BlockingIOError):
                while read():
                    pass
        code = self.process.returncode
        if not self.kind:
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            self.kind, self.text = "dead", how

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.output.close()
        os.close(self.result)


def _environment(rank: int, nproc: int, cpu: bool) -> dict[str, str]:
    usable = usable_cpus()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc}
    kept = {name: value for name, value in os.environ.items() if name != "EVENER_PLAN"}
    return {
        "OMP_NUM_THREADS": str(max(1, usable // nproc)),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        **kept,
        **{name: str(value) for name, value in place.items()},
        **({"CUDA_VISIBLE_DEVICES": ""} if cpu else {}),
        "PYTHONUNBUFFERED": "1",
    }


def _wait(ranks: Sequence[_Rank]) -> None:
    """Until every rank has ended, passing on what they print. The first failure, or Ctrl-C, ends the others."""
    deadline, interrupted, running = None, False, list(ranks)
    with selectors.DefaultSelector() as selector:
        for one in ranks:
            selector.register(one.output, selectors.EVENT_READ, one.read_output)
            selector.register(one.result, selectors.EVENT_READ, one.read_result)
        while running:
            try:
                for key, _ in selector.select(0.2):
                    if not key.data():
                        selector.unregister(key.fileobj)
                for one in [one for one in running if one.process.poll() is not None]:
                    one.ended()
                    running.remove(one)
                if deadline is None and any(one.kind not in ("", "result") for one in ranks):
                    deadline = time.monotonic() + _GRACE
                if deadline is not None and time.monotonic() > deadline:
                    for one in running:
                        one.kill()
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted, deadline = True, time.monotonic() + _STOP
                print(f"evener: Ctrl-C: stopping {len(running)} ranks (once more to kill them)", flush=True)  # noqa: T201
                for one in running:
                    one.process.send_signal(signal.SIGINT)
    if interrupted:
        raise KeyboardInterrupt


def _error(failed: Sequence[_Rank], nproc: int, fn: Callable[..., Any]) -> BaseException:
    # A rank that died without a word comes first: the others saw it go. Otherwise the earliest.
    first = min(failed, key=lambda one: (one.kind != "dead" or one.process.returncode == -signal.SIGKILL, one.when))
    evidence = [_where(frame, fn) for frame in first.frames]
    evidence += [
        f"rank {one.rank} failed as a consequence: {one.text}"
        for one in failed
        if one is not first and one.kind == "error" and one.text != first.text
    ]
    if isinstance(first.value, EvenerError):
        evidence = [*first.value.evidence, f"on rank {first.rank} of {nproc}", *evidence]
        return type(first.value)(first.value.cause, evidence=evidence, fix=first.value.fix)
    fix = []
    if "default process group twice" in first.text:
        fix = ["leave init_process_group() out: inside of fn the group exists"]
    elif first.process.returncode == -signal.SIGKILL and first.kind == "dead":
        fix = ["the kernel kills when memory runs out: `dmesg | tail` says so"]
    how = f"failed: {first.text}" if first.kind == "error" else first.text
    error = LaunchError(f"rank {first.rank} of {nproc} {how}", evidence=evidence, fix=fix)
    error.__cause__ = first.value if isinstance(first.value, BaseException) else None
    return error


def _where(frame: tuple[str, int, str, str], fn: Callable[..., Any]) -> str:
    """A line of the traceback. Code that travelled has lost its file: it is looked up by the function's name."""
    file, number, name, line = frame
    if file == "<dynamic-code>":
        known = {**getattr(fn, "__globals__", {}), getattr(fn, "__name__", ""): fn}.get(name)
        file = getattr(getattr(known, "__code__", None), "co_filename", name)
        line = linecache.getline(file, number).strip()
    return f"at {file}:{number}" + (f": {line}" if line else "")


def rank_main() -> None:
    """What a rank runs. Its result, or its error, goes back through a pipe; what it prints goes to the starter."""
    result, store, timeout = int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
    try:
        fn, args, sys.argv = cloudpickle.load(sys.stdin.buffer)
        alive = os.dup(0)
        threading.Thread(target=lambda: os.read(alive, 1) or os._exit(1), daemon=True).start()
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        from evener.dist import Group, comm
        from evener.dist.device import device

        Group(device(), timeout=timeout, store_dir=store)
        comm.barrier()  # all have met: a rank whose fn is over at once would break the connections still being made
        message: tuple[str, float, Any, str, Any] = ("result", time.time(), fn(*args), "", [])
    except SystemExit as error:
        done = error.code is None or error.code == 0
        text = f"ended with exit code {error.code}" + (f" ({error})" if str(error) != str(error.code) else "")
        message = ("result" if done else "exit", time.time(), None, text, [])
    except BaseException as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        message = ("error", time.time(), error, text, _frames(error))
    with open(result, "wb") as pipe:
        data = _sendable(message)
        pipe.write(struct.pack("!Q", len(data)) + data)
    if message[0] == "error":
        sys.exit(1)


def _sendable(message: tuple[str, float, Any, str, Any]) -> bytes:
    kind, when, value, text, frames = message
    try:
        return bytes(cloudpickle.dumps(message))
    except Exception as error:
        if kind == "result":
            kind, text = "error", f"its result, a {type(value).__name__}, cannot be sent back: {error}"
        return bytes(cloudpickle.dumps((kind, when, None, text, frames)))


def _frames(error: BaseException) -> list[tuple[str, int, str, str]]:
    """(file, line number, function, line) of the user's code; evener's own and torch's lines are left out."""
    left_out = tuple(os.path.dirname(os.path.abspath(sys.modules[name].__file__ or "")) for name in ("evener", "torch"))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(left_out)]
    return [(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames]
