"""A whole run under fsdp: saved, stopped, started on other numbers of processes and strategies, evaluated, exported."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import evener
from evener.dist.blank import materialise
from tests.models import seeded
from tests.test_fsdp_gradients import Net, rows, token_loss

ROWS, BATCH = 30, 12


def metrics(model, batch):
    """What a loss_fn returns, from a method that is no forward."""
    hits = (model.head(model.encode(batch[0])).argmax(1) == batch[1]).sum()
    return token_loss(model, batch), {"accuracy": evener.Mean(total=hits, count=len(batch[1]))}


def evening(folder, strategy, stop_at=None, optimizer=torch.optim.AdamW, exact=True, **keywords):
    model = keywords.pop("model", None) or seeded(Net)
    how = {"exact": True, "slice_size": 2} if exact else {}
    run = evener.Run(
        model, optimizer(model.parameters(), lr=1e-2), metrics, rows(ROWS), global_batch_size=BATCH, dir=folder,
        strategy=strategy, precision="fp32", ema=0.9, save_every=2, max_grad_norm=1.0,
        scheduler=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total),
        **{**how, **keywords},
    )  # fmt: skip
    scores = []
    try:
        for epoch in run.epochs(3):
            for update in epoch:
                if update.number == stop_at:
                    run.stop("enough")
            scores.append(run.evaluate(rows(5, seed=9)))
            scores.append(run.evaluate(rows(5, seed=9), model=run.ema))
        outputs = run.predict(rows(7, seed=8), lambda model, batch: model.encode(batch[0]))
        run.export(str(Path(folder) / "model.safetensors"))
        run.export(str(Path(folder) / "ema.safetensors"), model=run.ema)
        return "finished", run.digest(), scores, outputs.double().sum().item(), [update.loss, update.grad_norm]
    except evener.Stopped:
        return ("stopped",)
    finally:
        run.close()


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone") / "run")
    return folder, ranks(1)(evening, folder, "single")[0]


@pytest.mark.parametrize("world", [2, 3])
def test_a_run_is_that_of_one_process(ranks, tmp_path, alone, world):
    folder = str(tmp_path / "run")
    for result in ranks(world)(evening, folder, "fsdp"):
        assert result == alone[1]
    for name in ("model", "ema"):
        mine, theirs = (load_file(f"{where}/{name}.safetensors") for where in (folder, alone[0]))
        assert mine.keys() == theirs.keys() == Net().state_dict().keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    Net().load_state_dict(mine)


@pytest.mark.parametrize(
    ("first", "second"), [(("fsdp", 3), ("ddp", 2)), (("ddp", 2), ("fsdp", 4)), (("single", 1), ("fsdp", 3))]
)
def test_stopped_and_started_under_another_strategy(ranks, tmp_path, alone, first, second):
    folder = str(tmp_path / "run")
    assert set(ranks(first[1])(evening, folder, first[0], 3)) == {("stopped",)}
    for result in ranks(second[1])(evening, folder, second[0]):
        assert (result[0], result[1]) == alone[1][:2]


@pytest.mark.full
@pytest.mark.parametrize("second", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("first", [1, 2, 3, 4, 6])
def test_stopped_and_started_on_every_world_size(ranks, tmp_path, alone, first, second):
    folder = str(tmp_path / "run")
    ranks(first)(evening, folder, "fsdp", 4)
    for result in ranks(second)(evening, folder, "fsdp"):
        assert (result[0], result[1]) == alone[1][:2]


def test_fast_mode_is_close(ranks, tmp_path):
    """The promise without exact: the same run up to summation order."""
    alone = ranks(1)(evening, str(tmp_path / "1"), "single", None, torch.optim.SGD, False)[0]
    for result in ranks(3)(evening, str(tmp_path / "3"), "fsdp", None, torch.optim.SGD, False, microbatch_size=2):
        assert result[4] == pytest.approx(alone[4], rel=1e-5)
        assert result[2][-1]["loss"] == pytest.approx(alone[2][-1]["loss"], rel=1e-5)


class Blocks(torch.nn.Module):
    """Made without storage; every value comes from a reset_parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.blocks = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(6, 2, 12, batch_first=True) for _ in range(2)
        )
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def encode(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.mean(1))

    def forward(self, tokens):
        return self.head(self.encode(tokens))


def blank_run(folder, strategy, weights=None):
    with evener.blank():
        model = Blocks()
    return evening(folder, strategy, model=model, weights=weights)


@pytest.mark.parametrize("source", ["seed", "weights"])
def test_a_blank_model_gets_the_values_it_gets_elsewhere(ranks, tmp_path, source):
    weights = None
    if source == "weights":
        with evener.blank():
            model = Blocks()
        materialise(model, "cpu", 7)
        weights = str(tmp_path / "weights.safetensors")
        save_file({name: value.clone() for name, value in model.state_dict().items()}, weights)
    expected = ranks(1)(blank_run, str(tmp_path / "1"), "single", weights)[0]
    for result in ranks(3)(blank_run, str(tmp_path / "3"), "fsdp", weights):
        assert result[:2] == expected[:2]


class Wide(torch.nn.Module):
    """64 MiB in 16 blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def peak_of_construction(folder, weights):
    """Growth of this process's own memory (without mapped files) while the run is made, in MiB; None where it is not
    told."""
    if not Path("/proc/self/status").exists():
        return None
    evening(folder + "-before", "fsdp", 0)  # what is imported and started once
    with evener.blank():
        model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.zeros(8, 1024), torch.zeros(8)
    before, peaks, done = own_memory(), [], threading.Event()

    def watch():
        while not done.wait(0.001):
            peaks.append(own_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    run = evener.Run(
        model, optimizer, lambda model, batch: model(batch[0]).mean(), data, global_batch_size=8, dir=folder,
        strategy="fsdp", precision="fp32", weights=weights, resume="never",
    )  # fmt: skip
    done.set()
    watcher.join()
    values = [p.full_tensor()[1000, 1000].item() for p in model.parameters()]
    run.close()
    return max(peaks) - before, values


def own_memory():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def test_no_rank_holds_the_whole_of_a_blank_model(ranks, tmp_path):
    """A rank's rows are 16 MiB and a tensor is 4 MiB; the model is 64 MiB."""
    weights = str(tmp_path / "wide.safetensors")
    save_file({f"blocks.{i}.weight": torch.full((1024, 1024), float(i + 1)) for i in range(16)}, weights)
    results = ranks(4)(peak_of_construction, str(tmp_path / "run"), weights)
    if None in results:
        pytest.skip("this system does not tell what memory is a process's own")
    assert all(values == [float(i + 1) for i in range(16)] for _, values in results)
    assert max(peak for peak, _ in results) < 28, results
