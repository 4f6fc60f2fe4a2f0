"""The way of a batch from its reader to the device: worker processes if there are any, a look at it, the copy.

Workers are torch's DataLoader machinery, with its failures made nameable.

The DataLoader gets `batch_size=None` and a sampler that yields jobs; a worker reads a whole job. Jobs go to
the workers in turn (job k of a pass to worker k mod count) and results come back in job order: so it is known
which rows a worker holds.
The DataLoader's iterator is used by private names where its own failure handling is too coarse: in this module only.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any

import numpy as np
import torch
from torch._C import _remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from evener.data.processes import started_by, watched
from evener.data.read import Loaded, Reader, listed
from evener.data.source import Reading, Source
from evener.data.transfer import Transfer, ahead
from evener.dist.mix import mix
from evener.errors import DataError, UsageError, WorkerError

# How often a wait looks after the workers' health and its own deadline.
_POLL_SECONDS = 0.5


class _InWorker(Exception):
    """The worker's traceback, as the cause of the error that the rank raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Jobs(Dataset[Any]):
    """The 'dataset' that the DataLoader's workers index with jobs. A DataError comes back with its traceback."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, job: Any) -> Loaded | tuple[DataError, str]:
        try:
            return self.reader.read(job)
        except DataError as error:
            return error, "".join(traceback.format_exception(error))


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """No advice: the number was somebody's choice."""


class _JobSampler:
    """Hands the jobs of the current pass to the DataLoader, which asks for an iterator anew for every pass."""

    def __init__(self) -> None:
        self.jobs: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[Any]:
        return self.jobs


def _as_is(loaded: Any) -> Any:
    return loaded


class Workers:
    """`count` processes that read jobs ahead, kept between passes until `close`.

    timeout: Seconds that one wait may take before they count as hanging. pin: the DataLoader's thread pins the results.
    """

    def __init__(self, reader: Reader, source: Source, count: int, timeout: float, seed: int, pin: bool) -> None:
        self.count, self.timeout = count, timeout
        self._sampler = _JobSampler()
        self._loader = _Loader(
            _Jobs(reader),
            batch_size=None,
            sampler=self._sampler,
            num_workers=count,
            collate_fn=_as_is,
            pin_memory=pin,
            timeout=timeout,
            worker_init_fn=started_by(source.multiprocessing_context, source.worker_init_fn),
            multiprocessing_context=source.multiprocessing_context,
            # Its own generator: the DataLoader would draw from the global one.
            generator=torch.Generator().manual_seed(mix(seed)),
            prefetch_factor=source.prefetch_factor,
            persistent_workers=True,
        )
        self._iterator: Any = None
        self._pass = 0
        self._flight: deque[tuple[int, Any, Any]] = deque()  # (number in the pass, plan, job) that workers have or had

    def read(self, steps: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Loaded]]:
        """(plan, result) for each (plan, job), in order, while the workers read ahead. A new pass ends the one before.

        Raises:
            DataError: what a reader raised, with the worker's traceback as its cause.
            WorkerError: a worker died, hangs, or could not start; all workers are ended then.
        """
        if self._flight and self._iterator is not None:
            self._abandon()  # the pass before was left in the middle: new workers cost less than finishing its jobs
        self._pass += 1
        turn, self._flight = self._pass, deque()
        flight = self._flight
        broken: list[Exception] = []

        def jobs() -> Iterator[Any]:
            try:
                for number, (plan, job) in enumerate(steps):
                    flight.append((number, plan, job))
                    yield job
            except Exception as error:  # of a later update: those before it are delivered first
                broken.append(error)

        self._sampler.jobs = jobs()
        self._begin()
        while True:
            if turn != self._pass:
                what = "these portions were ended by a newer call of portions() on the same data."
                raise UsageError(what, fix=["finish one pass before the next, or make a second Feed"])
            result = self._next()
            if result is None:
                if broken:
                    raise broken[0]
                return
            _, plan, _ = flight.popleft()
            if isinstance(result, tuple):
                error, trace = result
                raise error from _InWorker(trace)
            yield plan, result

    def _begin(self) -> None:
        if self._iterator is not None:
            self._look_for_dead(None)
            self._iterator._timeout = self.timeout  # the workers' greeting at the start of a pass is not polled
        try:
            self._iterator = iter(self._loader)
            for worker in self._iterator._workers:
                worker._popen.terminate = worker._popen.kill  # they are deaf to TERM (processes.py)
            self._iterator._timeout = min(_POLL_SECONDS, self.timeout)
        except Exception as error:  # not picklable, no more processes, no shared memory
            if self._iterator is not None:
                self._look_for_dead(error)  # one that died since the last pass gave no greeting
                self._abandon()
            raise WorkerError(
                f"the data workers could not start: {type(error).__name__}: {error}",
                fix=[
                    "num_workers=0 reads in this process",
                    "where processes are spawned: define dataset and collate_fn at the top level of a module",
                ],
            ) from error
        # From here on torch's SIGCHLD handler does not know these workers; see `watched`.
        if self._iterator._worker_pids_set:
            _remove_worker_pids(id(self._iterator))
            self._iterator._worker_pids_set = False

    def _next(self) -> Any:
        """The next result; None at the end of the pass."""
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                with watched(self._iterator):
                    return next(self._iterator)
            except StopIteration:
                return None
            except Exception as error:
                # A time-out leaves the DataLoader's iterator as it was: asking again goes on waiting.
                waiting = isinstance(error, RuntimeError) and "timed out" in str(error)
                if not waiting:
                    # A dying worker's connections break first, then its sentinel, and only then it counts as dead.
                    sentinels = {process.sentinel: process for process in self._iterator._workers}
                    for sentinel in connection.wait(sentinels, timeout=1):
                        sentinels[sentinel].join(timeout=1)
                self._look_for_dead(error)
                if not waiting:
                    self._abandon()
                    fix = ["num_workers=0 reads the same rows in this process, with the whole traceback"]
                    raise WorkerError(f"a data worker failed: {type(error).__name__}: {error}", fix=fix) from error
                if time.monotonic() > deadline:
                    raise self._hangs() from None

    def _look_for_dead(self, cause: Exception | None) -> None:
        dead = [(w, process) for w, process in enumerate(self._iterator._workers) if not process.is_alive()]
        if not dead:
            return
        evidence: list[str] = []
        fix: list[str] = []
        for worker, process in dead:
            code = process.exitcode
            killed_by = [one.name for one in signal.Signals if one == -(code or 0)]
            how = f"killed by {killed_by[0]}" if killed_by else f"exit code {code}"
            evidence.append(f"worker {worker}, pid {process.pid}: {how}")
            held = [job.ids for number, _, job in self._flight if number % self.count == worker]
            evidence += [f"rows that it had or was reading: {listed(np.concatenate(held))}"] if held else []
            if code == -signal.SIGKILL:
                fix = ["SIGKILL is most often the kernel's out-of-memory killer (dmesg): fewer num_workers"]
            elif code == -getattr(signal, "SIGBUS", 0):
                fix = ["SIGBUS is most often a full /dev/shm: docker run --shm-size=8g, or fewer num_workers"]
        self._abandon()
        what = f"a data worker died (pid {', '.join(str(process.pid) for _, process in dead)})."
        fix = [*fix, "num_workers=0 reads the same rows in this process and shows what they do"]
        raise WorkerError(what, evidence=evidence, fix=fix) from cause

    def _hangs(self) -> WorkerError:
        number, _, job = self._flight[0]
        pid = self._iterator._workers[number % self.count].pid
        self._abandon()
        return WorkerError(
            f"a data worker gave no batch within {self.timeout:g} s.",
            evidence=[f"worker {number % self.count}, pid {pid}", f"waited for rows {listed(job.ids)}"],
            fix=[
                "num_workers=0 reads the same rows in this process: interrupt it to see where the slow row waits",
                f"rows that may take that long: timeout={self.timeout * 4:g} on the DataLoader",
            ],
        )

    def _abandon(self) -> None:
        """Kill the workers: torch's orderly shutdown takes locks that a killed one may hold, and waits 5 s for each."""
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


class Delivery:
    """Reads jobs, here or in workers; on a device the batches are one update ahead of the one that trains."""

    def __init__(self, reader: Reader, source: Source, how: Reading, num_workers: int) -> None:
        self.timeout = how.timeout or source.timeout or 300.0
        self._reader, self._inspect = reader, how.inspect
        self._transfer = None if how.device.type == "cpu" else Transfer(how.device, how.lap)
        pin = how.device.type == "cuda"
        self.workers = Workers(reader, source, num_workers, self.timeout, how.seed, pin) if num_workers else None

    def results(self, steps: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """(plan, result) for each (plan, job), in order. With workers a newer call ends the older one."""
        loaded = map(self._look, self._reader.read_all(steps) if self.workers is None else self.workers.read(steps))
        transfer = self._transfer
        if transfer is None:
            yield from loaded
        else:
            for (plan, result), moving in ahead(loaded, lambda item: (item, transfer.start(item[1].batches))):
                result.batches = transfer.finish(*moving)
                yield plan, result

    def _look(self, item: tuple[Any, Loaded]) -> tuple[Any, Loaded]:
        if self._inspect is not None:
            for batch in item[1].batches:
                if batch is not None:
                    self._inspect(batch)
        return item

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
