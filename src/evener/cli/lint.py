"""`evener lint`: the command line of the linter."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from evener.cli.parser import Parser
from evener.errors import UsageError, nearest
from evener.limits import usable_cpus

if TYPE_CHECKING:
    from evener.lint import Finding, Options

DESCRIPTION = """\
Read PyTorch scripts and name what goes wrong on several GPUs, in mixed precision and with checkpoints. Nothing is run
or imported. Every finding says why and what to do; `evener explain RULE` shows a rule with examples.
"""

EXAMPLES = """\
examples:
  evener lint train.py                        one file, with what it imports for context
  evener lint .                               all .py files and launch scripts below this folder
  evener lint --diff src                      what --fix would change
  evener lint --fix --select migrate .        torch.cuda.amp, Apex, torch.distributed.launch -> today's PyTorch
  evener lint --format github .               annotations in a workflow

silence:
  loss.backward()  # evener: ignore[accumulation-not-normalised]
  # evener: ignore-file[sync-every-step]

pyproject.toml:
  [tool.evener.lint]
  ignore = ["dataparallel"]                   rules, themes or levels
  select = []                                 if given: these only
  exclude = ["third_party"]                   folders, files or patterns
  hints = true

exit codes: 0 no error found (warnings may be), 1 an error, 2 a mistake in the call
"""
KEYS = {"select": list, "ignore": list, "exclude": list, "hints": bool, "warnings-as-errors": bool}


def parser() -> Parser:
    options = Parser(
        prog="evener lint",
        usage="evener lint [options] PATH [PATH ...]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
    )
    add = options.add_argument
    add("paths", metavar="PATH", nargs="*", help="files or folders")
    add("--select", metavar="WORDS", action="append", default=[], help="only these rules, themes or levels (comma)")
    add("--ignore", metavar="WORDS", action="append", default=[], help="not these rules, themes or levels (comma)")
    add("--exclude", metavar="PATTERN", action="append", default=[], help="folders or files to pass over; repeatable")
    add("--hints", action="store_true", help="show hints too")
    add("--warnings-as-errors", action="store_true", help="exit 1 on warnings too")
    add("--format", choices=("text", "json", "github"), default="text", help="default: text")
    add("--json", action="store_true", help="the same as --format json")
    add("--fix", action="store_true", help="rewrite the files where the fix is known and safe")
    add("--unsafe-fixes", action="store_true", help="with --fix or --diff: also fixes that need a look afterwards")
    add("--diff", action="store_true", help="print what --fix would change, change nothing")
    add("--rules", action="store_true", help="list all rules and end")
    return options


def main(argv: list[str]) -> int:
    given = parser().parse_args(argv)
    from evener.lint import Options, lint, output, rules

    if given.rules:
        for rule in rules.ALL:
            print(f"{rule.id:32} {rule.level:8} {rule.theme:13} {rule.fix}")
        return 0
    if not given.paths:
        raise UsageError("evener lint: which files?", fix=["evener lint PATH [PATH ...], for example: evener lint ."])
    if given.unsafe_fixes and not (given.fix or given.diff):
        raise UsageError(
            "--unsafe-fixes changes nothing by itself.", fix=["--fix --unsafe-fixes, or --diff --unsafe-fixes"]
        )
    form = "json" if given.json else given.format
    table = section(given.paths[0])
    options = Options(
        select=(*words(given.select),) or tuple(table.get("select", ())),
        ignore=(*words(given.ignore), *table.get("ignore", ())),
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
    elif form == "github":
        print(*output.github(report.findings), sep="\n", end="\n" if report.findings else "")
    else:
        print(*output.text(report.findings), sep="\n", end="\n" if report.findings else "")
    if form != "json":
        print(output.summary(report), file=sys.stderr if form == "github" else sys.stdout)
    strict = given.warnings_as_errors or table.get("warnings-as-errors", False)
    return 1 if report.worst() in (("error", "warning") if strict else ("error",)) else 0


def words(given: list[str]) -> list[str]:
    return [word.strip() for one in given for word in one.split(",") if word.strip()]


def section(path: str) -> dict[str, Any]:
    """`[tool.evener.lint]` of the nearest pyproject.toml at or above the path."""
    import tomllib

    folder = os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path) or ".")
    while not os.path.isfile(file := os.path.join(folder, "pyproject.toml")):
        above = os.path.dirname(folder)
        if above == folder:
            return {}
        folder = above
    try:
        with open(file, "rb") as opened:
            table = tomllib.load(opened).get("tool", {}).get("evener", {}).get("lint", {})
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{file} is no valid TOML: {error}.", fix=["repair it, or lint from another folder"]) from None
    for key, value in table.items():
        if key not in KEYS:
            close = nearest(key, KEYS)
            raise UsageError(
                f"[tool.evener.lint] has no key {key!r}.", evidence=[file],
                fix=[*([close] if close else []), f"keys: {', '.join(KEYS)}"],
            )  # fmt: skip
        if not isinstance(value, KEYS[key]):
            want = "true or false" if KEYS[key] is bool else 'a list of words: ["..."]'
            raise UsageError(f"[tool.evener.lint] {key} = {value!r}.", evidence=[file], fix=[f"{key} is {want}"])
    return dict(table)


def _fix(given: argparse.Namespace, options: Options) -> int:
    """Fixes all files (or prints the difference); how many changed."""
    import difflib

    from evener.lint import engine, fix

    files = engine.find(given.paths, options.exclude)
    project, _ = engine.join(files, map(engine.read_facts, files))
    chosen, changed = options.rules(), 0
    for path in files:
        if path not in project.files:
            continue  # it does not parse
        with open(path, "rb") as opened:
            done = fix.fix_file(path, opened.read(), project, chosen, given.unsafe_fixes)
        for one in done.refused:
            print(f"{place(one)}: the fix of {one.rule} was undone: it did not settle the finding", file=sys.stderr)
        if done.after == done.before:
            continue
        changed += 1
        if given.diff:
            old, new = (data.decode(errors="replace").splitlines(keepends=True) for data in (done.before, done.after))
            for line in difflib.unified_diff(old, new, f"{path} (now)", f"{path} (fixed)"):
                print(line, end="" if line.endswith("\n") else "\n")
            continue
        replace_file(path, done.after)
        stream = sys.stderr if given.json or given.format != "text" else sys.stdout
        for one in done.fixed:
            print(f"fixed {place(one)} [{one.rule}] {one.message}", file=stream)
    return changed


def place(one: Finding) -> str:
    return f"{one.path}:{one.line}"


def replace_file(path: str, data: bytes) -> None:
    """The new content in one move: an interrupted fix leaves the old file."""
    import shutil
    import tempfile

    real = os.path.realpath(path)
    handle, temporary = tempfile.mkstemp(dir=os.path.dirname(real), prefix=".evener-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        shutil.copymode(real, temporary)
        os.replace(temporary, real)
    except BaseException:
        os.unlink(temporary)
        raise
