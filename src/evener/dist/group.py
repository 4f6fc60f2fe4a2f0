"""The process group: made or adopted once, owned by the object that made it, passed to who needs it."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from evener.dist.info import Place, here
from evener.ending import let_groups_go
from evener.errors import CollectiveError, LaunchError


class Group:
    """All ranks of this job, or this one process.

    A process group that already exists is adopted and never destroyed; otherwise one is made when there is more than
    one process, and it lives until the process ends, so that a second Run adopts it. All ranks must construct it
    together; it communicates only when it makes a group.

    Args:
        device: Where collectives take their tensors: "cuda" uses NCCL, everything else gloo.
        timeout: Seconds after which a collective with a missing rank fails.
        store_dir: A directory (mode 0700) that the launcher made for a file store, so that nothing listens on the
            network. None: the launcher's MASTER_ADDR and MASTER_PORT are used.

    Raises:
        LaunchError: more than one process, but no way to meet the others.
    """

    def __init__(self, device: torch.device, *, timeout: float = 600.0, store_dir: str | None = None) -> None:
        self.device = device
        self.timeout = timeout
        self.calls = 0
        self._store: Any = None
        place = here()
        if dist.is_available() and dist.is_initialized():
            self.adopted = True
        else:
            self.adopted = False
            if place.world_size > 1:
                self._make(place, store_dir)
        self.place: Place = here()
        if self.place.world_size > 1:
            atexit.register(let_groups_go, destroy=not self.adopted)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    def _make(self, place: Place, store_dir: str | None) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=self.timeout)
        if store_dir is not None:
            # A restarted attempt must not read the dead attempt's addresses, so each has a file of its own.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            file = str(Path(store_dir) / f"attempt-{attempt}")
            self._store = torch._C._distributed_c10d.FileStore(file, place.world_size)
            self._store.set_timeout(timeout)
            where: dict[str, Any] = {"store": self._store}
        else:
            missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
            if missing:
                raise LaunchError(
                    f"WORLD_SIZE={place.world_size}, but {' and '.join(missing)} is not set: "
                    "the processes cannot find each other.",
                    fix=["start the script with `evener run` or `torchrun`", "or unset RANK and WORLD_SIZE"],
                )
            where = {"init_method": "env://"}
        dist.init_process_group(backend, rank=place.rank, world_size=place.world_size, timeout=timeout, **where)

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Around a collective that a user's code asks for: a failure says which call, and which ranks did not come.

        Each rank leaves a mark in the store first (about 0.1 ms), so that the survivors of a time-out can name who is
        missing. Not used inside the step.
        """
        if self.world_size == 1:
            yield
            return
        self.calls += 1
        store = self._store if self._store is not None else dist.distributed_c10d._get_default_store()
        prefix = f"evener/{self.calls}"
        store.set(f"{prefix}/{self.rank}", name)
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            arrived: dict[int, str] = {}
            for rank in range(self.world_size):
                with contextlib.suppress(RuntimeError, dist.DistError):
                    if store.check([f"{prefix}/{rank}"]):
                        arrived[rank] = store.get(f"{prefix}/{rank}").decode()
            missing = [rank for rank in range(self.world_size) if rank not in arrived]
            other = {rank: what for rank, what in arrived.items() if what != name}
            evidence = [f"rank {self.rank}: {str(error).splitlines()[0]}"]
            evidence += [f"rank {rank} called {what} instead" for rank, what in other.items()]
            if missing and "closed by peer" in str(error):
                evidence.append("a process has ended: if it failed, its own error is the cause of this one")
            if missing:
                who = ", ".join(str(rank) for rank in missing)
                cause = f"{name} must be called on every rank; rank {who} did not call it."
            elif other:
                cause = f"{name} must be called on every rank at the same point; the ranks called different things."
            else:
                cause = f"{name} failed although every rank called it."
            fix = [f"call {name} outside of any `if rank == 0:`, on all ranks alike"]
            raise CollectiveError(cause, evidence=evidence, fix=fix) from error
