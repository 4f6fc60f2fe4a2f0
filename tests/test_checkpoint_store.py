"""A checkpoint is there whole or not at all: kills and failures at every call, flipped bits, full disks, hostile names."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from evener.checkpoint import store, tensors
from evener.checkpoint.manifest import check
from evener.errors import CheckpointError

CALLS = ("open", "write", "fsync", "rename", "mkdir", "unlink", "rmdir")
OLD = {"model": {"w": torch.full((40,), 1.0), "b": torch.arange(3)}, "extra": {"best": 0.5}}
NEW = {"model": {"w": torch.full((50,), 2.0), "b": torch.arange(4)}, "extra": {"best": 0.75}}


def which(path: Path) -> str:
    """Old or "new: what stands at `path`, every value of it."""
    states, about = store.read(path)
    for name, wanted in (("old", OLD), ("new", NEW)):
        if about == {"is": name}:
            assert states["extra"] == wanted["extra"]
            assert all(torch.equal(states["model"][key], wanted["model"][key]) for key in wanted["model"])
            return name
    raise AssertionError(about)


@contextlib.contextmanager
def failing_at(k: int, how, monkeypatch):
    """`how(call)` instead of the k-th call (from 0) of the functions in CALLS. Yields the count so far, in a list."""
    count = [0]

    def wrapped(name, real):
        def function(*args, **kwargs):
            now, count[0] = count[0], count[0] + 1
            return how(name, real, args, kwargs) if now == k else real(*args, **kwargs)

        return function

    with monkeypatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrapped(name, getattr(os, name)))
        yield count


def die_before(name, real, args, kwargs):
    os._exit(9)


def die_after(name, real, args, kwargs):
    try:
        real(*args, **kwargs)
    finally:
        os._exit(9)


def die_halfway(name, real, args, kwargs):
    if name == "write":
        real(args[0], bytes(args[1])[: len(args[1]) // 2])
    os._exit(9)


def fail(name, real, args, kwargs):
    raise OSError(errno.EIO, "Input/output error")


def short(name, real, args, kwargs):
    """A write that takes a part is no failure: the rest must follow."""
    return real(args[0], args[1][:7]) if name == "write" else real(*args, **kwargs)


def in_child(action) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("die", [die_before, die_after, die_halfway])
@pytest.mark.parametrize("there", [True, False])
def test_a_kill_at_any_call_leaves_the_old_or_the_new_whole(tmp_path, monkeypatch, die, there):
    seen = set()
    for k in range(200):
        path = tmp_path / f"{k}" / "last"
        path.parent.mkdir()
        if there:
            store.write(path, OLD, about={"is": "old"})

        def save(k=k, path=path):
            with failing_at(k, die, monkeypatch):
                store.write(path, NEW, about={"is": "new"})

        code = in_child(save)
        store.recover(path)
        assert os.listdir(path.parent) in ([], ["last"])  # nothing is left behind
        seen.add(which(path) if path.exists() else "none")
        if code == 0:
            break
        assert code == 9
    assert seen == ({"old", "new"} if there else {"none", "new"}) and k > 15


def test_a_kill_during_recovery_loses_nothing(tmp_path, monkeypatch):
    for k in range(50):
        path = tmp_path / f"{k}" / "last"
        store.write(path, OLD, about={"is": "old"})
        os.rename(path, path.with_name(".last.0123abcd.old"))
        store.write(path.with_name(".last.0123abcd.tmp"), NEW, about={"is": "new"})

        def again(k=k, path=path):
            with failing_at(k, die_before, monkeypatch):
                store.recover(path)

        code = in_child(again)
        store.recover(path)
        assert os.listdir(path.parent) == ["last"] and which(path) == "old"
        if code == 0:
            break
    assert k > 5


@pytest.mark.parametrize("there", [True, False])
def test_a_failure_at_any_call_leaves_the_old_or_the_new_whole(tmp_path, monkeypatch, there):
    for k in range(200):
        path = tmp_path / f"{k}" / "last"
        path.parent.mkdir()
        if there:
            store.write(path, OLD, about={"is": "old"})
        failed = ""
        with failing_at(k, fail, monkeypatch) as count:
            try:
                store.write(path, NEW, about={"is": "new"})
            except CheckpointError as error:
                failed = str(error)
        store.recover(path)
        assert os.listdir(path.parent) in ([], ["last"])
        if failed:
            assert "could not be written" in failed or "cannot be opened" in failed, failed
            assert not path.exists() or which(path) in ("old", "new")
            assert path.exists() or not there
        else:
            assert which(path) == "new"  # what failed was only the removal of the earlier one
        if count[0] <= k:
            break
    assert k > 15


def test_short_writes_are_completed(tmp_path, monkeypatch):
    for k in range(25):
        with failing_at(k, short, monkeypatch):
            store.write(tmp_path / "last", NEW, about={"is": "new"})
        assert which(tmp_path / "last") == "new"


def test_any_flipped_bit_and_any_truncation_is_refused(tmp_path, test_seed):
    path = tmp_path / "last"
    store.write(path, NEW, about={"is": "new"})
    draw = random.Random(test_seed)
    for _ in range(200):
        file = path / draw.choice(os.listdir(path))
        whole = file.read_bytes()
        bad = bytearray(whole)
        if draw.random() < 0.3:
            del bad[draw.randrange(len(bad)) :]
        else:
            bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match=file.name):
            store.read(path)
        file.write_bytes(whole)
    assert which(path) == "new"


def test_a_missing_or_foreign_file_is_named(tmp_path):
    path = tmp_path / "last"
    with pytest.raises(CheckpointError, match="There is no checkpoint at"):
        store.read(path)
    store.write(path, NEW, about={"is": "new"})
    (path / "tensors-00001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"tensors-00001\.safetensors is missing: the checkpoint is torn"):
        store.read(path)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"manifest\.json was not written by evener"):
        store.read(path)


def reseal(path: Path, change) -> None:
    """Change the manifest as somebody would who computes the hashes anew."""
    body = json.loads((path / "manifest.json").read_bytes())
    del body["sha256"]
    change(body)
    rest = json.dumps(body).encode()[1:]
    (path / "manifest.json").write_bytes(b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "..", "a/b", "tensors-00001.safetensors\n", "manifest.json", "", "x"],
)
def test_hostile_names_in_a_manifest_are_refused(tmp_path, name):
    path = tmp_path / "last"
    store.write(path, NEW, about={"is": "new"})
    (tmp_path / "secret.safetensors").write_bytes((path / "tensors-00001.safetensors").read_bytes())
    reseal(path, lambda body: body["files"].update({name: body["files"].pop("tensors-00001.safetensors")}))
    with pytest.raises(CheckpointError, match="names files that no checkpoint has"):
        store.read(path)


def test_links_and_pipes_are_not_followed(tmp_path):
    path = tmp_path / "last"
    file = path / "tensors-00001.safetensors"
    store.write(path, NEW, about={"is": "new"})
    os.rename(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="links are not followed"):
        store.read(path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        store.read(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(files=[]),
        lambda body: body.pop("about"),
        lambda body: body.update(states=[]),
        lambda body: body["states"].update(x={"$unknown": 1}),
        lambda body: body["files"]["tensors-00001.safetensors"].update(bytes="many"),
    ],
)
def test_a_manifest_of_another_shape_is_refused(tmp_path, change):
    store.write(tmp_path / "last", NEW, about={"is": "new"})
    reseal(tmp_path / "last", change)
    with pytest.raises(CheckpointError, match=r"manifest"):
        store.read(tmp_path / "last")


def test_a_later_format_is_said(tmp_path):
    store.write(tmp_path / "last", NEW, about={"is": "new"})
    reseal(tmp_path / "last", lambda body: body.update(version=2))
    with pytest.raises(CheckpointError, match="is of format 'evener checkpoint' 2; this evener reads"):
        store.read(tmp_path / "last")


def test_saving_never_removes_what_is_no_checkpoint(tmp_path):
    store.write(tmp_path / "last", OLD, about={"is": "old"})
    (tmp_path / "last" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "last")
    for name in ("last", "file", "link"):
        with pytest.raises(CheckpointError, match="is not only a checkpoint"):
            store.write(tmp_path / name, NEW, about={"is": "new"})
    assert which(tmp_path / "last") == "old" and len(os.listdir(tmp_path)) == 3


def test_a_full_disk_is_said_with_numbers(tmp_path, monkeypatch):
    def full(name, real, args, kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    store.write(tmp_path / "last", OLD, about={"is": "old"})
    with failing_at(8, full, monkeypatch), pytest.raises(CheckpointError) as caught:
        store.write(tmp_path / "last", NEW, about={"is": "new"})
    assert "Disk full" in str(caught.value) and "bytes, " in str(caught.value) and "are available" in str(caught.value)
    assert os.listdir(tmp_path) == ["last"] and which(tmp_path / "last") == "old"


def test_a_disk_that_is_really_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", disk], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        store.write(disk / "last", OLD, about={"is": "old"})
        with pytest.raises(CheckpointError, match=r"Disk full: .*last needs 2,065,536 bytes, [\d,]+ are available"):
            store.write(disk / "last", {"model": {"w": torch.zeros(500_000)}}, about={"is": "new"})
        assert os.listdir(disk) == ["last"] and which(disk / "last") == "old"
    finally:
        subprocess.run(["umount", disk], check=True)


def test_tensors_are_cut_into_files_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_FILE_BYTES", 1000)
    state = {f"{i}": torch.randn(100) for i in range(4)} | {"big": torch.randn(3000), "u": torch.zeros(3).bool()}
    store.write(tmp_path / "last", {"model": state}, about={})
    assert sorted(os.listdir(tmp_path / "last")) == ["manifest.json"] + [
        f"tensors-0000{i}.safetensors" for i in range(1, 5)
    ]
    got, _ = store.read(tmp_path / "last")
    assert all(torch.equal(got["model"][name], value) for name, value in state.items())
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert "tensors-00004.safetensors" in maps.read_text()
    got["model"]["big"].zero_()  # changes the memory, not the file
    check(tmp_path / "last")
    shutil.rmtree(tmp_path / "last")
    assert torch.equal(got["model"]["0"], state["0"])  # a file that is removed stays mapped


def test_the_files_are_ordinary_safetensors(tmp_path):
    from safetensors.torch import load_file

    store.write(tmp_path / "last", NEW, about={"is": "new"})
    got = load_file(tmp_path / "last" / "tensors-00001.safetensors")
    assert torch.equal(got["model.w"], NEW["model"]["w"])
    assert all(torch.zeros(1, dtype=dtype).nbytes for dtype in tensors.CODES)


def test_a_living_writer_is_left_alone(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    new = tmp_path / ".last.0123abcd.tmp"
    new.mkdir()
    with open(new / "manifest.json", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.recover(tmp_path / "last")
        assert new.exists()
    store.recover(tmp_path / "last")
    assert not new.exists()


@pytest.mark.parametrize("states", [{}, {"x": None}, {"x": 3, "y": torch.tensor(2.5, dtype=torch.bfloat16)}])
def test_small_states_come_back(tmp_path, states):
    store.write(tmp_path / "a" / "b[1]", states, about={"update": 7})
    assert store.read(tmp_path / "a" / "b[1]") == (states, {"update": 7})


def test_bad_names_and_bad_about_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="States have names"):
        store.write(tmp_path / "x", {"$tensor": 1}, about={})
    with pytest.raises(CheckpointError, match="about= of a checkpoint is not JSON"):
        store.write(tmp_path / "x", {}, about={"a": object()})
    assert os.listdir(tmp_path) == []
