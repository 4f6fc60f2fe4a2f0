"""Run's promises that need no second rank: what is written, shown, prepared, skipped, accumulated, refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import evener
from evener.errors import DataError
from tests.models import make, mlp_rows, row_loss


def run_of(tmp_path, loss_fn=row_loss, data=None, model=None, optimizer=None, **keywords):
    model = model if model is not None else make("mlp")
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {"global_batch_size": 8, "precision": "fp32", "dir": tmp_path / "run", **keywords}
    return evener.Run(model, optimizer, loss_fn, data if data is not None else mlp_rows(20), **keywords)


def events(run):
    return [json.loads(line) for line in Path(run.dir, "events.jsonl").read_text().splitlines()]


def test_the_run_directory_says_what_was_done(tmp_path, capsys):
    model = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    with run_of(tmp_path, model=model, optimizer=optimizer, scheduler=schedule, microbatch_size=4) as run:
        for epoch in run.epochs(2):
            for _ in epoch:
                pass
        run.evaluate(mlp_rows(5))
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["global_batch_size"] == {"value": 8, "origin": "code"}
    assert config["seed"] == {"value": 0, "origin": "default"}
    kinds = [event["kind"] for event in events(run)]
    assert kinds[:2] == ["start", "contract"] and kinds.count("epoch") == 2
    assert "evaluate" in kinds and "finish" in kinds
    line = next(event["line"] for event in events(run) if event["kind"] == "contract")
    assert line == "global batch 8 = 1 rank x 2 microbatches x 4 · fp32 · single · lr per update"
    assert line in capsys.readouterr().out


def test_tensorboard_curves_can_be_read(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with run_of(tmp_path) as run:
        for update in run.updates(updates=12):
            run.log({"mine": update.number})
        directory = run.dir
    curves = EventAccumulator(directory)
    curves.Reload()
    assert {"train/loss", "train/lr", "train/grad_norm", "mine"} <= set(curves.Tags()["scalars"])
    assert [point.value for point in curves.Scalars("mine")] == list(range(12))


def test_updates_continue_where_the_loop_broke_off(tmp_path):
    with run_of(tmp_path) as run:
        for update in run.updates(updates=10):
            if update.number == 3:
                break
        numbers = [update.number for update in run.updates(updates=6)]
        assert numbers == [4, 5]
        assert [update.number for update in run.updates(epochs=3)] == [6, 7, 8]


def test_an_epoch_that_was_not_iterated_is_still_trained(tmp_path):
    with run_of(tmp_path) as run:
        (_, epoch) = run.epochs(2)
        assert epoch.updates == 3 and run.number == 6


def test_before_step_sees_final_gradients_and_may_change_them(tmp_path):
    norms = []

    def surgery(model):
        norms.append(torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item())
        for parameter in model.body.parameters():
            parameter.grad.zero_()

    model = make("mlp")
    body = [p.clone() for p in model.body.parameters()]
    with run_of(tmp_path, model=model, before_step=surgery, precision="fp16", scaler={"init_scale": 64.0}) as run:
        update = next(run.updates(updates=1))
    assert all(torch.equal(a, b) for a, b in zip(body, model.body.parameters()))
    head = make("mlp")
    x, y = mlp_rows(20)
    ids = run._portions[0].ids()
    F.cross_entropy(head(x[ids]), y[ids]).backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in head.parameters()]))
    assert norms[0] == pytest.approx(float(expected), rel=1e-2)  # unscaled
    assert update.grad_norm < norms[0]  # the norm that clips is the norm after the surgery


def test_clip_comes_after_unscale(tmp_path):
    moved = {}
    for precision in ("fp32", "fp16"):
        model = make("mlp")
        before = [p.clone() for p in model.parameters()]
        with run_of(
            tmp_path,
            model=model,
            precision=precision,
            max_grad_norm=0.01,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        ) as run:
            update = next(run.updates(updates=1))
            assert update.grad_norm > 0.05
        moved[precision] = float(sum((a - b).detach().pow(2).sum() for a, b in zip(before, model.parameters())).sqrt())
    assert moved["fp32"] == pytest.approx(0.01, rel=1e-3)
    assert moved["fp16"] == pytest.approx(0.01, rel=2e-2)


def test_prepare_sees_whole_slices_with_their_own_generator(tmp_path):
    log = []

    def prepare(batch, generator):
        x, y = batch
        log.append((len(x), float(torch.rand((), generator=generator))))
        return x + 0.0, y

    with run_of(tmp_path, prepare=prepare, slice_size=4) as run:
        assert run.engine.batch.coupled
        list(run.updates(epochs=1))
        first = list(log)
    assert [rows for rows, _ in first] == [4, 4, 4, 4, 4]
    assert len({draw for _, draw in first}) == 5
    log.clear()
    with run_of(tmp_path, prepare=prepare, slice_size=4) as run:
        list(run.updates(epochs=1))
    assert log == first


class Sometimes(torch.utils.data.Dataset):
    def __init__(self, bad):
        self.x, self.y = mlp_rows(20)
        self.bad = bad

    def __len__(self):
        return 20

    def __getitem__(self, i):
        if i in self.bad:
            raise ValueError(f"corrupt image {i}")
        return self.x[i], self.y[i]


@pytest.mark.parametrize("exact", [False, True])
def test_bad_rows_are_left_out_and_recorded(tmp_path, exact):
    keywords = {"exact": True, "slice_size": 2} if exact else {}
    with run_of(tmp_path, data=Sometimes({3, 11, 12, 13}), on_bad_sample="skip", order="sequential", **keywords) as run:
        rows = [update.rows for update in run.updates(epochs=1)]
        bad = [event for event in events(run) if event["kind"] == "bad_row"]
    assert rows == [7, 5, 4]
    assert [event["row"] for event in bad] == [3, 11, 12, 13] and "corrupt image 3" in bad[0]["error"]


def test_ranks_without_work_are_said():
    from evener.run.words import idle_ranks

    assert idle_ranks(64, 4, 3) == idle_ranks(3, None, 3) == []
    assert idle_ranks(16, 16, 3) == [
        "2 of 3 ranks have nothing to do: an update is one slice of 16 rows; slice_size=5 gives every rank one"
    ]
    assert idle_ranks(2, None, 3) == ["1 of 3 ranks has nothing to do: an update is 2 rows"]
    assert idle_ranks(2, 1, 4) == ["2 of 4 ranks have nothing to do: an update is 2 slices of 1 rows"]


def skipping(folder):
    with run_of(folder, data=Sometimes({3, 11, 12, 13, 19}), on_bad_sample="skip", order="sequential") as run:
        rows = [update.rows for update in run.updates(epochs=2)]
        return rows, run.is_main and [event for event in events(run) if event["kind"] == "bad_row"]


@pytest.mark.parametrize("world", [2, 3])
def test_rows_that_another_rank_could_not_read_are_named_too(ranks, tmp_path, world):
    rows, bad = ranks(world)(skipping, tmp_path)[0]
    assert rows == [7, 5, 3] * 2
    assert sorted((one["update"], one["row"]) for one in bad) == [
        *((0, 3), (1, 11), (1, 12), (1, 13), (2, 19)),
        *((3, 3), (4, 11), (4, 12), (4, 13), (5, 19)),
    ]
    assert {one["rank"] for one in bad} >= set(range(1, world))


def test_a_bad_row_is_named(tmp_path):
    with run_of(tmp_path, data=Sometimes({5})) as run, pytest.raises(DataError) as error:
        list(run.updates(epochs=1))
    assert "row 5" in str(error.value) and "corrupt image 5" in str(error.value)


def test_skipped_updates_name_their_rows(tmp_path, capsys):
    x, y = mlp_rows(20)
    x[13] = float("nan")
    with run_of(tmp_path, data=(x, y)) as run:
        skipped = [update.number for update in run.updates(epochs=1) if update.skipped]
        event = next(event for event in events(run) if event["kind"] == "skip")
    assert event["update"] == skipped[0] and 13 in event["row_ids"] and len(event["row_ids"]) in (8, 4)
    assert f"update {skipped[0]} skipped: its gradients are not finite" in capsys.readouterr().out


def test_a_dataloader_is_taken_for_its_dataset(tmp_path):
    data = TensorDataset(*mlp_rows(20))
    with run_of(tmp_path, data=DataLoader(data, batch_size=3, shuffle=True)) as run:
        assert [update.rows for update in run.updates(epochs=1)] == [8, 8, 4]
    with pytest.raises(DataError, match="evener shards by itself"):
        run_of(tmp_path, data=DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0)))
    with pytest.raises(DataError):
        run_of(tmp_path, data=(torch.zeros(0, 5), torch.zeros(0)))


def test_token_rows_with_ignored_labels_are_caught_in_any_batch(tmp_path):
    x, labels = mlp_rows(20)
    labels[19] = -100

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["labels"])

    run = run_of(tmp_path, loss_fn, {"x": x, "labels": labels}, order="sequential")
    with run, pytest.raises(evener.EvenerError, match="labels hold -100"):
        for update in run.updates(epochs=1):
            assert update.number < 2
    with run_of(tmp_path, loss_fn, {"x": x, "labels": labels}, loss_is="row mean") as run:
        assert len(list(run.updates(epochs=1))) == 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch about itself
def test_torch_compile_trains_like_eager(tmp_path):
    losses = []
    for compile in (False, True):
        with run_of(tmp_path, compile=compile, drop_last=True) as run:
            losses.append([update.loss for update in run.updates(updates=4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_several_groups_frozen_parameters_and_any_optimizer(tmp_path):
    model = make("mlp")
    model.body[0].requires_grad_(False)
    groups = [{"params": model.body.parameters(), "lr": 0.01}, {"params": model.head.parameters(), "lr": 0.1}]
    frozen = model.body[0].weight.clone()
    for maker in (torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adadelta, torch.optim.Adamax, torch.optim.Rprop):
        with run_of(tmp_path, model=model, optimizer=maker(groups)) as run:
            losses = [update.loss for update in run.updates(updates=3)]
        assert all(loss == loss for loss in losses) and torch.equal(frozen, model.body[0].weight)


def test_overrides_from_a_file(tmp_path, monkeypatch):
    (tmp_path / "evener.toml").write_text("microbatch_size = 2\n")
    monkeypatch.chdir(tmp_path)
    with run_of(tmp_path) as run:
        assert run.engine.cut.microbatch_size == 2
        config = json.loads((tmp_path / "run" / "config.json").read_text())
        assert config["microbatch_size"] == {"value": 2, "origin": "evener.toml"}


def test_gradient_penalty_and_double_backward(tmp_path):
    def loss_fn(model, batch):
        x, y = batch
        x = x.detach().requires_grad_(True)
        logits = model(x)
        (gradient,) = torch.autograd.grad(logits.sum(), x, create_graph=True)
        return F.cross_entropy(logits, y) + gradient.pow(2).sum(1).mean()

    with run_of(tmp_path, loss_fn, microbatch_size=3, max_grad_norm=1.0) as run:
        losses = [update.loss for update in run.updates(updates=30)]
    assert losses[-1] < losses[0]


def test_models_are_plain_inside_loss_fn(tmp_path):
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make("mlp")

        def encode(self, x):
            return self.net(x)

    model = Encoder()

    def loss_fn(seen, batch):
        assert seen is model
        return F.cross_entropy(seen.encode(batch[0]), batch[1]) + 0.1 * seen.encode(batch[0]).pow(2).mean()

    with run_of(tmp_path, loss_fn, model=model) as run:
        assert next(run.updates(updates=1)).loss > 0


def test_the_last_values_come_after_what_the_body_said(tmp_path, capsys):
    with run_of(tmp_path) as run:
        for epoch in run.epochs(2):
            for update in epoch:
                run.print("body", update.number)
            run.print("epoch", epoch.number)
    with run_of(tmp_path / "other") as run:
        for update in run.updates(updates=3):
            run.print("mine", update.number)
    lines = [line.split(" · ")[0] for line in capsys.readouterr().out.splitlines()]
    assert lines.index("update 6/6") == lines.index("body 5") + 1 == lines.index("epoch 1") - 1, lines
    assert lines.index("update 3/3") == lines.index("mine 2") + 1, lines


def test_what_run_was_not_given_is_named(tmp_path):
    model = make("mlp")
    for given, what in (((), "a model"), ((model,), "an optimizer")):
        with pytest.raises(
            evener.errors.UsageError, match=rf"^Run needs {what}\.\n  fix: Run\(model, optimizer, loss_fn, dataset"
        ):
            evener.Run(*given, global_batch_size=8)


def test_a_model_made_in_inference_mode_is_refused_and_may_be_evaluated(tmp_path):
    with torch.inference_mode():
        model = make("mlp")
    with pytest.raises(evener.errors.ModelError, match=r"the model was made inside torch\.inference_mode\(\)"):
        run_of(tmp_path, model=model)
    with run_of(tmp_path) as run:
        assert set(run.evaluate(mlp_rows(5), model=model)) == {"loss", "accuracy"}
