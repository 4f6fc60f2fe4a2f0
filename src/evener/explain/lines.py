"""One line of a log, taken apart: who wrote it (rank, host, process), when, and the text without its decoration.

Launchers mark lines in many ways, and a line may carry several marks: `[rank3]:` (torch), `3:` (srun -l),
`[default3]:` (torchrun --tee), `(Worker pid=9, ip=10.0.0.3)` (Ray), `node-1:183006:183220 [2] NCCL` (NCCL),
`worker-1: ` (pdsh), `[pod/train-0/pytorch]` (kubectl), `trainer_1  | ` (compose). Streams are told apart by them.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from evener.explain.read import Raw

_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
# A mark of another writer in the middle of a line: two processes wrote into one line.
_INSIDE = re.compile(r"(?<=\S)(?=\[rank\d+\]: )")
_PREFIXES = (
    re.compile(r"\[(?:rank|Rank|RANK)[ _:]?(?P<rank>\d+)\]:? ?"),
    re.compile(r"\[default(?P<local>\d+)\]:"),
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


@dataclass
class Stream:
    """The lines of one writer, as one text to search, and the way back from an offset to a line."""

    lines: list[Line] = field(default_factory=list)
    text: str = ""
    starts: list[int] = field(default_factory=list)

    def close(self) -> None:
        offset = 0
        for line in self.lines:
            self.starts.append(offset)
            offset += len(line.text) + 1
        self.text = "\n".join(line.text for line in self.lines)


def printable(text: str) -> str:
    """Text of a stranger without what a terminal would act on: escape sequences, control and direction characters."""
    return _CONTROL.sub("", _ANSI.sub("", text))


def parse(raws: Iterable[Raw], first_order: int = 0) -> Iterator[Line]:
    order = first_order
    for raw in raws:
        shown = printable(raw.text)
        for part in _INSIDE.split(shown) if "[rank" in shown else [shown]:
            yield _one(Line(order, raw.source, raw.number, part, part.strip()))
            order += 1


def _one(line: Line) -> Line:
    text, found = line.text, dict[str, str]()
    seconds: float | None = None
    for _ in range(5):
        head = text.lstrip() if found or seconds is not None else text
        for pattern in (_DATE, _GLOG, _SYSLOG):
            if match := pattern.match(head):
                seconds = _seconds(match.groupdict())
                found.update({"host": match["host"]} if pattern is _SYSLOG else {})
                break
        else:
            match = next((m for p in _PREFIXES if (m := p.match(head))), None)
            if match is None:
                break
            found.update({key: value for key, value in match.groupdict().items() if value is not None})
        text = head[match.end() :]
    if "rank" not in found and (said := _RANK_INSIDE.search(text)):
        found["rank"] = said[1]
    if "rank" not in found and (where := _RANK_IN_PATH.search(line.source)):
        found["rank"] = where[1] or where[2]
    rank, local, pid, gpu = (int(found[key]) if key in found else None for key in ("rank", "local", "pid", "gpu"))
    host, text = found.get("host"), text.rstrip()
    return Line(line.order, line.source, line.number, text, line.shown, rank, local, host, pid, gpu, seconds)


def _seconds(part: dict[str, str | None]) -> float:
    month = int(part.get("M") or _MONTHS.get(part.get("mon") or "", 1))
    days = (month - 1) * 31 + int(part["D"] or 1) + 372 * (int(part.get("Y") or 0) % 100)
    fraction = float(f"0.{part['f']}") if part.get("f") else 0.0
    return days * 86400.0 + int(part["h"] or 0) * 3600 + int(part["m"] or 0) * 60 + int(part["s"] or 0) + fraction


def streams_of(lines: Iterable[Line]) -> list[Stream]:
    """One stream per writer, in order of first appearance."""
    found: dict[tuple[object, ...], Stream] = {}
    for line in lines:
        found.setdefault(line.stream, Stream()).lines.append(line)
    for stream in found.values():
        stream.close()
    return list(found.values())
