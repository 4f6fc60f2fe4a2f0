"""`evener explain`: what broke, in a log, a run directory or a kind's page."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
from typing import TYPE_CHECKING, Any

from evener.cli.parser import parser_of
from evener.errors import EvenerError, LaunchError, UsageError, nearest

if TYPE_CHECKING:
    from evener.explain.answer import Explanation
    from evener.explain.facts import Fate
    from evener.explain.read import Selection
    from evener.launch.records import RankEnd


def main(argv: list[str]) -> int:
    given = parser_of("explain").parse_args(argv)
    from evener.explain import explain_selections, preferred_language

    language = given.lang or preferred_language()
    if not given.what and not given.list:
        if sys.stdin.isatty():
            raise UsageError("evener explain: which log?", fix=["evener explain FILE, or a folder, or - ; --help"])
        given.what = ["-"]
    found = True
    value: Any
    if given.list:
        value, text = listing(language)
    elif len(given.what) == 1 and not os.path.exists(given.what[0]) and given.what[0] != "-":
        value, text = page(given.what[0], language)
    else:
        what = [*given.what, *(logs for path in given.what for logs in logs_of_run(path))]
        selections, fates = read(what)
        answer = with_places(explain_selections(selections, language, fates), what)
        value, text, found = answer.to_json(), text_of(answer, sys.stdout), answer.kind is not None
    print(json.dumps(value, ensure_ascii=False, indent=2) if given.json else text)
    return 0 if found else 1


def read(what: list[str]) -> tuple[list[Selection], list[Fate]]:
    """The texts, and the records that `evener run` left beside them."""
    from evener.explain.folder import read_folder
    from evener.explain.read import read_file, read_stream

    selections: list[Selection] = []
    fates: list[Fate] = []
    for path in what:
        if path == "-":
            selections.append(read_stream(sys.stdin.buffer, "standard input"))
        elif os.path.isdir(path):
            selections += read_folder(path)
            fates += fates_in(path)
        else:
            selections.append(read_file(path))
    return selections, fates


def logs_of_run(path: str) -> list[str]:
    """The log folder of the newest job that worked in this directory of a Run, where it can be found."""
    start: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError), open(os.path.join(path, "events.jsonl"), encoding="utf-8") as file:
        for line in file:
            if '"kind": "start"' in line:
                start = json.loads(line)
    if not start.get("job"):
        return []
    name = f"{start['job']}-restart{start['attempt']}" if start.get("attempt") else start["job"]
    places = (os.path.join(str(start.get("cwd") or "."), "runs"), os.path.dirname(os.path.abspath(path)))
    folders = [os.path.join(place, "logs", os.path.basename(name)) for place in places]
    return [folder for folder in folders if os.path.isdir(folder)][:1]


def with_places(answer: Explanation, what: list[str]) -> Explanation:
    """With the culprit's own line, where `evener run` recorded it beside the logs."""
    from evener.launch import failure

    ends = (end for path in what if os.path.isdir(path) for end in ends_in(path) if end.rank == answer.culprit_rank)
    where = next((one.where for end in ends for one in end.errors if one.where is not None), None)
    if where is None:
        return answer
    line = f"{failure.relative(where.file, os.getcwd())}:{where.line}: {failure.clean(where.text, limit=160)}"
    return dataclasses.replace(answer, evidence=(*answer.evidence, (None, None, line)))


def ends_in(logs: str) -> list[RankEnd]:
    """The records of `evener run` in a log folder, in rank order."""
    from evener.launch.records import read_ends

    found = (re.fullmatch(r"rank(\d+)\.json", name) for name in os.listdir(logs))
    return read_ends(logs, max((int(one[1]) for one in found if one is not None), default=-1) + 1)


def fates_in(logs: str) -> list[Fate]:
    """How every rank ended, from the records of `evener run` in a log folder; [] where there are none."""
    from evener.explain.facts import Fate

    def fate(end: RankEnd) -> Fate:
        seconds = None if end.monotonic_ns is None else end.monotonic_ns / 1e9
        raised = tuple((f"{one.module}.{one.type}", one.message, one.traceback) for one in end.errors)
        return Fate(end.rank, end.how, end.code, end.pid, end.stopped, seconds, raised)

    return [fate(end) for end in ends_in(logs)]


def gpus_then(logs: str) -> list[str]:
    """What the driver said about the GPUs when the first rank failed; about a lost one, what it says now.

    Commands of other processes are left out: whatever text is in them must not be read as a message.
    """
    from evener.gpus import look_at_gpus, read_recording
    from evener.gpus.look import size

    then, lines = None, []
    with contextlib.suppress(UsageError):  # nobody asked, or the driver gave no answer
        then = read_recording(os.path.join(logs, "gpus.json"))
    for gpu in (then or look_at_gpus(os.environ)).gpus:
        name = f"NVML: GPU {gpu.index}" + ("" if gpu.slot is None else f" (cuda:{gpu.slot})")
        used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
        if gpu.error or gpu.health.remapped_rows_failed:
            lines.append(f"{name}: {gpu.error or 'row remapping failed'}")
        elif then and gpu.slot is not None and used is not None and total is not None:
            lines.append(f"{name}: {size(used)} of {size(total)} taken at the failure")
            for one in gpu.processes or ():
                held = "an unknown amount" if one.memory_bytes is None else size(one.memory_bytes)
                lines.append(f"{name}: process {one.pid} of {one.user or 'somebody'} holds {held}")
    return lines


def text_of(answer: Explanation, stream: Any) -> str:
    """The text form, coloured on a terminal only."""
    from evener.explain.answer import to_text

    color = stream.isatty() and "NO_COLOR" not in os.environ
    return to_text(answer, color=color, width=min(shutil.get_terminal_size((100, 24)).columns, 120))


# --- the end of `evener run` ----------------------------------------------------------------------------------------


def explain_run(error: EvenerError, logs: str, started: float, kills: int | None) -> str:
    """What the launcher says about a failed run, with what its logs and this machine say about the cause.

    The launcher knows who ended how; this knows what the message means. Where no kind fits, the launcher's word stands.
    """
    from evener.explain import explain_selections, preferred_language
    from evener.explain.answer import words
    from evener.explain.folder import read_folder
    from evener.explain.host import testimony
    from evener.launch.failure import clean

    language = preferred_language()
    try:
        fates, kernel = fates_in(logs), testimony(started, kills, logs, gpus_then(logs))
        answer = explain_selections([*read_folder(logs), kernel], language, fates)
        with open(os.path.join(logs, "kernel.log"), "w", encoding="utf-8") as file:  # for `evener explain`, later
            file.writelines(f"{line.text}\n" for line in kernel.lines)
    except (EvenerError, OSError, ValueError):  # nothing to read: the launcher has said what it knows
        return str(error)
    more = f"  evener explain {os.path.relpath(logs)}"
    if answer.kind in (None, "python-exception", "torchrun-hidden-root-cause", "stopped-by-signal"):
        return f"{error}\n{more}" if answer.kind == "python-exception" else str(error)
    *evidence, where = error.evidence or ("",)
    say = words(language)
    blamed = re.match(r"rank (\d+) ", error.cause)
    # An end that the kernel reported, and a rank that was seen elsewhere while others waited, need no interpretation.
    seen = re.match(r"ranks? [\d, -]+ (was killed by|did not come|hangs?:|wait for each other:)", error.cause)
    if answer.kind == "evener-error":
        same = {fate.tracebacks[0][:2] if fate.tracebacks else None for fate in fates}
        alike = len(fates) > 1 and len(same) == 1 and None not in same and not seen
        if blamed and not alike:
            return str(error)
        # Every rank's error: who was first says nothing. Rank 0 has shown it all, unless it was ended before it could.
        message = clean(fates[0].tracebacks[0][1]).replace("\n  ", "\n") if alike else error.cause
        what, _, rest = message.partition("\n")
        shown = [] if not rest or _has(os.path.join(logs, "rank0.log"), what) else [rest]
        said = [say["all_ranks"].format(what=what)] if alike else [what]
        return "\n".join([*said, *shown, *(f"  {line}" for line in evidence if not alike), f"  {where}"])
    known = answer.culprit_known and isinstance(answer.culprit_rank, int)
    if blamed and not seen and known and answer.culprit_rank != int(blamed[1]):
        # The launcher has taken a victim: the text knows better.
        evidence, error = [text for _, _, text in answer.evidence[:3]], LaunchError(answer.summary)
    evidence = [line for line in evidence if not line.startswith("often ")]  # the launcher's guess, where more is known
    lines = [error.cause, *(f"  {line}" for line in evidence), "", f"  {answer.kind}: {answer.summary}"]
    for key in ("cause", "fix", "confirm", "avoid"):
        heading = f"{say[key]}:"
        lines += [f"  {'' if n else heading:<{len(heading)}} {item}" for n, item in enumerate(getattr(answer, key))]
    return "\n".join([*lines, "", f"  {where}", more])


def _has(log: str, text: str) -> bool:
    """Whether the end of the log has this text."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, os.path.getsize(log) - 65536))
        return text.encode() in file.read()
    return False


# --- pages ----------------------------------------------------------------------------------------------------------


def listing(language: str) -> tuple[list[dict[str, str]], str]:
    """All kinds, as values and as text."""
    from evener.explain.kinds import all_kinds
    from evener.explain.pages import plain_title

    kinds = all_kinds().values()
    values = [{"kind": kind.name, "group": kind.group, "title": plain_title(kind, language)} for kind in kinds]
    groups: dict[str, list[str]] = {}
    for one in values:
        groups.setdefault(one["group"], [one["group"]]).append(f"  {one['kind']:<28} {one['title']}")
    return values, "\n\n".join(map("\n".join, groups.values()))


def page(name: str, language: str) -> tuple[dict[str, Any], str]:
    """The page of a kind, or of a rule of `evener lint`. UsageError when `name` is neither, nor a file."""
    from evener import lint
    from evener.explain.kinds import all_kinds
    from evener.explain.pages import page_of, page_text
    from evener.lint import rules

    kinds = all_kinds()
    if name in kinds:
        value = page_of(kinds[name], language)
        return value, page_text(value)
    if (rule := lint.page(name, language)) is not None:
        return {"kind": name, "text": rule}, rule
    close = nearest(name, [*kinds, *(one.id for one in rules.ALL)])
    fix = [f"evener explain {close}"] if close else []
    raise UsageError(f"{name} is no file, and no kind of failure.", fix=[*fix, "evener explain --list shows the kinds"])
