"""The texts of a run directory: logs of ranks and of the launcher, and the events that evener's `Run` wrote."""

from __future__ import annotations

import json
import os
import re

from evener.errors import UsageError
from evener.explain.read import Raw, Selection, read_file

_LOG = re.compile(r"(?:\.(?:log|out|err|txt)(?:\.\d+)?(?:\.gz)?|^std(?:out|err))$")
_SKIPPED = re.compile(r"(?:^requirements|^plan|\.md$|^train(?:ing)?_args)")
MOST_FILES = 2000


def read_folder(path: str) -> list[Selection]:
    """Everything below `path` that can say how a run ended. UsageError when there is nothing."""
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if not name.startswith((".", "checkpoint", "__"))]
        told = (one for one in names if one == "events.jsonl" or (_LOG.search(one) and not _SKIPPED.search(one)))
        files += [os.path.join(folder, name) for name in told]
    if not files:
        raise UsageError(
            f"{path} has no logs.",
            evidence=["looked for *.log, *.out, *.err, *.txt (also .gz), stdout, stderr, events.jsonl"],
            fix=["give the folder of one run (evener run prints it), or a log file"],
        )
    # The launcher speaks last: what ranks say themselves comes first in a tie.
    files.sort(key=lambda file: ("agent" in os.path.basename(file), file))
    return [_events(file) if file.endswith("events.jsonl") else read_file(file) for file in files[:MOST_FILES]]


def _events(path: str) -> Selection:
    """The events of a run that tell of trouble, each as a line of text; a stop only where nothing followed it."""
    selection, stopped = Selection(path), list[Raw]()
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            selection.lines_total = number
            if not re.search(r'"kind": "(error|warning|start|stop)"', line):
                continue
            try:
                event = json.loads(line)
                if (kind := event["kind"]) == "start":
                    stopped = []
                elif kind == "stop":  # as the console says it
                    said = (
                        f"stopped after {event['update'] + 1} updates ({event['reason']}); start it again to continue"
                    )
                    stopped = [Raw(path, number, said)]
                if kind in ("start", "stop"):
                    continue
                said = f"{event['type'] if kind == 'error' else kind}: {event.get('text', '')}"
            except (ValueError, KeyError, TypeError):
                continue  # a torn line, or a newer version's
            mark = f"[rank{event['rank']}]: " if isinstance(event.get("rank"), int) else ""
            selection.lines += [Raw(path, number, mark + part) for part in said.splitlines()]
    selection.lines += stopped
    return selection
