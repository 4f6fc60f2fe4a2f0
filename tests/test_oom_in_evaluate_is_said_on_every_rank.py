"""Out of memory in `evaluate` and `predict`: one clear error on every rank, and the training goes on as if unasked."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import evener
from evener.dist.info import here
from evener.errors import EXIT_MEMORY, MemoryLimitError
from tests import streams
from tests.models import seeded


class Full:
    """No memory in the second call on one rank."""

    def __init__(self, rank, mean):
        self.rank, self.mean, self.calls = rank, mean, 0

    def __call__(self, model, batch):
        self.calls += 1
        if here().rank == self.rank and self.calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore of it")
        out = model(batch[0])
        return F.cross_entropy(out, batch[1]) if self.mean else out


def train(folder, rank, kind="rows"):
    """What each call said, then the training's digest. rank: whom memory fails; None: nothing is evaluated."""
    model = seeded(lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    rows = data if kind == "rows" else streams.Numbers(40, shuffled=False)
    said = []
    with evener.Run(
        model, optimizer, lambda m, b: F.cross_entropy(m(b[0]), b[1]), data,
        global_batch_size=8, precision="fp32", exact=True, dir=folder,
    ) as run:  # fmt: skip
        for update in run.updates(updates=4):
            if rank is None or update.number != 1:
                continue
            for call, mean in ((run.evaluate, True), (run.predict, False)):
                with pytest.raises(MemoryLimitError) as caught:
                    call(rows, Full(rank, mean), batch_size=4)
                said.append(str(caught.value))
                assert caught.value.exit_code == EXIT_MEMORY
                assert model.training and len(call(rows, Full(None, mean), batch_size=4)) in (1, 40)
        return said, run.digest()


def expected(what, where):
    return (
        f"Out of memory in {what} of 4 rows at once{where}.\n  CUDA out of memory. Tried to allocate 2.00 GiB\n"
        "  the training is as it was: nothing of it was changed\n"
        f"  fix: batch_size=2 in {what}: fewer rows at once, the same answer\n"
        "       shorter rows, or a smaller model; evener.memory() says who holds memory"
    )


def test_on_one_process(tmp_path):
    said, digest = train(str(tmp_path / "full"), 0)
    assert said == [expected("evaluate", ""), expected("predict", "")]
    assert train(str(tmp_path / "plain"), None) == ([], digest)


@pytest.mark.parametrize("kind", ["rows", "stream"])
def test_on_one_of_two_ranks(ranks, tmp_path, kind):
    texts = [expected("evaluate", " on rank 1"), expected("predict", " on rank 1")]
    answers = ranks(2)(train, str(tmp_path / "full"), 1, kind)
    plain = ranks(2)(train, str(tmp_path / "plain"), None)
    assert answers == [(texts, digest) for _, digest in plain]
