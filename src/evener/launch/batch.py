"""What a batch system is given: an sbatch script or a Kubeflow TrainJob, printed and never submitted; and a requeue.

Nothing in them is about ranks or addresses: inside of the job `evener run` reads those from the environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import resources

from evener.errors import UsageError
from evener.launch.console import say

# Said by the batch system, or about this terminal: not for the command inside of the job.
_VALUES = ("--nodes", "--head", "--node-rank", "--gpus", "--trainjob", "--wait")
_FLAGS = ("--sbatch", "--detach", "--requeue", "--dry-run")


def text(given: argparse.Namespace, own: Sequence[str], target: Sequence[str]) -> str:
    """The script or the manifest for this command line. Raises UsageError for what cannot be asked of a cluster."""
    nodes, gpus = given.nodes or "1", given.gpus
    if not re.fullmatch(r"[1-9]\d*", nodes):
        raise UsageError(f"--nodes {nodes}: a batch job has a fixed number of hosts.", fix=["--nodes 4"])
    if gpus is not None and not re.fullmatch(r"[1-9]\d*", gpus):
        raise UsageError(f"--gpus {gpus}: in a batch job it is how many per host.", fix=["--gpus 8"])
    if given.sbatch and given.trainjob is not None:
        raise UsageError("--sbatch and --trainjob: one of them.")
    kept, skip = [], False
    for word in own:
        name, equals, _ = word.partition("=")
        if not skip and name not in (*_VALUES, *_FLAGS):
            kept.append(word)
        skip = not skip and name in _VALUES and not equals and name != "--wait"
    words = ["evener", "run", *kept, *target]
    stem = os.path.splitext(os.path.basename(given.module or target[0]))[0]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:40] or "train"
    if given.sbatch:
        words.insert(2, "--requeue")
        line = f"#SBATCH --gpus-per-node={gpus}\n" if gpus else ""
        return _template("sbatch.sh").format(name=name, nodes=nodes, gpus=line, command=shlex.join(words))
    limits = f'    resourcesPerNode:\n      limits:\n        nvidia.com/gpu: "{gpus}"\n' if gpus else ""
    image = json.dumps(given.trainjob)  # a JSON string is a YAML one
    filled = _template("trainjob.yaml").format(
        name=name, image=image, nodes=nodes, command=json.dumps(words), gpus=limits
    )
    return filled.rstrip("\n") + "\n"


def _template(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def check_requeue(environ: Mapping[str, str]) -> None:
    """Raises UsageError now, and not after a day of training, where --requeue could not work."""
    if not environ.get("SLURM_JOB_ID"):
        raise UsageError("--requeue: this is no Slurm job (SLURM_JOB_ID is not set).", fix=["leave --requeue out"])
    if shutil.which("scontrol", path=environ.get("PATH")) is None:
        fix = ["add Slurm's bin folder to PATH"]
        raise UsageError("--requeue needs `scontrol`, which is not on PATH here.", fix=fix)


def requeue(environ: Mapping[str, str]) -> None:
    """Puts this job back into Slurm's queue; says so where that fails. Slurm ends the job's processes then."""
    job = environ["SLURM_JOB_ID"]
    done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        say(f"saved; job {job} is in the queue again")
    else:
        why = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        say(f"saved, but `scontrol requeue {job}` failed: {why}")
