"""Every check of the doctor finds its fault in the facts of a sick machine, names the fix, and is quiet on a well one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evener import doctor
from evener.doctor import CHECKS, Facts, examine
from evener.doctor.gpu import runs_on, wheel
from evener.doctor.seen import LEVELS, texts
from evener.errors import UsageError
from evener.gpus.values import Gpu, Health, Link, MigDevice, Process, Snapshot, Trouble

GIB = 1 << 30


def gpu(index: int, **more) -> Gpu:
    values = {
        "uuid": f"GPU-{index}aaaaaaa-0000",
        "name": "NVIDIA H200",
        "slot": index,
        "memory_total_bytes": 140 * GIB,
        "memory_used_bytes": 0,
        "compute_capability": "9.0",
        "numa_node": index // 4,
        "processes": (),
        "utilization_percent": 0,
        "health": Health("default", True, 0, False, False, (), 16, 16, 5, 5),
    }
    return Gpu(index, **(values | more))


def machine(*gpus: Gpu, links: tuple[Link, ...] | None = None, **more) -> Snapshot:
    if links is None:
        links = tuple(Link(a.index, b.index, "other socket", 18, "ok") for a in gpus for b in gpus if a.index < b.index)
    return Snapshot("570.86.15", "12.8", "nvml", gpus, links, **more)


TORCH = {
    "version": "2.13.0+cu128",
    "cuda": "12.8",
    "available": True,
    "devices": 2,
    "nccl_version": "2.27.5",
    "arch_list": ["sm_80", "sm_90", "compute_90"],
    "gloo": {"ranks": 2, "bytes_per_second": 1e9, "pairs": {"0-1": 1e9}, "error": "", "wrong": ""},
    "stage": "done",
    "child": "health.py 0",
    "seconds": 4.0,
}
ETH = {"name": "eth0", "up": True, "mtu": 1500, "loopback": False, "addresses": ["10.0.0.7"]}
LO = {"name": "lo", "up": True, "mtu": 65536, "loopback": True, "addresses": ["127.0.0.1"]}
DOCKER = {"name": "docker0", "up": True, "mtu": 1500, "loopback": False, "addresses": ["172.17.0.1"]}

WELL = Facts(
    hostname="node7",
    ranks=2,
    workers=4,
    packages={"torch": "2.13.0", "nvidia-ml-py": "13.0"},
    kernel_driver="570.86.15",
    nvml_library="570.86.15",
    device_files=["nvidia0", "nvidia1"],
    gpus=machine(gpu(0), gpu(1)),
    kernel_log=[],
    kernel_command_line="quiet",
    acs_bridges=[],
    torch=TORCH,
    shm_total_bytes=64 * GIB,
    shm_free_bytes=63 * GIB,
    memlock_bytes=1e18,
    nofile=65536,
    nofile_hard=65536,
    usable_cpus=64,
    host_cpus=64,
    node_cpus={"0": list(range(32)), "1": list(range(32, 64))},
    own_addresses=["10.0.0.7"],
    reverse_dns_seconds={"10.0.0.7": 0.001},
    interfaces=[ETH, LO],
    default_interface="eth0",
    can_listen="",
    infiniband=[{"device": "mlx5_0", "port": "1", "state": "ACTIVE"}],
    ibverbs=True,
    directory={"path": "/data/runs", "reason": "", "fsync_seconds": 0.01, "free_bytes": 900 * GIB, "filesystem": "xfs"},
    locks={"path": "/run/lock/evener", "mode": "1777", "lock": "", "filesystem": "tmpfs"},
    port_29500={},
    left_over=[],
)
ALONE = {"gpus": Snapshot(), "device_files": [], "kernel_driver": None, "nvml_library": None}


def hosts(**changes) -> dict:
    """Two hosts; `changes` are of the second's entry, those of its facts in `facts`."""
    first = {"facts": json.loads(WELL.to_json()), "address": "10.0.0.7", "clock_seconds": 0.0, "unreachable": []}
    eth = ETH | {"addresses": ["10.0.0.8"]}
    facts = first["facts"] | {"hostname": "node8", "interfaces": [eth, LO]} | changes.pop("facts", {})
    second = first | {"facts": facts, "address": "10.0.0.8", "clock_seconds": 0.001} | changes
    names = ["node7", facts["hostname"] if facts["hostname"] != "node7" else "node7 (10.0.0.8)"]
    return {"head": "node7", "seconds": 30.0, "missing": [], "hosts": dict(zip(names, (first, second)))}


def health(**changes) -> Snapshot:
    return machine(gpu(0), gpu(1, health=replace(gpu(1).health, **changes)))


def capped(watts: float, throttle: tuple[str, ...]) -> Snapshot:
    changed = replace(gpu(1).health, throttle=throttle, power_limit_default_w=700.0)
    return machine(gpu(0), gpu(1, power_limit_w=watts, health=changed))


SICK = [
    ("driver-match", {"kernel_driver": "535.129.03"}, "error", "kernel module 535.129.03, library 570.86.15", "reboot"),
    ("driver-match", {"gpus": Snapshot(trouble=Trouble("mismatch", "differ", True))}, "error", "NVML says", "rmmod"),
    ("nvml", {**ALONE, "device_files": ["nvidia0"]}, "error", "libnvidia-ml.so.1 is not", "--gpus all"),
    (
        "nvml",
        {"gpus": Snapshot(trouble=Trouble("lost-in-container", "The NVIDIA driver does not answer.", True))},
        "error",
        "/dev/nvidia0 is there, but: The NVIDIA driver does not answer.",
        "restart the container",
    ),
    ("nvml", {**ALONE, "kernel_driver": "570.1"}, "warning", "no GPU is handed to this container", "docker run --gpus all"),
    (
        "nvml",
        {**ALONE, "gpus": Snapshot(trouble=Trouble("driver-not-loaded", "The NVIDIA driver is not loaded.", True))},
        "error",
        "not loaded",
        "modprobe nvidia",
    ),
    (
        "lost-gpu",
        {"gpus": machine(gpu(0), Gpu(1, error="GPU is lost"))},
        "error",
        "GPU 1: GPU is lost",
        "CUDA_VISIBLE_DEVICES=GPU-0aaaaaaa-0000 leaves it out",
    ),
    ("lost-gpu", {"gpus": machine(gpu(0, error="GPU requires reset"))}, "error", "reset", "--gpu-reset -i 0"),
    (
        "lost-gpu",
        {"kernel_log": ["NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."]},
        "error",
        "79, pid=1",
        "drain",
    ),
    ("lost-gpu", {"kernel_log": ["NVRM: Xid (PCI:0000:3b:00): 13, pid=1"]}, "warning", "1 line about it", "Xid number"),
    (
        "lost-gpu",  # newer drivers log it without an Xid
        {"kernel_log": ["NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."]},
        "error",
        "fallen off the bus",
        "drain",
    ),
    ("torch-cuda", {"torch": TORCH | {"version": "2.13.0+cpu", "cuda": None}}, "error", "without CUDA", "/whl/cu128"),
    ("torch-cuda", {"torch": TORCH | {"cuda": "13.0"}}, "error", "the driver serves up to 12.8", "/whl/cu128"),
    ("torch-cuda", {"torch": TORCH | {"cuda": "12.9"}}, "warning", "built for CUDA 12.9", "PTX"),
    (
        "torch-cuda",
        {"torch": TORCH | {"available": False, "cuda_error": "CUDA unknown error"}},
        "error",
        "sees no GPU: CUDA unknown error",
        "/dev/nvidia-uvm",
    ),
    ("torch-cuda", {"torch": {"import_error": "ImportError: libcudart.so.12"}}, "error", "libcudart", "reinstall"),
    ("torch-cuda", {"torch": {"import_error": "ModuleNotFoundError: No module named 'torch'"}}, "error", "No", "pip install"),
    (
        "torch-cuda",
        {"torch": {"stage": "cuda", "ended": "hung", "seconds": 12.0}},
        "error",
        "hung for 12 s at: torch.cuda.is_available()",
        "faulthandler",
    ),
    (
        "torch-cuda",
        {"torch": {"stage": "import", "ended": "was ended by SIGILL", "seconds": 1.0}},
        "error",
        "was ended by SIGILL at: import torch",
        "faulthandler",
    ),
    ("arch-list", {"gpus": machine(gpu(0, compute_capability="6.1"))}, "error", "GPU 0 (NVIDIA H200) has 6.1", "capability 6.1"),
    ("visible-devices", {"environ": {"CUDA_VISIBLE_DEVICES": "0,0"}}, "error", "hides every GPU", "=GPU-0aaaaaaa-0000"),
    ("visible-devices", {"environ": {"CUDA_VISIBLE_DEVICES": "1,-1,0"}}, "error", "negative", "GPU-1aaaaaaa-0000,GPU-0"),
    ("visible-devices", {"environ": {"CUDA_VISIBLE_DEVICES": "0,7"}}, "error", "7 is not there", "=GPU-0aaaaaaa-0000"),
    ("visible-devices", {"environ": {"CUDA_VISIBLE_DEVICES": "GPU-x"}}, "error", "no GPU of this machine", "unset CUDA"),
    ("visible-devices", {"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "warning", "hides all 2 GPUs", "unset CUDA"),
    ("device-order", {"gpus": machine(gpu(0), gpu(1, name="NVIDIA T4"))}, "warning", "mixed", "PCI_BUS_ID"),
    ("nvml-package", {"packages": {"pynvml": "11.5.3"}}, "warning", "pynvml 11.5.3", "pip uninstall -y pynvml"),
    (
        "hidden-memory",
        {"gpus": machine(gpu(0, memory_used_bytes=9 * GIB, processes=(Process(1, memory_bytes=GIB),)))},
        "warning",
        "GPU 0 (NVIDIA H200): 8.0 GiB in use by nobody",
        "--holders",
    ),
    (
        "hidden-memory",
        {"gpus": machine(gpu(0, memory_used_bytes=GIB, memory_reserved_bytes=0))},
        "warning",
        "1.0 GiB in use by nobody",
        "--holders",
    ),
    (
        "orphans",
        {"left_over": [{"pid": 77, "command": "pt_data_worker", "gpu": True}]},
        "error",
        "pid 77 (pt_data_worker)",
        "kill 77",
    ),
    ("mig", {"gpus": machine(gpu(0, mig_enabled=True, mig=(MigDevice(0),)), gpu(1))}, "error", "2 ranks are wanted", "-mig 0"),
    ("compute-mode", {"gpus": health(compute_mode="prohibited")}, "error", "prohibited", "-i 1 -c DEFAULT"),
    ("compute-mode", {"gpus": health(compute_mode="exclusive-process")}, "warning", "exclusive", "-c DEFAULT"),
    ("compute-mode", {"gpus": health(persistence=False)}, "warning", "off on GPU 1", "nvidia-persistenced"),
    ("throttling", {"gpus": health(throttle=("thermal (hardware)",))}, "error", "thermal (hardware)", "cooling of GPU 1"),
    ("throttling", {"gpus": health(throttle=("power cap",))}, "warning", "power cap", "nvidia-smi -i 1 -pl"),
    ("throttling", {"gpus": health(throttle=("thermal (software)",))}, "warning", "software", "airflow"),
    ("throttling", {"gpus": capped(300, ())}, "warning", "may draw 300 W, its default is 700 W", "-i 1 -pl 700 ("),
    ("throttling", {"gpus": capped(300, ("power cap",))}, "warning", "power cap, limit 300 W of 700 W", "-i 1 -pl 700 ("),
    ("ecc", {"gpus": health(nvlink_replays=7, nvlink_crc_errors=2)}, "warning", "NVLink: 7 replays, 2 CRC errors", "-e -i 1"),
    ("ecc", {"gpus": health(nvlink_recoveries=1)}, "error", "GPU 1 (NVIDIA H200): NVLink: 1 recoveries", "reseat"),
    ("ecc", {"gpus": health(ecc_uncorrected_errors=3)}, "error", "3 uncorrected ECC errors", "dcgmi diag"),
    ("ecc", {"gpus": health(remapped_rows_pending=True)}, "warning", "waits for a reset", "--gpu-reset -i 1"),
    ("ecc", {"gpus": health(remapped_rows_failed=True)}, "error", "could not be remapped", "drain GPU 1"),
    ("pcie", {"gpus": health(pcie_width=4)}, "warning", "x4 of x16", "reseat GPU 1"),
    (
        "pcie",
        {"gpus": machine(gpu(0, utilization_percent=90, health=replace(gpu(0).health, pcie_generation=1)))},
        "warning",
        "generation 1 of 5 under load",
        "reseat GPU 0",
    ),
    (
        "topology",
        {
            "gpus": machine(
                *map(gpu, range(4)),
                links=tuple(
                    Link(a, b, "one socket" if a // 2 == b // 2 else "other socket", 0, "ok")
                    for a in range(4)
                    for b in range(a + 1, 4)
                ),
            )
        },
        "warning",
        "2 ranks fit on one side",
        "CUDA_VISIBLE_DEVICES=GPU-0aaaaaaa-0000,GPU-1aaaaaaa-0000",
    ),
    ("peer-access", {"acs_bridges": ["00:01.0"]}, "warning", "ACS", "turn ACS off on 00:01.0"),
    ("peer-access", {"kernel_command_line": "ro intel_iommu=on quiet"}, "warning", "IOMMU", "iommu=pt"),
    (
        "peer-access",
        {"gpus": machine(gpu(0), gpu(1), links=(Link(0, 1, "other socket", 0, "chipset not supported"),))},
        "warning",
        "0-1: chipset not supported",
        "topo -p2p r",
    ),
    ("shared-memory", {"shm_total_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "error", "64 MiB", "--shm-size=8g"),
    ("shared-memory", {"shm_total_bytes": GIB // 2, "shm_free_bytes": 0, "workers": None}, "warning", "512 MiB", "emptyDir"),
    ("shared-memory", {"shm_free_bytes": 1 << 20}, "warning", "1 MiB free", "dead processes"),
    ("memlock", {"memlock_bytes": 8 << 20}, "error", "at most 8 MiB may be pinned, with InfiniBand mlx5_0", "memlock=-1"),
    ("open-files", {"nofile": 1024, "workers": 32}, "warning", "may need 1284", "ulimit -n 65536"),
    ("cpus", {"usable_cpus": 4}, "warning", "4 of 64 CPUs may be used, for 2 ranks with 4 data workers", "num_workers=1"),
    ("cpus", {"usable_cpus": 4, "workers": None}, "warning", "4 of 64", "os.cpu_count(), which says 64"),
    ("memory-limit", {"memory_limit_bytes": 2 * GIB, "memory_used_bytes": 0}, "warning", "limit 2.0 GiB", "at least 8.0 GiB"),
    (
        "memory-limit",
        {"memory_limit_bytes": 64 * GIB, "memory_needed_bytes": 100 * GIB},
        "error",
        "the job needs 100.0 GiB",
        "at least 100.0 GiB",
    ),
    ("memory-limit", {"memory_limit_bytes": 64 * GIB, "memory_used_bytes": 63 * GIB}, "warning", "63.0 GiB in use", "64.0 GiB"),
    ("omp-threads", {"environ": {"RANK": "0"}}, "warning", "each of 2 ranks starts 64 threads", "OMP_NUM_THREADS=32"),
    ("omp-threads", {"environ": {"OMP_NUM_THREADS": "1"}}, "warning", "could have 32", "OMP_NUM_THREADS=32"),
    ("omp-threads", {"environ": {"OMP_NUM_THREADS": "64"}}, "warning", "64 x 2 ranks", "OMP_NUM_THREADS=32"),
    ("omp-threads", {"environ": {"OMP_NUM_THREADS": "all"}}, "warning", "no number", "OMP_NUM_THREADS=32"),
    ("numa", {"node_cpus": {"0": [], "1": list(range(32, 64))}}, "warning", "GPU 0 is on node 0, this process on 1", "numa-binding"),
    (
        "hostname",
        {"own_addresses": ["127.0.0.1"], "environ": {"MASTER_ADDR": "10.0.0.8"}},
        "warning",
        "node7 leads to 127.0.0.1 alone",
        "'10.0.0.7 node7', and take node7 out of the line with 127.0.0.1",
    ),
    ("hostname", {"own_addresses": ["127.0.1.1"], "hosts": hosts()}, "error", "127.0.1.1 alone", "the line with 127.0.1.1;"),
    (
        "hostname",
        {"own_addresses": ["127.0.1.1"], "hosts": hosts(), "interfaces": [LO], "default_interface": None},
        "error",
        "127.0.1.1 alone",
        "'ADDRESS node7'",
    ),
    ("hostname", {"own_addresses": []}, "warning", "has no address", "'10.0.0.7 node7'"),
    ("reverse-dns", {"reverse_dns_seconds": {"10.0.0.7": 3.0}}, "warning", "took 3.0 s", "hosts: files"),
    ("interfaces", {"environ": {"GLOO_SOCKET_IFNAME": "ens3"}}, "error", "ens3 names no", "GLOO_SOCKET_IFNAME=eth0"),
    ("interfaces", {"environ": {"NCCL_SOCKET_IFNAME": "=eth"}}, "error", "names no interface", "NCCL_SOCKET_IFNAME=eth0"),
    ("interfaces", {"environ": {"NCCL_SOCKET_IFNAME": "^eth,lo"}}, "error", "names no interface", "NCCL_SOCKET"),
    ("interfaces", {"interfaces": [DOCKER, LO], "default_interface": "docker0"}, "warning", "leaves by docker0", "export"),
    ("interfaces", {"interfaces": [LO], "hosts": hosts()}, "error", "no interface beside loopback", "ip link set"),
    ("ports", {"can_listen": "10.0.0.7: Permission denied"}, "error", "Permission denied", "SELinux"),
    ("ports", {"hosts": hosts(unreachable=["node7"])}, "error", "node8 -> node7", "open TCP"),
    ("ports", {"hosts": hosts() | {"missing": ["node9"]}}, "error", "node9 did not come within 30 s", "missing host"),
    ("mtu", {"interfaces": [ETH | {"mtu": 1280}, LO]}, "warning", "eth0: 1280", "tunnels"),
    (
        "mtu",
        {"hosts": hosts(facts={"interfaces": [ETH | {"addresses": ["10.0.0.8"], "mtu": 9000}, LO]})},
        "error",
        "node7 eth0 1500, node8 eth0 9000",
        "mtu 1500 on node8",
    ),
    ("duplicate-names", {"hosts": hosts(facts={"hostname": "node7"})}, "error", "2 hosts call themselves node7", "rename"),
    ("clock", {"hosts": hosts(clock_seconds=-4.2)}, "warning", "node8 -4.2 s", "set-ntp"),
    (
        "versions",
        {"hosts": hosts(facts={"packages": {"torch": "2.12.0", "nvidia-ml-py": "13.0"}})},
        "error",
        "torch: node7 2.13.0, node8 2.12.0",
        "differing: torch",
    ),
    ("versions", {"hosts": hosts(facts={"commit": "abc"})}, "warning", "commit: node7 none, node8 abc", "one image"),
    ("nccl-variables", {"environ": {"NCCL_P2P_DISABLE": "1"}}, "warning", "NCCL_P2P_DISABLE=1", "unset NCCL_P2P_DISABLE"),
    ("nccl-variables", {"environ": {"NCCL_DEBUG": "TRACE"}}, "warning", "TRACE", "unset NCCL_DEBUG"),
    ("nccl-variables", {"environ": {"NCCL_SOCKET_IFNMAE": "eth0"}}, "warning", "no setting", "export NCCL_SOCKET_IFNAME=eth0"),
    ("nccl-variables", {"environ": {"NCCL_MY_OWN_THING": "1"}}, "warning", "no setting", "does not read it"),
    ("nccl-variables", {"nccl_files": {"/etc/nccl.conf": ["NCCL_ALGO=Tree"]}}, "warning", "in /etc/nccl.conf", "out of /etc"),
    (
        "infiniband",
        {"infiniband": [{"device": "mlx5_1", "port": "1", "state": "DOWN"}]},
        "warning",
        "mlx5_1 port 1 is DOWN",
        "NCCL_IB_HCA=^mlx5_1",
    ),
    ("infiniband", {"ibverbs": False}, "warning", "libibverbs is not", "ibverbs-providers"),
    ("directory", {"directory": WELL.directory | {"reason": "Read-only file system"}}, "error", "cannot be", "Read-only"),
    ("directory", {"directory": WELL.directory | {"free_bytes": GIB // 4}}, "error", "256 MiB free", "256 MiB left, 1.0 GiB"),
    ("directory", {"memory_needed_bytes": 400 * GIB}, "error", "900.0 GiB free", "1200.0 GiB needed"),
    ("directory", {"directory": WELL.directory | {"fsync_seconds": 2.5}}, "warning", "2.5 s", 'save_every="30min"'),
    ("lock-directory", {"locks": WELL.locks | {"filesystem": "nfs4"}}, "error", "network file system", "tmpfs"),
    ("lock-directory", {"locks": WELL.locks | {"lock": "Permission denied"}}, "error", "Permission denied", "1777 root"),
    ("lock-directory", {"locks": WELL.locks | {"mode": "755"}}, "warning", "mode 755", "systemd-tmpfiles"),
    (
        "left-over",
        {"left_over": [{"pid": 5, "command": "python -m torch.distributed.run", "gpu": False}]},
        "warning",
        "pid 5 (python -m torch.distributed.run)",
        "kill 5",
    ),
    ("left-over", {"port_29500": {"pid": 9, "mine": True}}, "warning", "process 9", "end process 9"),
    ("left-over", {"port_29500": {"pid": None, "mine": False}}, "warning", "hidden from you", "another user's"),
    (
        "collective",
        {"torch": TORCH | {"gloo": TORCH["gloo"] | {"wrong": "between 0 and 1"}}},
        "error",
        "gloo, between 0 and 1: the sum is wrong",
        "NCCL_P2P_DISABLE=1",
    ),
    ("collective", {"torch": TORCH | {"gloo": {"error": "rank 0: connect"}}}, "error", "gloo: rank 0", "loopback"),
    ("collective", {"torch": TORCH | {"stage": "nccl", "ended": "hung"}}, "error", "NCCL all-reduce", "NCCL_DEBUG"),
    ("collective", {"torch": TORCH | {"stage": "gloo", "ended": "was ended by SIGABRT"}}, "error", "SIGABRT", "health.py 0"),
    (
        "collective",
        {"torch": TORCH | {"nccl": TORCH["gloo"] | {"pairs": {"0-1": 9e10, "0-2": 9e10, "1-2": 1e10}}}},
        "warning",
        "ranks 1-2: 10.00 GB/s, half the pairs have 90.00",
        "topology",
    ),
]  # fmt: skip


@pytest.mark.parametrize("check, changes, level, found, fix", SICK, ids=[f"{one[0]}-{i}" for i, one in enumerate(SICK)])
def test_a_sick_machine_is_named_with_its_fix(check, changes, level, found, fix):
    seen = [one for one in examine(replace(WELL, **changes), [check]) if one.level in ("error", "warning")]
    hits = [one for one in seen if found in one.found]
    assert hits, seen
    assert hits[0].level == level
    assert fix in hits[0].fix and "{" not in hits[0].fix.replace("${", "")
    assert hits[0].why == texts()[check]["why"]


def test_every_check_has_its_sick_machine():
    assert {one[0] for one in SICK} == set(CHECKS)


def test_a_well_machine_is_called_well():
    levels = {one.check: one.level for one in examine(WELL, CHECKS)}
    assert set(levels.values()) <= {"ok", "skipped"}
    assert [name for name, level in levels.items() if level == "skipped"] == ["duplicate-names", "clock", "versions"]
    together = replace(WELL, hosts=hosts())
    assert {one.level for one in examine(together, CHECKS)} == {"ok"}
    assert {one.level for one in doctor.examine_hosts(together, doctor.OF_ALL_HOSTS)} == {"ok"}


def test_a_machine_without_gpu_is_well_too():
    torch = TORCH | {"version": "2.13.0+cpu", "cuda": None, "arch_list": []}
    facts = replace(WELL, **ALONE, torch=torch, infiniband=[])
    assert {one.level for one in examine(facts, CHECKS)} == {"ok", "skipped"}


def test_one_machine_needs_no_name_beyond_itself():
    for environ in ({}, {"MASTER_ADDR": "localhost"}, {"MASTER_ADDR": "127.0.0.1"}):
        (one,) = examine(replace(WELL, own_addresses=["127.0.1.1"], environ=environ), ["hostname"])
        assert (one.level, one.found) == ("ok", "node7 leads to 127.0.1.1 alone: enough for one machine")


def test_a_gpu_that_reaches_the_limit_it_was_made_for_is_well():
    (one,) = examine(replace(WELL, gpus=capped(700, ("power cap",))), ["throttling"])
    assert one.level == "ok"


def test_what_nobody_could_look_at_is_never_called_good():
    seen = {one.check: one.level for one in examine(Facts(), CHECKS)}
    assert not {check for check, level in seen.items() if level in ("error", "warning")}
    blind = {
        "torch-cuda",
        "hostname",
        "orphans",
        "shared-memory",
        "open-files",
        "cpus",
        "omp-threads",
        "interfaces",
        "ports",
    }
    blind |= {"directory", "lock-directory", "left-over", "collective"}
    assert {check for check, level in seen.items() if level == "unknown"} == blind
    mute = machine(gpu(0, health=Health()), gpu(1, health=Health()), links=(Link(0, 1),))
    silent = examine(replace(WELL, gpus=mute), ["throttling", "ecc", "pcie", "topology", "peer-access"])
    assert {one.level for one in silent} == {"unknown"}


def test_a_child_that_ended_early_is_no_verdict_on_cuda():
    for ended in ("hung", "late", "was ended by SIGABRT"):
        told = {"stage": "gloo", "ended": ended, "seconds": 12.0, "load": 9.0, "cpus": 2}
        facts = replace(WELL, torch={"version": "2.13.0", "cuda": "12.8"} | told)
        seen = {one.check: one for one in examine(facts, ["torch-cuda", "arch-list", "collective"])}
        assert seen["torch-cuda"].level == seen["arch-list"].level == "unknown"
        assert seen["collective"].level == ("unknown" if ended == "late" else "error")


def test_memory_is_hidden_only_when_that_is_certain():
    mute = gpu(
        0, memory_used_bytes=9 * GIB, memory_reserved_bytes=0, processes=(Process(1), Process(2, memory_bytes=1))
    )
    old = gpu(1, memory_used_bytes=GIB)  # a driver that counts its reserve as used
    assert {one.level for one in examine(replace(WELL, gpus=machine(mute, old)), ["hidden-memory"])} == {"ok"}


def test_the_texts_belong_to_the_checks():
    assert list(CHECKS) == list(texts())
    assert [text["number"] for text in texts().values()] == list(range(1, 39))
    used = "".join(path.read_text() for path in Path(doctor.__file__).parent.glob("*.py"))
    for check, text in texts().items():
        assert set(text) == {"number", "title", "looks", "why", "fix"}, check
        for name in text["fix"]:
            assert f'"{name}"' in used, f"{check}: no code yields the fix {name}"


def test_a_fact_sheet_survives_its_file():
    facts = replace(WELL, gpus=machine(gpu(0, processes=(Process(7, memory_bytes=5),))))
    assert Facts.from_json(facts.to_json(), "x") == facts
    for broken in ("{", "[]", '{"nonsense": 1}', '{"gpus": {"gpus": 3}}', '{"interfaces": 3}', "[" * 100_000):
        with pytest.raises(UsageError, match="x is no"):
            Facts.from_json(broken, "x")


def test_levels_are_ordered_worst_first():
    assert doctor.worst(examine(replace(WELL, shm_total_bytes=1, shm_free_bytes=1), CHECKS)) == "error"
    assert doctor.worst(examine(WELL, CHECKS)) == "ok" and LEVELS[0] == "error"


@pytest.mark.parametrize(
    "capability, built, runs",
    [
        ("8.6", "sm_80", True),  # binary code runs on later minors
        ("8.0", "sm_86", False),
        ("9.0", "sm_80", False),
        ("9.0", "sm_80 compute_80", True),  # PTX is compiled for what comes later
        ("9.0", "sm_90a", True),
        ("9.0", "compute_90a", True),
        ("10.0", "sm_90a compute_90a", False),  # features of one architecture alone
        ("10.3", "sm_100f", True),
        ("12.0", "sm_100f", False),
        ("12.0", "sm_120", True),
        ("6.1", "sm_70 compute_70", False),
        ("8.0", "gfx90a", False),
    ],
)
def test_which_code_runs_on_which_gpu(capability, built, runs):
    assert runs_on(capability, built.split()) is runs


def test_the_wheel_is_the_newest_that_the_driver_serves():
    assert [wheel(one) for one in (None, "13.1", "12.8", "12.7", "12.0", "11.4")] == [
        "cu130", "cu130", "cu128", "cu126", "cu118", "cu118",
    ]  # fmt: skip
