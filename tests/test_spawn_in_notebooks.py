"""`evener.spawn`: functions of a cell or a prompt on several ranks; results, errors, Ctrl-C, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

import evener

# What a notebook has done by then: threads of OpenMP and a backward, after which a fork would hang in its first one.
CELL = """
import os, sys, time, torch, evener
from torch.nn import functional as F
torch.set_num_threads(2)
torch.randn(1200, 1200) @ torch.randn(1200, 1200)
torch.nn.Linear(3, 2)(torch.randn(2, 3)).sum().backward()
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 3)
    def forward(self, x):
        return self.linear(x)
def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)
def train(lr, folder):
    evener.seed(0)
    x, model = torch.randn(30, 6), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    run = evener.Run(
        model, optimizer, loss_fn, (x, x.argmax(1) % 3), global_batch_size=12, exact=True, slice_size=3,
        precision="fp32", dir=folder, resume="never",
    )
    with run:
        for update in run.updates(epochs=2):
            pass
        run.print("rank 0 says", run.world_size)
        return run.digest(), evener.rank(), torch.get_num_threads()
def broken():
    if evener.rank() == 1:
        raise ValueError("boom")
    evener.comm.barrier()
"""


def prompt(code, folder, *, cell=CELL, timeout=300):
    """What a `python` prints that reads the code from its stdin: functions in a `__main__` without a file."""
    done = subprocess.run(
        [sys.executable, "-"], input=cell + textwrap.dedent(code), capture_output=True, text=True, cwd=folder,
        timeout=timeout, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    return done.stdout, done.stderr


def test_results_and_errors_at_a_prompt(tmp_path):
    out, err = prompt(
        """
        digests = []
        for nproc in (1, 2):
            results = evener.spawn(train, nproc, (0.1, f"run{nproc}"))
            digests += [digest for digest, _, _ in results]
            print("ranks", [rank for _, rank, _ in results])
        print("digests", len(set(digests)))
        try:
            evener.spawn(broken, 2)
        except evener.EvenerError as error:
            print(f"<{error}>")
        try:
            evener.spawn(lambda: os._exit(3) if evener.rank() else evener.comm.barrier(), 2)
        except evener.EvenerError as error:
            print(f"<{error}>")
        """,
        tmp_path,
    )
    assert "ranks [0]" in out and "ranks [0, 1]" in out, out + err
    assert "digests 1" in out and "rank 0 says 2" in out
    assert "<rank 1 of 2 failed: ValueError: boom\n  at <stdin>:" in out
    assert "rank 0 failed as a consequence: " in out
    assert "<rank 1 of 2 ended with exit code 3" in out


def test_ctrl_c_saves_ends_all_ranks_and_leaves_none(tmp_path):
    cell = CELL.replace("epochs=2", "epochs=100_000").replace("exact=True, slice_size=3", 'save_every="10min"')
    code = 'print("go", flush=True)\nevener.spawn(train, 2, (0.1, "run"))\n'
    process = subprocess.Popen(
        [sys.executable, "-c", cell + code], cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, start_new_session=True,
    )  # fmt: skip
    try:
        lines = []
        while not any(line.startswith("update ") for line in lines):
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(line)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) == 2
        process.send_signal(signal.SIGINT)  # to the notebook alone, as Jupyter's stop button
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert "evener: Ctrl-C: stopping 2 ranks" in out and "(SIGINT)" in out, out[-2000:]
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
    assert psutil.wait_procs(ranks, timeout=10)[1] == []


def test_a_killed_notebook_takes_its_ranks_along(tmp_path):
    code = CELL + "evener.spawn(lambda: (print('in', flush=True), time.sleep(600)), 2)\n"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=tmp_path, text=True)
    try:
        assert "in" in process.stdout.readline() and "in" in process.stdout.readline()
        ranks = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert len(ranks) == 2 and psutil.wait_procs(ranks, timeout=20)[1] == []


def test_what_spawn_refuses(monkeypatch):
    lock = threading.Lock()
    cases = {
        "not a NoneType": (None, 2),
        "nproc=0: a whole number": (len, 0),
        "args=5": (len, 2, 5),
        "cannot be called with args=(1,)": (lambda: 0, 2, (1,)),
        "cannot be copied to another process": (lambda: lock, 2),
    }
    for text, given in cases.items():
        with pytest.raises(evener.EvenerError) as error:
            evener.spawn(*given)
        assert text in str(error.value) and "fix:" in str(error.value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(evener.EvenerError, match="inside a job of 2 processes"):
        evener.spawn(lambda: 0, 2)


KERNEL_CELL = """
import evener
def broken():
    if evener.rank() == 1:
        raise ValueError("boom")
try:
    evener.spawn(broken, 2)
except evener.EvenerError as error:
    print(error)
"""


def test_in_a_jupyter_kernel(tmp_path):
    """Also its stop button, and what ranks print in the cell. CI does not install Jupyter (requirements/extra.txt)."""
    pytest.importorskip("ipykernel", reason="requirements/extra.txt is not installed")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from jupyter_client.manager import KernelManager

        manager = KernelManager(kernel_name="python3")
        manager.kernel_spec.argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        manager.start_kernel(cwd=str(tmp_path))
        client = manager.blocking_client()
        client.start_channels()
        client.wait_for_ready(timeout=120)
        said = []

        def hook(message):
            content = message["content"]
            said.append(content.get("text", "") + "\n".join(content.get("traceback", [])))

        def cell(code):
            said.clear()
            client.execute_interactive(code, output_hook=hook, timeout=300)
            return "".join(said)

        try:
            assert cell(CELL) == ""
            out = cell('print([rank for _, rank, _ in evener.spawn(train, 2, (0.1, "run"))])')
            assert "[0, 1]" in out and "rank 0 says 2" in out, out
            out = cell(KERNEL_CELL)
            assert "rank 1 of 2 failed: ValueError: boom" in out and ': raise ValueError("boom")' in out, out
            client.execute("evener.spawn(lambda: time.sleep(600), 2)")
            kernel = psutil.Process(manager.provisioner.pid)
            deadline = time.monotonic() + 60
            while len(kernel.children()) < 2 and time.monotonic() < deadline:
                time.sleep(0.2)
            ranks = kernel.children()
            time.sleep(5)  # until they sleep; earlier is right as well
            manager.interrupt_kernel()
            assert len(ranks) == 2 and psutil.wait_procs(ranks, timeout=60)[1] == []
            deadline = time.monotonic() + 60  # right after an interrupt a kernel drops what comes in
            while "still alive" not in cell("print('still alive')"):
                assert time.monotonic() < deadline
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
