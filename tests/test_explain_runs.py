"""Real failures of two processes, explained from what they really print: under evener run, torchrun, accelerate, Lightning.

The outputs in tests/cases/made_here were recorded with `python -m tests.test_explain_runs` (torch 2.13, accelerate 1.15,
Lightning, gloo); the exhaustive form makes every one of them again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evener.explain import explain_text

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RECORDED = HERE / "cases" / "made_here"
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "BREAKS_TIMEOUT": "8", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}

COMMANDS = {
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node=2", SCRIPTS / "breaks.py"],
    "accelerate": [sys.executable, SCRIPTS / "breaks_accelerate.py"],
    "lightning": [sys.executable, SCRIPTS / "breaks_lightning.py"],
}
# (launcher, how it breaks) -> the kinds that are right, the culprit ("unknown": the text cannot say)
EXPECTED = {
    ("torchrun", "raises"): ({"torchrun-hidden-root-cause"}, 1),
    ("torchrun", "cleans"): ({"torchrun-hidden-root-cause"}, 1),
    ("torchrun", "killed"): ({"host-oom-sigkill"}, 1),
    ("torchrun", "segfault"): ({"segfault"}, 1),
    ("torchrun", "exits"): ({"torchrun-hidden-root-cause", "peer-gone"}, "unknown"),
    ("torchrun", "hangs"): ({"nccl-timeout"}, "unknown"),
    ("torchrun", "unused"): ({"ddp-unused-params"}, [0, 1]),
    ("torchrun", "shapes"): ({"ddp-rank-desync"}, "unknown"),
    ("torchrun", "oom"): ({"oom-capacity"}, None),
    ("accelerate", "raises"): ({"python-exception"}, 1),
    ("accelerate", "killed"): ({"host-oom-sigkill"}, 1),
    ("accelerate", "unused"): ({"ddp-unused-params"}, None),
    ("lightning", "raises"): ({"python-exception"}, 1),
    ("lightning", "killed"): ({"peer-gone", "host-oom-sigkill"}, None),
    ("lightning", "unused"): ({"ddp-unused-params"}, None),
}


def output_of(launcher: str, how: str, folder: Path) -> str:
    done = subprocess.run(
        [*map(str, COMMANDS[launcher]), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=folder,
        env=ENVIRONMENT,
        timeout=400,
    )
    assert done.returncode != 0
    return done.stdout


def check(launcher: str, how: str, text: str) -> None:
    kinds, culprit = EXPECTED[launcher, how]
    answer = explain_text(text)
    assert answer.kind in kinds, answer
    if culprit == "unknown":
        assert not answer.culprit_known
    elif culprit is not None:
        assert answer.culprit_known and (answer.culprit_rank == culprit or answer.culprit_rank in (culprit,)), answer
    assert answer.evidence and answer.fix and answer.confirm


@pytest.mark.parametrize("launcher, how", EXPECTED)
def test_the_recorded_output_of_a_real_failure_is_explained(launcher, how):
    check(launcher, how, (RECORDED / f"{launcher}-{how}.log").read_text("utf-8"))


@pytest.mark.full
@pytest.mark.parametrize("launcher, how", EXPECTED)
def test_a_failure_made_now_is_explained(launcher, how, tmp_path):
    check(launcher, how, output_of(launcher, how, tmp_path))


# --- evener run -----------------------------------------------------------------------------------------------------

full = pytest.mark.full
# how -> what its report must have, in this order
REPORTS = {
    "killed": (["evener: rank 1 was killed by SIGKILL", "host-oom-sigkill: Rank 1:", "Fix:", "logs: "], 137),
    "shapes": (["ddp-rank-desync: ", "other shape|shapes", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "logs: "], None),
    "unused": (
        ["Expected to have finished reduction", "at .*breaks.py", "ddp-unused-params", r"0 \* sum", "logs: "],
        1,
    ),
    "exits": ([r"(?i)rank 1", "left in the middle|exit code 0 in the middle", "logs: "], 1),
    "raises": (["evener: rank 1 failed: KeyError: 'labels of row 17'", "at .*breaks.py", "logs: "], 1),
    "cleans": ([r"(?i)rank 1 ", "breaks.py", "logs: "], 1),
    "segfault": (["evener: rank 1 was killed by SIGSEGV", "segfault: Rank 1", "faulthandler", "logs: "], 139),
    "hangs": (["evener: rank 1 did not come", "time.sleep", "nccl-timeout", "logs: "], 1),
    "one-rank": (["evener: rank 1 did not come", "nccl-timeout", "logs: "], 1),
    "oom": (["CUDA out of memory", "oom-capacity: ", "22.14 GiB of 23.69 GiB", "expandable_segments", "logs: "], 1),
}
QUICK = ("exits",)


@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=full) for how in REPORTS])
def test_evener_run_ends_with_the_cause_and_its_fix(how, tmp_path):
    words, code = REPORTS[how]
    done = subprocess.run(
        [BIN / "evener", "run", "--nproc", "2", "--cpu", SCRIPTS / "breaks.py", how],
        capture_output=True,
        text=True,
        errors="replace",
        cwd=tmp_path,
        env=ENVIRONMENT,
        timeout=400,
    )
    assert done.returncode == code if code is not None else done.returncode != 0, done.stderr
    said = done.stderr[done.stderr.rindex("\nevener: ") :]
    at = 0
    for word in words:
        match = re.search(word, said[at:])
        assert match, (word, said)
        at += match.start()
    # The same from the folder, afterwards.
    (logs,) = (tmp_path / "runs" / "logs").iterdir()
    again = subprocess.run([BIN / "evener", "explain", logs], capture_output=True, text=True, env=ENVIRONMENT)
    assert again.returncode == 0, again.stderr
    assert "Culprit" in again.stdout and "Evidence" in again.stdout
    # Every rank's exception is in the records of `evener run`: no word of torchrun's table.
    assert "closing table" not in again.stdout.partition("Only consequences")[0], again.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="real-time signals and /proc")
@pytest.mark.parametrize("name", ["SIGINT", pytest.param("SIGTERM", marks=full)])
def test_a_hang_that_is_stopped_names_who_did_not_come_and_not_the_victims(name, tmp_path):
    """After the signal rank 1 ends first, and rank 0 fails because its peer is gone: that was never the cause."""
    command = [BIN / "evener", "run", "--nproc", "2", "--cpu", SCRIPTS / "breaks.py", "hangs"]
    environ = ENVIRONMENT | {"BREAKS_TIMEOUT": "600"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, cwd=tmp_path, env=environ, **pipes) as job:
        assert job.stdout.readline() == "started 0\n"
        (logs,) = (tmp_path / "runs" / "logs").iterdir()
        until = time.monotonic() + 200
        while "started" not in (logs / "rank1.log").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)  # into the sleep, and into the collective after it
        job.send_signal(getattr(signal, name))
        said = job.communicate(timeout=200)[1]
    assert job.returncode == (130 if name == "SIGINT" else 143)
    told = said[said.index(f"evener: stopped by {name} (") :]
    assert "and no rank had failed before" in told and "time.sleep(300)" in told, said
    assert re.search(r"rank 1 is in .*breaks\.py.*\n  rank 0 waits in .*breaks\.py", told), said
    assert "if nothing moved any more, look at rank 1" in told
    done = subprocess.run([BIN / "evener", "explain", "--json", logs], capture_output=True, text=True, env=ENVIRONMENT)
    answer = json.loads(done.stdout)
    assert (answer["kind"], answer["sub_cause"]) == ("stopped-by-signal", "while-waiting")
    assert (answer["culprit_rank"], answer["culprit_known"]) == (1, False), "suspected"
    assert "rank 1" in answer["summary"] and any("time.sleep(300)" in one["text"] for one in answer["evidence"])
    assert any(one.startswith("peer-gone") for one in answer["consequences"]) or name == "SIGTERM"


# --- full shared memory -----------------------------------------------------------------------------------------------

BATCHES = """
import torch

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(1 << 20)

if __name__ == "__main__":
    list(torch.utils.data.DataLoader(Rows(), batch_size=2, num_workers=1))
"""
SMALL = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"', "sh"]


def test_a_full_dev_shm_is_named_and_not_the_worker_that_met_it(tmp_path):
    """A /dev/shm of 2 MiB, in a mount namespace of its own; the batch is of 8."""
    if shutil.which("unshare") is None or subprocess.run([*SMALL, "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting a small /dev/shm is not allowed here")
    (tmp_path / "train.py").write_text(BATCHES)
    command = [*SMALL, sys.executable, "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, timeout=300)
    assert done.returncode != 0
    answer = explain_text(done.stderr)
    assert (answer.kind, answer.sub_cause) == ("shm-bus-error", None), done.stderr
    assert any("--shm-size" in line for line in answer.fix)
    assert "dataloader-worker-exception" in " ".join(answer.consequences)


if __name__ == "__main__":
    for one in EXPECTED:
        text = output_of(*one, Path.cwd())
        for old, new in ((str(BIN.parent), "/env"), (str(HERE.parent), "/home/me/repo"), (sys.base_prefix, "/usr")):
            text = text.replace(old, new)
        cut = "".join(f"{line[:600]}\n" for line in text.splitlines())
        (RECORDED / f"{'-'.join(one)}.log").write_text(cut, "utf-8")
