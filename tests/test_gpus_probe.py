"""`evener gpus` says what the driver says: on three driver eras, through two probes, and as its peers do.

Everything here is a real NVML client on a stand-in library; a real driver has not been asked (untested on CUDA).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evener.cli import main
from evener.gpus import from_json, look, nvml, owners, to_json
from evener.gpus.values import GIB, MIB, Gpu, Process, Snapshot
from tests.fakenvml import EIGHT, ERAS, ZOO, Fake, needs_compiler

PEERS_PROGRAM = """
import json, psutil
from nvitop import Device, NA
rows = []
def user(process):
    try:
        return process.username()
    except psutil.NoSuchProcess:
        return None
for d in Device.all():
    known = lambda value: None if value is NA or isinstance(value, str) and value.startswith("ERROR") else value
    rows.append({
        "index": d.index, "uuid": known(d.uuid()), "name": known(d.name()), "total": known(d.memory_total()),
        "used": known(d.memory_used()), "free": known(d.memory_free()), "util": known(d.gpu_utilization()),
        "temp": known(d.temperature()), "power": known(d.power_usage()),
        "cc": known(d.cuda_compute_capability()), "mig": known(d.mig_mode()),
        "processes": {str(pid): [known(p.gpu_memory()), user(p)] for pid, p in d.processes().items()},
        "parts": [[m.uuid(), m.memory_total(), m.memory_used()] for m in d.mig_devices()],
    })
print(json.dumps(rows))
"""


def cli(fake: Fake | None, *words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "SLURM_", "KUBERNETES_"))}
    env = fake.environ(base, **environ) if fake else {**base, **environ}
    command = [sys.executable, "-m", "evener", "gpus", *(str(word) for word in words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, cwd="/")


def shown(fake: Fake, *words: object, **environ: str) -> dict:
    done = cli(fake, "--json", "--lock-folder", fake.path.parent / "locks", *words, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def sleeper():
    """A live process with a command that can be recognised."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "train.py"])
    yield process.pid
    process.kill()
    process.wait()


# --- the zoo, on every era --------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("era", ERAS)
def test_each_trouble_is_shown_as_what_it_is_and_hides_no_other_gpu(tmp_path, era, sleeper):
    fake = Fake(tmp_path, ZOO, era)
    fake.occupy(sleeper, "0 C 90000")
    fake.occupy(os.getpid(), "0 C 500", "6 G 300")
    got = shown(fake)
    gpus = got["gpus"]
    assert [gpu["index"] for gpu in gpus] == list(range(8)) and got["trouble"] is None and got["source"] == "nvml"
    assert got["driver"] == {470: "470.199.02", 535: "535.54.03", 570: "570.86.15"}[era]
    assert got["cuda"] == {470: "11.4", 535: "12.2", 570: "12.8"}[era]
    # A computing GPU: both processes whole, the larger first. On 535 a client that knows 24-byte records sees rubbish.
    first, second = gpus[0]["processes"]
    assert (first["pid"], first["memory_bytes"], first["kind"]) == (sleeper, 90000 * MIB, "compute")
    assert first["command"].endswith("train.py") and first["user"] == owners.user_name(os.getuid())
    assert 0 <= first["age_seconds"] < 600 and second["pid"] == os.getpid()
    assert not gpus[0]["idle"] and any(f"pid {sleeper}" in why for why in gpus[0]["busy_because"])
    assert (gpus[0]["utilization_percent"], gpus[0]["temperature_c"], gpus[0]["power_w"]) == (97, 63, 640.0)
    assert gpus[0]["compute_capability"] == "9.0" and gpus[0]["pci_bus_id"] == "00000000:19:00.0"
    # Idle. Memory that the driver reserves is not in use; before 510 nobody can tell the two apart.
    assert gpus[1]["idle"] and gpus[1]["busy_because"] == [] and gpus[1]["processes"] == []
    assert gpus[1]["memory_total_bytes"] == 143771 * MIB and (gpus[1]["numa_node"], gpus[4]["numa_node"]) == (0, 1)
    assert gpus[1]["memory_used_bytes"] == (512 * MIB if era == 470 else 0)
    assert gpus[1]["memory_reserved_bytes"] == (None if era == 470 else 512 * MIB)
    # MIG: not idle as a whole, its parts are.
    assert not gpus[2]["idle"] and gpus[2]["busy_because"][0].startswith("MIG is on")
    assert [(part["idle"], part["uuid"][:4], part["memory_total_bytes"]) for part in gpus[2]["mig"]] == [
        (True, "MIG-", 9856 * MIB),
        (True, "MIG-", 19968 * MIB),
    ]
    # Hidden processes are null, not an empty list, and memory decides.
    assert gpus[3]["processes"] is None and gpus[3]["idle"]
    assert any("Insufficient Permissions" in note for note in gpus[3]["notes"])
    assert "its processes are hidden from you: judged by memory alone" in gpus[3]["notes"]
    # A process id of the host that is nobody here.
    assert gpus[4]["processes"][0]["user"] is None and "not to be seen from here" in gpus[4]["busy_because"][0]
    # Memory in use and no process: never idle.
    assert not gpus[5]["idle"] and "GiB in use and no process to be seen" in gpus[5]["busy_because"][0]
    # A desktop draws: that is no reason not to train.
    assert gpus[6]["idle"] and gpus[6]["processes"][0]["kind"] == "graphics"
    # Lost: named, and everything unknown is null.
    lost = gpus[7]
    assert lost["error"] == "GPU is lost" and lost["busy_because"] == ["GPU is lost"] and not lost["idle"]
    assert lost["uuid"] is lost["memory_used_bytes"] is lost["processes"] is None


@needs_compiler
@pytest.mark.parametrize("era", ERAS)
def test_nvitop_and_gpustat_agree_on_every_field_that_is_shared(tmp_path, era, sleeper):
    pytest.importorskip("nvitop")
    pytest.importorskip("gpustat")
    fake = Fake(tmp_path, ZOO, era)
    fake.occupy(sleeper, "0 C 70000", "4 C 500")
    fake.occupy(os.getpid(), "0 C 500")
    ours = shown(fake)["gpus"]

    def ask(*command: str):
        done = subprocess.run(command, env=fake.environ(), capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout)

    compared = 0
    for mine, theirs in zip(ours, ask(sys.executable, "-c", PEERS_PROGRAM), strict=True):
        pairs = {
            "index": mine["index"],
            "uuid": mine["uuid"],
            "name": mine["name"],
            "total": mine["memory_total_bytes"],
            "used": mine["memory_used_bytes"],
            "free": mine["memory_free_bytes"],
            "util": mine["utilization_percent"],
            "temp": mine["temperature_c"],
            "power": None if mine["power_w"] is None else mine["power_w"] * 1000,
            "cc": None
            if mine["compute_capability"] is None
            else [int(n) for n in mine["compute_capability"].split(".")],
            "mig": {True: "Enabled", False: "Disabled", None: None}[mine["mig_enabled"]],
            "parts": [[part["uuid"], part["memory_total_bytes"], part["memory_used_bytes"]] for part in mine["mig"]],
        }
        # Where nvitop may not ask, it shows no process, as if there were none; here that is null.
        pairs["processes"] = {str(one["pid"]): [one["memory_bytes"], one["user"]] for one in mine["processes"] or []}
        for name, value in pairs.items():
            assert theirs[name] == value, (era, mine["index"], name)
            compared += 1
    for mine, theirs in zip(ours, ask(sys.executable, "-m", "gpustat", "--json")["gpus"], strict=True):
        if mine["error"]:
            assert "lost" in theirs["name"]  # gpustat has nothing but the name for it
            continue
        assert theirs["index"] == mine["index"] and theirs["uuid"] == mine["uuid"] and theirs["name"] == mine["name"]
        assert theirs["temperature.gpu"] == mine["temperature_c"]
        assert theirs["utilization.gpu"] == mine["utilization_percent"]
        assert theirs["power.draw"] == mine["power_w"] and theirs["enforced.power.limit"] == mine["power_limit_w"]
        assert theirs["memory.total"] * MIB == mine["memory_total_bytes"]
        assert theirs["memory.used"] * MIB == mine["memory_used_bytes"]
        # gpustat, too, leaves out processes that it cannot see, and lists none where it may not ask.
        seen = {one["pid"]: one["memory_bytes"] for one in mine["processes"] or [] if one["user"] is not None}
        listed = {one["pid"]: one["gpu_memory_usage"] * MIB for one in theirs["processes"] or []}
        if era == 535 and len(mine["processes"] or []) > 1:
            # nvidia-ml-py reads records of 24 bytes where this driver wrote 32: gpustat gets the first right.
            assert listed.items() < seen.items()
        else:
            assert listed == seen
        compared += 1
    assert compared > 100


@needs_compiler
@pytest.mark.parametrize("era", [470, 570])
def test_the_other_probe_says_the_same(tmp_path, era, sleeper):
    fake = Fake(tmp_path, ZOO, era)
    fake.occupy(sleeper, "0 C 90000")
    folder = fake.program(tmp_path / "bin")
    path = f"{folder}:{os.environ['PATH']}"
    full = shown(fake)["gpus"]
    # Without the library: nvidia-smi is asked by itself.
    done = cli(None, "--json", "--lock-folder", tmp_path / "locks", PATH=path)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["source"] == "nvidia-smi" and got["driver"].startswith(str(era)) and got["cuda"] is None
    same = ("index", "uuid", "name", "memory_total_bytes", "memory_used_bytes", "memory_free_bytes", "mig_enabled")
    same += ("utilization_percent", "temperature_c", "power_w", "power_limit_w", "pci_bus_id", "error")
    for ours, theirs in zip(full, got["gpus"], strict=True):
        for name in same:
            assert ours[name] == theirs[name], (ours["index"], name)
    assert got["gpus"][0]["processes"][0]["pid"] == sleeper and got["gpus"][0]["processes"][0]["command"].endswith(
        "train.py"
    )
    assert got["gpus"][7]["error"] == "GPU is lost"
    fake.write("init LIB_RM_VERSION_MISMATCH")
    broken = cli(None, PATH=path)
    assert broken.returncode == 4
    assert "nvidia-smi ended with 18: Failed to initialize NVML" in broken.stdout


@needs_compiler
def test_a_container_shows_its_gpus_and_host_ids_that_mean_nobody(tmp_path):
    fake = Fake(tmp_path, EIGHT + "\nproc 5 pid=4194305 mem=700")
    got = shown(fake, FAKE_NVML_VISIBLE="3,5")["gpus"]
    assert [gpu["uuid"][:12] for gpu in got] == ["GPU-fa4e0003", "GPU-fa4e0005"]
    assert [gpu["index"] for gpu in got] == [0, 1] and [gpu["idle"] for gpu in got] == [True, False]


def fake_proc(root: Path, pid: int, *, namespace: str, opens: tuple[str, ...], parent: int = 1) -> None:
    folder = root / "proc" / str(pid)
    (folder / "fd").mkdir(parents=True)
    fields = ["S", str(parent), *["0"] * 17, "100", "0"]
    (folder / "stat").write_text(f"{pid} (py) thon) {' '.join(fields)}")
    (folder / "status").write_text("Name:\tpython\nUid:\t0\t0\t0\t0\n")
    (folder / "cmdline").write_text("python\0train.py\0")
    (root / "proc/uptime").write_text("500.0 900.0\n")
    for number, target in enumerate(opens):
        (folder / "fd" / str(number)).symlink_to(target)
    link = root / "proc/self/ns/pid"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(namespace)


def test_in_a_container_a_number_is_a_name_only_when_the_process_has_the_gpu_open(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    root = str(tmp_path)
    fake_proc(tmp_path, 42, namespace="pid:[4026532999]", opens=("/dev/null", "/tmp/x"))
    assert nvml.named_process(42, 5, "compute", root) == Process(42, memory_bytes=5)
    fake_proc(tmp_path, 43, namespace="pid:[4026532999]", opens=("/dev/null", "/dev/nvidia0"))
    got = nvml.named_process(43, 5, "compute", root)
    assert got.user == "root" and got.command == "python train.py" and got.orphan and got.age_seconds == 499.0
    # On the host the number is the name.
    fake_proc(tmp_path, 44, namespace=owners.HOST_PID_NAMESPACE, opens=(), parent=7)
    assert nvml.named_process(44, 5, "compute", root).user == "root"
    holders, hidden = owners.device_holders(root)
    assert [(pid, devices, one.parent) for pid, one, devices in holders] == [(43, ("/dev/nvidia0",), 1)] and hidden == 0


# --- when the driver does not answer -----------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "init, kind, words",
    [
        ("LIB_RM_VERSION_MISMATCH", "mismatch", ["kernel module and its library differ", "the library is /", "reboot"]),
        ("DRIVER_NOT_LOADED", "driver-not-loaded", ["no driver is loaded", "modprobe"]),
        ("NO_PERMISSION", "no-permission", ["You may not ask", "/dev/nvidia*"]),
        ("UNKNOWN", "other", ["does not answer", "Unknown Error", "dmesg"]),
    ],
)
def test_a_broken_driver_is_named_and_is_no_empty_answer(tmp_path, init, kind, words):
    fake = Fake(tmp_path, f"init {init}")
    for form in ((), ("--env",), ("-n", "1", "--env"), ("--json",)):
        done = cli(fake, *form)
        assert done.returncode == 4, form
        if form == ("--json",):
            assert json.loads(done.stdout)["trouble"]["kind"] == kind and json.loads(done.stdout)["gpus"] == []
            continue
        text = done.stdout if form == () else done.stderr
        assert form == () or done.stdout == "", "what goes into a variable is never half an answer"
        for word in words:
            assert word in text, (form, word)
        assert "Traceback" not in done.stderr


def test_the_kernels_driver_and_device_files_are_evidence(tmp_path):
    class Error(Exception):
        pass

    class Nvml:
        NVMLError_LibRmVersionMismatch = type("Mismatch", (Error,), {})
        NVMLError_DriverNotLoaded = type("NotLoaded", (Error,), {})
        NVMLError_NoPermission = type("NoPermission", (Error,), {})
        NVMLError_Unknown = type("Unknown", (Error,), {})

    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    got = look._trouble(Nvml, Nvml.NVMLError_LibRmVersionMismatch("differ"), str(tmp_path))
    assert "the kernel has driver 550.54.14 loaded" in got.evidence and got.broken
    text = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
    (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert look.loaded_driver(str(tmp_path)) == "570.86.15"
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    got = look._trouble(Nvml, Nvml.NVMLError_Unknown("Unknown Error"), str(tmp_path))
    assert got.kind == "lost-in-container" and "restart" in got.fix[0]


def card(root: Path, vendor: str = "0x10de", kind: str = "0x030200") -> None:
    folder = root / "sys/bus/pci/devices/0000:19:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")


def test_no_gpu_and_no_driver_are_two_things(tmp_path):
    none = look.without_library(str(tmp_path))
    assert none.kind == "no-gpu" and not none.broken
    card(tmp_path)
    bare = look.without_library(str(tmp_path))
    assert bare.kind == "no-driver" and bare.broken and "0000:19:00.0" in bare.evidence[0]
    assert "install NVIDIA's driver" in bare.fix[0]
    (tmp_path / ".dockerenv").touch()
    assert "--gpus all" in look.without_library(str(tmp_path)).fix[0]
    (tmp_path / "amd/dev").mkdir(parents=True)
    (tmp_path / "amd/dev/kfd").touch()
    assert "AMD" in look.without_library(str(tmp_path / "amd")).cause


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has an NVIDIA driver")
def test_a_machine_without_a_gpu_gets_a_short_honest_answer():
    done = cli(None)
    assert done.returncode == 3 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert "NVIDIA" in lines[0] and "evener run --cpu" in lines[1] and lines[2].startswith("CPU: ") and len(lines) == 3
    assert max(map(len, lines)) <= 80
    assert cli(None, "--env").stdout == "" and cli(None, "--env").returncode == 3
    assert json.loads(cli(None, "--json").stdout)["trouble"]["kind"] == "no-gpu"


def test_a_mac_is_told_what_it_has(monkeypatch, capsys):
    """Simulated: no Mac has run it. The short table, and the exit code of a machine without NVIDIA GPUs."""
    import psutil  # noqa: F401  (it looks at the platform when it is first imported)

    monkeypatch.setattr("sys.platform", "darwin")
    got = look.look({})
    assert got.trouble.kind == "no-gpu" and "mps" in got.trouble.cause and not got.trouble.broken
    assert main(["gpus"]) == 3
    first, second, cpu = capsys.readouterr().out.splitlines()
    assert first == got.trouble.cause and len(first) <= 80 and second == "  its memory is the machine's own"
    assert cpu.startswith(f"CPU: {os.cpu_count()} usable cores, ") and cpu.endswith(" memory free.")
    assert main(["gpus", "--env"]) == 3 and capsys.readouterr().out == ""


# --- the table, recordings, choices ------------------------------------------------------------------------------------


@needs_compiler
def test_the_table_fits_80_columns_and_names_what_is_wrong(tmp_path, sleeper):
    fake = Fake(tmp_path, ZOO)
    fake.occupy(sleeper, "0 C 90000")
    done = cli(fake, "--topology", "--lock-folder", tmp_path / "locks", COLUMNS="80")
    assert done.returncode == 0 and done.stderr == ""
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "8 GPUs, 3 idle · 2 MIG devices, 2 idle · driver 570.86.15 · CUDA 12.8"
    assert lines[1].split() == ["GPU", "slot", "name", "memory", "GiB", "util", "temp", "power", "state"]
    rows = {line.split()[0]: line for line in lines if line[:4].strip() and line[0] == " "}
    states = {name: row.split()[-1] for name, row in rows.items()}
    assert states == {"GPU": "state"} | dict(
        zip(
            ["0", "1", "2", "2.0", "2.1", "3", "4", "5", "6", "7"],
            ["busy", "idle", "MIG", "idle", "idle", "idle", "busy", "busy", "idle", "lost"],
        )
    )
    assert "87.9/140.4   97%   63C    640W  busy" in rows["0"] and f"pid {sleeper}" in done.stdout
    assert "0-1    one PCIe switch              4  ok" in lines
    assert any(line.startswith("4-5    other socket") for line in lines)


@needs_compiler
def test_a_recording_is_shown_as_the_machine_was(tmp_path):
    fake = Fake(tmp_path, ZOO)
    file = tmp_path / "gpus.json"
    live = cli(fake, "--record", file, "--lock-folder", tmp_path / "locks")
    again = cli(None, "--from", file)
    assert again.returncode == live.returncode == 0
    assert again.stdout.splitlines()[1:] == live.stdout.splitlines()[1:]
    assert again.stdout.splitlines()[0] == live.stdout.splitlines()[0] + " · recorded"
    # Decisions can be made from it, too.
    assert cli(None, "--from", file, "-n", "1", "--env").stdout.startswith("CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE")
    values = json.loads(file.read_text())
    assert json.loads(json.dumps(to_json(from_json(values, "it")))) == values


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", ["is not JSON"]),
        ("[" * 100_000, ["is not JSON"]),
        ("[]", ["is no recording of GPUs", "the file: an object was expected, not list"]),
        ('{"gpus": [{"index": "0"}]}', ["gpus[0].index: int was expected, not '0'"]),
        ('{"gpus": [{}]}', ["gpus[0]", "'index' is missing"]),
        ('{"gpus": [{"index": 0, "colour": 1}]}', ["gpus[0].colour: not a field of Gpu"]),
        ('{"gpus": {}}', ["gpus: a list was expected"]),
    ],
)
def test_a_broken_recording_is_one_clear_error(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    done = cli(None, "--from", tmp_path / "x.json")
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    missing = cli(None, "--from", tmp_path / "none.json")
    assert missing.returncode == 2 and "none.json cannot be read: No such file" in missing.stderr


@needs_compiler
def test_exit_codes_and_choices(tmp_path):
    fake = Fake(tmp_path, ZOO)
    fake.occupy(os.getpid(), "0 C 500")
    locks = ("--lock-folder", tmp_path / "locks")

    def ask(*words: object):
        done = cli(fake, *words, *locks)
        return done.returncode, done.stdout.strip(), done.stderr

    seen = "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES="
    assert ask("-n", 1, "--env")[:2] == (0, f"{seen}GPU-fa4e0001-0000-4000-8000-000000000001")
    assert ask("--model", "a100", "--env")[:2] == (0, f"{seen}GPU-fa4e0003-0000-4000-8000-000000000003")
    code, out, err = ask("-n", 2, "--env")
    assert (
        (code, out) == (3, "") and "one kind" in err and "GPU 7: GPU is lost" in err and "GPU 5: 20.5 GiB in use" in err
    )
    assert ask("--min-free", "150GB", "--env")[0] == 0 and ask("--min-free", "150GiB", "--env")[0] == 3
    code, out, _ = ask("-n", 1)
    assert code == 0 and out.endswith("1 GPU: GPU 1 would be taken.")
    assert ask("-n", 2)[0] == 3
    for wrong, word in (
        (("-n", "x"), "-n x"),
        (("--min-free", "9"), "9 is no amount"),
        (("--watch", "x"), "x is no time"),
        (("--watch", "0"), "0 is no time"),
        (("--watch", "inf"), "inf is no time"),
        (("-n", "9" * 5000), "how many GPUs"),
        (("--min-free", "9" * 400 + "GB"), "no amount of memory"),
        (("y",), "unrecognized"),
    ):
        code, out, err = ask(*wrong)
        assert code == 2 and out == "" and word in err, wrong


@needs_compiler
def test_watch_looks_again_and_ends_quietly(tmp_path):
    import signal

    fake = Fake(tmp_path, EIGHT)
    command = [sys.executable, "-m", "evener", "gpus", "--watch", "0.2", "--lock-folder", str(tmp_path / "locks")]
    process = subprocess.Popen(command, env=fake.environ(), stdout=subprocess.PIPE, text=True)
    seen = []
    for line in process.stdout:
        if line.startswith("8 GPUs"):
            seen.append(line.split(" · ")[0])
            fake.write(EIGHT.replace("gpu 0 ", "gpu 0 used=9000 "))
            if len(seen) > 1 and seen[-1] == "8 GPUs, 7 idle":
                break
    process.send_signal(signal.SIGINT)
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 0 and "Traceback" not in rest
    assert seen[0] == "8 GPUs, 8 idle"


def test_verdicts_do_not_guess():
    def judged(**values: object) -> Gpu:
        gpu = Gpu(0, uuid="GPU-a", **{"memory_used_bytes": 0, "memory_reserved_bytes": 0, "processes": (), **values})
        return look.judge(Snapshot(gpus=(gpu,)), {}).gpus[0]

    assert judged().idle
    assert judged(memory_used_bytes=199 * MIB).idle and not judged(memory_used_bytes=200 * MIB).idle
    assert judged(memory_used_bytes=600 * MIB, memory_reserved_bytes=None).idle, "an old driver's reserve is in it"
    assert not judged(memory_used_bytes=GIB, memory_reserved_bytes=None).idle
    assert judged(memory_used_bytes=None).busy_because == ("its memory cannot be read",)
    assert not judged(memory_used_bytes=GIB, processes=None).idle
    desktop = Process(1, "ann", "Xorg", 900 * MIB, kind="graphics")
    assert judged(memory_used_bytes=950 * MIB, processes=(desktop,)).idle
    mps = Process(1, "ann", "nvidia-cuda-mps-server", 30 * MIB, kind="mps")
    assert not judged(memory_used_bytes=30 * MIB, processes=(mps,)).idle


def test_holders_name_orphans_and_the_command_that_ends_yours(monkeypatch, capsys):
    me = owners.user_name(os.getuid())
    found = [
        (41, owners.Who(me, "python train.py", 7200.0, 1, 0, 0), ("/dev/nvidia0", "/dev/nvidiactl")),
        (42, owners.Who("ann", "python eval.py", 5.0, 40, 0, 0), ("/dev/nvidia1",)),
    ]
    monkeypatch.setattr(owners, "device_holders", lambda: (found, 3))
    assert main(["gpus", "--holders"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"pid 41 {me}, for 2 h · orphan: its parent is gone: python train.py",
        "    /dev/nvidia0, /dev/nvidiactl",
        "pid 42 ann, for 5 s: python eval.py",
        "    /dev/nvidia1",
        "orphans of yours: kill 41",
        "3 processes of other users could not be looked into; root can: sudo evener gpus --holders",
    ]
    monkeypatch.undo()
    assert main(["gpus", "--holders"]) == 0 and capsys.readouterr().out


def test_the_memory_node_is_the_kernels_word(tmp_path):
    class Nvml:
        class NVMLError(Exception):
            pass

        NVMLError_NotSupported = NVMLError_FunctionNotFound = NVMLError_NotFound = type("No", (NVMLError,), {})
        NVMLError_GpuIsLost = NVMLError_ResetRequired = type("Lost", (NVMLError,), {})
        nvmlDeviceGetMemoryAffinity = staticmethod(lambda handle, size, scope: [0b1000, 0, 0, 0])

    folder = tmp_path / "sys/bus/pci/devices/0000:19:00.0"
    folder.mkdir(parents=True)
    reader = nvml._Reader(Nvml, None, None, str(tmp_path))
    (folder / "numa_node").write_text("1\n")
    assert reader.numa_node("00000000:19:00.0") == 1
    (folder / "numa_node").write_text("-1\n")
    assert reader.numa_node("00000000:19:00.0") is None, "the kernel says that it has none"
    assert reader.numa_node("00000000:3B:00.0") == 3, "else the driver's word"
