"""The lesson of an out-of-memory error that no rank recovers from alone: a file that the next start here reads.

It changes how a batch is cut, never what an update is, so the result is that of an uninterrupted run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.config import Config
from evener.errors import EvenerError, LessonError, MemoryLimitError
from evener.report.folder import script_name, write_json
from evener.run.resume import FINISHED, siblings

FILE = "lesson.json"


def learn(error: LessonError, config: Config, folder: Path, update: int) -> EvenerError:
    """Write it down, on the rank that failed; returns the error to raise."""
    size, why = error.microbatch_size, 'resume="never": a restart would begin anew'
    if config.resume != "never":
        try:
            write_json(folder / FILE, {"microbatch_size": size, "update": update, "because": error.cause})
            return error
        except OSError as failed:
            why = f"the lesson could not be written to {folder / FILE}: {failed.strerror}"
    return MemoryLimitError(error.cause, evidence=[*error.evidence[:-1], why], fix=[f"microbatch_size={size}"])


def lesson_of(config: Config) -> tuple[Mapping[str, Any], list[str]]:
    """(keywords, lines to show) of the newest run of this name, where it is not finished. Reads this machine's disk."""
    path = Path(config.dir).expanduser() if config.dir is not None else Path("runs") / script_name()
    newest = siblings(path)[0] if path.name else path
    try:
        learnt = json.loads((newest / FILE).read_text(encoding="utf-8"))["microbatch_size"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}, []
    over = config.resume == "never" or (newest / FINISHED).exists() or not isinstance(learnt, int) or learnt < 1
    if over or (config.microbatch_size is not None and config.microbatch_size <= learnt):
        return {}, []
    learnt = min(learnt, config.global_batch_size)
    line = f"microbatch_size={learnt}, as learnt from running out of memory ({newest / FILE}; delete it to forget)"
    return {"microbatch_size": learnt}, [line]
