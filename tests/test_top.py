"""`evener top` says what every run of this machine waits for, from what its ranks measured, in 80 columns."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from evener.cli import main, top
from evener.gpus.values import Gpu, Health, Process, Snapshot, Trouble, to_json
from evener.report.live import Rank, Running, Story, Watcher, run_lines, verdict
from evener.run.output import Output
from evener.run.pulse import Pulse
from tests.fakenvml import ZOO, Fake, needs_compiler

SCRIPTS = Path(__file__).parent / "scripts"
linux = pytest.mark.skipif(sys.platform != "linux", reason="looks through /proc")


def start(*words: object, cwd: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "evener", "run", *map(str, words)]
    environ = {**os.environ, "TMPDIR": str(cwd)}
    return subprocess.Popen(argv, cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def look_until(job: subprocess.Popen[str], found, seconds: float = 120.0) -> Running:
    """The first run for which `found` is true; everything that was seen, when it never is."""
    watcher, end, seen = Watcher(8), time.monotonic() + seconds, []
    while time.monotonic() < end and job.poll() is None:
        seen = watcher.look()
        hits = [run for run in seen if found(run)]
        if hits:
            return hits[0]
        time.sleep(0.3)
    job.kill()
    raise AssertionError((seen, job.communicate()[0]))


@linux
def test_a_slow_dataset_is_named_on_a_real_run_of_two_ranks(tmp_path):
    job = start("--nproc", 2, "--cpu", SCRIPTS / "slow_rows.py", cwd=tmp_path)
    try:
        run = look_until(
            job,
            lambda run: (
                run.directory == str(tmp_path / "run")
                and len(run.ranks) == 2
                and run.loss is not None
                and all((one.data_wait or 0) > 0.4 for one in run.ranks)
            ),
        )
        assert "slow_rows" in run.name and run.logs is not None and run.logs.startswith(str(tmp_path / "runs" / "logs"))
        assert [one.rank for one in run.ranks] == [0, 1] and run.ranks[0].device == "cpu"
        assert run.update is not None and run.updates_per_second and run.rows_per_second
        assert run.contract is not None and run.contract.startswith("global batch 32 = 2 ranks")
        for one in run.ranks:
            assert one.data_wait + one.step + one.body == pytest.approx(1.0, abs=0.02)
            assert psutil.pid_exists(one.pid) and one.memory_bytes > 50 << 20
        assert "waits for data" in run.verdict and run.verdict.endswith("raise num_workers from 0")
        assert "of each step (and 1 more rank)" in run.verdict

        once = subprocess.run(
            [sys.executable, "-m", "evener", "top", "--once"],
            env={**os.environ, "COLUMNS": "80"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert once.returncode == 0 and once.stderr == ""
        assert max(map(len, once.stdout.splitlines())) <= 80
        assert "waits for data" in once.stdout and "loss" in once.stdout and "updates/s" in once.stdout
        points = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
        shares = [one["data_wait"] for one in points if one["kind"] == "update"]
        assert len(shares) > 2 and all(0 <= one <= 1 for one in shares) and max(shares[1:]) > 0.4
    finally:
        job.send_signal(signal.SIGINT)
        output = job.communicate(timeout=120)[0]
    assert job.returncode == 75, output  # stopped and saved
    assert not list((tmp_path / "run").glob("pulse-*")), "a run that is over has no pulse"


@linux
@pytest.mark.full
def test_a_script_without_run_is_listed_and_not_judged(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    job = start("--nproc", 2, "--cpu", script, cwd=tmp_path)
    try:
        run = look_until(job, lambda run: "plain" in run.name and len(run.ranks) == 2)
        assert run.directory is None and run.verdict == "" and all(one.data_wait is None for one in run.ranks)
        text = "\n".join(run_lines(run, str))
        assert "no evener.Run in it" in text and f"pid {run.ranks[1].pid}" in text
    finally:
        job.send_signal(signal.SIGINT)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=120)


def rank(number: int = 0, **more) -> Rank:
    values = {"device": "cuda:0", "gpu": f"GPU-{number}", "num_workers": 2, "updates_per_second": 10.0}
    values |= {"data_wait": 0.02, "step": 0.95, "body": 0.03, "seconds_since": 0.5}
    return Rank(number, 100 + number, **(values | more))


@pytest.mark.parametrize(
    "ranks, cpus, words",
    [
        ([rank(0), rank(1, data_wait=0.43)], 64, "GPU 3 waits for data 43 % of each step: raise num_workers from 2"),
        (
            [rank(0, data_wait=0.43, num_workers=3)],
            4,
            "GPU 2 waits for data 43 % of each step: make reading a row cheaper, or use more CPUs "
            "(1 x 3 data workers have 4 CPUs)",
        ),
        ([rank(0, gpu=None, data_wait=0.2, num_workers=0)] * 3, 4, "rank 0 waits for data 20 % of each step (and 2 more "
         "ranks): raise num_workers from 0"),
        ([rank(0)], 4, "no rank waits for data (at most 2 % of each step)"),
        ([rank(0, body=0.4)], 4, "GPU 2 spends 40 % of each update in the loop's own body and in saving"),
        ([rank(0), rank(1, seconds_since=61.0)], 4, "no update for 1 min 01 s: it evaluates or saves, or it hangs "
         "(py-spy dump --pid 101)"),
        ([rank(0, seconds_since=61.0, updates_per_second=0.01)], 4, "no rank waits"),  # an update takes that long
        ([Rank(0, 1, "cpu")], 4, "it has not said yet where its time goes"),
        ([Rank(0, 1)], 4, ""),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_measured_parts(ranks, cpus, words):
    said = verdict(ranks, cpus, {"GPU-0": 2, "GPU-1": 3}.get)
    assert said == words or (words and said.startswith(words))


def step_ends(pulse: Pulse, number: int) -> None:
    """What `Output.update` does after every update."""
    output = Output.__new__(Output)
    output.pulse, output.active = pulse, False
    output.update(SimpleNamespace(number=number), 1, 1, None)


def test_a_pulse_divides_the_time_between_waiting_step_and_body(tmp_path, monkeypatch):
    now = [100.0]  # a clock of the test's own: a loaded machine changes nothing
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    pulse = Pulse()

    def rows():
        for number in range(3):
            passes(0.2)
            yield number

    pulse.open(tmp_path, torch.device("cpu"), rank=1, world_size=2, num_workers=4)
    for number in pulse.timed(rows()):
        passes(0.1)  # the step
        step_ends(pulse, number)
        passes(0.1)  # the loop's body
    written = json.loads((tmp_path / "pulse-rank1.json").read_text())  # after the third update: a second had passed
    assert (written["update"], written["updates"], written["num_workers"]) == (2, 3, 4)
    for name, seconds in (("data_wait", 0.6), ("step", 0.3), ("body", 0.2)):
        assert written[f"{name}_seconds"] == pytest.approx(seconds)
    assert pulse.share() == pytest.approx(0.5) and pulse.share() == 0.0
    pulse.close()
    assert [path.name for path in tmp_path.iterdir()] == ["events-rank1.jsonl"], "where its time went stays"


def test_a_job_without_run_is_listed_without_a_word_about_its_time():
    head, *ranks = run_lines(Running("plain", None, "/logs/plain", "alice", ranks=(Rank(0, 7), Rank(1, 8))), str)
    assert head == "plain  alice  /logs/plain (no evener.Run in it: no steps are measured)"
    assert len(ranks) == 2 and "rank 1" in ranks[1] and "pid 8" in ranks[1] and "no time measured" in ranks[1]


def test_a_pulse_that_cannot_be_written_ends_no_training(tmp_path):
    pulse = Pulse()
    pulse.open(tmp_path / "on another machine", torch.device("cpu"), rank=1)
    pulse.write(3, 0.0)
    pulse.write(4, 0.0)
    pulse.close()


def test_incidents_are_counted_once_and_read_on(tmp_path):
    path = tmp_path / "events.jsonl"
    story = Story(str(tmp_path))
    story.read()  # not there yet
    path.write_text('{"kind": "start"}\n{"kind": "skip", "update": 3}\n{"kind": "upd')
    story.read()
    assert dict(story.incidents) == {"skip": 1} and story.last_incident == "update 3 skip"
    with open(path, "a") as file:
        file.write('ate", "loss": 2}\nnot json\n{"kind": "oom", "update": 9, "text": "cut\\u001b[31m in two"}\n')
    story.read()
    assert dict(story.incidents) == {"skip": 1, "oom": 1}  # a kind that a newer version made counts
    assert story.newest["update"]["loss"] == 2 and story.last_incident == "update 9 oom: cut in two"
    with open(path, "a") as file:
        file.write('{"kind": "start"}\n')
    story.read()
    assert not story.incidents


GPU = Gpu(
    2, uuid="GPU-2", name="NVIDIA H200", memory_total_bytes=150 << 30, memory_used_bytes=90 << 30, utilization_percent=97,
    temperature_c=63, power_w=640.2, health=Health(throttle=("power cap",)),
    processes=(Process(7, "alice", "python train.py " + "x" * 200, 88 << 30, 3600.0),),
    busy_because=("alice, pid 7, 88.0 GiB: python train.py " + "x" * 200,),
)  # fmt: skip


def test_the_view_fits_80_columns_and_cuts_no_verdict():
    run = Running(
        "20261129-train-abcd", "/data/" + "long/" * 30, None, "alice", update=12345, epoch=3, loss=0.4123,
        updates_per_second=9.9, rows_per_second=12345.6, ranks=(rank(0, gpu="GPU-2", memory_bytes=9 << 30, allocated_bytes=80 << 30),),
        incidents={"skip": 2}, last_incident="update 9 skip", verdict="GPU 2 waits for data 43 % of each step: " + "word " * 20 + "end",
    )  # fmt: skip
    lines = top.lines(Snapshot("570.1", "12.8", "nvml", (GPU, Gpu(3, error="GPU is lost"))), [run], columns=80)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in (
        "97%",
        "63C",
        "640W",
        "90.0/150.0",
        "alice, pid 7",
        "lost",
        "slowed: power cap",
        "9.9 updates/s",
        "end",
    ):
        assert words in text, words
    assert "update 12345 · epoch 3 · loss 0.4123" in text and "2 skip" in text and "data   2 %" in text


def test_no_gpu_is_one_quiet_line_and_a_broken_driver_is_not():
    none = Trouble("no-gpu", "There is no NVIDIA GPU on this machine.", False, fix=("evener run --cpu",))
    lines = top.lines(Snapshot(trouble=none), [Running("digits", "runs/digits", ranks=(rank(0),))], columns=80)
    assert lines[1:3] == ["There is no NVIDIA GPU on this machine.", ""] and not any("fix" in line for line in lines)
    broken = Trouble("driver-not-loaded", "The NVIDIA driver is not loaded.", True, fix=("modprobe nvidia",))
    assert "  fix: modprobe nvidia" in top.lines(Snapshot(trouble=broken), [], columns=80)


@needs_compiler
def test_the_json_has_the_gpus_of_a_real_client_and_the_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "evener", "top", "--json"],
        env=Fake(tmp_path, ZOO).environ(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    seen = json.loads(done.stdout)
    assert list(seen) == [*to_json(Snapshot()), "runs"] and seen["host"] == socket.gethostname()
    assert {"driver", "cuda", "source", "trouble"} < set(seen)
    assert len(seen["gpus"]) == 8 and seen["gpus"][0]["utilization_percent"] == 97 and isinstance(seen["runs"], list)


def test_a_loss_that_is_not_finite_is_text_in_json_and_in_the_view(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"kind": "update", "update": 3, "epoch": 0, "loss": "nan"}\n')
    run = Running("r", str(tmp_path), ranks=(rank(0),), **Story(str(tmp_path)).facts(rank(0)))
    (seen,) = json.loads(json.dumps(top.as_json(Snapshot(), [run]), allow_nan=False))["runs"]
    assert seen["loss"] == "nan" and seen["update"] == 3 and seen["updates_per_second"] == 10.0
    assert "update 3 · epoch 0 · loss nan · 10 updates/s" in run_lines(run, str)[1]


@linux
def test_the_live_view_draws_and_ends_with_ctrl_c():
    leader, follower = pty.openpty()
    argv = [sys.executable, "-m", "evener", "top", "--interval", "0.2"]
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "30"}
    process = subprocess.Popen(argv, stdin=follower, stdout=follower, stderr=follower, env=environ)
    os.close(follower)
    shown = b""
    try:
        end = time.monotonic() + 60
        while b"evener top" not in shown and time.monotonic() < end:
            shown += os.read(leader, 65536)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert b"Traceback" not in shown
    finally:
        process.kill()
        os.close(leader)


def test_a_wrong_option_is_one_clear_error(capsys):
    assert main(["top", "--interval", "soon"]) == 2
    assert "soon is no time of at least 0.1 seconds" in capsys.readouterr().err
    assert main(["top", "--interval", "inf"]) == 2 and "inf is no time" in capsys.readouterr().err
