"""`evener verify` on healthy scripts: what is equal to the bit, what is close, what cannot be compared; and its errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from evener.cli import main
from evener.cli.verify import as_json, table
from evener.errors import UsageError
from evener.launch.command import Request
from evener.verify import compare
from evener.verify.proof import GROUPS, Proof
from evener.verify.start import Starter

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = ("--length", "16", "--width", "16", "--layers", "1", "--heads", "2")
SCRIPT = """
import sys
import torch, evener
from torch.nn import functional as F

def loss_fn(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)

evener.seed(0)
x = torch.randn(28, 6)
norm = torch.nn.BatchNorm1d(8) if "batchnorm" in sys.argv else torch.nn.Identity()
model = torch.nn.Sequential(torch.nn.Linear(6, 8), norm, torch.nn.Dropout(0.3), torch.nn.Linear(8, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = lambda optimizer, updates: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, updates)
data = (x, x.argmax(1) % 3)
with evener.Run(model, optimizer, loss_fn, data, global_batch_size=12, scheduler=schedule, ema=0.9) as run:
    for epoch in run.epochs(4):
        for update in epoch:
            run.state["trail"] = [*run.state.get("trail", []), update.loss]
        run.evaluate(data)
"""


@pytest.fixture(scope="module")
def starter():
    one = Starter(launcher=False, seconds=240)
    yield one
    one.close()


@pytest.fixture
def prove(starter, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def prove(script, *args, groups=GROUPS, worlds=(1, 2), updates=4, **overrides):
        path = script
        if isinstance(script, str):
            path = tmp_path / "train.py"
            path.write_text(script)
        request = Request(str(path), args=tuple(args), overrides=overrides)
        proof = Proof(request, starter, str(tmp_path / "work"), updates, worlds, groups)
        return list(proof.checks()), proof

    return prove


def results(checks):
    assert all(check.holds for check in checks), [check for check in checks if not check.holds]
    return {check.name: check.result for check in checks}


def test_exact_mode_is_equal_to_the_bit_in_every_check(prove):
    """BatchNorm, dropout, a schedule, an average of the weights, evaluations, values of run.state."""
    checks, proof = prove(SCRIPT, "batchnorm", updates=5, exact=True)
    assert set(results(checks).values()) == {"bit-equal"}
    assert list(results(checks)) == [
        "the same again",
        "rows and order asked again",
        "out of memory in the middle",
        "2 processes",
        "killed in update 2, resumed",
        "killed in update 3, resumed",
        "newest checkpoint corrupted",
        "killed on 2 processes, resumed on 2",
        "killed on 2 processes, resumed on 1",
        "evaluate left out",
    ]
    assert {check.max_abs_difference for check in checks} == {0.0, None}
    assert set(proof.not_checked) == {"another microbatch"}


def test_dropout_in_fast_mode_is_said_to_be_one_distribution_only(prove):
    checks, proof = prove(SCRIPT, groups=("microbatch", "world"))
    assert results(checks) == {
        "2 processes, random layers as they are": "different",
        "microbatches of 4": "close",
        "2 processes": "close",
    }
    assert "only its distribution is promised" in proof.note and "in fp32" in proof.note
    first = checks[0]
    assert first.demanded == "one distribution" and "as promised" in first.note and first.max_abs_difference > 1e-4
    assert all(0 < check.max_abs_difference < 1e-4 for check in checks[1:])


@pytest.mark.parametrize(
    "name, args",
    [
        pytest.param("digits.py", ("--batch", "48"), marks=pytest.mark.full),
        ("gpt.py", (*SMALL, "--batch", "6", "--updates", "6")),
        pytest.param("gan.py", (), marks=pytest.mark.full),
    ],
)
def test_the_examples_hold(prove, name, args):
    checks, _ = prove(EXAMPLES / name, *args, groups=("microbatch", "world", "evaluate"), updates=3)
    found = results(checks)
    assert found.pop("evaluate put in", "bit-equal") == "bit-equal"
    assert found.pop("2 processes, random layers as they are", "different") == "different"  # the GAN draws its noise
    assert set(found.values()) <= {"close", "bit-equal"} and "2 processes" in found


@pytest.mark.full
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("name, args", [("digits.py", ()), ("gpt.py", SMALL)])
def test_the_examples_hold_in_every_check_through_the_launcher_too(tmp_path, name, args):
    done = verify(tmp_path, "--json", "--nproc", "1,2,3", EXAMPLES / name, *args, seconds=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(json.loads(done.stdout)["checks"]) >= 10


def verify(folder, *words, seconds=400):
    return subprocess.run(
        [sys.executable, "-m", "evener", "verify", *map(str, words)],
        cwd=folder, capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)},
    )  # fmt: skip


def left_in(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("torchinductor_"))  # torch's own


def test_the_command_prints_its_contract_and_leaves_nothing(tmp_path):
    """The same again and two processes go through the real launcher here."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = verify(
        tmp_path,
        "--json",
        "--set",
        "exact=true",
        "--nproc",
        "1,2",
        "--updates",
        3,
        "--only",
        "repeat,world",
        "train.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    assert printed["promise_holds"] is True
    assert [(one["name"], one["result"], one["max_abs_difference"], one["blame"]) for one in printed["checks"]] == [
        ("the same again", "bit-equal", 0.0, []),
        ("2 processes", "bit-equal", 0.0, []),
    ]
    assert "the same again: bit-equal" in done.stderr
    assert left_in(tmp_path) == ["train.py"]


def test_a_script_that_fails_is_told_so_with_its_line(prove):
    checks, proof = prove("import torch\n\nraise ValueError('no data here')\n")
    assert [(check.name, check.result, check.holds) for check in checks] == [("uninterrupted", "failed", False)]
    assert "ValueError: no data here" in checks[0].blame[0]["text"] and "train.py:3" in checks[0].blame[0]["text"]
    assert as_json(checks, proof.not_checked)["promise_holds"] is False
    assert "the promise does not hold: 1 of 1 checks" in table(checks, {})


TRAINS_BY_ITSELF = """
import torch
from torch.nn.parallel import DistributedDataParallel
torch.distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("script", ["print('nothing to see')\n", TRAINS_BY_ITSELF], ids=["ends", "trains"])
def test_a_script_without_a_run_is_told_so_at_once(prove, script):
    """No promise is broken, and nobody waits until the time of the trial is over."""
    with pytest.raises(UsageError, match=r"has no evener\.Run") as caught:
        prove(script)
    assert (
        caught.value.exit_code == 2 and "evener.Run(model" in str(caught.value) and "evener lint" in str(caught.value)
    )


def test_a_run_that_is_asked_for_nothing_is_told_so(prove):
    with pytest.raises(UsageError, match=r"asks its evener\.Run for no update"):
        prove(SCRIPT.replace("for epoch in run.epochs(4):", "for epoch in ():"))


def test_a_short_script_is_compared_as_far_as_it_goes(prove):
    script = SCRIPT.replace("run.epochs(4)", "run.epochs(1)").replace(
        "x = torch.randn(28, 6)", "x = torch.randn(20, 6)"
    )
    checks, proof = prove(script, groups=("repeat", "resume"))
    assert results(checks) == {"the same again": "bit-equal"}
    assert proof.not_checked["killed and resumed"] == "the script makes 2 batches; 4 are needed"


@pytest.mark.parametrize(
    "words, text",
    [
        ([], "which script?"),
        (["nowhere.py"], "There is no script nowhere.py"),
        (["--only", "resum", __file__], '--only="resume"'),
        (["--nproc", "0,2", __file__], "--nproc 0,2: not numbers of processes"),
        (["--updates", "some", __file__], "--updates some: not a whole number, at least 1"),
        (["--keep", "/proc/evener", __file__], "--keep /proc/evener"),
        (["--update", "3", __file__], "--update is not an option of `evener verify`"),
    ],
)
def test_a_wrong_option_is_one_line_with_its_fix(capsys, words, text):
    assert main(["verify", *words]) == 2
    assert text in capsys.readouterr().err


def test_ctrl_c_ends_everything_it_started(tmp_path):
    (tmp_path / "train.py").write_text("import time\nopen('started', 'w').close()\ntime.sleep(600)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "evener", "verify", "train.py"],
        cwd=tmp_path, stderr=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    with process:
        deadline = time.monotonic() + 120
        while not (tmp_path / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 2  # the server and a rank
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert left_in(tmp_path) == ["started", "train.py"]


def trace(folder, gradient, loss=1.0, lr=0.1):
    import numpy
    from safetensors.numpy import save_file

    folder.mkdir()
    there = {"state": {"parameter w": "a"}, "run.state": {}, "user": {}, "generators": {}, "ranks_differ": {}}
    update = {"lr": lr, "loss": loss, "skipped": False}
    batch = {"batch": 0, "cursor": [0, 0], "ids": [3, 1], "rows": [[0, "x", "x"], [1, "y", "y"]], "updates": [update]}
    lines = [
        {"kind": "begin", "batch": 0, "precision": "fp32", **there},
        {"kind": "batch", **batch, "gradient": {"w": str(gradient)}, **there},
        {"kind": "end"},
    ]
    (folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tensors = {"parameter w": numpy.zeros(2, "float32"), "gradient w": numpy.array([1.0, gradient], "float32")}
    save_file(tensors, folder / "tensors-1.safetensors")
    return compare.Trace.read(str(folder))


@pytest.mark.parametrize("off, result", [(0.0, "bit-equal"), (5e-6, "close"), (3e-5, "different")])
def test_close_is_what_its_tolerance_says(tmp_path, off, result):
    found = compare.compare(trace(tmp_path / "one", 0.5), trace(tmp_path / "two", 0.5 + off), "close")
    assert found.result == result
    assert [finding.what for finding in found.findings] == (["gradient w"] if result == "different" else [])


def test_a_trace_that_was_cut_off_is_read_up_to_there(tmp_path):
    whole = trace(tmp_path / "one", 0.5)
    path = tmp_path / "one" / "trace.jsonl"
    path.write_text(path.read_text()[:-5])
    again = compare.Trace.read(whole.folder)
    assert again.batches == whole.batches and again.end is None
