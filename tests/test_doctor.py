"""`evener doctor` on real and planted machines: what it reads, what it prints, how it ends, and torch in a child."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from evener import doctor
from evener.cli import main
from evener.doctor import Facts, TorchChild, facts
from evener.limits import memory_limit
from tests.fakenvml import ZOO, Fake, needs_compiler

PAGE = Path(__file__).parents[1] / "docs" / "doctor.md"


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def process(pid: int, command: str, *, parent: int = 1, uid: int = os.getuid(), session: int = 70) -> dict[str, str]:
    files = {"status": f"Name:\tx\nUid:\t{uid}\t0\t0\t0\n", "cmdline": command.replace(" ", "\0") + "\0"}
    files |= {"stat": f"{pid} (x) S {parent} 1 {session} " + "0 " * 15 + "7\n"}
    return {f"proc/{pid}/{name}": text for name, text in files.items()}


MACHINE = {
    "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.129.03  Release Build\n",
    "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.570.86.15": "",
    "dev/nvidia0": "",
    "dev/nvidiactl": "",
    "dev/shm/x": "",
    "proc/cmdline": "ro intel_iommu=on",
    "proc/self/limits": "Limit Soft Hard Units\nMax open files            1024   1048576   files\n"
    "Max locked memory         65536  unlimited  bytes\n",
    "proc/self/cgroup": "5:memory:/docker/abc\n0::/\n",
    "proc/cpuinfo": "processor\t: 0\nprocessor\t: 1\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/docker/memory.limit_in_bytes": "1073741824\n",
    "sys/fs/cgroup/memory/docker/memory.usage_in_bytes": "1000\n",
    "proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "eth1\t00000000\t0101A8C0\t0003\t0\t0\t0\t00000000\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n",
    "etc/nccl.conf": "# ours\nNCCL_DEBUG=INFO\n",
    "home/me/.nccl.conf": "NCCL_ALGO = Ring\n",
    "var/log/kern.log": "x NVRM: Xid (PCI:0000:19:00): 79, pid=1\nunrelated\n",
    "proc/uptime": "100.0 100.0\n",
    **process(77, "pt_data_worker"),
    **process(78, "torchrun x.py", parent=77),
    **process(79, "torchrun x.py", uid=os.getuid() + 1),
    **process(80, "python -m torch.distributed.run"),
    **process(81, "torchrun x.py", session=1),  # a container's first program started it
    "run/lock/evener/x": "",
    "etc/evener.toml": '[gpus]\nlock_folder = "/run/lock/evener"\n',
}


def test_facts_are_read_from_the_root_that_is_given(tmp_path):
    root = plant(tmp_path, MACHINE)
    library = root / "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    library.symlink_to("libnvidia-ml.so.570.86.15")
    (root / "proc/77/fd").mkdir()
    (root / "proc/77/fd/5").symlink_to("/dev/nvidia0")
    (root / "run/lock/evener").chmod(0o755)
    environ = {"HOME": "/home/me", "NCCL_ALGO": "Ring", "SECRET_TOKEN": "x", "CUDA_VISIBLE_DEVICES": "0"}
    limit, used = memory_limit(str(root))
    assert (limit, used) == (1 << 30, 1000)
    f = facts.gather(environ, root=str(root), ranks=2, memory_limit_bytes=limit, memory_used_bytes=used)
    assert (f.kernel_driver, f.nvml_library) == ("535.129.03", "570.86.15")
    assert f.device_files == ["nvidia0"]
    assert (f.nofile, f.nofile_hard, f.memlock_bytes) == (1024, 1048576, 65536)
    assert f.host_cpus == 2 and f.default_interface == "eth1"
    assert f.infiniband == [{"device": "mlx5_0", "port": "1", "state": "DOWN"}]
    assert f.nccl_files == {"/etc/nccl.conf": ["NCCL_DEBUG=INFO"], "/home/me/.nccl.conf": ["NCCL_ALGO = Ring"]}
    assert f.kernel_log == ["x NVRM: Xid (PCI:0000:19:00): 79, pid=1"]
    assert [(one["pid"], one["gpu"]) for one in f.left_over] == [(77, True), (80, False)]
    assert (f.locks["path"], f.locks["mode"], f.locks["lock"]) == ("/run/lock/evener", "755", "")
    assert f.environ == {"NCCL_ALGO": "Ring", "CUDA_VISIBLE_DEVICES": "0"}  # no secrets in a record
    wrong = {one.check for one in doctor.examine(f, doctor.CHECKS) if one.level in ("error", "warning")}
    expected = {"driver-match", "lost-gpu", "orphans", "memlock", "memory-limit", "nccl-variables", "infiniband"}
    assert expected | {"lock-directory", "left-over"} <= wrong
    assert Facts.from_json(f.to_json(), "x") == f


def test_a_name_server_that_does_not_answer_does_not_hold_the_doctor_up():
    late = threading.Event()
    answer, seconds = facts.within(0.2, late.wait)  # would wait for ever
    late.set()
    assert answer is None and seconds >= 0.2


def test_a_directory_is_tried_at_its_nearest_folder_and_nothing_stays(tmp_path, monkeypatch):
    seen = facts.look_at_directory(str(tmp_path / "new" / "runs"))
    assert seen["reason"] == "" and seen["free_bytes"] > 0 and seen["fsync_seconds"] >= 0
    (tmp_path / "file").write_text("")
    assert facts.look_at_directory(str(tmp_path / "file"))["reason"] == "Not a directory"
    monkeypatch.setattr("os.fsync", lambda descriptor: os.pread(-1, 1, 0))  # a disk that fills up meanwhile, say
    assert facts.look_at_directory(str(tmp_path))["reason"] == "Bad file descriptor"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


CHILDREN = [  # what a python that replaces torch's child does, the level and words of torch-cuda or collective
    ("kill -ILL $$", "torch-cuda", "was ended by SIGILL at: import torch"),
    ("sleep 60", "torch-cuda", "hung for"),
    ("exit 3", "torch-cuda", "left with exit code 3 at: import torch"),
    ("echo '{\"stage\": \"gloo\"}'; sleep 60", "collective", "all-reduce: the child hung"),
    ("echo '{\"stage\": \"gloo\"}'; echo noise; kill -ABRT $$", "collective", "was ended by SIGABRT"),
]  # fmt: skip


def child_that(folder: Path, script: str) -> TorchChild:
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho \'{{"stage": "import"}}\'\n{script}\n')
    python.chmod(0o755)
    return TorchChild(str(python), os.environ)


@pytest.mark.parametrize("script, check, found", CHILDREN)
def test_a_child_that_dies_or_hangs_is_a_finding(tmp_path, script, check, found, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 0.0, 0.0))  # one that does nothing hangs, whatever the load
    child = child_that(tmp_path, script)
    began = time.monotonic()
    answer = child.answer(3.0)
    assert time.monotonic() - began < 20
    (seen,) = doctor.examine(Facts(torch=answer), [check])
    assert seen.level == "error" and found in seen.found, seen


@pytest.mark.parametrize("load, level", [(1e6, "unknown"), (0.0, "error")])
def test_a_child_that_still_computes_on_a_busy_machine_is_late_and_says_what_to_do(tmp_path, monkeypatch, load, level):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    answer = child_that(tmp_path, "while :; do :; done").answer(4.0)
    for seen in doctor.examine(Facts(torch=answer), ["torch-cuda", "collective"]):
        if level == "unknown":
            said = rf"torch took longer than \d+ s to start; load 1000000 on {os.cpu_count()} cores: --timeout 60 waits longer"
            assert seen.level == "unknown" and re.fullmatch(said, seen.found)
        else:
            assert re.search(r"hung for \d+ s at: import torch|see torch-cuda", seen.found)


@pytest.mark.full
def test_torch_answers_and_reduces_rightly_here():
    """The real child: import, gloo over loopback on two forked ranks, known sums."""
    answer = TorchChild(sys.executable, os.environ).answer(120)
    assert "ended" not in answer and answer["stage"] == "done", answer
    assert answer["gloo"]["ranks"] == 2 and answer["gloo"]["error"] == answer["gloo"]["wrong"] == ""
    assert list(answer["gloo"]["pairs"]) == ["0-1"] and answer["gloo"]["bytes_per_second"] > 0
    (seen,) = doctor.examine(Facts(torch=answer), ["collective"])
    assert seen.level == "ok" and "gloo on 2 ranks" in seen.found


def test_an_installation_that_breaks_is_told_in_its_own_words(tmp_path):
    plant(tmp_path, {"torch/__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')"})
    child = TorchChild(sys.executable, {**os.environ, "PYTHONPATH": str(tmp_path)})
    (seen,) = doctor.examine(Facts(torch=child.answer(60)), ["torch-cuda"])
    assert seen.level == "error" and "libcudart.so.12" in seen.found


def doctor_json(capsys, *words: str) -> tuple[int, list[dict]]:
    code = main(["doctor", "--json", *words])
    return code, json.loads(capsys.readouterr().out)["findings"]


def test_the_json_is_the_contract(capsys, tmp_path):
    names = ["shared-memory", "nccl-variables", "directory"]
    code, findings = doctor_json(capsys, "--only", ",".join(names), "--dir", str(tmp_path))
    assert code in (0, 1) and [one["check"] for one in findings] == names
    for one in findings:
        assert list(one) == ["check", "level", "found", "why", "fix"]
        assert (one["fix"] is None) is (one["why"] is None) is (one["level"] not in ("error", "warning"))


def test_the_exit_code_is_1_for_an_error_and_0_for_a_warning(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonsense0")
    code, findings = doctor_json(capsys, "--only", "interfaces")
    assert code == 1 and findings[0]["level"] == "error" and "nonsense0" in findings[0]["found"]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    code, findings = doctor_json(capsys, "--only", "nccl-variables")
    assert code == 0 and findings[0]["level"] == "warning"


def test_a_record_is_judged_elsewhere_as_it_was_here(capsys, tmp_path):
    record = tmp_path / "facts.json"
    names = "shared-memory,open-files,cpus,mtu,hostname"
    _, here = doctor_json(capsys, "--only", names, "--record", str(record), "--ranks", "3", "--workers", "2")
    _, there = doctor_json(capsys, "--only", names, "--from", str(record))
    assert here == there and len(here) == 5
    assert "3 ranks with 2 data workers each" in next(one["found"] for one in here if one["check"] == "cpus")


def test_a_fact_sheet_of_an_odd_form_is_one_clear_error(capsys, tmp_path):
    sheet = tmp_path / "facts.json"
    for text in ('{"interfaces": [{"name": "eth0"}]}', '{"locks": {}}', '{"torch": {"stage": "done"}}'):
        sheet.write_text(text)
        assert main(["doctor", "--from", str(sheet)]) == 2
        told = capsys.readouterr()
        assert told.out == "" and f"{sheet} has facts of an odd form." in told.err


def test_the_page_shows_what_is_wrong_with_its_fix(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert main(["doctor", "--only", "nccl-variables", "--only", "nvml-package"]) == 0
    out = capsys.readouterr().out
    assert "1 warning, 1 ok" in out and "warning   nccl-variables: NCCL_P2P_DISABLE=1" in out
    assert "fix     unset NCCL_P2P_DISABLE" in out and "ok        nvml-package" in out
    assert max(map(len, out.splitlines())) <= 120
    assert main(["doctor", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 38


@pytest.mark.parametrize(
    "words, message",
    [
        (["--only", "shard-memory"], "'shard-memory' is not a check.\n  fix: shared-memory"),
        (["--from", "/nowhere.json"], "/nowhere.json cannot be read"),
        (["--memory", "much"], "--memory much is no amount of memory.\n  fix: --memory 20GB"),
        (["--record", "/nowhere/x", "--only", "cpus"], "/nowhere/x cannot be written: No such file"),
        (["--root", "/nowhere"], "--root /nowhere is no folder"),
        (["--timeout", "-1"], "-1 is no time of at least 0.1 seconds"),
        (["--ranks", "-1"], "-1 is not a number"),
        (["--nodes"], "which hosts?"),
        (["--nodes", "host1"], "--nodes host1 is no list of hosts"),
        (["--nodes", "a,b", "--only", "cpus"], "--nodes does not run cpus"),
    ],
)
def test_a_wrong_option_is_one_clear_error(capsys, words, message):
    assert main(["doctor", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


@needs_compiler
def test_the_gpus_of_a_real_nvml_client_are_judged(tmp_path):
    """The whole command under the stand-in driver: probe, checks, exit code; and inside of the time it promises."""
    scenario = (
        ZOO
        + "\ndriver 570.86.15\ngpu 8 name=Tesla width=4 max_width=16 ecc=2 throttle=0x40 persistence=0 plimit=250\nlink 3 8 nvlink=2\n"
    )
    scenario = scenario.replace("bus=0000:5D:00", "bus=0000:5D:00 replays=4")
    fake = Fake(tmp_path, scenario)
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "evener", "doctor", "--json", "--timeout", "100"],
        env=fake.environ(CUDA_VISIBLE_DEVICES="0,0", NCCL_DEBUG="INFO"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert time.monotonic() - began < 60  # under 15 s on an idle machine; docs/measurements.md has the figure
    assert done.returncode == 1, done.stderr
    findings = json.loads(done.stdout)["findings"]
    assert {one["check"] for one in findings} == set(doctor.CHECKS)
    (sums,) = (one for one in findings if one["check"] == "collective")
    assert sums["level"] == "ok" and "gloo on 2 ranks" in sums["found"]
    wrong = {one["check"]: one for one in findings if one["level"] in ("error", "warning")}
    said = " | ".join(one["found"] for one in findings)
    assert "NVLink: 4 replays" in said and "may draw 250 W, its default is 400 W" in said
    for check, words in {
        "lost-gpu": "GPU 7",
        "visible-devices": "hides every GPU",
        "hidden-memory": "GPU 5 (NVIDIA GeForce RTX 3090)",
        "torch-cuda": "built without CUDA, and there are 8 GPUs",
        "compute-mode": "GPU 8",
        "throttling": "thermal (hardware)",
        "ecc": "2 uncorrected",
        "pcie": "x4 of x16",
        "device-order": "mixed",
        "nccl-variables": "NCCL_DEBUG=INFO",
    }.items():
        assert words in wrong[check]["found"], (check, wrong.get(check))


def test_the_documentation_is_made_of_the_checks():
    _, mark, rest = PAGE.read_text(encoding="utf-8").partition("1. **`driver-match`**")
    pages = []
    for name, text in doctor.texts().items():
        lines = [f"{text['number']}. **`{name}`**: {text['title']}.", text["why"], f"Looks at: {text['looks']}."]
        lines += [f"- {kind}: {fix}" for kind, fix in text["fix"].items()]
        pages.append("\n   ".join(lines).replace("*", "\\*").replace("\\*\\*", "**"))
    expected = "\n\n".join(pages) + "\n"
    assert mark + rest == expected, f"after the head it should be:\n{expected}"


@pytest.mark.gpu
def test_a_real_driver_and_real_nccl_are_judged(capsys, tmp_path):
    """On a machine with GPUs: the probe, CUDA in the child, NCCL over all visible GPUs and between all pairs."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    code, findings = doctor_json(
        capsys, "--deep", "--timeout", "120", "--dir", str(tmp_path), "--record", str(tmp_path / "f")
    )
    levels = {one["check"]: one["level"] for one in findings}
    assert (levels["nvml"], levels["torch-cuda"], levels["arch-list"]) == ("ok", "ok", "ok"), findings
    answer = Facts.from_json((tmp_path / "f").read_text(), "f").torch
    assert answer["devices"] == torch.cuda.device_count() and answer["stage"] == "done"
    if torch.cuda.device_count() > 1:
        assert answer["nccl"]["ranks"] == torch.cuda.device_count() and not answer["nccl"]["error"]
    assert code == (1 if "error" in levels.values() else 0)
