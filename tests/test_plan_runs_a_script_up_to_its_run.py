"""A captured script runs to its Run and no further; every way not to get there is one clear error."""

from __future__ import annotations

import os
import textwrap

import pytest

from evener.cli import main
from evener.cli.plan import _check_mentions
from evener.errors import EvenerError
from evener.launch.command import shim_path
from evener.plan.captured import Child

RUN = """
    import sys, torch, evener
    from pathlib import Path
    from torch.nn import functional as F

    Path("before").write_text(" ".join(sys.argv[1:]))
    device = "cuda" if "gpu" in sys.argv else "cpu"
    model = torch.nn.Linear(64, 10, device=device)
    rows = torch.randn(100, 64).to(device), torch.randint(10, (100,)).cuda()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    run = evener.Run(model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), rows,
                     global_batch_size=32, max_grad_norm=1.0)
    Path("after").touch()
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def capture(source: str, *args: str, **words: object) -> Child:
        (tmp_path / "train.py").write_text(textwrap.dedent(source))
        return Child(["train.py", *args], shim=shim_path(), **{"seconds": 300.0, **words})

    return capture


def test_it_stops_in_run_and_tells_what_run_was_given(child, tmp_path):
    with child(RUN, "gpu", "--lr", overrides={"microbatch_size": 8}) as one:
        told = one.captured
    assert (told.global_batch_size, told.rows, told.row_bytes) == (32, 100, 64 * 4 + 8)
    assert (told.parameters, told.parameter_bytes, told.optimizers) == (650, 2600, ("AdamW",))
    assert told.given["microbatch_size"] == {"value": 8, "origin": "flag"}
    assert told.asked("max_grad_norm") == 1.0 and told.asked("strategy") is None
    assert told.process_bytes > 50 << 20
    # "cuda" was taken for the CPU, and the lines that said it are told
    assert told.on_cpu == ("train.py:8", "train.py:9", "train.py:10")
    assert (tmp_path / "before").read_text() == "gpu --lr"
    assert not (tmp_path / "after").exists() and not (tmp_path / "runs").exists()


def failing(child, source, *args, **words) -> str:
    with pytest.raises(EvenerError) as error, child(source, *args, **words):
        pass
    return str(error.value)


def test_a_script_without_a_run(child):
    text = failing(child, "print('done')")
    assert "ended without constructing an evener.Run" in text and "  done" in text


def test_a_script_that_never_mentions_evener_is_refused_before_it_runs(tmp_path, capsys):
    script = tmp_path / "old.py"
    (tmp_path / "port.py").write_text("import evener")  # of no concern: old.py does not import it
    script.write_text("import os, parts\nopen('ran', 'w')")
    assert main(["plan", "--cpu", str(script)]) == 1
    text = capsys.readouterr().err
    assert "neither it nor what it imports from beside it mentions evener. Nothing was run." in text
    assert f"evener lint {script}" in text and "docs/migrate/" in text and not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "line", ["import parts.training", "from parts import training", "from parts.training import fit", "import parts"]
)
def test_what_a_script_imports_from_beside_it_may_make_the_run(tmp_path, line):
    (tmp_path / "old.py").write_text(line)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "__init__.py").write_text("from .training import fit" if line == "import parts" else "")
    (tmp_path / "parts" / "training.py").write_text("from deep import fit")
    (tmp_path / "deep.py").write_text("import evener\n\n\ndef fit(): ...")
    _check_mentions(str(tmp_path / "old.py"))


CASES = {
    "name = input('name? ')": ("asks for input before its Run", "train.py:1: name = input"),
    "import torch\ntorch.cuda.set_device(0)": ("needs a GPU before its Run", "train.py:2: torch.cuda.set_device(0)"),
    "x = 1\nx / 0": ("failed before its Run", "ZeroDivisionError: division by zero", "train.py:2: x / 0"),
    "import os\nprint('going')\nos.abort()": ("SIGABRT ended its process", "going", "Fatal Python error: Aborted"),
    "raise SystemExit(3)": ("ended with exit code 3",),
    "import evener\nevener.Run(1, 2, 3, [1], global_batch_size=2, stategy='ddp')": ("Run has no keyword 'stategy'",),
    RUN.replace("optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1])", "optimizer, None"): (
        "which loss belongs to",
    ),
    "x = (": ("failed before its Run", "SyntaxError", "train.py:1"),
}


@pytest.mark.full
@pytest.mark.parametrize("source", CASES, ids=lambda source: source.splitlines()[-1][:30])
def test_every_other_end(child, source):
    text = failing(child, source)
    for part in CASES[source]:
        assert part in text, text
    assert "Traceback" not in text


@pytest.mark.full
def test_a_script_that_takes_too_long_is_ended(child):
    one = child("import time\ntime.sleep(600)", seconds=3.0)  # too short for the imports alone
    with pytest.raises(EvenerError) as error, one:
        pass
    assert "not reached its Run after 3 s" in str(error.value) and "--timeout" in str(error.value)
    assert one.process.poll() is not None and not os.path.exists(one.folder)
