"""`evener run --hang-after T`: the rank, the phase and the line of what does not move; no alarm while anything does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types

import pytest

from evener.cli.explain import logs_of_run, read
from evener.dist.first import first
from evener.explain import explain_selections
from evener.launch.failure import EVENER
from evener.launch.hang import Hang, phase_of
from evener.launch.records import Line
from evener.run.beat import Beat

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="real-time signals and /proc")
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SCRIPT = """
import os, signal, socket, sys, time
sys.path.insert(0, {root!r})
import torch, evener
from torch.nn import functional as F
from tests.models import make, mlp_rows

where, how = sys.argv[1], sys.argv[2]
rank = int(os.environ["RANK"])
armed = False

def stay(place):
    if place != where or rank != 1 or not armed:
        return
    if how == "python":
        time.sleep(1000)  # the line
    elif how == "busy":
        while True: pass  # the line
    elif how == "native":
        pair = socket.socketpair(); pair[0].recv(1)  # the line
    elif how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)  # the line

class Rows(torch.utils.data.Dataset):
    x, y = mlp_rows(36)
    def __len__(self):
        return 36
    def __getitem__(self, i):
        stay("data")
        return self.x[i], self.y[i]

class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        stay("backward")
        return gradient

def loss_fn(model, batch):
    stay("forward")
    return F.cross_entropy(Identity.apply(model(batch[0])), batch[1])

def metric_fn(model, batch):
    stay("evaluate")
    return F.cross_entropy(model(batch[0]), batch[1])

class Mine:
    def state_dict(self):
        stay("save")
        return {{}}
    def load_state_dict(self, state):
        pass

class Sgd(torch.optim.SGD):
    def step(self, *args, **keywords):
        stay("optimizer")
        return super().step(*args, **keywords)

torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # its first import takes seconds, on one rank more than on another
open(f"here-{{rank}}", "w").close()
while sum(name.startswith("here-") for name in os.listdir(".")) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
if where == "first":
    with evener.first():  # rank 1 is inside, or waits for rank 0: longer than the time-out
        time.sleep(13)
model = make("mlp")
run = evener.Run(model, Sgd(model.parameters(), lr=0.1), loss_fn, Rows(), global_batch_size=6, save_every=3, dir="run")
run.register("mine", Mine())
for update in run.updates(updates=9):
    armed = update.number >= 1
    if where == "late" and rank == 0 and update.number == 2:
        with evener.first():
            time.sleep(14)
    stay("script")
    if where == "collectives" and armed:
        if rank == 1:
            torch.distributed.recv(torch.zeros(1), src=0)
        evener.comm.barrier()
    if update.number == 2:
        run.evaluate(Rows(), metric_fn, batch_size=6)
run.close()
if where == "after":
    time.sleep(14)
print("ENDED", flush=True)
"""


def run(tmp_path, *args, seconds="8s", nproc=2, words=(), script=None):
    (tmp_path / "train.py").write_text(script or SCRIPT.format(root=ROOT))
    return subprocess.run(
        [sys.executable, "-m", "evener", "run", "--nproc", str(nproc), "--cpu", "--hang-after", seconds, *words, "train.py", *args],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip


FULL = pytest.mark.full
CASES = [("forward", "stopped"), *(pytest.param(*case, marks=FULL) for case in (
    ("data", "python"), ("forward", "busy"), ("backward", "native"), ("optimizer", "python"), ("save", "python"), ("evaluate", "python"), ("script", "native"),
))]  # fmt: skip


@pytest.mark.parametrize(("where", "how"), CASES)
def test_the_rank_the_phase_and_the_line(tmp_path, where, how):
    done = run(tmp_path, where, how, nproc=3)
    assert done.returncode == 1, done.stderr
    text = done.stderr[done.stderr.index("evener: rank") :]
    lines = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# the line" in line]
    line = dict(zip(["python", "busy", "native", "stopped"], lines))[how]
    assert text.startswith("evener: rank 1 hangs: nothing was done for 8 s\n"), text
    place = "in the script" if where == "script" else f"in phase {where}"
    assert f"rank 1 is {place}, at train.py:{line} in stay: " in text, text
    assert ("it was stopped (SIGSTOP, Ctrl-Z or a debugger)" in text) == (how == "stopped")
    for rank in (0, 2):
        assert f"rank {rank} waits in phase " in text, text
    assert "ENDED" not in done.stdout
    assert f"\n  hang: Rank 1: no progress for 8 s, at train.py:{line}\n  Cause: " in text and "\n  Fix: " in text, text
    # The same afterwards: from the logs, the run's directory, and the console that somebody kept.
    (logs,) = (tmp_path / "runs" / "logs").iterdir()
    (tmp_path / "console.txt").write_text(done.stderr)
    for kept in (logs, tmp_path / "run", tmp_path / "console.txt"):
        selections, fates = read([str(kept), *logs_of_run(str(kept))])
        answer = explain_selections(selections, "en", fates)
        assert (answer.kind, answer.culprit_rank, answer.culprit_known) == ("hang", 1, True), (kept, answer)
        assert f"train.py:{line}" in answer.fix[0], answer


@pytest.mark.full
@pytest.mark.parametrize("where", ["late", "first", "after"])
def test_no_alarm_in_first_nor_outside_of_a_loop(tmp_path, where):
    done = run(tmp_path, where, "")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ENDED") == 1 and "hang" not in done.stderr


@pytest.mark.full
def test_ranks_that_wait_for_each_other_in_different_calls(tmp_path):
    done = run(tmp_path, "collectives", "")
    text = done.stderr[done.stderr.index("evener: rank") :]
    assert text.startswith("evener: ranks 0, 1 wait for each other: nothing was done for 8 s\n"), text
    assert "rank 1 waits in the script (recv), at train.py:" in text, text
    assert re.search(
        r"rank 0 waits in the script \(all_reduce of \[1\] \w+, call \d+ of group default_pg\), at ", text
    ), text


PLAIN = """
import http.server, os, sys, threading, time, urllib.request
import torch
from torch import distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
until = time.monotonic() + 12
def download():  # a slow one: a few milliseconds of CPU a second
    class Slow(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200), self.end_headers()
            while time.monotonic() < until:
                self.wfile.write(bytes(100_000)), time.sleep(0.5)
        def log_message(self, *args):
            pass
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    urllib.request.urlretrieve(f"http://127.0.0.1:{server.server_port}/", f"got-{rank}")
while sys.argv[1] != "calls" and time.monotonic() < until:  # longer than the time-out: at work, or seen to be
    {"works": lambda: sum(range(10**6)), "downloads": download,
     "prints": lambda: (print("so far", flush=True), time.sleep(0.5))}[sys.argv[1]]()
dist.barrier()
if sys.argv[1] == "calls":
    dist.all_reduce(torch.ones(5, 2)) if rank else dist.broadcast(torch.ones(3), 0)
print("ENDED", flush=True)
"""


@pytest.mark.parametrize(
    "what", ["calls", *(pytest.param(one, marks=FULL) for one in ("works", "prints", "downloads"))], ids=lambda one: one
)
def test_a_script_without_run_is_watched_too(tmp_path, what):
    """Waiting for nothing is a hang; using the CPU, printing, or writing what is downloaded is none."""
    done = run(tmp_path, what, script=PLAIN)
    if what != "calls":
        assert done.returncode == 0 and "ENDED" in done.stdout, done.stderr
        return
    text = done.stderr[done.stderr.index("evener: rank") :]
    assert text.startswith("evener: ranks 0, 1 wait for each other: nothing was done for 8 s\n"), text
    assert "rank 0 waits in the script (broadcast of [3] Float, call 2 of group default_pg), at train.py:" in text, text
    assert "rank 1 waits in the script (all_reduce of [5, 2] Float, call 2 of group default_pg), at " in text, text
    assert (
        "\n  hang: Ranks 0, 1 wait for each other: no progress for 8 s\n  Cause: Every rank is inside of a" in text
    ), text


@pytest.mark.full
def test_with_restarts_it_goes_on(tmp_path):
    done = run(tmp_path, "data", "python", words=("--restarts", "1"))
    assert "evener: rank 1 hangs" in done.stderr and "restart 1 of 1" in done.stderr, done.stderr


def test_when_it_is_a_hang(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("evener.launch.hang.time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    beats = tmp_path / "beats"
    beats.mkdir()
    hang = Hang(str(beats), str(tmp_path), 60.0)

    def after(seconds):
        clock[0] += seconds
        return hang.is_there({0: os.getpid()})

    log = tmp_path / "rank0.log"
    log.write_text("so far")
    assert not after(59) and not after(0) and after(60)  # no Run has begun: what the ranks write counts
    log.write_text("so far, and on")
    assert not after(59) and not after(0)
    for rank in range(2):
        (beats / f"rank{rank}").touch()
    assert not after(50) and not after(50)
    os.utime(beats / "rank1", ns=(1, 1))  # one of them moves; a clock that is set back is a change like any other
    assert not after(50) and not after(50)
    with first():
        assert not after(1000)
    assert not after(55) and after(6)
    (beats / "rank0").unlink()  # its loop is over
    assert not after(50) and after(60)
    (beats / "rank1").unlink()
    assert not after(1000)


def test_a_beat_is_a_file_while_something_is_at_work(tmp_path):
    beat = Beat(str(tmp_path), 3)
    path = tmp_path / "rank3"
    beat()
    assert not path.exists()  # outside of a loop an evaluation does not start a watch
    beat.begin()
    os.utime(path, ns=(1, 1))
    beat.due = 0.0
    beat()
    assert path.stat().st_mtime_ns > 1
    beat.end()
    beat.end()
    assert not path.exists()
    for nobody in (Beat(None, 0), Beat(str(tmp_path / "gone"), 0)):
        nobody.begin(), nobody(), nobody.end()


def test_the_phase_is_read_from_the_stack():
    def stack(*frames):
        return [Line(file if file.startswith("/") else EVENER + file, 1, function, "") for file, function in frames]

    step = ("engine/step.py", "_pieces")
    user = ("/home/me/train.py", "loss_fn")
    assert phase_of(stack(user, ("engine/spread/single.py", "forward"), step)) == "forward"
    assert phase_of(stack(("/x/torch/autograd/graph.py", "_engine_run_backward"), step)) == "backward"
    assert (
        phase_of(stack(("/x/torch/distributed/distributed_c10d.py", "wait"), ("engine/spread/ddp.py", "finish"), step))
        == "reduce"
    )
    assert phase_of(stack(user, ("data/read.py", "read"), ("run/loop.py", "_feed"))) == "data"
    assert (
        phase_of(stack(("dist/comm.py", "broadcast"), ("checkpoint/agree.py", "on_main"), ("run/saving.py", "write")))
        == "save"
    )
    assert (
        phase_of(
            stack(
                ("engine/update.py", "vector"),
            )
        )
        == "optimizer"
    )
    assert phase_of(stack(user)) == "script"


@pytest.mark.parametrize(
    ("word", "said"), [("soon", "--hang-after=soon is no time."), ("0.5", "--hang-after 0.5: at least 1 s.")]
)
def test_a_bad_time_is_one_clear_error(tmp_path, word, said, capsys):
    from evener.cli import main

    (tmp_path / "train.py").write_text("")
    assert main(["run", f"--hang-after={word}", str(tmp_path / "train.py")]) == 2
    assert said in capsys.readouterr().err
