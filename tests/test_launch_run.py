"""`evener run` with real processes: unchanged scripts run, faults are named, and nothing is left behind.

Every run costs seconds (torch's agent imports torch), so one run serves as many assertions as it can.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreaper and parent-death signals are Linux's")

SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT = 180


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "evener", "run", *(str(word) for word in words)]


def run(*words: object, cwd: Path, **more) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT, **more)


def logs_of(folder: Path) -> Path:
    (logs,) = (folder / "runs" / "logs").iterdir()
    return logs


class Job:
    """A running `evener run`, its descendants, and what they leave."""

    def __init__(self, *words: object, cwd: Path, nproc: int = 2) -> None:
        self.cwd = cwd
        self.process = subprocess.Popen(
            command("--cpu", "--nproc", nproc, *words),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(cwd)},  # a killed supervisor cannot remove its private folder
        )
        self.nproc = nproc
        self.output = ""

    def wait_until_started(self, word: str = "sleeps") -> list[psutil.Process]:
        """Waits until every rank has printed `word`; the job's processes, the agent first."""
        until = time.monotonic() + TIMEOUT
        while time.monotonic() < until:
            with contextlib.suppress(ValueError, OSError):
                texts = [(logs_of(self.cwd) / f"rank{rank}.log").read_text() for rank in range(self.nproc)]
                if all(word in text for text in texts):
                    return psutil.Process(self.process.pid).children(recursive=True)
            assert self.process.poll() is None, self.finish()
            time.sleep(0.02)
        raise AssertionError("the ranks did not start")

    def finish(self) -> int:
        out, self.output = self.process.communicate(timeout=TIMEOUT)
        self.out = out
        return self.process.returncode


def is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # it may end between the two questions
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def gone_after(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those of `processes` that are still alive after `seconds`."""
    until = time.monotonic() + seconds
    alive = processes
    while alive and time.monotonic() < until:
        alive = [one for one in alive if is_alive(one)]
        time.sleep(0.02)
    return alive


@pytest.fixture
def job(tmp_path):
    """Starts jobs; whatever a failed test leaves running is killed."""
    jobs: list[Job] = []

    def start(*words: object, **more) -> Job:
        folder = tmp_path / f"job{len(jobs)}"
        folder.mkdir()
        jobs.append(Job(*words, cwd=folder, **more))
        return jobs[-1]

    yield start
    for one in jobs:
        if one.process.poll() is None:
            for process in psutil.Process(one.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            one.process.kill()
        one.process.communicate()


# --- what a script sees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["script", "module"])
def test_a_script_sees_what_python_would_show_it(tmp_path, how):
    words = ["pack/probe.py"] if how == "script" else ["-m", "pack.probe"]
    words += ["--lr", "0.1", "a$$b", "${local_rank}", "--nproc", "9", "--", "-m"]
    plain = subprocess.run([sys.executable, *words], cwd=SCRIPTS, capture_output=True, text=True, check=True)
    ours = run("--nproc", 2, "--cpu", "--log-dir", tmp_path, *words, cwd=SCRIPTS)
    assert ours.returncode == 0, ours.stderr
    (logs,) = tmp_path.iterdir()

    def probe(text: str) -> dict[str, object]:
        return json.loads(re.search(r"^probe \d (.*)$", text, re.MULTILINE)[1])

    expected = probe(plain.stdout)
    assert expected["spawn"] == expected["fork"] == 42 and not expected["torch_imported"]
    assert probe(ours.stdout) == expected
    assert probe((logs / "rank1.log").read_text()) == expected
    # Exit handlers ran, in the script's own module.
    assert "at exit: 2 True" in ours.stdout and "at exit: 2 True" in (logs / "rank1.log").read_text()
    # Rank 0 is on the console and in its file; standard output and standard error stay apart. Rank 1 is in its file only.
    assert "on standard error 0" in ours.stderr and "on standard error" not in ours.stdout
    assert "probe 1" not in ours.stdout + ours.stderr
    rank0 = (logs / "rank0.log").read_text()
    assert "probe 0" in rank0 and "on standard error 0" in rank0 and "1 {" not in rank0
    assert "on standard error 1" in (logs / "rank1.log").read_text()
    assert "evener: rank" not in ours.stderr


@pytest.mark.parametrize(
    "script, line",
    [
        ("ddp_plain.py", "done rank {} of 2, local {}, threads 1"),
        ("accelerate_mlp.py", "done rank {} of 2 on cpu"),
        ("fabric_mlp.py", "done rank {} of 2"),
        ("trainer_mlp.py", "done rank {} of 2 in TorchElasticEnvironment"),
    ],
)
def test_unchanged_scripts_train_on_two_processes(tmp_path, script, line):
    library = {"accelerate_mlp.py": "accelerate", "ddp_plain.py": "torch"}.get(script, "lightning")
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    done = run("--nproc", 2, "--cpu", SCRIPTS / script, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    logs = logs_of(tmp_path)
    assert line.format(0, 0) in done.stdout
    assert line.format(1, 1) in (logs / "rank1.log").read_text()
    assert "evener: 2 processes on the CPU\n" in done.stderr, "OMP_NUM_THREADS is the user's here: nothing to say"
    assert "torchrun" not in done.stderr and "****" not in done.stderr


# --- failures -------------------------------------------------------------------------------------------------------


def test_the_cause_is_named_before_the_rank_that_lost_its_peer(tmp_path):
    done = run("--nproc", 2, "--cpu", SCRIPTS / "fails.py", cwd=tmp_path)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index("evener: rank") :].splitlines()
    assert report[0] == "evener: rank 1 failed: ValueError: bad row 2"
    assert re.fullmatch(r"  at .*fails\.py:11 in load: raise ValueError\(f\"bad row \{row\}\"\)", report[1])
    assert report[2].startswith("  rank 0 failed as a consequence: RuntimeError") or "rank 0 was stopped" in report[2]
    assert report[-1].startswith("  logs: runs/logs/") and "rank1.log" in report[-1]
    # Rank 0 is what one sees: the traceback of the rank that failed is shown too, before the report.
    shown = done.stderr[: done.stderr.index("evener: rank")]
    assert "[rank 1] Traceback (most recent call last):" in shown and "[rank 1] ValueError: bad row 2" in shown
    # No banner and no traceback of the launcher: its own words are in agent.log.
    for noise in ("ChildFailedError", "torch/distributed/run.py", "shim.py", "runpy", "=====", "Root Cause"):
        assert noise not in done.stderr, noise
    logs = logs_of(tmp_path)
    assert "ChildFailedError" in (logs / "agent.log").read_text()
    assert "shim.py" not in (logs / "rank1.log").read_text()
    record = json.loads((logs / "rank1.json").read_text())
    first, second = record["ended"]["errors"]
    assert first["type"] == "RuntimeError" and second["type"] == "ValueError"
    assert second["where"]["line"] == 11 and "bad row" in second["traceback"]


CALLS = """
from datetime import timedelta
import torch
from torch import distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=8))
dist.barrier()
dist.all_reduce(torch.ones(5, 2)) if dist.get_rank() else dist.broadcast(torch.ones(3), 0)
dist.barrier()
"""


def test_calls_that_do_not_match_are_named_at_the_time_out(tmp_path):
    (tmp_path / "calls.py").write_text(CALLS)
    done = run("--nproc", 2, "--cpu", "calls.py", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("  in different calls: ")]
    assert "rank 0: broadcast of [3] Float, call " in line and "rank 1: all_reduce of [5, 2] Float, call " in line


@pytest.mark.parametrize(
    "how, code, text",
    [
        ("SIGKILL", 137, "evener: rank 1 was killed by SIGKILL (9)\n"),
        ("exit", 7, "evener: rank 1 left with exit code 7\n"),
        ("5", 5, "evener: rank 1 left with exit code 5 in the middle of the script"),
    ],
)
def test_a_rank_that_dies_without_a_word_is_named(job, how, code, text):
    one = job(SCRIPTS / "sleeps.py", "--die", how)
    assert one.finish() == code
    assert text in one.output
    assert "rank 0 was stopped by the launcher (SIGTERM)" in one.output
    assert "Traceback" not in one.output


# --- signals and orphans --------------------------------------------------------------------------------------------


def test_ctrl_c_ends_everything_and_nothing_listened_beyond_loopback(job):
    one = job(SCRIPTS / "sleeps.py")
    processes = one.wait_until_started()
    assert len(processes) >= 5, "the agent, two ranks, two forked children"
    for process in processes:
        for connection in process.net_connections(kind="inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.ip in ("127.0.0.1", "::1"), f"{process} listens on {connection.laddr}"
    private = Path(processes[1].environ()["EVENER_PLAN"]).parent
    assert private.stat().st_mode & 0o777 == 0o700 and (private / "store").stat().st_mode & 0o777 == 0o700
    assert json.loads((private / "plan.json").read_text())["device"] == "cpu"

    started = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130
    assert time.monotonic() - started < 15
    assert not gone_after(processes, 60)
    own = [line for line in one.output.splitlines() if "processes on the CPU" not in line]
    assert own == ["evener: Ctrl-C: stopping 2 processes (once more to kill at once)"]
    assert not private.exists()
    # The interruption is in the record, with its place.
    record = json.loads((logs_of(one.cwd) / "rank0.json").read_text())
    assert record["ended"]["how"] == "interrupted" and record["ended"]["errors"][0]["where"]["file"].endswith(
        "sleeps.py"
    )


def test_a_second_ctrl_c_kills_what_ignores_the_first(job):
    one = job(SCRIPTS / "sleeps.py", "--stubborn", nproc=1)
    processes = one.wait_until_started()
    one.process.send_signal(signal.SIGINT)
    one.wait_until_started("not now")  # two signals at once would be one
    started = time.monotonic()
    one.process.send_signal(signal.SIGINT)
    assert one.finish() == 130
    assert time.monotonic() - started < 10
    assert "not now" in one.out
    assert not gone_after(processes, 60)


def test_term_reaches_the_ranks_and_their_exit_code_comes_back(job):
    one = job(SCRIPTS / "sleeps.py", "--ask")
    processes = one.wait_until_started()
    one.process.send_signal(signal.SIGTERM)
    assert one.finish() == 75
    assert not gone_after(processes, 60)


def test_two_jobs_at_once_and_a_killed_agent_leaves_no_rank(job):
    first, second = job(SCRIPTS / "sleeps.py"), job(SCRIPTS / "sleeps.py")
    doomed, others = first.wait_until_started(), second.wait_until_started()
    doomed[0].kill()
    assert not gone_after(doomed, 60)
    assert first.finish() == 137
    assert "torch's elastic agent was killed by SIGKILL" in first.output
    # The other job did not notice.
    assert second.process.poll() is None and all(process.is_running() for process in others)
    second.process.kill()
    assert not gone_after(others, 60), "a killed supervisor leaves nothing either"
    second.finish()


LOADS = """
import os, torch
from torch.utils.data import DataLoader
if __name__ == "__main__":
    rows = DataLoader(torch.arange(10**6), batch_size=4, num_workers=2, persistent_workers=True)
    for i, row in enumerate(rows):
        if i == 3:
            print("sleeps", flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("whom", ["launcher", "agent", "rank"])
def test_a_kill_of_launcher_agent_or_rank_leaves_no_data_worker(job, tmp_path, whom):
    script = tmp_path / "loads.py"
    script.write_text(LOADS)
    one = job(script)
    processes = one.wait_until_started()
    assert len(processes) >= 7, "the agent, two ranks, two data workers of each"
    rank = json.loads((logs_of(one.cwd) / "rank1.json").read_text())["pid"]
    os.kill({"launcher": one.process.pid, "agent": processes[0].pid, "rank": rank}[whom], signal.SIGKILL)
    started = time.monotonic()
    # 2 s are promised on an idle machine; this bound tells "soon" from "when the data is over".
    assert not gone_after(processes, 30)
    print(f"{whom}: all gone after {time.monotonic() - started:.2f} s")
    one.finish()


def test_what_killed_launchers_left_is_swept_and_nothing_else(tmp_path):
    from evener.launch.supervise import _sweep

    def folder(name: str, *, age: float = 3600.0, lock: bool = True) -> Path:
        (path := tmp_path / name).mkdir()
        (path / ("lock" if lock else "store")).touch()
        os.utime(next(path.iterdir()), (time.time() - age,) * 2)
        return path

    dead, young, held = folder("evener-dead"), folder("evener-young", age=0.0), folder("evener-held")
    others = [folder("evener-first-0", lock=False), folder("another")]
    with (held / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _sweep(str(tmp_path))
    assert not dead.exists() and all(one.exists() for one in (young, held, *others))


# --- the console ----------------------------------------------------------------------------------------------------


def test_rank_0_sees_a_terminal_when_the_launcher_has_one(tmp_path):
    outer, inner = pty.openpty()
    termios.tcsetwinsize(inner, (40, 91))
    process = subprocess.Popen(
        command("--nproc", 2, "--cpu", SCRIPTS / "terminal.py"), cwd=tmp_path, stdin=inner, stdout=inner, stderr=inner
    )
    os.close(inner)
    seen = b""
    with contextlib.suppress(OSError):  # EIO: the last writer has closed it
        while chunk := os.read(outer, 4096):
            seen += chunk
            if b"columns 91" in seen and b"columns 55" not in seen:
                termios.tcsetwinsize(outer, (40, 55))
                process.send_signal(signal.SIGWINCH)  # the kernel would send it to the terminal's foreground group
                time.sleep(0.05)
    assert process.wait(TIMEOUT) == 0
    os.close(outer)
    text = seen.decode()
    assert "rank 0 tty True True\r\n" in text and "columns 91\r\n" in text and "columns 55\r\n" in text
    assert "\x1b[2K\rbar 100%" in text
    logs = logs_of(tmp_path)
    assert b"rank 0 tty True True\ncolumns 91\n" in (logs / "rank0.log").read_bytes(), (
        "the log has the bytes as written"
    )
    assert "rank 1 tty False False" in (logs / "rank1.log").read_text()


def test_tee_all_shows_every_rank_with_its_name(tmp_path):
    done = run("--nproc", 2, "--cpu", "--tee", "all", SCRIPTS / "terminal.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0 tty False False\n" in done.stdout
    assert "[rank 1] rank 1 tty False False\n" in done.stdout
