"""The shim alone, without an agent: a script runs as under `python`, and its end is recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.launch.command import shim_path

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the shim is POSIX")


class Ran:
    def __init__(self, code: int, record: dict, log: str) -> None:
        self.code, self.record, self.log = code, record, log

    @property
    def ended(self) -> dict:
        return self.record["ended"]


@pytest.fixture
def shim(tmp_path):
    """`shim(source, *args)` runs a script under the shim, as rank 1 of a launcher that is this test's parent."""

    def start(source: str, *args: str, supervisor: int | None = None, cpus: object = None, **environ: str) -> Ran:
        (tmp_path / "script.py").write_text(source)
        job = {"supervisor": os.getppid() if supervisor is None else supervisor, "logs": str(tmp_path), "console": {}}
        job |= {} if cpus is None else {"cpus": cpus}
        (tmp_path / "job.json").write_text(json.dumps(job))
        words = [sys.executable, "-u", shim_path(), "job.json", "script.py", *args]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env={**os.environ, "RANK": "1", "LOCAL_RANK": "1", **environ},
            capture_output=True,
            timeout=60,
        )
        assert done.stdout == done.stderr == b"", "everything goes to the rank's log"
        record, log = tmp_path / "rank1.json", tmp_path / "rank1.log"
        return Ran(
            done.returncode,
            json.loads(record.read_text()) if record.exists() else {},
            log.read_text() if log.exists() else "",
        )

    return start


def plain(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )


SAME = {
    "exception": "def f():\n    return 1 / 0\n\nprint('before')\nf()\n",
    "chained": "try:\n    {}['a']\nexcept KeyError as e:\n    raise RuntimeError('no') from e\n",
    "syntax error": "x = 1\nif x\n    pass\n",
    "exit without a code": "import sys\nsys.exit()\n",
    "exit code": "import sys\nsys.exit(3)\n",
    "exit text": "import sys\nsys.exit('cannot go on')\n",
    "own hook": "import sys\nsys.excepthook = lambda t, v, tb: print('hook', t.__name__, v, tb.tb_lineno)\nraise ValueError(1)\n",
    "hard exit": "import os\nos._exit(4)\n",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])\n",
    "exit handlers and threads": (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "raise OSError('x')\n"
    ),
    "main guard, annotations, latin-1": "# -*- coding: latin-1 -*-\nx: int = 1\nif __name__ == '__main__':\n    print(x)\n",
}


@pytest.mark.parametrize("source", SAME.values(), ids=SAME.keys())
def test_output_and_exit_code_are_those_of_python(shim, tmp_path, source):
    ours, theirs = shim(source), plain(tmp_path)
    assert ours.log == theirs.stdout
    assert ours.code == theirs.returncode


def test_an_exception_is_recorded_with_the_users_own_line(shim, tmp_path):
    source = "import json\n\ndef read():\n    return json.loads('{')\n\nread()\n"
    ran = shim(source)
    assert ran.code == 1 and ran.ended["how"] == "exception" and ran.ended["code"] == 1
    (error,) = ran.ended["errors"]
    assert error["type"] == "JSONDecodeError" and error["module"] == "json.decoder"
    # Raised inside the standard library: the line to look at is the script's.
    expected = {"file": str(tmp_path / "script.py"), "line": 4, "function": "read", "text": "return json.loads('{')"}
    assert error["where"] == expected
    assert "shim.py" not in error["traceback"] and "script.py" in error["traceback"]
    assert ran.ended["monotonic_ns"] > 0 and ran.record["pid"] > 0


@pytest.mark.parametrize(
    "source, how, code",
    [
        ("print(1)", "finished", 0),
        ("raise SystemExit(258)", "exit", 2),
        ("raise SystemExit('text')", "exit", 1),
        ("import os; os._exit(0)", None, 0),
    ],
)
def test_how_it_ended_is_recorded(shim, source, how, code):
    ran = shim(source)
    assert ran.code == code
    assert ran.record.get("ended", {}).get("how") == how
    if how is not None:
        assert ran.ended["code"] == code


def test_the_record_is_written_before_any_cleaning_up(shim):
    """Exit handlers may hang in a collective: by then the record must be on disk."""
    ran = shim(
        "import atexit, json\n"
        "def last():\n"
        "    print(json.load(open('rank1.json'))['ended']['errors'][0]['message'])\n"
        "atexit.register(last)\n"
        "raise ValueError('the cause')\n"
    )
    assert ran.log.splitlines()[-1] == "the cause"


def test_the_first_error_is_kept_when_cleaning_up_fails_too(shim):
    ran = shim("try:\n    raise ValueError('first')\nfinally:\n    raise RuntimeError('second')\n")
    assert [error["message"] for error in ran.ended["errors"]] == ["second", "first"]


def test_an_interrupted_script_ends_by_the_signal_and_without_a_traceback(shim):
    ran = shim("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    assert ran.code == -2 and ran.log == "" and ran.ended["how"] == "interrupted"


def test_an_error_of_evener_has_its_own_exit_code(shim):
    ran = shim(
        "from evener.errors import NonFiniteError\nraise NonFiniteError('10 updates in a row were not finite.')\n"
    )
    assert ran.code == 66 and "10 updates in a row" in ran.log and ran.ended["errors"][0]["type"] == "NonFiniteError"


def test_a_forked_child_that_fails_is_not_the_rank(shim):
    ran = shim("import os\nif os.fork() == 0:\n    raise ValueError('child')\nos.wait()\n")
    assert ran.code == 0 and ran.ended["how"] == "finished"


@pytest.mark.skipif(sys.platform != "linux", reason="parent-death signals are Linux's")
def test_it_does_not_start_when_its_launcher_is_gone(shim):
    ran = shim("print('ran')", supervisor=os.getpid())  # as if this process had been the agent's parent
    assert ran.code == 1 and ran.log == "" and ran.record == {}


def test_a_link_finds_modules_beside_its_target_as_python_does(shim, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "beside.py").write_text("value = 5\n")
    (tmp_path / "real" / "code.py").write_text("import beside, sys\nprint(beside.value, __file__, sys.argv)\n")
    (tmp_path / "script.py").symlink_to(tmp_path / "real" / "code.py")
    theirs = plain(tmp_path)
    ours = shim((tmp_path / "real" / "code.py").read_text())  # writes through the link
    assert theirs.returncode == 0 and ours.log == theirs.stdout


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="binding to CPUs is Linux's")
def test_a_rank_and_its_children_run_on_the_cpus_that_were_chosen(shim):
    mine = sorted(os.sched_getaffinity(0))[-1]
    source = "import os, subprocess, sys\nprint(os.sched_getaffinity(0), flush=True)\n"
    source += "subprocess.run([sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'])\n"
    assert shim(source, cpus=[[0], [mine]]).log.splitlines() == [f"{{{mine}}}"] * 2
    everywhere = {*os.sched_getaffinity(0)}
    assert shim(source, cpus=[]).log.splitlines()[2:] == [str(everywhere)] * 2, "the log goes on"
