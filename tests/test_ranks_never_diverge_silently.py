"""A rank that trains another model than the rest is named at the next checkpoint, with the first tensor that differs."""

from __future__ import annotations

import pytest
import torch

import evener
from evener.engine.divergence import refuse_divergence
from evener.errors import CollectiveError
from tests.models import make, mlp_rows, row_loss


def train(folder, harm, rank_of_harm, save_every):
    model = make("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = evener.Run(
        model,
        optimizer,
        row_loss,
        mlp_rows(48),
        global_batch_size=6,
        save_every=save_every,
        precision="fp32",
        dir=folder,
    )
    made = 0
    try:
        for update in run.updates(updates=8):
            made = update.number + 1
            if update.number == 2 and run.rank == rank_of_harm:
                parameter = list(model.parameters())[1]
                with torch.no_grad():
                    if harm == "weight":
                        parameter.view(-1)[0] += 1e-6
                    elif harm == "state":
                        optimizer.state[parameter]["exp_avg"].view(-1)[0] += 1e-6
                    elif harm == "lr":
                        optimizer.param_groups[0]["lr"] = 1.0001e-2
    except CollectiveError as error:
        return made, error.cause, list(error.evidence)
    finally:
        run.close()
    return made, "", []


@pytest.mark.parametrize(
    ("harm", "tensor"),
    [
        ("weight", "0.bias differs"),
        ("state", "optimizer: exp_avg of 0.bias differs"),
        ("lr", "optimizer: lr of group 0 differs"),
    ],
)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_tensor_and_the_rank_are_named(ranks, tmp_path, world, harm, tensor):
    for made, cause, evidence in ranks(world)(train, str(tmp_path / "run"), harm, 1, 2):
        assert made == 4  # harmed in the third update, noticed at the checkpoint after the fourth
        if harm == "state":  # the parameter has followed its state by then
            assert cause.startswith("the ranks train different models: ")
        else:
            assert tensor in cause, cause
        assert evidence[0] == ("rank 1 holds another value than the rest" if world > 2 else "no two halves agree")
    assert not (tmp_path / "run" / "checkpoints" / "update-4").exists()
    assert (tmp_path / "run" / "checkpoints" / "update-2").exists()


def test_without_checkpoints_they_are_compared_at_the_end(ranks, tmp_path):
    for made, cause, _ in ranks(3)(train, str(tmp_path / "run"), "weight", 1, None):
        assert made == 8 and "0.bias differs" in cause


@pytest.mark.parametrize("world", [1, 2, 3])
def test_healthy_ranks_are_left_alone(ranks, tmp_path, world):
    assert {made for made, cause, *_ in ranks(world)(train, str(tmp_path / "run"), "none", 0, 2)} == {8}


def compare_bits(dtype):
    model = torch.nn.Linear(3, 3).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan") if dtype.is_floating_point else 1)
    refuse_divergence(model, [])
    return True


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_nans_and_every_width_are_compared_as_bits(ranks, dtype):
    assert ranks(2)(compare_bits, dtype) == [True, True]
