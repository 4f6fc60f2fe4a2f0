"""What an old script leaves in is refused with the line that replaces it, or changes nothing; never another training."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evener
from tests.models import make, mlp_rows, row_loss


def parts():
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return {
        "model": model, "optimizer": optimizer, "schedule": schedule,
        "data": DataLoader(TensorDataset(*mlp_rows(21)), 4, shuffle=True),
    }  # fmt: skip


def run_of(folder, made, loss_fn=row_loss, **keywords):
    keywords = {"global_batch_size": 8, "precision": "fp32", "dir": folder, "scheduler": made["schedule"], **keywords}
    return evener.Run(made["model"], made["optimizer"], loss_fn, made["data"], **keywords)


def refused(folder, made, loss_fn=row_loss, **keywords):
    try:
        with run_of(folder, made, loss_fn, **keywords) as run:
            list(run.updates(epochs=1))
    except evener.EvenerError as error:
        assert "fix:" in str(error)
        return str(error)
    return ""


def wrapped_by_torch(folder):
    wrapped, sampled = parts(), parts()
    wrapped["model"] = DistributedDataParallel(wrapped["model"])
    sampled["data"] = DataLoader(sampled["data"].dataset, 4, sampler=DistributedSampler(sampled["data"].dataset))
    return refused(folder, wrapped), refused(folder, sampled)


def test_ddp_and_its_sampler(ranks, tmp_path):
    for model, data in ranks(2)(wrapped_by_torch, str(tmp_path)):
        assert "already wrapped in DistributedDataParallel" in model and "wrapped.module" in model
        assert "evener shards by itself, without padding or repeated rows" in data and 'order="shuffle"' in data


def prepared_by_accelerate(folder, mixed):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16" if mixed else "no")
    texts = {}
    for name in ("model", "optimizer", "schedule", "data"):
        made = parts()
        prepared = dict(zip(made, accelerator.prepare(*made.values())))
        texts[name] = refused(f"{folder}/{name}", {**made, name: prepared[name]})
    return texts


@pytest.mark.filterwarnings("ignore")  # of accelerate, about itself
@pytest.mark.parametrize("world", [1, 2])
def test_what_accelerate_prepared(ranks, tmp_path, world):
    for texts in ranks(world)(prepared_by_accelerate, str(tmp_path / str(world)), False):
        for name, what in (("optimizer", "optimizer"), ("schedule", "schedule"), ("data", "DataLoader")):
            assert f"the {what} went through accelerator.prepare()" in texts[name], texts
        assert "already wrapped in DistributedDataParallel" in texts["model"]


@pytest.mark.filterwarnings("ignore")
def test_the_autocast_that_accelerate_hides_in_forward(tmp_path):
    texts = prepared_by_accelerate(str(tmp_path), True)
    assert "the model's forward was replaced by accelerator.prepare()" in texts["model"]


def prepared_by_fabric(folder):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    texts = {}
    for name in ("model", "optimizer", "data"):
        made = parts()
        model, optimizer = fabric.setup(made["model"], made["optimizer"])
        prepared = {"model": model, "optimizer": optimizer, "data": fabric.setup_dataloaders(made["data"])}
        texts[name] = refused(f"{folder}/{name}", {**made, name: prepared[name]})
    return texts


def test_what_fabric_set_up(ranks, tmp_path):
    (texts,) = ranks(1)(prepared_by_fabric, str(tmp_path))
    for name, what in (("model", "model"), ("optimizer", "optimizer"), ("data", "DataLoader")):
        assert f"the {what} went through fabric.setup()" in texts[name], texts


def test_steps_and_clears_left_in_the_body_change_nothing(tmp_path):
    digests = set()
    for left in ("nothing", "optimizer.step()", "optimizer.zero_grad()", "model.train()"):
        made = parts()
        with run_of(tmp_path / left, made) as run:
            for _ in run.updates(epochs=2):
                if left != "nothing":
                    name, _, call = left.removesuffix("()").partition(".")
                    getattr(made[name], call)()
            digests.add(run.digest())
    assert len(digests) == 1


def test_a_schedule_stepped_by_the_body(tmp_path):
    made = parts()
    with pytest.raises(evener.EvenerError, match=r"remove scheduler.step\(\)"), run_of(tmp_path, made) as run:
        for _ in run.updates(epochs=2):
            made["schedule"].step()


def test_backward_in_loss_fn(tmp_path):
    def loss_fn(model, batch):
        loss, _ = row_loss(model, batch)
        loss.backward()
        return loss

    assert "remove loss.backward() from loss_fn" in refused(tmp_path, parts(), loss_fn)


def test_a_grad_scaler(tmp_path):
    text = refused(tmp_path, parts(), scaler=torch.amp.GradScaler("cpu"))
    assert "precision fp32 needs no loss scale" in text and "leave scaler out" in text


def test_autocast_around_the_loop_but_not_inside_of_loss_fn(tmp_path):
    def inside(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(batch[0])
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.float(), batch[1])

    assert refused(tmp_path / "inside", parts(), inside) == ""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        text = refused(tmp_path / "around", parts())
        assert "torch.autocast (bf16) is on around the loop" in text and 'precision="bf16"' in text
    with run_of(tmp_path / "evaluate", parts()) as run:
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(evener.EvenerError, match="around the loop"):
            run.evaluate(mlp_rows(5))
        with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(evener.EvenerError, match="around the loop"):
            run.predict(mlp_rows(5), lambda model, batch: model(batch[0]))


@pytest.mark.parametrize(
    "loss_fn, text",
    [
        (torch.nn.CrossEntropyLoss(), "loss_fn=CrossEntropyLoss: torch's own functions do not take a model"),
        (F.cross_entropy, "loss_fn=cross_entropy: torch's own functions do not take a model"),
        ("cross_entropy", "loss_fn is a str, not a function"),
        (lambda batch: 0, "loss_fn cannot be called as loss_fn(model, batch): too many positional arguments"),
    ],
)
def test_a_loss_that_is_not_called_with_a_model(tmp_path, loss_fn, text):
    assert text in refused(tmp_path, parts(), loss_fn)


@pytest.mark.parametrize(
    "keywords, text",
    [
        (
            {"before_step": lambda: 1},
            "before_step cannot be called as before_step(model): too many positional arguments",
        ),
        (
            {"prepare": lambda batch: batch},
            "prepare cannot be called as prepare(batch, generator): too many positional",
        ),
    ],
)
def test_other_functions_that_are_called_otherwise(tmp_path, keywords, text):
    assert text in refused(tmp_path, parts(), row_loss, **keywords)


def test_an_engine_says_it_too():
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(evener.EvenerError, match="before_step cannot be called as before_step"):
        evener.Engine(model, optimizer, row_loss, device="cpu", before_step=lambda: 1)


def test_functions_of_every_kind_are_taken(tmp_path):
    class Callable:
        def __call__(self, model, batch):
            return row_loss(model, batch)

        def method(self, model, batch, weight=1.0):
            return row_loss(model, batch)

    for loss_fn in (
        Callable(),
        Callable().method,
        functools.partial(Callable().method, weight=2.0),
        lambda *a: row_loss(*a),
    ):
        assert refused(tmp_path, parts(), loss_fn) == ""


def test_small_mistakes_are_not_raw_errors(tmp_path):
    made = parts()
    assert "Run needs a model" in refused(tmp_path, {**made, "model": None})
    for model in ("resnet", [made["model"]]):
        assert "not a torch.nn.Module" in refused(tmp_path, {**made, "model": model})
    calls = {
        "export(None): not a path": lambda run: run.export(None),
        "the model is a str, not a torch.nn.Module": lambda run: run.export("x.safetensors", model="ema"),
        "metric_fn is a int, not a function": lambda run: run.evaluate(mlp_rows(5), 5),
        "the model is a int, not a torch.nn.Module": lambda run: run.evaluate(mlp_rows(5), model=5),
        "fn is a NoneType, not a function": lambda run: run.predict(mlp_rows(5), None),
        "the name comes first": lambda run: run.register(made["model"], "model"),
        "log() takes a dict, not a float": lambda run: run.log(0.5),
        "None is not a path": lambda run: evener.save(None, state={}),
        "5 is not a path": lambda run: evener.load(5, state={}),
    }  # fmt: skip
    with run_of(tmp_path / "run", made) as run:
        for text, call in calls.items():
            with pytest.raises(evener.EvenerError) as error:
                call(run)
            assert text in str(error.value)
