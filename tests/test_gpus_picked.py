"""Which GPUs a wish gets: idle, of one kind, the best connected; and `evener run --gpus` starts on exactly those."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import ShortageError, UsageError
from evener.gpus import look, pick
from evener.gpus.leases import Folder
from evener.gpus.nvml import PATHS
from evener.gpus.values import GIB, Gpu, Health, Holder, Link, MigDevice, Process, Snapshot
from tests.fakenvml import EIGHT, ZOO, Fake, needs_compiler

OUTSIDER = Process(7, "ann", "python", GIB)


def gpu(index: int, name: str = "A100", **more: object) -> Gpu:
    plain = {"memory_total_bytes": 80 * GIB, "memory_used_bytes": 0, "memory_free_bytes": 80 * GIB, "processes": ()}
    return Gpu(index, f"GPU-{index:02d}", name, memory_reserved_bytes=0, **{**plain, **more})


def judged(*gpus: Gpu, links: tuple[Link, ...] = (), held: tuple[str, ...] = ()) -> pick.Universe:
    snapshot = Snapshot(gpus=gpus, links=links, source="nvml")
    seen = look.judge(snapshot, {}, lambda uuid: Holder(1, "bob") if uuid in held else None)
    return pick.universe(seen, {})


def indices(found: pick.Picked) -> list[int]:
    return [one.index for one in found.gpus]


def refusal(wish: pick.Wish, world: pick.Universe) -> ShortageError:
    with pytest.raises(ShortageError) as caught:
        pick.choose(wish, world)
    return caught.value


# --- properties: any machine, any wish --------------------------------------------------------------------------------

machines = st.lists(
    st.builds(
        dict,
        name=st.sampled_from(["A100", "H100"]),
        processes=st.sampled_from([(), (), (), (OUTSIDER,), None]),
        memory_used_bytes=st.sampled_from([0, 0, GIB]),
        error=st.sampled_from([None, None, None, "GPU is lost"]),
        mig_enabled=st.sampled_from([False, False, True, None]),
        health=st.sampled_from([Health(), Health(), Health(compute_mode="prohibited")]),
    ),
    min_size=1,
    max_size=8,
)
wishes = st.builds(
    pick.Wish, count=st.one_of(st.none(), st.integers(1, 8)), model=st.sampled_from([None, "a100"]), share=st.booleans()
)


@settings(max_examples=200, deadline=None)
@given(machines, wishes, st.sets(st.integers(0, 7)), st.data())
def test_a_choice_is_what_was_wished_and_never_half_of_it(machine, wish, held, data):
    gpus = [gpu(i, **values) for i, values in enumerate(machine)]
    pairs = list(itertools.combinations(range(len(gpus)), 2))
    paths = data.draw(st.lists(st.sampled_from([*PATHS.values(), None]), min_size=len(pairs), max_size=len(pairs)))
    links = tuple(Link(a, b, path, 0, "ok") for (a, b), path in zip(pairs, paths))
    world = judged(*gpus, links=links, held=tuple(f"GPU-{i:02d}" for i in held))
    seen = world.snapshot.gpus
    fit = [
        one
        for one in seen
        if not one.error
        and not one.mig_enabled
        and one.health.compute_mode != "prohibited"
        and (wish.model is None or one.name == "A100")
        and (one.lease is None if wish.share else one.idle)
    ]
    kinds = {name: [one for one in fit if one.name == name] for name in ("A100", "H100")}
    largest = max(len(kind) for kind in kinds.values())
    if largest < (wish.count or 1):
        # Every GPU that did not fit is accounted for.
        evidence = refusal(wish, world).evidence
        for one in seen:
            heads = [line.partition(":")[0].removeprefix("GPU ").split(", ") for line in evidence]
            assert one in fit or any(str(one.index) in head for head in heads)
        return
    found = pick.choose(wish, world)
    assert len(found.gpus) == (wish.count or largest)
    assert all(one in fit for one in found.gpus) and len({one.name for one in found.gpus}) == 1
    assert list(found.gpus) == sorted(found.gpus, key=lambda one: one.index)
    if wish.count is not None:
        # No other set of that kind and as idle has a better worst pair.
        quality = {(link.a, link.b): pick.PATH_QUALITY.get(link.path or "", 0) for link in links}

        def worst(chosen: tuple[Gpu, ...]) -> tuple[int, float]:
            busy = sum(not one.idle for one in chosen)
            pairs = itertools.combinations(sorted(one.index for one in chosen), 2)
            return -busy, min((quality[pair] for pair in pairs), default=0)

        kind = kinds[found.gpus[0].name]
        assert worst(found.gpus) == max(worst(other) for other in itertools.combinations(kind, wish.count))


# --- cases ------------------------------------------------------------------------------------------------------------


def test_nvlinks_beat_pcie_and_a_broken_pair_loses():
    links = {(a, b): Link(a, b, "one socket", 0, "ok") for a, b in itertools.combinations(range(6), 2)}
    links[0, 3] = Link(0, 3, "other socket", 4, "ok")
    assert indices(pick.choose(pick.Wish(count=2), judged(*map(gpu, range(6)), links=tuple(links.values())))) == [0, 3]
    links[0, 3] = Link(0, 3, "other socket", 4, "chipset not supported")
    links[1, 2] = Link(1, 2, "one PCIe switch", 0, "ok")
    assert indices(pick.choose(pick.Wish(count=2), judged(*map(gpu, range(6)), links=tuple(links.values())))) == [1, 2]


def test_among_equals_the_least_used_then_the_highest_index():
    assert indices(pick.choose(pick.Wish(count=2), judged(*map(gpu, range(4))))) == [2, 3]
    busy = gpu(3, memory_used_bytes=100 * 1024**2)
    assert indices(pick.choose(pick.Wish(count=2), judged(*map(gpu, range(3)), busy))) == [1, 2]


def test_many_gpus_are_chosen_quickly():
    links = tuple(
        Link(a, b, "one PCIe switch" if a // 4 == b // 4 else "other socket", 0, "ok")
        for a, b in itertools.combinations(range(32), 2)
    )
    chosen = indices(pick.choose(pick.Wish(count=4), judged(*map(gpu, range(32)), links=links)))
    assert len({index // 4 for index in chosen}) == 1
    assert len(indices(pick.choose(pick.Wish(count=16), judged(*map(gpu, range(32)), links=links)))) == 16


def test_kinds_are_not_mixed_and_auto_says_what_it_leaves_out():
    world = judged(gpu(0, "H100", compute_capability="9.0"), gpu(1), gpu(2), gpu(3, processes=(OUTSIDER,)))
    auto = pick.choose(pick.Wish(), world)
    assert indices(auto) == [1, 2]
    assert auto.notes == (
        "GPU 0 left out: another kind (H100)",
        "GPU 3 left out: ann, pid 7, 1.0 GiB: python",
    )
    assert indices(pick.choose(pick.Wish(count=1), world)) == [0], "one: the strongest"
    short = refusal(pick.Wish(count=3), world)
    assert "they would have to be of one kind; free are 1 H100, 2 A100" in str(short)
    named = pick.choose(pick.parse("0,1"), world)
    assert indices(named) == [0, 1] and "these GPUs differ (H100, A100)" in named.notes[0]


def test_a_lease_is_never_shared_and_sharing_is_said():
    world = judged(gpu(0, processes=(OUTSIDER,)), gpu(1), held=("GPU-01",))
    assert indices(pick.choose(pick.Wish(count=1, share=True), world)) == [0]
    assert pick.choose(pick.Wish(count=1, share=True), world).notes == ("GPU 0 is shared: ann, pid 7, 1.0 GiB: python",)
    assert "lease of bob, pid 1" in str(refusal(pick.Wish(words=("1",), share=True), world))


def test_mig_devices_are_taken_by_uuid_only():
    parts = (
        MigDevice(0, "MIG-aa", "1g", memory_used_bytes=0, processes=()),
        MigDevice(1, "MIG-bb", "1g", memory_used_bytes=0),
    )
    world = judged(gpu(0, mig_enabled=True, mig=parts))
    assert "MIG is on: its MIG devices are taken by their UUIDs" in str(refusal(pick.Wish(count=1), world))
    assert pick.choose(pick.parse("MIG-bb"), world).uuids == ("MIG-bb",)


@pytest.mark.parametrize(
    "text, wish",
    [
        ("auto", pick.Wish()),
        ("2", pick.Wish(count=2)),
        ("0,3", pick.Wish(words=("0", "3"))),
        ("3,", pick.Wish(words=("3",))),
        ("GPU-8f2e, GPU-1c", pick.Wish(words=("GPU-8f2e", "GPU-1c"))),
        ("MIG-8f2e", pick.Wish(words=("MIG-8f2e",))),
    ],
)
def test_what_can_be_said(text, wish):
    assert pick.parse(text) == wish


@pytest.mark.parametrize(
    "text, count",
    [("20GB", 20 * 10**9), ("20GiB", 20 * 2**30), ("20G", 20 * 2**30), ("1.5T", 3 * 2**39), ("500mb", 5 * 10**8)],
)
def test_sizes(text, count):
    assert pick.parse_size(text, "--min-free") == count


def test_words_that_name_no_gpu_are_refused_with_those_that_are_there():
    world = judged(gpu(0), gpu(1))
    for words, text in ((("5",), "5 is no GPU of this machine"), (("GPU-0",), "GPU-0 means 2 GPUs")):
        with pytest.raises(UsageError) as caught:
            pick.choose(pick.Wish(words=words), world)
        assert text in str(caught.value) and "GPU 1: GPU-01 A100" in str(caught.value)
    with pytest.raises(UsageError, match=r"names GPU-01 twice"):
        pick.choose(pick.Wish(words=("1", "GPU-01")), world)
    narrow = dataclasses.replace(world, uuids=frozenset({"GPU-00"}), why="CUDA_VISIBLE_DEVICES=0: cuda:0 is GPU 0")
    with pytest.raises(UsageError, match=r"1 is not among the GPUs that this process may use(.|\n)*cuda:0 is GPU 0"):
        pick.choose(pick.Wish(words=("1",)), narrow)


# --- evener run ---------------------------------------------------------------------------------------------------------


def dry_run(fake: Fake | None, folder: Path, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text("")
    base = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "SLURM_", "KUBERNETES_", "OMP_"))}
    env = fake.environ(base, **environ) if fake else {**base, **environ}
    command = [sys.executable, "-m", "evener", "run", "--dry-run", "--lock-folder", str(folder / "locks")]
    return subprocess.run([*command, *map(str, words), "train.py"], cwd=folder, env=env, capture_output=True, text=True)


def exported(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if "CUDA_VISIBLE_DEVICES" in line)
    return line.partition("=")[2].removesuffix(" \\").replace("-0000-4000-8000-0000000000", "..")


@needs_compiler
def test_run_exports_the_uuids_of_what_it_picked(tmp_path):
    fake = Fake(tmp_path, EIGHT + "\nlink 1 4 nvlink=4")
    fake.occupy(os.getpid(), "7 C 9000")
    assert exported(dry_run(fake, tmp_path, "--gpus", 2)) == "GPU-fa4e0001..01,GPU-fa4e0004..04"
    assert exported(dry_run(fake, tmp_path, "--nproc", 2)) == "GPU-fa4e0001..01,GPU-fa4e0004..04"
    assert exported(dry_run(fake, tmp_path, "--gpus", "3,")) == "GPU-fa4e0003..03"
    assert exported(dry_run(fake, tmp_path, "--gpus", "5,2")) == "GPU-fa4e0005..05,GPU-fa4e0002..02", "in that order"
    every = dry_run(fake, tmp_path)
    assert exported(every).count("GPU-") == 7 and "--nproc-per-node=7" in every.stdout
    assert "# 7 processes on GPU 0, 1, 2, 3, 4, 5, 6 (NVIDIA A100-SXM4-80GB)" in every.stdout
    assert "# GPU 7 left out: " in every.stdout and f"pid {os.getpid()}" in every.stdout
    one = dry_run(fake, tmp_path, "--gpus", 4, "--nproc", 1)
    assert exported(one).count("GPU-") == 4 and "--nproc-per-node=1" in one.stdout
    shared = dry_run(fake, tmp_path, "--gpus", "7,", "--share")
    assert exported(shared) == "GPU-fa4e0007..07" and "is shared: " in shared.stdout
    # The user's own choice is the universe.
    mine = dry_run(fake, tmp_path, CUDA_VISIBLE_DEVICES="7,2")
    assert exported(mine) == "GPU-fa4e0002..02"
    assert not (tmp_path / "locks").exists(), "a dry run takes nothing"


@needs_compiler
def test_a_mig_device_that_the_user_named_is_what_runs(tmp_path):
    fake = Fake(tmp_path, ZOO)
    uuid = "MIG-31600002-0000-4000-8000-000200000001"
    assert exported(dry_run(fake, tmp_path, CUDA_VISIBLE_DEVICES=uuid)) == uuid
    assert exported(dry_run(fake, tmp_path, "--gpus", "MIG-31600002-0000-4000-8000-000200000001")) == uuid
    fake.occupy(os.getpid(), "2.1 C 900")
    busy = dry_run(fake, tmp_path, CUDA_VISIBLE_DEVICES=uuid)
    assert busy.returncode == 3 and f"pid {os.getpid()}" in busy.stderr


@needs_compiler
@pytest.mark.parametrize(
    "scenario, words, environ, code, texts",
    [
        (
            ZOO,
            ("--gpus", 2, "--model", "A100"),
            {},
            3,
            ["1 of 8 GPUs fit now", "GPU 7: GPU is lost", "--wait", "--share"],
        ),
        (ZOO, ("--gpus", "7,"), {}, 3, ["7: GPU is lost"]),
        (ZOO, ("--gpus", "9,"), {}, 2, ["9 is no GPU of this machine", "GPU 7: GPU is lost"]),
        (ZOO, ("--gpus", 1, "--nproc", 2), {}, 2, ["asks for more processes than there are GPUs: 1 GPU chosen"]),
        (
            EIGHT,
            ("--gpus", 2, "--min-free", "90GiB"),
            {},
            3,
            ["0 of 8 GPUs fit now", "GPU 0, 1, 2, 3, 4, 5, 6, 7: 79.5 GiB free"],
        ),
        (
            EIGHT,
            (),
            {"CUDA_VISIBLE_DEVICES": "GPU-beef"},
            3,
            [
                "GPU 0, 1, 2, 3, 4, 5, 6, 7: hidden here: CUDA_VISIBLE_DEVICES=GPU-beef: no GPU",
                "GPU-beef is no GPU of this machine",
            ],
        ),
        ("init LIB_RM_VERSION_MISMATCH", (), {}, 4, ["kernel module and its library differ", "reboot"]),
        ("init LIB_RM_VERSION_MISMATCH", ("--gpus", 2, "--nproc", 2), {}, 4, ["differ"]),
    ],
)
def test_run_refuses_with_the_reason_and_its_exit_code(tmp_path, scenario, words, environ, code, texts):
    done = dry_run(Fake(tmp_path, scenario), tmp_path, *words, **environ)
    assert done.returncode == code and done.stdout == "", done.stdout
    for text in texts:
        assert text in done.stderr
    assert "Traceback" not in done.stderr


@needs_compiler
def test_run_goes_on_where_nothing_could_be_taken_and_nobody_asked(tmp_path):
    hidden = dry_run(Fake(tmp_path, EIGHT), tmp_path, CUDA_VISIBLE_DEVICES="")
    assert hidden.returncode == 0 and "# 1 process on the CPU (no GPU visible)" in hidden.stdout
    other = tmp_path / "other"
    other.mkdir()
    broken = dry_run(Fake(other, "init UNKNOWN"), tmp_path, "--nproc", 2)
    assert (
        broken.returncode == 0
        and "no GPU is chosen and none is leased: The NVIDIA driver does not answer." in broken.stdout
    )


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has an NVIDIA driver")
def test_run_on_a_machine_without_a_gpu(tmp_path):
    plain = dry_run(None, tmp_path)
    assert plain.returncode == 0 and "# 1 process on the CPU (no GPU visible)" in plain.stdout
    asked = dry_run(None, tmp_path, "--gpus", 2)
    assert asked.returncode == 3 and "no NVIDIA GPU on this machine" in asked.stderr and "Traceback" not in asked.stderr


@needs_compiler
@pytest.mark.full
@pytest.mark.parametrize("script", ["ddp_plain.py", "accelerate_mlp.py", "fabric_mlp.py"])
def test_unchanged_scripts_run_on_gpus_that_are_taken_for_them(tmp_path, script):
    library = {"accelerate_mlp.py": "accelerate", "fabric_mlp.py": "lightning"}.get(script, "torch")
    if importlib.util.find_spec(library) is None:  # importing it here would leave its variables in the environment
        pytest.skip(f"{library} is not installed")
    fake = Fake(tmp_path, EIGHT)  # torch is a CPU build here: the ranks see the variables and compute on the CPU
    path = Path(__file__).parent / "scripts" / script
    command = [
        sys.executable,
        "-m",
        "evener",
        "run",
        "--gpus",
        "2",
        "--lock-folder",
        str(tmp_path / "locks"),
        str(path),
    ]
    environ = fake.environ(ACCELERATE_USE_CPU="true")
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (
        "evener: 2 processes on GPU 6, 7 (NVIDIA A100-SXM4-80GB)" in done.stderr and "done rank 0 of 2" in done.stdout
    )
    assert Folder(str(tmp_path / "locks")).holder("GPU-fa4e0007-0000-4000-8000-000000000007") is None
