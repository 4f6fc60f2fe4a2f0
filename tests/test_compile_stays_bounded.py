"""`compile=True`: a bounded number of kernels over uneven ends, the same results, no other names, exact stays exact.

`test_run_on_one_process.py` trains with inductor itself, as does the `full` test here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import evener
from evener.engine import setup
from tests.models import make, mlp_rows, row_loss, seeded, token_loss, token_rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.LayerNorm(32), torch.nn.GELU())
        self.head = torch.nn.Linear(32, 3)

    def forward(self, x):
        return self.head(self.body(x)).log_softmax(1)


def run_of(folder, model=None, rows=45, **keywords):
    model = model if model is not None else seeded(Net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": 16, "precision": "fp32", "dir": folder, **keywords}
    return evener.Run(model, optimizer, row_loss, mlp_rows(rows), **keywords)


def graphs():
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def trained(folder, model=None, sizes=(70, 64, 33, 1), **keywords):
    """(losses, graphs after each epoch, graphs after each evaluation, digest)"""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, compiled = [], []
    # Counts do not depend on the backend; inductor's C++ compiler takes seconds for each kernel.
    with torch.compiler.set_stance("default", force_backend="aot_eager"), run_of(folder, model, **keywords) as run:
        for epoch in run.epochs(3):
            losses += [update.loss for update in epoch]
            compiled.append(graphs())
        evaluated = []
        for size in sizes:
            losses.append(run.evaluate(mlp_rows(size, seed=size))["loss"])
            evaluated.append(graphs())
        return losses, compiled, evaluated, run.digest()


@pytest.mark.parametrize("keywords", [{}, {"microbatch_size": 3}], ids=["whole", "microbatches"])
def test_uneven_ends_compile_once_more_and_results_are_equal(tmp_path, keywords):
    eager, none, _, _ = trained(tmp_path / "eager", **keywords)
    losses, training, evaluation, _ = trained(tmp_path / "compiled", compile=True, **keywords)
    assert none == [0, 0, 0]
    assert training == [2, 2, 2]  # one for the usual size, one for every other
    assert evaluation[-1] <= 5 and evaluation[1] == evaluation[2]  # the same without gradients, and one for a lone row
    assert losses == pytest.approx(eager, rel=1e-5)


def exact_digest(folder, shared):
    """Of a model whose kernels round differently for other shapes, compiled by inductor, dropout included."""
    torch._dynamo.reset()
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if shared:  # what torch does by itself, behind exact mode's back
        compile_, one_per_shape = torch.nn.Module.compile, setup._one_kernel_per_shape
        torch.nn.Module.compile = lambda self, **_: compile_(self)
        setup._one_kernel_per_shape = lambda compiled: compiled
    try:
        with evener.Run(
            model, optimizer, token_loss, token_rows(45), global_batch_size=18, slice_size=4, exact=True, compile=True,
            precision="fp32", dir=folder,
        ) as run:  # fmt: skip
            for _ in run.updates(epochs=3):
                pass
            return run.digest()
    finally:
        if shared:
            torch.nn.Module.compile, setup._one_kernel_per_shape = compile_, one_per_shape


@pytest.mark.full
@pytest.mark.parametrize("shared, expected", [(False, 1), (True, 2)], ids=["one per shape", "the control"])
def test_exact_keeps_its_bits_on_any_world_size(ranks, tmp_path, shared, expected):
    """The control raises on ranks that disagree, or gives several digests: torch shares kernels by history."""
    found = set()
    for world in (1, 2, 3):
        try:
            found.update(ranks(world)(exact_digest, str(tmp_path / f"{world}"), shared))
        except AssertionError as error:
            assert shared and "the ranks hold different parameters" in str(error)
            found.add(world)
    assert min(len(found), 2) == expected


def test_exact_compiles_every_shape_alone(tmp_path):
    keywords = {"exact": True, "slice_size": 4, "global_batch_size": 18}
    eager, *_ = trained(tmp_path / "eager", sizes=(), **keywords)
    losses, training, evaluation, _ = trained(tmp_path / "run", sizes=(21,), compile=True, **keywords)
    assert training == [3, 3, 3]  # slices of 4, of 2 (18 = 4 x 4 + 2) and of 1 (9 = 2 x 4 + 1)
    assert evaluation == [4]
    assert losses[:-1] == pytest.approx(eager, rel=1e-6)


def test_more_shapes_than_kernels_is_an_error_in_exact_mode(tmp_path, monkeypatch):
    monkeypatch.setattr(setup, "_SHAPES", 1)
    with pytest.raises(evener.EvenerError) as error:
        trained(tmp_path, exact=True, slice_size=3, compile=True)
    assert "exact=True with compile=True: more than 1 kernels" in str(error.value) and "pad rows" in str(error.value)


def test_exact_refuses_what_the_script_compiled(tmp_path):
    for part, name in (("", "the model"), ("body", "body")):
        model = seeded(Net)
        if part:
            model.body = torch.compile(model.body, backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        with pytest.raises(evener.EvenerError, match=f"exact=True: {name} is already compiled"):
            run_of(tmp_path, model, exact=True)
    model = seeded(Net)
    model.compile(backend="eager")
    with pytest.raises(evener.EvenerError, match="compile=True: one kernel per shape"):
        run_of(tmp_path, model, exact=True)


def wrapped(where):
    model = seeded(Net)
    if where == "inside":
        model.body = torch.compile(model.body, backend="eager")
    return torch.compile(model, backend="eager") if where == "around" else model


@pytest.mark.parametrize("where", ["around", "inside"])
def test_wrappers_of_the_script_leave_no_names_behind(tmp_path, where):
    reference, _, _, digest = trained(tmp_path / "plain", ema=0.9)
    losses, _, _, same = trained(tmp_path / "wrapped", wrapped(where), ema=0.9)
    assert losses == pytest.approx(reference, rel=1e-6) and digest == same
    saved = tmp_path / "wrapped" / "checkpoints"
    text = b"".join(path.read_bytes() for path in saved.rglob("*") if path.is_file())
    assert b"head.weight" in text and b"_orig_mod" not in text


@pytest.mark.parametrize("where", ["around", "inside"])
def test_a_checkpoint_with_wrappers_continues_without_and_the_reverse(tmp_path, where):
    for first, second in ((wrapped(where), seeded(Net)), (seeded(Net), wrapped(where))):
        folder = tmp_path / type(first).__name__ / type(second).__name__
        with pytest.raises(evener.Stopped), run_of(folder, first, ema=0.9) as run:
            for update in run.updates(epochs=2):
                if update.number == 2:
                    run.stop()
        with run_of(folder, second, ema=0.9, resume="must") as run:
            assert run.number == 3
            assert [update.number for update in run.updates(epochs=2)] == [3, 4, 5]
            run.export(folder / "weights.safetensors")
            run.export(folder / "ema.safetensors", model=run.ema)
        for name in ("weights", "ema"):
            seeded(Net).load_state_dict(load_file(folder / f"{name}.safetensors"))


def test_close_gives_the_model_back_as_it_was(tmp_path):
    model = seeded(Net)
    with run_of(tmp_path / "run", model, compile=True):
        assert model._compiled_call_impl is not None
    assert model._compiled_call_impl is None
    model.compile(backend="eager")
    own = model._compiled_call_impl
    with run_of(tmp_path / "own", model, compile=True):
        assert model._compiled_call_impl is own  # the script's choice of backend
    assert model._compiled_call_impl is own
    config = json.loads(Path(tmp_path, "own", "config.json").read_text())
    assert config["compile"]["value"] is True
