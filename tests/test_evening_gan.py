"""Several models and optimizers in turns: a GAN with five critic steps for each step of the generator."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import evener

EXAMPLE = Path(__file__).parent.parent / "examples" / "gan.py"
CYCLE = 6


def data(rows=45):
    generator = torch.Generator().manual_seed(3)
    angle = 6.28 * torch.rand(rows, generator=generator)
    return torch.stack([angle.cos(), angle.sin()], 1)


def networks():
    state = torch.get_rng_state()
    torch.manual_seed(0)
    g = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.LeakyReLU(), nn.Linear(8, 2))
    d = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    torch.set_rng_state(state)
    return {"g": g, "d": d}


def critic_loss(models, real):
    with torch.no_grad():
        made = models["g"](torch.randn(len(real), 4))
    share = torch.rand(len(real), 1)
    between = (share * real + (1 - share) * made).requires_grad_(True)
    (slope,) = torch.autograd.grad(models["d"](between).sum(), between, create_graph=True)
    distance = models["d"](real) - models["d"](made)
    metrics = {"distance": evener.Mean(total=distance.sum().detach(), count=len(real))}
    return 10 * (slope.norm(dim=1) - 1).square().mean() - distance.mean(), metrics


def generator_loss(models, real):
    return -models["d"](models["g"](torch.randn(len(real), 4))).mean()


def cosine(steps_per_batch):
    return lambda optimizer, batches: torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, max(1, int(batches * steps_per_batch))
    )


def new_run(folder, **keywords):
    models = networks()
    optimizers = {
        "g": torch.optim.Adam(models["g"].parameters(), lr=1e-2),
        "d": torch.optim.AdamW(models["d"].parameters(), lr=2e-2),
    }
    keywords = {
        "global_batch_size": 8,
        "exact": True,
        "slice_size": 2,
        "precision": "fp32",
        "max_grad_norm": {"d": 1.0},
        "scheduler": {"g": cosine(1 / 5), "d": cosine(1)},
        "save_every": 5,
        "dir": folder,
        **keywords,
    }
    return evener.Run(models, optimizers, dataset=data(), **keywords)


def evening(folder, stop_at=None, fail_at=None, keywords=None):
    run = new_run(folder, **(keywords or {}))
    trail = run.state.setdefault("trail", [])
    try:
        for batch in run.batches(epochs=3):
            updates = [run.step(batch, loss_fn=critic_loss, optimizer="d")]
            if run.number % CYCLE == CYCLE - 1:
                updates.append(run.step(batch, loss_fn=generator_loss, optimizer="g"))
            trail += [[u.number, u.loss, u.lr, u.grad_norm, u.epoch] for u in updates]
            if stop_at is not None and run.number > stop_at:
                run.stop()
                stop_at = None
            if fail_at is not None and run.number > fail_at:
                raise RuntimeError("the power went")
        return "finished", run.digest(), trail, [o.param_groups[0]["lr"] for o in run.optimizer.values()]
    except (evener.Stopped, RuntimeError) as error:
        return (type(error).__name__,)
    finally:
        run.loop.ended = run.loop.ended and sys.exc_info()[0] is None
        run.close()


@pytest.fixture(scope="module")
def uninterrupted(ranks, tmp_path_factory):
    return ranks(1)(evening, str(tmp_path_factory.mktemp("gan") / "run"))[0]


def test_both_networks_train_and_the_schedules_are_their_own(uninterrupted):
    state, _, trail, rates = uninterrupted
    assert state == "finished" and len(trail) == 18 + 3
    assert [row[0] for row in trail] == list(range(21))
    # the critic made 18 steps of 18, the generator 3 of 3: both schedules have arrived
    assert rates == pytest.approx([0, 0], abs=1e-9)
    assert [row[2] for row in trail if row[0] % CYCLE == 5] == pytest.approx([0.01, 0.0075, 0.0025])


@pytest.mark.parametrize(("how", "first", "second", "at"), [("stop", 1, 3, 6), ("stop", 3, 1, 10), ("fail", 3, 1, 7), ("fail", 1, 3, 13)])  # fmt: skip
def test_interrupted_and_started_on_another_number_of_processes(ranks, tmp_path, uninterrupted, how, first, second, at):
    folder = str(tmp_path / "run")
    ended = ranks(first)(evening, folder, *((at, None) if how == "stop" else (None, at)))
    assert {one[0] for one in ended} == {"Stopped" if how == "stop" else "RuntimeError"}
    assert ranks(second)(evening, folder) == [uninterrupted] * second


def gradients_of_the_others(strategy_keywords):
    models = networks()
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    engine = evener.Engine(
        models, optimizers, device="cpu", precision="fp32", global_batch_size=12, **strategy_keywords
    )
    rows = data(12)[
        engine.group.rank * 12 // engine.group.world_size : (engine.group.rank + 1) * 12 // engine.group.world_size
    ]
    changed = []
    for name, other, loss in (("d", "g", critic_loss), ("g", "d", generator_loss)):
        marks = {n: torch.full_like(p, 7.0) for n, p in models[other].named_parameters()}
        for n, p in models[other].named_parameters():
            p.grad = marks[n]
        weights = {n: p.clone() for n, p in models[other].named_parameters()}
        engine.backward(rows, loss, optimizer=name)
        assert all(p.grad is not None and not (p.grad == 7).all() for p in models[name].parameters())
        engine.apply()
        changed += [p.grad is not marks[n] or not (p.grad == 7).all() for n, p in models[other].named_parameters()]
        changed += [not torch.equal(p, weights[n]) for n, p in models[other].named_parameters()]
        for p in models[other].parameters():
            p.grad = None
    engine.close()
    return changed


@pytest.mark.parametrize("keywords", [{}, {"exact": True, "slice_size": 2}], ids=["fast", "exact"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_the_stepped_optimizers_parameters_receive_gradients(ranks, world, keywords):
    assert not any(any(changed) for changed in ranks(world)(gradients_of_the_others, keywords))


def scales(folder, bad):
    """fp16: two generator updates and two critic updates, one of them with a loss that is not finite."""
    run = new_run(folder, exact=False, slice_size=None, precision="fp16", scaler={"d": {"init_scale": 64.0}, "g": {"init_scale": 32.0}}, scheduler=None)  # fmt: skip

    def broken(models, real):
        return generator_loss(models, real) * float("nan")

    seen = []
    with run:
        for batch in run.batches(batches=2):
            u = run.step(batch, loss_fn=broken if bad and run.number == 0 else generator_loss, optimizer="g")
            seen.append(("g", u.scale, u.skipped))
            for _ in range(3):
                u = run.step(batch, loss_fn=critic_loss, optimizer="d")
                seen.append(("d", u.scale, u.skipped))
    return seen, run.dir


@pytest.mark.parametrize("world", [1, 2])
def test_one_loss_scale_per_optimizer_and_a_skip_names_its_rows(ranks, tmp_path, world):
    results = ranks(world)(scales, str(tmp_path / "run"), True)
    for seen, _ in results:
        assert [scale for name, scale, _ in seen if name == "g"] == [32.0, 16.0]
        assert {scale for name, scale, _ in seen if name == "d"} == {64.0}
        assert [skipped for *_, skipped in seen] == [True] + 7 * [False]
    events = [json.loads(line) for line in Path(results[0][1], "events.jsonl").read_text().splitlines()]
    (skip,) = [event for event in events if event["kind"] == "skip"]
    assert skip["update"] == 0 and len(skip["row_ids"]) == 8


def asked_by_one_rank(folder):
    """Every second batch makes no update; one rank asks for a stop in such a batch."""
    run = new_run(folder)
    seen = []
    try:
        for number, batch in enumerate(run.batches(epochs=3)):
            if number % 2:
                run.step(batch, loss_fn=critic_loss, optimizer="d")
            elif number == 4 and run.rank == run.world_size - 1:
                run.stop("one rank")
            seen.append(number)
    except evener.Stopped as stopped:
        return seen, stopped.reason
    finally:
        run.close()


@pytest.mark.parametrize("world", [1, 3])
def test_a_stop_asked_in_a_batch_without_an_update_reaches_all_ranks(ranks, tmp_path, world):
    results = ranks(world)(asked_by_one_rank, str(tmp_path / "run"))
    assert {reason for _, reason in results} == {"one rank"}
    assert all(seen == results[0][0] for seen, _ in results) and results[0][0][-1] in (4, 5, 6)


def run_example(folder, *arguments, launcher=("-m", "evener", "run", "--nproc", "2", "--cpu"), stop_after=None):
    process = subprocess.Popen(
        [sys.executable, *launcher, str(EXAMPLE), "--exact", *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )  # fmt: skip
    if stop_after is not None:
        for line in process.stdout:
            if line.startswith(stop_after):
                process.send_signal(signal.SIGTERM)
                break
    output, _ = process.communicate(timeout=150)
    return process.returncode, output


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="the digits are scikit-learn's")
def test_the_example_is_stopped_on_two_processes_and_finished_by_one(tmp_path):
    (tmp_path / "whole").mkdir()
    code, whole = run_example(tmp_path / "whole", "--epochs", "2", launcher=())
    assert code == 0 and "g: lr 1e-3, then by its schedule" in whole, whole
    code, output = run_example(tmp_path, "--epochs", "2", stop_after="update 1/")
    assert code == 75, output
    code, output = run_example(tmp_path, "--epochs", "2", launcher=())
    assert code == 0 and "continues runs/gan after" in output, output
    assert re.search(r"digest \w+", output)[0] == re.search(r"digest \w+", whole)[0]
    assert output.count("\n") > 16  # two digits were drawn
