"""The answer: plain values, their JSON form (a contract) and their text form, in the reader's language."""

from __future__ import annotations

import functools
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.explain.decide import listed
from evener.explain.facts import Facts
from evener.explain.kinds import LISTS, STAGES, texts_of
from evener.explain.lines import Line
from evener.explain.match import Match

EVIDENCE, CONSEQUENCES = 8, 6


@dataclass(frozen=True)
class Explanation:
    """What broke, as plain values.

    Attributes:
        kind: A kind id, or None: nothing in the text says that something failed.
        culprit_rank: A rank, several, or None.
        culprit_known: Whether the text says which process it was. A text of one process without ranks does.
        evidence: (line number or None, source or None, text), hostile characters removed.
    """

    kind: str | None
    sub_cause: str | None
    culprit_rank: int | list[int] | None
    culprit_known: bool
    culprit: str
    confidence: str
    summary: str
    evidence: tuple[tuple[int | None, str | None, str], ...] = ()
    cause: tuple[str, ...] = ()
    fix: tuple[str, ...] = ()
    confirm: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    consequences: tuple[str, ...] = ()
    alternatives: tuple[str, ...] = ()
    or_else: tuple[str, ...] = ()
    language: str = "en"

    def to_json(self) -> dict[str, Any]:
        """The contract: every field but the language and `or_else`, the cause as one text."""
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}
        del values["language"], values["or_else"]
        evidence = [dict(zip(("line", "source", "text"), one)) for one in self.evidence]
        return values | {"evidence": evidence, "cause": " ".join(self.cause)}

    def __str__(self) -> str:
        return to_text(self)


@functools.cache
def words(language: str) -> Mapping[str, str]:
    """The fixed words of the answer: headings and phrases."""
    return dict(tomllib.loads(Path(__file__).with_name("words.toml").read_text("utf-8"))[language])


def explain_matches(matches: list[Match], facts: Facts, language: str = "en") -> Explanation:
    """matches: The root and then its consequences; empty: nothing has failed."""
    say = words(language)
    if not matches:
        nothing = say["nothing"].format(lines=facts.lines_total)
        return Explanation(None, None, None, False, say["no_culprit"], "none", nothing, language=language)
    match, kind = matches[0], matches[0].kind
    several = len(facts.ranks) > 1 or len({line.rank for line in facts.lines}) > 1 or (facts.world_size or 1) > 1
    known = match.known if match.known is not None else (match.rank is not None or not several)
    texts = texts_of(kind, match.sub, language, _values(match))
    if "fix" in match.values:  # evener's own error brings its own
        texts["fix"] = [line for line in match.values["fix"].splitlines() if line]
    named = known and match.rank is not None
    summary = say["on_rank"].format(rank=_ranks(match.rank, say), what=texts["title"]) if named else texts["title"]
    # The same failure of the same process again, in a record or a second traceback, is no consequence.
    again = [one for one in matches if one.kind is kind and one.line.rank == match.rank is not None]
    return Explanation(
        kind.name,
        match.sub,
        match.rank,
        known,
        _culprit(match, known, say),
        match.confidence,
        summary[:1].upper() + summary[1:],
        evidence=tuple(_shown(match.evidence, facts)),
        consequences=tuple(_consequences([one for one in matches[1:] if one not in again], language)),
        alternatives=tuple(match.alternatives),
        language=language,
        **{key: tuple(texts[key]) for key in LISTS},
    )


def _values(match: Match) -> dict[str, str]:
    return match.values if match.rank is None else {"rank": listed(match.rank), **match.values}


def _ranks(ranks: int | list[int] | None, say: Mapping[str, str]) -> str:
    """ "rank 3", "ranks 0, 2", or nothing."""
    if ranks is None or ranks == []:
        return ""
    several = isinstance(ranks, list) and len(ranks) > 1
    return say["ranks" if several else "rank"].format(ranks=listed(ranks), rank=listed(ranks))


def _culprit(match: Match, known: bool, say: Mapping[str, str]) -> str:
    if not known:
        suspects = [] if match.rank is None else [say["suspects"].format(ranks=_ranks(match.rank, say))]
        return " ".join([say["not_here"], *suspects, say["fetch"]])
    where = match.ended or match.line
    host, pid = say["host"].format(host=where.host) if where.host else "", f"pid {where.pid}" if where.pid else ""
    return ", ".join(filter(None, (_ranks(match.rank, say), host, pid))) or say["this_process"]


def _shown(lines: Iterable[Line], facts: Facts) -> Iterable[tuple[int | None, str | None, str]]:
    """The evidence, every line once, in the order of the text."""
    several = len({one.source for one in facts.lines}) > 1
    once = {(line.source, line.number, line.text): line for line in lines if line.shown}
    for line in sorted(once.values(), key=lambda line: line.order)[:EVIDENCE]:
        text = line.shown if len(line.shown) <= 400 else line.shown[:399] + "…"
        yield line.number or None, line.source if several else None, text


def _consequences(matches: list[Match], language: str) -> Iterable[str]:
    """One line for each kind that followed, with its ranks."""
    say = words(language)
    groups: dict[str, list[Match]] = {}
    for match in matches:
        if match.stage < STAGES.index("condition"):
            groups.setdefault(match.kind.name, []).append(match)
    for name, some in list(groups.items())[:CONSEQUENCES]:
        first, ranks = some[0], sorted({one.line.rank for one in some if one.line.rank is not None})
        title = texts_of(first.kind, first.sub, language, _values(first))["title"]
        where = say["line"].format(line=first.line.number) if first.line.number else ""
        yield " · ".join(part for part in (name, _ranks(ranks, say), title, where) if part)


# --- text -----------------------------------------------------------------------------------------------------------

_BOLD, _RED, _DIM, _GREEN, _OFF = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[32m", "\x1b[0m"


def to_text(answer: Explanation, *, color: bool = False, width: int = 100) -> str:
    """The answer to read: what happened, who, the evidence, the cause, the fix, how to confirm, what not to do."""
    say = words(answer.language)

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{_OFF}" if color and code else text

    out = [paint(answer.summary, _BOLD + _RED if answer.kind else _BOLD)]
    if answer.kind is None:
        return "\n".join([*out, say["nothing_more"]])
    label = f"{answer.kind} ({answer.sub_cause})" if answer.sub_cause else answer.kind
    out.append(paint(f"{label} · {say['confidence']}: {say[answer.confidence]}", _DIM))
    out += ["", f"{paint(say['culprit'], _BOLD)}  {answer.culprit}"]
    places = (":".join(str(part) for part in (source, number) if part) for number, source, _ in answer.evidence)
    evidence = [f"{where}: {text}" if where else text for where, (_, _, text) in zip(places, answer.evidence)]
    alternatives = [", ".join(answer.alternatives)] if answer.alternatives else []
    for heading, items, mark, code in (
        ("evidence", evidence, "", _DIM),
        ("cause", answer.cause, "", ""),
        ("or_else", [*answer.or_else, *alternatives], "- ", ""),
        ("fix", answer.fix, "- ", _GREEN),
        ("confirm", answer.confirm, "- ", ""),
        ("avoid", answer.avoid, "- ", ""),
        ("consequences", answer.consequences, "- ", _DIM),
    ):
        out += ["", paint(say[heading], _BOLD)] if items else []
        for item in items:
            lines = [item] if heading == "evidence" else _wrap(item, width - 4)
            out += [f"  {' ' * len(mark) if n else mark}{paint(line, code)}" for n, line in enumerate(lines)]
    return "\n".join(out)


def _wrap(text: str, width: int) -> list[str]:
    if not text.isascii():  # Chinese has no spaces to break at, and every character is two cells wide
        return [text]
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_long_words=False)] or [""]
