"""Facts in a log: exceptions with their frames, how processes ended, what waited for whom. Nothing is judged here.

Everything has its lines, its rank where the text says one, and its place in time, so that roots can be found later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from evener.explain.lines import TOLD, Line, streams_of

_TRACEBACK = re.compile(r"(?:Original )?Traceback \(most recent call last\)|Original Traceback|^Traceback")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]*)", line (?P<line>\d+)(?:, in (?P<function>\S+))?')
_NAME = r"(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Iteration|Exit|Warning|Unsupported|Failed|Stopped)"
_NAME += r"|(?:jaxlib|pynvml|subprocess|_pickle|torch)\.[\w.]+|[a-z]\w*\.error"
# An exception's line: at the start of a line, or behind a log record's head or "raised: ".
_EXCEPTION = re.compile(rf"^\s*(?:E   )?(?P<type>{_NAME})(?::(?: (?P<message>.*)|\s*)$|\s*$)")
_LATER = re.compile(rf"(?:^|[\s\]:|>-])(?P<type>{_NAME}): (?P<message>\S.*)$")
_CHAIN = re.compile(r"The above exception was the direct cause|During handling of the above exception")
_HEAD = re.compile(
    r"^\s*(?:Traceback \(|File \"|\[?(?:INFO|WARNING|ERROR|DEBUG|WARN)\b|ERROR:|WARNING:|srun: |slurmstepd: |"
    r"Root Cause|Failures:|=====|------|terminate called|Fatal Python error|evener: )"
)
_NOT_RAISED = ("Warning", "ChildFailedError", "CalledProcessError", "ProcessRaisedException", "ProcessExitedException")
_SPAWNED = re.compile(r"-- Process (\d+) terminated with the following error")


class Frame(NamedTuple):
    file: str
    line: int
    function: str
    code: str


@dataclass
class Raised:
    """An exception and those it was raised from; `links` are the (type, message) pairs, the first raised first."""

    links: list[tuple[str, str]]
    frames: list[Frame]
    lines: list[Line]  # of the messages; the last link's first line is where it was printed

    @property
    def type(self) -> str:
        return self.links[-1][0].rpartition(".")[2]

    @property
    def text(self) -> str:
        return "\n".join(f"{kind}: {message}" for kind, message in self.links)

    @property
    def code(self) -> str:
        """The frames as one text: files, functions and source lines, to look for the phase in."""
        return "\n".join(f"{frame.file}:{frame.function}: {frame.code}" for frame in self.frames)

    def own_frames(self) -> list[Frame]:
        """The frames outside of installed packages and the standard library, outermost first."""
        library = re.compile(r"site-packages|dist-packages|lib/python3|\.\.\./(?:torch|lib)/|<frozen|^torch/|/torch/")
        return [frame for frame in self.frames if not library.search(frame.file)]


@dataclass
class Ended:
    """How one process ended, as its launcher, the kernel or a scheduler tells it. Negative codes are signals."""

    code: int
    line: Line
    rank: int | None = None
    local_rank: int | None = None
    pid: int | None = None
    host: str | None = None
    summary: bool = False  # from torchrun's closing table, whose order tells nothing

    @property
    def who(self) -> int | None:
        return self.rank if self.rank is not None else self.local_rank


@dataclass
class Waited:
    """A collective that timed out on one rank."""

    line: Line
    rank: int | None
    group: str = "0"
    sequence: int | None = None
    operation: str | None = None
    elements: int | None = None
    limit_ms: int | None = None
    last_enqueued: int | None = None
    last_completed: int | None = None


@dataclass(frozen=True)
class Fate:
    """What a launcher recorded about the end of one rank, beside its output.

    Attributes:
        how: "exception", "exit", "finished", "interrupted", or None when the rank left without a word.
        code: The exit code, negative for a signal; None when nobody saw it.
        stopped: The launcher asked it to stop.
        seconds: When, on a clock that all ranks share; None without a record.
        tracebacks: (module and type, message, traceback text), the outermost exception first.
    """

    rank: int
    how: str | None = None
    code: int | None = None
    pid: int | None = None
    stopped: bool = False
    seconds: float | None = None
    tracebacks: tuple[tuple[str, str, str], ...] = ()


class Facts:
    """All facts of a text. stopped: process ids that a launcher ended; ranks: that wrote or were told about."""

    def __init__(self, lines: list[Line], lines_total: int, fates: Iterable[Fate] = ()) -> None:
        self.lines, self.lines_total = lines, lines_total
        self.fates = {fate.rank: fate for fate in fates}
        self.streams = streams_of(lines)
        self.everything = "\n".join(line.text for line in lines)  # what stands far off may say what is behind a message
        self.told = TOLD.search(self.everything)  # what `evener run` says of one rank
        self.told = self.told if self.told and not self.told["more"] else None
        once: dict[object, Raised] = {}
        for one in [one for stream in self.streams for one in _exceptions(stream.lines)]:
            # A rank's log and its record have the same exception.
            once.setdefault((one.lines[-1].rank, one.type, one.links[-1][1][:200]) if self.fates else id(one), one)
        self.raised = sorted(once.values(), key=lambda one: one.lines[0].order)
        self.stopped = {int(pid) for pid in re.findall(r"process (\d+) closing signal", self.everything)}
        self.stopped |= {fate.pid for fate in self.fates.values() if fate.stopped and fate.pid is not None}
        self.ended = [*_ends(lines), *_ends_of_fates(self.fates.values(), lines[-1].order + 1 if lines else 0)]
        self.waited = _waits(lines)
        told: list[Any] = [*lines, *self.waited, *self.ended, *self.fates.values()]
        self.ranks: set[int] = {one.rank for one in told if one.rank is not None}
        sizes = [int(next(filter(None, match.groups()))) for match in _WORLD.finditer(self.everything)]
        self.world_size = max(sizes, default=None)


_WORLD = re.compile(
    r"\bworld[ _-]?size\W{1,4}(\d{1,5})\b|--nproc[_-]per[_-]node[= ](\d+)|nranks (\d+)|\d+/(\d+) clients joined|"
    r"\bMEMBER: \d+/(\d+)"
)


# --- exceptions -----------------------------------------------------------------------------------------------------


def _exceptions(lines: list[Line]) -> list[Raised]:
    found: list[Raised] = []
    frames: list[Frame] = []
    chained = False
    spawned: int | None = None  # whose traceback torch.multiprocessing.spawn passes on
    i = 0
    while i < len(lines):
        text = lines[i].text
        if _CHAIN.search(text):
            chained = True
        elif _TRACEBACK.search(text):
            frames = []
        elif match := _FRAME.match(text):
            code = lines[i + 1].text.strip() if i + 1 < len(lines) else ""
            code = "" if _FRAME.match(code) or _EXCEPTION.match(code) else code
            frames.append(Frame(match["file"], int(match["line"]), match["function"] or "", code))
        elif match := _exception(text, framed=bool(frames)):
            taken = [lines[i]]
            while i + 1 < len(lines) and len(taken) < 40 and _continues(lines[i + 1], taken):
                i += 1
                taken.append(lines[i])
            message = "\n".join([match["message"] or "", *(line.text for line in taken[1:])]).strip()
            if spawned is not None:
                taken = [line if line.rank is not None else replace(line, rank=spawned) for line in taken]
            if passed_on := _SPAWNED.search(message):
                spawned = int(passed_on[1])
            one = Raised([(match["type"], message)], frames, taken)
            if chained and found:
                last = found[-1]
                found[-1] = Raised([*last.links, *one.links], [*last.frames, *one.frames], last.lines + one.lines)
            elif not one.type.endswith(_NOT_RAISED) or (frames and one.type.endswith("Warning")):
                found.append(one)
            chained, frames = False, []
        i += 1
    return found


def _exception(text: str, *, framed: bool) -> re.Match[str] | None:
    if match := _EXCEPTION.match(text):
        # A word alone on a line is an exception only at the end of a traceback.
        return match if framed or match["message"] is not None or text.rstrip().endswith(":") else None
    match = _LATER.search(text) if re.search("(?:rror|xception|teration): ", text) else None
    return match if match and not match["type"].endswith(_NOT_RAISED) else None


def _continues(line: Line, taken: list[Line]) -> bool:
    """Whether `line` belongs to the message that `taken` began."""
    text = line.text
    indented = text.startswith((" ", "\t"))
    if (line.seconds is not None and not indented) or any(one.search(text) for one in (_HEAD, _CHAIN, _TRACEBACK)):
        return False
    if line.number > taken[-1].number + 4:
        return False
    return indented or not _EXCEPTION.match(text)


# --- ends of processes ----------------------------------------------------------------------------------------------

_SIGNALS = {"SIGHUP": 1, "SIGINT": 2, "SIGQUIT": 3, "SIGILL": 4, "SIGTRAP": 5, "SIGABRT": 6, "SIGBUS": 7, "SIGFPE": 8}
_SIGNALS |= {"SIGKILL": 9, "SIGSEGV": 11, "SIGTERM": 15, "SIGUSR1": 10, "SIGUSR2": 12}
_SAID = {"Killed": 9, "Bus error": 7, "Segmentation fault": 11, "Aborted": 6, "Terminated": 15, "Hangup": 1}
_SAID |= {"Floating point exception": 8, "Illegal instruction": 4}
_WORDS = "|".join(_SAID)
_NAMES = "|".join(_SIGNALS)
_AGENT = re.compile(r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local>\d+) \(pid: (?P<pid>\d+)\)")
_TABLE_RANK = re.compile(r"^\s*rank\s*: (?P<rank>\d+) \(local_rank: (?P<local>\d+)\)")
_TABLE_CODE = re.compile(r"^\s*exitcode\s*: (?P<code>-?\d+)(?: \(pid: (?P<pid>\d+)\))?")
_TABLE_HOST = re.compile(r"^\s*host\s*: (?P<host>\S+)")
_ENDS = (
    re.compile(rf"[Pp]rocess (?P<rank>\d+) terminated with (?:signal (?P<name>{_NAMES})|exit code (?P<code>\d+))"),
    re.compile(rf"died with <Signals\.(?P<name>{_NAMES})"),
    re.compile(r"exits with return code = (?P<code>-?\d+)"),
    re.compile(rf"task (?P<rank>\d+): (?P<said>{_WORDS})"),
    re.compile(r"tasks? (?P<rank>\d+)[-,\d]*: Exited with exit code (?P<code>\d+)"),
    re.compile(rf"rank (?P<rank>\d+) (?:was killed by|died of) (?P<name>{_NAMES})"),
    re.compile(r"rank (?P<rank>\d+) left with exit code (?P<code>\d+)"),
    re.compile(r"(?:non-zero exit status|exit code|exit status|exitcode)[ :=]+(?P<code>-?\d+)\b"),
    re.compile(rf"(?:returned|terminated|exited|killed)\b.{{0,40}}\((?P<name>{_NAMES})\)"),
    re.compile(rf"^(?:.*line \d+: +(?P<pid>\d+) )?(?P<said>{_WORDS})(?: *\(core dumped\))?(?: +\S.*)?$"),
    re.compile(r"Fatal Python error: (?P<said>Segmentation fault|Bus error|Aborted)"),
)
_HINT = re.compile("exit|erminat|died|task|[Kk]illed|Bus err|Segment|Abort|Hangup|Floating|rank |returned|Illegal")


def _ends(lines: list[Line]) -> list[Ended]:
    found: list[Ended] = []
    entry: Ended | None = None
    host: str | None = None
    for n, line in enumerate(lines):
        text = line.text
        if "failed (exitcode" in text and n + 1 < len(lines):
            text = f"{text} {lines[n + 1].text}"  # where a terminal has broken the line
        if match := _AGENT.search(text):
            found.append(Ended(int(match["code"]), line, None, int(match["local"]), int(match["pid"])))
        elif match := _TABLE_HOST.match(text):
            host = match["host"]
        elif match := _TABLE_RANK.match(text):
            entry = Ended(0, line, int(match["rank"]), int(match["local"]), None, host, summary=True)
        elif entry is not None and (match := _TABLE_CODE.match(text)):
            entry.code, entry.line, entry.pid = int(match["code"]), line, int(match["pid"]) if match["pid"] else None
            found.append(entry)
        elif _HINT.search(text) and (not re.search(r"\w+Error: ", text) or re.search("(terminated|died) with", text)):
            found += _end_in(line)  # not of an exception's message: its own kind says what it means
    return found


def _ends_of_fates(fates: Collection[Fate], order: int) -> list[Ended]:
    """Ranks that ended without an exception of their own, from their launcher's record."""
    found: list[Ended] = []
    over = any(one.how is not None or one.code is not None or one.stopped for one in fates)
    failed = min((one.seconds for one in fates if one.how == "exception" and one.seconds is not None), default=0.0)
    for fate in fates:
        code = fate.code
        if over and fate.how is None and code is None and not fate.stopped and fate.pid is not None:
            code = 0  # it was not there any more when the launcher stopped the others
        quiet = fate.how in (None, "exit", "finished")
        if not quiet or code is None or (code >= 0 and fate.tracebacks):
            continue  # nothing to tell, nobody knows (the job may still be running), or SystemExit with a message
        before = fate.seconds is not None and fate.seconds < failed
        early = fate.how is not None and 0 <= code < _OWN_CODES and before
        if code == 0 and fate.how is not None and not early:
            continue
        said = f"rank {fate.rank} ended with exit code {code}"
        if code < 0:
            name = next((name for name, number in _SIGNALS.items() if number == -code), str(-code))
            said = f"rank {fate.rank} was killed by {name} ({-code})"
        elif fate.how is None:
            said = f"rank {fate.rank} left with exit code {code} in the middle of the script"
        elif early and fate.how == "finished":
            said = f"rank {fate.rank} finished its script before the others"
        elif early:
            said = f"rank {fate.rank} left with exit code {code} before the others"
        line = Line(order + len(found), "record", 0, said, said, fate.rank, pid=fate.pid, seconds=fate.seconds)
        left = early or (fate.how is None and code in (0, 1))
        code = FINISHED if early and fate.how == "finished" else LEFT if left else code
        found.append(Ended(code, line, fate.rank, None, fate.pid))
    return found


# No exit codes: a rank that left in the middle of its script, or before the others, without a word; one whose script
# had come to its end before the others'.
LEFT, FINISHED = 1000, 1001
_OWN_CODES = 64  # from here on exit codes are evener's, and say why


def lines_of_fate(fate: Fate) -> list[str]:
    """The record's exceptions as the interpreter would have printed them."""
    parts = [text.rstrip().splitlines() for _, _, text in reversed(fate.tracebacks)]
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    return [line for n, part in enumerate(parts) for line in ([*between, *part] if n else part)]


def _end_in(line: Line) -> list[Ended]:
    match = next((match for pattern in _ENDS if (match := pattern.search(line.text))), None)
    if match is None:
        return []
    part = match.groupdict()
    code = int(part.get("code") or 0)
    code = 128 - code if 128 < code < 160 else code
    if word := part.get("name") or part.get("said"):
        code = -(_SIGNALS | _SAID)[word]
    rank, pid = (int(part[key]) if part.get(key) else None for key in ("rank", "pid"))
    return [Ended(code, line, line.rank if rank is None else rank, pid=pid, host=line.host)] if code else []


# --- waiting --------------------------------------------------------------------------------------------------------

_RANK = re.compile(r"\bRank (\d+)\]|\[rank(\d+)\]")
_GROUP = re.compile(r"\[PG (?:ID )?(\w+)")
_WORK = re.compile(r"Work(?:NCCL|Gloo|XCCL|RCCL|HCCL)?\((?P<fields>[^)]*(?:\(ms\)[^)]*)?)\)")
_PROGRESS = re.compile(
    r"last enqueued(?: \w+)? work: (?P<enqueued>-?\d+), last completed(?: \w+)? work: (?P<completed>-?\d+)"
)


def _waits(lines: list[Line]) -> list[Waited]:
    """One per rank and process group, put together from the lines that tell about it."""
    found: dict[tuple[int | None, str], Waited] = {}
    groups: dict[int | None, str] = {}
    for n, line in enumerate(lines):
        text = line.text
        if ("Work" in text or "last enq" in text) and len(text) < 110:
            text = " ".join(one.text for one in lines[n : n + 3] if one.number <= line.number + 2)
        if not re.search("(?i)timeout|timed out|last enqueued", text):
            continue
        work, progress = _WORK.search(text), _PROGRESS.search(text)
        if work is None and progress is None:
            continue
        said, group = _RANK.search(text), _GROUP.search(text)
        rank = int(said[1] or said[2]) if said else line.rank
        if group:
            groups.setdefault(rank, group[1])
        key = (rank, group[1] if group else groups.get(rank, ""))
        if key not in found and key[1] and (rank, "") in found:
            found[key] = found.pop((rank, ""))
        one = found.setdefault(key, Waited(line, rank))
        one.group = key[1] or "0"
        if work:
            fields = dict(re.findall(r"([\w()]+)=([\w.\[\], ]+?)(?=,|$)", work["fields"]))
            one.sequence = _number(fields.get("SeqNum"), one.sequence)
            one.elements = _number(fields.get("NumelIn"), one.elements)
            if shape := re.findall(r"\d+", fields.get("TensorShape", "")):
                one.elements = math.prod(map(int, shape))
            one.limit_ms = _number(fields.get("Timeout(ms)"), one.limit_ms)
            one.operation = fields.get("OpType", one.operation)
        if progress:
            one.last_enqueued, one.last_completed = int(progress["enqueued"]), int(progress["completed"])
    return list(found.values())


def _number(text: str | None, other: int | None) -> int | None:
    return int(text) if text and text.isdigit() else other
