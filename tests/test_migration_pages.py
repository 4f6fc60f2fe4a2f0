"""The pages of docs/migrate: every block runs, before and after, on one and two processes, and it is the same training."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evener

PAGES = Path(__file__).parents[1] / "docs" / "migrate"
BLOCK = re.compile(r"^## (.*?)\n\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = ("apex", "dataparallel", "lightning")  # a difference in place of whole scripts
SCRIPTS = {
    page.stem: dict(BLOCK.findall(page.read_text(encoding="utf-8")))
    for page in sorted(PAGES.glob("*.md"))
    if page.stem not in SHORT
}
CASES = [
    ("pytorch", "Before: one process", 1),
    ("pytorch", "Before: DDP, with accumulation", 1),
    ("pytorch", "Before: DDP, with accumulation", 2),
    ("accelerate", "Before", 1),
    ("accelerate", "Before", 2),
    ("fabric", "Before", 1),
    ("fabric", "Before", 2),
    ("pytorch", "After", 1),
    ("pytorch", "After", 2),
]


def printed(folder, script, nproc):
    """(lines without numbers, numbers) that the script prints, with its rows in their own order."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(script.replace("shuffle=True", "shuffle=False"))
    (folder / "evener.toml").write_text('order = "sequential"\n')
    command = ["-m", "evener", "run", "--cpu", "--nproc", str(nproc), "train.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(?:\[rank0\] )?((?:epoch|accuracy) .*)$", done.stdout, re.MULTILINE)
    return found, done.stdout


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What the plain loop on one process prints."""
    return printed(tmp_path_factory.mktemp("plain") / "run", SCRIPTS["pytorch"]["Before: one process"], 1)[0]


@pytest.mark.parametrize(
    "page, title, nproc",
    # Every block on two processes; on one as well in `make test-all`.
    [pytest.param(*case, marks=[] if case[2] == 2 else pytest.mark.full) for case in CASES[1:]],
    ids=[f"{page}-{title}-{nproc}" for page, title, nproc in CASES[1:]],
)
def test_the_same_training(tmp_path, reference, page, title, nproc):
    found, output = printed(tmp_path / "run", SCRIPTS[page][title], nproc)
    assert len(found) == len(reference) == 4, output

    def numbers(lines):
        return [float(one) for line in lines for one in re.findall(r"\d+\.\d+", line)]

    assert numbers(found) == pytest.approx(numbers(reference), rel=1e-5, abs=2e-6), output
    if title == "After":
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))


def test_every_page_ends_in_the_same_script_and_no_block_is_left_out():
    assert {page for page, _, _ in CASES} == set(SCRIPTS)
    assert len({scripts["After"] for scripts in SCRIPTS.values()}) == 1
    shown = {(page, title) for page, scripts in SCRIPTS.items() for title in scripts}
    assert shown - {("accelerate", "After"), ("fabric", "After")} == {(page, title) for page, title, _ in CASES}


@pytest.mark.parametrize("page", SHORT)
def test_what_a_short_page_ends_in_trains(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EVENER_PLAN", raising=False)
    (difference,) = re.findall(r"^```diff\n(.*?)^```$", (PAGES / f"{page}.md").read_text("utf-8"), re.M | re.S)
    after = "".join(line[1:] or "\n" for line in difference.splitlines(keepends=True) if line[0] != "-")
    model = torch.nn.Linear(8, 4)
    train = torch.randn(64, 8), torch.randint(4, (64,))
    names = {"torch": torch, "F": torch.nn.functional, "evener": evener, "model": model, "module": model}
    names |= {"train": train, "validation": train, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    names["loss_fn"] = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    before = model.weight.detach().clone()
    (tmp_path / "after.py").write_text(after, encoding="utf-8")
    run = runpy.run_path("after.py", names)["run"]
    run.close()
    assert run.number == 10 and not torch.equal(before, model.weight)


@pytest.mark.parametrize("page, title", [(page, title) for page, title, _ in CASES if title != "After"])
def test_about_fifteen_lines_are_new(page, title):
    before, after = SCRIPTS[page][title].splitlines(), SCRIPTS[page]["After"].splitlines()
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    assert len(new) <= 17, new
    assert len(after) < len(before) or "one process" in title


def test_weights_that_accelerate_saved_are_taken(tmp_path):
    from accelerate import Accelerator

    model = torch.nn.Linear(4, 3)
    Accelerator(cpu=True).save_model(model, tmp_path / "model")
    again = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    data = torch.randn(8, 4)
    with evener.Run(
        again,
        optimizer,
        lambda m, b: m(b).sum(),
        data,
        global_batch_size=4,
        dir=tmp_path / "run",
        weights=tmp_path / "model",
    ):
        assert torch.equal(again.weight, model.weight)
