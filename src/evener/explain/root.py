"""From all matches to one root: what broke first, on which rank, and what is only its consequence.

The order: a broken card; a device assert; a process that failed by itself; a rank that says its peer is gone;
a watchdog; a process that was ended; the launcher's summary. Within one stage the earlier one, by clock where both have
one, else by place in the text. A kind may name others that are its cause (`after`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener.explain import decide
from evener.explain.facts import Facts
from evener.explain.kinds import STAGES
from evener.explain.match import GENERIC, Match, find_matches, first_group

STOPPED = STAGES.index("stopped")


@dataclass
class Root:
    """The match to answer with, and the others: consequences, and what else it could be."""

    match: Match
    consequences: list[Match]
    alternatives: list[str]


def find_root(facts: Facts) -> Root | None:
    """The root of a text, or None when nothing in it says that something failed."""
    matches = [match for match in find_matches(facts) if _decided(match, facts)]
    if not matches:
        return None
    if all(match.kind.name == GENERIC and _went_on(match, facts) for match in matches):
        return None  # exceptions that were caught and logged
    names = {match.kind.name for match in matches}
    held = {id(match) for match in matches if names & set(match.kind.after) - {match.kind.name}}
    clocked = all(match.line.seconds is not None for match in matches)
    ends = {rank: fate.seconds for rank, fate in facts.fates.items() if fate.seconds is not None}

    def order(match: Match) -> tuple[bool, int, float, int]:
        when = match.line.seconds if clocked and match.line.seconds is not None else 0.0
        if ends:
            when = ends.get(match.line.rank if match.line.rank is not None else -1, float("inf"))
        return (id(match) in held, match.stage, when, match.line.order)

    matches.sort(key=order)
    root, others = matches[0], matches[1:]
    if root.rank is None and root.known is None:
        _name_the_rank(root, facts)
    _same_everywhere(root, others, facts)
    alternatives = list(dict.fromkeys([*root.alternatives, *_near_misses(root, others)]))
    return Root(root, others, [name for name in alternatives if name != root.kind.name])


def _went_on(match: Match, facts: Facts) -> bool:
    """Whether the process that raised this wrote much afterwards: an uncaught exception is nearly its last word."""
    last = match.raised.lines[-1] if match.raised else match.line
    return sum(line.order > last.order for line in facts.lines if line.stream == last.stream) > 30


def _decided(match: Match, facts: Facts) -> bool:
    ended = match.ended
    asked = ended is not None and (ended.pid in facts.stopped or (ended.summary and ended.code == -15))
    if ended is not None and ended.code in (-9, -15) and asked:
        if any(one.pid not in facts.stopped and one.code not in (-9, -15) for one in facts.ended):
            return False  # the launcher's own clean-up
        match.stage = max(match.stage, STOPPED)
    match.values |= {k: v for k, v in first_group(match.kind.values, match.text).items() if k not in match.values}
    if match.kind.decide:
        name = match.kind.name
        if not decide.DECISIONS[match.kind.decide](match, facts):
            return False
        if match.kind.name != name:
            match.values |= first_group(match.kind.values, match.text)
    match.values |= first_group(match.kind.everywhere, facts.everything)
    around = match.text + ("\n" + match.raised.code if match.raised else "")
    holds = (
        sub
        for sub in match.kind.subs
        if any(p.search(around) for p in sub.when) or any(p.search(facts.everything) for p in sub.anywhere)
    )
    sub = next((sub for sub in match.kind.subs if sub.name == match.sub), None) or next(holds, None)
    if sub is not None:
        match.sub, match.confidence = sub.name, sub.confidence or match.confidence
    culprit = (sub.culprit if sub is not None else None) or match.kind.culprit
    if culprit == "unknown":
        match.rank, match.known = None, False
    if "rank" in match.values and match.rank is None and match.values["rank"].isdigit():
        match.rank = int(match.values["rank"])
    return True


def _name_the_rank(root: Match, facts: Facts) -> None:
    """A failure without a mark, and a launcher's table with one process that failed by itself: the same."""
    if root.ended is not None or root.stage > STAGES.index("exception"):
        return
    failed = {one.who for one in facts.ended if one.code not in (-15, -2) and one.pid not in facts.stopped}
    if len(failed) == 1:
        root.rank = failed.pop()


def _same_everywhere(root: Match, others: Sequence[Match], facts: Facts) -> None:
    """The same failure on several ranks at the same stage has no single culprit: all of them are named."""
    if root.known is False or not isinstance(root.rank, int) or root.stage > STAGES.index("exception"):
        return
    if root.raised is None:
        return
    said = root.raised.links[0][1][:60]
    again = [one for one in others if one.kind is root.kind and one.raised and one.raised.links[0][1][:60] == said]
    same = {root.rank, *(one.rank for one in again if isinstance(one.rank, int))}
    if len(same) >= max(2, len(facts.ranks)):
        root.rank = sorted(same)


def _near_misses(root: Match, others: Sequence[Match]) -> list[str]:
    """Kinds of the same stage elsewhere in the text."""
    return [m.kind.name for m in others if m.stage <= root.stage and m.kind.name != "python-exception"][:3]
