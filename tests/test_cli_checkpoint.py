"""`evener checkpoint ls | verify | export` on the checkpoints of a real run."""

from __future__ import annotations

import json
import random
import subprocess
import sys

import pytest
import safetensors.torch
import torch

import evener
from evener.checkpoint.__main__ import main as act
from evener.cli.checkpoint import parser
from tests.models import make, mlp_rows, row_loss


def main(argv):
    return act(vars(parser().parse_args(argv)))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evener.Run(
        model, optimizer, row_loss, mlp_rows(36), global_batch_size=6, save_every=4, ema=0.9, dir=folder
    ) as run:
        for update in run.updates(updates=10):
            if update.number == 5:
                run.save("best")
        run.export(folder.parent / "run.safetensors")
        run.export(folder.parent / "ema.safetensors", model=run.ema)
    return folder


def test_ls_names_what_is_there(run_dir, capsys):
    assert main(["ls", str(run_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["checkpoint", "update", "bytes", "torch"]
    assert {line.split()[0]: line.split()[1] for line in lines[1:]} == {
        "update-4": "4", "update-8": "8", "update-10": "10", "best": "6"
    }  # fmt: skip
    assert all(line.split()[3] == torch.__version__ for line in lines[1:])


def test_ls_as_json_is_a_list_of_rows(run_dir, capsys):
    assert main(["ls", str(run_dir / "checkpoints" / "best"), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["update"], row["problem"]) == ("best", 6, None)
    files = list((run_dir / "checkpoints" / "best").iterdir())
    assert row["bytes"] == sum(path.stat().st_size for path in files)


def test_verify_names_the_one_with_a_flipped_bit_and_fails(run_dir, capsys, test_seed):
    assert main(["verify", str(run_dir)]) == 0
    assert "REFUSED" not in capsys.readouterr().out
    path = run_dir / "checkpoints" / "update-8" / "tensors-00001.safetensors"
    whole = path.read_bytes()
    torn = bytearray(whole)
    torn[random.Random(test_seed).randrange(len(torn))] ^= 4
    path.write_bytes(torn)
    try:
        assert main(["verify", str(run_dir)]) == 1
        lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
        assert "REFUSED" in lines["update-8"] and "is corrupt" in lines["update-8"]
        assert all("whole" in lines[name] for name in ("update-4", "update-10", "best"))
        assert main(["verify", str(run_dir), "--json"]) == 1
        rows = {row["name"]: row["whole"] for row in json.loads(capsys.readouterr().out)}
        assert rows == {"update-4": True, "update-8": False, "update-10": True, "best": True}
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize(("flags", "same"), [([], "run.safetensors"), (["--ema"], "ema.safetensors")])
def test_export_writes_what_the_run_exports(run_dir, tmp_path, capsys, flags, same):
    assert main(["export", str(run_dir), str(tmp_path / "w.safetensors"), *flags]) == 0
    assert "update-10" in capsys.readouterr().out
    ours = safetensors.torch.load_file(tmp_path / "w.safetensors")
    theirs = safetensors.torch.load_file(run_dir.parent / same)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    make("mlp").load_state_dict(ours)


@pytest.mark.parametrize(
    ("argv", "code", "text"),
    [
        (["ls", "nowhere"], 2, "there is no directory nowhere.\n  fix: give a run directory, its checkpoints folder"),
        (["ls", "RUNS/digts"], 2, "digts.\n  fix: RUNS/digits"),
        (["verify", "RUNS/other"], 2, "other.\n  fix: RUNS/digits"),
        (["ls", "."], 2, "holds no checkpoint"),
        (["export", "RUN", "w.pt"], 2, "export() writes safetensors, not 'w.pt'.\n  fix: \"w.safetensors\""),
        (["export", "RUN", "w.safetensors", "--model", "g"], 2, "there is no model 'g'"),
    ],
)
def test_mistakes_are_one_clear_error(run_dir, tmp_path, monkeypatch, capsys, argv, code, text):
    monkeypatch.chdir(tmp_path)
    words = [str(run_dir) if word == "RUN" else word.replace("RUNS", str(run_dir.parent)) for word in argv]
    assert main(words) == code
    assert text.replace("RUNS", str(run_dir.parent)) in capsys.readouterr().err


def test_a_missing_word_is_one_clear_error(capsys):
    from evener.cli import main as command

    assert command(["checkpoint"]) == 2
    assert "the following arguments are required: ls | verify | export" in capsys.readouterr().err


def test_the_verb_is_a_process_with_torch_of_its_own(run_dir):
    done = subprocess.run(
        [sys.executable, "-m", "evener", "checkpoint", "ls", str(run_dir)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "update-10" in done.stdout, done.stderr


@pytest.mark.parametrize("words", [[], ["ls"], ["verify"], ["export"]], ids=lambda one: "".join(one) or "itself")
def test_every_help_has_an_example(words, capsys):
    from evener.cli.checkpoint import parser

    with pytest.raises(SystemExit):
        parser().parse_args([*words, "--help"])
    assert f"  evener checkpoint {words[0] if words else 'ls'} runs/digits" in capsys.readouterr().out
