"""`evener report`: one HTML page about one run or several, for somebody who was not there."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from evener.cli.parser import parser_of
from evener.errors import EvenerError

if TYPE_CHECKING:
    from evener.report.record import Record
    from evener.report.summary import Explained


def main(argv: list[str]) -> int:
    given = parser_of("report").parse_args(argv)
    from evener import __version__
    from evener.report.events import strict
    from evener.report.record import Record
    from evener.report.summary import summary

    records = [Record.read(path.expanduser(), _lost_peer) for path in given.runs]
    told = [summary(record, _explained(record), _peak(record)) for record in records]
    if given.json:
        print(json.dumps(strict({"version": __version__, "runs": told}), indent=1))
        return 0
    from evener.report.page import page

    target, text = given.output or given.runs[0].expanduser() / "report.html", page(records, told, __version__)
    try:
        target.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise EvenerError(f"{target} cannot be written: {error.strerror}.", fix=["-o FILE: elsewhere"]) from None
    for one in told:
        print("\n  ".join([f"{one['name']}: {one['headline']}", *one["findings"]]))
    print(f"{target} ({len(text) // 1024:,} KiB)", file=sys.stderr)
    return 0


def _lost_peer(kind: str, text: str) -> bool:
    from evener.launch.failure import is_victim
    from evener.launch.records import Raised

    return is_victim(Raised(kind, "", text, None, ""))


def _peak(record: Record) -> tuple[float | None, str]:
    """FLOP/s of all devices of a run together in its number format, and whose word that is; None, and why not."""
    from evener import facts
    from evener.plan.make import calibration_path

    start, form = record.newest_start, str(record.flops.get("format"))
    name, known, count = str(start.get("device_name")), None, start.get("world_size")
    if str(start.get("device")).startswith("cuda"):
        kind = facts.find(name)
        known, of = kind.peak.get(form) if kind is not None else None, f"the data sheet of {name} says for {form}"
        without = f"no data sheet here has a peak of {name} for {form}"
    else:  # all ranks of a machine share its processor
        count, of = start.get("machines"), f"the fastest product in {form} gave on all of {name} (evener bench)"
        without = f"{name} has no peak for {form} until `evener bench matmul --cpu --calibrate` measures one"
        with suppress(OSError, ValueError, KeyError, TypeError):
            known = json.loads(calibration_path().read_text("utf-8"))["cpus"][name][form]
    if isinstance(known, int | float) and known > 0 and isinstance(count, int):
        return float(known) * count, of
    return None, without


def _explained(record: Record) -> dict[str, Explained]:
    """What the logs of `evener run` say, by their folder, for each death that left some."""
    from evener.cli import explain
    from evener.explain import explain_selections
    from evener.report.summary import Explained

    found = {}
    places = [str(record.newest_start.get("cwd") or "."), "."]
    for name in list({str(one["logs"]) for one in record.incidents if one.get("logs")})[:8]:
        folders = [os.path.join(place, "runs", "logs", os.path.basename(name)) for place in places]
        with suppress(OSError, ValueError, EvenerError, StopIteration):
            selections, fates = explain.read([next(filter(os.path.isdir, folders))])
            answer = explain_selections(selections, "en", fates)
            if answer.kind is not None:
                blamed = answer.culprit_rank if answer.culprit_known else None
                ranks = blamed if isinstance(blamed, list) else [] if blamed is None else [blamed]
                text = ". ".join(one.rstrip(".") for one in (answer.summary, *answer.cause)) + "."
                found[name] = Explained(answer.kind, ranks, text)
    return found
