"""SIGKILL at any instant, any number of processes afterwards: the digest and the rows of an uninterrupted run.

The ledger is what the script noted of every update that counts: its number, its epoch, and the numbers of the rows that
went through loss_fn on any rank. It lives in `run.state`, so it goes back with the checkpoint as everything else does.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from evener.checkpoint.manifest import check as whole_checkpoint
from tests.chaos import SCRIPT, Forks, made, wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks through the launcher's shim")
EVERY, EPOCHS = 3, 6


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


def told(folder: Path, **more) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    files = {"dir": str(folder / "run"), "progress": str(folder / "progress"), "result": str(folder / "result")}
    return {**files, "epochs": EPOCHS, "save_every": EVERY, **more}


def result(folder: Path) -> dict | None:
    path = folder / "result"
    return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture(scope="module")
def uninterrupted(forks, tmp_path_factory):
    return whole_of(forks, tmp_path_factory.mktemp("whole"))


def whole_of(forks, folder: Path) -> dict:
    forks.start(folder, told(folder), 1, "whole", 0)
    assert forks.codes() == [0], forks.said()
    whole = result(folder)
    for epoch in range(EPOCHS):  # the ledger itself: every row once in every epoch
        assert sorted(row for _, one, ids in whole["ledger"] if one == epoch for row in ids) == list(range(38))
    return whole


class Tally:
    """What all runs of one test cost."""

    def __init__(self):
        self.kills = self.runs = self.restarts = self.redone = self.updates = self.worst = 0
        self.began = time.monotonic()

    def __str__(self):
        return (
            f"{self.kills} kills in {self.runs} runs, {self.restarts} restarts, {self.redone} of {self.updates} updates "
            f"made again (at most {self.worst} after one kill), {time.monotonic() - self.began:.0f} s"
        )

    def count(self, progress: Path):
        """An attempt begins with "begun"; what is made again is what an earlier one had made."""
        reached = -1
        for line in made(progress):
            if line == "begun":
                again = 0
                continue
            number = int(line)
            self.updates += 1
            if number <= reached:
                self.redone, again = self.redone + 1, again + 1
                self.worst = max(self.worst, again)
            reached = max(reached, number)


def check(folder: Path, whole: dict, name: str = ""):
    assert result(folder) == whole
    if not name:
        assert [path.parent.name for path in folder.glob("*/events.jsonl")] == ["run"]  # never started over
    left = [path.name for path in (folder / (name or "run") / "checkpoints").iterdir()]
    # Nothing half-written; two are kept, and one more after a kill before its removal.
    assert set(left) <= {f"update-{number}" for number in range(4 * EPOCHS + 1)} | {"mine"} and len(left) <= 4, left


def until(progress: Path, lines: int, ended):
    wait_for(lambda: len(made(progress)) >= lines or ended())


def one_run(forks, folder, draw, kills, tally, whole):
    """Until it is finished; at most `kills` kills. Each after so many updates of that attempt, and a random moment."""
    tally.runs += 1
    attempt = 0
    while result(folder) is None:
        last = len(made(folder / "progress"))
        forks.start(folder, told(folder, workers=draw.choice([0, 0, 0, 1])), draw.randint(1, 4), folder.name, attempt)
        attempt += 1
        if kills > 0:
            # "begun" counts as one: below that the kill comes while ranks start, build, meet, or load.
            after, pause = draw.randrange(2 * EVERY + 2), draw.random()
            wait_for(lambda: len(forks.pids()) == forks.launch.nproc or forks.ended())
            until(folder / "progress", last + after, forks.ended)
            time.sleep(pause * (0.05 if after else 0.5))
            if not forks.ended():
                forks.kill(draw.randrange(forks.launch.nproc), draw)
        codes = forks.codes()
        for path in (folder / "run" / "checkpoints").glob("*"):  # what a reader sees in between is whole
            if not path.name.startswith("."):
                whole_checkpoint(path)
        if -signal.SIGKILL in codes:
            kills -= 1
            tally.kills += 1
            tally.restarts += result(folder) is None
        else:
            assert set(codes) == {0}, forks.said()
    tally.count(folder / "progress")
    check(folder, whole)


def chaos(forks, folder, seed, kills, whole, each):
    draw, tally = random.Random(seed), Tally()
    while tally.kills < kills:
        one_run(forks, folder / f"{tally.runs}", draw, min(each, kills - tally.kills), tally, whole)
    print(f"seed {seed}: {tally}")
    # A checkpoint every 3 updates, written behind the next ones: never more than two periods are lost.
    assert tally.worst <= 2 * EVERY, str(tally)
    return tally


def test_killed_at_random_on_a_number_of_processes_that_changes(forks, uninterrupted, tmp_path, test_seed):
    chaos(forks, tmp_path, test_seed, 5, uninterrupted, 5)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_two_hundred_kills(forks, uninterrupted, tmp_path, test_seed):
    tally = chaos(forks, tmp_path, test_seed, 200, uninterrupted, 6)
    assert tally.kills >= 200 and tally.redone


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_twenty_kills_through_evener_run(uninterrupted, tmp_path, test_seed):
    """A rank, torch's agent or the launcher itself; another number of processes at each start."""
    draw, tally = random.Random(test_seed), Tally()
    while tally.kills < 20:
        folder = tmp_path / f"{tally.runs}"
        tally.runs += 1
        while result(folder) is None:
            world, words = draw.randint(1, 4), json.dumps(told(folder))
            last = len(made(folder / "progress"))
            process = subprocess.Popen(
                [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", str(world), str(SCRIPT), words],
                cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
            )  # fmt: skip
            after, pause = draw.randrange(2 * EVERY + 2), draw.random()
            family = []
            if tally.kills < 20:
                until(folder / "progress", last + after, lambda job=process: job.poll() is not None)
                time.sleep(pause * (0.05 if after else 5.0))
                with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                    family = psutil.Process(process.pid).children(recursive=True)
                    os.kill(draw.choice([process.pid, *(one.pid for one in family)]), signal.SIGKILL)
                    tally.kills += 1
            said = process.communicate(timeout=600)[1]
            psutil.wait_procs(family, timeout=60)
            assert process.returncode in (0, 1, 137, -9), said
            tally.restarts += result(folder) is None
        tally.count(folder / "progress")
        # A kill before the first checkpoint leaves a directory: another job does not take it for its own.
        check(
            folder,
            uninterrupted,
            max(folder.glob("run*/checkpoints"), key=lambda path: path.stat().st_mtime).parent.name,
        )
    print(f"seed {test_seed}: {tally}")


def test_nothing_unpickles_in_a_run_that_saves_and_resumes(forks, uninterrupted, tmp_path):
    """Nor sends Python objects: what comes over the network or from the disk is tensors and JSON."""
    kill = {"rank": 0, "update": 20, "where": "body"}
    forks.start(tmp_path, told(tmp_path, kill=kill, no_pickle=True), 2, "pickle", 0)
    assert set(forks.codes()) == {-signal.SIGKILL, 1} or -signal.SIGKILL in forks.codes(), forks.said()
    forks.start(tmp_path, told(tmp_path, no_pickle=True), 3, "pickle", 1)
    assert set(forks.codes()) == {0}, forks.said()
    check(tmp_path, uninterrupted)


def asks(job, folder, after, draw):
    """One request to stop: to the launcher, its group, or one rank. Returns what was sent."""
    until(folder / "progress", after, lambda: job.poll() is not None)
    time.sleep(draw.random() * 0.05)
    name, to = draw.choice(["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"]), draw.choice(["launcher", "rank"])
    if to == "launcher" and name.startswith("SIGUSR"):
        name = "SIGTERM"
    pid = job.pid
    if to == "rank":
        pids = [json.loads(path.read_text())["pid"] for path in folder.glob("runs/logs/*/rank[0-9].json")]
        pid = draw.choice([one for one in pids if psutil.pid_exists(one)] or [job.pid])
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, getattr(signal, name))
    return f"{name} to the {to}"


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_asked_to_stop_at_any_instant_nothing_is_lost(uninterrupted, tmp_path, test_seed):
    draw, sent = random.Random(test_seed), []
    folder = tmp_path
    while result(folder) is None:
        words, last = json.dumps(told(folder)), len(made(folder / "progress"))
        with subprocess.Popen(
            [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", str(draw.randint(1, 3)), str(SCRIPT), words],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
        ) as job:  # fmt: skip
            if len(sent) < 10:
                sent.append(asks(job, folder, last + draw.randint(2, 6), draw))
            said = job.communicate(timeout=600)[1]
        assert job.returncode in (0, 75, 130), (sent, said)
    updates = [line for line in made(folder / "progress") if line != "begun"]
    print(f"seed {test_seed}: {', '.join(sent)}; {len(updates)} updates made")
    assert len(updates) == 4 * EPOCHS  # none twice
    check(folder, uninterrupted)


@pytest.mark.full
def test_five_hundred_flipped_bits(forks, uninterrupted, tmp_path, test_seed, capsys):
    """Each is refused by name and the checkpoint before is used; at the end a run goes on from there, on other ranks."""
    from evener.checkpoint import Checkpoints
    from evener.checkpoint.__main__ import main as act
    from evener.cli.checkpoint import parser

    kill = {"rank": 1, "update": 11, "where": "body"}
    forks.start(tmp_path, told(tmp_path, kill=kill), 2, "flips", 0)
    assert -signal.SIGKILL in forks.codes()
    folder, draw = tmp_path / "run" / "checkpoints", random.Random(test_seed)
    checkpoints = Checkpoints(folder, keep=2)
    (newest, notes), before = checkpoints.newest(), folder / "update-6"
    assert (newest, notes) == (folder / "update-9", []) and before.is_dir()
    for turn in range(500):
        file = draw.choice(sorted(newest.iterdir()))
        whole = file.read_bytes()
        bad = bytearray(whole)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        used, notes = checkpoints.newest()
        assert used == before and "update-9 is refused" in notes[0] and file.name in notes[0], (turn, notes)
        if turn % 25 == 0:
            assert act(vars(parser().parse_args(["verify", str(tmp_path / "run")]))) == 1
            assert file.name in capsys.readouterr().out
        if turn < 499:
            file.write_bytes(whole)
    print(f"seed {test_seed}: 500 flips, all refused")
    forks.start(tmp_path, told(tmp_path), 3, "flips", 1)
    assert set(forks.codes()) == {0}, forks.said()
    check(tmp_path, uninterrupted)


# ------------------------------------------------------------------------------------------------ crash scripts

# A script is a list of starts, each on its own number of processes and data workers, with its own period of checkpoints.
# Each ends by SIGKILL at a chosen place (in the body, in the forward of one rank, in an evaluation, at the n-th call of
# a checkpoint's writer), by `break`, or by finishing. One may save under a name, and another go back to it.
kills = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 3),
        "update": st.integers(0, 4 * EPOCHS - 1),
        "where": st.sampled_from(["body", "forward", "evaluate", "save"]),
        "call": st.integers(0, 12),
    }
)
starts = st.fixed_dictionaries(
    {"world": st.integers(1, 4), "workers": st.sampled_from([0, 0, 1, 2]), "save_every": st.integers(1, 6)},
    optional={
        "kill": kills,
        "break_at": st.integers(0, 4 * EPOCHS - 1),
        "save_at": st.integers(0, 4 * EPOCHS - 1),
        "load_at": st.integers(0, 4 * EPOCHS - 1),
    },
)


def play(forks, folder, script, whole):
    shutil.rmtree(folder, ignore_errors=True)
    calm = {"world": 2, "workers": 0, "save_every": 5}
    for attempt, start in enumerate([*script, calm]):
        world = start["world"]
        forks.start(folder, told(folder, **{k: v for k, v in start.items() if k != "world"}), world, "script", attempt)
        codes = forks.codes()
        if -9 not in codes:
            assert set(codes) == {0}, forks.said()
        if result(folder) is not None:
            break
    check(folder, whole)


EVERYTHING = [
    {"world": 3, "workers": 1, "save_every": 2, "save_at": 3, "kill": {"rank": 2, "update": 6, "where": "forward", "call": 0}},
    {"world": 2, "workers": 0, "save_every": 5, "break_at": 9, "load_at": 6},
    {"world": 4, "workers": 0, "save_every": 3, "kill": {"rank": 0, "update": 11, "where": "save", "call": 5}},
]  # fmt: skip


@pytest.mark.full
def test_one_script_with_everything(forks, uninterrupted, tmp_path):
    play(forks, tmp_path / "run", EVERYTHING, uninterrupted)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_any_script(forks, uninterrupted, tmp_path):
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(starts, min_size=1, max_size=4))
    @example([{"world": 1, "workers": 0, "save_every": 5, "save_at": 1, "load_at": 4, "break_at": 7}])
    def any_script(script):
        play(forks, tmp_path / "run", script, uninterrupted)

    any_script()
