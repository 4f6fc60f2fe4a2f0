"""Kinds against facts: for every exception, line and exit that a kind's signature fits, one Match."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from evener.explain import shredded
from evener.explain.facts import LEFT, Ended, Facts, Raised
from evener.explain.kinds import STAGES, Kind, Pattern, all_kinds
from evener.explain.lines import Line, Stream


@dataclass
class Match:
    """A kind that fits something in the text. A decision may change everything but the place."""

    kind: Kind
    line: Line  # where it says so
    text: str  # what the signature was found in: an exception with its message, or a few lines
    raised: Raised | None = None
    ended: Ended | None = None
    rank: int | list[int] | None = None
    stage: int = 0
    sub: str | None = None
    confidence: str = "high"
    values: dict[str, str] = field(default_factory=dict)
    evidence: list[Line] = field(default_factory=list)
    alternatives: list[str] = field(default_factory=list)
    known: bool | None = None  # the culprit; None: as the rank says

    @property
    def flat(self) -> str:
        """`text` as one line, so that figures are found in wrapped text too."""
        return " ".join(self.text.split())

    def become(self, kind: str) -> None:
        self.kind = all_kinds()[kind]
        self.stage = self.kind.stage


GENERIC, LAUNCHER = "python-exception", "torchrun-hidden-root-cause"


def find_matches(facts: Facts) -> list[Match]:
    """All matches, one per fact: the kind with the smallest prio, a specific one before the general exception."""
    kinds = all_kinds()
    by_place: dict[object, Match] = {}

    def offer(place: object, match: Match) -> None:
        other = by_place.setdefault(place, match)
        if (match.kind.name == GENERIC, match.kind.prio) < (other.kind.name == GENERIC, other.kind.prio):
            by_place[place] = match

    covers = {line.order: one for one in facts.raised for line in one.lines}  # whose message a line belongs to
    for stream in facts.streams:
        lower = stream.text.lower()
        for kind in kinds.values():
            for line, raised, text in _found(kind, stream, lower, covers):
                offer(id(raised) if raised else line.order, _new(kind, line, text, raised))
    for raised in facts.raised:
        offer(id(raised), _new(kinds[GENERIC], raised.lines[0], raised.text, raised))
    for ended in facts.ended:
        for kind in kinds.values():
            if ended.code in kind.exits or (kind.name == LAUNCHER and 0 < ended.code < LEFT):
                offer(("exit", ended.line.order), _new(kind, ended.line, ended.line.text, None, ended))
    matches = list(by_place.values())
    if all(match.kind.stage >= STAGES.index("exception") for match in matches):
        matches += [_new(kind, line, text) for kind, line, text in shredded.search(facts.lines, kinds.values())]
    return matches


def _new(kind: Kind, line: Line, text: str, raised: Raised | None = None, ended: Ended | None = None) -> Match:
    rank = ended.who if ended else line.rank if line.rank is not None else line.local_rank
    if rank is None and raised is not None:
        rank = next((one.rank for one in raised.lines if one.rank is not None), None)
    evidence = list(raised.lines[:6]) if raised else [line]
    return Match(kind, line, text, raised, ended, rank, kind.stage, confidence=kind.confidence, evidence=evidence)


def _found(
    kind: Kind, stream: Stream, lower: str, covers: Mapping[int, Raised]
) -> Iterator[tuple[Line, Raised | None, str]]:
    """Where `kind` fits in the stream: the line, the exception it belongs to, the text around."""

    def text_of(low: int, high: int) -> str:
        return "\n".join(one.text for one in stream.lines[max(0, low) : high])

    seen: set[int] = set()
    for pattern in kind.match:
        for hit in pattern.find(stream.text, lower)[:200]:
            index = bisect.bisect_right(stream.starts, hit.start()) - 1
            end = bisect.bisect_right(stream.starts, hit.end()) - 1
            line = stream.lines[index]
            raised = covers.get(line.order)
            place = id(raised) if raised else line.order
            own = raised.text if raised else text_of(index, end + 1)
            around = f"{own}\n{raised.code}" if raised else text_of(index - 12, end + 8)
            if place in seen or any(one.search(own) for one in kind.unless):
                continue
            if not kind.near or any(one.search(around) for one in kind.near):
                seen.add(place)
                yield line, raised, raised.text if raised else text_of(index, end + 8)


def first_group(patterns: tuple[Pattern, ...], text: str) -> dict[str, str]:
    """The named groups of all `patterns` in `text`; the first that has a value wins."""
    groups = [match.groupdict() for pattern in reversed(patterns) if (match := pattern.search(text))]
    return {name: value.strip() for group in groups for name, value in group.items() if value is not None}
