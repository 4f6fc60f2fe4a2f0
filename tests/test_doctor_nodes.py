"""`evener doctor --nodes` on three hosts (network namespaces): who is missing, who cannot be reached, what differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from evener.doctor import nodes
from evener.doctor.facts import Facts
from evener.errors import UsageError
from evener.launch.layout import expand

CHECKS = "duplicate-names,ports,mtu,clock,hostname,directory"


def sh(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, capture_output=True)


def can_make_hosts() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        return False
    name = f"evprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    return made and subprocess.run(["ip", "netns", "del", name], capture_output=True).returncode == 0


class Cluster:
    """Hosts with an address, a name and a hosts file of their own, on a bridge that only they see."""

    def __init__(self, count: int) -> None:
        self.prefix = f"ev{os.getpid()}"
        self.names = [f"host{i}" for i in range(1, count + 1)]
        self.switch = f"{self.prefix}s"
        sh("ip", "netns", "add", self.switch)
        sh("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        sh("ip", "-n", self.switch, "link", "set", "br0", "up")
        for i, name in enumerate(self.names, start=1):
            space = self.space(name)
            sh("ip", "netns", "add", space)
            sh("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{i}", "netns", self.switch)
            sh("ip", "-n", self.switch, "link", "set", f"p{i}", "master", "br0", "up")
            for words in (("addr", "add", f"10.78.0.{i}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
                sh("ip", "-n", space, *words)
            sh("ip", "-n", space, "link", "set", "lo", "up")
            folder = Path("/etc/netns", space)
            folder.mkdir(parents=True)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            self.hosts_file(name)

    def space(self, name: str) -> str:
        return f"{self.prefix}{name}"

    def hosts_file(self, name: str, own: str | None = None) -> None:
        """`own`: another address behind the host's own name, as Debian's installer writes it."""
        lines = [f"10.78.0.{i} {one}" for i, one in enumerate(self.names, start=1) if own is None or one != name]
        text = "\n".join(["127.0.0.1 localhost", *([f"{own} {name}"] if own else []), *lines]) + "\n"
        Path("/etc/netns", self.space(name), "hosts").write_text(text)

    def start(self, name: str, *words: object, called: str | None = None, first: str = "") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "evener", "doctor", "--nodes", ",".join(self.names), *map(str, words)]
        inside = f'hostname {called or name}; {first or "true"}; exec "$@"'
        space = ["ip", "netns", "exec", self.space(name), "unshare", "-u", "-m", "--", "bash", "-c", inside, "_", *argv]
        return subprocess.Popen(space, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def close(self) -> None:
        for space in (*map(self.space, self.names), self.switch):
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(Path("/etc/netns", space), ignore_errors=True)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if not can_make_hosts():
        pytest.skip("network namespaces cannot be made here (needs Linux, root and iproute2)")
    made = Cluster(3)
    try:
        yield made
    finally:
        made.close()


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    return [(process.returncode, *told) for process in processes for told in [process.communicate(timeout=120)]]


KNOCK = """
import socket, time
for word in (b"GET / HTTP/1.0\\r\\n\\r\\n", b'{"facts": 3}\\n', b"[]\\n"):
    for attempt in range(600):
        try:
            with socket.create_connection(("10.78.0.1", 29477), 1) as door:
                door.sendall(word)
            break
        except OSError:
            time.sleep(0.05)
"""


def test_three_well_hosts_are_called_well_whatever_a_stranger_sends(cluster, tmp_path):
    """A port scanner at the head's door, before all hosts have come: they still find each other."""
    knock = tmp_path / "knock.py"
    knock.write_text(KNOCK)
    words = ("--json", "--only", CHECKS, "--dir", tmp_path, "--timeout", 60)
    scan = f"{sys.executable} {knock}"
    processes = [cluster.start(name, *words, first=scan * (name == "host3")) for name in reversed(cluster.names)]
    head, *others = ended(processes[::-1])
    findings = json.loads(head[1])["findings"]
    assert head[0] == 0 and {one["level"] for one in findings} == {"ok"}, findings
    assert [one["check"] for one in findings].count("hostname") == 3
    assert all(code == 0 and "host1 has the report: the worst of it is ok" in err for code, _, err in others)


@pytest.mark.full
def test_a_missing_host_is_named(cluster, tmp_path):
    words = ("--only", CHECKS, "--dir", tmp_path, "--timeout", 30)
    (code, out, err), (other, _, told) = ended([cluster.start(name, *words) for name in ("host1", "host2")])
    assert code == 1 and "2 of 3 hosts" in out, (out, err)
    assert "ports: host3 did not come within 30 s (host1, host2 did)" in out
    assert "check that it reaches host1 (10.78.0.1:29477)" in " ".join(out.split())
    assert other == 1 and "the worst of it is error" in told


def test_what_differs_between_hosts_is_named(cluster, tmp_path):
    sh("ip", "-n", cluster.space("host2"), "rule", "add", "ipproto", "tcp", "dport", "30000-65534", "blackhole")
    for place in (("-n", cluster.space("host3"), "link", "set", "eth0"), ("-n", cluster.switch, "link", "set", "p3")):
        sh("ip", *place, "mtu", 1400)
    cluster.hosts_file("host2", own="127.0.1.1")
    words = ("--json", "--only", CHECKS, "--dir", tmp_path, "--timeout", 60)
    hidden = f"mount -t tmpfs none {tmp_path}"
    processes = [
        cluster.start("host1", *words),
        cluster.start("host2", *words),
        cluster.start("host3", *words, called="host2", first=hidden),
    ]
    head, *_ = ended(processes)
    assert head[0] == 1, head
    wrong = {one["check"]: one for one in json.loads(head[1])["findings"] if one["level"] == "error"}
    assert set(wrong) == {"duplicate-names", "ports", "mtu", "hostname", "directory"}
    assert "2 hosts call themselves host2" in wrong["duplicate-names"]["found"]
    assert "host1 eth0 1500" in wrong["mtu"]["found"] and "eth0 1400" in wrong["mtu"]["found"]
    assert "127.0.1.1 alone" in wrong["hostname"]["found"] and "'10.78.0.2 host2'" in wrong["hostname"]["fix"]
    unreachable = wrong["ports"]["found"]
    # The rule also holds back host2's answers: host2 and the two others, both ways; the third pair is not there.
    assert unreachable.count(" -> ") == 4 and unreachable.count("host1") == 2
    assert "is not the same on all hosts" in wrong["directory"]["found"]


def test_a_head_that_is_not_there_is_said_by_name(cluster, tmp_path):
    ((code, _, err),) = ended([cluster.start("host2", "--timeout", 1, "--dir", tmp_path)])
    assert code == 1 and "the head host1:29477 was not reached within 1 s: Connection refused" in err


@pytest.mark.parametrize(
    "text, names",
    [
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("node1", ["node1"]),
        ("a[9-11]-ib", ["a9-ib", "a10-ib", "a11-ib"]),
    ],
)
def test_slurms_short_form_is_expanded(text, names):
    assert expand(text) == names


def test_the_hosts_come_from_a_list_or_from_slurm():
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "1", "SLURM_JOB_ID": "41000"}
    who = nodes.members("auto", slurm)
    assert (who.names, who.rank, who.port) == (("n1", "n2"), 1, 21000)
    assert not who.is_head(Facts()) and nodes.members("auto", slurm | {"SLURM_NODEID": "0"}).is_head(Facts())
    eth = {"name": "eth0", "up": True, "loopback": False, "addresses": ["10.9.9.9"], "mtu": 1500}
    assert nodes.members("a,b", {}).is_head(Facts(hostname="a.example.org"))
    assert nodes.members("10.9.9.9,b", {}).is_head(Facts(hostname="x", interfaces=[eth]))
    assert not nodes.members("a,b", {}).is_head(Facts(hostname="b"))
    for given in ("auto", "1", "host1", "3"):
        with pytest.raises(UsageError, match="--nodes"):
            nodes.members(given, {})
