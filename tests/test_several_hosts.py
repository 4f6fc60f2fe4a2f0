"""`evener run --nodes`: several hosts meet, start and end together; every wait is bounded and says who is missing.

Hosts are network namespaces; where they cannot be made the tests are skipped, with the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from evener.errors import LaunchError
from evener.launch.head import Head
from evener.launch.layout import Layout
from evener.launch.meeting import Line, Tie
from evener.launch.supervise import Ending
from tests import netns

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="network namespaces are Linux's")
NO = netns.why_not()
namespaces = pytest.mark.skipif(bool(NO), reason=NO or "none")
LONG = 300  # seconds that no step takes, on however loaded a machine

SUM = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("sum", total.item(), "of", dist.get_world_size(), "over", os.environ["GLOO_SOCKET_IFNAME"], flush=True)
if "fail" in sys.argv and rank == 2:
    raise ValueError("row 7 is bad")
while "long" in sys.argv or "fail" in sys.argv:
    dist.all_reduce(total)
    time.sleep(0.05)
dist.destroy_process_group()
"""
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
TRAIN = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch, evener
from tests.models import make, mlp_rows, row_loss
model = make("mlp")
run = evener.Run(model, torch.optim.AdamW(model.parameters(), lr=1e-2), row_loss, mlp_rows(48), global_batch_size=12,
                 exact=True, slice_size=2, precision="fp32", save_every=1, dir="runs/one", timeout=60)
for update in run.updates(updates=int(sys.argv[1])):
    if run.is_main:
        print("update", update.number, "of", run.world_size, flush=True)
    time.sleep(float(sys.argv[2]))
digest = run.digest()
if run.is_main:
    print("DIGEST", digest, flush=True)
run.close()
"""


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    (tmp_path / "train.py").write_text(TRAIN.format(root=ROOT))
    with netns.made(3, tmp_path) as made:
        yield made


def finish(*processes: subprocess.Popen[str]) -> list[int]:
    return [one.wait(LONG) for one in processes]


def wait_for(path: Path, word: str, times: int = 1) -> None:
    until = time.monotonic() + LONG
    while not path.exists() or len(re.findall(word, path.read_text())) < times:
        assert time.monotonic() < until, path.read_text() if path.exists() else f"no {path}"
        time.sleep(0.1)


def both(host: int, port: int = 29400, wait: str = "120") -> list[str]:
    return ["--nodes", "3", "--head", f"host1:{port}", "--join-timeout", wait]


# --- everything is there ----------------------------------------------------------------------------------------------


@namespaces
def test_three_hosts_train_together_where_the_heads_own_name_is_a_loopback_address(hosts):
    hosts.names(1, own="127.0.1.1")  # as Debian and Ubuntu install it
    started = [hosts.start(i, *both(i), "sum.py") for i in (1, 2, 3)]
    assert finish(*started) == [0, 0, 0], hosts.out(1).read_text() + hosts.out(2).read_text()
    head, other = hosts.out(1).read_text(), hosts.out(2).read_text()
    assert "sum 3.0 of 3 over eth0" in head and "sum" not in other, "rank 0 is shown, once"
    assert "the name host1 is 127.0.1.1 here: other hosts are met on every interface" in head
    assert "3 of 3 hosts arrived: " in head and "3 of 3 hosts arrived: " in other
    assert re.search(r"1 process on the CPU \(--nproc N for more\), rank [12] of 3", other)
    logs = hosts.folder / "runs" / "logs"
    assert len({path.name.partition("-node")[0] for path in logs.iterdir()}) == 1, "one job, one name"
    assert sorted(path.name for path in logs.glob("*-node?/rank?.log")) == ["rank0.log", "rank1.log", "rank2.log"]


# --- somebody is missing ----------------------------------------------------------------------------------------------


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3"}
SLURM["SLURM_STEP_NODELIST"] = "host[1-3]"


@namespaces
def test_who_is_missing_is_said_and_nobody_waits_for_ever(hosts):
    alone = hosts.start(1, "--join-timeout", "2", "sum.py", **SLURM, SLURM_NODEID="0")
    assert finish(alone) == [1]
    assert "evener: 1 of 3 hosts arrived: missing host2, host3, within 2 s." in hosts.out(1).read_text()


@namespaces
@pytest.mark.full
def test_the_one_that_is_missing_is_named_on_those_that_came(hosts):
    started = [hosts.start(i, "--join-timeout", "30", "sum.py", **SLURM, SLURM_NODEID=str(i - 1)) for i in (1, 2)]
    assert finish(*started) == [1, 1]
    for i in (1, 2):
        assert "evener: 2 of 3 hosts arrived: missing host3, within 30 s." in hosts.out(i).read_text()


@namespaces
def test_a_closed_port_is_named_before_anything_is_started(hosts):
    hosts.block(3, 29401)
    started = [hosts.start(i, *both(i), "sum.py") for i in (1, 2, 3)]
    assert finish(*started) == [1, 1, 1]
    for i in (1, 2, 3):
        text = hosts.out(i).read_text()
        assert "Hosts do not reach each other:\n  host3 does not reach 10.77.0.1:29401: " in text, text
        assert "fix: open ports 29400, 29401 and those above 1024 between the hosts" in text
    assert not (hosts.folder / "runs").exists()


@namespaces
@pytest.mark.full
def test_a_head_that_cannot_be_reached_is_said_with_its_address(hosts):
    hosts.block(2, 29400)
    hosts.names(3, own="10.77.0.3")
    started = [hosts.start(i, *both(i, wait="5"), "sum.py") for i in (2, 3)]
    assert finish(*started) == [1, 1]
    assert "The head host1:29400 (10.77.0.1) was not reached within 5 s: " in hosts.out(2).read_text()
    assert "nothing listens there" in hosts.out(3).read_text()
    assert "start the same command there" in hosts.out(3).read_text()


@namespaces
def test_another_command_on_one_host_is_refused_by_name(hosts):
    first = hosts.start(1, *both(1), "sum.py", "--lr", "0.1")
    wait_for(hosts.out(1), "1 of 3 hosts arrived")
    other = hosts.start(2, *both(2), "sum.py", "--lr", "1")
    assert finish(other) == [1]
    first.send_signal(signal.SIGINT)
    assert finish(first) == [130], "Ctrl-C ends the waiting"
    text = hosts.out(2).read_text()
    assert "another command: sum.py --lr 1 here, sum.py --lr 0.1 on host1" in text, text


def test_a_stranger_at_the_port_is_no_host_and_writes_on_no_terminal(tmp_path):
    (tmp_path / "sum.py").write_text(SUM)
    port = 31001 + os.getpid() % 20000 // 2 * 2
    command = [sys.executable, "-m", "evener", "run", "--cpu", "--nodes", "3", "--head", f"127.0.0.1:{port}"]
    head = subprocess.Popen(
        [*command, "--join-timeout", "120", "sum.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    assert f"hosts meet at 127.0.0.1:{port} (lo)" in head.stdout.readline()
    hello = {"name": "\x1b[2Jevil", "label": None, "rank": None, "nproc": 1, "what": "sum.py", "head": False, "port": 1}
    with contextlib.ExitStack() as open_lines:
        for text in (b"GET / HTTP/1.1\r\n\r\n", b'{"hello": {}}\n', b'{"hello": []}\n', b"\x80\x04pickle\n"):
            open_lines.enter_context(socket.create_connection(("127.0.0.1", port), 30)).sendall(text)
        line = open_lines.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        line.sendall(json.dumps({"hello": {**hello, "job": None, "attempt": 0}}).encode() + b"\n")
        out = ""
        while "2 of 3 hosts arrived" not in out:
            out += head.stdout.readline()
        head.send_signal(signal.SIGINT)
        out += head.communicate(timeout=LONG)[0]
    assert head.returncode == 130 and "3 of 3" not in out, out
    assert "?[2Jevil" in out and "\x1b" not in out


HELLO = {"name": "a", "label": None, "rank": None, "port": 1, "nproc": 1, "what": "x", "head": False}
HELLO |= {"job": None, "attempt": 0}
ODD_LINES = {
    "deep": b"[" * 200_000 + b"\n",
    "no JSON": b"GET / HTTP/1.0\r\n\r\n",
    "checked": b'{"checked": 5}\n',
    "checked with numbers": b'{"checked": {"store": 1, "next": 2}}\n',
    "ended": b'{"ended": 5}\n',
    "ended without a code": b'{"ended": {"stopped": false, "victim": false, "text": ""}}\n',
    **{
        f"hello, {name} {value!r}": json.dumps({"hello": {**HELLO, name: value}}).encode() + b"\n"
        for name, value in (("nproc", "x"), ("nproc", 0), ("nproc", 10**400), ("rank", "1"), ("rank", -1), ("port", {}))
    },
    "hello, a job of another folder": json.dumps({"hello": {**HELLO, "job": "../x"}}).encode() + b"\n",
}


@pytest.fixture
def head():
    """A head of two hosts on a free port, in this process."""
    server = socket.create_server(("127.0.0.1", 0))
    thread = Head(Layout(2, 2, "127.0.0.1", server.getsockname()[1]), server, "job", 120.0, 0)
    thread.start()
    yield thread
    thread.finished = True
    thread.join(LONG)


def guest(head: Head, *, name: str = "") -> Line:
    line = Line(socket.create_connection(("127.0.0.1", head.layout.port), LONG))
    if name:
        line.send(hello={**HELLO, "name": name})
    return line


def hear(line: Line, word: str) -> dict:
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        for message in line.receive():
            if word in message:
                return message
        select.select([line.connection], [], [], 1.0)
    raise AssertionError(f"no {word}")


def start(head: Head) -> tuple[Line, Line]:
    hosts = guest(head, name="a"), guest(head, name="b")
    for one in hosts:
        hear(one, "check")
    for one in hosts:
        one.send(checked={"store": None, "next": None})
    for one in hosts:
        hear(one, "go")
    return hosts


def test_an_odd_line_drops_who_sent_it_and_nobody_else(head):
    def all_are_dropped() -> None:
        odd = [guest(head) for _ in ODD_LINES]
        for one, text in zip(odd, ODD_LINES.values()):
            one.connection.settimeout(LONG)
            with contextlib.suppress(ConnectionError):  # dropped while it still sends
                one.connection.sendall(text)
        for one in odd:
            with contextlib.suppress(ConnectionResetError):
                assert one.connection.recv(1) == b""
            one.connection.close()

    all_are_dropped()
    first, second = start(head)
    all_are_dropped()
    stranger = guest(head)
    stranger.send(ended={"code": 3, "stopped": False, "victim": False, "text": "not of this job"})
    first.send(ended={"code": 0, "stopped": False, "victim": False, "text": ""})
    second.send(ended=5)
    assert hear(first, "verdict")["verdict"]["text"] == "lost: its ended is none"
    for one in (first, second, stranger):
        one.connection.close()


@pytest.mark.parametrize("running", [False, True], ids=["while they gather", "while they run"])
def test_when_the_meeting_itself_breaks_all_hosts_end_at_once(head, monkeypatch, running):
    lines = start(head) if running else (guest(head, name="a"),)
    if not running:
        hear(lines[0], "news")
    monkeypatch.setattr(head, "_named", lambda: 1 / 0)
    tie = Tie(head.layout, {}, 60.0, 5, "127.0.0.1")
    tie.line = lines[0]
    try:
        if running:
            until = time.monotonic() + LONG
            while tie.tick() != "failed":
                assert time.monotonic() < until
            verdict = tie.ended(Ending(1))
            assert (verdict.code, verdict.again) == (1, False) and "ZeroDivisionError" in verdict.text
        else:
            with pytest.raises(LaunchError, match=r"meeting broke.*ZeroDivisionError"):
                tie.gather(None, 0)
    finally:
        tie.close()
        for one in lines:
            one.connection.close()
    head.join(LONG)
    assert not head.is_alive()


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b'{"hi": 1}\n'], ids=["http", "closes", "json"]
)
def test_another_program_at_the_heads_port_is_not_waited_for_for_ever(answer, capsys):
    server = socket.create_server(("127.0.0.1", 0))
    server.settimeout(0.2)
    over = threading.Event()

    def program() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=program)
    thread.start()
    port = server.getsockname()[1]
    tie = Tie(Layout(2, 2, "127.0.0.1", port), {}, 2.0, 0, None)
    try:
        with pytest.raises(
            LaunchError, match=f"The head 127.0.0.1:{port} was not reached within 2 s: it answers, but not"
        ):
            tie.gather(None, 0)
    finally:
        over.set()
        thread.join(LONG)
        tie.close()
        server.close()
    assert "waiting for the head" in capsys.readouterr().err


# --- something breaks -------------------------------------------------------------------------------------------------


@namespaces
@pytest.mark.full
def test_the_failing_host_is_named_on_all_of_them(hosts):
    started = [hosts.start(i, *both(i), "--node-rank", i - 1, "sum.py", "fail") for i in (1, 2, 3)]
    assert finish(*started) == [1, 1, 1]
    assert "evener: rank 2 failed: ValueError: row 7 is bad" in hosts.out(3).read_text()
    for i in (1, 2):
        text = hosts.out(i).read_text()
        assert "evener: host3: rank 2 failed: ValueError: row 7 is bad" in text, text
        assert f"-node{i - 1}" in text.partition("logs of this host: ")[2]


@namespaces
@pytest.mark.full
def test_a_pulled_cable_ends_all_hosts_in_bounded_time(hosts):
    started = [hosts.start(i, *both(i), "--node-rank", i - 1, "sum.py", "long") for i in (1, 2, 3)]
    wait_for(hosts.out(1), "sum 3.0")
    before = [psutil.Process(one.pid).children(recursive=True) for one in started]
    hosts.cut(3)
    assert finish(*started) == [1, 1, 1]
    for i in (1, 2):
        assert "evener: host3: lost: nothing was heard of it for 30 s" in hosts.out(i).read_text()
    assert "evener: the head host1:29400: lost: nothing was heard of it for 30 s" in hosts.out(3).read_text()
    assert not [one for every in before for one in every if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@namespaces
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("which", [3, 1], ids=["host3", "the head"])
def test_a_host_that_is_killed_and_comes_back_goes_on_with_the_others(hosts, which):
    words = ["--restarts", "3", "train.py", "30", "0.3"]
    started = {i: hosts.start(i, *both(i), "--node-rank", i - 1, *words) for i in (1, 2, 3)}
    wait_for(hosts.out(1), "update 5 of 3")
    netns.kill(started[which])
    wait_for(hosts.out(2), "lost: it has closed|lost: .*reset|waiting for the head")
    started[which] = hosts.start(which, *both(which), "--node-rank", which - 1, *words)
    codes = finish(*started.values())
    text = hosts.out(1).read_text()
    assert codes == [0, 0, 0], text + hosts.out(2).read_text()
    assert text.count("DIGEST") == 1 and text.count("update 0 of 3") == 1, "it did not start over"
    assert text.partition("DIGEST ")[2].split()[0] == uninterrupted(hosts.folder, "30")


def uninterrupted(folder: Path, updates: str) -> str:
    (folder / "calm").mkdir()
    (folder / "calm" / "train.py").write_text((folder / "train.py").read_text())
    command = [sys.executable, "-m", "evener", "run", "--cpu", "train.py", updates, "0"]
    done = subprocess.run(command, cwd=folder / "calm", capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("DIGEST ")[2].split()[0]


# --- an elastic range, without namespaces: four agents on one address -------------------------------------------------


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_from_four_agents_to_three_and_back_is_the_uninterrupted_run(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.format(root=ROOT))
    port = 31000 + os.getpid() % 20000 // 2 * 2

    def start(i: int) -> subprocess.Popen[str]:
        words = ["--nodes", "3:4", "--head", f"127.0.0.1:{port}", "--node-rank", str(i), "train.py", "60", "0.5"]
        with open(tmp_path / f"agent{i}.out", "a") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "evener", "run", "--cpu", *words], cwd=tmp_path, stdout=out, stderr=out, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    agents = [start(i) for i in range(4)]
    try:
        wait_for(tmp_path / "agent0.out", r"update 4 of 4")
        netns.kill(agents[3])
        wait_for(tmp_path / "agent0.out", r"update \d+ of 3", times=3)
        agents[3] = start(3)
        wait_for(tmp_path / "agent3.out", r"4 of 3 to 4 hosts arrived")
        assert finish(*agents) == [0, 0, 0, 0], (tmp_path / "agent0.out").read_text()
    finally:
        for one in agents:
            netns.kill(one)
    text = (tmp_path / "agent0.out").read_text()
    worlds = re.findall(r"update \d+ of (\d)", text)
    assert [one for i, one in enumerate(worlds) if i == 0 or worlds[i - 1] != one] == ["4", "3", "4"], text
    assert "more hosts have come" in text and "without " in text
    assert text.partition("DIGEST ")[2].split()[0] == uninterrupted(tmp_path, "60")


@namespaces
@pytest.mark.full
def test_a_stop_on_one_host_saves_and_ends_all(hosts):
    started = [hosts.start(i, *both(i), "--node-rank", i - 1, "train.py", "1000", "0.1") for i in (1, 2, 3)]
    wait_for(hosts.out(1), "update 3 of 3")
    started[1].send_signal(signal.SIGUSR1)
    assert finish(*started) == [75, 75, 75], hosts.out(1).read_text()
    assert "SIGUSR1: stopping 1 process" in hosts.out(2).read_text()
