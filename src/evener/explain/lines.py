"""One line of a log, taken apart: who wrote it (rank, host, process), when, and the text without its decoration.

Launchers mark lines in many ways, and a line may carry several marks: `[rank3]:` (torch), `3:` (srun -l),
`[default3]:` (torchrun --tee), `(Worker pid=9, ip=10.0.0.3)` (Ray), `node-1:183006:183220 [2] NCCL` (NCCL),
`worker-1: ` (pdsh), `[pod/train-0/pytorch]` (kubectl), `trainer_1  | ` (compose). Streams are told apart by them.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

from evener.explain.read import Raw

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
# A mark of another writer in the middle of a line: two processes wrote into one line.
_INSIDE = re.compile(r"(?<=\S)(?=\[rank\d+\]: )")
_PREFIXES = (
    re.compile(r"\[(?:rank|Rank|RANK)[ _:]?(?P<rank>\d+)\]:? ?"),
    re.compile(r"\[default(?P<local_rank>\d+)\]:"),
    re.compile(r"(?P<rank>\d{1,4}): "),
    re.compile(r"\((?P<name>[\w.:<>-]+(?: [\w.-]+)?) ?pid=(?P<pid>\d+)(?:, ip=(?P<host>[\w.:-]+))?\) ?"),
    re.compile(r"(?P<host>[\w.-]+):(?P<pid>\d+):\d+ \[(?P<gpu>\d+)\] (?=.*NCCL|NCCL)"),
    re.compile(r"\[pod/(?P<host>[\w.-]+)/[\w.-]+\] "),
    re.compile(r"(?P<host>[a-z][\w.-]*\d) +\| "),
    re.compile(r"(?P<host>[a-z][a-z_-]*-?\d+(?:\.[\w.-]+)?|\d+\.\d+\.\d+\.\d+): (?=\S)"),
)
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d+))?"
_DATE = re.compile(
    rf"\[?(?P<Y>20\d\d)[-/](?P<M>\d\d)[-/](?P<D>\d\d)[ T_]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?\]?[,:]? ?(?:- )?"
)
_GLOG = re.compile(rf"\[?[IWEFCV](?P<M>\d?\d)(?P<D>\d\d) {_CLOCK}[ \d]*")
_SYSLOG = re.compile(rf"(?P<mon>[A-Z][a-z]{{2}}) +(?P<D>\d\d?) {_CLOCK} (?P<host>[\w.-]+) (?=\w+[\[:])")
_MONTHS = {name: n for n, name in enumerate(calendar.month_abbr)}
# `evener run`'s own sentence is about that rank, whoever's mark the line has; the lines below it are indented.
TOLD = re.compile(
    r"evener: ranks? (?P<rank>\d+)(?P<more>[-,\d ]*) "
    r"(?:left|failed|was killed|finished|did not come|hangs?|wait for each other)\b"
)
_TOLD_BELOW = re.compile(r" +rank (\d+) ")
_RANK_INSIDE = re.compile(r"\[(?:PG [^\]]{0,60})?[Rr]ank ?(\d+)\]")
_RANK_IN_PATH = re.compile(
    r"(?:rank|worker|task|proc|node_rank)[_-]?(\d+)\.(?:log|out|err|txt|json)|/(\d+)/std(?:out|err)\.log$"
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its marks taken off.

    Attributes:
        order: Position over all sources, to compare lines of one source by.
        seconds: When it was written, on some clock (a year may be missing); None when it does not say.
        shown: The text with control characters gone, as evidence.
    """

    order: int
    source: str
    number: int
    text: str
    shown: str
    rank: int | None = None
    local_rank: int | None = None
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    seconds: float | None = None

    @property
    def stream(self) -> tuple[object, ...]:
        """Lines of one writer share this."""
        rank = self.rank if self.rank is not None else self.local_rank
        return (self.source, rank) if rank is not None else (self.source, self.pid)


class Stream:
    """The lines of one writer, as one text to search, and the offsets at which they start."""

    def __init__(self, lines: list[Line]) -> None:
        self.lines = lines
        self.text = "\n".join(line.text for line in lines)
        self.starts = list(accumulate((len(line.text) + 1 for line in lines[:-1]), initial=0))


def printable(text: str) -> str:
    """Text of a stranger without what a terminal would act on: escape sequences, control and direction characters."""
    return _CONTROL.sub("", _ANSI.sub("", text))


def parse(raws: Iterable[Raw]) -> Iterator[Line]:
    order = count()
    last: Line | None = None
    broken, told = False, False
    for raw in raws:
        shown = printable(raw.text)
        for part in _INSIDE.split(shown) if "[rank" in shown else [shown]:
            line = _one(Line(next(order), raw.source, raw.number, part, part.strip()))
            begins = TOLD.match(line.text) is not None
            told = begins or (told and last is not None and _is_below(line, last))
            broken = last is not None and not told and _continues(line, last, broken)
            if last is not None and told and not begins:
                said = _TOLD_BELOW.match(line.text)
                line = replace(line, rank=int(said[1]) if said else last.rank)
            elif last is not None and broken:
                line = replace(line, rank=last.rank, local_rank=last.local_rank, host=last.host, pid=last.pid)
            yield line
            last = line


def _is_below(line: Line, last: Line) -> bool:
    return line.text.startswith("  ") and line.source == last.source and line.number == last.number + 1


def _continues(line: Line, last: Line, broken: bool) -> bool:
    """Whether it is the rest of a long line that a terminal or a mail has broken: the mark was that of all of it."""
    unmarked = line.seconds is None and line.stream == (line.source, None) and (broken or line.text[:1].islower())
    return unmarked and line.source == last.source and line.number == last.number + 1 and len(last.shown) > 70


def _one(line: Line) -> Line:
    text, found = line.text, dict[str, str]()
    seconds: float | None = None
    for _ in range(5):
        head = text.lstrip() if found or seconds is not None else text
        match = next((m for p in (_DATE, _GLOG, _SYSLOG) if (m := p.match(head))), None)
        if match is not None:
            seconds = _seconds(match.groupdict())
            found |= {"host": match["host"]} if match.re is _SYSLOG else {}
        else:
            match = next((m for p in _PREFIXES if (m := p.match(head))), None)
            if match is None:
                break
            found |= {key: value for key, value in match.groupdict().items() if value is not None}
        text = head[match.end() :]
    if told := TOLD.match(text):
        found.pop("rank", None)
        found |= {} if told["more"] else {"rank": told["rank"]}
    elif "rank" not in found and (said := _RANK_INSIDE.search(text)):
        found["rank"] = said[1]
    if "rank" not in found and not told and (where := _RANK_IN_PATH.search(line.source)):
        found["rank"] = where[1] or where[2]
    marks: dict[str, Any] = {key: int(found[key]) for key in ("rank", "local_rank", "pid", "gpu") if key in found}
    return replace(line, text=text.rstrip(), host=found.get("host"), seconds=seconds, **marks)


def _seconds(part: dict[str, str | None]) -> float:
    month = int(part.get("M") or _MONTHS.get(part.get("mon") or "", 1))
    days = (month - 1) * 31 + int(part["D"] or 1) + 372 * (int(part.get("Y") or 0) % 100)
    clock = int(part["h"] or 0) * 3600 + int(part["m"] or 0) * 60 + int(part["s"] or 0)
    return days * 86400.0 + clock + float(f"0.{part.get('f') or 0}")


def streams_of(lines: Iterable[Line]) -> list[Stream]:
    """One stream per writer, in order of first appearance."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        found.setdefault(line.stream, []).append(line)
    return [Stream(some) for some in found.values()]
