"""The kinds of failure: one small TOML file each, with its signature, its place among causes, and its texts.

A kind's file (CONTRIBUTING.md has a page on adding one):

    group, stage, prio    where it stands; stages below; within one fact the smaller prio wins
    match, unless, near   regular expressions: any of `match` in the text, none of `unless` and (if given) one of `near`
                          in the same exception, frames included; a space matches any white space, so wrapped text too
    exits                 exit codes that mean this kind (negative: signals)
    after                 kinds that, when they occur too, are the cause of this one
    values, everywhere    expressions whose named groups fill the {placeholders}: in the message, in the whole text
    culprit               "unknown" when the rank that says it is not the one that did it
    decide                a function of `decide.py`, where a regular expression cannot decide
    sub.NAME              sub-causes: `when` in the message or frames, `anywhere` in the text; texts, and where they
                          differ confidence and culprit, that replace the kind's own; the first that holds
    en, zh                title, cause, fix, confirm, avoid, or_else; a sentence with an empty placeholder is left out
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "kinds"
LANGUAGES = ("en", "zh")
LISTS = ("cause", "fix", "confirm", "avoid", "or_else")

# The order in which causes are looked for: what breaks first, then what only tells about it.
STAGES = (
    "hardware",  # a card or the machine is broken
    "assert",  # a device assert: whatever the process says afterwards is noise
    "failure",  # this process failed, for a reason that is known
    "exception",  # this process failed with an exception of the user's code
    "messenger",  # it says that another one is gone
    "timeout",  # it says that another one did not come
    "stopped",  # somebody ended it
    "summary",  # the launcher says that something failed
    "condition",  # nothing failed here: a warning that explains something else
)


# "(in layer {name})": what is left out of a title when the figure is missing.
ASIDE = re.compile(r" ?[(（][^()（）]*\{[a-z_]+\}[^()（）]*[)）]")


@dataclass(frozen=True)
class Pattern:
    """A compiled expression, and the longest plain word in it: a cheap test before the search."""

    regex: re.Pattern[str]
    word: str

    @classmethod
    def of(cls, source: str) -> Pattern:
        spaced = re.sub(r"(?<!\\) (?![?*+{])", r"\\s+", source)
        return cls(re.compile(spaced), longest_word(source))

    def find(self, text: str, lower: str) -> list[re.Match[str]]:
        if self.word and self.word not in lower:
            return []
        return list(self.regex.finditer(text))

    def search(self, text: str) -> re.Match[str] | None:
        return self.regex.search(text)


def longest_word(source: str) -> str:
    """The longest run of letters that every match must contain, in lower case; empty when there is none."""
    if "|" in re.sub(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)", "", source):
        return ""
    plain = re.sub(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)[?*]?|\[(?:[^\]\\]|\\.)*\][?*+]?|\\.|.[?*]", " ", source)
    return max(re.findall(r"[A-Za-z]+", plain), key=len, default="").lower()


@dataclass(frozen=True)
class Sub:
    """A sub-cause: when it holds, and the texts that replace the kind's own, by language."""

    name: str
    when: tuple[Pattern, ...]
    anywhere: tuple[Pattern, ...]
    confidence: str | None
    culprit: str | None
    texts: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Kind:
    """One kind of failure, as its file says."""

    name: str
    group: str
    stage: int
    prio: int
    confidence: str
    cases: tuple[str, ...]
    match: tuple[Pattern, ...]
    unless: tuple[Pattern, ...]
    near: tuple[Pattern, ...]
    values: tuple[Pattern, ...]
    everywhere: tuple[Pattern, ...]
    culprit: str
    exits: tuple[int, ...]
    after: tuple[str, ...]
    decide: str
    shredded: tuple[str, ...]
    subs: tuple[Sub, ...]
    texts: Mapping[str, Mapping[str, Any]]

    def title(self, language: str = "en") -> str:
        return _listed(self.texts[language]["title"])[0]


_KEYS = {"group", "stage", "prio", "confidence", "cases", "match", "unless", "near", "values", "exits", "after"}
_KEYS |= {"everywhere", "culprit", "decide", "shredded", "sub", *LANGUAGES}


def _kind(name: str, told: dict[str, Any]) -> Kind:
    if unknown := told.keys() - _KEYS:
        raise ValueError(f"kinds/{name}.toml: unknown keys {sorted(unknown)}")

    def patterns(key: str, where: Mapping[str, Any] = told) -> tuple[Pattern, ...]:
        return tuple(Pattern.of(source) for source in where.get(key, ()))

    subs = tuple(
        Sub(one, patterns("when", sub), patterns("anywhere", sub), sub.get("confidence"), sub.get("culprit"), sub)
        for one, sub in told.get("sub", {}).items()
    )
    return Kind(
        name,
        told["group"],
        STAGES.index(told.get("stage", "failure")),
        told.get("prio", 10),
        told.get("confidence", "high"),
        tuple(told.get("cases", ())),
        patterns("match"),
        patterns("unless"),
        patterns("near"),
        patterns("values"),
        patterns("everywhere"),
        told.get("culprit", ""),
        tuple(told.get("exits", ())),
        tuple(told.get("after", ())),
        told.get("decide", ""),
        tuple(told.get("shredded", ())),
        subs,
        {language: told[language] for language in LANGUAGES if language in told},
    )


@functools.cache
def all_kinds() -> Mapping[str, Kind]:
    """Every kind by name, in the order of groups and names. Read once per process; the files never change."""
    found = [_kind(path.stem, tomllib.loads(path.read_text("utf-8"))) for path in FOLDER.glob("*.toml")]
    return {kind.name: kind for kind in sorted(found, key=lambda kind: (kind.group, kind.name))}


def fill(sentence: str, values: Mapping[str, str]) -> str | None:
    """`sentence` with its {placeholders} filled; None when one has no value."""
    missing = False

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        found = values.get(match[1], "")
        missing = missing or not found
        return found

    filled = re.sub(r"\{([a-z_]+)\}", value, sentence)
    return None if missing else filled


def _listed(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _title(titles: list[str], values: Mapping[str, str]) -> str | None:
    """The first title that can be filled; else the first that can without its asides and what follows a colon."""
    shortened = [re.split("[:：]", ASIDE.sub("", title))[0] for title in titles]
    return next((one for title in titles + shortened if (one := fill(title, values))), None)


def texts_of(kind: Kind, sub: str | None, language: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The texts of a kind, those of its sub-cause in front: {"title": str, "cause": [str], "fix": [str], ...}."""
    own = kind.texts[language]
    over = next((one.texts.get(language, {}) for one in kind.subs if one.name == sub), {})
    found: dict[str, Any] = {
        "title": _title([*_listed(over.get("title")), *_listed(own["title"])], values) or kind.name
    }
    for key in LISTS:
        sentences = _listed(over.get(key, own.get(key)))
        found[key] = [one for sentence in sentences if (one := fill(sentence, values)) is not None]
    return found
