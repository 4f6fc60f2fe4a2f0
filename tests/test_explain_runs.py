"""Real failures of two processes, explained from what they really print: evener run, torchrun, accelerate, Lightning.

The outputs in tests/cases/made_here were recorded with `python -m tests.test_explain_runs` (torch 2.13, accelerate 1.15,
Lightning, gloo); the exhaustive form makes every one of them again.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from evener.explain import explain_text
from evener.explain.answer import Explanation
from tests.conftest import SEED

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
RECORDED = HERE / "cases" / "made_here"
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "BREAKS_TIMEOUT": "5", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
full = pytest.mark.full

# Lightning starts its second process by itself, accelerate is started by torchrun or starts both (`debug_launcher`).
COMMANDS = {
    "torchrun": [BIN / "torchrun", "--standalone", "--nproc_per_node=2", SCRIPTS / "breaks.py"],
    "accelerate": [BIN / "torchrun", "--standalone", "--nproc_per_node=2", SCRIPTS / "breaks_accelerate.py"],
    "debug_launcher": [sys.executable, SCRIPTS / "breaks_accelerate.py"],
    "lightning": [sys.executable, SCRIPTS / "breaks_lightning.py"],
}
# A /dev/shm of 2 MiB and a folder of 64 KiB, in a mount namespace of its own.
MOUNTS = "mount -t tmpfs -o size=2m tmpfs /dev/shm && mkdir -p small && mount -t tmpfs -o size=64k tmpfs small"
SMALL = ["unshare", "--mount", "sh", "-c", f'{MOUNTS} && exec "$@"', "sh"]
# how it breaks -> the kind under torchrun, and the culprit (twice where two answers are right): a rank; ANY of those
# that say it; UNKNOWN; SUSPECT: rank 1 is named but not known; None: the fault is of no rank
ANY, UNKNOWN, SUSPECT = "any", "unknown", "suspect"
UNDER_TORCHRUN = {
    "raises": ("torchrun-hidden-root-cause", 1),
    "cleans": ("torchrun-hidden-root-cause", 1),
    "evicted": ("nccl-timeout", SUSPECT),
    "segfault": ("segfault", 1),
    "killed": ("host-oom-sigkill", 1),
    "exits": ("torchrun-hidden-root-cause", UNKNOWN),
    "hangs": ("nccl-timeout", SUSPECT),
    "port": ("port-in-use", None),
    "shm": ("shm-bus-error", ANY),
    "files": ("dataloader-too-many-files", ANY),
    "unused": ("ddp-unused-params", ANY),
    "shapes": ("ddp-rank-desync", UNKNOWN),
    "torn": ("ckpt-corrupt", ANY),
    "disk": ("disk-full", ANY),
    "label": ("device-assert-label", 1),
    "optimizer": ("optimizer-state-mismatch", ANY),
    "pickle": ("dataloader-pickle", ANY),
}
# Lightning's parent is rank 0: of how its other process ended there is no word.
UNDER_LIGHTNING = UNDER_TORCHRUN | {
    "raises": ("python-exception", 1),
    "cleans": ("python-exception", 1),
    "evicted": ("nccl-timeout", 1),
    "segfault": ("peer-gone", SUSPECT),
    "killed": ("peer-gone", SUSPECT),
    "exits": ("peer-gone", SUSPECT),
    "hangs": ("nccl-timeout", 1),
}
OF_LAUNCHERS = {
    "torchrun": UNDER_TORCHRUN | {"oom": ("oom-capacity", ANY)},
    "accelerate": UNDER_TORCHRUN,
    "debug_launcher": {  # it shows one process: the victim, where that ends before it has looked
        "raises": ("python-exception", 1, "peer-gone", UNKNOWN),
        "killed": ("host-oom-sigkill", 1, "peer-gone", UNKNOWN),
        "unused": ("ddp-unused-params", ANY),
    },
    "lightning": UNDER_LIGHTNING,
}
EXPECTED = {(launcher, how): right for launcher, ways in OF_LAUNCHERS.items() for how, right in ways.items()}


def namespaces_are_allowed(folder: Path) -> bool:
    return shutil.which("unshare") is not None and not subprocess.run([*SMALL, "true"], cwd=folder).returncode


def output_of(launcher: str, how: str, folder: Path) -> str:
    command, environ = [*map(str, COMMANDS[launcher]), how], dict(ENVIRONMENT)
    if how in ("shm", "disk"):
        if not namespaces_are_allowed(folder):
            pytest.skip("mounting a small file system is not allowed here")
        command = [*SMALL, *command]
    with socket.socket() as taken, tempfile.TemporaryFile("w+", errors="replace") as output:
        if how == "port":
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            environ["MASTER_PORT"] = port = str(taken.getsockname()[1])
            master = ["--master-addr=127.0.0.1", f"--master-port={port}"]
            command = [part for one in command for part in (master if one == "--standalone" else [one])]
        pipes = {"stdout": output, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=folder, env=environ, start_new_session=True, **pipes) as job:
            try:
                assert job.wait(timeout=400) != 0
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(job.pid, signal.SIGKILL)  # Lightning's other process may wait for ever
        output.seek(0)
        return output.read()


def culprit_is(right: int | str | None, answer: Explanation) -> bool:
    if right in (SUSPECT, UNKNOWN):
        return answer.culprit_rank == (1 if right == SUSPECT else None) and not answer.culprit_known
    if right == ANY:
        return answer.culprit_known and answer.culprit_rank in (0, 1, [0, 1])
    return answer.culprit_rank == right and (answer.culprit_known or right is None)


def check(launcher: str, how: str, text: str) -> None:
    right, answer = EXPECTED[launcher, how], explain_text(text)
    assert any(answer.kind == kind and culprit_is(who, answer) for kind, who in zip(right[::2], right[1::2])), answer
    assert answer.evidence and answer.fix and answer.confirm
    if answer.kind == "nccl-timeout":
        for language in ("en", "zh"):  # gloo has neither sequence numbers nor NCCL's switches
            assert not re.search("SeqNum|NCCL", str(explain_text(text, language)).partition("\n\n")[2])


@pytest.mark.parametrize("launcher, how", EXPECTED)
def test_the_recorded_output_of_a_real_failure_is_explained(launcher, how):
    check(launcher, how, (RECORDED / f"{launcher}-{how}.log").read_text("utf-8"))


SAMPLED = [random.Random(SEED).choice([one for one in EXPECTED if one[0] == of]) for of in ("accelerate", "lightning")]


@pytest.mark.parametrize(
    "launcher, how", [pytest.param(*one, marks=[] if one in SAMPLED else full) for one in EXPECTED]
)
def test_a_failure_made_now_is_explained(launcher, how, tmp_path):
    check(launcher, how, output_of(launcher, how, tmp_path))


# --- a saved console of `evener run` ----------------------------------------------------------------------------------

VICTIM = (
    '[rank0]: Traceback (most recent call last):\n[rank0]:   File "/home/me/old.py", line 64, in <module>\n[rank0]:     main()\n'
    "[rank0]: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:50846. This is typically "
    "caused by a remote worker crashing. Check the logs of the remote worker before reporting an error.\n"
)
WAITED = VICTIM.replace("Connection closed by peer [127.0.0.1]:50846", "Timed out waiting 5000ms for recv operation")
FOLLOWS = (
    "  rank 0 failed as a consequence: RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5\n"
    "  logs: runs/logs/20261130-094119-old-33df/rank1.log (every rank's, and agent.log, are there)\n"
)
SENTENCES = {
    "left with exit code 0 before the others": "left-early",
    "left with exit code 0 in the middle of the script": "left-early",
    "left with exit code 3": "left-early",
    "finished its script before the others": "ddp-uneven-inputs",
    "failed: KeyError: 137": "python-exception",
    "failed: evener.errors.DataError: row 137 of the dataset could not be read: KeyError: 137": "evener-error",
    "was killed by SIGKILL (9)": "host-oom-sigkill",
    "did not come, and the others waited for it until their time was over": "nccl-timeout",
    "hangs: nothing was done for 20 s": "hang",
}


@pytest.mark.parametrize("before", ["", "0: ", "[default0]:", "2026-11-30 09:00:00,123 ", "[pod/train-0/main] "])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_rank_of_evener_runs_own_sentence_is_the_culprit(sentence, before):
    """Below the end of a long line of a victim, too: it once was taken for the rest of that line, and so for rank 0's."""
    victim, follows = (WAITED, "") if "did not come" in sentence else (VICTIM, FOLLOWS)
    for shown in (victim, "" if victim is VICTIM else victim):  # "": with --tee none
        console = f"evener: 3 processes on the CPU\n{shown}evener: rank 1 {sentence}\n{follows}"
        answer = explain_text("".join(before + line for line in console.splitlines(keepends=True)))
        assert (answer.culprit_rank, answer.culprit_known) == (1, True), answer
        assert answer.kind == SENTENCES[sentence], answer


def test_an_exit_and_an_uneven_number_of_batches_name_the_script_where_it_is_known():
    for sentence, advice in (
        ("left with exit code 0", "grep -n 'exit(' /home/me/old.py"),
        ("finished its script", "In /home/me/old.py"),
    ):
        answer = explain_text(f"{VICTIM}evener: rank 1 {sentence} before the others\n{FOLLOWS}")
        assert advice in answer.fix[0] and "train.py" not in str(answer)
        assert "old.py" not in str(explain_text(f"evener: rank 1 {sentence} before the others\n{FOLLOWS}"))
    assert answer.sub_cause == "finished" and "drop_last=True" in answer.fix[0] and "exit(" not in str(answer)


def test_what_is_a_rows_error_is_not_named_by_the_exception_behind_it():
    row = "row 137 of the dataset could not be read (epoch 0): KeyError: 137"
    answer = explain_text(f"evener: {row}\n  at /home/me/port.py:29, in __getitem__\n  fix: dataset[137] shows it\n")
    assert answer.summary == f"R{row[1:]}" and answer.fix == ("dataset[137] shows it",)


# --- evener run -----------------------------------------------------------------------------------------------------

# how -> what its report must have, in this order
REPORTS = {
    "killed": (["evener: rank 1 was killed by SIGKILL", "host-oom-sigkill: Rank 1:", "Fix:", "logs: "], 137),
    "shapes": (["ddp-rank-desync: ", "other shape|shapes", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "logs: "], None),
    "unused": (
        ["Expected to have finished reduction", "at .*breaks.py", "ddp-unused-params", r"0 \* sum", "logs: "],
        1,
    ),
    "exits": ([r"(?i)rank 1", "left in the middle|exit code 0 in the middle", "logs: "], 1),
    "leaves": (["evener: rank 1 left with exit code 0 before the others", "left-early: Rank 1", "logs: "], 1),
    "leaves-3": (["evener: rank 1 left with exit code 3", "left-early: Rank 1", "logs: "], 3),
    "raises": (["evener: rank 1 failed: KeyError: 'labels of row 17'", "at .*ways.py", "logs: "], 1),
    "cleans": (["evener: rank 1 failed: KeyError", "at .*ways.py", "logs: "], 1),
    "evicted": (["evener: rank 1 did not come", "rank 1 was at .*ways.py", "nccl-timeout", "logs: "], 1),
    "segfault": (["evener: rank 1 was killed by SIGSEGV", "segfault: Rank 1", "faulthandler", "logs: "], 139),
    "hangs": (["evener: rank 1 did not come", "time.sleep", "nccl-timeout", "logs: "], 1),
    "one-rank": (["evener: rank 1 did not come", "nccl-timeout", "logs: "], 1),
    "oom": (["CUDA out of memory", "oom-capacity: ", "22.14 GiB of 23.69 GiB", "expandable_segments", "logs: "], 1),
}
QUICK = ("exits", "leaves")


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
        while "asleep" not in (logs / "rank1.log").read_text() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)  # into the sleep, and the other into the collective
        job.send_signal(getattr(signal, name))
        said = job.communicate(timeout=200)[1]
    assert job.returncode == (130 if name == "SIGINT" else 143)
    told = said[said.index(f"evener: stopped by {name} (") :]
    assert "and no rank had failed before" in told and "time.sleep(300)" in told, said
    assert re.search(r"rank 1 is in .*ways\.py.*\n  rank 0 waits in .*breaks\.py", told), said
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


def test_a_full_dev_shm_is_named_and_not_the_worker_that_met_it(tmp_path):
    """The batch is of 8 MiB."""
    if not namespaces_are_allowed(tmp_path):
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
        with tempfile.TemporaryDirectory() as scratch:
            text = output_of(*one, Path(scratch))
        for old, new in ((str(BIN.parent), "/env"), (str(HERE.parent), "/home/me/repo"), (sys.base_prefix, "/usr")):
            text = text.replace(old, new)
        cut = "".join(f"{line[:600]}\n" for line in text.splitlines())
        (RECORDED / f"{'-'.join(one)}.log").write_text(cut, "utf-8")
