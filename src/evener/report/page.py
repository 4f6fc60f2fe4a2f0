"""Runs as one HTML file that needs nothing else: text through an escaping template, charts by uPlot, inlined.

The page's own policy forbids every request and every script but its own two, by their hashes: what a log smuggles in
could not run even if it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

from evener.report.record import WORDS, Points, Record
from evener.report.text import format_count, format_number, format_seconds

CURVES, PHASES, _SHOWN_RANKS = WORDS["curves"], WORDS["phases"], 8


def page(records: Sequence[Record], told: Sequence[Mapping[str, Any]], version: str) -> str:
    """The whole file. `told`: the summaries of `records`, in their order."""
    from jinja2 import Environment, StrictUndefined

    def text(name: str) -> str:
        return resources.files("evener.report").joinpath(name).read_text("utf-8")

    env = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    formats: dict[str, Callable[[Any], str]] = {"seconds": format_seconds, "number": format_number}
    formats |= {"count": format_count, "bytes": _bytes, "percent": "{:.1%}".format}
    formats |= {"ms": lambda seconds: f"{1000 * seconds:.3g}" if seconds < 1 else f"{1000 * seconds:,.0f}"}
    formats |= {"rate": lambda value: f"{value:,.0f}" if value >= 100 else f"{value:.3g}", "marked": _marked}
    formats["time"] = lambda t: time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(t))
    env.filters |= {name: _known(how) for name, how in formats.items()}
    scripts, charts = [text("vendor/uPlot.iife.min.js"), text("page.js")], _charts(records, told)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    return env.from_string(text("page.html.j2")).render(
        {"runs": told, "phases": PHASES, "version": version, "made": time.time(), "charts": charts},
        # "<" never appears in the data: no text in it can end the element that holds it.
        data=json.dumps({"charts": charts}, separators=(",", ":")).replace("<", "\\u003c"),
        css=text("vendor/uPlot.min.css") + text("page.css"),
        scripts=scripts,
        hashes=hashes,
    )


def _charts(records: Sequence[Record], told: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every chart as its title, unit, series of {label, x, y, colour}, and marks of what happened."""
    names = dict.fromkeys(n for one in records for n in (*CURVES, *one.points.names, *one.evaluations.names))
    alone = len(records) == 1
    happened = [one for one in told[0]["incidents"] if isinstance(one["update"], int)] if alone else []
    marks = [{"x": one["update"], "kind": one["kind"], "text": one["title"]} for one in happened]
    found: list[dict[str, Any]] = []
    for name in sorted(names, key=lambda name: (name != "loss", name in CURVES)):
        if alone:
            first, run = "each update" if name == "loss" or name not in CURVES else CURVES[name], records[0]
            series = [_series(first, run.points, name, 0), _series("mean of the epoch", run.epochs, name, 1, dash=True)]
            series.append(_series("evaluated", run.evaluations, name, 2, dots=True))
        else:
            series = [_series(run.name, run.points, name, n) for n, run in enumerate(records)]
            runs = [run.evaluations if name not in run.points.names else Points() for run in records]
            series += [_series(run.name, one, name, n, dots=True) for n, (run, one) in enumerate(zip(records, runs))]
        found.append({"title": CURVES.get(name, name), "series": series, "marks": marks})
        found[-1]["log"] = all(y is None or y > 0 for one in series for y in one["y"])
    if alone and records[0].ranks:
        ranks = sorted(records[0].ranks.items())
        phases = ranks[0][1].phases
        series = [_series(PHASES[name], phases, name, n) for n, name in enumerate(PHASES) if any(phases.known(name))]
        title = f"where an update's time goes, ms (rank {ranks[0][0]})"
        found.append({"title": title, "unit": "ms", "series": series, "zero": True})
        memory = [(f"rank {rank}", one.memory) for rank, one in ranks[:_SHOWN_RANKS]]
        series = [_series(rank, one, next(iter(one.names), ""), n) for n, (rank, one) in enumerate(memory)]
        found.append({"title": f"memory {told[0]['memory_is']}", "unit": "bytes", "series": series, "zero": True})
        found[-1]["level"] = told[0]["predicted_peak_bytes"]
        busy = [_series(f"rank {rank}", one.busy, "busy", n) for n, (rank, one) in enumerate(ranks[:_SHOWN_RANKS])]
        found.append({"title": "GPU busy", "unit": "%", "series": busy, "zero": True})
    for chart in found:
        chart["series"] = [one for one in chart["series"] if one["x"]]
    return [{"unit": "", "level": None, "log": False, **chart} for chart in found if chart["series"]]


def _series(label: str, points: Points, name: str, colour: int, **more: Any) -> dict[str, Any]:
    x, y = points.series(name)
    return {"label": label, "x": x, "y": [v if v is None else float(f"{v:.6g}") for v in y], "colour": colour, **more}


def _known(how: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "unknown" if value is None else how(value)


def _marked(text: str) -> str:
    """What stands in `backticks` as code; everything else stays text."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
