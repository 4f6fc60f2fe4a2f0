"""Decisions that a regular expression cannot make: figures, ranks against each other, what a text does not say.

Each takes a match and the facts, and changes the match: another kind, a sub-cause, a stage, the culprit, values. It
returns False when the signature was a false alarm.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from evener.explain.facts import LEFT, Facts, Waited
from evener.explain.kinds import STAGES
from evener.explain.lines import TOLD, Line
from evener.explain.match import Match
from evener.explain.oom import memory

LATE = STAGES.index("messenger")
_SLOW = re.compile(
    r"(?i)\b(sav(?:e|ing)\b[\w ]{0,20}(?:checkpoint|model|state)|save_checkpoint|evaluat\w+|validat\w+|"
    r"generat(?:e|ing) samples|tokeniz\w+|preprocess\w+|download\w+|loading (?:dataset|checkpoint shards))"
)
_LOST = re.compile(r"(?i)closed by peer|reset by peer|connection refused|broken pipe|timed out|ncclRemoteError")


def timeout(match: Match, facts: Facts) -> bool:
    """Who did not come: compared within one process group; the silent rank is suspected."""
    waits = [one for one in facts.waited if one.rank is not None]
    match.rank, match.known = None, False
    if match.ended is not None and not waits and re.search(r"(?i)\bgloo\b", facts.everything):
        match.become("native-abort")  # gloo has no watchdog that aborts
        return True
    if facts.waited or match.ended is not None or re.search(r"NCCL|SeqNum|[Ww]atchdog", match.flat):
        match.values["backend"] = "NCCL"  # what only it has is advised only then
    if match.ended is not None and not waits:
        match.sub, match.confidence, match.alternatives = "abort", "low", ["native-abort", "illegal-memory-access"]
        return True
    if facts.told is not None and "did not come" in facts.told[0]:
        _blame(match, [int(facts.told["rank"])], "behind", "behind", known=True)
        return True
    if named := re.search(r"[Rr]anks? ([\d, ]+) failed to pass|send/recv from rank (\d+)", match.flat):
        _blame(match, map(int, re.findall(r"\d+", named[0])), "absent", "behind", known=True)
        return True
    match.evidence += [one.line for one in facts.waited[:8] if one.line not in match.evidence]
    by_group: dict[str, list[Waited]] = {}
    for one in waits:
        by_group.setdefault(one.group, []).append(one)
    some = max(by_group.values(), key=len, default=facts.waited)
    for one in some:
        for name, value in (("sequence", one.sequence), ("operation", one.operation), ("elements", one.elements)):
            if value is not None:
                match.values.setdefault(name, str(value))
        if one.limit_ms:
            match.values.setdefault("minutes", f"{one.limit_ms / 60000:g}")
    waiting = {one.rank for one in some if one.rank is not None}
    if not waits:  # gloo says it in an exception of the rank that waited
        said = {one.lines[0].rank for one in facts.raised if re.search(r"(?i)timed? ?out", one.text)}
        waiting = {rank for rank in said if rank is not None}
        if waiting and facts.ranks - waiting:
            _blame(match, facts.ranks - waiting, "silent", "silent")
    if waiting:
        match.values["waiting"] = listed(sorted(waiting))
    calls = {(one.operation, one.elements) for one in some if one.sequence is not None}
    silent = set(range(facts.world_size or 0)) - waiting
    if (behind := _behind(some)) is not None:
        _blame(match, [behind], "behind", "behind", known=True)
        return True
    if len(calls) > 1:
        match.sub = "different-calls"
        return True
    if waiting and silent:
        _blame(match, silent, "silent", "silent", known=len(silent) == 1)
        return True
    if any(one.elements == 1 for one in some) or re.search(r"(?i)barrier|monitored", match.flat):
        match.sub = "barrier"
    elif len(some) > 1 and len({one.sequence for one in some if one.sequence is not None}) == 1:
        match.sub = "same-sequence"
    phase = _SLOW.search("\n".join(line.text for line in facts.lines[-300:]))
    if match.sub in (None, "barrier") and phase:
        match.sub, match.values["phase"] = "slow-phase", phase[1]
    if match.sub in ("barrier", "slow-phase") and waiting and 0 not in waiting:
        match.rank = 0  # who saves and evaluates is nearly always rank 0: suspected, not known
    return True


def _blame(match: Match, ranks: Iterable[int], sub: str, value: str, *, known: bool = False) -> None:
    found = sorted(ranks)
    match.rank, match.known, match.sub, match.values[value] = one_or_all(found), known, sub, listed(found)


def _behind(waits: list[Waited]) -> int | None:
    """The one rank that had enqueued or begun less than the others."""
    for key in ("last_enqueued", "last_completed", "sequence"):
        known = [(value, one.rank) for one in waits if (value := getattr(one, key)) is not None]
        known.sort(key=lambda pair: int(pair[0]))
        if len(known) > 1 and known[0][0] < known[1][0]:
            return known[0][1]
        if key == "last_enqueued" and known and known[0][0] != known[-1][0]:
            return None
    return None


def desync(match: Match, facts: Facts) -> bool:
    """A count of 0 or an absurd one is what a rank reads from a peer that is gone; the peer is the cause."""
    found = re.search(r"[Rr]ank (\d+) has (\d+) params, while rank (\d+) has inconsistent (\d+)", match.flat)
    if found:
        _, mine, match.rank, theirs = (int(number) for number in found.groups())
        match.values |= {"params": found[2], "other": found[3], "other_params": found[4]}
        if theirs == 0 or theirs > 50 * max(mine, 1) or mine > 50 * max(theirs, 1):
            match.sub, match.stage, match.confidence = "dead-peer", LATE, "medium"
        return True
    if re.search(r"Detected mismatch between collectives|EnforceNotMet|op\.preamble\.length", match.flat):
        match.sub, match.rank, match.known = "collective", None, False  # who reports it need not be who differs
        both = re.search(r"[Rr]ank (\d+) is running (.{0,120}?), but [Rr]ank (\d+) is running", match.flat)
        if both:
            match.rank, match.known = sorted({int(both[1]), int(both[3])}), True
            match.values["operation"] = both[2][:60]
    if found := re.search(r"\[(\d+)\]: params?\[(\d+)\] in this process", match.flat):
        match.rank, match.values["parameter"] = int(found[1]), found[2]
    return True


def scale(match: Match, facts: Facts) -> bool:
    """One skipped step is the scaler at work; scales that only fall are values that are not finite."""
    falls = re.compile(r"reducing (?:loss scale )?(?:from \S+ )?to ([\d.e+-]+\d)")
    scales = [float(found[1]) for line in facts.lines if (found := falls.search(line.text))]
    skips = len(scales) or len(re.findall(r"(?i)overflow", match.flat))
    match.values |= {"skips": str(skips), "scale": f"{scales[-1]:g}" if scales else ""}
    if scales and (min(scales) < 1 or skips > 20):
        match.sub = "collapse"
        return True
    match.sub, match.confidence = "isolated", "high"
    return skips * 5 >= max(1, facts.lines_total)  # in a long log it is not worth a word


def keys(match: Match, facts: Facts) -> bool:
    """Keys that differ by a prefix, or really."""
    missing, unexpected = _names(match.flat, "Missing"), _names(match.flat, "Unexpected")
    match.values |= {"missing": str(len(missing) or ""), "unexpected": str(len(unexpected) or "")}
    if re.search(r"size mismatch for", match.flat) and not (missing or unexpected):
        match.become("ckpt-size-mismatch")
        return True
    for prefix in ("module.", "_orig_mod.", "model.", "_fsdp_wrapped_module.", "_forward_module.", "base_model.model."):
        for some, others, where in ((unexpected, missing, "checkpoint"), (missing, unexpected, "model")):
            has = [name for name in some if name.startswith(prefix)]
            bare = {name.removeprefix(prefix) for name in has}
            if has and len(has) * 2 > len(some) and (not others or bare & others or len(bare) > 2):
                match.sub = "prefix-in-" + where
                match.values["prefix"] = prefix
                return True
    if missing or unexpected:
        match.sub, match.confidence = "other-architecture", "medium"
        match.values["example"] = min(missing or unexpected)
    return True


def _names(text: str, which: str) -> set[str]:
    end = r"(?=(?:Missing|Unexpected) key|size mismatch|\Z)"
    found = re.search(rf"{which} key\(s\) in state_dict:?(.*?){end}", text, re.DOTALL)
    return set(re.findall(r"[\"']([\w.]+)[\"']", found[1])) if found else set()


def port(match: Match, facts: Facts) -> bool:
    """Four causes: another job; a launcher per task; every worker thinks it is rank 0; a port in the code."""
    said = re.search(r"(?:port:? ?|:)(\d{3,5})\b(?=[ ,.(]|$)", match.flat)
    match.values["port"] = said[1] if said else ""
    given = re.search(r"MASTER_PORT[=: '\"]+(\d+)|master[_-]port[= ](\d+)", facts.everything)
    taken = re.compile(r"EADDRINUSE|errno: 98|already in use")
    binders = {line.rank for line in facts.lines if line.rank is not None and taken.search(line.text)}
    if re.search(r"\bSLURM|srun:|slurmstepd", facts.everything):
        match.sub = "launcher-per-task"
    elif len(binders) > 1:
        match.sub, match.rank = "all-are-rank-0", sorted(binders)
    elif said and given:
        match.sub = "port-in-code" if said[1] not in given.groups() else "other-job"
    elif said and said[1] == "29500":
        match.sub = "other-job"
    return True


def duplicate(match: Match, facts: Facts) -> bool:
    found = re.search(r"rank (\d+) and rank (\d+) both on CUDA device ([0-9a-fA-F]+)", match.flat)
    if found:
        match.rank = sorted({int(found[1]), int(found[2])})
        match.values |= {"ranks": listed(match.rank), "bus": found[3]}
        if len(found[3]) <= 8:
            match.values["pci"] = f"{int(found[3], 16) >> 12:02x}"
    by_task = found and any(re.match(r"\d+: ", line.shown) for line in match.evidence)
    if by_task or re.search(r"SLURM|srun", facts.everything):
        match.sub = "slurm"
    elif re.search(r"device\s*=\s*['\"]cuda(?::0)?['\"]|\.cuda\(0\)|set_device\(0\)", facts.everything):
        match.sub = "hard-coded"
    return True


def messenger(match: Match, facts: Facts) -> bool:
    """A rank that reports a lost peer is a victim. When all but one are victims, the other one is left."""
    victims = {match.rank} if isinstance(match.rank, int) else set()
    victims |= {rank for one in facts.raised if _LOST.search(one.text) and (rank := one.lines[0].rank) is not None}
    match.rank, match.known = None, False
    table = {one.rank for one in facts.ended if one.summary and one.code not in (-15, -2)}
    if table and table <= {line.rank for line in facts.lines if _LOST.search(line.text)}:
        match.become("torchrun-hidden-root-cause")
        match.stage = LATE
        return launcher(match, facts)
    rest = (facts.ranks | set(range(facts.world_size or 0))) - victims
    ended = any(one.rank in rest for one in facts.ended)
    if victims and len(rest) == 1 and (ended or facts.world_size == len(victims | rest)):
        match.rank, match.known = min(rest), ended
    if facts.told is not None and int(facts.told["rank"]) not in victims:
        match.rank, match.known = int(facts.told["rank"]), True
    if found := re.search(r"(?:peer|from|with|localRank) \[?([\w.:-]+?)\]?<(\d+)>|by peer \[([^\]]+)\]", match.flat):
        match.values["peer"] = found[1] or found[3]
    return True


def left(match: Match, facts: Facts) -> bool:
    """A rank that ended by its own will is to blame only where all that failed miss a peer."""
    match.values["script"] = script_of(facts)
    fate = None if match.ended is None else facts.fates.get(-1 if match.ended.rank is None else match.ended.rank)
    raised = [one.text for one in facts.raised if one.type != "SystemExit"]
    return fate is None or fate.how is None or (bool(raised) and all(map(_LOST.search, raised)))


def uneven(match: Match, facts: Facts) -> bool:
    """A rank whose script came to its end is the cause; what only mentions uneven inputs explains something else."""
    if match.ended is None and "rank" not in match.values:
        return True
    match.stage, match.sub = STAGES.index("failure"), "finished"
    return left(match, facts)


def script_of(facts: Facts) -> str:
    """The script's file, where a traceback begins in it."""
    frames = (frame for one in facts.raised for frame in one.own_frames()[:1] if frame.function == "<module>")
    return next((frame.file for frame in frames), "")


def launcher(match: Match, facts: Facts) -> bool:
    """Only a launcher speaks. The process that ended by itself is named, as far as it can be."""
    victims = {one.lines[0].rank for one in facts.raised if _LOST.search(one.text)}
    tables = {one.local_rank: one.rank for one in facts.ended if one.summary}
    named = [
        one
        for one in facts.ended
        if one.code not in (-15, -2) and one.pid not in facts.stopped and one.who is not None
        if (one.rank if one.rank is not None else tables.get(one.local_rank)) not in victims
    ]
    if named:
        first = min(named, key=lambda one: (one.summary, one.line.order))
        match.rank = tables.get(first.local_rank, first.who) if first.rank is None else first.who
        match.known = True
        match.values |= {"code": str(first.code) if first.code < LEFT else "", "pid": str(first.pid or "")}
        match.evidence = [first.line, *match.evidence]
        return True
    told = sorted(rank for rank in victims if rank is not None)
    rest = sorted(({rank for rank in tables.values() if rank is not None} or facts.ranks) - victims) if victims else []
    match.rank, match.known = one_or_all(rest) if rest else None, len(rest) == 1
    if told or rest:
        match.sub, match.values["victims"] = "victim-named", listed(told)
    return True


def stopped(match: Match, facts: Facts) -> bool:
    """A launcher that was asked to stop, before any rank had failed, has written down where each rank stood."""
    if match.line.text.startswith("evener: stopped by SIG"):
        match.stage, match.confidence, match.rank, match.known = 0, "high", None, False
        match.evidence += below(match, facts)
        if found := re.search(r"look at ranks? ([\d, -]+): the others", match.flat):
            match.rank = spelled_out(found[1])
    return True


def hang(match: Match, facts: Facts) -> bool:
    """The launcher has seen it with own eyes: whatever the ranks say is how it ended them."""
    match.stage, match.evidence = 0, [*match.evidence, *below(match, facts)]
    match.rank, match.known = spelled_out(match.values["silent"]), True
    waits = [found[1] for line in match.evidence if (found := re.match(r"  rank (\d+) waits ", line.text))]
    match.values["waiting"] = ", ".join(waits)
    if "wait for each other" in match.line.text:
        match.rank, match.known, match.sub = None, False, "each-other"
    return True


def below(match: Match, facts: Facts) -> list[Line]:
    """The indented lines that the launcher put below the match's."""
    found: list[Line] = []
    for line in facts.lines:
        if line.order > match.line.order and line.source == match.line.source:
            if not line.text.startswith("  ") or line.number != match.line.number + len(found) + 1:
                break
            found.append(line)
    return found


def spelled_out(ranks: str) -> int | list[int]:
    """ "0, 2-4" as [0, 2, 3, 4]."""
    spans = [part.split("-") for part in ranks.split(", ")]
    return one_or_all([rank for span in spans for rank in range(int(span[0]), int(span[-1]) + 1)])


def own_error(match: Match, facts: Facts) -> bool:
    """evener's own errors carry their evidence and fix: they are handed through."""
    text = match.text
    if match.raised is not None:  # not the exception that it was raised from
        text = next((f"{kind}: {said}" for kind, said in match.raised.links if "evener.errors." in kind), text)
    first, *more = text.splitlines() or [""]
    if re.match(r"evener: (?!ranks? \d)", match.line.text):  # its sentence may end with another exception's
        first = match.line.text
    cause = re.sub(r"^(?:evener: |evener\.errors\.\w+: |\w+Error: )+", "", first).strip()
    end = next((n for n, line in enumerate(more) if not line.startswith("  ")), len(more))
    told = [line.strip() for line in more[:end] if not re.match(r" +at \S+:\d+", line)]
    begin = next((n for n, line in enumerate(told) if line.startswith("fix: ")), len(told))
    fixes = [line.removeprefix("fix: ") for line in told[begin:]]
    match.values |= {"message": cause, "told": "; ".join(told[:begin]), "fix": "\n".join(fixes)}
    return bool(cause)


def plain_exception(match: Match, facts: Facts) -> bool:
    raised = match.raised
    if raised is None:
        return True
    kind, message = raised.links[0]
    name = kind.rpartition(".")[2]
    if name in ("SystemExit", "KeyboardInterrupt"):
        return name == "KeyboardInterrupt" and bool(raised.frames)
    match.values |= {"type": name, "message": message.partition("\n")[0][:300]}
    # torchrun's closing table says nothing of it; `evener run` has recorded every rank's exception.
    if any(one.summary for one in facts.ended) and not facts.fates:
        match.become("torchrun-hidden-root-cause")
        match.sub, match.stage = "exception-above", STAGES.index("exception")
    if own := raised.own_frames():
        match.values |= {"place": f"{own[-1].file}:{own[-1].line}", "code": own[-1].code}
        match.values["script"] = next((one.file for one in own if one.function == "<module>"), "")
    if (count := max(len(facts.ranks), facts.world_size or 0)) > 1:
        match.values["processes"] = str(count)
    if not (raised.frames or match.line.text.lstrip().startswith(kind) or TOLD.match(match.line.text)):
        match.stage, match.confidence = STAGES.index("summary"), "low"  # a log line that mentions an error
    return True


def one_or_all(ranks: list[int]) -> int | list[int]:
    return ranks[0] if len(ranks) == 1 else ranks


def listed(ranks: int | list[int]) -> str:
    return ", ".join(map(str, ranks if isinstance(ranks, list) else [ranks]))


_ALL: tuple[Callable[[Match, Facts], bool], ...] = (memory, timeout, desync, scale, keys, port, duplicate, messenger)
_ALL += (left, uneven, launcher, stopped, hang, own_error, plain_exception)
DECISIONS = {function.__name__: function for function in _ALL}
