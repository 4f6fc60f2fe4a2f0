"""`evener gpus`: the GPUs of this machine, who has them, and which are free. It reads and takes nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from dataclasses import replace

from evener.cli.parser import parser_of, write
from evener.errors import EvenerError, ShortageError, UsageError
from evener.gpus import leases, look, owners, pick, table, visible
from evener.gpus.values import Snapshot, to_json


def main(argv: list[str]) -> int:
    given = parser_of("gpus").parse_args(argv)
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
