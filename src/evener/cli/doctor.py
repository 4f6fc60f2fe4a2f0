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
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from evener.cli.parser import parser_of, write
from evener.errors import UsageError, nearest

if TYPE_CHECKING:
    from evener.doctor import Facts, Finding

_SHEET = "--from FILE, which `evener doctor --record FILE` wrote"


def main(argv: list[str]) -> int:
    given = parser_of("doctor").parse_args(argv)
    if os.name != "posix":
        raise UsageError("evener doctor knows Linux and macOS only.")
    if not os.path.isdir(given.root):
        raise UsageError(f"--root {given.root} is no folder.", fix=["--root DIR, with proc, sys and etc in it"])
    from evener import doctor

    if given.list:
        print("\n".join(f"{text['number']:>2}  {name:<16} {text['title']}" for name, text in doctor.texts().items()))
        return 0
    for name in given.only:
        if name not in doctor.CHECKS:
            close = nearest(name, doctor.CHECKS)
            raise UsageError(f"{name!r} is not a check.", fix=[*([close] if close else []), "evener doctor --list"])
    if given.nodes is not None:
        return _all_hosts(given, given.only)
    names = given.only or list(doctor.CHECKS)
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
        return Facts.from_json(Path(path).read_text("utf-8"), path)
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
    with ExitStack() as stack:
        if torch:
            child = doctor.TorchChild(sys.executable, os.environ, gpus=visible if given.deep else 0)
            stack.callback(child.end)
        seen = facts.gather(os.environ, root=given.root, directory=given.dir, gpus=gpus, **wishes)
        if not torch:
            return seen
        if sys.stderr.isatty():
            print("evener: asking torch, in a child process ...", file=sys.stderr)
        return dataclasses.replace(seen, torch=child.answer(given.timeout or (60.0 if given.deep else 12.0)))


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
    for one in (one for one in findings if one.level in LEVELS[:2]):
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
