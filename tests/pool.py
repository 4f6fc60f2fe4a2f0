"""Persistent worker ranks for tests: importing torch costs seconds, so ranks are forked once and reused.

`pool(3)(function, *args)` runs `function(*args)` on ranks 0..2 of a gloo group and returns the three results in rank
order. `function` must be importable (top level of a test module). A rank that raises makes the call raise, with the
rank's traceback; the ranks of that pool are then replaced, because their collectives may be out of step.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import tempfile
import traceback
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

TIMEOUT = 300


def _rank_main(rank: int, world: int, store: str, pipe: Connection, threads: int) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(threads)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    os.environ["WORLD_SIZE"] = os.environ["LOCAL_WORLD_SIZE"] = str(world)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send((True, function(*args, **kwargs)))
        except BaseException as error:
            with contextlib.suppress(Exception):
                pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)


class RankFailed(AssertionError):
    """What the failing ranks said."""


class Pool:
    """`world` ranks of one gloo group, kept between tests."""

    def __init__(self, world: int, threads: int = 1) -> None:
        self.world, self.threads = world, threads
        self.ranks: list[tuple[BaseProcess, Connection]] = []

    def start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        folder = tempfile.mkdtemp(prefix="evener-pool-")
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(rank, self.world, f"{folder}/store", there, self.threads)
            )
            process.start()
            there.close()
            self.ranks.append((process, here))

    def stop(self) -> None:
        for process, pipe in self.ranks:
            pipe.close()
            process.kill()
            process.join()
            process.close()
        self.ranks = []

    def __call__(self, function, *args, **kwargs):
        if not self.ranks:
            self.start()
        for _, pipe in self.ranks:
            pipe.send((function, args, kwargs))
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self.ranks):
            # After a first failure the other ranks may wait for it in a collective: do not wait for long.
            wait = 10 if failures else TIMEOUT
            try:
                ok, value = pipe.recv() if pipe.poll(wait) else (False, f"no answer within {wait} s")
            except EOFError:
                ok, value = False, "the process ended"
            except BaseException:  # interrupted or timed out: the next call would get these answers
                self.stop()
                raise
            results.append(value)
            if not ok:
                failures.append(f"rank {rank}: {value}")
        if failures:
            self.stop()
            raise RankFailed("\n".join(failures))
        return results


_POOLS: dict[tuple[int, int], Pool] = {}


def pool(world: int, threads: int = 1) -> Pool:
    """The shared pool of `world` ranks with `threads` intra-op threads each."""
    return _POOLS.setdefault((world, threads), Pool(world, threads))


def stop_all() -> None:
    for one in _POOLS.values():
        one.stop()
    _POOLS.clear()
