"""Worker processes that read jobs: torch's DataLoader machinery, with its failures made nameable.

The DataLoader gets `batch_size=None` and a sampler that yields jobs; a worker reads a whole job. Jobs go to
the workers in turn (job k of a pass to worker k mod count) and results come back in job order: so it is known
which rows a worker holds.
The DataLoader's iterator is used by private names where its own failure handling is too coarse: in this module only.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from evener.data.processes import Watch, signal_name, started_by
from evener.data.read import AnyStep, Job, Loaded, listed
from evener.dist.mix import mix
from evener.errors import DataError, UsageError, WorkerError

# How often a wait looks after the workers' health and its own deadline.
_POLL_SECONDS = 0.5


class Reader(Protocol):
    """What reads a job: a `GatherReader`, a `RowReader` or a `StreamReader`."""

    def read(self, job: Any) -> Loaded:
        """The job's batches."""

    def read_all(self, steps: Iterator[Any]) -> Iterator[tuple[Any, Loaded]]:
        """Each step with the batches of its job."""


@dataclass(frozen=True, slots=True)
class _Failed:
    """A DataError on its way from a worker, with the traceback that only the worker had."""

    error: DataError
    trace: str


class _InWorker(Exception):
    """The worker's traceback, as the cause of the error that the rank raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Jobs(Dataset[Any]):
    """The 'dataset' that the DataLoader's workers index with jobs."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, job: Job) -> Loaded | _Failed:
        try:
            return self.reader.read(job)
        except DataError as error:
            return _Failed(error, "".join(traceback.format_exception(error)))


class _JobSampler:
    """Hands the jobs of the current pass to the DataLoader, which asks for an iterator anew for every pass."""

    def __init__(self) -> None:
        self.jobs: Iterator[Job] = iter(())

    def __iter__(self) -> Iterator[Job]:
        return self.jobs


def _as_is(loaded: Any) -> Any:
    return loaded


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """Without the DataLoader's warning about more workers than CPUs: the number was somebody's choice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        yield


class Workers:
    """`count` processes that read jobs ahead, kept between passes until `close`.

    Args:
        reader: Sent to every worker (by fork: as it is; by spawn: pickled).
        count: At least 1.
        prefetch: Jobs in flight per worker; None is torch's default of 2.
        timeout: Seconds that one wait may take before the workers count as hanging.
        pin: Let the DataLoader's thread pin the results (CUDA).
    """

    def __init__(
        self,
        reader: Reader,
        *,
        count: int,
        timeout: float,
        seed: int,
        prefetch: int | None = None,
        pin: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        context: Any = None,
    ) -> None:
        self.count, self.timeout = count, timeout
        self._sampler = _JobSampler()
        with _no_advice():
            self._loader: DataLoader[Any] = DataLoader(
                _Jobs(reader),
                batch_size=None,
                sampler=self._sampler,
                num_workers=count,
                collate_fn=_as_is,
                pin_memory=pin,
                timeout=timeout,
                worker_init_fn=started_by(context, worker_init_fn),
                multiprocessing_context=context,
                # Its own generator: the DataLoader would draw from the global one.
                generator=torch.Generator().manual_seed(mix(seed)),
                prefetch_factor=prefetch,
                persistent_workers=True,
            )
        self._iterator: Any = None
        self._pass = 0
        self._flight: deque[tuple[int, Any]] = deque()  # (number in the pass, step) that workers have or had

    def read(self, steps: Iterator[AnyStep]) -> Iterator[tuple[AnyStep, Loaded]]:
        """(step, its result) in order, while the workers read ahead. One pass at a time: a new one ends the one before.

        Raises:
            DataError: what a reader raised, with the worker's traceback as its cause.
            WorkerError: a worker died, hangs, or could not start; all workers are ended then.
        """
        if self._flight and self._iterator is not None:
            self._abandon()  # the pass before was left in the middle: new workers cost less than finishing its jobs
        self._pass += 1
        turn, flight = self._pass, deque[tuple[int, AnyStep]]()
        self._flight = flight

        broken: list[Exception] = []

        def jobs() -> Iterator[Job]:
            try:
                for number, step in enumerate(steps):
                    flight.append((number, step))
                    yield step.job
            except Exception as error:  # of a later update: those before it are delivered first
                broken.append(error)

        self._sampler.jobs = jobs()
        self._begin()
        while True:
            if turn != self._pass:
                raise UsageError(
                    "these portions were ended by a newer call of portions() on the same data.",
                    fix=["finish one pass before the next, or make a second Feed"],
                )
            result = self._next()
            if result is None:
                if broken:
                    raise broken[0]
                return
            step = flight.popleft()[1]
            if isinstance(result, _Failed):
                raise result.error from _InWorker(result.trace)
            yield step, result

    def _begin(self) -> None:
        if self._iterator is not None:
            self._look_for_dead(None)
            self._iterator._timeout = self.timeout  # the workers' greeting at the start of a pass is not polled
        try:
            with _no_advice():
                self._iterator = iter(self._loader)
            self._iterator._timeout = min(_POLL_SECONDS, self.timeout)
        except Exception as error:  # not picklable, no more processes, no shared memory
            if self._iterator is not None:
                self._abandon()
            raise WorkerError(
                f"the data workers could not start: {type(error).__name__}: {error}",
                fix=[
                    "num_workers=0 reads in this process",
                    "where processes are spawned: define dataset and collate_fn at the top level of a module",
                ],
            ) from error
        # From here on torch's SIGCHLD handler does not know these workers; see Watch.
        if self._iterator._worker_pids_set:
            _remove_worker_pids(id(self._iterator))
            self._iterator._worker_pids_set = False

    def _next(self) -> Any:
        """The next result; None at the end of the pass."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                with Watch(self._iterator):
                    return next(self._iterator)
            except StopIteration:
                return None
            except Exception as error:
                waiting = isinstance(error, RuntimeError) and "timed out" in str(error)
                if not waiting:
                    # A dying worker's connections break first, then its sentinel, and only then it counts as dead.
                    sentinels = {process.sentinel: process for process in self._iterator._workers}
                    for sentinel in connection.wait(sentinels, timeout=1):
                        sentinels[sentinel].join(timeout=1)
                self._look_for_dead(error)
                if not waiting:
                    self._abandon()
                    raise WorkerError(
                        f"a data worker failed: {type(error).__name__}: {error}",
                        fix=["num_workers=0 reads the same rows in this process, with the whole traceback"],
                    ) from error
                # A time-out leaves the DataLoader's iterator as it was: asking again goes on waiting.
                if time.monotonic() > deadline:
                    raise self._hangs() from None

    def _look_for_dead(self, cause: Exception | None) -> None:
        dead = [(w, process) for w, process in enumerate(self._iterator._workers) if not process.is_alive()]
        if dead:
            raise self._died(dead) from cause

    def _died(self, dead: list[tuple[int, BaseProcess]]) -> WorkerError:
        evidence: list[str] = []
        fix: list[str] = []
        for worker, process in dead:
            code = process.exitcode
            how = f"killed by {signal_name(-code)}" if code is not None and code < 0 else f"exit code {code}"
            evidence.append(f"worker {worker}, pid {process.pid}: {how}")
            held = [step.job.ids for number, step in self._flight if number % self.count == worker]
            evidence += [f"rows that it had or was reading: {listed(np.concatenate(held))}"] if held else []
            if code == -signal.SIGKILL:
                fix = ["SIGKILL is most often the kernel's out-of-memory killer (dmesg): fewer num_workers"]
            elif code == -getattr(signal, "SIGBUS", 0):
                fix = ["SIGBUS is most often a full /dev/shm: docker run --shm-size=8g, or fewer num_workers"]
        self._abandon()
        pids = ", ".join(str(process.pid) for _, process in dead)
        return WorkerError(
            f"a data worker died (pid {pids}).",
            evidence=evidence,
            fix=[*fix, "num_workers=0 reads the same rows in this process and shows what they do"],
        )

    def _hangs(self) -> WorkerError:
        number, step = self._flight[0]
        pid = self._iterator._workers[number % self.count].pid
        self._abandon()
        return WorkerError(
            f"a data worker gave no batch within {self.timeout:g} s.",
            evidence=[f"worker {number % self.count}, pid {pid}", f"waited for rows {listed(step.job.ids)}"],
            fix=[
                "num_workers=0 reads the same rows in this process: interrupt it to see where the slow row waits",
                f"rows that may take that long: timeout={self.timeout * 4:g} on the DataLoader",
            ],
        )

    def _abandon(self) -> None:
        """Kill the workers after a failure, without torch's orderly shutdown.

        That one takes locks that a killed worker may hold for ever, and waits 5 s for each hanging worker.
        """
        iterator, self._iterator, self._loader._iterator = self._iterator, None, None
        iterator._shutdown = True
        for process in iterator._workers:
            process.kill()
        for process in iterator._workers:
            process.join()
        for queue in iterator._index_queues:
            queue.cancel_join_thread()
            queue.close()
        if hasattr(iterator, "_pin_memory_thread_done_event"):
            iterator._pin_memory_thread_done_event.set()

    def close(self) -> None:
        """End the workers; calling it again changes nothing. Blocks until they are gone (milliseconds)."""
        self._pass += 1
        if self._iterator is not None and self._flight:
            self._abandon()
        elif self._iterator is not None:
            iterator, self._iterator, self._loader._iterator = self._iterator, None, None
            iterator._shutdown_workers()
