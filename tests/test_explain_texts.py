"""The kinds' files: both languages complete, every figure has a source, nothing that cannot be read; docs in step."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from evener.explain import decide, kinds, oom
from evener.explain.answer import words
from evener.explain.kinds import FOLDER, LISTS, STAGES, Pattern, all_kinds, fill, longest_word, texts_of
from evener.explain.pages import markdown, page_of, page_text

KINDS = all_kinds()
ROOT = Path(__file__).parents[1]
CASE_IDS = {case["id"] for case in json.loads((ROOT / "tests/cases/failures/cases.json").read_text("utf-8"))}
CHINESE = re.compile(r"[\u4e00-\u9fff]")
PLACEHOLDER = re.compile(r"\{([a-z_]+)\}")
# Figures that decisions find: every name that stands as a key in their source.
DECIDED = set(re.findall(r'"([a-z_]+)"', Path(decide.__file__).read_text() + Path(oom.__file__).read_text())) | {"rank"}


def sentences(texts):
    for key in ("title", *LISTS):
        for wordings in kinds.sentences(texts.get(key)):
            yield from [(key, one) for one in kinds.sentences(wordings)]


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_kind_is_complete_in_both_languages(kind):
    for language in ("en", "zh"):
        texts = kind.texts[language]
        for key in ("title", "cause", "fix", "confirm", "avoid"):
            assert texts.get(key), (language, key)
        assert texts.keys() <= {"title", *LISTS}
        for key, one in sentences(texts):
            # Words of code and proper names are the same in every language; the sentence around them is not.
            plain = re.sub(r"`[^`]*`", "", one)
            chinese = bool(CHINESE.search(plain))
            assert chinese == (language == "zh") or not re.search(
                r"[A-Za-z]{2,} [A-Za-z]{2,}", PLACEHOLDER.sub("", plain)
            ), one
            assert "  " not in one and one == one.strip(), (key, one)
    for key in LISTS:
        both = [kind.texts[language].get(key, []) for language in ("en", "zh")]
        assert len(both[0]) == len(both[1]) or isinstance(both[0], str), (key, "a sentence is missing in one language")
    for sub in kind.subs:
        english, chinese = sub.texts.get("en", {}), sub.texts.get("zh", {})
        assert english.keys() == chinese.keys() != set(), sub.name
        assert all(len(english[key]) == len(chinese[key]) for key in english if key != "title"), sub.name


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_every_figure_in_a_text_has_a_source(kind):
    known = {name for pattern in kind.values for name in pattern.regex.groupindex}
    known |= {name for pattern in kind.everywhere for name in pattern.regex.groupindex}
    known |= DECIDED if kind.decide or kind.name.startswith("oom") else {"rank"}
    for texts in (*kind.texts.values(), *(one for sub in kind.subs for one in (sub.texts["en"], sub.texts["zh"]))):
        for _, one in sentences(texts):
            assert set(PLACEHOLDER.findall(one)) <= known, one
    # Without any figure there is still a cause, a remedy and advice.
    for language in ("en", "zh"):
        for key in ("fix", "confirm", "avoid"):
            told = [one for of, one in sentences(kind.texts[language]) if of == key]
            assert any(fill(one, {}) for one in told), (kind.name, language, key)


def test_of_two_wordings_the_fuller_one_is_said_and_only_that():
    kind = KINDS["torchrun-hidden-root-cause"]
    figures = {"type": "KeyError", "place": "train.py:3", "code": "rows[17]"}
    for values, said in ((figures, "in this text: KeyError at train.py:3: rows[17]"), ({}, "in this text.")):
        cause = texts_of(kind, "exception-above", "en", values)["cause"]
        assert len(cause) == 1 and cause[0].endswith(said)
    for one in KINDS.values():
        for texts in (*one.texts.values(), *(text for sub in one.subs for text in sub.texts.values())):
            for key in LISTS:
                plain = [text for text in texts.get(key, ()) if isinstance(text, str)]
                assert len({text[:40] for text in plain}) == len(plain), (one.name, key, "two wordings of one sentence")


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_a_kind_can_be_found_and_refers_to_what_exists(kind):
    reached = kind.match or kind.exits or kind.decide or kind.group == "memory"
    assert reached, "nothing leads to it"
    assert set(kind.after) <= KINDS.keys() and set(kind.cases) <= CASE_IDS
    assert not kind.decide or kind.decide in decide.DECISIONS
    assert 0 <= kind.stage < len(STAGES) and kind.confidence in ("high", "medium", "low")
    for phrase in kind.shredded:
        assert len(phrase) >= 12


def test_decisions_name_only_kinds_and_sub_causes_that_exist():
    source = Path(decide.__file__).read_text()
    verdicts = Path(oom.__file__).read_text()
    for name in re.findall(r'become\("([\w-]+)"', source) + re.findall(r'verdict\("([\w-]+)"', verdicts):
        assert name in KINDS
    subs = {sub.name for kind in KINDS.values() for sub in kind.subs}
    named = set(re.findall(r'\.sub(?:, [\w.]+(?:\["\w+"\])?)* = "([\w-]+)"', source))
    named |= set(re.findall(r'verdict\("[\w-]+", "([\w-]+)"', verdicts))
    assert named and all(any(sub.startswith(name) for sub in subs) for name in named), named - subs


def test_the_fixed_words_are_complete():
    assert words("en").keys() == words("zh").keys()
    assert all(CHINESE.search(text) for key, text in words("zh").items() if key not in ("rank", "ranks", "on_rank"))


@pytest.mark.parametrize(
    "source, word",
    [
        (r"Duplicate GPU detected", "duplicate"),
        (r"closing signal SIGHUP", "closing"),
        (r"(?:CUDA|HIP) out of memory", "memory"),
        (r"one|two", ""),
        (r"(?:recv|send)\w* failed", "failed"),
        (r"colou?r of \w+", "colo"),
        (r"x* abc", "abc"),
        (r"\[Errno 28\]", "errno"),
        (r"got [A-Z]{3,} bytes", "bytes"),
    ],
)
def test_the_quick_test_before_a_search_uses_a_word_that_every_match_has(source, word):
    assert longest_word(source) == word


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_the_quick_test_never_hides_a_match(kind, test_seed):
    """Against the corpus: a search with the quick test finds what a search without it finds."""
    texts = [
        "\n".join(case["log"]) for case in json.loads((ROOT / "tests/cases/failures/cases.json").read_text("utf-8"))
    ]
    for pattern in (*kind.match, *kind.values, *kind.unless):
        bare = Pattern(pattern.regex, "")
        for text in texts:
            assert len(pattern.find(text, text.lower())) == len(bare.find(text, text.lower())), pattern.word


def test_a_page_shows_a_kind_without_a_case():
    page = page_text(page_of(KINDS["oom-capacity"], "en"))
    assert "one-request" in page and "B005" in page and "{" not in page.replace("{p.dtype", "")
    assert "Do not" in page and "expandable_segments" in page


def test_the_documentation_is_made_from_the_kinds():
    """Remake it with: python -m evener.explain.pages > docs/explain.md"""
    assert (ROOT / "docs" / "explain.md").read_text("utf-8") == markdown()


def test_files_are_valid_and_small():
    for file in FOLDER.glob("*.toml"):
        tomllib.loads(file.read_text("utf-8"))
        assert len(file.read_bytes()) < 12_000, f"{file.name}: a kind is one small readable unit"
