"""Tables that are markdown and readable as they are, and the same as JSON."""

from __future__ import annotations

from typing import Any


class Table:
    """A title, columns, rows of text, and notes below it (targets met or missed)."""

    def __init__(self, title: str, columns: list[str]) -> None:
        self.title, self.columns = title, columns
        self.rows: list[list[str]] = []
        self.notes: list[str] = []

    def add(self, *cells: object) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append([str(cell) for cell in cells])

    def note(self, text: str) -> None:
        self.notes.append(text)

    def __str__(self) -> str:
        widths = [max(len(row[i]) for row in [self.columns, *self.rows]) for i in range(len(self.columns))]

        def line(cells: list[str]) -> str:
            first, *rest = (
                cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))
            )
            return "| " + " | ".join([first, *rest]) + " |"

        rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
        body = [line(self.columns), rule, *map(line, self.rows)]
        return "\n".join([f"### {self.title}", "", *body, "", *(f"- {note}" for note in self.notes)])

    def as_dict(self) -> dict[str, Any]:
        return {"title": self.title, "rows": [dict(zip(self.columns, row)) for row in self.rows], "notes": self.notes}


def verdict(what: str, value: float, target: float, *, at_least: bool = False) -> str:
    """`what` is value: target met or missed."""
    met = value >= target if at_least else value <= target
    sign = ">=" if at_least else "<="
    return f"{what}: {value:.3f} (target {sign} {target:g}): {'met' if met else 'MISSED'}"
