"""What batch systems are given is printed, valid and never submitted; a stopped job requeues; a detached run stays."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from evener import cli
from evener.cli.run import parser, split

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="evener run and terminals")
LONG = 240


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "my train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command_in(line: str) -> list[str]:
    """The words of `evener run` in a generated artefact, which must be words that `evener run` accepts."""
    words = shlex.split(line)
    words = words[words.index("evener") :]
    options = parser()
    own, target = split(words[2:], options)
    options.parse_args(own)
    assert target == ["my train.py", "--lr", "0.1", "a'b $HOME"]
    return own


ASKED = ["--nodes", "4", "--gpus=8", "--set", "global_batch_size=512", "--restarts", "2", "--detach", "--wait"]
SCRIPT = ["my train.py", "--lr", "0.1", "a'b $HOME"]


def test_an_sbatch_script_is_valid_and_holds_the_same_contract(folder, capsys):
    assert cli.main(["run", "--sbatch", *ASKED, *SCRIPT]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).stderr == ""
    wanted = [
        "--job-name=my-train",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--signal=USR1@120",
        "--requeue",
    ]
    for line in wanted:
        assert f"#SBATCH {line}\n" in text
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    assert command_in(srun) == ["--requeue", "--set", "global_batch_size=512", "--restarts", "2"]
    # All of bash's reading, not ours: the words arrive as they were given.
    echo = subprocess.run(["bash", "-c", "srun() { printf '%s\\n' \"$@\"; }\n" + text], capture_output=True, text=True)
    assert echo.stdout.splitlines()[-4:] == SCRIPT
    assert list(folder.iterdir()) == [folder / "my train.py"]


def test_a_trainjob_is_valid_yaml_of_that_kind(folder, capsys):
    assert cli.main(["run", "--trainjob", "registry/me:1", *ASKED, *SCRIPT]) == 0
    job = yaml.safe_load(capsys.readouterr().out)
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed",
    }  # fmt: skip
    trainer = job["spec"]["trainer"]
    assert trainer["image"] == "registry/me:1" and trainer["numNodes"] == 4
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "8"}
    assert command_in(shlex.join(trainer["command"])) == ["--set", "global_batch_size=512", "--restarts", "2"]
    assert re.fullmatch(r"[a-z0-9-]+-", job["metadata"]["generateName"])


def test_without_gpus_nothing_is_asked_for(folder, capsys):
    cli.main(["run", "--sbatch", "--cpu", "-m", "pkg.train", "x"])
    text = capsys.readouterr().out
    assert "gpus-per-node" not in text and "#SBATCH --nodes=1\n" in text and text.endswith(" --cpu -m pkg.train x\n")
    cli.main(["run", "--trainjob=i", "my train.py"])
    assert "resourcesPerNode" not in yaml.safe_load(capsys.readouterr().out)["spec"]["trainer"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--sbatch", "--nodes", "2:3"], "--nodes 2:3: a batch job has a fixed number of hosts.\n  fix: --nodes 4"),
        (["--sbatch", "--gpus", "0,3"], "--gpus 0,3: in a batch job it is how many per host.\n  fix: --gpus 8"),
        (["--sbatch", "--trainjob", "i"], "--sbatch and --trainjob: one of them."),
        (["--debug=single", "--nodes", "2", "--head", "h"], "--debug=single is for one host."),
        (["--requeue"], "--requeue: this is no Slurm job (SLURM_JOB_ID is not set)."),
        (["--set", "microbatchsize=2"], "fix: --set microbatch_size=2 is the closest"),
        (["--set", "bogus=1"], "--set bogus=1: evener.Run has no keyword 'bogus'.\n  fix: docs/keywords.md"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_error(folder, capsys, monkeypatch, words, expected):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert cli.main(["run", *words, "my train.py"]) == 2
    error = capsys.readouterr().err
    assert expected in error and " keywords: " not in error, error


def test_only_close_names_are_suggested(folder, capsys):
    (folder / "train.py").write_text("")
    assert cli.main(["run", "nope.py"]) == 2
    assert "fix: in that folder: my train.py, train.py" in capsys.readouterr().err
    assert cli.main(["run", "trian.py"]) == 2
    assert "fix: evener run train.py\n" in capsys.readouterr().err


# --- the requeue ------------------------------------------------------------------------------------------------------

SAVES = """
import signal, sys, time
def save(*_):  # as evener.Stopped ends a rank, without importing torch
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.exit(75)
signal.signal(signal.SIGUSR1, save)
print("sleeps", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_stop_that_was_saved_requeues_the_job(tmp_path, fails):
    (tmp_path / "saves.py").write_text(SAVES)
    stand_in = tmp_path / "bin" / "scontrol"
    stand_in.parent.mkdir()
    answer = "echo 'Requested operation is presently disabled' >&2; exit 1" if fails else "exit 0"
    stand_in.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{answer}\n')
    stand_in.chmod(0o755)
    environ = {**os.environ, "PATH": f"{stand_in.parent}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    process = subprocess.Popen(
        [sys.executable, "-m", "evener", "run", "--cpu", "--requeue", "saves.py"],
        cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "sleeps\n"
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        one.send_signal(signal.SIGUSR1)  # as Slurm signals a step: every process, torch's agent too
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 75, error
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    said = (
        "saved, but `scontrol requeue 4711` failed: Requested operation" if fails else "saved; job 4711 is in the queue"
    )
    assert said in error


TRAINS = """
import time, torch, evener
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
run = evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: (m(b[0]) - b[1]).square().mean(), data,
                 global_batch_size=8, num_workers=1, precision="fp32", dir="runs/one")
for update in run.updates(updates=10_000):
    run.print("update", update.number)
    time.sleep(0.05)
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "name, whom",
    [(name, whom) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") for whom in ("launcher", "one rank", "every process")],
)
def test_a_request_to_stop_is_one_request_however_many_get_it(tmp_path, name, whom):
    (tmp_path / "trains.py").write_text(TRAINS)
    process = subprocess.Popen(
        [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", "2", "trains.py"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line == "update 5\n":
            break
    launcher = psutil.Process(process.pid)
    (logs,) = (tmp_path / "runs" / "logs").iterdir()
    rank = psutil.Process(json.loads((logs / "rank1.json").read_text())["pid"])
    every = {"launcher": [launcher], "one rank": [rank]}.get(whom, [launcher, *launcher.children(recursive=True)])
    for one in every:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=LONG)
    assert process.returncode == 75, error
    saved = [json.loads(line) for line in (tmp_path / "runs" / "one" / "events.jsonl").read_text().splitlines()]
    assert {"stop", "checkpoint"} <= {event["kind"] for event in saved}


def test_a_requeue_that_could_not_work_is_refused_at_once(folder, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("PATH", str(folder))
    assert cli.main(["run", "--cpu", "--requeue", "my train.py"]) == 2
    assert "--requeue needs `scontrol`, which is not on PATH here." in capsys.readouterr().err


# --- a closed terminal ------------------------------------------------------------------------------------------------

STAYS = """
import os, sys, time
print("pid", os.getpid(), os.isatty(0), os.isatty(1), flush=True)
while not os.path.exists("end"):
    time.sleep(0.05)
print("went on", flush=True)
"""


def test_a_closed_terminal_does_not_end_a_detached_run(tmp_path):
    (tmp_path / "stays.py").write_text(STAYS)
    child, terminal = pty.fork()  # a session of its own, with this terminal: what a login shell is
    if child == 0:
        os.chdir(tmp_path)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests were started with nohup
        os.execv("/bin/sh", ["sh", "-c", f"{sys.executable} -m evener run --cpu --detach stays.py; sleep 600"])
    seen = b""
    while b"stop it" not in seen or not seen.endswith(b"\n"):
        seen += os.read(terminal, 4096)
    pid, out = re.search(rb"detached; process (\d+), output in (\S+)", seen).groups()
    launcher, out = psutil.Process(int(pid)), tmp_path / out.decode()
    assert b"follow it: evener top, or tail -f " in seen and f"stop it, saved: kill {launcher.pid}".encode() in seen
    try:
        wait_for(out, "pid ")
        os.close(terminal)  # the kernel hangs up: SIGHUP to the session
        os.waitpid(child, 0)
        assert launcher.is_running() and launcher.status() != psutil.STATUS_ZOMBIE
        (tmp_path / "end").touch()
        wait_for(out, "went on")
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            launcher.wait(LONG)
    text = out.read_text()
    assert "False False" in text and "evener: 1 process on the CPU" in text, text


def wait_for(path: Path, word: str) -> None:
    until = time.monotonic() + LONG
    while not path.exists() or word not in path.read_text():
        assert time.monotonic() < until, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.05)


def test_a_plan_travels_inside_the_variable_where_hosts_share_no_disk(folder, capsys):
    words = [
        "run",
        "--cpu",
        "--nproc",
        "2",
        "--nodes",
        "3",
        "--head",
        "h:29400",
        "--node-rank",
        "1",
        "--dry-run",
        "my train.py",
    ]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    plan = json.loads(re.search(r"EVENER_PLAN='(.*)'", text)[1])
    assert plan["store"] is None and plan["device"] == "cpu"
    for word in ("--nnodes=3", "--node-rank=1", "--rdzv-backend=static", "--master-addr=h", "--master-port=29401"):
        assert word in text
    assert "# --nodes: 3 members meet at h:29400" in text and "ranks 2-3 of 6" in text
    assert "GLOO_SOCKET_IFNAME=INTERFACE" in text and "NCCL_SOCKET_IFNAME=INTERFACE" in text
