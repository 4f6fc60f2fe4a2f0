"""The answer: plain values, their JSON form (a contract) and their text form, in the reader's language."""

from __future__ import annotations

import functools
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evener.explain.decide import listed
from evener.explain.facts import Facts
from evener.explain.kinds import STAGES, all_kinds, texts_of
from evener.explain.lines import Line
from evener.explain.match import Match
from evener.explain.root import Root

EVIDENCE = 8
CONSEQUENCES = 6


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
    evidence: tuple[tuple[int | None, str | None, str], ...]
    cause: tuple[str, ...]
    fix: tuple[str, ...]
    confirm: tuple[str, ...]
    avoid: tuple[str, ...]
    consequences: tuple[str, ...]
    alternatives: tuple[str, ...]
    or_else: tuple[str, ...]
    language: str

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
    path = Path(__file__).with_name("words.toml")
    return dict(tomllib.loads(path.read_text("utf-8"))[language])


def explain_root(root: Root | None, facts: Facts, language: str = "en") -> Explanation:
    say = words(language)
    if root is None:
        nothing = say["nothing"].format(lines=facts.lines_total)
        return Explanation(
            None, None, None, False, say["no_culprit"], "none", nothing, (), (), (), (), (), (), (), (), language
        )
    match = root.match
    several = len(facts.ranks) > 1 or len({line.rank for line in facts.lines}) > 1 or (facts.world_size or 1) > 1
    known = match.known if match.known is not None else (match.rank is not None or not several)
    values = _values(match)
    texts = texts_of(match.kind, match.sub, language, values)
    fix = list(texts["fix"])
    if "fix" in match.values:
        fix = [line for line in match.values["fix"].splitlines() if line]
    return Explanation(
        kind=match.kind.name,
        sub_cause=match.sub,
        culprit_rank=match.rank,
        culprit_known=known,
        culprit=_culprit(match, known, say),
        confidence=match.confidence,
        summary=_summary(match, known, texts["title"], say),
        evidence=tuple(_shown(line, facts) for line in _unique(match.evidence)[:EVIDENCE]),
        cause=tuple(texts["cause"]),
        fix=tuple(fix),
        confirm=tuple(texts["confirm"]),
        avoid=tuple(texts["avoid"]),
        consequences=_consequences([one for one in root.consequences if not _said(one, match)], facts, language),
        alternatives=tuple(root.alternatives),
        or_else=tuple(texts["or_else"]),
        language=language,
    )


def _values(match: Match) -> dict[str, str]:
    values = dict(match.values)
    if match.rank is not None:
        values.setdefault("rank", listed(match.rank) if isinstance(match.rank, list) else str(match.rank))
    return values


def _summary(match: Match, known: bool, title: str, say: Mapping[str, str]) -> str:
    if isinstance(match.rank, int) and known:
        return say["on_rank"].format(rank=match.rank, what=title)
    if isinstance(match.rank, list) and known and len(match.rank) > 1:
        return say["on_ranks"].format(ranks=listed(match.rank), what=title)
    return title[:1].upper() + title[1:]


def _culprit(match: Match, known: bool, say: Mapping[str, str]) -> str:
    if not known:
        text = say["not_here"]
        if match.rank is not None:
            ranks = match.rank if isinstance(match.rank, list) else [match.rank]
            text += " " + say["suspects"].format(ranks=listed(ranks))
        return text + " " + say["fetch"]
    parts = []
    if isinstance(match.rank, list):
        parts.append(say["ranks"].format(ranks=listed(match.rank)))
    elif match.rank is not None:
        parts.append(say["rank"].format(rank=match.rank))
    host = match.ended.host if match.ended else match.line.host
    pid = match.ended.pid if match.ended else match.line.pid
    if host:
        parts.append(say["host"].format(host=host))
    if pid:
        parts.append(f"pid {pid}")
    return ", ".join(parts) or say["this_process"]


def _unique(lines: list[Line]) -> list[Line]:
    found: dict[tuple[str, int, str], Line] = {}
    for line in lines:
        if line.shown:
            found.setdefault((line.source, line.number, line.text), line)
    return sorted(found.values(), key=lambda line: line.order)


def _shown(line: Line, facts: Facts) -> tuple[int | None, str | None, str]:
    several = len({one.source for one in facts.lines}) > 1
    text = line.shown if len(line.shown) <= 400 else line.shown[:399] + "…"
    return (line.number or None, line.source if several else None, text)


def _said(one: Match, root: Match) -> bool:
    """The same failure of the same process again, in a record or a second traceback."""
    return one.kind is root.kind and root.rank is not None and one.line.rank == root.rank


def _consequences(matches: list[Match], facts: Facts, language: str) -> tuple[str, ...]:
    """One line for each kind that followed, with its ranks."""
    say = words(language)
    groups: dict[str, list[Match]] = {}
    for match in matches:
        if match.stage < STAGES.index("condition"):
            groups.setdefault(match.kind.name, []).append(match)
    found = []
    for name, some in list(groups.items())[:CONSEQUENCES]:
        ranks = sorted({one.line.rank for one in some if one.line.rank is not None})
        title = texts_of(all_kinds()[name], some[0].sub, language, _values(some[0]))["title"]
        who = say["ranks"].format(ranks=listed(ranks)) if len(ranks) > 1 else ""
        who = say["rank"].format(rank=ranks[0]) if len(ranks) == 1 else who
        where = say["line"].format(line=some[0].line.number) if some[0].line.number else ""
        found.append(" · ".join(part for part in (name, who, title, where) if part))
    return tuple(found)


# --- text -----------------------------------------------------------------------------------------------------------

_BOLD, _RED, _DIM, _GREEN, _OFF = "\x1b[1m", "\x1b[31m", "\x1b[2m", "\x1b[32m", "\x1b[0m"


def to_text(answer: Explanation, *, color: bool = False, width: int = 100) -> str:
    """The answer to read: what happened, who, the evidence, the cause, the fix, how to confirm, what not to do."""
    say = words(answer.language)

    def paint(text: str, code: str) -> str:
        return f"{code}{text}{_OFF}" if color else text

    out = [paint(answer.summary, _BOLD + _RED if answer.kind else _BOLD)]
    if answer.kind is None:
        return "\n".join([*out, say["nothing_more"]])
    label = f"{answer.kind} ({answer.sub_cause})" if answer.sub_cause else answer.kind
    out.append(paint(f"{label} · {say['confidence']}: {say[answer.confidence]}", _DIM))
    out += ["", f"{paint(say['culprit'], _BOLD)}  {answer.culprit}"]

    def section(heading: str, items: list[str], mark: str = "- ", *, wrapped: bool = True, code: str = "") -> None:
        if items:
            out.extend(["", paint(say[heading], _BOLD)])
            for item in items:
                lines = _wrap(item, width - 4) if wrapped else [item]
                out.extend(
                    f"  {mark if n == 0 else ' ' * len(mark)}{paint(line, code)}" for n, line in enumerate(lines)
                )

    evidence = []
    for number, source, text in answer.evidence:
        where = ":".join(str(part) for part in (source, number) if part is not None)
        evidence.append(f"{where}: {text}" if where else text)
    section("evidence", evidence, "", wrapped=False, code=_DIM)
    section("cause", list(answer.cause), "")
    section("or_else", [*answer.or_else, *([", ".join(answer.alternatives)] if answer.alternatives else [])])
    section("fix", list(answer.fix), code=_GREEN)
    section("confirm", list(answer.confirm))
    section("avoid", list(answer.avoid))
    section("consequences", list(answer.consequences), code=_DIM)
    return "\n".join(out)


def _wrap(text: str, width: int) -> list[str]:
    if not text.isascii():  # Chinese has no spaces to break at, and every character is two cells wide
        return [text]
    lines = [part for line in text.splitlines() for part in textwrap.wrap(line, width, break_long_words=False) or [""]]
    return lines or [""]
