"""`evener.device()` in a script that nobody launched takes an idle GPU and keeps it; a wrong slot is explained.

torch is told that it has CUDA; the driver is the stand-in. Nothing is computed (untested on CUDA).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.fakenvml import EIGHT, Fake, library, needs_compiler

pytestmark = [needs_compiler, pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")]

START = """
import os, sys, torch, evener
from evener.gpus import leases, look_at_gpus
torch.version.cuda = "12.8"
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: torch.cuda._device_count_nvml()
leases.default_path = lambda: sys.argv[1]
def show(*args):
    try:
        print(evener.device(*args))
    except evener.EvenerError as error:
        print(f"{error} [{error.exit_code}]")
"""


# torch is imported once, under the stand-in driver; every script is a fork of that process.
SERVER = """
import json, os, sys, traceback, torch, evener
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            os.environ.clear()
            os.environ.update(job["environ"])
            sys.argv = ["-c", job["locks"]]
            exec(job["text"], {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def server():
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library())}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def script(server, tmp_path):
    def run(fake: Fake, text: str, **environ: str) -> subprocess.CompletedProcess[str]:
        base = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "SLURM_", "KUBERNETES_"))}
        out, err = tmp_path / "out", tmp_path / "err"
        job = {"out": str(out), "err": str(err), "environ": fake.environ(base, **environ), "text": START + text}
        server.stdin.write(json.dumps(job | {"locks": str(fake.path.parent / "locks")}) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        assert code == "0", err.read_text()
        return subprocess.CompletedProcess([], 0, out.read_text(), err.read_text())

    return run


def test_alone_on_a_shared_server_it_takes_one_idle_gpu_and_keeps_it(tmp_path, script):
    fake = Fake(tmp_path, EIGHT)
    fake.occupy(os.getpid(), "7 C 9000", "6 C 9000")
    done = script(
        fake,
        """
show(); show()
holders = {gpu.index: gpu.lease.pid for gpu in look_at_gpus(os.environ, holder_of=leases.Folder(sys.argv[1]).holder).gpus if gpu.lease}
assert holders == {5: os.getpid()}, holders
show("cuda:1"); show("cuda:9"); show("cpu")
""",
    )
    lines = done.stdout.splitlines()
    assert lines[:3] == ["cuda:5", "cuda:5", "cuda:1"] and lines[-1] == "cpu"
    assert lines[3] == "cuda:9: cuda:9 does not exist; 8 GPUs are visible."
    said = "evener: cuda:5 is GPU 5 (NVIDIA A100-SXM4-80GB), idle, under a lease until this process ends\n"
    assert done.stderr == said, "once"


def test_when_launched_or_told_it_takes_what_it_was_given(tmp_path, script):
    fake = Fake(tmp_path, EIGHT)
    fake.occupy(os.getpid(), "0 C 9000", "2 C 9000")
    done = script(
        fake,
        """
launched = {"RANK": "0", "LOCAL_RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
os.environ.update(launched); show()
for name in launched: del os.environ[name]
os.environ["CUDA_VISIBLE_DEVICES"] = "2"; show()  # one GPU: the user chose it
assert not os.path.exists(sys.argv[1])
os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"; show(3); show()
""",
    )
    lines = done.stdout.splitlines()
    assert lines[:2] == ["cuda:2", "cuda:0"] and lines[-1] == "cuda:1"
    assert done.stderr.startswith("evener: cuda:1 is GPU 3 (NVIDIA A100") and done.stderr.count("\n") == 1
    # A slot that is nvidia-smi's number:
    assert lines[2:-1] == [
        "slot 3: cuda:3 does not exist; 2 GPUs are visible.",
        "  CUDA_VISIBLE_DEVICES=2,3: cuda:0 is GPU 2, cuda:1 is GPU 3",
        "  fix: GPU 3 of nvidia-smi is cuda:1 here",
        "       torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever nvidia-smi calls it",
        "       evener run --nproc 2 starts one process per GPU [2]",
    ]
    assert not [name for name in os.listdir(tmp_path / "locks") if name.startswith("ticket")]


def test_what_cannot_be_known_is_said_and_not_guessed(tmp_path, script):
    fake = Fake(tmp_path, 'gpu 0 name="A"\ngpu 1 name="B" used=9000')
    done = script(
        fake,
        'show(); os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"; os.environ["CUDA_VISIBLE_DEVICES"] = "1,0"; show()',
    )
    assert done.stdout == "cuda:0\ncuda:1\n"
    unknown, known = done.stderr.splitlines()
    assert "which one an index means is not known" in unknown and known.startswith("evener: cuda:1 is GPU 0 (A), idle")


def test_no_idle_gpu_is_said_with_who_has_them(tmp_path, script):
    fake = Fake(tmp_path, "\n".join(EIGHT.splitlines()[:2]))
    fake.occupy(os.getpid(), "0 C 9000", "1 C 9000")
    out = script(fake, "show()").stdout
    assert out.startswith("No GPU is idle. 1 GPU wanted, 0 of 2 GPUs fit now.") and out.rstrip().endswith("[3]")
    assert f"GPU 1: root, pid {os.getpid()}" in out or f"pid {os.getpid()}" in out
    assert 'evener.device("cuda:0") shares a GPU knowingly' in out
