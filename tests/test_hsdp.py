"""`strategy="hsdp"`: copies of the model, each sharded over some ranks; the gradients of `single`, any way of cutting."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import seeded
from tests.test_fsdp_gradients import Block, Net, loss_fn, new_engine, reference, rows, token_loss, whole
from tests.test_fsdp_run import evening

LAYOUTS = [(4, 2), (6, 2), (6, 3)]  # (ranks, ranks that hold one copy)
EDGES = {2: (0, 4, 13), 4: (0, 5, 5, 6, 13), 6: (0, 2, 2, 7, 8, 9, 13)}


def one_update(edges, loss, microbatch, options):
    model = seeded(Net).double()
    engine = new_engine(model, loss=loss, strategy="hsdp", microbatch_size=microbatch, fsdp=options)
    tokens, labels = rows(edges[-1])
    start, stop = edges[evener.rank()], edges[evener.rank() + 1]
    batch = (tokens[start:stop], labels[start:stop]) if stop > start else None
    engine.backward(batch)
    gradients = {n: None if p.grad is None else whole(p.grad) for n, p in model.named_parameters()}
    update = engine.apply()
    after = engine.step(batch)
    held = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    values = update.loss, update.grad_norm, after.grad_norm, engine.digest()
    notes = engine.notes
    engine.close()
    return gradients, values, held, notes


@pytest.mark.parametrize(("world", "among"), LAYOUTS)
@pytest.mark.parametrize(
    ("loss", "microbatch", "more"),
    [(loss_fn, None, {}), (token_loss, 2, {"reshard_after_forward": False}), (token_loss, 3, {"accumulate": "keep"})],
)
def test_gradients_are_those_of_one_process(ranks, world, among, loss, microbatch, more):
    expected, value = reference(loss)
    norm = float(torch.sqrt(sum(g.square().sum() for g in expected.values() if g is not None)))
    results = ranks(world)(one_update, EDGES[world], loss, microbatch, {"shard_ranks": among, **more})
    for gradients, values, _, notes in results:
        for name, gradient in expected.items():
            assert (gradients[name] is None) == (gradient is None), name
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12, msg=name)
        assert values == results[0][1]
        assert max(abs(values[0] - value), abs(values[1] - norm), abs(values[2] - norm)) < 1e-12
        assert f"hsdp: {world // among} copies, each over {among} ranks; 3 Block" in notes[-1]
        kept = "reduced once, whole until then" if "accumulate" in more else "reduced per microbatch"
        assert notes[-1].endswith(f"gradients {kept}")
    held = [held for _, _, held, _ in results]
    assert held[:among] == held[among : 2 * among]  # every copy alike


class Rare(nn.Module):
    """A block that only some microbatches use: what it has gathered before must not be lost."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens).mean(1)
        x = self.blocks[0](x)
        return self.head(self.blocks[1](x) if bool((tokens[:, 0] < 4).all()) else x)


def rare(strategy, options):
    model = seeded(Rare).double()
    engine = new_engine(
        model, loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]), strategy=strategy, microbatch_size=1, fsdp=options
    )
    tokens = torch.randint(11, (12, 3), generator=torch.Generator().manual_seed(0))
    tokens[:, 0] = torch.tensor([0, 9, 9] * 4)  # by every rank's first row, and never by the last
    rank, world = evener.rank(), evener.world_size()
    mine = slice(rank * 12 // world, (rank + 1) * 12 // world)
    engine.backward((tokens[mine], tokens[mine, 1]))
    gradients = {n: whole(p.grad) for n, p in model.named_parameters()}
    engine.apply()
    engine.close()
    return gradients


@pytest.mark.parametrize("more", [{}, {"accumulate": "keep"}])
def test_a_block_that_is_not_always_used(ranks, more):
    expected = ranks(1)(rare, "single", None)[0]
    for gradients in ranks(4)(rare, "hsdp", {"shard_ranks": 2, **more}):
        for name, gradient in expected.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-12, msg=name)


def by_node():
    """Without shard_ranks: the ranks of a node. These tests run on one, where hsdp is one copy over all ranks."""
    model = seeded(Net).double()
    engine = new_engine(model, strategy="hsdp")
    engine.step(rows(4))
    among, words = engine.shards.among, engine.notes[-1]
    engine.close()
    return among, words


def test_a_node_holds_one_copy(ranks):
    for among, words in ranks(2)(by_node):
        assert among == 2 and words.startswith("fsdp: 3 Block")


def away(folder, strategy, stop_at=None, options=None):
    more = {"fsdp": options} if options else {}
    return evening(folder, strategy, stop_at, torch.optim.AdamW, False, **more)


@pytest.mark.parametrize("path", [("ddp", "hsdp", "fsdp"), ("fsdp", "hsdp", "ddp")])
def test_stopped_and_started_under_another_strategy(ranks, tmp_path, path):
    """ddp on 2 ranks, hsdp on 4 as 2 x 2, fsdp on 3: the same training, up to the order of sums."""
    how = {"ddp": (2, None), "hsdp": (4, {"shard_ranks": 2}), "fsdp": (3, None)}
    alone = ranks(1)(away, str(tmp_path / "alone"), "single")[0]
    for k, strategy in enumerate(path):
        world, options = how[strategy]
        results = ranks(world)(away, str(tmp_path / "run"), strategy, (1, 4, None)[k], options)
    for result in results:
        assert result[0] == "finished" and result[1] == results[0][1]
        assert result[4] == pytest.approx(alone[4], rel=1e-4)
        assert result[2][-1]["loss"] == pytest.approx(alone[2][-1]["loss"], rel=1e-4)
