"""`evener gpus`: the GPUs of this machine, who has them, and which are free. It reads and takes nothing."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time

from evener.cli.parser import Parser
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
    options = Parser(
        prog="evener gpus",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add = options.add_argument
    add("-n", metavar="N", help="are N idle GPUs of one kind there? with --env or --uuid: which (default 1)")
    add("--min-free", metavar="SIZE", help="only GPUs with so much free memory: 20GB, 20GiB")
    add("--model", metavar="NAME", help="only GPUs whose name has this in it: A100")
    show = options.add_mutually_exclusive_group()
    show.add_argument("--json", action="store_true", help="everything, machine-readable; unknown is null")
    show.add_argument("--env", action="store_true", help="the variables that make a process see the chosen GPUs")
    show.add_argument("--uuid", action="store_true", help="the UUIDs of the chosen GPUs, one a line")
    show.add_argument("--holders", action="store_true", help="processes that have GPU device files open (from /proc)")
    add("--topology", action="store_true", help="also how each pair of GPUs is connected")
    add("--watch", metavar="SECONDS", nargs="?", const="2", help="again every SECONDS (default 2), until Ctrl-C")
    add("--from", metavar="FILE", dest="recorded", help="show a recording instead of this machine")
    add("--record", metavar="FILE", help="write what was read to FILE, as --json would print it")
    add("--source", choices=look.SOURCES, default="auto", help="which probe (default: NVML, else nvidia-smi)")
    add("--lock-folder", metavar="DIR", help="another folder of leases than this machine's")
    return options


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    chosen = wish(given)
    if given.holders:
        return holders()
    if given.watch is None:
        return show(given, chosen)
    seconds = pick.parse_seconds(given.watch, "--watch")
    try:
        while True:
            text, code = render(given, chosen)
            clear = "\x1b[H\x1b[J" if sys.stdout.isatty() else ""
            print(f"{clear}{time.strftime('%H:%M:%S')}\n{text}", end="", flush=True)
            if code == 4:
                return code
            time.sleep(seconds)
    except KeyboardInterrupt:
        return 0


def wish(given: argparse.Namespace) -> pick.Wish | None:
    """What is asked for; None when only the table is."""
    count = None
    if given.n is not None:
        if not given.n.isdecimal() or int(given.n) < 1:
            raise UsageError(f"-n {given.n}: how many GPUs, 1 or more.")
        count = int(given.n)
    asked = given.n or given.env or given.uuid or given.min_free or given.model
    free = pick.parse_size(given.min_free, "--min-free") if given.min_free else 0
    return pick.Wish(count=count or 1, min_free_bytes=free, model=given.model) if asked else None


def show(given: argparse.Namespace, chosen: pick.Wish | None) -> int:
    text, code = render(given, chosen)
    print(text, end="")
    return code


def render(given: argparse.Namespace, chosen: pick.Wish | None) -> tuple[str, int]:
    """The answer and its exit code. Raises what says why there is none, when no more than a choice was asked."""
    snapshot = take(given)
    if given.record:
        record(snapshot, given.record)
    error = verdict(snapshot, chosen, {} if given.recorded else os.environ)
    picked = error if isinstance(error, pick.Picked) else None
    if given.env or given.uuid:
        if picked is None:
            assert isinstance(error, EvenerError)
            raise error
        values = visible.to_variable(picked.uuids)
        return (" ".join(f"{k}={v}" for k, v in values.items()) if given.env else "\n".join(picked.uuids)) + "\n", 0
    code = error.exit_code if isinstance(error, EvenerError) else 0
    if given.json:
        return json.dumps(to_json(snapshot), indent=2) + "\n", code
    text = table.render(snapshot, topology=given.topology)
    if not snapshot.gpus and not given.recorded and code != 4:
        text += this_machine()
    if picked is not None:
        names = ", ".join(f"GPU {gpu.index}" for gpu in picked.gpus)
        text += f"{chosen}: {names} would be taken.\n"
    elif chosen is not None and snapshot.gpus:
        text += f"{error}\n"
    return text, code


def take(given: argparse.Namespace) -> Snapshot:
    if given.recorded:
        return look.read_recording(given.recorded)
    folder = leases.Folder(given.lock_folder or leases.default_path())
    found = look.look(os.environ, source=given.source, holder_of=folder.holder)
    waiting = tuple(f"waits for GPUs: {who}" for who in folder.waiting())
    return dataclasses.replace(found, notes=(*found.notes, *waiting))


def verdict(
    snapshot: Snapshot, chosen: pick.Wish | None, environ: os._Environ[str] | dict[str, str]
) -> pick.Picked | EvenerError | None:
    """What would be taken, or why nothing; None when there are GPUs and nobody asked for some."""
    try:
        pick.refuse_trouble(snapshot)
        if not snapshot.gpus:
            return ShortageError("The driver answers, and shows no GPU.")
        return pick.choose(chosen, pick.universe(snapshot, environ)) if chosen is not None else None
    except EvenerError as error:
        return error


def record(snapshot: Snapshot, path: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(to_json(snapshot), file, indent=2)
    except OSError as error:
        raise UsageError(f"--record {path}: {error.strerror}.", fix=["a file that can be written"]) from None


def this_machine() -> str:
    """What there is instead of GPUs."""
    import psutil  # type: ignore[import-untyped]

    from evener.launch.machine import usable_cpus

    cpus, memory = usable_cpus(), psutil.virtual_memory()
    text = f"CPU: {cpus} usable core{'s' if cpus > 1 else ''}, {look.size(memory.available)} of "
    return f"{text}{look.size(memory.total)} memory free.\n"


def holders() -> int:
    if not os.path.isdir("/proc/self/fd"):
        raise UsageError("--holders reads /proc, which this system has not.")
    found, hidden = owners.device_holders()
    for one in found:
        orphan = " · orphan: its parent is gone" if one.orphan else ""
        print(f"pid {one.pid} {one.user}, for {look.duration(one.age_seconds)}{orphan}: {one.command}")
        print(f"    {', '.join(one.devices)}")
    if not found:
        print("No process has an NVIDIA device file open" + (", as far as you may see." if hidden else "."))
    mine = [str(one.pid) for one in found if one.orphan and one.user == owners.user_name(os.getuid())]
    if mine:
        print(f"orphans of yours: kill {' '.join(mine)}")
    if hidden:
        print(f"{hidden} processes of other users could not be looked into; root can: sudo evener gpus --holders")
    return 0
