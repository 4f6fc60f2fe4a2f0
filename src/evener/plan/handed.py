"""What `evener run` hands to the ranks: one small JSON value behind one environment variable, EVENER_PLAN.

One variable, because everything else in the environment belongs to the user or to torch. Its value is the path of a
file on one machine, and the JSON text itself where the machines of a job share no disk: {"version": 1} and the fields
of `LaunchPlan`. Standard library only: the launcher writes it without torch, and a rank reads it before torch is
imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evener.errors import LaunchError

VARIABLE = "EVENER_PLAN"
VERSION = 1


@dataclass(frozen=True)
class Trial:
    """What `evener verify` asks of the script's first Run: a few batches, written down, then the end of the process.

    Attributes:
        folder: Where rank 0 writes trace.jsonl, and tensors-<batches>.safetensors after the batches in `keep`.
        batches: The process ends, with exit code 0, after so many batches of the loop.
        keep: After how many batches parameters, buffers and the gradient are kept.
        kill: The last rank gets SIGKILL in the middle of this batch's update (0 is the first); None: nobody does.
        answers: A trace whose evaluations are returned, one after the other, in place of evaluating.
        evaluate: The loss is evaluated on a few rows after the second batch, whatever the script does.
        still: Dropout layers drop nothing.
        no_memory: Rank 0 runs out of memory in the first two updates, once in each: early, and in the middle.
    """

    folder: str
    batches: int
    keep: tuple[int, ...] = ()
    kill: int | None = None
    answers: str | None = None
    evaluate: bool = False
    still: bool = False
    no_memory: bool = False


@dataclass(frozen=True)
class LaunchPlan:
    """The launcher's decisions, as the ranks see them.

    Attributes:
        run_id: Names this job: in its log folder, its private folder and its messages.
        device: "cpu" when the user asked for the CPU; None leaves the choice to the rank.
        store: A folder of mode 0700 for the file store of evener's own process group, so that no socket listens for
            it. None when the launcher made none (several machines).
        beats: A folder of the launcher where each rank shows that it works; None: nobody looks.
        overrides: Keywords of `Run` given on the command line; their origin is "flag".
        attempt: How often this job was started before; a restarted job never starts a run over.
        trial: What `evener verify` wants to see; None in every other job.
        capture: Descriptors (read, write) of `evener plan`: the first Run is traced instead of trained.
        decided: Keywords that a plan of `evener plan` decided; they fill what the script leaves open.
        predicted: That plan's peaks (bytes) and time (seconds), to be compared at the run's end; and whose they are.
    """

    run_id: str
    device: str | None = None
    store: str | None = None
    beats: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    attempt: int = 0
    trial: Trial | None = None
    capture: tuple[int, int] | None = None
    decided: Mapping[str, Any] = field(default_factory=dict)
    predicted: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)})


def read_plan(environ: Mapping[str, str] | None = None) -> LaunchPlan | None:
    """The plan behind EVENER_PLAN (a path, or the JSON itself), or None when the process was not started by evener.

    Raises LaunchError when the variable is set and cannot be used: a rank that quietly ignored its plan would train
    something else than was asked for.
    """
    value = (os.environ if environ is None else environ).get(VARIABLE, "").strip()
    if not value or value.startswith("{"):
        return _parse(value, f"{VARIABLE} itself") if value else None
    try:
        with open(value, encoding="utf-8") as file:
            return _parse(file.read(), value)
    except (OSError, UnicodeDecodeError) as error:
        fix = [f"start the script with `evener run`, or unset {VARIABLE} (it outlives its job when it is exported)"]
        cause = f"{VARIABLE} names a plan that cannot be read."
        raise LaunchError(cause, evidence=[f"{value}: {error}"], fix=fix) from error


def _parse(text: str, where: str) -> LaunchPlan:
    def broken(why: str) -> LaunchError:
        fix = [f"start the script with the `evener run` of this installation, or unset {VARIABLE}"]
        return LaunchError("The launch plan is broken.", evidence=[f"{where}: {why}"], fix=fix)

    try:
        values = json.loads(text)
    except ValueError as error:
        raise broken(f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise broken(f"a {type(values).__name__}, not an object")
    if (version := values.pop("version", None)) != VERSION:
        raise broken(f"version {version!r}, this evener reads version {VERSION}")
    if not values.get("run_id") or not isinstance(values["run_id"], str):
        raise broken(f"run_id is {values.get('run_id')!r}, not a name")
    if values.get("device") not in (None, "cpu"):
        raise broken(f'device is {values["device"]!r}, not "cpu" or null')
    for name in ("store", "beats"):
        if not isinstance(values.get(name), str | None):
            raise broken(f"{name} is {values[name]!r}, not a folder or null")
    for name in ("overrides", "decided", "predicted"):
        if not isinstance(values.get(name, {}), dict):
            raise broken(f"{name} is a {type(values[name]).__name__}, not an object")
    attempt, capture, trial = values.get("attempt", 0), values.get("capture"), values.get("trial")
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 0:
        raise broken(f"attempt is {attempt!r}, not a count")
    if capture is not None and not (isinstance(capture, list) and len(capture) == 2):
        raise broken(f"capture is {capture!r}, not two descriptors")
    try:
        trial = None if trial is None else Trial(**{**trial, "keep": tuple(trial.get("keep", ()))})
        return LaunchPlan(**{**values, "trial": trial, "capture": capture and (capture[0], capture[1])})
    except (TypeError, AttributeError) as error:
        raise broken(str(error)) from error
