"""`evener doctor`: what is wrong with this machine, why it matters, and the command that repairs it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from evener.cli.parser import Parser, write
from evener.cli.top import seconds
from evener.errors import UsageError, nearest

if TYPE_CHECKING:
    from evener.doctor import Facts, Finding

EXAMPLES = """\
examples:
  evener doctor                                   all checks
  evener doctor --ranks 8 --workers 4             for a job of 8 ranks with 4 data workers each
  evener doctor --only shared-memory,torch-cuda   two of them; --list names all, docs/doctor.md explains them
  evener doctor --deep                            NCCL over the visible GPUs too, pair by pair (up to a minute)
  evener doctor --nodes host1,host2               the network between hosts; type it on each of them
  srun --ntasks-per-node=1 evener doctor --nodes  the same in a Slurm job
  evener doctor --record facts.json               keep what was seen; --from facts.json judges it anywhere

exit code: 1 when there is an error, else 0; 2 for a wrong option
"""

_SHEET = "--from FILE, which `evener doctor --record FILE` wrote"


def parser() -> Parser:
    what = "Look at driver, CUDA, torch, memory, limits, network and disks, and name the fix of every fault."
    options = Parser(prog="evener doctor", description=what, epilog=EXAMPLES)
    add = options.add_argument
    add("--only", metavar="CHECK,...", action="append", default=[], help="these checks alone; repeatable")
    add("--list", action="store_true", help="the names of all checks")
    add("--all", action="store_true", help="show also what is good, check by check")
    add("--json", action="store_true", help='{"findings": [{check, level, found, why, fix}]}')
    add("--deep", action="store_true", help="try NCCL on the visible GPUs")
    add("--ranks", metavar="N", type=_count, help="processes that the job will have here (default: visible GPUs, or 1)")
    add("--workers", metavar="N", type=_count, help="data workers of each rank (num_workers)")
    add("--memory", metavar="SIZE", help="host memory that the job needs here: 200GB")
    add("--dir", metavar="DIR", default="runs", help="where checkpoints will go (default: runs)")
    add("--nodes", metavar="HOSTS", nargs="?", const="auto", help="the network checks on all hosts: host1,host2,...")
    add("--timeout", metavar="SECONDS", type=seconds, help="for the other hosts (30), or for torch's child (12)")
    add("--record", metavar="FILE", help="write what was seen as JSON")
    add("--from", metavar="FILE", dest="recorded", help="judge a recorded machine instead of this one")
    add("--root", metavar="DIR", default="/", help="where /proc, /sys, /etc and /dev are read (default: /)")
    return options


def _count(word: str) -> int:
    if word.isdigit():
        return int(word)
    raise argparse.ArgumentTypeError(f"{word} is not a number")


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    if os.name != "posix":
        raise UsageError("evener doctor knows Linux and macOS only.")
    if not os.path.isdir(given.root):
        raise UsageError(f"--root {given.root} is no folder.", fix=["--root DIR, with proc, sys and etc in it"])
    from evener import doctor

    if given.list:
        print("\n".join(f"{text['number']:>2}  {name:<16} {text['title']}" for name, text in doctor.texts().items()))
        return 0
    wanted = [name.strip() for words in given.only for name in words.split(",") if name.strip()]
    for name in wanted:
        if name not in doctor.CHECKS:
            close = nearest(name, doctor.CHECKS)
            raise UsageError(f"{name!r} is not a check.", fix=[*([close] if close else []), "evener doctor --list"])
    if given.nodes is not None:
        return _all_hosts(given, wanted)
    names = wanted or list(doctor.CHECKS)
    if torch := bool(doctor.NEED_TORCH & set(names)):
        names.append("torch-cuda")  # which says what became of the child
    facts = _recorded(given.recorded) if given.recorded else _look(given, torch=torch)
    if given.record:
        write(given.record, facts.to_json() + "\n", "--record")
    try:
        findings = doctor.examine(facts, [name for name in doctor.CHECKS if name in names])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if not given.recorded:
            raise
        raise UsageError(f"{given.recorded} has facts of an odd form.", evidence=[repr(error)], fix=[_SHEET]) from None
    return _show(given, facts.hostname, findings)


def _recorded(path: str) -> Facts:
    from evener.doctor import Facts

    try:
        with open(path, encoding="utf-8") as file:
            return Facts.from_json(file.read(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read.", evidence=[str(error)], fix=[_SHEET]) from None


def _look(given: argparse.Namespace, *, torch: bool) -> Facts:
    """This machine's facts; torch's child process works meanwhile."""
    from evener import doctor
    from evener.doctor import facts
    from evener.gpus import look_at_gpus
    from evener.gpus.pick import parse_size

    needed = parse_size(given.memory, "--memory") if given.memory else None
    gpus = look_at_gpus(os.environ, root=given.root)
    visible = sum(gpu.slot is not None for gpu in gpus.gpus)
    wishes = {"ranks": given.ranks or max(1, visible), "workers": given.workers, "memory_needed_bytes": needed}
    child = doctor.TorchChild(sys.executable, os.environ, gpus=visible if given.deep else 0) if torch else None
    try:
        seen = facts.gather(os.environ, root=given.root, directory=given.dir, gpus=gpus, **wishes)
        if child is None:
            return seen
        if sys.stderr.isatty():
            print("evener: asking torch, in a child process ...", file=sys.stderr)
        return dataclasses.replace(seen, torch=child.answer(given.timeout or (60.0 if given.deep else 12.0)))
    finally:
        if child is not None:
            child.end()


def _all_hosts(given: argparse.Namespace, names: list[str]) -> int:
    from evener import doctor
    from evener.doctor import nodes

    who = nodes.members(given.nodes, os.environ)
    if alone := [name for name in names if name not in doctor.OF_ALL_HOSTS]:
        fix = [f"it runs: {', '.join(doctor.OF_ALL_HOSTS)}"]
        raise UsageError(f"--nodes does not run {', '.join(alone)}.", fix=fix)
    here, patience = _look(given, torch=False), given.timeout or 30.0
    if not who.is_head(here):
        level, line = nodes.follow(who, here, patience)
        print(f"evener doctor: {line}", file=sys.stderr)
        return int(level == "error")
    with nodes.lead(who, here, patience) as (facts, tell):
        findings = doctor.examine_hosts(facts, names or doctor.OF_ALL_HOSTS)
        code = _show(given, f"{len((facts.hosts or {})['hosts'])} of {len(who.names)} hosts", findings)
        tell(doctor.worst(findings))
    return code


def _show(given: argparse.Namespace, where: str, findings: Sequence[Finding]) -> int:
    """Prints the findings; the exit code."""
    from evener.doctor import LEVELS
    from evener.report.text import clean

    by_level = {level: [one for one in findings if one.level == level] for level in LEVELS}
    if given.json:
        print(json.dumps({"findings": [dataclasses.asdict(one) for one in findings]}, indent=1))
        return int(bool(by_level["error"]))
    shape = textwrap.TextWrapper(min(120, shutil.get_terminal_size().columns), subsequent_indent=" " * 10)
    shape.break_long_words = shape.break_on_hyphens = False

    def block(head: str, text: str | None) -> None:
        print(shape.fill(f"{head:<10}{clean(text or '')}"))

    counts = [f"{len(of)} {level}{'s' * (len(of) > 1 and level in LEVELS[:2])}" for level, of in by_level.items() if of]
    print(f"evener doctor: {where}: {', '.join(counts)}")
    for one in findings:
        if one.level in LEVELS[:2]:
            print()
            block(one.level, f"{one.check}: {one.found}")
            block("  why", one.why)
            block("  fix", one.fix)
    print()
    for level in ("unknown", "ok", "skipped"):
        if given.all or level == "unknown":
            for one in by_level[level]:
                block(level, f"{one.check}: {one.found}")
        elif by_level[level]:
            block(level, ", ".join(dict.fromkeys(one.check for one in by_level[level])))
    return int(bool(by_level["error"]))
