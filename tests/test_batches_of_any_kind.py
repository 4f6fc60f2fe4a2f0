"""Dicts, lists of images of different sizes, graphs: the same update on any world size, cut or collated."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evener
from evener import batch as batches
from evener.dist.info import share
from evener.engine import Engine
from evener.errors import DataError
from tests.models import seeded


class Graphs:
    """Graphs joined into one: nodes under each other, edges between them, and where each graph begins."""

    def __init__(self, x, edges, starts, y):
        self.x, self.edges, self.starts, self.y = x, edges, starts, y

    @classmethod
    def joined(cls, graphs):
        sizes = [len(x) for x, _, _ in graphs]
        starts = torch.tensor([0, *torch.tensor(sizes).cumsum(0).tolist()])
        edges = torch.cat([edges + start for (_, edges, _), start in zip(graphs, starts)], 1)
        return cls(torch.cat([x for x, _, _ in graphs]), edges, starts, torch.stack([y for _, _, y in graphs]))

    def __len__(self):
        return len(self.y)

    def to(self, device):
        return Graphs(self.x.to(device), self.edges.to(device), self.starts.to(device), self.y.to(device))

    def part(self, start, stop):
        first, last = int(self.starts[start]), int(self.starts[stop])
        inside = (self.edges[0] >= first) & (self.edges[0] < last)
        starts = self.starts[start : stop + 1] - first
        return Graphs(self.x[first:last], self.edges[:, inside] - first, starts, self.y[start:stop])


def graph_rows(count):
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        nodes = 2 + i % 4
        x = torch.randn(nodes, 3, generator=generator)
        rows.append((x, torch.randint(nodes, (2, 5), generator=generator), x.sum()))
    return rows


def graph_loss(model, batch):
    sent = torch.zeros_like(batch.x).index_add(0, batch.edges[1], batch.x[batch.edges[0]])
    nodes = model(batch.x + sent)[:, 0]
    sums = torch.stack([nodes[a:b].sum() for a, b in zip(batch.starts, batch.starts[1:])])
    return ((sums - batch.y) ** 2).mean(), {"nodes": evener.Mean(total=float(len(batch.x)), count=len(batch))}


def image_rows(count):
    generator = torch.Generator().manual_seed(2)
    rows = []
    for i in range(count):
        image = torch.randn(3, 4 + i % 3, 5 + i % 2, generator=generator)
        boxes = torch.rand(1 + i % 3, 3, generator=generator)
        rows.append((image, {"boxes": boxes, "labels": torch.arange(len(boxes))}))
    return rows


def columns(rows):
    return tuple(map(list, zip(*rows)))


def image_loss(model, batch):
    """Over boxes, of which every image has another number."""
    images, targets = batch
    assert len(images) == len(targets)
    total = sum(((model(image.mean((1, 2))) - target["boxes"]) ** 2).sum() for image, target in zip(images, targets))
    return evener.Mean(total=total, count=sum(len(target["boxes"]) for target in targets))


def dict_rows(count):
    generator = torch.Generator().manual_seed(3)
    return [{"x": torch.randn(3, generator=generator), "more": {"y": torch.randn(3, generator=generator)}} for _ in range(count)]  # fmt: skip


def dict_loss(model, batch):
    return ((model(batch["x"]) - batch["more"]["y"]) ** 2).mean()


KINDS = {
    "graphs": (graph_rows, Graphs.joined, graph_loss, lambda batch, start, stop: batch.part(start, stop)),
    "images": (image_rows, columns, image_loss, lambda b, start, stop: (b[0][start:stop], b[1][start:stop])),
    "dicts": (dict_rows, torch.utils.data.default_collate, dict_loss, None),
}


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3))).double()


def trained(kind, folder, exact):
    make, collate, loss, split = KINDS[kind]
    model = net()
    if not exact:
        model[1].p = 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    rows = [_double(row) for row in make(26)]
    with evener.Run(
        model, optimizer, loss, rows, global_batch_size=10, exact=exact, slice_size=2 if exact else None,
        microbatch_size=None if exact else 2, collate_fn=None if kind == "dicts" else collate, num_workers=0,
        dir=folder, save_every=None, resume="never", split=split, precision="fp32",
    ) as run:  # fmt: skip
        for _ in run.updates(epochs=2):
            pass
        return run.digest(), torch.cat([p.detach().flatten() for p in model.parameters()])


def _double(thing):
    return batches.apply(thing, lambda leaf: leaf.double() if leaf.is_floating_point() else leaf)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_trains_alike_on_any_world_size(ranks, tmp_path, kind):
    exact = ranks(1)(trained, kind, str(tmp_path / "exact"), True)[0][0]
    fast = ranks(1)(trained, kind, str(tmp_path / "fast"), False)[0][1]
    for world in (2, 3, 4):
        assert [d for d, _ in ranks(world)(trained, kind, str(tmp_path / f"exact{world}"), True)] == [exact] * world
        for _, values in ranks(world)(trained, kind, str(tmp_path / f"fast{world}"), False):
            assert torch.allclose(values, fast, rtol=1e-9, atol=1e-12)


def gradient(kind, exact):
    """Of one update by an Engine, which is given this rank's batch and cuts it with split=."""
    make, collate, loss, split = KINDS[kind]
    model = net()
    model[1].p = 0.0
    engine = Engine(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, precision="fp32", split=split, exact=exact,
        slice_size=3 if exact else None, microbatch_size=None if exact else 2,
    )  # fmt: skip
    rank, world = engine.group.rank, engine.group.world_size
    first, last = share(4, rank, world)  # slices of 3 rows
    start, stop = 3 * first, 3 * last
    if world == 4 and not exact:  # one rank has no rows
        start, stop = [0, 6, 7, 12, 12][rank:][:2]
    rows = [_double(row) for row in make(12)[start:stop]]
    engine.backward(collate(rows) if rows else None)
    values = torch.cat([p.grad.flatten() for p in model.parameters()]).clone()
    engine.close()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_cuts_them_with_split(ranks, kind):
    model = net()
    model[1].p = 0.0
    make, collate, loss, _ = KINDS[kind]
    value = loss(model, collate([_double(row) for row in make(12)]))
    value = value[0] if isinstance(value, tuple) else value
    (value.value / value.count if isinstance(value, evener.Mean) else value).backward()
    reference = torch.cat([p.grad.flatten() for p in model.parameters()])
    exact = ranks(1)(gradient, kind, True)[0]
    for world in (1, 2, 3, 4):
        for values in ranks(world)(gradient, kind, False):
            assert torch.allclose(values, reference, rtol=1e-10, atol=1e-13)
        for values in ranks(world)(gradient, kind, True):
            assert torch.equal(values, exact)


def test_rows_are_counted_by_what_split_is_given():
    def split(batch, start, stop):
        return batch[start:stop] if isinstance(batch, list) else tuple(part[start:stop] for part in batch)

    assert batches.rows(([1, 2, 3], [4, 5, 6]), split) == batches.rows([(1, 4), (2, 5), (3, 6)], split) == 3
    assert batches.part(([1, 2, 3], [4, 5, 6]), 1, 3, split) == ([2, 3], [5, 6])
    with pytest.raises(DataError, match=r"whose parts have different lengths: \[2, 3\]"):
        batches.rows(([1, 2, 3], [4, 5]), split)
    with pytest.raises(DataError, match=r"split\(batch, 1, 3\) returned 3 rows"):
        batches.part([1, 2, 3], 1, 3, lambda batch, start, stop: batch)
    with pytest.raises(DataError, match="a int has no length"):
        batches.rows(3, split)


# ---------------------------------------------------------------------------------------------------- lost rows


class Rows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def lossy(folder, **keywords):
    model = nn.Linear(3, 1)
    rows = Rows(torch.randn(20, 3))
    loss = keywords.pop("loss", lambda model, batch: model(batch).mean())
    with evener.Run(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss, rows, global_batch_size=8, precision="fp32",
        dir=folder, resume="never", save_every=None, num_workers=0, logger=lambda values, step: None, **keywords,
    ) as run:  # fmt: skip
        return [update.rows for update in run.updates(epochs=1)]


def keep(batch, generator):
    return batch


def first(rows):
    return torch.stack(rows)[:1]


def mean_of_rows(model, batch):
    return evener.Mean(mean=model(batch).mean(), count=len(batch))


def test_rows_that_collate_fn_or_prepare_loses_are_noticed(tmp_path):
    for keywords, who, found in [
        ({"collate_fn": lambda rows: torch.stack(rows[:6])}, "collate_fn", 6),
        ({"collate_fn": lambda rows: torch.stack(rows[:-1])}, "collate_fn", 7),
        ({"prepare": lambda batch, generator: batch[:5], "slice_size": 8}, "prepare", 5),
        ({"collate_fn": torch.stack, "prepare": lambda batch, generator: batch[:5], "slice_size": 8}, "prepare", 5),
        ({"collate_fn": lambda rows: torch.stack(rows[:3]), "prepare": keep, "slice_size": 8}, "collate_fn", 3),
        ({"collate_fn": lambda rows: torch.stack(rows)[:0]}, "collate_fn", 0),
        ({"collate_fn": lambda rows: {"x": torch.stack(rows[:3])}, "loss": lambda m, b: m(b["x"]).mean()}, "collate_fn", 3),
        ({"collate_fn": lambda rows: [{"x": r} for r in rows[:3]], "loss": lambda m, b: m(b[0]["x"]).mean()}, "collate_fn", 3),
        ({"collate_fn": lambda rows: torch.stack(rows[:3]), "loss": mean_of_rows}, "collate_fn", 3),
        ({"collate_fn": first}, "collate_fn", 1),
    ]:  # fmt: skip
        with pytest.raises(DataError) as caught:
            lossy(tmp_path / "a", **keywords)
        text = str(caught.value)
        assert f"{who} was given 8 rows and returned a batch of {found}." in text
        assert 'on_bad_sample="skip"' in text and "split=f(batch, start, stop)" in text


def test_batches_that_only_look_shorter_are_taken(tmp_path):
    def packed(rows):
        return {"tokens": torch.cat(rows)[None], "starts": torch.arange(0, 3 * len(rows), 3)[None]}

    def token_loss(model, batch):
        values = model(batch["tokens"].view(-1, 3))
        return evener.Mean(total=values.sum(), count=len(values))

    for keywords in (
        {"collate_fn": packed, "loss": token_loss},
        {"collate_fn": first, "loss": mean_of_rows},  # one row may be all of them, packed
        {"collate_fn": list, "loss": lambda model, batch: torch.stack([model(x).mean() for x in batch]).mean()},
        {"collate_fn": lambda rows: torch.stack(rows * 2)},
        {"collate_fn": lambda rows: torch.stack(rows).T, "split": lambda batch, start, stop: batch[:, start:stop],
         "loss": lambda model, batch: model(batch.T).mean()},
    ):  # fmt: skip
        assert lossy(tmp_path / "b", **keywords) == [8, 8, 4]
