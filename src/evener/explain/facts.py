"""Facts in a log: exceptions with their frames, how processes ended, what waited for whom. Nothing is judged here.

Everything has its lines, its rank where the text says one, and its place in time, so that roots can be found later.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from evener.explain.lines import Line, Stream

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


@dataclass(frozen=True)
class Frame:
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

    def user_frame(self) -> Frame | None:
        """The innermost frame outside of installed packages and the standard library."""
        library = re.compile(r"site-packages|dist-packages|lib/python3|\.\.\./(?:torch|lib)/|<frozen|^torch/|/torch/")
        own = [frame for frame in self.frames if not library.search(frame.file)]
        return own[-1] if own else None


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
    error: str = ""

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


@dataclass
class Facts:
    """All facts of a text."""

    lines: list[Line]
    streams: list[Stream]
    raised: list[Raised] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    waited: list[Waited] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)  # process ids that a launcher ended
    ranks: set[int] = field(default_factory=set)  # that wrote anything or were told about
    world_size: int | None = None
    lines_total: int = 0
    fates: dict[int, Fate] = field(default_factory=dict)

    @functools.cached_property
    def everything(self) -> str:
        """All lines as one text: what stands far from a message may say what is behind it."""
        return "\n".join(line.text for line in self.lines)


def gather(lines: list[Line], streams: list[Stream], lines_total: int, fates: Iterable[Fate] = ()) -> Facts:
    facts = Facts(lines, streams, lines_total=lines_total, fates={fate.rank: fate for fate in fates})
    once: dict[object, Raised] = {}
    for one in [one for stream in streams for one in _exceptions(stream.lines)]:
        # A rank's log and its record have the same exception.
        once.setdefault((one.lines[-1].rank, one.type, one.links[-1][1][:200]) if facts.fates else id(one), one)
    facts.raised += once.values()
    facts.raised.sort(key=lambda one: one.lines[0].order)
    facts.ended = [*_ends(lines), *_ends_of_fates(facts)]
    facts.waited = _waits(lines)
    facts.ranks |= {line.rank for line in lines if line.rank is not None}
    facts.ranks |= {one.rank for one in facts.waited if one.rank is not None}
    facts.ranks |= {one.rank for one in facts.ended if one.rank is not None}
    for line in lines:
        if "closing signal" in line.text and (match := re.search(r"process (\d+) closing signal", line.text)):
            facts.stopped.add(int(match[1]))
        for match in _WORLD.finditer(line.text):
            facts.world_size = max(facts.world_size or 0, int(next(filter(None, match.groups()))))
    return facts


_WORLD = re.compile(
    r"\bworld[ _-]?size\W{1,4}(\d{1,5})\b|--nproc[_-]per[_-]node[= ](\d+)|nranks (\d+)|\d+/(\d+) clients joined"
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
            code = lines[i + 1].text.strip() if i + 1 < len(lines) and not _FRAME.match(lines[i + 1].text) else ""
            code = "" if _EXCEPTION.match(code) else code
            frames.append(Frame(match["file"], int(match["line"]), match["function"] or "", code))
        elif match := _exception(text, framed=bool(frames)):
            kind, message = match["type"], match["message"] or ""
            taken = [lines[i]]
            while i + 1 < len(lines) and len(taken) < 40 and _continues(lines[i + 1], taken):
                i += 1
                taken.append(lines[i])
            if spawned is not None:
                taken = [line if line.rank is not None else replace(line, rank=spawned) for line in taken]
            message = "\n".join([message, *(line.text for line in taken[1:])]).strip()
            if passed_on := _SPAWNED.search(message):
                spawned = int(passed_on[1])
            one = Raised([(kind, message)], frames, taken)
            if chained and found:
                last = found[-1]
                found[-1] = Raised([*last.links, *one.links], [*last.frames, *one.frames], last.lines + one.lines)
            elif not kind.endswith(_NOT_RAISED) or (frames and kind.endswith("Warning")):
                found.append(one)
            chained, frames = False, []
        i += 1
    return found


def _exception(text: str, *, framed: bool) -> re.Match[str] | None:
    if match := _EXCEPTION.match(text):
        if match["message"] is None and not (framed or text.rstrip().endswith(":")):
            return None  # a word alone on a line is an exception only at the end of a traceback
        return match
    if "rror: " in text or "xception: " in text or "teration: " in text:
        match = _LATER.search(text)
        if match and not match["type"].endswith(_NOT_RAISED):
            return match
    return None


def _continues(line: Line, taken: list[Line]) -> bool:
    """Whether `line` belongs to the message that `taken` began."""
    text = line.text
    if line.seconds is not None or _HEAD.match(text) or _CHAIN.search(text) or _TRACEBACK.search(text):
        return False
    if line.number > taken[-1].number + 4:
        return False
    return not (_EXCEPTION.match(text) and not text.startswith((" ", "\t")))


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
_TABLE_ERROR = re.compile(r"^\s*(?:error_file|traceback)\s*: (?P<text>.*)")
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


def _ends(lines: Iterable[Line]) -> list[Ended]:
    found: list[Ended] = []
    entry: Ended | None = None
    host: str | None = None
    for n, line in enumerate(chosen := list(lines)):
        text = line.text
        if "failed (exitcode" in text and n + 1 < len(chosen):
            text = f"{text} {chosen[n + 1].text}"  # where a terminal has broken the line
        if match := _AGENT.search(text):
            found.append(Ended(int(match["code"]), line, None, int(match["local"]), int(match["pid"])))
        elif match := _TABLE_HOST.match(text):
            host = match["host"]
        elif match := _TABLE_RANK.match(text):
            entry = Ended(0, line, int(match["rank"]), int(match["local"]), None, host, summary=True)
        elif entry is not None and (match := _TABLE_CODE.match(text)):
            entry.code, entry.line = int(match["code"]), line
            entry.pid = int(match["pid"]) if match["pid"] else None
            found.append(entry)
        elif entry is not None and (match := _TABLE_ERROR.match(text)):
            entry.error += f"{match['text']}\n"
        elif _HINT.search(text) and (not re.search(r"\w+Error: ", text) or re.search("(terminated|died) with", text)):
            found += _end_in(line)  # not of an exception's message: its own kind says what it means
    return found


def _ends_of_fates(facts: Facts) -> list[Ended]:
    """Ranks that ended without an exception of their own, from their launcher's record."""
    found = []
    facts.ranks |= facts.fates.keys()
    order = facts.lines[-1].order + 1 if facts.lines else 0
    over = any(one.how is not None or one.code is not None or one.stopped for one in facts.fates.values())
    for fate in facts.fates.values():
        if fate.stopped and fate.pid is not None:
            facts.stopped.add(fate.pid)
        quiet = fate.how in (None, "exit") or (fate.how == "finished" and fate.code not in (0, None))
        # Where nobody's end is recorded, the job may still be running.
        gone = over and fate.how is None and fate.code is None and not fate.stopped and fate.pid is not None
        if not gone and (not quiet or fate.code is None or (fate.code == 0 and fate.how == "exit")):
            continue
        if gone:  # it was not there any more when the launcher stopped the others
            fate = replace(fate, code=0)
        assert fate.code is not None
        if fate.code >= 0 and fate.tracebacks:
            continue  # SystemExit with a message
        said = f"rank {fate.rank} ended with exit code {fate.code}"
        if fate.code < 0:
            name = next((name for name, number in _SIGNALS.items() if number == -fate.code), str(-fate.code))
            said = f"rank {fate.rank} was killed by {name} ({-fate.code})"
        elif fate.how is None:
            said = f"rank {fate.rank} left with exit code {fate.code} in the middle of the script"
        line = Line(order, "record", 0, said, said, fate.rank, pid=fate.pid, seconds=fate.seconds)
        code = LEFT if fate.how is None and fate.code in (0, 1) else fate.code
        found.append(Ended(code, line, fate.rank, None, fate.pid))
        order += 1
    return found


LEFT = 1000  # no exit code: a rank that left in the middle of its script, with 0 or 1, without a word


def lines_of_fate(fate: Fate) -> list[str]:
    """The record's exceptions as the interpreter would have printed them."""
    parts = [text.rstrip().splitlines() for _, _, text in reversed(fate.tracebacks)]
    between = ["", "During handling of the above exception, another exception occurred:", ""]
    return [line for n, part in enumerate(parts) for line in ([*between, *part] if n else part)]


def _end_in(line: Line) -> list[Ended]:
    for pattern in _ENDS:
        match = pattern.search(line.text)
        if match is None:
            continue
        part = match.groupdict()
        if part.get("name"):
            code = -_SIGNALS[part["name"] or ""]
        elif part.get("said"):
            code = -_SAID[part["said"] or ""]
        else:
            code = int(part.get("code") or 0)
            code = 128 - code if 128 < code < 160 else code
        if code:
            rank = int(part["rank"]) if part.get("rank") else line.rank
            return [Ended(code, line, rank, pid=int(part["pid"]) if part.get("pid") else None, host=line.host)]
        return []
    return []


# --- waiting --------------------------------------------------------------------------------------------------------

_RANK = re.compile(r"\bRank (\d+)\]|\[rank(\d+)\]")
_GROUP = re.compile(r"\[PG (?:ID )?(\w+)")
_WORK = re.compile(r"Work(?:NCCL|Gloo|XCCL|RCCL|HCCL)?\((?P<fields>[^)]*(?:\(ms\)[^)]*)?)\)")
_PROGRESS = re.compile(
    r"last enqueued(?: \w+)? work: (?P<enqueued>-?\d+), last completed(?: \w+)? work: (?P<completed>-?\d+)"
)


def _waits(lines: Iterable[Line]) -> list[Waited]:
    """One per rank and process group, put together from the lines that tell about it."""
    found: dict[tuple[int | None, str], Waited] = {}
    groups: dict[int | None, str] = {}
    for n, line in enumerate(chosen := list(lines)):
        text = line.text
        if ("Work" in text or "last enq" in text) and len(text) < 110:
            text = " ".join(one.text for one in chosen[n : n + 3] if one.number <= line.number + 2)
        if "imeout" not in text and "last enqueued" not in text and "timed out" not in text.lower():
            continue
        work, progress = _WORK.search(text), _PROGRESS.search(text)
        if work is None and progress is None:
            continue
        said = _RANK.search(text)
        rank = int(said[1] or said[2]) if said else line.rank
        if group := _GROUP.search(text):
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
