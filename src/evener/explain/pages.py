"""The pages of the kinds: one source for `evener explain KIND` and docs/explain.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.explain.answer import words
from evener.explain.kinds import ASIDE, LISTS, Kind, all_kinds, sentences


def plain_title(kind: Kind, language: str) -> str:
    """A kind's title for a list: an aside with a figure goes."""
    return _general(ASIDE.sub("", sentences(kind.texts[language]["title"])[0]))


def _general(sentence: str) -> str:
    """A sentence without a case: figures become their names in angle brackets."""
    return re.sub(r"\{([a-z_]+)\}", r"<\1>", sentence)


def page_of(kind: Kind, language: str) -> dict[str, Any]:
    """Everything that is known about a kind, without a case."""
    subs = {sub.name: sub.texts.get(language, {}).get("title") for sub in kind.subs}
    return {
        "kind": kind.name,
        "group": kind.group,
        "title": plain_title(kind, language),
        "signature": [pattern.regex.pattern.replace(r"\s+", " ") for pattern in kind.match],
        "exits": list(kind.exits),
        "cases": list(kind.cases),
        "language": language,
        **{key: [_general(sentences(one)[0]) for one in kind.texts[language].get(key, ())] for key in LISTS},
        "sub_causes": {name: _general(sentences(title)[0]) for name, title in subs.items() if title},
    }


def page_text(page: Mapping[str, Any]) -> str:
    say = words(page["language"])
    parts = [(say[key], [f"- {one}" for one in page[key]]) for key in LISTS]
    parts += [("", [f"{name}: {title}" for name, title in page["sub_causes"].items()])]
    parts += [(say["signature"], page["signature"])]
    lines = [f"{page['kind']}: {page['title']}"]
    for heading, items in parts:
        lines += ["", *filter(None, [heading]), *(f"  {one}" for one in items)] if items else []
    return "\n".join([*lines, *(["", f"{say['cases']}: {', '.join(page['cases'])}"] if page["cases"] else [])])


def markdown() -> str:
    """docs/explain.md: the introduction, and a table per group."""
    out = [Path(__file__).with_name("document.md").read_text("utf-8")]
    pages = [page_of(kind, "en") for kind in all_kinds().values()]
    for group in dict.fromkeys(page["group"] for page in pages):
        out += [f"### {group}", "", "| kind | what happened | first remedy | do not |", "|---|---|---|---|"]
        for page in (page for page in pages if page["group"] == group):
            cells = [f"`{page['kind']}`", page["title"], page["fix"][0], page["avoid"][0]]
            out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    sys.stdout.write(markdown())
