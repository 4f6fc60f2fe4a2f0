"""A launch is a value: what was asked and what the machine has decide it, and nothing runs to get it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from evener import limits
from evener.errors import DeviceError, LaunchError, UsageError
from evener.launch.command import Command, Request, decide, name_run, shim_path
from evener.launch.machine import Gpus, Machine
from evener.plan.handed import LaunchPlan, read_plan

EIGHT = Gpus(tuple(f"GPU-{i}" for i in range(8)), text="GPU 0 to 7")


def here(gpus: Gpus = Gpus(()), cpus: int = 16) -> Machine:  # noqa: B008  (a frozen value)
    return Machine(gpus=gpus, usable_cpus=cpus, loopback="lo", temporary="/tmp", python="/usr/bin/python3")


def launch(request: Request, on: Machine, environ: dict[str, str] | None = None):
    return decide(request, on, environ or {}, run_id="day-train-ab", cwd="/home/me")


def test_the_whole_launch_of_two_cpu_processes():
    got = launch(Request("train.py", ("--lr", "0.1"), nproc=2, cpu=True), here())
    private = "/tmp/evener-day-train-ab"
    assert got.command == Command(
        argv=(
            "/usr/bin/python3",
            "-P",
            "-m",
            "torch.distributed.run",
            "--nnodes=1",
            "--nproc-per-node=2",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={private}/rendezvous",
            "--rdzv-id=day-train-ab",
            "--rdzv-conf=store_type=file,keep_alive_interval=3600",
            "--local-addr=127.0.0.1",
            "--max-restarts=0",
            "--event-log-handler=console",
            f"--log-dir={private}/elastic",
            "--",
            shim_path(),
            f"{private}/job.json",
            "train.py",
            "--lr",
            "0.1",
        ),
        env={
            "EVENER_PLAN": f"{private}/plan.json",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "8",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    assert got.plan == LaunchPlan(run_id="day-train-ab", device="cpu", store=f"{private}/store")
    assert got.logs == "/home/me/runs/logs/day-train-ab"
    assert got.notes == ("2 processes on the CPU; OMP_NUM_THREADS=8 (16 usable CPUs // 2)",)


def test_a_module_and_dollar_signs_arrive_as_they_are():
    got = launch(Request("pkg.train", ("a$b", "${local_rank}", "--"), module=True, cpu=True), here())
    # The agent reads `$$` as `$` (string.Template).
    assert got.command.argv[-5:] == ("-m", "pkg.train", "a$$b", "$${local_rank}", "--")


def test_one_process_per_visible_gpu_and_all_of_them_visible_to_all():
    got = launch(Request("train.py"), here(EIGHT))
    assert got.nproc == 8 and got.command.env["CUDA_VISIBLE_DEVICES"] == ",".join(EIGHT.words)
    assert got.plan.device is None and "ACCELERATE_USE_CPU" not in got.command.env
    assert got.notes[0].startswith("8 processes on GPU 0 to 7;")


def test_one_process_may_see_several_gpus():
    got = launch(Request("train.py", nproc=1), here(EIGHT))  # nn.DataParallel
    assert got.nproc == 1 and got.command.env["CUDA_VISIBLE_DEVICES"] == ",".join(EIGHT.words)


def on_two_nodes(cpus: int = 16, nodes: tuple[int | None, ...] = (0, 0, 1, 1), leased: tuple[int, ...] = ()) -> Machine:
    gpus = Gpus(tuple(f"GPU-{i}" for i in range(4)), numa_nodes=nodes, leased=leased)
    node_cpus = {0: tuple(range(6)), 1: tuple(range(8, 16))}
    return Machine(gpus, cpus, "lo", "/tmp", "/usr/bin/python3", node_cpus)


def test_ranks_are_bound_near_their_gpu_and_threads_are_what_is_there():
    got = launch(Request("train.py"), on_two_nodes(leased=(7, 8)))
    assert got.cpus == (tuple(range(6)), tuple(range(6)), tuple(range(8, 16)), tuple(range(8, 16)))
    assert got.command.env["OMP_NUM_THREADS"] == "3", "six CPUs on node 0, two ranks there"
    assert "bound to the CPUs of their GPU's memory node" in got.notes[0] and "3 CPUs per rank" in got.notes[0]
    assert got.leased == (7, 8)
    quota = launch(Request("train.py"), on_two_nodes(cpus=4))
    assert quota.command.env["OMP_NUM_THREADS"] == "1", "a cgroup's quota counts too"


@pytest.mark.parametrize(
    "request_, machine_",
    [
        (Request("train.py", bind=False), on_two_nodes()),
        (Request("train.py", nproc=1), on_two_nodes()),  # one process near four GPUs is near none
        (Request("train.py"), on_two_nodes(nodes=(0, 0, None, 1))),
        (Request("train.py"), on_two_nodes(nodes=(0, 0, 1, 2))),
        (Request("train.py"), here(EIGHT)),
    ],
)
def test_ranks_stay_unbound_where_nearness_is_not_known_for_all(request_, machine_):
    assert launch(request_, machine_).cpus == ()


def test_one_process_without_a_gpu():
    got = launch(Request("train.py"), here())
    assert got.nproc == 1 and "CUDA_VISIBLE_DEVICES" not in got.command.env
    assert got.notes[0].startswith("1 process on the CPU (no GPU visible)")
    assert launch(Request("train.py", nproc=1), here()).nproc == 1, "saying the default is not an error"


@pytest.mark.parametrize(
    "request_, on, kind, words",
    [
        (Request("t.py", nproc=0), here(EIGHT), UsageError, ["--nproc 0", "N >= 1"]),
        (Request("t.py", nproc=9), here(EIGHT), DeviceError, ["8 GPUs chosen", "--cpu", "--nproc 8"]),
        (Request("t.py", nproc=2), here(), DeviceError, ["no GPU chosen", "add --cpu"]),
        (
            Request("t.py"),
            here(Gpus(None, "NVML: Driver/library version mismatch")),
            DeviceError,
            ["mismatch", "--nproc N"],
        ),
        (Request("t.py", tee="some", cpu=True), here(), UsageError, ["rank0, all, none"]),
    ],
)
def test_what_cannot_be_meant_is_refused_with_the_way_out(request_, on, kind, words):
    with pytest.raises(kind) as caught:
        launch(request_, on)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.exit_code == 2


def test_unknown_gpus_are_no_reason_to_refuse_a_number():
    got = launch(Request("train.py", nproc=4), here(Gpus(None, "NVML: unknown error")))
    assert got.nproc == 4 and "CUDA_VISIBLE_DEVICES" not in got.command.env


def test_the_users_own_variables_win_and_the_agents_are_removed():
    mine = {
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": "eth0",
        "CUDA_DEVICE_ORDER": "FASTEST_FIRST",
        "PET_NNODES": "4",
        "PET_RUN_PATH": "1",
        "HOME": "/home/me",
    }
    got = launch(Request("train.py", nproc=2, cpu=True), here(), mine)
    environ = got.command.environ(mine)
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "CUDA_DEVICE_ORDER", "HOME"):
        assert environ[name] == mine[name]
    assert not any(name.startswith("PET_") for name in environ)
    assert got.notes == ("2 processes on the CPU",)


def test_threads_are_at_least_one():
    assert launch(Request("t.py", nproc=8, cpu=True), here(cpus=3)).command.env["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    "script, name",
    [
        ("train.py", "w-train-t"),
        ("../a b/../.tr äin;rm.py", "w-tr-in-rm-t"),
        ("pkg.train", "w-pkg-t"),
        ("...", "w-script-t"),
    ],
)
def test_a_run_is_named_by_characters_that_are_safe_in_paths(script, name):
    assert name_run(script, "w", "t") == name


def test_dry_run_prints_the_launch_and_makes_nothing(tmp_path):
    (tmp_path / "train.py").write_text("raise SystemExit(9)\n")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "evener",
            "run",
            "--cpu",
            "--nproc",
            "2",
            "--set",
            "microbatch_size=[1, 2]",
            "--dry-run",
            "train.py",
            "a b",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in done.stdout and "CUDA_VISIBLE_DEVICES=''" in done.stdout
    assert done.stdout.rstrip().endswith("train.py 'a b'") and "--nproc-per-node=2" in done.stdout
    held = next(line for line in done.stdout.splitlines() if "EVENER_PLAN holds" in line).partition(": ")[2]
    assert json.loads(held)["overrides"] == {"microbatch_size": [1, 2]} and json.loads(held)["version"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_comes_back_from_a_path_and_from_the_variable_itself(tmp_path):
    plan = LaunchPlan(run_id="r", device="cpu", store="/tmp/s", overrides={"microbatch_size": 8})
    (tmp_path / "plan.json").write_text(plan.to_json())
    assert read_plan({"EVENER_PLAN": str(tmp_path / "plan.json")}) == plan
    assert read_plan({"EVENER_PLAN": plan.to_json()}) == plan
    assert read_plan({}) is None and read_plan({"EVENER_PLAN": " "}) is None


@pytest.mark.parametrize(
    "value, why",
    [
        ("/no/such/plan.json", "cannot be read"),
        ("{", "not JSON"),
        ('{"version": 2, "run_id": "r"}', "version 2"),
        ('{"version": 1}', "run_id is None"),
        ('{"version": 1, "run_id": "r", "device": "tpu"}', "device is 'tpu'"),
        ('{"version": 1, "run_id": "r", "store": 3}', "store is 3"),
        ('{"version": 1, "run_id": "r", "overrides": []}', "overrides is a list"),
    ],
)
def test_a_broken_plan_is_an_error_and_never_ignored(value, why):
    with pytest.raises(LaunchError) as caught:
        read_plan({"EVENER_PLAN": value})
    assert why in str(caught.value) and "EVENER_PLAN" in str(caught.value)


# --- facts of the machine -------------------------------------------------------------------------------------------


def fake_root(tmp_path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    "files, cpus",
    [
        ({}, 64),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "350000 100000\n"}, 3),
        # In a container: the path is the host's, the mount shows our own group only.
        ({"proc/self/cgroup": "0::/host/deep\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "200000\n",
                "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
    ],
)
def test_cpus_are_those_of_the_affinity_and_the_quota(tmp_path, monkeypatch, files, cpus):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(64)), raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    assert limits.usable_cpus(fake_root(tmp_path, files)) == cpus


def test_version_2_memory_limits_count_on_the_way_up(tmp_path):
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        "sys/fs/cgroup/a/memory.max": "4096\n",
        "sys/fs/cgroup/a/memory.current": "4000\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
    }
    assert limits.memory_limit(fake_root(tmp_path, files)) == (4096, 4000)
    stat = {"sys/fs/cgroup/a/memory.stat": "anon 5\ninactive_file 3900\n"}
    assert limits.memory_limit(fake_root(tmp_path, stat)) == (4096, 100)  # the page cache is given back
    assert limits.memory_limit(str(tmp_path / "nothing")) == (None, None)


def test_the_cpus_of_every_memory_node(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 9}, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    files = {
        "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
        "sys/devices/system/node/node1/cpulist": "4-7\n",
        "sys/devices/system/node/node2/cpulist": "\n",  # memory only
    }
    assert limits.node_cpus(fake_root(tmp_path, files)) == {0: (0, 1, 2, 9), 1: (), 2: ()}
