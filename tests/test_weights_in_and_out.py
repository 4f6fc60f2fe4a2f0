"""Weights of others come in, ours go out: real files of accelerate and Lightning, prefixes, ties, and what is refused."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from evener.checkpoint import export, load_weights, save, store
from evener.dist.blank import blank
from evener.errors import CheckpointError, UsageError


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


class Tied(torch.nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


FOREIGN = """
import sys, torch
sys.path.insert(0, ".")
from tests.test_weights_in_and_out import net
out = sys.argv[1]
import accelerate, lightning
for safe in (True, False):
    accelerator = accelerate.Accelerator(cpu=True)
    model = net(1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    model.eval()
    model(torch.ones(2, 4)).sum().backward()
    accelerator.save_state(f"{out}/accelerate-{safe}", safe_serialization=safe)
accelerator.save_model(model, f"{out}/sharded", max_shard_size=60)

class Lit(lightning.LightningModule):
    def __init__(self, hidden=3, more=None):
        super().__init__()
        self.model = net(1)
        if more is not None:
            self.save_hyperparameters()
    def training_step(self, batch, i):
        return self.model(batch).sum()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.0, weight_decay=0.0)

import argparse
for name, lit in {"plain": Lit(), "hyper": Lit(more=argparse.Namespace(depth=2))}.items():
    trainer = lightning.Trainer(max_steps=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
                                accelerator="cpu", devices=1, default_root_dir=out, enable_checkpointing=False)
    trainer.fit(lit, torch.utils.data.DataLoader(torch.ones(4, 4), batch_size=2))
    trainer.save_checkpoint(f"{out}/{name}.ckpt")
torch.save(lit.model.state_dict(), f"{out}/trained.pt")
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    command = [sys.executable, "-W", "ignore", "-c", FOREIGN, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_an_accelerate_checkpoint_is_read(foreign):
    for safe, name in ((True, "model.safetensors"), (False, "pytorch_model.bin")):
        model = net(2)
        notes = load_weights(model, foreign / f"accelerate-{safe}")
        assert equal(model, net(1)) and notes == [f"weights from {foreign / f'accelerate-{safe}' / name}"]


def test_a_sharded_directory_and_its_index_are_read(foreign):
    assert len([name for name in os.listdir(foreign / "sharded") if name.endswith(".safetensors")]) > 1
    for path in (foreign / "sharded", foreign / "sharded" / "model.safetensors.index.json"):
        model = net(2)
        load_weights(model, path)
        assert equal(model, net(1))


def test_a_lightning_checkpoint_is_read_and_what_was_taken_is_said(foreign):
    model, trained = net(2), net(3)
    notes = load_weights(model, foreign / "plain.ckpt")
    load_weights(trained, foreign / "trained.pt")
    assert equal(model, trained)
    assert notes == ['weights from "state_dict"', "model. taken off the 9 names in the file"]


def test_a_lightning_checkpoint_that_needs_a_pickle_is_refused_with_the_safe_way(foreign, tmp_path):
    model = net(2)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, foreign / "hyper.ckpt")
    text = str(caught.value)
    assert "it is not read, because unpickling it can run any code" in text and "argparse.Namespace" in text
    assert equal(model, net(2))
    # the advice works as printed
    lines = text[text.index("with torch.serialization") :].splitlines()
    code = f"import argparse, torch\n{lines[0]}\n    {lines[1].strip()}\n"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    load_weights(model, tmp_path / "weights.pt")


def test_a_pickle_that_would_run_code_does_not(tmp_path):
    class Attack:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/marker",))

    torch.save({"state_dict": {"w": torch.zeros(1)}, "x": Attack()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Attack()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(CheckpointError, match="more than tensors in it"):
            load_weights(net(), tmp_path / name)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        *((one, one) for one in ("module.", "_orig_mod.", "model.")),
        ("module._orig_mod.", "_orig_mod. and module."),
        ("_orig_mod.module.model.", "_orig_mod. and module. and model."),
    ],
)
def test_a_prefix_that_all_names_have_is_taken_off_and_said(tmp_path, prefix, said):
    model = net(2)
    save_file({prefix + name: value for name, value in net(1).state_dict().items()}, tmp_path / "w.safetensors")
    notes = load_weights(model, tmp_path / "w.safetensors")
    assert equal(model, net(1)) and notes == [f"{said} taken off the 9 names in the file"]


def test_a_prefix_that_belongs_to_the_model_stays(tmp_path):
    model, other = torch.nn.ModuleDict({"model": net(1)}), torch.nn.ModuleDict({"model": net(2)})
    export(model, tmp_path / "w.safetensors")
    assert load_weights(other, tmp_path / "w.safetensors") == [] and equal(model, other)
    inner = {name.replace("model.0", "model._orig_mod.0"): value for name, value in model.state_dict().items()}
    save_file(inner, tmp_path / "w.safetensors")
    assert load_weights(other, tmp_path / "w.safetensors") == ["_orig_mod. taken off the 9 names in the file"]
    other["model"][2] = torch.compile(other["model"][2], backend="eager")  # the model has the wrapper, the file not
    export(model, tmp_path / "w.safetensors")
    assert load_weights(other, tmp_path / "w.safetensors") == []


@pytest.mark.parametrize("nest", [None, "model", "state_dict", "model_state_dict"])
@pytest.mark.parametrize("old", [True, False])
def test_a_state_dict_of_a_script_is_read(tmp_path, nest, old):
    trained = net(1).state_dict()
    content = trained if nest is None else {nest: trained, "optimizer": {"lr": 0.1}, "epoch": 3}
    torch.save(content, tmp_path / "w.pth", _use_new_zipfile_serialization=not old)
    model = net(2)
    notes = load_weights(model, tmp_path / "w.pth")
    assert equal(model, net(1)) and notes == ([f'weights from "{nest}"'] if nest else [])


def test_weights_come_from_our_own_checkpoints(tmp_path):
    save(tmp_path / "c", model=net(1), extra={})
    store.write(tmp_path / "d", {"engine": {"model": net(1).state_dict(), "number": 3}}, about={})
    for name, way in (("c", "model"), ("d", "engine.model")):
        model = net(2)
        assert load_weights(model, tmp_path / name) == [f'weights from "{way}"'] and equal(model, net(1))


def test_what_does_not_fit_is_one_error_and_nothing_is_loaded(tmp_path):
    names = net(1).state_dict()
    names["0.weight"] = torch.zeros(4, 4)
    names["1.weight"] = names["1.weight"].to(torch.complex64)
    del names["2.weight"], names["2.bias"]
    names |= {f"extra.{i}": torch.zeros(1) for i in range(8)}
    save_file(names, tmp_path / "w.safetensors")
    model = net(2)
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    assert str(caught.value).splitlines()[:4] == [
        f"{tmp_path}/w.safetensors does not fit the model: 2 missing, 8 not in the model, 2 of another shape.",
        "  missing: 2.weight, 2.bias",
        "  not in the model: extra.0, extra.1, extra.2, extra.3, extra.4 and 3 more",
        "  of another shape: 0.weight is (4, 4), in the model (3, 4), 1.weight is complex, in the model real",
    ]
    assert equal(model, net(2))


def test_another_dtype_is_converted_and_said(tmp_path):
    export(net(1), tmp_path / "w.safetensors")
    model = net(2).bfloat16()
    notes = load_weights(model, tmp_path / "w.safetensors")
    assert equal(model, net(1).bfloat16())
    assert notes == ["converted from float32 to bfloat16: 0.weight, 0.bias, 1.weight and 5 more"]


def test_tied_weights_go_out_under_every_name_and_come_in_under_any(tmp_path):
    model = Tied(1)
    export(model, tmp_path / "w.safetensors")
    loaded = load_file(tmp_path / "w.safetensors")
    assert set(loaded) == {"embed.weight", "head.weight"}
    model.load_state_dict(loaded)
    save_file({"head.weight": Tied(1).embed.weight.detach()}, tmp_path / "one.safetensors")
    for name, notes in {
        "w": [],
        "one": ["not in the file, taken from its twin: embed.weight (tied to head.weight)"],
    }.items():
        other = Tied(2)
        assert load_weights(other, tmp_path / f"{name}.safetensors") == notes
        assert other.head.weight is other.embed.weight and torch.equal(other.embed.weight, Tied(1).embed.weight)
    save_file({"head.weight": torch.zeros(5, 4), "embed.weight": torch.ones(5, 4)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="differ, but are one tensor in the model"):
        load_weights(Tied(2), tmp_path / "two.safetensors")


def test_export_writes_plain_names_whole_or_not_at_all(tmp_path, monkeypatch):
    model = net(1)
    path = tmp_path / "new" / "w.safetensors"
    wrapped = torch.nn.DataParallel(torch.compile(model, backend="eager"))
    model[0].weight.data = model[0].weight.data.t().contiguous().t()  # not contiguous
    export(wrapped, path)
    other = net(2)
    other.load_state_dict(load_file(path))
    assert equal(model, other)
    model[2] = torch.compile(model[2], backend="eager")
    export(model, path)
    assert list(net(1).state_dict()) == [name for name in net(1).state_dict() if name in load_file(path)]
    before = path.read_bytes()

    def full(descriptor, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="Disk full"):
        patch.setattr(os, "write", full)
        export(net(2), path)
    assert path.read_bytes() == before and os.listdir(path.parent) == ["w.safetensors"]
    with pytest.raises(UsageError, match=r"export\(\) writes safetensors"):
        export(model, tmp_path / "w.pt")
    with blank():
        empty = net(1)
    with pytest.raises(CheckpointError, match=r"0\.weight is torch\.float32 on meta"):
        export(empty, path)


def exported(path):
    export(net(1), path)
    model = net(2)
    load_weights(model, path)
    return equal(model, net(1))


def test_every_rank_calls_export_and_one_writes(ranks, tmp_path):
    assert ranks(3)(exported, str(tmp_path / "w.safetensors")) == [True] * 3
    assert os.listdir(tmp_path) == ["w.safetensors"]


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "holds no weights"),
        ({"a.pt": b"", "b.pt": b""}, "holds several files of weights"),
        ({"a.safetensors": b"garbage!"}, r"a\.safetensors is not a readable safetensors file"),
        ({"a.pt": b"PK garbage"}, r"a\.pt (cannot be read|is a pickle)"),
        ({"model.safetensors.index.json": b"[]"}, "it has no weight_map"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "../x.safetensors"}}'}, "only weights files beside"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "/x.safetensors"}}'}, "only weights files beside"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "a.index.json"}}'}, "only weights files beside"),
        ({"model.safetensors.index.json": b'{"weight_map": {"w": "a.safetensors"}}'}, "There are no weights at"),
    ],
)
def test_what_holds_no_weights_is_said(tmp_path, files, text):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=text):
        load_weights(net(), tmp_path)


@pytest.mark.parametrize(
    "content", [[1, 2], {}, {"epoch": 3}, {"model": {"w": 3}}, {"model": {"a": {}}, "state_dict": {}, "x": 1}]
)
def test_a_pickle_without_weights_is_said(tmp_path, content):
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"holds no (state_dict|weights)"):
        load_weights(net(), tmp_path / "w.pt")


def test_several_models_in_one_directory_are_said(tmp_path):
    for name in ("model", "model_1"):
        export(net(1), tmp_path / f"{name}.safetensors")
    assert "model.safetensors is taken, not model_1.safetensors" in load_weights(net(2), tmp_path)[1]
    with pytest.raises(CheckpointError, match="is of no kind that is read"):
        (tmp_path / "w.txt").write_text(json.dumps({}))
        load_weights(net(2), tmp_path / "w.txt")
    torch.save(argparse.Namespace(a=1), tmp_path / "w.pt")
    with pytest.raises(CheckpointError, match=r"it needs argparse\.Namespace"):
        load_weights(net(2), tmp_path / "w.pt")
