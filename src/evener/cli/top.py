"""`evener top`: GPUs, who is on them, and what every evener run of this machine waits for."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import sys
import textwrap
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from evener.cli.parser import parser_of

if TYPE_CHECKING:
    from evener.gpus import Snapshot
    from evener.report.live import Running

_CAVEAT = "util: some kernel ran, not how well. data: the host waited for rows."


def main(argv: list[str]) -> int:
    given = parser_of("top").parse_args(argv)
    look = viewer()
    if given.json:
        print(json.dumps(as_json(*look()), indent=1))
        return 0
    if given.once or not sys.stdout.isatty():
        print("\n".join(lines(*look(), columns=shutil.get_terminal_size().columns)))
        return 0
    from rich.live import Live
    from rich.text import Text

    with Live(screen=True, auto_refresh=False) as live:
        try:
            while True:
                console = live.console
                shown = lines(*look(), columns=console.width)
                if (left := len(shown) - console.height) > 0:
                    shown = [*shown[: console.height - 1], f"... {left + 1} more lines: a higher terminal, or --once"]
                live.update(Text("\n".join(shown), no_wrap=True), refresh=True)
                time.sleep(given.interval)
        except KeyboardInterrupt:
            return 0


def viewer() -> Callable[[], tuple[Snapshot, list[Running]]]:
    """A function that looks; it remembers the GPUs' numbers, and how far every run's events were read."""
    from evener.gpus import look_at_gpus
    from evener.gpus.leases import Folder, default_path
    from evener.limits import usable_cpus
    from evener.report.live import Watcher

    leases, index = Folder(default_path()), dict[str, int]()
    watcher = Watcher(usable_cpus(), index.get)

    def look() -> tuple[Snapshot, list[Running]]:
        gpus = look_at_gpus(os.environ, holder_of=leases.holder)
        index.update((gpu.uuid, gpu.index) for gpu in gpus.gpus if gpu.uuid)
        return gpus, watcher.look()

    return look


def as_json(gpus: Snapshot, runs: list[Running]) -> dict[str, Any]:
    """What `evener gpus --json` says, and the runs of this host."""
    from evener.gpus import to_json
    from evener.report.events import strict

    return {**to_json(gpus), "host": socket.gethostname(), "runs": [strict(dataclasses.asdict(run)) for run in runs]}


def lines(gpus: Snapshot, runs: list[Running], *, columns: int) -> list[str]:
    """The view as lines that fit `columns`; a verdict is wrapped, never cut."""
    from evener.gpus.look import size
    from evener.gpus.table import render
    from evener.report.live import run_lines

    found = [f"evener top  {socket.gethostname()}  {time.strftime('%H:%M:%S')}"]
    found += [gpus.trouble.cause] if gpus.trouble and not gpus.trouble.broken else render(gpus, columns).splitlines()
    slowed = [one for one in gpus.gpus if one.health.throttle]
    found += [f"GPU {one.index} is slowed: {', '.join(one.health.throttle or ())}" for one in slowed]
    found += ["", *(["no evener run on this machine (that you may see)"] if not runs else [])]
    for line in (line for run in runs for line in run_lines(run, size)):
        found += textwrap.wrap(line, columns, subsequent_indent="     ") if line.startswith("  ->") else [line]
    return [line if len(line) <= columns else line[: columns - 1] + "…" for line in (*found, "", _CAVEAT)]
