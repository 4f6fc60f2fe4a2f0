"""`evener run --debug`: what it sets, what stays the user's, and that it finds the line of a NaN."""

from __future__ import annotations

import os
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


def test_on_the_cpu_ddp_keeps_working():
    """torch 2.13 crashes in DDP's constructor over gloo with DETAIL."""
    got = launch(Request("train.py", nproc=2, cpu=True, debug=True), here())
    assert got.command.env["TORCH_DISTRIBUTED_DEBUG"] == "INFO" and "collectives" not in got.notes[-1]


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


@pytest.mark.full
def test_plain_ddp_runs_under_debug(tmp_path):
    done = run(tmp_path, "--nproc", "2", "--cpu", "--debug", str(SCRIPT.with_name("ddp_plain.py")))
    assert done.returncode == 0, done.stderr


def test_an_unknown_debug_mode_is_refused(tmp_path):
    done = run(tmp_path, "--debug=some", str(SCRIPT))
    assert done.returncode == 2 and "all" in done.stderr and "single" in done.stderr
