"""The checkpoints of a run on any number of ranks, and `save` and `load` for users of `Engine`."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

import evener
from evener.checkpoint import Checkpoints, load, save, store
from evener.dist.blank import blank
from evener.errors import CheckpointError, UsageError


def state(value: float) -> dict[str, object]:
    return {"model": {"w": torch.full((3,), value)}, "cursor": [1, 2]}


def a_run(folder, hold_back=()):
    """What a run does with its folder; the same on every rank."""
    points = Checkpoints(folder, keep=2)
    notes = []
    for number in (10, 20, 30, 100):
        notes += points.save(number, state(number) if evener.rank() == 0 else None, {"update": number})
    points.save("best", state(20.5), {"update": 20})
    points.save("best", state(30.5), {"update": 30})
    path, said = points.newest()
    states, about = points.load(path)
    return sorted(os.listdir(folder)), notes + said, path.name, states["model"]["w"].tolist(), about


def test_a_folder_keeps_the_newest_and_the_named(ranks, tmp_path):
    for world in (1, 2, 3):
        for got in ranks(world)(a_run, str(tmp_path / str(world))):
            assert got == (
                ["best", "update-100", "update-30"],
                [],
                "update-100",
                [100.0] * 3,
                {"update": 100, "order": 4},
            )


def failures(folder, kind):
    points = Checkpoints(folder, keep=2)
    main = evener.rank() == 0
    try:
        if kind == "state":
            points.save(1, {"optimizer": {"hook": len if main else 1}}, {})
        elif kind == "disk":
            real = os.fsync
            os.fsync = broken if main else real
            try:
                points.save(2, state(2), {})
            finally:
                os.fsync = real
        elif kind == "unexpected":
            points.save(3, {"x": Surprise()} if main else {}, {})
        elif kind == "load":
            points.save(4, state(4), {})
            points.load(Path(folder) / ("update-4" if main else "update-5"))
    except CheckpointError as error:
        return str(error)
    return ""


def broken(descriptor):
    raise OSError(28, "No space left on device")


class Surprise(dict):
    def __class_getitem__(cls, item):
        raise NotImplementedError

    @property
    def __class__(self):
        raise ValueError("odd")


def test_a_failure_of_one_rank_is_raised_on_all(ranks, tmp_path):
    for kind, text in {
        "state": "optimizer.hook is a builtin_function_or_method",
        "disk": "Disk full",
        "unexpected": "ValueError: odd",
        "load": "rank 1: There is no checkpoint at",
    }.items():
        first, *others = ranks(3)(failures, str(tmp_path), kind)
        assert text in first and all(other == first for other in others), first


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1
    path.write_bytes(data)


def test_a_corrupt_newest_is_refused_named_and_the_previous_one_used(tmp_path):
    points = Checkpoints(tmp_path, keep=5)
    assert points.newest() == (None, [])
    for number in (1, 2, 3):
        points.save(number, state(number), {})
    flip(tmp_path / "update-3" / "tensors-00001.safetensors")
    (tmp_path / "update-2" / "manifest.json").unlink()
    path, notes = points.newest()
    assert path == tmp_path / "update-1"
    assert "checkpoint update-3 is refused" in notes[0] and "tensors-00001.safetensors is corrupt" in notes[0]
    assert "checkpoint update-2 is refused" in notes[1] and notes[2] == "checkpoint update-1 is used instead"
    (tmp_path / "update-1" / "tensors-00001.safetensors").write_bytes(b"")
    path, notes = points.newest()
    assert path is None and notes[-1] == "no earlier checkpoint is there"
    points.save(3, state(3), {})  # over the corrupt one
    assert points.newest() == (tmp_path / "update-3", [])


def test_the_one_just_written_is_never_pruned(tmp_path):
    points = Checkpoints(tmp_path, keep=1)
    points.save(500, state(1), {})
    points.save(400, state(2), {})  # an earlier update was loaded and continued
    assert os.listdir(tmp_path) == ["update-400"]


def test_leftovers_are_swept_and_an_earlier_one_put_back(tmp_path):
    points = Checkpoints(tmp_path, keep=2)
    points.save("best", state(1), {})
    points.save(7, state(7), {})
    os.rename(tmp_path / "best", tmp_path / ".best.00000000.old")
    (tmp_path / ".best.00000000.tmp").mkdir()
    (tmp_path / ".update-8.11111111.tmp").mkdir()
    (tmp_path / ".update-8.11111111.tmp" / "tensors-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".mine").mkdir()
    Checkpoints(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == [".mine", "best", "update-7"]
    assert points.load(points.path("best"))[0]["model"]["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/x", ".x", "-x", "a b", "é", "x\n", "update-7", True, -1, 1.5]
)
def test_bad_names_are_refused(tmp_path, name):
    with pytest.raises(UsageError, match="cannot be the name of a checkpoint"):
        Checkpoints(tmp_path, keep=1).save(name, {}, {})


def test_bad_arguments_are_refused(tmp_path):
    with pytest.raises(UsageError, match="at least 1"):
        Checkpoints(tmp_path, keep=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot hold checkpoints"):
        Checkpoints(tmp_path / "file", keep=1)


# --------------------------------------------------------------------------------------------- save and load


def trained(seed: int):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return model, optimizer, schedule


def train(model, optimizer, schedule, updates):
    for update in updates:
        optimizer.zero_grad()
        torch.manual_seed(update)
        model(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        schedule.step()
    return [value.clone() for value in model.state_dict().values()]


def interrupted(folder):
    model, optimizer, schedule = trained(0)
    whole = train(*trained(0), range(6))
    train(model, optimizer, schedule, range(3))
    save(folder, model=model, optimizer=optimizer, schedule=schedule, extra={"best": 1.5, 3: (1, 2)})
    again = trained(1)
    got = load(folder, model=again[0], optimizer=again[1], schedule=again[2], extra={})
    assert got == {"extra": {"best": 1.5, 3: (1, 2)}}
    resumed = train(*again, range(3, 6))
    return all(torch.equal(one, other) for one, other in zip(whole, resumed))


def test_saved_and_loaded_training_continues_to_the_bit(ranks, tmp_path):
    for world in (1, 2, 3):
        assert ranks(world)(interrupted, str(tmp_path / str(world))) == [True] * world
        assert os.listdir(tmp_path / str(world)) and len(os.listdir(tmp_path)) == world


def test_a_loaded_state_owns_its_memory(tmp_path):
    model, optimizer, schedule = trained(0)
    train(model, optimizer, schedule, range(2))
    table = torch.ones(3)
    save(tmp_path / "c", optimizer=optimizer, extra={"table": table, "same": table})
    first = load(tmp_path / "c", optimizer=optimizer, extra={})["extra"]
    assert first["table"] is first["same"]
    first["table"].zero_()
    train(model, optimizer, schedule, range(2))
    if Path("/proc/self/maps").exists():
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert load(tmp_path / "c", optimizer=optimizer, extra={})["extra"]["table"].tolist() == [1.0] * 3


def test_wrappers_leave_no_trace_in_the_names(tmp_path):
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "c", model=torch.nn.DataParallel(model))
    assert list(store.read(tmp_path / "c")[0]["model"]) == ["weight", "bias"]
    load(tmp_path / "c", model=torch.compile(torch.nn.Linear(2, 2), backend="eager"))


def test_a_model_without_storage_gets_it(tmp_path):
    model = torch.nn.Linear(2, 2)
    save(tmp_path / "c", model=model)
    with blank():
        other = torch.nn.Linear(2, 2)
    load(tmp_path / "c", model=other)
    assert torch.equal(other.weight, model.weight)


def test_names_that_do_not_match_are_named(tmp_path):
    model, optimizer, _ = trained(0)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model=model, optimiser=optimizer)
    text = str(caught.value)
    assert "not in the checkpoint: optimiser" in text and "and not given: optimizer" in text
    assert "optimizer=, not optimiser=" in text
    with pytest.raises(CheckpointError, match="in the checkpoint and not given: optimizer"):
        load(tmp_path / "c", model=model)


def test_another_model_is_refused_and_nothing_is_loaded(tmp_path):
    model, optimizer, _ = trained(0)
    save(tmp_path / "c", model=model, optimizer=optimizer)
    other = torch.nn.Sequential(torch.nn.Linear(4, 9), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    before = other[2].weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "c", model=other, optimizer=torch.optim.AdamW(other.parameters()))
    text = str(caught.value)
    assert "5 not in the model, 2 of another shape" in text and "0.weight is (8, 4), in the model (9, 4)" in text
    assert torch.equal(other[2].weight, before)
    with pytest.raises(CheckpointError, match="optimizer does not accept its state"):
        load(tmp_path / "c", model=model, optimizer=torch.optim.AdamW([model[0].weight]))


def test_what_has_no_state_is_refused(tmp_path):
    with pytest.raises(UsageError, match="nothing to save"):
        save(tmp_path / "c")
    with pytest.raises(UsageError, match=r"epoch= is a int: it has no state_dict\(\)"):
        save(tmp_path / "c", epoch=3)
    save(tmp_path / "c", extra={})
    with pytest.raises(UsageError, match=r"extra= is a int: it has no load_state_dict"):
        load(tmp_path / "c", extra=3)
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load(tmp_path / "nowhere" / "c", extra={})
