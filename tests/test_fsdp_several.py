"""Several models with an optimizer each, under fsdp and hsdp: trained in turns, they equal one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import seeded
from tests.test_fsdp_gradients import Block, whole

ROWS, STARTS = 13, {"d": torch.optim.SGD, "g": torch.optim.AdamW}


class Net(nn.Module):
    """Blocks, and a number that no rank can shard. Both models are of this class, and neither is a block."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.first, self.blocks, self.last = (
            nn.Linear(inputs, 6),
            nn.Sequential(Block(), Block()),
            nn.Linear(6, outputs),
        )
        self.scale = nn.Parameter(torch.tensor(0.9))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 0.9)

    def score(self, x):
        return self.last(self.blocks(self.first(x))) * self.scale


def networks():
    return {"g": Net(3, 2), "d": Net(2, 1)}


def critic_loss(models, rows):
    with torch.no_grad():
        made = models["g"].score(rows[:, :3])
    loss = F.softplus(-models["d"].score(rows[:, 3:])).mean() + F.softplus(models["d"].score(made)).mean()
    return loss, {"rows": evener.Mean(total=len(rows), count=1)}


def maker_loss(models, rows):
    return F.softplus(-models["d"].score(models["g"].score(rows[:, :3]))).mean()


LOSSES = {"d": critic_loss, "g": maker_loss}


def new_engine(strategy, dtype, **how):
    models = {name: model.to(dtype) for name, model in seeded(networks).items()}
    optimizers = {name: kind(models[name].parameters(), lr=0.02) for name, kind in STARTS.items()}
    settings = {"device": "cpu", "precision": "fp32", "report": lambda *event: None, **how}
    return evener.Engine(models, optimizers, strategy=strategy, **settings)


def in_turns(strategy, dtype, how):
    engine = new_engine(strategy, dtype, **how)
    rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    rank, world, size = evener.rank(), evener.world_size(), how.get("slice_size", 1)
    start, stop = (r * -(-ROWS // size) // world * size for r in (rank, rank + 1))
    mine = rows[start:stop] if start < min(stop, ROWS) else None
    seen = []
    for _ in range(3):
        for name, loss in LOSSES.items():
            others = [p for other in LOSSES if other != name for p in engine.given[other].parameters()]
            marks = [torch.full_like(p, 7.0) for p in others]
            for parameter, mark in zip(others, marks):
                parameter.grad = mark
            engine.backward(mine, loss, optimizer=name)
            seen += [whole(p.grad).clone() for p in engine.given[name].parameters()]
            update = engine.apply()
            seen += [torch.tensor([update.loss, update.grad_norm, update.rows], dtype=dtype)]
            for parameter, mark in zip(others, marks):
                assert parameter.requires_grad and parameter.grad is mark and bool((whole(mark) == 7).all())
                parameter.grad = None
    digest = engine.digest() if engine.batch.exact else None
    state = engine.state_dict()
    engine.close()
    seen += [state["model"][name] for name in sorted(state["model"]) if rank == 0]
    return seen, digest


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("fsdp", {"max_grad_norm": {"d": 0.3}, "microbatch_size": 4}),
        ("fsdp", {"fsdp": {"accumulate": "keep", "reshard_after_forward": False}, "microbatch_size": 3}),
        ("hsdp", {"fsdp": {"shard_ranks": 1}, "microbatch_size": 4}),
    ],
)
def test_models_in_turns_get_the_gradients_of_one_process(ranks, world, strategy, how):
    plain = {key: value for key, value in how.items() if key != "fsdp"}
    ((expected, _),) = ranks(1)(in_turns, "single", torch.float64, plain)
    for values, _ in ranks(world)(in_turns, strategy, torch.float64, how):
        for value, right in zip(values, expected):
            torch.testing.assert_close(value, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "world", [2, 3, pytest.param(4, marks=pytest.mark.full), pytest.param(6, marks=pytest.mark.full)]
)
def test_exact_digest_of_models_in_turns(ranks, world):
    how = {"exact": True, "slice_size": 2}
    ((_, digest),) = ranks(1)(in_turns, "single", torch.float32, how)
    assert {one for _, one in ranks(world)(in_turns, "fsdp", torch.float32, how)} == {digest}


def evening(folder, strategy, stop_at=None):
    models = seeded(networks)
    optimizers = {name: kind(models[name].parameters(), lr=0.02) for name, kind in STARTS.items()}
    data = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(1))
    settings = {"exact": True, "slice_size": 2, "precision": "fp32", "ema": 0.9, "strategy": strategy, "dir": folder}
    try:
        with evener.Run(models, optimizers, dataset=data, global_batch_size=6, **settings) as run:
            for batch in run.batches(epochs=2):
                for name, loss in LOSSES.items():
                    update = run.step(batch, loss_fn=loss, optimizer=name)
                if stop_at is not None and update.number >= stop_at:
                    run.stop()
            run.export(f"{folder}/mean.safetensors", model=run.ema)
            with open(f"{folder}/mean.safetensors", "rb") as file:
                return run.digest(), file.read()
    except evener.Stopped:
        return "stopped"


def test_a_run_of_several_models_goes_on_under_another_strategy(ranks, tmp_path):
    (expected,) = ranks(1)(evening, str(tmp_path / "whole"), "single")
    folder = str(tmp_path / "cut")
    assert ranks(2)(evening, folder, "fsdp", 3) == ["stopped"] * 2
    assert ranks(3)(evening, folder, "ddp", 5) == ["stopped"] * 3
    assert ranks(2)(evening, folder, "fsdp") == [expected] * 2


def blank_values(strategy, folder):
    with evener.blank():
        models = networks()
    optimizers = {name: kind(models[name].parameters(), lr=0.02) for name, kind in STARTS.items()}
    settings = {"dataset": torch.zeros(8, 5), "global_batch_size": 4, "precision": "fp32", "dir": folder}
    with evener.Run(models, optimizers, strategy=strategy, **settings) as run:
        return run.digest()


def test_models_without_storage_get_the_values_of_one_process(ranks, tmp_path):
    single, fsdp = str(tmp_path / "single"), str(tmp_path / "fsdp")
    assert set(ranks(2)(blank_values, "fsdp", fsdp)) == set(ranks(1)(blank_values, "single", single))


def container():
    """One model that is a container: FSDP takes none without a forward, and nobody calls it."""
    model = seeded(lambda: nn.ModuleDict({"body": Block(), "head": nn.Linear(6, 1)}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = evener.Engine(
        model, optimizer, lambda m, x: m["head"](m["body"](x)).square().mean(), device="cpu", precision="fp32",
        strategy="fsdp",
    )  # fmt: skip
    rank, world = evener.rank(), evener.world_size()
    norm = engine.step(torch.ones(4, 6)[rank * 4 // world : (rank + 1) * 4 // world]).grad_norm
    said = (evener.EvenerError, r"has no forward\.\n  fix: call one of the models in it")
    kind, words = said if world > 1 else (NotImplementedError, "missing the required")
    with pytest.raises(kind, match=words):
        engine.model(torch.ones(1, 6))
    engine.close()
    return norm


def test_a_container_is_a_model_too(ranks):
    assert ranks(2)(container) == pytest.approx(ranks(1)(container) * 2, rel=1e-6)
