"""Starting the user's script for a trial: through `evener run`'s own decision, then by its supervisor or by a fork.

    python -m evener.verify.start '{"request": {...}, "trial": {...}, "run_id": "..."}'

is one trial through the supervisor, in a process of its own, because a supervisor ends whatever its process started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from evener.errors import LaunchError
from evener.launch import command, failure, machine, processes, records
from evener.launch.supervise import hand_over, supervise
from evener.plan.handed import Trial

# What a run imports that is not evener's; the first optimizer of a process imports torch._dynamo.
PRELOADED: tuple[str, ...] = ("numpy", "torch", "torch.distributed", "torch._dynamo", "safetensors.torch")
PRELOADED += ("tensorboard.compat.proto.event_pb2",)


@dataclass(frozen=True)
class Ended:
    """How a trial ended: exit code by rank (None: unknown), and the cause in words when it did not end well."""

    codes: tuple[int | None, ...]
    cause: str


def decided(request: command.Request, trial: Trial, run_id: str) -> command.Launch:
    """The launch of `evener run` for this request, with the trial in its plan."""
    launch = command.decide(request, machine.look(machine.Gpus(())), os.environ, run_id=run_id, cwd=os.getcwd())
    return replace(launch, plan=replace(launch.plan, trial=trial))


class Starter:
    """Starts trials, one at a time, each for `seconds` at most. launcher: whether trials that ask for new interpreters
    get them; where there are no forks (not Linux) all do.
    """

    def __init__(self, *, launcher: bool = True, seconds: float) -> None:
        self.launcher, self.seconds = launcher, seconds
        self.server: subprocess.Popen[bytes] | None = None

    def run(self, request: command.Request, trial: Trial, run_id: str, *, fresh: bool) -> Ended:
        """One trial, to its end. fresh: rather through the launcher."""
        logs = os.path.join(os.getcwd(), request.logs, run_id)
        fresh = sys.platform != "linux" or (fresh and self.launcher)
        codes = self._launch(request, trial, run_id) if fresh else self._fork(decided(request, trial, run_id))
        ends = records.read_ends(logs, request.nproc or 1)
        if codes is None:
            return Ended((None,) * len(ends), f"it had not ended after {self.seconds:.0f} s, and was killed")
        if not fresh:
            ends = [replace(end, code=code if end.code is None else end.code) for end, code in zip(ends, codes)]
        cause, found = "", failure.find_cause(ends)
        if found is not None:
            error = failure.as_error(found, logs, os.getcwd())
            cause = "\n".join([error.cause, *error.evidence])
        elif any(codes):
            cause = f"the launcher ended with exit code {codes[0]}; its words are in {logs}"
        return Ended(tuple(end.code for end in ends), cause)

    def _launch(self, request: command.Request, trial: Trial, run_id: str) -> list[int] | None:
        job = json.dumps({"request": asdict(request), "trial": asdict(trial), "run_id": run_id})
        os.makedirs(request.logs, exist_ok=True)
        with open(os.path.join(request.logs, f"{run_id}.launcher"), "wb") as log:
            running = subprocess.Popen(
                [sys.executable, "-m", "evener.verify.start", job], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=processes.tied_to_parent(signal.SIGTERM),
            )  # fmt: skip
            try:
                return [running.wait(self.seconds)]
            except subprocess.TimeoutExpired:
                return None
            finally:
                _end(running)

    def _fork(self, launch: command.Launch) -> list[int] | None:
        os.makedirs(launch.logs)
        os.makedirs(os.path.join(launch.private, "store"), 0o700)
        try:
            hand_over(launch, {"console": {}})
            target = launch.command.argv[launch.command.argv.index(command.shim_path()) + 1 :]
            ranks: dict[str, Any] = {"WORLD_SIZE": launch.nproc, "LOCAL_WORLD_SIZE": launch.nproc, "GROUP_RANK": 0}
            with socket.create_server(("127.0.0.1", 0)) as free:  # for a script that makes a group itself
                ranks |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1]}
            env = {**os.environ, "OMP_NUM_THREADS": "1", **launch.command.environ(os.environ)}
            env |= {key: str(value) for key, value in ranks.items()} | {"TORCHELASTIC_RUN_ID": launch.run_id}
            argv = [word.replace("$$", "$") for word in target]
            return self._ask({"nproc": launch.nproc, "env": env, "argv": argv, "cwd": os.getcwd()})
        finally:
            shutil.rmtree(launch.private, ignore_errors=True)

    def _ask(self, job: Mapping[str, Any]) -> list[int] | None:
        """The answer of the process that forks; None when there was none in time. It is then gone."""
        if self.server is None:
            self.words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the server)
            program = os.path.join(os.path.dirname(__file__), "forks.py")
            self.server = subprocess.Popen(
                [sys.executable, "-u", program, command.shim_path(), *PRELOADED],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.words, start_new_session=True,
                preexec_fn=processes.tied_to_parent(signal.SIGKILL),
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        assert self.server.stdin is not None and self.server.stdout is not None
        answer = b""
        with contextlib.suppress(BrokenPipeError):
            self.server.stdin.write(json.dumps(job).encode() + b"\n")
            self.server.stdin.flush()
            if not select.select([self.server.stdout], [], [], self.seconds)[0]:
                self.close()
                return None
            answer = self.server.stdout.readline()
        if not answer:
            self.words.seek(0)
            lines = self.words.read().decode(errors="replace").splitlines()[-3:]
            self.close()
            raise LaunchError("The process that forks the ranks has ended.", evidence=lines)
        codes: list[int] = json.loads(answer)
        return codes

    def close(self) -> None:
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                self.server.communicate()
            self.words.close()
            self.server = None


def _end(process: subprocess.Popen[bytes]) -> None:
    """TERM twice, and ten seconds for an orderly end; the supervisor needs less."""
    if process.poll() is None:
        for seconds in (0.5, 10.0):  # the second signal means now
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return
        process.kill()
        process.wait()


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    asked = {**given["request"], "args": tuple(given["request"]["args"])}
    launch = decided(command.Request(**asked), Trial(**given["trial"]), given["run_id"])
    sys.exit(supervise(launch, os.environ).exit_code)
