"""`evener verify`: the promise, proven on the user's own script."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from evener.cli.parser import Parser
from evener.cli.run import parser as run_parser
from evener.cli.run import split, to_request
from evener.errors import LaunchError, UsageError, one_of

if TYPE_CHECKING:
    from evener.verify.proof import Check

DESCRIPTION = """\
Run the first updates of SCRIPT again and again, in child processes on the CPU, and compare: the same again, on other
numbers of processes, with another microbatch, killed and resumed, with its newest checkpoint corrupted, without its
evaluations. What is equal to the bit, close or different is shown, and what differs first, with the likely cause.
The script runs unchanged. Its run directories are in a temporary folder; it reads and writes other files as always.
"""
EXAMPLES = """\
Everything after SCRIPT belongs to the script: give it arguments that make it small.

examples:
  evener verify train.py                       about a dozen trials of 6 updates on 1, 2 and 3 processes
  evener verify --nproc 1,4 train.py --width 64
  evener verify --set exact=true train.py      the same script, held to the last bit in every cut
  evener verify --only resume,corrupt --updates 20 train.py
  evener verify --json train.py > proof.json

groups for --only: repeat, rows, workers, microbatch, oom, world, resume, corrupt, evaluate
exit codes: 0 the promise holds; 1 it does not, or the script fails; 2 a wrong option, or no evener.Run in the script
"""


def main(argv: list[str]) -> int:
    usage = "evener verify [options] SCRIPT [ARGS ...]\n       evener verify [options] -m MODULE [ARGS ...]"
    options = Parser(prog="evener verify", usage=usage, description=DESCRIPTION, epilog=EXAMPLES)
    add = options.add_argument
    add("-m", metavar="MODULE", dest="module", help="verify a module instead of a script file")
    add("--updates", metavar="N", default="6", help="batches of the script's loop in every trial (default: 6)")
    add("--nproc", metavar="N,N,...", default="1,2,3", help="numbers of processes; the first is compared with (1,2,3)")
    add("--only", metavar="GROUPS", help="only these groups of checks, with commas between them")
    add("--set", metavar="KEY=VALUE", action="append", default=[], help="a keyword of evener.Run, as in `evener run`")
    add("--timeout", metavar="SECONDS", default="600", help="how long one trial may take (default: 600)")
    add("--keep", metavar="DIR", help="a new folder that logs, traces and run directories are left in")
    add("--json", action="store_true", help="print the result as JSON, progress goes to stderr")
    own, target = split(argv, options)
    given = options.parse_args(own)
    if given.module is None and not target:
        raise UsageError("evener verify: which script?", fix=["evener verify SCRIPT [ARGS ...], or -m MODULE; --help"])
    if os.name != "posix":
        raise LaunchError("`evener verify` starts processes on Linux and macOS only.")
    from evener.verify.proof import GROUPS, Proof
    from evener.verify.start import Starter

    # As `evener run --cpu` would be asked: whatever options that has got, with its defaults.
    asked = ["--cpu", *(f"--set={word}" for word in given.set), *(["-m", given.module] if given.module else [])]
    request = to_request(run_parser().parse_args(asked), target)
    only = tuple(one_of("--only", word, GROUPS) for word in given.only.split(",")) if given.only else GROUPS
    (updates,), (seconds,) = _numbers("--updates", given.updates), _numbers("--timeout", given.timeout)
    worlds = tuple(dict.fromkeys(_numbers("--nproc", given.nproc, many=True)))
    checks = []
    with contextlib.ExitStack() as stack:
        if given.keep is None:
            temporary = tempfile.TemporaryDirectory(prefix="evener-verify-", ignore_cleanup_errors=True)
            folder = stack.enter_context(temporary)
        else:
            folder = _new_folder(given.keep)
        starter = stack.enter_context(contextlib.closing(Starter(seconds=seconds)))
        proof = Proof(request, starter, folder, updates, worlds, only, lambda name: _progress(f"    {name} ..."))
        for check in proof.checks():
            checks.append(check)
            _progress(f"  {'+' if check.holds else '-'} {check.name}: {check.result}, {check.seconds:.1f} s")
    printed = as_json(checks, proof.not_checked)
    print(json.dumps(printed, indent=2) if given.json else "\n".join(table(checks, proof.not_checked, proof.note)))
    return 0 if printed["promise_holds"] else 1


def as_json(checks: list[Check], not_checked: dict[str, str]) -> dict[str, Any]:
    """The contract of `--json`. max_abs_difference: of the parameters after the last update; null: not compared."""
    return {
        "promise_holds": bool(checks) and all(check.holds for check in checks),
        "checks": [asdict(check) for check in checks],
        "not_checked": [{"name": name, "because": why} for name, why in not_checked.items()],
    }


def table(checks: list[Check], not_checked: dict[str, str], note: str = "") -> list[str]:
    """The result for a reader: one line a check, then who is to blame, then what was not looked at."""
    width = max(len(check.name) for check in checks)
    lines = [f"{'check':<{width + 2}}  {'result':<10}  {'demanded':<16}  largest difference of a parameter"]
    for one in checks:
        off = "" if one.max_abs_difference is None else f"{one.max_abs_difference:.2g}"
        row = f"{'+' if one.holds else '-'} {one.name:<{width}}  {one.result:<10}  {one.demanded:<16}  {off}"
        lines += [row.rstrip(), *([f"    {one.note}"] if one.note else [])]
    lines += ["", f"other cuts are compared {note}"] if note else []
    told: dict[tuple[str, ...], str] = {}
    for one in (one for one in checks if not one.holds):
        texts = [line for part in one.blame[:2] for line in str(part["text"]).splitlines()]
        lines += ["", f"{one.name}: {one.result}", *(f"  {text}" for text in texts)]
        lines += [f"  and {len(one.blame) - 2} more parts"] if len(one.blame) > 2 else []
        causes = [f"as in {told[one.likely]}"] if one.likely in told else one.likely
        lines += [f"  {'likely' if i == 0 else '    or'}: {text}" for i, text in enumerate(causes)]
        told.setdefault(one.likely, one.name)
    lines += ["", *(f"not checked: {name} ({why})" for name, why in not_checked.items())] if not_checked else []
    wrong, many = sum(not one.holds for one in checks), len(checks)
    verdict = f"the promise does not hold: {wrong} of {many} checks" if wrong else f"the promise holds: {many} checks"
    return [*lines, "", verdict]


def _new_folder(path: str) -> str:
    try:
        os.makedirs(path)
    except OSError as error:
        raise UsageError(f"--keep {path}: {error.strerror}.", fix=["name a folder that is not there yet"]) from None
    return os.path.abspath(path)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(option: str, words: str, many: bool = False) -> list[int]:
    parts = words.split(",") if many else [words]
    if not all(part.isdigit() and int(part) for part in parts):
        what = "numbers of processes" if many else "a whole number, at least 1"
        raise UsageError(f"{option} {words}: not {what}.", fix=[f"{option} {'1,2,3' if many else 6}"])
    return [int(part) for part in parts]
