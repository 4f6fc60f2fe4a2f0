"""What broke, in a failed run's log or exception: which process first, why, and what to do about it.

The way of a text: `read` keeps what is worth reading of any size; `lines` takes marks off; `facts` finds exceptions,
exits and waits; `match` holds the kinds' signatures (`kinds/*.toml`) against them; `decide` does the arithmetic;
`root` says what came first; `answer` puts it into words. Nothing here imports anything but the standard library, and
importing the room itself costs nothing: `evener run` needs it only when something has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evener.explain.answer import Explanation
    from evener.explain.facts import Fate
    from evener.explain.read import Raw, Selection

__all__ = ["explain_error", "explain_selections", "explain_text"]


def explain_selections(
    selections: Iterable[Selection], language: str = "en", fates: Iterable[Fate] = ()
) -> Explanation:
    """The explanation of one or more texts that belong to one run, with its launcher's records where there are any."""
    from evener.explain.facts import lines_of_fate
    from evener.explain.read import Raw

    chosen, known = list(selections), list(fates)
    raws = [raw for selection in chosen for raw in selection.lines]
    raws += [Raw(f"rank{fate.rank}.json", 0, line) for fate in known for line in lines_of_fate(fate)]
    return _explained(raws, sum(selection.lines_total for selection in chosen), language, known)


def explain_text(text: str, language: str = "en") -> Explanation:
    """The explanation of a text in memory, read as a whole."""
    from evener.explain.read import Raw

    raws = [Raw("", number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _explained(raws, len(raws), language, ())


def _explained(raws: Iterable[Raw], lines_total: int, language: str, fates: Iterable[Fate]) -> Explanation:
    from evener.explain.answer import explain_matches
    from evener.explain.facts import Facts
    from evener.explain.lines import parse
    from evener.explain.root import find_root

    found = Facts(list(parse(raws)), lines_total, fates)
    return explain_matches(find_root(found), found, language)


def explain_error(error: BaseException, *, language: str | None = None) -> Explanation:
    """What an exception means: its cause, the fix for this case, advice not to follow. `print()` shows it.

    Args:
        error: A caught exception, with its traceback and the exceptions it was raised from.
        language: "en" or "zh"; the locale's by default.
    """
    import traceback

    return explain_text("".join(traceback.format_exception(error)), language or preferred_language())


def preferred_language() -> str:
    """ "zh" where the locale says so, otherwise "en"."""
    import os

    said = next((value for key in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := os.environ.get(key))), "")
    return "zh" if said.lower().startswith("zh") else "en"
