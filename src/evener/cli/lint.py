"""`evener lint`: the command line of the linter."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.cli.parser import parser_of
from evener.errors import UsageError, nearest
from evener.limits import usable_cpus

if TYPE_CHECKING:
    from evener.lint import Options

KEYS = {"select": list, "ignore": list, "exclude": list, "hints": bool, "warnings-as-errors": bool}


def main(argv: list[str]) -> int:
    given = parser_of("lint").parse_args(argv)
    from evener.lint import Options, lint, output, rules

    if given.rules:
        for rule in rules.ALL:
            print(f"{rule.id:32} {rule.level:8} {rule.theme:13} {rule.fix}")
        return 0
    if not given.paths:
        raise UsageError("evener lint: which files?", fix=["evener lint PATH [PATH ...], for example: evener lint ."])
    if given.unsafe_fixes and not (given.fix or given.diff):
        fix = ["--fix --unsafe-fixes, or --diff --unsafe-fixes"]
        raise UsageError("--unsafe-fixes changes nothing by itself.", fix=fix)
    form = "json" if given.json else given.format
    table = section(given.paths[0])
    options = Options(
        select=(*given.select,) or tuple(table.get("select", ())),
        ignore=(*given.ignore, *table.get("ignore", ())),
        exclude=(*given.exclude, *table.get("exclude", ())),
        hints=given.hints or table.get("hints", False),
        processes=usable_cpus(),
    )
    changed = _fix(given, options) if given.fix or given.diff else 0
    if given.diff:
        return 1 if changed else 0
    report = lint(given.paths, options)
    if form == "json":
        print(output.as_json(report.findings))
    else:
        for line in (output.github if form == "github" else output.text)(report.findings):
            print(line)
        print(output.summary(report), file=sys.stderr if form == "github" else sys.stdout)
    strict = given.warnings_as_errors or table.get("warnings-as-errors", False)
    return 1 if report.worst() in (("error", "warning") if strict else ("error",)) else 0


def section(path: str) -> dict[str, Any]:
    """`[tool.evener.lint]` of the nearest pyproject.toml at or above the path."""
    import tomllib

    here = Path(os.path.abspath(path))
    found = (folder / "pyproject.toml" for folder in ([here] if here.is_dir() else []) + [*here.parents])
    file = next(filter(Path.is_file, found), None)
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text("utf-8")).get("tool", {}).get("evener", {}).get("lint", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is no valid TOML: {error}.", fix=["repair it, or lint from another folder"]) from None
    for key, value in table.items():
        if key not in KEYS:
            close = nearest(key, KEYS)
            raise UsageError(
                f"[tool.evener.lint] has no key {key!r}.", evidence=[str(file)],
                fix=[*([close] if close else []), f"keys: {', '.join(KEYS)}"],
            )  # fmt: skip
        if not isinstance(value, KEYS[key]):
            want = "true or false" if KEYS[key] is bool else 'a list of words: ["..."]'
            raise UsageError(f"[tool.evener.lint] {key} = {value!r}.", evidence=[str(file)], fix=[f"{key} is {want}"])
    return dict(table)


def _fix(given: argparse.Namespace, options: Options) -> int:
    """Fixes all files (or prints the difference); how many changed."""
    import difflib

    from evener.lint import engine, fix
    from evener.report.folder import write_whole

    files = engine.find(given.paths, options.exclude)
    project, _ = engine.join(files, map(engine.read_facts, files))
    chosen, changed = options.rules(), 0
    for path in files:
        if path not in project.files:
            continue  # it does not parse
        done = fix.fix_file(path, Path(path).read_bytes(), project, chosen, given.unsafe_fixes)
        for one in done.refused:
            print(
                f"{one.path}:{one.line}: the fix of {one.rule} was undone: it did not settle the finding",
                file=sys.stderr,
            )
        if done.after == done.before:
            continue
        changed += 1
        if given.diff:
            old, new = (data.decode(errors="replace").splitlines(keepends=True) for data in (done.before, done.after))
            for line in difflib.unified_diff(old, new, f"{path} (now)", f"{path} (fixed)"):
                print(line, end="" if line.endswith("\n") else "\n")
            continue
        write_whole(Path(os.path.realpath(path)), done.after)
        stream = sys.stderr if given.json or given.format != "text" else sys.stdout
        for one in done.fixed:
            print(f"fixed {one.path}:{one.line} [{one.rule}] {one.message}", file=stream)
    return changed
