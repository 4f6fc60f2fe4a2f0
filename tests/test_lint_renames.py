"""The table of renames is true of the installed torch."""

from __future__ import annotations

import importlib
import warnings

import pytest

from evener.lint.rules.migrate import table


def exists(dotted: str) -> bool:
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:size]))
        except ImportError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for part in parts[size:]:
                if not hasattr(found, part):
                    return False
                found = getattr(found, part)
        return True
    return False


ROWS = [(kind, row) for kind, rows in table().items() for row in rows if kind != "amp"]


@pytest.mark.parametrize("kind, row", ROWS, ids=[row["old"] for _, row in ROWS])
def test_what_the_table_says_is_gone_is_gone_and_what_replaces_it_is_there(kind, row):
    assert exists(row["old"]) == (kind == "deprecated")
    assert ("new" in row) != ("note" in row)
    if "new" in row:
        assert exists(row["new"])


def test_the_argument_order_of_the_old_autocast_is_the_tables():
    import inspect

    import torch

    for row in table()["amp"]:
        assert exists(f"torch.cuda.amp.{row['name']}") and exists(f"torch.amp.{row['name']}")
        if "order" in row:
            assert list(inspect.signature(torch.cuda.amp.autocast.__init__).parameters)[1:] == row["order"]
