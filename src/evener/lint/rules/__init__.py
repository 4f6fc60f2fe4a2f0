"""The rules, in one file per theme.

Each page below says what is wrong, why it matters and how it looks when it is right. Levels: an **error** fails or
computes something else than it says; a **warning** does so likely, or will soon; a **hint** is worth knowing.
`# evener: ignore[rule]` silences a line (alone on a line: the next one), `# evener: ignore-file[rule]` a file.
"""

from __future__ import annotations

from evener.lint.rule import Rule
from evener.lint.rules import accumulation, amp, checkpoint, data, ddp, devices, migrate, own, ranks, speed

ALL: tuple[Rule, ...] = tuple(
    kind()
    for module in (amp, accumulation, data, ddp, ranks, devices, checkpoint, migrate, speed, own)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, Rule) and kind.__module__ == module.__name__
)
