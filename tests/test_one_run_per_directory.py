"""A second run in a directory that is in use is told by whom; a dead holder holds nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

from evener.errors import UsageError
from tests.test_resume_refuses_what_differs import interrupted, start

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.test_resume_refuses_what_differs import start
run = start(Path("."))
print(run.number, flush=True)
input()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no locks there")
def test_the_holder_is_named_and_a_killed_one_is_succeeded(tmp_path):
    interrupted(tmp_path)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    (tmp_path / "train.py").write_text(SCRIPT.format(root=root))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "train.py"], cwd=tmp_path, **pipes) as holder:
        lines = [holder.stdout.readline() for _ in range(3)]
        while lines[-1] and lines[-1] != "4\n":
            lines.append(holder.stdout.readline())
        assert lines[-1] == "4\n", lines
        with pytest.raises(UsageError, match="can be continued") as caught:
            start(tmp_path, resume="must")
        assert f"is in use: its Run was not closed, by process {holder.pid} of {socket.gethostname()}" in str(
            caught.value
        )
        with start(tmp_path) as run:
            assert (run.number, os.path.basename(run.dir)) == (0, "run-2")
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    (tmp_path / "run-2" / "checkpoints").rmdir()
    with start(tmp_path, resume="must") as run:
        assert (run.number, os.path.basename(run.dir)) == (4, "run")
