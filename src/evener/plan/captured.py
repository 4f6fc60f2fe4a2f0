"""A script that was run up to its `Run`, in a child process that then traces its step on request.

The child is the program `evener.run.capture`, which has torch; this end has not. Every way in which a child can end
without an answer is one clear error here: no Run, an exception, input(), CUDA, an abort in C++ code, too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from evener.errors import EvenerError, LaunchError
from evener.plan.handed import VARIABLE, LaunchPlan
from evener.plan.values import Cut, Trace


@dataclass(frozen=True)
class Captured:
    """What the script gave to its Run.

    Attributes:
        rows: Of the dataset; None for a stream.
        row_bytes: Of one row of a batch.
        slice_size: In exact and coupled mode, where a piece is one slice; else None.
        given: {keyword: {"value", "origin"}} of what was not left to its default.
        process_bytes: What the process held in host memory besides parameters and buffers: libraries, the dataset.
        cpu_precision: What precision="auto" is on this machine's CPU.
        on_cpu: Lines of the script that said "cuda" before the Run.
        cpu: What the kernel calls this machine's processor.
        dataset: What a calibration calls this dataset, see `dataset_words`; "" for a stream.
        num_workers: Of each rank; None: the automatic number for rows that are not in memory.
    """

    global_batch_size: int
    rows: int | None
    row_bytes: int
    parameters: int
    trainable: int
    parameter_bytes: int
    optimizers: tuple[str, ...] = ()
    slice_size: int | None = None
    exact: bool = False
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    process_bytes: int = 0
    cpu_precision: str = "fp32"
    on_cpu: tuple[str, ...] = ()
    cpu: str = ""
    dataset: str = ""
    num_workers: int | None = 0

    def asked(self, keyword: str) -> Any:
        """The keyword's value where the script, its file or a flag gives one; None where it is open, or "auto"."""
        value = self.given.get(keyword, {}).get("value")
        return None if value == "auto" else value


def dataset_words(kind: str, rows: int, row_bytes: int) -> str:
    """What `evener bench data` and a plan call the same dataset: its class, its length, and a row's bytes."""
    return f"{kind}, {rows} rows of {row_bytes} bytes"


class Child:
    """The child process. A context manager; `captured` is there once it is entered."""

    captured: Captured

    def __init__(
        self, argv: list[str], *, shim: str, overrides: Mapping[str, Any] | None = None, seconds: float = 600.0
    ) -> None:
        """argv: the script and its arguments, or "-m", module and arguments. shim: the launcher's program."""
        self.argv, self.shim, self.overrides, self.seconds = argv, shim, dict(overrides or {}), seconds

    def __enter__(self) -> Child:
        self.folder = tempfile.mkdtemp(prefix="evener-plan-")
        try:
            self._start()
            told = self._answer("its Run")
            if "error" in told:
                raise LaunchError(**told["error"])
            lists = {name: tuple(value) for name, value in told["captured"].items() if isinstance(value, list)}
            self.captured = Captured(**{**told["captured"], **lists})
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        job = {"supervisor": os.getppid(), "logs": self.folder, "console": {}, "cpus": []}
        job_file = os.path.join(self.folder, "job.json")
        with open(job_file, "w", encoding="utf-8") as file:
            json.dump(job, file)
        asks, self._asks = os.pipe()
        self._answers, answers = os.pipe()
        self.buffer = bytearray()
        plan = LaunchPlan(run_id="plan", device="cpu", overrides=self.overrides, capture=(asks, answers))
        alone = {**dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_PORT"), "0"), "MASTER_ADDR": "127.0.0.1"}
        alone |= {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": "", VARIABLE: plan.to_json()}
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-m", "evener.run.capture", self.shim, job_file, *self.argv],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **alone},
            pass_fds=(asks, answers), start_new_session=True,
        )  # fmt: skip
        os.close(asks)
        os.close(answers)

    def trace(self, cut: Cut, seconds: float | None, *, device: str, capability: tuple[int, int] | None) -> Trace:
        """The trace of one cut. Raises LaunchError when this step cannot be traced so, with the reason; TimeoutError
        when that takes longer than `seconds`."""
        asked = {"cut": cut.to_json(), "device": device, "capability": capability, "seconds": seconds}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._asks, json.dumps(asked).encode() + b"\n")
        told = self._answer(f"the trace of {cut.words()}")
        if "error" in told:
            raise LaunchError(**told["error"])
        if "late" in told:
            raise TimeoutError(cut.words())
        return Trace.from_json(told["trace"])

    def _answer(self, what: str) -> dict[str, Any]:
        until = time.monotonic() + self.seconds
        while not self.buffer.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._answers], [], [], left)[0]:
                raise self._failed(f"the script had not reached {what} after {self.seconds:.0f} s.", late=True)
            got = os.read(self._answers, 1 << 16)
            if not got:
                raise self._failed(f"the script ended before {what}.")
            self.buffer += got
        told: dict[str, Any] = json.loads(self.buffer)  # one answer to one request
        self.buffer.clear()
        return told

    def _failed(self, cause: str, late: bool = False) -> EvenerError:
        """Why there is no answer, from how the child ended."""
        if late:
            return LaunchError(cause, evidence=self._log(), fix=["--timeout SECONDS", "arguments that make it small"])
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        code = self.process.poll()
        errors: list[dict[str, Any]] = []
        with contextlib.suppress(OSError, ValueError, KeyError), open(os.path.join(self.folder, "rank0.json")) as file:
            errors = json.load(file)["ended"]["errors"]
        if errors:
            return _explained(errors[0], self._log())
        if code is not None and code < 0:
            fix = ["run it with python: does it end there, too?", "an abort in torch: a torch without this fault"]
            own = (os.path.dirname(self.shim), "evener/run/capture.py", "<frozen")
            said = [line for line in self._log(200) if not any(part in line for part in own)]
            fatal = [i for i, line in enumerate(said) if line.startswith("Fatal Python error")]
            at = fatal[0] if fatal else max(0, len(said) - 6)
            cause = f"{cause[:-1]}: {signal.Signals(-code).name} ended its process."
            return LaunchError(cause, evidence=said[max(0, at - 2) : at + 6], fix=fix)
        if code:
            return LaunchError(f"the script ended with exit code {code}.", evidence=self._log())
        cause = "the script ended without constructing an evener.Run: there is nothing to plan."
        fix = ["`evener plan` runs a script up to its evener.Run(...), in this process and not in another",
               "arguments of the script go after it: evener plan train.py --train"]  # fmt: skip
        return LaunchError(cause, evidence=self._log(3), fix=fix)

    def _log(self, lines: int = 8) -> list[str]:
        """The last lines that the script printed, and what was said before its output had a place."""
        said = b""
        with contextlib.suppress(OSError), open(os.path.join(self.folder, "rank0.log"), "rb") as file:
            said = file.read()
        if self.process.poll() is not None and self.process.stderr is not None:
            said += self.process.stderr.read()
        return said.decode(errors="replace").splitlines()[-lines:]

    def __exit__(self, *_: object) -> None:
        if hasattr(self, "process"):
            for descriptor in (self._asks, self._answers):
                os.close(descriptor)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            if self.process.stderr is not None:
                self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _explained(error: Mapping[str, Any], log: list[str]) -> EvenerError:
    """The script's own exception before its Run, with what to do about the kinds that planning brings about."""
    where, text = error.get("where") or {}, f"{error['type']}: {error['message']}"
    at = [f"{where['file']}:{where['line']}: {where['text']}"] if where else []
    if error["type"] == "EOFError":
        cause, fix = "the script asks for input before its Run; there is nobody to answer.", ["an argument for it"]
    elif any(word in text for word in ("CUDA", "cuda", "NVIDIA driver", "nccl", "NCCL")):
        cause, words = "the script needs a GPU before its Run.", ".cuda(), .to('cuda') and device='cuda'"
        fix = [
            f"planning runs it without one: {words} are taken for the CPU, other CUDA calls are not",
            "leave the device to Run (evener.device() tells it), or ask torch.cuda.is_available() first",
        ]
    else:
        cause, fix = "the script failed before its Run.", ["run it with python: it fails there, too"]
    evidence = [*text.splitlines()[:6], *at]
    return LaunchError(cause, evidence=evidence if evidence else log, fix=fix)
