"""Text that several processes wrote into one stream character by character.

Two ranks that print the same message at the same moment leave `CCUUDDAA oouutt ooff mmeemmoorryy` or worse. A phrase is
still there as a subsequence in a window not much longer than itself, and no ordinary text has one of twenty characters
or more in three times its length by chance: a letter would have to come three times as often as it does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from evener.explain.lines import Line

if TYPE_CHECKING:
    from evener.explain.kinds import Kind

STRETCH = 3.2
SHORTEST = 18


def search(lines: list[Line], kinds: Iterable[Kind]) -> Iterator[tuple[Kind, Line, str]]:
    """The kinds whose `shredded` phrases are hidden in the text; at most one line each."""
    owner = [(line, letter.lower()) for line in lines[-400:] for letter in line.text if not letter.isspace()]
    lower = "".join(letter for _, letter in owner)
    for kind in kinds:
        for phrase in kind.shredded:
            wanted = re.sub(r"\s", "", phrase).lower()
            if len(wanted) >= SHORTEST and (at := find(wanted, lower)) is not None:
                yield kind, owner[at][0], owner[at][0].text
                break


def find(wanted: str, text: str) -> int | None:
    """Where `wanted` is a tight subsequence of `text`, its letters scattered."""
    start = text.find(wanted[0])
    while start >= 0:
        at, together, longest = start, 1, 1
        for character in wanted[1:]:
            following = text.find(character, at + 1, start + int(len(wanted) * STRETCH))
            if following < 0:
                at = -1
                break
            together = together + 1 if following == at + 1 else 1
            longest = max(longest, together)
            at = following
        if at >= 0 and longest <= len(wanted) // 2:  # half of it in one piece is another text that begins like it
            return start
        start = text.find(wanted[0], start + 1)
    return None
