"""Models built without storage: values from (seed, name), weights from files, the same parameter objects throughout."""

from __future__ import annotations

import os

import pytest
import torch

from evener.checkpoint import export, load_weights
from evener.dist.blank import blank, fill, materialise
from evener.errors import ModelError


class Block(torch.nn.Module):
    """Attention, normalisation, tied weights, and a buffer that no state_dict holds."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.attention = torch.nn.MultiheadAttention(width, 2)
        self.norm = torch.nn.BatchNorm1d(width)
        self.turn = Rotary(width)
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x) + self.turn.table
        return self.head(self.norm(self.attention(x, x, x)[0]))


class Rotary(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.register_buffer("table", None, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.register_buffer("table", torch.arange(self.width) / self.width, persistent=False)


class Bare(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.inner = torch.nn.Linear(3, 3)


def made(build=Block, seed=0, device="cpu"):
    with blank():
        model = build()
    assert all(one.is_meta for one in [*model.parameters(), *model.buffers()])
    materialise(model, device, seed)
    return model


def values(model):
    return {name: one.detach().clone() for name, one in [*model.named_parameters(), *model.named_buffers()]}


def test_values_depend_on_the_seed_and_the_name_only():
    one, other = values(made()), values(made())
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["embed.weight"], values(made(seed=1))["embed.weight"])
    layers = values(made(lambda: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))))
    assert not torch.equal(layers["0.weight"], layers["1.weight"])
    fewer = values(made(lambda: torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))))
    assert torch.equal(layers["1.weight"], fewer["1.weight"])


def test_values_are_spread_as_the_constructor_spreads_them():
    torch.manual_seed(0)
    built, got = values(Block(64)), values(made(lambda: Block(64)))
    assert built.keys() == got.keys()
    for name, one in built.items():
        assert one.shape == got[name].shape and one.dtype == got[name].dtype
        assert abs(float(one.double().std(correction=0)) - float(got[name].double().std(correction=0))) < 0.15, name
        assert torch.equal(one == 0, got[name] == 0), name
    assert torch.equal(built["turn.table"], got["turn.table"])


def test_an_optimizer_made_before_still_trains():
    with blank():
        model = Block()
    model.embed.weight.tag = "mine"
    model.norm.weight.requires_grad_(False)
    before = list(model.parameters())
    optimizer = torch.optim.AdamW([one for one in before if one.requires_grad], lr=0.1)
    materialise(model, "cpu", 0)
    assert all(one is other for one, other in zip(before, model.parameters()))
    assert model.head.weight is model.embed.weight and model.embed.weight.tag == "mine"
    assert not model.norm.weight.requires_grad and type(model.embed.weight) is torch.nn.Parameter
    start = values(model)
    model(torch.arange(6).reshape(2, 3)[:, :1].expand(2, 8)[:, 0]).square().sum().backward()
    optimizer.step()
    moved = {name for name, one in model.named_parameters() if not torch.equal(one, start[name])}
    assert {"embed.weight", "attention.in_proj_weight"} <= moved and "norm.weight" not in moved


def test_the_random_state_of_the_process_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made()
    assert torch.equal(torch.rand(3), expected)


def same_on_ranks():
    return {name: one.tolist() for name, one in values(made(seed=3)).items()}


def test_every_rank_makes_the_same_values(ranks):
    first, *others = ranks(3)(same_on_ranks)
    assert all(other == first for other in others) and first == same_on_ranks()


def test_what_nothing_makes_is_named_and_the_model_is_not_begun():
    with blank():
        model = torch.nn.Sequential(Bare(), torch.nn.Linear(2, 2))
        model[0].loose = torch.zeros(2)
    with pytest.raises(ModelError) as caught:
        materialise(model, "cpu", 0)
    text = str(caught.value)
    assert "no reset_parameters() makes: 0.scale, 0.mask" in text and "neither parameter nor buffer: 0.loose" in text
    assert model[1].weight.is_meta


class Forgets(Bare):
    def reset_parameters(self):
        self.scale.data.fill_(2.0)  # through .data: not counted as a version


def test_a_reset_that_forgets_a_tensor_is_found():
    with pytest.raises(ModelError, match=r"makes: mask\n"):
        made(Forgets)


class MakesAnew(Bare):
    def reset_parameters(self):
        self.scale = torch.nn.Parameter(torch.full((3,), 4.0))
        self.mask.zero_()


def test_a_parameter_made_anew_stays_the_same_object():
    with blank():
        model = MakesAnew()
    before = model.scale
    materialise(model, "cpu", 0)
    assert model.scale is before and before.tolist() == [4.0] * 3 and model.mask.tolist() == [0.0] * 3


def test_weights_stream_into_a_blank_model_and_the_rest_is_made(tmp_path, monkeypatch):
    source = made(seed=9)
    export(source, tmp_path / "w.safetensors")
    with blank():
        model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    real = fill
    monkeypatch.setattr("evener.checkpoint.weights.fill", lambda one, new: (sizes.append(new.nbytes), real(one, new)))
    load_weights(model, tmp_path / "w.safetensors")
    assert len(sizes) == len(source.state_dict()) - 1  # one by one; the tied one once
    assert model.turn.table.is_meta and model.head.weight is model.embed.weight
    materialise(model, "cpu", 0)
    want, got = values(source), values(model)
    assert all(torch.equal(want[name], got[name]) for name in want)
    os.remove(tmp_path / "w.safetensors")
    assert optimizer.param_groups[0]["params"][0] is model.embed.weight


def test_values_that_are_there_are_kept():
    with blank():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    fill(model[0].weight, torch.ones(2, 2))
    materialise(model, "cpu", 0)
    assert model[0].weight.tolist() == [[1.0, 1.0], [1.0, 1.0]] and not model[0].bias.is_meta
    whole = torch.nn.Linear(2, 2)
    before = whole.weight.clone()
    materialise(whole, "cpu", 0)
    assert torch.equal(whole.weight, before)


def test_a_parameter_in_use_is_refused():
    with blank():
        model = torch.nn.Linear(2, 2)
    model.weight.register_hook(lambda grad: grad)
    with pytest.raises(ModelError, match="already in use"):
        materialise(model, "cpu", 0)


def test_making_inside_blank_works():
    with blank():
        model = torch.nn.Linear(2, 2)
        materialise(model, "cpu", 0)
    assert not model.weight.is_meta
