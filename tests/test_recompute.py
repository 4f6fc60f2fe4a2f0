"""`activation_checkpointing`: less is kept, and not a bit of a gradient changes, with dropout, under every strategy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.engine.cut import Cut
from evener.engine.recompute import recompute
from tests.models import seeded
from tests.test_fsdp_gradients import new_engine


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(width, 32), nn.Linear(32, width), nn.Dropout(0.3)
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x, scale=1.0):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        x = x + self.drop(self.down(F.gelu(self.up(x)))) * scale
        return self.bn(x.transpose(1, 2)).transpose(1, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.tail = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.ReLU(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(self.tail(x.mean(1)))


def data(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (rows, 6), generator=generator), torch.randint(11, (rows,), generator=generator)


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


WAYS = ["full", "selective", "every:2", "segments:2", ["blocks.1", nn.Sequential], ["Block"]]


def train(strategy, what, exact=True, precision="fp32"):
    model = seeded(Net)
    how = {"exact": True, "slice_size": 4} if exact else {"slice_size": 4}
    engine = new_engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, strategy=strategy, precision=precision,
        activation_checkpointing=what, ema=0.5, **how,
    )  # fmt: skip
    cut = Cut(evener.rank(), evener.world_size(), None, 4)
    for k in range(3):
        batch = data(14, seed=k)
        engine.step_parts([(i, b - a, tuple(t[a:b] for t in batch)) for i, (a, b) in cut.numbered(14)], 14)
    digest = engine.digest()
    engine.close()
    return digest, type(model.blocks[0]) is Block or strategy == "fsdp"


def test_not_a_bit_changes(ranks):
    expected = ranks(1)(train, "single", None)[0]
    for what in WAYS:
        assert ranks(1)(train, "single", what)[0] == expected, what
    assert set(ranks(3)(train, "ddp", "full")) == {expected}
    for what in ("full", "segments:2"):
        assert set(ranks(3)(train, "fsdp", what)) == {expected}, what


@pytest.mark.full
@pytest.mark.parametrize("what", WAYS)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_not_a_bit_changes_anywhere(ranks, strategy, what):
    for precision in ("fp32", "bf16", "fp16"):
        expected = ranks(1)(train, "single", None, True, precision)[0]
        for world in (2, 3, 4):
            assert set(ranks(world)(train, strategy, what, True, precision)) == {expected}, (what, world)


def test_fast_mode_too(ranks):
    """The same cut with and without: also there the dropout of a recomputed block is that of its forward."""
    for strategy, world in (("single", 1), ("ddp", 2), ("fsdp", 2)):
        assert ranks(world)(train, strategy, "selective", False) == ranks(world)(train, strategy, None, False)


def kept_bytes(what):
    """What a forward keeps for its backward, outside of parameters."""
    model = seeded(Net)
    handles, _ = recompute(model, what)
    own = {p.data_ptr() for p in model.parameters()}
    seen = {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            seen[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_fn(model, data(16))
    loss.backward()
    for handle in handles:
        handle.remove()
    return sum(tensor.nbytes for tensor in seen.values())


def test_less_is_kept():
    nothing, full, every, segments = (kept_bytes(what) for what in (None, "full", "every:2", "segments:2"))
    assert full < 0.4 * nothing
    assert full < every < nothing and full < segments < nothing


class HuggingFace(nn.Module):
    """The two methods that its models have, and the flag."""

    def __init__(self, on=False, able=True):
        super().__init__()
        self.a, self.said, self.able, self.is_gradient_checkpointing = nn.Linear(2, 2), [], able, on

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs=None):
        if not self.able:
            raise ValueError("HuggingFace does not support gradient checkpointing.")
        self.said.append(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self):
        self.said.append("disabled")


def test_a_model_with_checkpointing_of_its_own_uses_it():
    model = HuggingFace()
    handles, words = recompute(model, "full")
    handles[0].remove()
    assert model.said == [{"use_reentrant": False}, "disabled"] and words == "recompute full (the model's own)"
    model = HuggingFace(on=True)
    assert recompute(model, "full") == ([], "recompute full (the model's own)") and model.said == []
    with pytest.raises(evener.EvenerError, match="HuggingFace refuses: HuggingFace does not support"):
        recompute(HuggingFace(able=False), "full")


@pytest.mark.full
def test_a_real_hugging_face_model():
    """Gradients of its own checkpointing are those without, and a block list may be given as for any model."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=11, n_positions=8)

    def gradients(what):
        model = seeded(lambda: transformers.GPT2LMHeadModel(config)).train()
        handles, _ = recompute(model, what)
        torch.manual_seed(0)
        model(data(4)[0], labels=data(4)[0], use_cache=False).loss.backward()
        for handle in handles:
            handle.remove()
        return [p.grad for p in model.parameters()]

    for what in ("full", "selective", ["GPT2Block"]):
        assert all(torch.equal(a, b) for a, b in zip(gradients(what), gradients("none"), strict=True))


def hungry(bytes_kept, what, exact):
    """An engine on a device that holds so many bytes of activations and no more."""
    model = seeded(Net)
    how = {"exact": True, "slice_size": 4} if exact else {"batchnorm": "frozen", "microbatch_size": 8}
    engine = new_engine(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn,
        strategy="single",
        activation_checkpointing=what,
        **how,
    )
    kept = []

    def pack(tensor):
        kept.append(tensor)
        if sum(one.nbytes for one in kept) > bytes_kept:
            kept.clear()
            raise torch.OutOfMemoryError("no more")
        return tensor

    forward = engine.targets[""].spread.forward

    def limited(*args):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return forward(*args)

    engine.targets[""].spread.forward = limited
    try:
        for k in range(2):
            engine.step(data(8, seed=k))
        return engine.digest(), engine.recomputes
    finally:
        engine.close()


@pytest.mark.parametrize("exact", [True, pytest.param(False, marks=pytest.mark.full)])
def test_auto_computes_again_before_it_gives_up(exact):
    """Not a bit of the result changes; without "auto" it is the end, and the error says so."""
    expected, words = hungry(1 << 30, "auto", exact)
    assert words == "recompute when memory runs out"
    enough = 60_000 if exact else 9_000
    digest, words = hungry(enough, "auto", exact)
    assert words == "recompute full"
    if exact:
        assert digest == expected
    with pytest.raises(evener.EvenerError, match='activation_checkpointing="full"'):
        hungry(enough, None, exact)


def test_the_blocks_stay_what_they_are():
    model = seeded(Net)
    names = list(model.state_dict())
    handles, words = recompute(model, "full")
    assert words == "recompute full" and type(model.blocks[0]).__name__ == "Block"
    assert list(model.state_dict()) == names and isinstance(model.blocks[0], Block)
    assert type(copy.deepcopy(model).blocks[0]) is Block
    for handle in handles:
        handle.remove()
    assert type(model.blocks[0]) is Block
    assert recompute(model, "none") == recompute(model, None) == ([], "")


def test_the_contract_line_says_it(tmp_path):
    model = seeded(Net)
    with evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data(8), global_batch_size=8, precision="fp32",
        activation_checkpointing="every:2", dir=tmp_path / "run",
    ) as run:  # fmt: skip
        assert "recompute every:2" in run.contract_line()
        for update in run.updates(epochs=1):
            assert update.loss > 0


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("ful", "activation_checkpointing='ful' is not known"),
        ("every:0", "is one of: none, full, selective, every:2, segments:4, auto"),
        ("full:2", "'full:2' is not known"),
        ("segments:9", "the longest Sequential has 5 layers"),
        (["Blok"], "activation_checkpointing: 'Blok' is no name or class of a module"),
    ],
)
def test_what_cannot_be_is_refused(what, text):
    with pytest.raises(evener.EvenerError) as error:
        recompute(seeded(Net), what)
    assert text in str(error.value)
    with pytest.raises(evener.EvenerError, match="no block that occurs at least twice"):
        recompute(nn.Linear(2, 2), "full")
