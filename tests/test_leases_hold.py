"""A GPU is granted once: fifty pickers of three users, killed in between, and every known hazard of a lock file."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from evener.errors import LaunchError, ShortageError, UsageError
from evener.gpus import leases, look, pick
from evener.gpus.leases import Folder
from evener.gpus.values import GIB, Gpu, Process, Snapshot
from tests.fakenvml import EIGHT, Fake, needs_compiler

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def open_folder():
    """A folder that other users can enter, unlike pytest's own."""
    path = Path(tempfile.mkdtemp(prefix="evener-leases-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def folder(open_folder):
    open_folder.chmod(0o1777)
    made = Folder(str(open_folder))
    made.prepare()
    return made


def race(place: Path, seed: int, way: str) -> dict:
    (place / "locks").mkdir(mode=0o1777)
    (place / "locks").chmod(0o1777)
    environ = Fake(place, EIGHT).environ()
    command = [sys.executable, str(SCRIPTS / "gpu_race.py"), str(place / "locks"), "50", str(seed), way]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    return json.loads(done.stdout)


@needs_compiler
@pytest.mark.parametrize("repeat", [0, *(pytest.param(i, marks=pytest.mark.full) for i in range(1, 20))])
def test_fifty_pickers_with_kills_get_no_gpu_twice_and_none_starves(open_folder, test_seed, repeat):
    got = race(open_folder, test_seed + repeat, "lease")
    assert got["double"] == 0 and got["starved"] == [], got
    assert got["killed"] >= 3 and got["grants"] >= 40, f"the race was none: {got}"


@needs_compiler
def test_look_then_go_fails_the_same_race(open_folder, test_seed):
    got = race(open_folder, test_seed, "query")
    assert got["double"] > 10, got


# --- the hazards, one by one ------------------------------------------------------------------------------------------


def in_child(function, uid: int | None = None) -> int:
    """Runs `function` in a forked child, as another user when we are root; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            if uid is not None and os.getuid() == 0:
                os.setgid(uid)
                os.setuid(uid)
            code = int(function() or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lease_ends_with_its_process_however_that_ends(folder):
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        with folder.serial():
            assert folder.take(["GPU-a", "GPU-b"], "train.py")
        os.write(write, b"x")
        time.sleep(600)
        os._exit(0)
    os.read(read, 1)
    os.close(read)
    os.close(write)
    held = folder.holder("GPU-a")
    assert (held.pid, held.command) == (pid, "train.py") and held.since_unix <= time.time()
    assert str(held) == f"{held.user}, pid {pid}: train.py"
    with folder.serial():
        assert folder.take(["GPU-c", "GPU-b"], "x") is None, "all or nothing"
        assert folder.holder_now("GPU-c") is None, "and what was taken in vain is given back"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert folder.holder("GPU-a") is folder.holder("GPU-b") is None
    with folder.serial(), contextlib.closing(folder.take(["GPU-a"], "next")) as lease:
        assert folder.holder_now("GPU-a").pid == os.getpid()  # the dead one's note is passed over
    assert lease.descriptors == () and folder.holder("GPU-a") is None


def test_another_users_file_is_locked_though_it_cannot_be_written(folder):
    if os.getuid() != 0:
        pytest.skip("only root can be several users")

    def takes() -> int:
        os.umask(0o077)
        with folder.serial():
            return 0 if folder.take(["GPU-a"], "theirs") else 1

    assert in_child(takes, 65001) == 0
    file = Path(folder.path) / "GPU-a.lock"
    assert file.stat().st_uid == 65001 and file.stat().st_mode & 0o777 == 0o644, "whatever their umask"
    assert in_child(takes, 65002) == 0
    with folder.serial():
        lease = folder.take(["GPU-a"], "root's")
    assert in_child(takes, 65001) == 1
    lease.close()


def test_a_child_that_inherited_the_descriptor_keeps_the_lease(folder):
    read, write = os.pipe()
    with folder.serial():
        lease = folder.take(["GPU-a"], "parent")
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0)
    lease.close()
    assert folder.holder("GPU-a") is not None, "the agent of a killed supervisor is such a child"
    os.write(write, b"x")
    os.waitpid(pid, 0)
    assert folder.holder("GPU-a") is None
    os.close(read)
    os.close(write)


def test_a_file_that_is_unlinked_while_it_is_being_locked_is_not_a_lease(folder, monkeypatch):
    path = Path(folder.path) / "GPU-a.lock"
    flock, cleaned = fcntl.flock, []

    def cleaner(descriptor: int, how: int) -> None:
        flock(descriptor, how)
        if not cleaned and path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
            cleaned.append(path.stat().st_ino)
            path.unlink()

    monkeypatch.setattr("fcntl.flock", cleaner)
    with folder.serial():
        lease = folder.take(["GPU-a"], "x")
    assert cleaned and os.fstat(lease.descriptors[0]).st_ino == path.stat().st_ino
    lease.close()


def test_the_folder_is_locked_against_cleaners_while_a_lease_lives(folder):
    with folder.serial():
        lease = folder.take(["GPU-a"], "x")
    descriptor = os.open(folder.path, os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what systemd-tmpfiles asks before it ages a folder
    lease.close()
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)


def test_a_picker_that_hangs_is_named_after_a_while(folder):
    with (
        folder.serial(),
        pytest.raises(LaunchError, match=r"has been choosing GPUs for 0 s(.|\n)*fuser -v"),
        folder.serial(0.1),
    ):
        pass
    with folder.serial():
        assert folder.holder("GPU-a") is None, "looking waits a moment for it, and goes on"


def test_a_folder_that_cannot_keep_the_promise_is_refused(tmp_path, monkeypatch):
    def problem(path: Path) -> str:
        with pytest.raises(LaunchError) as caught:
            Folder(str(path)).prepare()
        assert f"mkdir -p -m 1777 {path}" in str(caught.value) and "lock_folder" in str(caught.value)
        return str(caught.value)

    made = tmp_path / "made"
    Folder(str(made)).prepare()
    assert made.stat().st_mode & 0o7777 == 0o1777
    loose = tmp_path / "loose"
    loose.mkdir()
    loose.chmod(0o777)
    assert "no sticky bit" in problem(loose)
    (tmp_path / "file").touch()
    assert "it is no folder" in problem(tmp_path / "file") or "File exists" in problem(tmp_path / "file")
    (tmp_path / "link").symlink_to(made)
    assert "it is no folder" in problem(tmp_path / "link")
    monkeypatch.setattr(leases, "file_system", lambda path: "nfs4")
    assert "network file system (nfs4), whose locks do not hold" in problem(made)


def test_every_user_computes_the_same_folder(tmp_path, monkeypatch):
    for name in ("HOME", "TMPDIR", "XDG_RUNTIME_DIR", "USER"):
        monkeypatch.setenv(name, str(tmp_path))
    assert leases.default_path(str(tmp_path / "none.toml")) in ("/run/lock/evener", "/tmp/evener-locks")
    setting = tmp_path / "evener.toml"
    setting.write_text('[gpus]\nlock_folder = "/srv/locks"\n')
    assert leases.default_path(str(setting)) == "/srv/locks"
    setting.write_text("[gpus\n")
    with pytest.raises(UsageError, match="cannot be read"):
        leases.default_path(str(setting))
    setting.write_text('[gpus]\nlock_folder = "here"\n')
    with pytest.raises(UsageError, match="no absolute path"):
        leases.default_path(str(setting))


# --- the queue --------------------------------------------------------------------------------------------------------

PICKER = """
import os, sys, time
from evener.gpus import pick
wish = pick.Wish(count=int(sys.argv[2]), wait_seconds=float(sys.argv[3]) if len(sys.argv) > 3 else None)
try:
    got = pick.pick(wish, os.environ, lock_folder=sys.argv[1], poll_seconds=0.05, say=lambda line: print(line, flush=True))
except Exception as error:
    print(type(error).__name__, error, flush=True)
    sys.exit(getattr(error, "exit_code", 1))
print("got", *(gpu.index for gpu in got.gpus), flush=True)
sys.stdin.read()
"""


class Picker:
    def __init__(self, fake: Fake, locks: Path, *words: object) -> None:
        command = [sys.executable, "-c", PICKER, str(locks), *(str(word) for word in words)]
        self.process = subprocess.Popen(
            command,
            env=fake.environ(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def line(self) -> str:
        return self.process.stdout.readline().strip()

    def leave(self) -> str:
        return self.process.communicate(timeout=60)[0]


@needs_compiler
def test_first_come_first_served_also_for_several_gpus_and_over_a_dead_waiter(tmp_path):
    fake, locks = Fake(tmp_path, EIGHT), tmp_path / "locks"
    holder = Picker(fake, locks, 6)
    assert holder.line() == "got 2 3 4 5 6 7"
    large = Picker(fake, locks, 8, 60)
    assert large.line().startswith("waiting for 8 GPUs: 8 GPUs wanted, 2 of 8 GPUs fit now.")
    dead = Picker(fake, locks, 1, 60)
    assert "waiting for 1 GPU: Others wait" in dead.line()
    small = Picker(fake, locks, 1, 60)
    assert "waiting for 1 GPU: Others wait for GPUs and come first." in small.line()
    assert small.line().endswith(": 8 GPUs"), "and says who and for what"
    # Two GPUs are free, and one that comes now does not get them before the others.
    hasty = Picker(fake, locks, 1)
    assert hasty.line() == "ShortageError Others wait for GPUs and come first."
    assert hasty.line().endswith(": 8 GPUs") and hasty.leave() == "" and hasty.process.returncode == 3
    listed = subprocess.run(
        [sys.executable, "-m", "evener", "gpus", "--lock-folder", str(locks)],
        env=fake.environ(),
        capture_output=True,
        text=True,
    )
    assert listed.stdout.count("waits for GPUs: ") == 3
    dead.process.kill()
    dead.leave()
    holder.leave()
    while not (line := large.line()).startswith("got"):
        assert line.startswith(("waiting", "GPU")), line
    assert line == "got 0 1 2 3 4 5 6 7"
    large.leave()
    while not (line := small.line()).startswith("got"):
        assert line, small.leave()
    assert line == "got 7"
    small.leave()
    notes = [name for name in os.listdir(locks) if name.endswith(".json")]
    assert len(notes) <= len({name.split(".")[0] for name in notes}) == 8, "one note a GPU at most, whoever died"


@needs_compiler
def test_waiting_ends_in_time_and_does_not_begin_where_it_could_not_help(tmp_path):
    fake, locks = Fake(tmp_path, EIGHT), tmp_path / "locks"
    fake.occupy(os.getpid(), "3 C 9000")
    late = Picker(fake, locks, 8, 0.3)
    text = late.leave()
    assert late.process.returncode == 3 and "ShortageError Waited 0 s. 8 GPUs wanted, 7 of 8 GPUs fit now." in text
    assert "GPU 3: " in text and f"pid {os.getpid()}" in text
    never = Picker(fake, locks, 9, 1000)
    text = never.leave()
    assert never.process.returncode == 3 and "waiting would not help" in text
    assert not [name for name in os.listdir(locks) if name.startswith("ticket")]


def test_an_outsider_who_starts_between_the_look_and_the_claim_is_seen(folder, monkeypatch):
    """`nvidia-smi` users know no leases: the GPU is looked at once more when the lease is held, and given back."""
    looks = []

    def look_now(environ, **more) -> Snapshot:
        looks.append(folder.holder_now("GPU-a") is not None)
        came = any(looks)  # from the first look under a lease on
        process = (Process(7, "ann", "python", 9 * GIB),) if came else ()
        gpus = [
            Gpu(i, uuid, "A100", memory_used_bytes=0, memory_reserved_bytes=0, processes=())
            for i, uuid in enumerate(("GPU-b", "GPU-a"))
        ]
        gpus[1] = dataclasses.replace(gpus[1], processes=process)
        return look.judge(Snapshot(gpus=tuple(gpus), source="nvml"), {})

    monkeypatch.setattr(look, "look", look_now)
    got = pick.pick(pick.Wish(count=1), {}, lock_folder=folder.path)
    assert got.uuids == ("GPU-b",) and looks.count(True) == 1, "the other one, which is idle"
    assert folder.holder("GPU-a") is None, "given back"
    got.lease.close()
    looks.clear()
    with pytest.raises(ShortageError, match=r"ann, pid 7"):
        pick.pick(pick.Wish(words=("GPU-a",)), {}, lock_folder=folder.path)
    assert folder.holder("GPU-a") is None


@needs_compiler
def test_a_folder_that_cannot_be_used_is_one_error_with_the_ways_out(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "evener", "run", "--lock-folder", str(tmp_path / "file"), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=Fake(tmp_path, EIGHT).environ(), capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.splitlines()[0].startswith(
        f"evener: The folder of GPU leases, {tmp_path}/file, cannot be used: "
    )
    assert "`evener run --no-lease` goes without" in done.stderr and "Traceback" not in done.stderr


# --- inside a scheduler, and in scripts -------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize(
    "environ, why",
    [
        ({"SLURM_JOB_ID": "77", "CUDA_VISIBLE_DEVICES": "2,5"}, "Slurm job 77"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "FAKE_NVML_VISIBLE": "2,5"}, "Kubernetes"),
    ],
)
def test_a_schedulers_grant_is_the_universe_and_no_lease_is_taken(tmp_path, environ, why):
    fake, locks = Fake(tmp_path, EIGHT), tmp_path / "locks"
    fake.occupy(os.getpid(), "5 C 9000")  # what runs there is ours
    program = (
        "import os, sys; from evener.gpus import pick\n"
        "got = pick.pick(pick.parse(sys.argv[2]), os.environ, lock_folder=sys.argv[1])\n"
        "print(*(uuid[:12] for uuid in got.uuids), got.lease, got.notes[-1], sep='|')"
    )

    def ask(words: str) -> str:
        command = [sys.executable, "-c", program, str(locks), words]
        done = subprocess.run(command, env=fake.environ(**environ), capture_output=True, text=True)
        return done.stdout.strip() or done.stderr

    assert ask("auto") == f"GPU-fa4e0002|GPU-fa4e0005|None|no lease: these GPUs were granted by {why}"
    assert ask("1").startswith("GPU-fa4e0002|None"), "the idle one first"
    assert "3 GPUs wanted" in ask("3") and not locks.exists()
    if "SLURM_JOB_ID" in environ:
        assert "is not among the GPUs that this process may use" in ask("0,3")


@needs_compiler
def test_pick_gpus_takes_them_for_the_script_and_sets_what_it_sees(tmp_path):
    fake, locks = Fake(tmp_path, EIGHT), tmp_path / "locks"
    fake.occupy(os.getpid(), "7 C 9000")
    program = f"""
import os, sys, evener
locks = {str(locks)!r}
uuids = evener.pick_gpus(2, min_free="20GB", lock_folder=locks)
assert "torch" not in sys.modules
from evener.gpus import look_at_gpus
from evener.gpus.leases import Folder
from evener.gpus.values import GIB, Gpu, Process, Snapshot
folder = Folder(locks)
mine = [gpu for gpu in look_at_gpus(os.environ, holder_of=folder.holder).gpus if gpu.lease and gpu.lease.pid == os.getpid()]
assert [gpu.slot for gpu in mine] == [0, 1] and [gpu.index for gpu in mine] == [5, 6], mine
assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(uuids) and os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
os.environ["LOCAL_RANK"] = "0"
assert evener.pick_gpus(1) == uuids, "in a launched process it takes nothing"
del os.environ["CUDA_VISIBLE_DEVICES"], os.environ["LOCAL_RANK"]
for wrong in (0, True, "2"):
    try:
        evener.pick_gpus(wrong)
    except evener.EvenerError as error:
        print(error)
try:
    evener.pick_gpus(6, lock_folder=locks)
except evener.EvenerError as error:
    print(error, error.exit_code)
"""
    done = subprocess.run([sys.executable, "-c", program], env=fake.environ(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pick_gpus(0): how many GPUs, 1 or more." in done.stdout and "pick_gpus('2')" in done.stdout
    assert "6 GPUs wanted, 5 of 8 GPUs fit now." in done.stdout and done.stdout.rstrip().endswith("3")
    assert Folder(str(locks)).holder("GPU-fa4e0005-0000-4000-8000-000000000005") is None, "it ended with the script"


# --- the supervisor's kill matrix -------------------------------------------------------------------------------------

UUIDS = [f"GPU-fa4e000{i}-0000-4000-8000-00000000000{i}" for i in (6, 7)]
MATRIX = [
    (who, sig) for who in ("evener", "agent", "worker") for sig in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
]
SAMPLED = (("evener", signal.SIGKILL), ("agent", signal.SIGKILL))


def living(processes: list[psutil.Process]) -> list[int]:
    alive = []
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                alive.append(one.pid)
    return alive


@needs_compiler
@pytest.mark.parametrize(
    "who, sig",
    [
        pytest.param(*one, marks=() if one in SAMPLED else pytest.mark.full, id=f"{one[0]}-{one[1].name}")
        for one in MATRIX
    ],
)
def test_no_worker_is_alive_when_the_lease_is_free(tmp_path, who, sig):
    fake, locks = Fake(tmp_path, EIGHT), tmp_path / "locks"
    command = [
        sys.executable,
        "-m",
        "evener",
        "run",
        "--gpus",
        "2",
        "--lock-folder",
        str(locks),
        str(SCRIPTS / "sleeps.py"),
    ]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=fake.environ(TMPDIR=str(tmp_path)),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 180
        logs: list[Path] = []
        while len([log for log in logs if "sleeps" in log.read_text()]) < 2:
            assert process.poll() is None and time.monotonic() < until, process.stderr.read()
            logs = list(tmp_path.glob("runs/logs/*/rank*.log"))
            time.sleep(0.05)
        agent = psutil.Process(process.pid).children()[0]
        workers = agent.children(recursive=True)
        assert len(workers) >= 4, "two ranks with a forked child each"
        folder = Folder(str(locks))
        assert all(folder.holder(uuid).pid == process.pid for uuid in UUIDS)
        ranks = [one for one in workers if one.ppid() == agent.pid]
        {"evener": process, "agent": agent, "worker": random.choice(ranks)}[who].send_signal(sig)
        until, free = time.monotonic() + 60, False
        while not free and time.monotonic() < until:
            free = all(folder.holder_now(uuid) is None for uuid in UUIDS)
            alive = living(workers)  # looked at after the lease: whoever is alive now was alive when it was free
            assert not (free and alive), f"the lease is free while {alive} run"
            time.sleep(0.001)
        assert free, "the lease was never given back"
        process.communicate(timeout=60)
    finally:
        for one in [*living([*locals().get("workers", []), *([agent] if "agent" in locals() else [])])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        if process.poll() is None:
            process.kill()
        process.communicate()
