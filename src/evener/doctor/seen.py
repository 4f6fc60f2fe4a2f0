"""What a check sees (`Seen`), the texts behind it (checks.toml), and both together: a `Finding`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

LEVELS = ("error", "warning", "unknown", "ok", "skipped")  # worst first


@dataclass(frozen=True)
class Seen:
    """One thing that a check saw: its level, in words, and which of the check's fixes helps, with what fills it in."""

    level: str
    found: str
    fix: str | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A line of `evener doctor`; `why` and `fix` are None where there is nothing to do."""

    check: str
    level: str
    found: str
    why: str | None = None
    fix: str | None = None


def error(found: str, fix: str, **values: Any) -> Seen:
    """It will fail, hang, or compute something wrong."""
    return Seen("error", found, fix, values)


def warning(found: str, fix: str, **values: Any) -> Seen:
    """It may fail or costs speed."""
    return Seen("warning", found, fix, values)


def ok(found: str) -> Seen:
    return Seen("ok", found)


def unknown(found: str) -> Seen:
    """It could not be looked at; never taken for good."""
    return Seen("unknown", found)


def skipped(found: str) -> Seen:
    """It does not apply to this machine."""
    return Seen("skipped", found)


@cache
def texts() -> dict[str, dict[str, Any]]:
    """checks.toml by check, in the order of their numbers."""
    loaded = tomllib.loads(resources.files("evener.doctor").joinpath("checks.toml").read_text(encoding="utf-8"))
    return dict(sorted(loaded.items(), key=lambda item: int(item[1]["number"])))


def finding(check: str, seen: Seen) -> Finding:
    text = texts()[check]
    if seen.fix is None:
        return Finding(check, seen.level, seen.found)
    return Finding(check, seen.level, seen.found, text["why"], text["fix"][seen.fix].format(**seen.values))


def page(check: str) -> str:
    """All about one check, as Markdown: `--explain` prints it and docs/doctor.md is made of it."""
    text = texts()[check]
    lines = [
        f"{text['number']}. **`{check}`**: {text['title']}.",
        f"   {text['why']}",
        f"   Looks at: {text['looks']}.",
    ]
    return "\n".join([*lines, *(f"   - {name}: {fix}" for name, fix in text["fix"].items())])
