"""Process groups of other people's scripts, and calls that not every rank makes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import evener
from evener.errors import CollectiveError
from tests.models import make, mlp_rows, row_loss

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
import torch.multiprocessing as mp
import evener
sys.path.insert(0, {root!r})
from tests.models import make, mlp_rows, row_loss

def main(rank, world, port, own, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if own:
        dist.init_process_group("gloo")
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = evener.Run(model, optimizer, row_loss, mlp_rows(20), global_batch_size=8, exact=True, slice_size=2, precision="fp32", dir=folder)
    for update in run.updates(epochs=2):
        pass
    digest = run.digest()
    run.close()
    if own:
        total = torch.ones(1)
        dist.all_reduce(total)
        assert float(total) == world
        dist.destroy_process_group()
    if rank == 0:
        print("digest", digest, "world", run.world_size, flush=True)

if __name__ == "__main__":
    mp.spawn(main, args=(2, int(sys.argv[1]), sys.argv[2] == "own", sys.argv[3]), nprocs=2)
"""


def alone(folder):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evener.Run(model, optimizer, row_loss, mlp_rows(20), global_batch_size=8, exact=True, slice_size=2, precision="fp32", dir=folder) as run:  # fmt: skip
        list(run.updates(epochs=2))
        return run.digest(), dist.is_initialized()


@pytest.mark.parametrize("group", ["own", "ours"])
def test_a_script_that_spawns_its_ranks_by_hand(tmp_path, group):
    (tmp_path / "train.py").write_text(SCRIPT.format(root=os.path.dirname(os.path.dirname(__file__))))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "train.py", str(port), group, "run"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"digest {alone(tmp_path / 'alone')[0]} world 2" in done.stdout
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.parametrize("world", [1, 3])
def test_a_group_that_exists_is_adopted_and_left(ranks, tmp_path, world):
    expected, _ = alone(tmp_path / "alone")
    for name in ("a", "b"):  # the group of these ranks serves one run after the other
        assert ranks(world)(alone, str(tmp_path / name)) == [(expected, True)] * world


LONELY = """
import sys, torch, evener
sys.path.insert(0, {root!r})
from tests.models import make, mlp_rows, row_loss
torch.set_num_threads(1)
model = make("mlp")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = evener.Run(model, optimizer, row_loss, mlp_rows(40), global_batch_size=8, precision="fp32", timeout=5, dir="run")
for update in run.updates(updates={updates}):
    if update.number == {at} and run.is_main:
        {call}
"""


@pytest.mark.parametrize(
    ("call", "named", "updates", "at"),
    [
        ("run.evaluate(mlp_rows(9))", "evaluate", 5, 2),
        ('run.save("best")', "the loop's checkpoint", 3, 2),  # met by the other rank's last checkpoint, which is missed
    ],
    ids=["in the middle", "at the end"],
)
def test_a_call_on_one_rank_only_is_named_and_does_not_hang(tmp_path, call, named, updates, at):
    root = os.path.dirname(os.path.dirname(__file__))
    (tmp_path / "train.py").write_text(LONELY.format(root=root, call=call, updates=updates, at=at))
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--nproc", "2", "--cpu", "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode != 0, output
    assert f"{named} must be called on every rank" in output, output
    assert CollectiveError.__name__ in output or "did not call it" in output
