"""`evener run --debug`: what it sets, what stays the user's, and that it finds the line of a NaN."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evener.launch.command import Request
from tests.test_launch_command import EIGHT, here, launch

EVENER = Path(sys.executable).parent / "evener"
SCRIPT = Path(__file__).parent / "scripts" / "nan_backward.py"


def test_debug_sets_its_variables_and_says_what_it_costs():
    got = launch(Request("train.py", nproc=2, debug=True), here(EIGHT))
    env = got.command.env
    assert env["CUDA_LAUNCH_BLOCKING"] == "1" and env["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
    assert env["NCCL_DEBUG"] == "INFO" and env["NCCL_DEBUG_FILE"].startswith(got.logs)
    assert got.debug and "slower" in got.notes[-1] and "collectives compared" in got.notes[-1]
    plain = launch(Request("train.py", nproc=2), here(EIGHT))
    assert not plain.debug and not {"CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG"} & plain.command.env.keys()


def test_the_users_own_variables_stay():
    got = launch(Request("train.py", nproc=2, debug=True), here(EIGHT), {"NCCL_DEBUG": "WARN"})
    assert "NCCL_DEBUG" not in got.command.env and "yours stay: NCCL_DEBUG" in got.notes[-1]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EVENER, "run", *words],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C.UTF-8"},
        timeout=400,
    )


def test_the_line_of_a_nan_is_found_on_one_process_first(tmp_path):
    done = run(tmp_path, "--nproc", "2", "--cpu", "--debug=single", str(SCRIPT))
    assert done.returncode == 1 and "finished" not in done.stdout
    assert 'nan_backward.py", line 6' in done.stderr, "the forward line"
    assert "not-finite: Rank 0" in done.stderr and "SqrtBackward0" in done.stderr
    assert done.stderr.rstrip().endswith("evener: it fails on one process already: the others add nothing")


@pytest.mark.full
def test_all_processes_follow_when_one_is_well(tmp_path):
    script = tmp_path / "well.py"
    script.write_text(SCRIPT.read_text().replace("zeros", "ones"))
    done = run(tmp_path, "--nproc", "2", "--cpu", "--debug=single", "well.py")
    assert done.returncode == 0 and done.stdout == "finished\nfinished\n"
    assert "evener: one process ran to its end; now 2" in done.stderr
    assert run(tmp_path, "--nproc", "2", "--cpu", str(SCRIPT)).stdout == "finished\n", "without --debug nothing is said"


MISMATCH = """
import sys, torch
from torch import distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
dist.all_reduce(torch.ones(4))
print("so far well", flush=True)
if sys.argv[1] == "shape":
    dist.all_reduce(torch.ones(5 + dist.get_rank()))
elif dist.get_rank():
    dist.all_reduce(torch.ones(5))
else:
    dist.broadcast(torch.ones(5), 0)
"""


@pytest.mark.parametrize(
    ("what", "differ"), [("shape", "5vs 6|6vs 5"), pytest.param("call", "BROADCAST", marks=pytest.mark.full)]
)
def test_mismatched_collectives_of_a_plain_ddp_script_are_named(tmp_path, what, differ):
    (tmp_path / "mismatch.py").write_text(MISMATCH)
    done = run(tmp_path, "--nproc", "2", "--cpu", "--debug", "mismatch.py", what)
    assert done.returncode == 1 and "so far well" in done.stdout, done.stderr
    assert "Detected mismatch between collectives on ranks" in done.stderr and re.search(differ, done.stderr)


def test_an_unknown_debug_mode_is_refused(tmp_path):
    done = run(tmp_path, "--debug=some", str(SCRIPT))
    assert done.returncode == 2 and "all" in done.stderr and "single" in done.stderr
