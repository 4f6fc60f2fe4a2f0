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
    shredded              phrases to look for where several processes wrote into each other's lines
    sub.NAME              sub-causes: `when` in the message or frames, `anywhere` in the text; texts, and where they
                          differ confidence and culprit, that replace the kind's own; the first that holds
    en, zh                title, cause, fix, confirm, avoid, or_else; a sentence with an empty placeholder is left out;
                          of a list of wordings the first without one is taken
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
        return cls(re.compile(re.sub(r"(?<!\\) (?![?*+{])", r"\\s+", source)), longest_word(source))

    def find(self, text: str, lower: str) -> list[re.Match[str]]:
        return list(self.regex.finditer(text)) if self.word in lower else []

    def search(self, text: str) -> re.Match[str] | None:
        return self.regex.search(text)


def longest_word(source: str) -> str:
    """The longest run of letters that every match must contain, in lower case; empty when there is none."""
    if "|" in re.sub(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)", "", source):
        return ""
    plain = re.sub(r"\((?:[^()\\]|\\.|\((?:[^()\\]|\\.)*\))*\)[?*]?|\[(?:[^\]\\]|\\.)*\][?*+]?|\\.|.[?*]", " ", source)
    return max(re.findall(r"[A-Za-z]+", plain), key=len, default="").lower()


Patterns = tuple[Pattern, ...]
Texts = Mapping[str, Any]


@dataclass(frozen=True)
class Sub:
    """A sub-cause: when it holds, and the texts that replace the kind's own, by language."""

    name: str
    texts: Mapping[str, Texts]
    when: Patterns = ()
    anywhere: Patterns = ()
    confidence: str = ""
    culprit: str = ""


@dataclass(frozen=True)
class Kind:
    """One kind of failure, as its file says."""

    name: str
    texts: Mapping[str, Texts]
    group: str
    stage: int
    subs: tuple[Sub, ...]
    prio: int = 10
    confidence: str = "high"
    cases: tuple[str, ...] = ()
    match: Patterns = ()
    unless: Patterns = ()
    near: Patterns = ()
    values: Patterns = ()
    everywhere: Patterns = ()
    culprit: str = ""
    exits: tuple[int, ...] = ()
    after: tuple[str, ...] = ()
    decide: str = ""
    shredded: tuple[str, ...] = ()


_PATTERNS = ("match", "unless", "near", "values", "everywhere", "when", "anywhere")


def _told(told: dict[str, Any]) -> dict[str, Any]:
    """Fields of a kind or a sub-cause; one that it does not have is an error where they are handed over."""
    fields: dict[str, Any] = {"texts": {language: told.pop(language) for language in LANGUAGES if language in told}}
    for key, value in told.items():
        made = map(Pattern.of, value) if key in _PATTERNS else value
        fields[key] = value if isinstance(value, str | int) else tuple(made)
    return fields


def _kind(path: Path) -> Kind:
    told = tomllib.loads(path.read_text("utf-8"))
    subs = tuple(Sub(name, **_told(sub)) for name, sub in told.pop("sub", {}).items())
    stage = STAGES.index(told.pop("stage", "failure"))
    return Kind(path.stem, stage=stage, subs=subs, **_told(told))


@functools.cache
def all_kinds() -> Mapping[str, Kind]:
    """Every kind by name, in the order of groups and names. Read once per process; the files never change."""
    kinds = sorted(map(_kind, FOLDER.glob("*.toml")), key=lambda kind: (kind.group, kind.name))
    return {kind.name: kind for kind in kinds}


def fill(sentence: str, values: Mapping[str, str]) -> str | None:
    """`sentence` with its {placeholders} filled; None when one has no value."""
    if not all(values.get(name) for name in re.findall(r"\{([a-z_]+)\}", sentence)):
        return None
    return re.sub(r"\{([a-z_]+)\}", lambda match: values[match[1]], sentence)


def first(wordings: Any, values: Mapping[str, str]) -> str | None:
    """The first wording of which every placeholder has a value."""
    return next((one for wording in sentences(wordings) if (one := fill(wording, values))), None)


def sentences(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def texts_of(kind: Kind, sub: str | None, language: str, values: Mapping[str, str]) -> dict[str, Any]:
    """The texts of a kind, those of its sub-cause in front: {"title": str, "cause": [str], "fix": [str], ...}."""
    own = kind.texts[language]
    over = next((one.texts.get(language, {}) for one in kind.subs if one.name == sub), {})
    titles = [*sentences(over.get("title")), *sentences(own["title"])]
    titles += [re.split("[:：]", ASIDE.sub("", title))[0] for title in titles]  # without what has no figure
    found: dict[str, Any] = {"title": first(titles, values) or kind.name}
    for key in LISTS:
        filled = (first(wordings, values) for wordings in over.get(key, own.get(key, ())))
        found[key] = [one for one in filled if one is not None]
    return found
