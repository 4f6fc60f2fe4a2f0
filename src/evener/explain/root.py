"""From all matches to one root: what broke first, on which rank, and what is only its consequence.

The order: a broken card; a device assert; a process that failed by itself; a rank that says its peer is gone;
a watchdog; a process that was ended; the launcher's summary. Within one stage the earlier one, by clock where both have
one, else by place in the text. A kind may name others that are its cause (`after`).
"""

from __future__ import annotations

from collections.abc import Sequence

from evener.explain import decide
from evener.explain.facts import Facts
from evener.explain.kinds import STAGES
from evener.explain.match import GENERIC, Match, find_matches, first_group


def find_root(facts: Facts) -> list[Match]:
    """The root of a text and its consequences behind it; empty: nothing says that something failed."""
    matches = [match for match in find_matches(facts) if _decided(match, facts)]
    if all(match.kind.name == GENERIC and _went_on(match, facts) for match in matches):
        return []  # exceptions that were caught and logged
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
    root, *others = matches
    if root.rank is None and root.known is None:
        _name_the_rank(root, others, facts)
    _same_everywhere(root, others, facts)
    near = [one.kind.name for one in others if one.stage <= root.stage and one.kind.name != GENERIC]
    alternatives = dict.fromkeys([*root.alternatives, *near[:3]])
    root.alternatives = [name for name in alternatives if name != root.kind.name]
    return matches


def _went_on(match: Match, facts: Facts) -> bool:
    """Whether the process that raised this wrote much afterwards: an uncaught exception is nearly its last word."""
    last = match.raised.lines[-1] if match.raised else match.line
    return sum(line.order > last.order for line in facts.lines if line.stream == last.stream) > 30


def _decided(match: Match, facts: Facts) -> bool:
    """Fills the match in. False: it is a false alarm, or the launcher's own clean-up."""
    ended = match.ended
    if (
        ended is not None
        and ended.code in (-9, -15)
        and (ended.pid in facts.stopped or (ended.summary and ended.code == -15))
    ):
        if any(one.pid not in facts.stopped and one.code not in (-9, -15) for one in facts.ended):
            return False
        match.stage = max(match.stage, STAGES.index("stopped"))
    before = match.kind
    match.values = first_group(before.values, match.text) | match.values
    if before.decide and not decide.DECISIONS[before.decide](match, facts):
        return False
    kind = match.kind
    if kind is not before:
        match.values |= first_group(kind.values, match.text)
    match.values |= first_group(kind.everywhere, facts.everything)
    around = match.text + ("\n" + match.raised.code if match.raised else "")
    subs = [sub for sub in kind.subs if sub.name == match.sub] or [
        sub
        for sub in kind.subs
        if any(p.search(around) for p in sub.when) or any(p.search(facts.everything) for p in sub.anywhere)
    ]
    culprit = kind.culprit
    if subs:
        match.sub, match.confidence = subs[0].name, subs[0].confidence or match.confidence
        culprit = subs[0].culprit or culprit
    if culprit == "unknown":
        match.rank, match.known = None, False
    if match.rank is None and match.values.get("rank", "").isdigit():
        match.rank = int(match.values["rank"])
    return True


def _name_the_rank(root: Match, others: Sequence[Match], facts: Facts) -> None:
    """A failure without a mark, and one process that failed by itself (for the launcher, or on a broken card)."""
    if root.ended is not None or root.stage > STAGES.index("exception"):
        return
    failed = {one.who for one in facts.ended if one.code not in (-15, -2) and one.pid not in facts.stopped}
    if root.stage == STAGES.index("hardware"):  # the kernel's message has no rank; who met the fault has
        failed |= {one.rank for one in others if one.stage <= STAGES.index("failure") and isinstance(one.rank, int)}
    if len(failed) == 1:
        root.rank = failed.pop()


def _same_everywhere(root: Match, others: Sequence[Match], facts: Facts) -> None:
    """The same failure on several ranks at the same stage has no single culprit: all of them are named."""
    if root.known is False or root.stage > STAGES.index("exception") or root.raised is None:
        return
    said = root.raised.links[0][1][:60]
    again = [one for one in others if one.kind is root.kind and one.raised and one.raised.links[0][1][:60] == said]
    same = {one.rank for one in (root, *again) if isinstance(one.rank, int)}
    if isinstance(root.rank, int) and len(same) >= max(2, len(facts.ranks)):
        root.rank = sorted(same)
