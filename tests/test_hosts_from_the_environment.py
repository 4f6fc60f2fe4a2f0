"""Slurm, Kubernetes and SkyPilot are read without configuration, and two sources that disagree are quoted, not guessed.

The recorded environments hold what the systems' documentation and sources say they set; none was taken from a cluster.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evener.errors import UsageError
from evener.launch.layout import Layout, environ_of, expand, read, split_address

SLURM = {
    "SLURM_JOB_ID": "200505",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NNODES": "3",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_JOB_NODELIST": "gnode[10,20-21]",
    "SLURM_STEP_NODELIST": "gnode[10,20-21]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_TASKS_PER_NODE": "1(x3)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
PER_GPU = SLURM | {
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "3,2(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "CUDA_VISIBLE_DEVICES": "0,1",
}
BATCH_SHELL = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
TRAINJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "llm-node-0-0.llm",
    "PET_MASTER_PORT": "29500",
    "JOB_COMPLETION_INDEX": "2",
}
PYTORCHJOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "MASTER_ADDR": "mnist-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "1",
}
ELASTIC = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "PET_RDZV_ENDPOINT": "mnist-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
    "PET_NNODES": "2:4",
    "PET_NPROC_PER_NODE": "auto",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}


@pytest.mark.parametrize(
    "environ, least, most, head, port, rank, missing, nproc",
    [
        (SLURM, 3, 3, "gnode10", 21010, 1, "gnode21", None),
        (PER_GPU, 7, 7, "gnode10", 21010, 4, "task 2", 1),
        (TRAINJOB, 4, 4, "llm-node-0-0.llm", 29500, 2, "llm-node-0-2", 8),
        (PYTORCHJOB, 3, 3, "mnist-master-0", 23456, 1, "mnist-worker-1", None),
        (ELASTIC, 2, 4, "mnist-worker-0", 23456, None, "mnist-worker-2", None),
    ],
    ids=["slurm", "slurm, a task per GPU", "TrainJob", "PyTorchJob", "elastic PyTorchJob"],
)
def test_a_recorded_environment_says_it_all(environ, least, most, head, port, rank, missing, nproc):
    found = read(environ)
    assert (found.least, found.most, found.head, found.port, found.rank) == (least, most, head, port, rank)
    assert found.names[2] == missing and found.nproc == nproc


def test_skypilots_addresses_are_the_names():
    assert read(SKY) == Layout(2, 2, "10.0.0.4", 29400, 1, ("10.0.0.4", "10.0.0.5"), "SkyPilot (2 SKYPILOT_NODE_IPS)")


def test_one_task_per_gpu_takes_its_own_gpu():
    found = read(PER_GPU)
    assert found.task == (1, 2) and environ_of(found, PER_GPU)["CUDA_VISIBLE_DEVICES"] == "1"
    alone = PER_GPU | {"CUDA_VISIBLE_DEVICES": "0"}  # --gpus-per-task: Slurm shows a task its own only
    assert environ_of(found, alone) == alone
    assert environ_of(read(SLURM), SLURM) == SLURM


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "a1"},  # salloc, a shell
        SLURM
        | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gnode10"},  # srun --pty
        TRAINJOB | {"PET_NNODES": "1"},
        SKY | {"SKYPILOT_NODE_IPS": "10.0.0.4"},
        PYTORCHJOB | {"LOCAL_RANK": "0"},  # a rank that some launcher started
        {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "a"},  # left in a shell
    ],
)
def test_one_host_is_no_meeting(environ):
    assert read(environ) is None


def test_flags_say_what_the_environment_does_not():
    assert read({}, "3", "host1:29400") == Layout(3, 3, "host1", 29400)
    assert read({}, "2:3", "[fe80::1]:5000", "2") == Layout(2, 3, "fe80::1", 5000, 2)
    moved = read(SLURM, head="other:7000")
    assert (moved.head, moved.port, moved.rank, moved.names) == ("other", 7000, 1, tuple(expand("gnode[10,20-21]")))
    assert read(SLURM, "2:3").least == 2
    assert read(SLURM, "1") is None, "three runs, each on its own"
    assert read(SLURM, "5", "h:1000", "4") == Layout(5, 5, "h", 1000, 4), "all of it: the environment is not asked"


@pytest.mark.parametrize(
    "environ, words, expected",
    [
        ({}, ("3",), ["--nodes 3: where do the hosts meet?", "evener run --nodes 3 --head HOST:29400"]),
        ({}, (None, "host1"), ["--head and --node-rank are about several hosts"]),
        ({}, ("0", "h"), ["--nodes 0: a number of hosts, or a range such as 2:3."]),
        ({}, ("3:2", "h"), ["--nodes 3:2: a number of hosts"]),
        ({}, ("x", "h"), ["--nodes='x' is not a number."]),
        ({}, ("3", "h:99999"), ["'h:99999' is no HOST:PORT", "--head host1:29400"]),
        ({}, ("3", "h", "-1"), ["--node-rank='-1' is not a number."]),
        (BATCH_SHELL, (), ["This Slurm job has 3 nodes", "srun --ntasks-per-node=1 evener run", "SLURM_STEP_ID is not set"]),
        (SLURM, ("2",), ["Slurm (SLURM_STEP_NUM_NODES=3) says 3 hosts, the command line says 2."]),
        (SLURM, (None, None, "2"), ["says node rank 1, the command line says 2."]),
        (SLURM | TRAINJOB, (), ["Slurm (SLURM_STEP_NUM_NODES=3) says 3 hosts, Kubernetes (PET_NNODES=4) says 4."]),
        (SLURM | {"PET_NNODES": "3", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "a"}, (), ["says node rank 1, Kubernetes"]),
        (SLURM | {"SLURM_NODEID": "one"}, (), ["SLURM_NODEID='one' is not a number."]),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"}, (), ["Slurm started 2 tasks on 3 nodes."]),
        ({"PET_NNODES": "3"}, (), ["PET_NNODES=3, and nothing says where the hosts meet."]),
        ({**SKY, "SKYPILOT_NODE_RANK": ""}, (), ["SKYPILOT_NODE_RANK is not set, and is needed here."]),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_quoted(environ, words, expected):
    with pytest.raises(UsageError) as caught:
        read(environ, *words)
    for word in expected:
        assert word in str(caught.value), str(caught.value)


def shape(sizes: list[int]) -> str:
    """As Slurm writes it: [2, 2, 1] -> "2(x2),1" """
    parts: list[list[int]] = []
    for one in sizes:
        if parts and parts[-1][0] == one:
            parts[-1][1] += 1
        else:
            parts.append([one, 1])
    return ",".join(f"{one}(x{times})" if times > 1 else str(one) for one, times in parts)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=12),
    st.integers(0, 10**9),
    st.dictionaries(st.sampled_from("ABC"), st.text(max_size=3)),
)
def test_every_task_of_a_slurm_step_sees_the_same_job_and_a_place_of_its_own(sizes, job, noise):
    nodes, tasks = len(sizes), sum(sizes)
    names = [f"n{i:02}" for i in range(nodes)]
    step = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": f"n[00-{nodes - 1:02}]"}
    step |= {
        "SLURM_STEP_NUM_NODES": str(nodes),
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": shape(sizes),
    }
    found = []
    for node, size in enumerate(sizes):
        for local in range(size):
            place = {"SLURM_NODEID": str(node), "SLURM_LOCALID": str(local), "SLURM_PROCID": str(len(found))}
            found.append(read(noise | place | step))
            assert found[-1] == read({**step, **place, **noise}), "other variables and their order do not matter"
    if tasks == 1:
        assert found == [None]
        return
    assert [one.rank for one in found] == list(range(tasks))
    assert {(one.least, one.most, one.head, one.port, one.names, one.source) for one in found} == {
        (tasks, tasks, names[0], found[0].port, found[0].names, found[0].source)
    }
    assert 20000 <= found[0].port < 60000 and found[0].port % 2 == 0 and len(found[0].names) == tasks
    if tasks > nodes:
        assert [one.task for one in found] == [(local, size) for size in sizes for local in range(size)]
    else:
        assert found[0].task is None and list(found[0].names) == names


@pytest.mark.parametrize(
    "text, expected",
    [("h", ("h", None)), ("h:1", ("h", 1)), ("[::1]:29400", ("::1", 29400)), ("a.b-c:65534", ("a.b-c", 65534))],
)
def test_addresses(text, expected):
    assert split_address(text) == expected


@pytest.mark.parametrize("text", ["", ":1", "h:", "h:0", "h:65535", "a b:1", "::1", "h:x"])
def test_no_addresses(text):
    with pytest.raises(UsageError, match="is no HOST:PORT"):
        split_address(text)
