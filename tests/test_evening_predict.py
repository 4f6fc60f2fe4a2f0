"""`predict`: every row once, in dataset order, on any world size, without a trace."""

from __future__ import annotations

import pytest
import torch

import evener
from evener.errors import DataError
from tests.models import make, row_loss, token_loss, token_rows


class Rows(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"x": torch.tensor([i, i + 0.5]), "id": i}


def new_run(folder, **keywords):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keywords = {"global_batch_size": 12, "exact": True, "slice_size": 2, "precision": "fp32", "dir": folder, **keywords}
    return evener.Run(model, optimizer, token_loss, token_rows(30), **keywords)


def identities(folder, count, batch_size):
    with new_run(folder) as run:
        data = Rows(count)
        ids = run.predict(data, lambda model, batch: batch["id"], batch_size=batch_size)
        halves = run.predict(data, lambda model, batch: batch["x"].to(torch.bfloat16), batch_size=batch_size)
        flags = run.predict(data, lambda model, batch: batch["id"] % 3 == 0, batch_size=batch_size)
        empty = run.predict(data, lambda model, batch: batch["x"][:, :0], batch_size=batch_size)
        return ids.tolist(), halves.float().tolist(), flags.tolist(), list(empty.shape), str(halves.dtype)


@pytest.mark.parametrize(("count", "batch_size"), [(1, None), (3, 1), (11, 2), (26, 7)])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_rows_are_in_dataset_order_whatever_the_division(ranks, tmp_path, world, count, batch_size):
    for ids, halves, flags, empty, dtype in ranks(world)(identities, str(tmp_path / "run"), count, batch_size):
        assert ids == list(range(count)) and flags == [i % 3 == 0 for i in range(count)]
        assert halves == [[float(torch.tensor(v).bfloat16()) for v in (i, i + 0.5)] for i in range(count)]
        assert empty == [count, 0] and dtype == "torch.bfloat16"


def traced(folder, often):
    modes = []
    with new_run(folder) as run:
        run.model.drop1.eval()  # a mode of the user's own
        for update in run.updates(epochs=2):
            if often and update.number % 2:
                run.predict(token_rows(7, seed=3), lambda model, batch: model(batch[0]).mean((1, 2)) + torch.rand(()))
                run.evaluate(token_rows(7, seed=3))
                modes.append((run.model.training, run.model.drop1.training, run.model.drop2.training))
        after = torch.rand(())
        return run.digest(), float(after), set(modes)


@pytest.mark.parametrize("world", [1, 3])
def test_it_leaves_no_trace(ranks, tmp_path, world):
    without = ranks(world)(traced, str(tmp_path / "a"), False)
    often = ranks(world)(traced, str(tmp_path / "b"), True)
    assert [one[0] for one in without] == [one[0] for one in often]
    assert all(one[2] == {(True, False, True)} for one in often)


WRONG = {
    "a float": lambda model, batch: 1.0,
    "one value for the batch": lambda model, batch: batch["x"].mean(),
    "a row too few": lambda model, batch: batch["x"][1:],
    "a tuple": lambda model, batch: (batch["x"], batch["x"]),
}


def wrong(folder, name, count):
    """What each rank is told; the run can go on afterwards, ranks in step."""
    with new_run(folder) as run:
        try:
            run.predict(Rows(count), WRONG[name])
            said = None
        except DataError as error:
            said = str(error)
        return said, len(list(run.updates(updates=2)))


@pytest.mark.parametrize("name", sorted(WRONG))
@pytest.mark.parametrize("world", [1, 3])
def test_wrong_returns_are_refused_on_every_rank(ranks, tmp_path, world, name):
    # two rows: on three ranks one of them has none, and must not wait for the others
    for said, updates in ranks(world)(wrong, str(tmp_path / "run"), name, 2):
        assert said is not None and "fn returned" in said and "a tensor whose first dimension is the rows" in said
        assert updates == 2


def uneven(folder):
    with new_run(folder) as run:
        try:
            run.predict(Rows(9), lambda model, batch: batch["x"].repeat(1, int(batch["id"].max()) + 1), batch_size=1)
        except DataError as error:
            return str(error)


@pytest.mark.parametrize("world", [1, 3])
def test_rows_of_different_shapes_are_refused(ranks, tmp_path, world):
    for said in ranks(world)(uneven, str(tmp_path / "run")):
        assert "different shapes" in said and "pad sequences" in said


def test_a_dataset_of_columns_with_the_rows_of_a_loss(tmp_path):
    model = make("mlp")
    x = torch.randn(10, 5)
    y = torch.arange(10) % 3
    with evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), row_loss, (x, y), global_batch_size=4, precision="fp32", dir=tmp_path / "run") as run:  # fmt: skip
        logits = run.predict((x, y), lambda model, batch: model(batch[0]))
        with torch.no_grad():
            assert torch.allclose(logits, model(x)) and not logits.requires_grad
