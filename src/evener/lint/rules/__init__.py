"""The rules, in one file per theme; en.toml and zh.toml have their pages."""

from __future__ import annotations

from evener.lint.rule import Rule
from evener.lint.rules import accumulation, amp, checkpoint, data, ddp, devices, migrate, own, ranks, speed

_THEMES = (amp, accumulation, data, ddp, ranks, devices, checkpoint, migrate, speed, own)
ALL = tuple(one for theme in _THEMES for one in vars(theme).values() if isinstance(one, Rule))
