"""Hosts on one machine: network namespaces with their own address, name, hosts file and /dev/shm. Needs root and `ip`.

with made(3) as hosts: hosts.start(1, "evener", ...)     hosts.cut(2), hosts.block(2, 29401)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

INSIDE = 'hostname "$1"; mount -t tmpfs -o size=1g tmpfs /dev/shm; shift; exec "$@"'


def why_not() -> str:
    """Why no namespaces can be made here; "" when they can."""
    if sys.platform != "linux" or os.getuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need Linux, root and iproute2"
    name = f"evtry{os.getpid()}"  # two test processes may ask at the same time
    if (done := subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)).returncode != 0:
        return f"network namespaces cannot be made: {done.stderr.strip()}"
    # A machine may allow a namespace and refuse a pair of interfaces, a bridge, or another host name.
    tries = [
        ["ip", "link", "add", f"{name}a", "type", "bridge"],
        ["ip", "link", "add", f"{name}b", "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "netns", "exec", name, "unshare", "-u", "-m", "bash", "-c", INSIDE, "_", "host1", "true"],
    ]
    failed = [
        run.stderr.strip() for one in tries if (run := subprocess.run(one, capture_output=True, text=True)).returncode
    ]
    for clean in (["link", "del", f"{name}a"], ["link", "del", f"{name}b"], ["netns", "del", name]):
        subprocess.run(["ip", *clean], capture_output=True)
    return f"network namespaces cannot be made: {failed[0]}" if failed else ""


class Hosts:
    def __init__(self, count: int, folder: Path) -> None:
        self.count, self.folder, self.key = count, folder, os.getpid() % 100000
        self.running: list[subprocess.Popen[str]] = []

    def name(self, i: int) -> str:
        return f"ev{self.key}h{i}"

    def up(self) -> None:
        bridge = f"evb{self.key}"
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for i in range(1, self.count + 1):
            name = self.name(i)
            ip("netns", "add", name)
            ip("link", "add", f"ev{self.key}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"ev{self.key}v{i}", "master", bridge, "up")
            ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
            self.names(i)
            # Without it every connection waits about 10 s for reverse DNS.
            Path(f"/etc/netns/{name}/nsswitch.conf").write_text("hosts: files\n")

    def names(self, i: int, own: str = "") -> None:
        """The hosts file of host i; `own` is the address of its own name, where that is not its address."""
        known = {f"host{j}": f"10.77.0.{j}" for j in range(1, self.count + 1)} | ({f"host{i}": own} if own else {})
        path = Path(f"/etc/netns/{self.name(i)}/hosts")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("127.0.0.1 localhost\n" + "".join(f"{to} {name}\n" for name, to in known.items()))

    def start(self, i: int, *words: object, **environ: str) -> subprocess.Popen[str]:
        """`evener run WORDS` on host i; its output is in <folder>/host<i>.out."""
        inside = [
            "ip",
            "netns",
            "exec",
            self.name(i),
            "unshare",
            "-u",
            "-m",
            "--",
            "bash",
            "-c",
            INSIDE,
            "_",
            f"host{i}",
        ]
        command = [*inside, sys.executable, "-m", "evener", "run", "--cpu", *map(str, words)]
        with open(self.out(i), "a") as out:
            process = subprocess.Popen(
                command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
            )  # fmt: skip
        self.running.append(process)
        return process

    def out(self, i: int) -> Path:
        return self.folder / f"host{i}.out"

    def cut(self, i: int, back: bool = False) -> None:
        ip("link", "set", f"ev{self.key}v{i}", "up" if back else "down")

    def block(self, i: int, port: int, back: bool = False) -> None:
        ip("-n", self.name(i), "rule", "del" if back else "add", "ipproto", "tcp", "dport", str(port), "blackhole")

    def down(self) -> None:
        for process in self.running:
            kill(process)
        for i in range(1, self.count + 1):
            # The kernel takes the interfaces of a removed namespace away later: the next test would find their names.
            subprocess.run(["ip", "link", "del", f"ev{self.key}v{i}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.name(i)], capture_output=True)
            shutil.rmtree(f"/etc/netns/{self.name(i)}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", f"evb{self.key}"], capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def kill(process: subprocess.Popen[str]) -> None:
    """A host's power goes: the launcher and everything below it, at once."""
    if process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            every = psutil.Process(process.pid)
            for one in [every, *every.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
    process.wait(60)


@contextlib.contextmanager
def made(count: int, folder: Path) -> Iterator[Hosts]:
    hosts = Hosts(count, folder)
    try:
        hosts.up()
        yield hosts
    finally:
        hosts.down()
