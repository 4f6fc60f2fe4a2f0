"""What a check sees (`Seen`), the texts behind it (checks.toml), and both together: a `Finding`."""

from __future__ import annotations

import tomllib
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

LEVELS = ("error", "warning", "unknown", "ok", "skipped")  # worst first


@dataclass(frozen=True)
class Seen:
    """A fault: its level, in words, and which of the check's fixes helps, with what fills it in."""

    level: str
    found: str
    fix: str
    values: dict[str, Any] = field(default_factory=dict)


Faults = Generator[Seen, None, str]  # what a check is: it yields faults; what it returns is said when there was none


def error(found: str, fix: str, **values: Any) -> Seen:
    """It will fail, hang, or compute something wrong."""
    return Seen("error", found, fix, values)


def warning(found: str, fix: str, **values: Any) -> Seen:
    """It may fail or costs speed."""
    return Seen("warning", found, fix, values)


class Unknown(Exception):
    """It could not be looked at; never taken for good."""


class Skipped(Exception):
    """It does not apply to this machine."""


@dataclass(frozen=True)
class Finding:
    """A line of `evener doctor`; `why` and `fix` are None where there is nothing to do."""

    check: str
    level: str
    found: str
    why: str | None = None
    fix: str | None = None


@cache
def texts() -> dict[str, dict[str, Any]]:
    """checks.toml by check, in the order of their numbers."""
    text = resources.files("evener.doctor").joinpath("checks.toml").read_text(encoding="utf-8")
    return dict(sorted(tomllib.loads(text).items(), key=lambda item: int(item[1]["number"])))


def findings(check: str, faults: Faults) -> list[Finding]:
    """All that a check has to say: its faults, or one line that says why there are none."""
    found, text = [], texts()[check]
    while True:
        try:
            seen = next(faults)
            fix = text["fix"][seen.fix].format(**seen.values)
            found.append(Finding(check, seen.level, seen.found, text["why"], fix))
        except StopIteration as end:
            return found or [Finding(check, "ok", end.value)]
        except (Unknown, Skipped) as why:
            return [*found, Finding(check, type(why).__name__.lower(), str(why))]
