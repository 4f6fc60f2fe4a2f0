"""`evener plan`: peak memory and time of every cut of a script's step, without a GPU, and which one to take."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import sys
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, Any

from evener.cli.parser import Parser, parser_of
from evener.cli.run import check_script, split, to_override
from evener.errors import EXIT_SHORTAGE, LaunchError, UsageError
from evener.plan.search import amount, duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from evener.plan.captured import Captured
    from evener.plan.search import Plan, Row
    from evener.plan.values import Cut, Share, Term, Trace


def main(argv: list[str]) -> int:
    options = parser_of("plan")
    own, target = split(argv, options)
    script = [] if "-m" in own else target[:1]
    after, args = leading(target[len(script) :], options)
    target = [*script, *args]
    given = options.parse_args([*own, *after])
    if given.module is None:
        if not target:
            raise UsageError("evener plan: which script?", fix=["evener plan SCRIPT [ARGS ...], or -m MODULE; --help"])
        check_script(target[0])
        _check_mentions(target[0])
    if os.name != "posix":
        raise LaunchError("`evener plan` starts processes on Linux and macOS only.")
    from evener.launch.command import shim_path
    from evener.plan.captured import Child
    from evener.plan.make import calibrated, machine_of, make

    if given.here and (given.gpu or given.gpus):
        raise UsageError("--here is this machine, and another one is named.", fix=["leave one of them out"])
    machine = machine_of(gpu=given.gpu, recorded=given.gpus, cpu=given.cpu, nproc=given.nproc, nodes=given.nodes)
    words = ["-m", given.module, *target] if given.module else target
    overrides = dict(to_override(word) for word in given.set)
    _say(f"running {given.module or target[0]} up to its Run")
    with Child(words, shim=shim_path(), overrides=overrides, seconds=given.timeout) as child:
        captured = child.captured
        machine = calibrated(machine, given.calibration, cpu=captured.cpu)

        def trace(cut: Cut, seconds: float | None) -> Trace:
            return child.trace(cut, seconds, device=machine.device, capability=machine.capability)

        plan = make(trace, captured, machine, say=_say, everything=given.all)
    if plan.chosen is not None and given.module is None and machine.nodes == 1:
        from evener.plan import kept

        where = kept.place(target, given.set, machine.kind_name, machine.gpus)
        if keep(where, kept.dated(target[0], plan.to_json())):
            _say(f"kept for `evener run` on {machine.name}")
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    if given.json:
        print(json.dumps(plan.to_json(), indent=2))
    else:
        print("\n".join(page(plan, captured, everything=given.all)))
    return 0 if plan.chosen is not None else EXIT_SHORTAGE


def keep(where: Path, plan: Mapping[str, Any]) -> bool:
    """Whether it could be written: a full disk only means that it is not taken up."""
    from evener.report.folder import write_json

    with contextlib.suppress(OSError):
        where.parent.mkdir(parents=True, exist_ok=True)
        write_json(where, plan)
        return True
    return False


def _check_mentions(script: str) -> None:
    """Without this a script that never makes a Run trains to its end first, and writes over what it wrote before."""
    paths, folder = [script], os.path.dirname(script)
    for path in paths:  # it grows: what the script imports from beside it, and what that imports
        try:
            with open(path, encoding="utf-8") as file:
                if "evener" in (text := file.read()):
                    return
            nodes = list(ast.walk(ast.parse(text)))
        except (OSError, ValueError, SyntaxError):
            return  # Python's own words are better
        names = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                names += [node.module or "", *(f"{node.module or ''}.{one.name}".strip(".") for one in node.names)]
        for name in filter(None, names):
            for base in {folder, os.path.dirname(path)}:
                module = os.path.join(base, *name.split("."))
                found = (f"{module}.py", os.path.join(module, "__init__.py"))
                paths += [one for one in found if one not in paths and os.path.isfile(one)]
    raise LaunchError(
        f"{script} makes no evener.Run: neither it nor what it imports from beside it mentions evener. "
        "Nothing was run.",
        fix=[
            "planning needs the step in a Run: docs/migrate/ shows which lines of DDP, accelerate, ... that replaces",
            f"evener lint {script} looks at the script as it is, evener run {script} starts it as it is",
            "where an installed package makes the Run: import evener in the script, too",
        ],
    )


def leading(words: list[str], options: Parser) -> tuple[list[str], list[str]]:
    """Options of ours that follow the script, and the script's own words."""
    i = 0
    while i < len(words) and (action := options._option_string_actions.get(words[i].partition("=")[0])) is not None:
        i += 1 if "=" in words[i] or action.nargs == 0 else 2
    return words[:i], words[i + 1 :] if words[i : i + 1] == ["--"] else words[i:]


def page(plan: Plan, captured: Captured, *, everything: bool = False) -> Iterator[str]:
    """The plan for a reader, in lines of at most 100 columns where names allow it."""
    chosen = plan.chosen
    yield from _wrapped(contract(chosen, captured) if chosen else "no cut of this step fits", "")
    yield from _wrapped(f"predicted for {plan.machine.name}: " + "; ".join(plan.because), "  ")
    yield ""
    yield from table(plan, captured, everything=everything)
    if chosen is not None and chosen.at_peak:
        yield ""
        yield f"alive at the peak ({chosen.phase}): {amount(sum(one.bytes for one in chosen.at_peak))} of tensors"
        yield from _peak(chosen.at_peak)
        terms = "; ".join(_term(one) for one in chosen.terms if one.high_bytes >= 1 << 20)
        yield from _wrapped(f"beside it: {terms}", "    ", "  ") if terms else ()
    told = {"one more, one less": plan.neighbours, "not counted": plan.untraced, "notes": plan.notes}
    for title, lines in told.items():
        yield from ("", title) if lines else ()
        for line in lines:
            yield from _wrapped(line, "    ", "  ")


def table(plan: Plan, captured: Captured, *, everything: bool = False) -> Iterator[str]:
    """One line a cut. Sizes in one unit; `total` is the whole device, with its low and high."""
    shown = [row for row in plan.cuts if not row.reason and (everything or _worth(row, plan))]
    most = max((row.high_bytes or 0 for row in shown), default=0)
    unit, name = (1 << 30, "GiB") if most >= 2 << 30 else (1 << 20, "MiB")
    head = ["", "strategy", "dtype", "recompute", "saved", "pieces"]
    lines = [[*head, "alloc", "resv", "total", "low-high", "update", "rows/s", f"sizes: {name}"]]
    for row in shown:
        cut = row.cut
        low, high = _number(row.low_bytes, unit), _number(row.high_bytes, unit)
        words = (cut.strategy, cut.precision, cut.activation_checkpointing, cut.saved_activations)
        sizes = (row.peak_allocated_bytes, row.peak_reserved_bytes, row.device_total_bytes)
        took = duration(row.seconds_per_update) + " data" * (row.bound_by == "data")
        speed = "?" if row.rows_per_second is None else f"{row.rows_per_second:,.0f}"
        cells = [">" if row is plan.chosen else "", *words, f"{cut.microbatches} x {cut.microbatch_size}"]
        cells += [*(_number(size, unit) for size in sizes), f"{low}-{high}", took, speed]
        lines.append([*cells, row.verdict])
    if all(row.cut.saved_activations == "keep" for row in shown):
        lines = [line[:4] + line[5:] for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        texts, figures = zip(line[:-8], widths), zip(line[-8:-1], widths[-8:])
        aligned = [text.ljust(width) for text, width in texts] + [one.rjust(width) for one, width in figures]
        yield " ".join([*aligned, line[-1]]).rstrip()
    for reason, row in {row.reason: row for row in reversed(plan.cuts) if row.reason}.items():
        again = f", recompute {row.cut.activation_checkpointing}" if row.verdict == "not possible" else ""
        what = f"{row.cut.strategy}, {row.cut.precision}{again}"
        yield from _wrapped(f"{row.verdict}: {what}: {reason}", "    ", "  ")
    if plan.chosen is not None and plan.chosen.seconds_low:
        low, high = duration(plan.chosen.seconds_low), duration(plan.chosen.seconds_high)
        bound = f", bound by {plan.chosen.bound_by}" if plan.chosen.bound_by else ""
        yield f"  time of the chosen cut: {low} to {high} an update{bound}"


def _worth(row: Row, plan: Plan) -> bool:
    """In the short table: what fits, the chosen one, and of each combination the smallest that does not."""
    if row.verdict in ("fits", "tight") or row is plan.chosen:
        return True
    same = [one for one in plan.cuts if one.cut.family == row.cut.family and one.verdict == "does not fit"]
    return row is same[-1]


def contract(row: Row, captured: Captured) -> str:
    """The contract line that the run would print."""
    from evener.report.contract import Contract, PrecisionWords, contract_line

    cut = row.cut
    compute, whole = cut.precision.removesuffix("-true"), cut.precision.endswith("-true")
    words = PrecisionWords(compute=compute)
    if compute not in ("fp32", "tf32"):
        kept = compute if whole else "fp32"
        words = PrecisionWords(compute=compute, master=kept, reduce=kept, scaler=compute == "fp16")
    notes = [f"recompute {cut.activation_checkpointing}"] * (cut.activation_checkpointing != "none")
    notes += [f"activations {cut.saved_activations}"] * (cut.saved_activations != "keep")
    by = captured.given.get("schedule_by", {}).get("value", "update") if "scheduler" in captured.given else None
    coupled = captured.slice_size is not None and not captured.exact
    sizes = {name: getattr(cut, name) for name in ("world_size", "microbatches", "microbatch_size", "strategy")}
    sizes |= {"global_batch_size": captured.global_batch_size, "slice_size": captured.slice_size}
    return contract_line(
        Contract(**sizes, precision=words, exact=captured.exact, coupled=coupled, schedule_by=by, notes=tuple(notes))
    )


def _peak(shares: Sequence[Share]) -> Iterator[str]:
    """By category, and in each the modules that hold most."""
    modules: dict[str, Counter[str]] = {}
    for one in shares:
        alike = re.sub(r"\d+", "*", one.module) or "-"  # blocks.0 and blocks.1 are of one kind
        modules.setdefault(one.category, Counter())[alike] += one.bytes
    total = {category: inside.total() for category, inside in modules.items()}
    for category in sorted(total, key=lambda name: -total[name]):
        if total[category] * 200 < sum(total.values()):
            continue
        named = [f"{name} {amount(size)}" for name, size in modules[category].most_common(3) if name != "-"]
        line = _named(named, len(modules[category]))
        while len(named) > 1 and len(line) > 70:
            named.pop()
            line = _named(named, len(modules[category]))
        line = line if len(line) <= 71 else f"{line[:68]}..."
        yield f"  {amount(total[category]):>10}  {category:<13}  {line}".rstrip()


def _named(modules: list[str], count: int) -> str:
    return ", ".join(modules) + f"; {count - len(modules)} more" * (0 < len(modules) < count)


def _term(one: Term) -> str:
    known = "" if one.low_bytes == one.high_bytes else f" ({amount(one.low_bytes)} to {amount(one.high_bytes)})"
    return f"{one.name} {amount(one.bytes)}{known}, {one.how}"


def _number(size: int | None, unit: int) -> str:
    if size is None:
        return "?"
    value = size / unit
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _wrapped(text: str, indent: str, first: str | None = None) -> list[str]:
    start = indent if first is None else first
    return textwrap.wrap(text, 100, initial_indent=start, subsequent_indent=indent, break_long_words=False) or [""]


def _say(line: str) -> None:
    """On a terminal each line in place of the last one."""
    end = {"end": ""} if sys.stderr.isatty() else {}
    print(f"\r\x1b[Kevener: {line[:90]}" if end else f"evener: {line}", **end, file=sys.stderr, flush=True)
