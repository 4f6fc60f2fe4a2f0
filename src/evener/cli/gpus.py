"""`evener gpus`: the GPUs of this machine, who has them, and which are free. It reads and takes nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import replace

from evener.cli.parser import Parser, write
from evener.cli.top import seconds
from evener.errors import EvenerError, ShortageError, UsageError
from evener.gpus import leases, look, owners, pick, table, visible
from evener.gpus.values import Snapshot, to_json

DESCRIPTION = """\
Show the GPUs of this machine: what is on them, who runs it, who has a lease,
and which are idle, or why not. GPU is nvidia-smi's number; slot is the N of
`cuda:N` for a process that is started from this shell.
"""

EXAMPLES = """\
exit codes: 0 found, 2 a mistake in the call, 3 not enough (or no) GPUs now,
4 the driver is broken

examples:
  evener gpus                        the table
  evener gpus -n 2 --min-free 20GB   are two GPUs free? exit code 3 says no
  evener gpus --watch                again every 2 seconds, until Ctrl-C
  evener gpus --holders              who keeps GPUs open, orphans too
  evener gpus --record gpus.json     for a bug report; --from reads it
  env $(evener gpus --env) python train.py
                                     look, then go; somebody else may come in
                                     between: `evener run` takes a lease
"""


def parser() -> Parser:
    options = Parser(prog="evener gpus", description=DESCRIPTION, epilog=EXAMPLES)
    add = options.add_argument
    add("-n", metavar="N", help="are N idle GPUs of one kind there? with --env: which (default 1)")
    add("--min-free", metavar="SIZE", help="only GPUs with so much free memory: 20GB, 20GiB")
    add("--model", metavar="NAME", help="only GPUs whose name has this in it: A100")
    show = options.add_mutually_exclusive_group()
    show.add_argument("--json", action="store_true", help="everything, machine-readable; unknown is null")
    show.add_argument("--env", action="store_true", help="the variables that make a process see the chosen GPUs")
    show.add_argument("--holders", action="store_true", help="processes that have GPU device files open (from /proc)")
    add("--topology", action="store_true", help="also how each pair of GPUs is connected")
    add("--watch", metavar="SECONDS", nargs="?", const=2.0, type=seconds, help="again and again (2 s), until Ctrl-C")
    add("--from", metavar="FILE", dest="recorded", help="show a recording instead of this machine")
    add("--record", metavar="FILE", help="write what was read to FILE, as --json would print it")
    add("--lock-folder", metavar="DIR", help="another folder of leases than this machine's")
    return options


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    wish = to_wish(given)
    if given.holders:
        return holders()
    try:
        while True:
            text, code = answer(given, wish)
            head = "\x1b[H\x1b[J" * sys.stdout.isatty() + time.strftime("%H:%M:%S\n") if given.watch else ""
            print(f"{head}{text}", end="", flush=True)
            if not given.watch or code == 4:
                return code
            time.sleep(given.watch)
    except KeyboardInterrupt:
        return 0


def to_wish(given: argparse.Namespace) -> pick.Wish | None:
    """What is asked for; None when only the table is."""
    if given.n is not None and not re.fullmatch(r"0*[1-9][0-9]{0,8}", given.n):
        raise UsageError(f"-n {given.n}: how many GPUs, 1 or more.")
    asked = given.n or given.env or given.min_free or given.model
    free = pick.parse_size(given.min_free, "--min-free") if given.min_free else 0
    return pick.Wish(count=int(given.n or 1), min_free_bytes=free, model=given.model) if asked else None


def answer(given: argparse.Namespace, wish: pick.Wish | None) -> tuple[str, int]:
    """The answer and its exit code. Raises what says why there is none, when no more than a choice was asked."""
    snapshot, picked, error = take(given), None, None
    try:
        pick.refuse_trouble(snapshot)
        if not snapshot.gpus:
            raise ShortageError("The driver answers, and shows no GPU.")
        if wish is not None:
            picked = pick.choose(wish, pick.universe(snapshot, {} if given.recorded else os.environ))
    except EvenerError as raised:
        if given.env:
            raise
        error = raised
    if picked is not None and given.env:
        return " ".join(f"{name}={value}" for name, value in visible.to_variable(picked.uuids).items()) + "\n", 0
    code = error.exit_code if error is not None else 0
    if given.json:
        return json.dumps(to_json(snapshot), indent=2) + "\n", code
    text = table.render(snapshot, topology=given.topology)
    if not snapshot.gpus and not given.recorded and code != 4:
        text += this_machine()
    if picked is not None:
        text += f"{wish}: {', '.join(f'GPU {gpu.index}' for gpu in picked.gpus)} would be taken.\n"
    elif wish is not None and snapshot.gpus:
        text += f"{error}\n"
    return text, code


def take(given: argparse.Namespace) -> Snapshot:
    """What is recorded, or is here now; kept, where that is asked."""
    if given.recorded:
        found = look.read_recording(given.recorded)
    else:
        folder = leases.Folder(given.lock_folder or leases.default_path())
        found = look.look(os.environ, holder_of=folder.holder)
        found = replace(found, notes=(*found.notes, *(f"waits for GPUs: {who}" for who in folder.waiting())))
    if given.record:
        write(given.record, json.dumps(to_json(found), indent=2) + "\n", "--record")
    return found


def this_machine() -> str:
    """What there is instead of GPUs."""
    import psutil  # type: ignore[import-untyped]

    from evener.limits import usable_cpus

    cpus, memory = usable_cpus(), psutil.virtual_memory()
    free = f"{look.size(memory.available)} of {look.size(memory.total)} memory free"
    return f"CPU: {cpus} usable core{'s' if cpus > 1 else ''}, {free}.\n"


def holders() -> int:
    if not os.path.isdir("/proc/self/fd"):
        raise UsageError("--holders reads /proc, which this system has not.")
    found, hidden = owners.device_holders()
    for pid, who, devices in found:
        orphan = " · orphan: its parent is gone" if who.parent == 1 else ""
        print(f"pid {pid} {who.user}, for {look.duration(who.age_seconds)}{orphan}: {who.command}")
        print(f"    {', '.join(devices)}")
    if not found:
        print("No process has an NVIDIA device file open" + (", as far as you may see." if hidden else "."))
    me = owners.user_name(os.getuid())
    if mine := [str(pid) for pid, who, _ in found if who.parent == 1 and who.user == me]:
        print(f"orphans of yours: kill {' '.join(mine)}")
    if hidden:
        print(f"{hidden} processes of other users could not be looked into; root can: sudo evener gpus --holders")
    return 0
