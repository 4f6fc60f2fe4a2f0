"""Many pickers of several users over the GPUs of a stand-in driver, some killed while they hold: who had what, when?

    python gpu_race.py LEASES_FOLDER PICKERS SEED lease|query

Every picker wants one to four GPUs (every tenth all eight), "starts up" for a moment in which nothing is on the GPU yet,
computes, and leaves. `query` is the way of the many scripts that look for idle GPUs and then go. Prints one JSON line:
{"double": [...], "grants": n, "killed": n, "starved": [...]}. A double grant is seen in memory that all processes share,
not by the code that is tested.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
import traceback

from evener.errors import ShortageError
from evener.gpus import leases, look, owners, pick

GPUS = 8
USERS = (65001, 65002, 65003)
DEADLINE_SECONDS = 500
processes = next(line.split()[1] for line in open(os.environ["FAKE_NVML"]) if line.startswith("procs_dir"))  # noqa: SIM115


class Board:
    """Shared memory: the owner of each GPU, and per picker its state, its grants, and the double grants it saw."""

    def __init__(self, pickers: int) -> None:
        self.pickers = pickers
        self.memory = mmap.mmap(-1, 4 * (GPUS + 4 * pickers))

    def get(self, at: int) -> int:
        return struct.unpack_from("i", self.memory, 4 * at)[0]

    def put(self, at: int, value: int) -> None:
        struct.pack_into("i", self.memory, 4 * at, value)

    def field(self, name: str, who: int) -> int:
        return GPUS + ("holding", "killed", "grants", "doubles").index(name) * self.pickers + who


def main() -> None:
    folder, pickers, seed, way = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    board, chance = Board(pickers), random.Random(seed)
    children = {}
    # Everything is imported before the users differ: theirs may be unable to read this interpreter's files.
    assert len(look.look(os.environ).gpus) == GPUS and leases.file_system("/") and owners.user_name(0)
    import fcntl  # noqa: F401
    import tomllib  # noqa: F401

    for who in range(pickers):
        pid = os.fork()
        if pid == 0:
            try:
                picker(board, who, folder, way, random.Random(f"{seed}-{who}"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        children[pid] = who
    until = time.monotonic() + DEADLINE_SECONDS
    victims = set(chance.sample(range(pickers), pickers // 5))
    pids = {who: pid for pid, who in children.items()}
    while children and time.monotonic() < until:
        for who in list(victims):
            # Half of them while they hold, the others at any moment: waiting, choosing, giving back.
            if chance.random() < (0.3 if board.get(board.field("holding", who)) else 0.01 * (who % 2)):
                board.put(board.field("killed", who), 1)
                if pids[who] in children:  # it may be done before it is its turn
                    os.kill(pids[who], signal.SIGKILL)
                victims.discard(who)
        with contextlib.suppress(ChildProcessError):
            pid, _ = os.waitpid(-1, os.WNOHANG)
            children.pop(pid, None)
        time.sleep(0.002)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    count = {
        name: [board.get(board.field(name, who)) for who in range(pickers)] for name in ("killed", "grants", "doubles")
    }
    report = {"double": sum(count["doubles"]), "grants": sum(count["grants"]), "killed": sum(count["killed"])}
    report["starved"] = [who for who in range(pickers) if not count["grants"][who] and not count["killed"][who]]
    print(json.dumps(report))


def picker(board: Board, who: int, folder: str, way: str, chance: random.Random) -> None:
    if os.getuid() == 0:
        os.setgid(USERS[who % 3])
        os.setuid(USERS[who % 3])
    time.sleep(chance.random() * 0.3)
    wish = pick.Wish(count=GPUS if who % 10 == 9 else chance.choice((1, 1, 2, 3, 4)), wait_seconds=DEADLINE_SECONDS)
    if way == "lease":
        picked = pick.pick(wish, os.environ, lock_folder=folder, poll_seconds=0.05)
    else:
        picked = None
        while picked is None:
            try:
                picked = pick.choose(wish, pick.universe(look.look(os.environ), os.environ))
            except ShortageError:
                time.sleep(0.05)
    for gpu in picked.gpus:
        owner = board.get(gpu.index)
        if owner and not board.get(board.field("killed", owner - 1)):
            board.put(board.field("doubles", who), board.get(board.field("doubles", who)) + 1)
        board.put(gpu.index, who + 1)
    board.put(board.field("grants", who), 1)
    time.sleep(0.03)  # start-up: nothing is on the GPU yet
    occupied = os.path.join(processes, str(os.getpid()))
    with open(f"{occupied}.new", "w") as file:
        file.writelines(f"{gpu.index} C 9000\n" for gpu in picked.gpus)
    os.rename(f"{occupied}.new", occupied)
    board.put(board.field("holding", who), 1)
    time.sleep(0.03 + chance.random() * 0.05)
    board.put(board.field("holding", who), 0)
    os.unlink(occupied)
    for gpu in picked.gpus:
        if board.get(gpu.index) == who + 1:
            board.put(gpu.index, 0)
    if picked.lease is not None:
        picked.lease.close()


main()
