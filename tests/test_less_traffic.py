"""`gradient_compression` and `sync_every`: less between ranks, close to the same training, and always called approximate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import evener
from tests.models import mlp_rows, row_loss, seeded
from tests.test_fsdp_gradients import Net, loss_fn, new_engine, rows, token_loss, whole

EDGES = (0, 5, 6, 13)


def mine(batch):
    start, stop = (round(EDGES[-1] * r / evener.world_size()) for r in (evener.rank(), evener.rank() + 1))
    if evener.world_size() == 3:
        start, stop = EDGES[evener.rank()], EDGES[evener.rank() + 1]
    return tuple(t[start:stop] for t in batch)


def train(strategy, loss, how, updates=4, optimizer=torch.optim.SGD, dtype=torch.float64, precision="fp32"):
    model = seeded(Net).to(dtype)
    engine = new_engine(
        model, optimizer(model.parameters(), lr=0.1), loss, strategy=strategy, precision=precision, max_grad_norm=1.0,
        seed=1, **how,
    )  # fmt: skip
    said = [engine.step(mine(rows(EDGES[-1], seed=k))) for k in range(updates)]
    apart = {
        name: p.detach().double().sum().item() for name, p in model.named_parameters() if not hasattr(p, "placements")
    }
    digest = engine.digest()
    values = {name: whole(p.detach()) for name, p in model.named_parameters()}
    approximate = engine.approximate
    engine.close()
    return values, [(u.loss, u.count, u.grad_norm, u.skipped) for u in said], digest, apart, approximate


def off(values, expected):
    """The relative distance of all parameters together."""
    pairs = [(values[name].double(), expected[name].double()) for name in expected]
    return float(sum((a - b).square().sum() for a, b in pairs).sqrt() / sum(b.square().sum() for _, b in pairs).sqrt())


@pytest.mark.parametrize("loss", [loss_fn, token_loss])
def test_averaging_after_every_step_of_sgd_is_ddp(ranks, loss):
    """Uneven rows, other denominators, parameters that some ranks never use: exactly the global batch's gradient."""
    expected = ranks(1)(plain, "single", loss, {})[0]
    for values in ranks(3)(plain, "ddp", loss, {"sync_every": 1}):
        assert off(values, expected) < 1e-14


def plain(strategy, loss, how):
    model = seeded(Net).double()
    engine = new_engine(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, strategy=strategy, **how)
    for k in range(3):
        engine.step(mine(rows(EDGES[-1], seed=k)))
    engine.meet()
    engine.close()
    return {name: p.detach() for name, p in model.named_parameters()}


def test_ranks_go_apart_and_meet_again(ranks):
    results = ranks(3)(train, "ddp", loss_fn, {"sync_every": 4, "ema": 0.5}, 6, torch.optim.AdamW)
    apart = [result[3]["blocks.0.up.weight"] for result in results]
    assert len(set(apart)) == 3  # two updates after the last meeting
    assert len({result[2] for result in results}) == 1  # a digest looks: they have met
    assert all(result[1] == results[0][1] for result in results)  # losses, norms and skips are the same everywhere
    expected = ranks(1)(train, "single", loss_fn, {}, 6, torch.optim.AdamW)[0]
    assert 1e-6 < off(results[0][0], expected[0]) < 0.5  # AdamW's steps are as large as its lr of 0.1
    assert results[0][4] == ("ranks averaged every 4 updates",)


def poisoned(how):
    model = seeded(Net)
    engine = new_engine(model, torch.optim.AdamW(model.parameters(), lr=0.1), loss_fn, strategy="ddp", **how)
    skipped = []
    for k in range(4):
        with torch.no_grad():
            if k == 1 and evener.rank() == 1:
                before = model.temperature.clone()
                model.temperature.fill_(float("inf"))
        skipped.append(engine.step(mine(rows(EDGES[-1], seed=k))).skipped)
        with torch.no_grad():
            if k == 1 and evener.rank() == 1:
                model.temperature.copy_(before)
    digest = engine.digest()
    engine.close()
    return skipped, digest


def test_one_rank_that_is_not_finite_makes_all_skip(ranks):
    results = ranks(3)(poisoned, {"sync_every": 2})
    assert all(result == results[0] for result in results) and results[0][0] == [False, True, False, False]


@pytest.mark.parametrize(("strategy", "world"), [("ddp", 3), ("fsdp", 2)])
@pytest.mark.parametrize("word", ["bf16", "fp16"])
def test_compressed_gradients_are_close(ranks, strategy, world, word):
    """Token sums of a few hundred rows would not fit into fp16: a power of two goes in before."""
    expected = ranks(1)(train, "single", token_loss, {}, 4, torch.optim.SGD, torch.float32)[0]
    results = ranks(world)(
        train, strategy, token_loss, {"gradient_compression": word}, 4, torch.optim.SGD, torch.float32
    )
    for values, said, *_, approximate in results:
        assert 0 < off(values, expected[0]) < (2e-3 if word == "bf16" else 3e-4)
        assert said[-1][0] == pytest.approx(expected[1][-1][0], rel=1e-2) and not any(one[3] for one in said)
        assert approximate == (f"{word} gradients between ranks",)


def evening(folder, how, stop_at=None, updates=7):
    model = seeded(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)))
    run = evener.Run(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), row_loss, mlp_rows(40), global_batch_size=12,
        precision="fp32", dir=folder, save_every=3, ema=0.9, **how,
    )  # fmt: skip
    try:
        for update in run.updates(updates=updates):
            if update.number == stop_at:
                run.stop("enough")
        return run.contract_line(), run.digest(), run.evaluate(mlp_rows(9))["loss"], run.path.name
    except evener.Stopped:
        return ("stopped",)
    finally:
        run.close()


@pytest.mark.parametrize("how", [{"sync_every": 2}, {"gradient_compression": "bf16"}])
def test_saved_resumed_and_labelled(ranks, tmp_path, how):
    """A save is a meeting: stopped there and started again it is the same run, to the bit."""
    whole = ranks(3)(evening, str(tmp_path / "a"), how)
    assert all(one == whole[0] for one in whole) and "approximate: " in whole[0][0]
    assert set(ranks(3)(evening, str(tmp_path / "b"), how, 5)) == {("stopped",)}
    again = ranks(3)(evening, str(tmp_path / "b"), how)
    assert again[0][3] == "b"
    if "sync_every" not in how:  # there the stop's own save is one meeting more
        assert again[0][1:3] == whole[0][1:3]
    else:
        assert again[0][2] == pytest.approx(whole[0][2], rel=0.05)
    other = ranks(3)(evening, str(tmp_path / "b"), {}, None, 1)
    assert other[0][3] == "b-2" and "approximate" not in other[0][0]  # another configuration is another run


def test_stopped_where_it_saves_anyway_it_is_the_same_run(ranks, tmp_path):
    whole = ranks(3)(evening, str(tmp_path / "a"), {"sync_every": 2})[0]
    ranks(3)(evening, str(tmp_path / "b"), {"sync_every": 2}, 1)  # a stop travels with an update: after three
    assert ranks(3)(evening, str(tmp_path / "b"), {"sync_every": 2})[0][1:3] == whole[1:3]


def test_one_process_has_no_traffic(ranks):
    for how in ({"sync_every": 3}, {"gradient_compression": "fp16"}):
        values, *_, approximate = ranks(1)(train, "single", loss_fn, how)[0]
        assert approximate == () and off(values, ranks(1)(train, "single", loss_fn, {})[0][0]) == 0


def refused(how):
    try:
        new_engine(nn.Linear(5, 3), loss=row_loss, **{"strategy": "ddp", **how})
    except evener.EvenerError as error:
        return str(error)
    return "taken"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"sync_every": 2, "exact": True, "slice_size": 2}, "sync_every=2 with exact=True"),
        (
            {"gradient_compression": "bf16", "exact": True, "slice_size": 2},
            "gradient_compression='bf16' with exact=True",
        ),
        ({"gradient_compression": "bf16", "sync_every": 2}, "no gradients travel then"),
        ({"sync_every": 2, "strategy": "fsdp"}, "cannot step alone"),
        ({"gradient_compression": "bf16", "precision": {"reduce": "fp32"}}, "two answers to one question"),
        ({"gradient_compression": "int8"}, "fp16, bf16"),
    ],
)
def test_what_cannot_be_is_refused(ranks, how, text):
    for said in ranks(2)(refused, how):
        assert text in said


def test_a_number_of_updates_is_a_whole_one():
    model = nn.Linear(1, 1)
    with pytest.raises(evener.EvenerError, match=r"sync_every is None or a whole number of updates from 1"):
        evener.Run(model, torch.optim.SGD(model.parameters()), row_loss, [1], global_batch_size=1, sync_every=0)
