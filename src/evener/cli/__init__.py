"""The `evener` command: one file per verb, each importing its room only when it is called.

So that `evener --help` costs what the standard library costs, and a verb that needs no torch never waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from evener.errors import EvenerError, UsageError, nearest

# verb -> its line in the help. Each is a module of this package with `main(argv) -> exit code`.
VERBS = {
    "run": "start a script on every GPU (or N CPU processes) of this machine, and stay until it has ended",
    "explain": "say what broke in a log or a run: cause, guilty rank, fix, advice not to follow",
    "plan": "predict memory and time of every cut of a script's step, without a GPU, and choose one",
    "verify": "prove the promise on your own script, and say who is to blame where it does not hold",
    "report": "make one HTML page about runs: curves, where the time went, incidents in words, how to do it again",
    "lint": "read scripts and name what goes wrong on several GPUs, in mixed precision, with checkpoints; --fix",
    "gpus": "show the GPUs of this machine, who has them, and which are idle, or why not",
    "top": "watch GPUs, processes and every evener run of this machine, and what each waits for",
    "doctor": "look at driver, torch, limits, network and disks, and name the fix of every fault",
    "bench": "measure products, memory, collectives, data loading and one update of this machine",
    "checkpoint": "list the checkpoints of a run, check every byte, export weights",
}

HELP = """\
usage: evener <verb> [options]

  {verbs}

  evener <verb> --help    what the verb does, its options, examples
  evener --version

examples:
  evener run train.py --lr 0.1              one process per idle GPU, under a lease
  evener run --nproc 2 --cpu train.py       two processes on the CPU
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns its exit code. A user's mistake is a message, never a traceback."""
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except EvenerError as error:
        print(f"evener: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `evener ... | head`: nobody reads any more, and Python's own flush must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(words: list[str]) -> int:
    first = words[0] if words else ""
    if first in ("-h", "--help", ""):
        print(HELP.format(verbs="\n  ".join(f"{verb:<10}  {line}" for verb, line in VERBS.items())), end="")
        return 0 if first else UsageError.exit_code
    if first == "--version":
        from evener import __version__

        print(f"evener {__version__}")
        return 0
    if first not in VERBS:
        if first.endswith(".py"):
            raise UsageError(f"{first!r} is a script, not a verb.", fix=[f"evener run {first}"])
        close = nearest(first, [*VERBS, "--help", "--version"])
        fix = [*([f"evener {close}"] if close else []), f"verbs: {', '.join(VERBS)}; evener --help"]
        raise UsageError(f"{first!r} is not a verb of evener.", fix=fix)
    import importlib

    return int(importlib.import_module(f"evener.cli.{first}").main(words[1:]))
