"""The pages of the kinds: one source for `evener explain KIND` and docs/explain.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.explain.answer import words
from evener.explain.kinds import ASIDE, LISTS, Kind, all_kinds

_FIGURE = re.compile(r"\{([a-z_]+)\}")


def plain_title(kind: Kind, language: str) -> str:
    """A kind's title for a list: an aside with a figure goes."""
    return _general(ASIDE.sub("", kind.title(language)))


def _general(sentence: str) -> str:
    """A sentence without a case: figures become their names in angle brackets."""
    return _FIGURE.sub(r"<\1>", sentence)


def page_of(kind: Kind, language: str) -> dict[str, Any]:
    """Everything that is known about a kind, without a case."""
    own = kind.texts[language]
    found: dict[str, Any] = {
        "kind": kind.name,
        "group": kind.group,
        "title": plain_title(kind, language),
        "signature": [pattern.regex.pattern.replace(r"\s+", " ") for pattern in kind.match],
        "exits": list(kind.exits),
        "cases": list(kind.cases),
        "language": language,
    }
    for key in LISTS:
        sentences = own.get(key, [])
        found[key] = [_general(one) for one in ([sentences] if isinstance(sentences, str) else sentences)]
    found["sub_causes"] = {
        sub.name: _general(sub.texts[language]["title"]) for sub in kind.subs if "title" in sub.texts.get(language, {})
    }
    return found


def page_text(page: Mapping[str, Any]) -> str:
    say = words(page["language"])
    lines = [f"{page['kind']}: {page['title']}"]
    for key in LISTS:
        if page[key]:
            lines += ["", say[key], *(f"  - {one}" for one in page[key])]
    if page["sub_causes"]:
        lines += ["", *(f"  {name}: {title}" for name, title in page["sub_causes"].items())]
    if page["signature"]:
        lines += ["", say["signature"], *(f"  {one}" for one in page["signature"])]
    if page["cases"]:
        lines += ["", f"{say['cases']}: {', '.join(page['cases'])}"]
    return "\n".join(lines)


def markdown() -> str:
    """docs/explain.md: the introduction, and a table per group."""
    out = [Path(__file__).with_name("document.md").read_text("utf-8")]
    kinds = all_kinds()
    for group in dict.fromkeys(kind.group for kind in kinds.values()):
        out += [f"### {group}", "", "| kind | what happened | first remedy | do not |", "|---|---|---|---|"]
        for kind in kinds.values():
            if kind.group == group:
                page = page_of(kind, "en")
                cells = [f"`{kind.name}`", page["title"], page["fix"][0], page["avoid"][0]]
                out.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        out.append("")
    return "\n".join(out)


if __name__ == "__main__":
    sys.stdout.write(markdown())
