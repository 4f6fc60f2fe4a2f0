"""Under fsdp the optimizer the user made keeps working, sharded in place; what would compute something else is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.engine.blocks import find_blocks
from evener.engine.optim import check_rowwise
from tests.models import seeded
from tests.test_fsdp_gradients import Block, Net, loss_fn, new_engine, rows, token_loss, whole

ROWWISE = ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adamax", "NAdam", "RAdam", "ASGD", "Adadelta", "Rprop"]


class Lamb(torch.optim.Optimizer):
    """A trust ratio: the step of an element depends on the norm of the whole tensor."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})
        self.calls = 0

    def step(self):
        self.calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad * p.data.norm() / p.grad.norm()


def optimizer_for(name, model):
    if name == "Muon":
        return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)
    kind = Lamb if name == "Lamb" else getattr(torch.optim, name)
    return kind(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("name", ROWWISE)
def test_row_wise_optimizers_are_taken(name):
    optimizer = optimizer_for(name, nn.Linear(3, 4))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = len(optimizer.state)
    check_rowwise(optimizer)
    assert len(optimizer.state) == before  # the trial leaves nothing behind
    assert optimizer.param_groups[0]["lr"] == 1e-2


@pytest.mark.parametrize("name", ["Adafactor", "Muon", "Lamb"])
def test_optimizers_that_look_at_whole_tensors_are_refused(ranks, name):
    for text in ranks(2)(refused_optimizer, name):
        assert f"{name} looks at whole tensors" in text and 'strategy="ddp"' in text


def refused_optimizer(name):
    model = seeded(Net)
    try:
        new_engine(model, optimizer_for(name, model))
    except evener.EvenerError as error:
        return str(error)


def train(name, strategy, warm=3, updates=5, thaw=None):
    """Some updates in plain PyTorch first: the optimizer comes with a state."""
    model = seeded(Net)
    optimizer = optimizer_for(name, model)
    for k in range(warm):
        optimizer.zero_grad()
        loss_fn(model, rows(8, seed=100 + k))[0].backward()
        optimizer.step()
    norms = []
    engine = new_engine(model, optimizer, strategy=strategy, before_step=lambda m: norms.append(grad_sum(m)))
    rank, world = evener.rank(), evener.world_size()
    for k in range(updates):
        if k == thaw:
            model.frozen.weight.requires_grad_(True)
        tokens, labels = rows(12, seed=k)
        engine.step((tokens[rank::world], labels[rank::world]))
    values = {name: whole(p.detach()) for name, p in model.named_parameters()}
    groups = engine.groups()
    held = sum(v.numel() for of in optimizer.state.values() for v in of.values() if torch.is_tensor(v) and v.ndim)
    engine.close()
    return values, groups, held, norms


def grad_sum(model):
    """What a user's before_step sees: gradients on the model's own parameters; it changes one, and replaces one."""
    model.blocks[0].up.weight.grad.mul_(0.5)
    model.blocks[1].up.weight.grad = model.blocks[1].up.weight.grad * 2
    return float(whole(model.embed.weight.grad).abs().sum())


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_an_optimizer_with_a_state_goes_on_with_it(ranks, name):
    expected, groups, held, norms = ranks(1)(train, name, "single")[0]
    results = ranks(3)(train, name, "fsdp")
    for values, got_groups, _, got_norms in results:
        assert got_groups == groups
        assert got_norms == pytest.approx(norms, rel=1e-4)
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5, msg=key)
    assert all(mine < held for _, _, mine, _ in results) or held == 0
    assert sum(mine for _, _, mine, _ in results) == held  # each element is on one rank


def test_layers_may_be_unfrozen_in_the_middle(ranks):
    expected = ranks(1)(train, "AdamW", "single", 0, 5, 2)[0][0]
    assert not torch.equal(expected["frozen.weight"], seeded(Net).frozen.weight)
    for values, *_ in ranks(2)(train, "AdamW", "fsdp", 0, 5, 2):
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=1e-4, atol=1e-5, msg=key)


def blocks_of(model, named=None):
    return sorted(find_blocks(model, named))


class Stages(nn.Module):
    """Like a ResNet: blocks inside of Sequentials, of different shapes."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.layer1 = nn.Sequential(Block(6), Block(6))
        self.layer2 = nn.Sequential(Block(8), Block(8))


def test_blocks_are_found_by_repetition_or_named():
    every = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    assert blocks_of(Stages()) == every
    assert blocks_of(Stages(), ["Block"]) == blocks_of(Stages(), [Block]) == every
    assert blocks_of(Stages(), ["layer2.1", "stem"]) == ["layer2.1", "stem"]
    assert blocks_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == ["0", "2"]
    assert blocks_of(nn.Linear(3, 3)) == []
    tied = Stages()
    tied.layer1[0].up.weight = tied.layer1[1].up.weight
    assert blocks_of(tied) == ["layer2.0", "layer2.1"]
    mixed = Stages().bfloat16()
    mixed.layer1[0].norm.float()
    assert blocks_of(mixed) == ["layer1.0", "layer1.0.norm", *every[1:]]
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    assert blocks_of(encoder) == ["layers.0", "layers.1", "layers.2"]
    with pytest.raises(evener.EvenerError, match=r"'Blok' is no name or class of a module"):
        find_blocks(Stages(), ["Blok"])
    assert blocks_of(seeded(Net), ["Linear"])[-1] == "frozen"  # of a class, what is tied stays with the rest
    with pytest.raises(evener.EvenerError, match="head shares a parameter with another part"):
        find_blocks(seeded(Net), ["head"])


class Attentive(nn.Module):
    """Attention twice, and no block around it: FSDP would hand it three copies of one input, which changes bits."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.a, self.b = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.a(x, x, x, need_weights=False)[0]
        return self.head((x + self.b(x, x, x, need_weights=False)[0]).mean(1))


def attentive(strategy):
    engine = new_engine(
        seeded(Attentive), loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), strategy=strategy, exact=True, slice_size=4
    )
    rank, world = evener.rank(), evener.world_size()
    tokens, labels = rows(8)
    engine.step(tuple(t[rank * 8 // world : (rank + 1) * 8 // world] for t in (tokens, labels)))
    update = engine.step(tuple(t[rank * 8 // world : (rank + 1) * 8 // world] for t in (tokens, labels)))
    engine.close()
    return update.loss, update.grad_norm


def test_attention_is_no_block_of_its_own(ranks):
    assert blocks_of(Attentive()) == []
    with pytest.raises(evener.EvenerError, match=r"fsdp's blocks: a is \(in\) a MultiheadAttention"):
        find_blocks(Attentive(), ["MultiheadAttention"])
    assert set(ranks(2)(attentive, "fsdp")) == set(ranks(1)(attentive, "single"))


def refused(kind):
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        if kind == "inside":
            engine = new_engine(model, loss=lambda model, batch: model.blocks[0].up(torch.ones(2, 6)).sum())
            try:
                engine.step(rows(4))
            finally:
                engine.close()
        new_engine(
            model, optimizer, **{
                "hsdp": {"strategy": "hsdp", "fsdp": {"shard_ranks": 3}},
                "copies": {"fsdp": {"shard_ranks": 1}}, "bool": {"strategy": "hsdp", "fsdp": {"shard_ranks": True}},
                "order": {"strategy": "hsdp", "fsdp": {"shard_ranks": 1}, "exact": True, "slice_size": 2},
                "compile": {"compile": True, "exact": True, "slice_size": 2}, "key": {"fsdp": {"block": ["Block"]}},
                "divisor": {"fsdp": {"reshard_after_forward": 3}}, "ddp": {"strategy": "ddp", "fsdp": {}},
                "accumulate": {"fsdp": {"accumulate": "sum"}}, "buffer": {"precision": {"buffer": "bf16"}},
                "policy": {"exact": True, "slice_size": 2, "precision": {"param": "bf16"}},
            }[kind],
        )  # fmt: skip
    except evener.EvenerError as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hsdp", 'fsdp["shard_ranks"]=3 does not divide the 2 ranks'),
        ("copies", 'fsdp["shard_ranks"]=1 belongs to strategy="hsdp"; this one is "fsdp"'),
        ("bool", 'fsdp["shard_ranks"]=True: a number of ranks'),
        ("order", 'exact=True with strategy="hsdp"'),
        ("compile", "blocks are compiled one by one"),
        ("key", "fsdp's key='block' is not known.\n  fix: fsdp's key=\"blocks\""),
        ("accumulate", "is one of: reduce, keep"),
        ("divisor", 'fsdp["reshard_after_forward"]=3 does not divide the 2 ranks'),
        ("ddp", 'fsdp= belongs to strategy="fsdp" and "hsdp"; this one is "ddp"'),
        ("buffer", "buffers keep their dtype; FSDP1 cast them, FSDP2 has no such dtype"),
        ("policy", "parameters gathered in half precision give other bits"),
        ("inside", "a part of a block was called without the block"),
    ],
)
def test_what_cannot_be_is_refused(ranks, kind, text):
    for said in ranks(2)(refused, kind):
        assert text in said


def half(precision):
    model = seeded(Net)
    engine = new_engine(model, torch.optim.AdamW(model.parameters(), lr=1e-2), token_loss, precision=precision)
    dtypes = set()
    model.blocks[0].up.register_forward_hook(lambda module, args, out: dtypes.add((module.weight.dtype, out.dtype)))
    losses = [engine.step(rows(8, seed=k)).loss for k in range(4)]
    masters = {str(p.dtype) for p in model.parameters()}
    seen = {(str(a), str(b)) for a, b in dtypes}
    with torch.no_grad(), engine.autocast() if engine.autocast else contextlib.nullcontext():
        out = {str(engine.shards.call(model, rows(2)[0]).dtype)}
    engine.close()
    return losses, seen, masters, out


def test_precision_policy(ranks):
    """By part, parameters are gathered in the compute dtype; by name, in fp32 and cast per operation."""
    bf16, fp32 = "torch.bfloat16", "torch.float32"
    by_part = {"param": "bf16", "reduce": "fp32", "output": "fp32"}
    for precision, weight, out in ((by_part, bf16, fp32), ("bf16", fp32, bf16)):
        for losses, dtypes, masters, outputs in ranks(2)(half, precision):
            assert all(0 < loss < 6 for loss in losses)
            assert dtypes == {(weight, bf16)} and masters == {fp32} and outputs == {out}
