"""From paths to findings: which files, in how many processes, with which rules."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial

from evener.errors import UsageError, nearest
from evener.lint import rules
from evener.lint.file import File
from evener.lint.project import Facts, Project, facts
from evener.lint.rule import LEVELS, Finding, Rule

# What no rule looks into. Folders that begin with a dot are passed over too.
EXCLUDED = ("__pycache__", "venv", "env", "build", "dist", "node_modules", "site-packages", "wandb", "*.egg-info")
# A file without any of these words has nothing to say: it is not parsed.
WORDS = re.compile(rb"torch|apex|evener|accelerat|nvidia-smi|CUDA_VISIBLE|MASTER_|LOCAL_RANK|local_rank|set_epoch")
TESTS = re.compile(r"^test_.*\.py$|_test\.py$|^conftest\.py$")
SCRIPTS = (".sh", ".slurm", ".sbatch", ".bash")  # only their launch lines are read
PARALLEL_FROM = 24  # below so many files, starting processes costs more than it brings
CONTEXT_FILES = 24  # imported files that are read for one that is linted


@dataclass(frozen=True)
class Options:
    """What to look for. `select` and `ignore` hold rule ids, themes ("migrate") and levels ("hint")."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    hints: bool = False
    processes: int = 1  # more are started for many files; they import the main module, which then needs its guard

    def rules(self) -> tuple[Rule, ...]:
        """The chosen rules. `UsageError` for a word that is none."""
        names = {rule: {rule.id, rule.theme, rule.level} for rule in rules.ALL}
        words = set[str]().union(LEVELS, *names.values())
        for word in (*self.select, *self.ignore):
            if word not in words:
                close = nearest(word, words)
                fix = [*([close] if close else []), "rules and themes: evener lint --rules"]
                raise UsageError(f"{word!r} is no rule, theme or level of evener lint.", fix=fix)
        selected = self.select or tuple(level for level in LEVELS if level != "hint" or self.hints)
        return tuple(rule for rule, own in names.items() if own & set(selected) and not own & set(self.ignore))


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]
    files: int  # looked at

    def worst(self) -> str | None:
        levels = {one.level for one in self.findings}
        return next((level for level in LEVELS if level in levels), None)


def lint(paths: Sequence[str | os.PathLike[str]], options: Options | None = None) -> Report:
    """Findings of all files below `paths`, sorted by path and line.

    `UsageError` for a path that is not there, or a word in `select` that is no rule.
    """
    options = options or Options()
    chosen = options.rules()
    files = find([os.fspath(path) for path in paths], options.exclude)
    collects = gc.isenabled()
    gc.disable()  # trees hold no circles: looking for them costs a quarter of the time
    try:
        findings = _all(files, chosen, options.processes)
    finally:
        if collects:
            gc.enable()
    return Report(tuple(sorted(findings, key=lambda one: (one.path, one.line, one.column, one.rule))), len(files))


def _all(files: list[str], chosen: tuple[Rule, ...], workers: int) -> list[Finding]:
    if len(files) < PARALLEL_FROM or workers == 1:
        kept: dict[str, File] = {}  # each is parsed once
        project, broken = join(files, map(partial(read_facts, keep=kept), files))
        return [one for path in files for one in check(project, chosen, path, kept.pop(path, None))] + broken
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    chunk = max(1, min(32, len(files) // (workers * 4)))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=gc.disable) as pool:
        project, broken = join(files, pool.map(read_facts, files, chunksize=chunk))
        # The project goes once to each worker's chunk, not once per file.
        parts = [files[i : i + chunk] for i in range(0, len(files), chunk)]
        results = pool.map(partial(_check_many, project.files, [rule.id for rule in chosen]), parts)
        return [one for result in results for one in result] + broken


def join(files: list[str], read: Iterable[Facts | Finding]) -> tuple[Project, list[Finding]]:
    """The project of these files and of what they import, and the findings of those that do not parse."""
    collected = list(read)
    known = {one.path: one for one in collected if isinstance(one, Facts)}
    waiting = [(path, dotted) for path, one in known.items() for dotted in one.imports]
    budget = CONTEXT_FILES if len(files) < PARALLEL_FROM else 4 * CONTEXT_FILES
    while waiting and budget:
        path, dotted = waiting.pop(0)
        candidate = next((one for one in _on_disk(path, dotted) if one not in known and os.path.isfile(one)), None)
        if candidate is not None:
            budget -= 1
            one = read_facts(candidate)
            if isinstance(one, Facts):
                known[candidate] = one
                waiting += [(candidate, more) for more in one.imports]
    return Project(known.values()), [one for one in collected if isinstance(one, Finding)]


def _on_disk(path: str, dotted: str) -> Iterator[str]:
    """Where the module would be: beside the importing file, or one or two folders above."""
    bare = dotted.lstrip(".")
    if not bare or bare.split(".")[0] in ("torch", "numpy", "os", "sys", "torchvision", "transformers"):
        return
    folder, level = os.path.dirname(path), len(dotted) - len(bare)
    for _ in range(level - 1):
        folder = os.path.dirname(folder)
    for _ in range(1 if level else 3):
        yield os.path.join(folder, *bare.split(".")) + ".py"
        yield os.path.join(folder, *bare.split("."), "__init__.py")
        folder = os.path.dirname(folder)


def find(paths: list[str], exclude: Sequence[str] = ()) -> list[str]:
    """All Python files (and launch scripts) below the paths. A file that is named is taken, whatever its name."""

    def matches(folder: str, name: str, patterns: Sequence[str]) -> bool:
        return any(fnmatch(name, one) or fnmatch(os.path.join(folder, name), one) for one in patterns)

    found: dict[str, None] = {}
    for path in paths:
        if os.path.isfile(path):
            found[path] = None
        elif not os.path.isdir(path):
            fix = ["evener lint PATH [PATH ...], files or folders"]
            raise UsageError(f"There is no file or folder {path}.", fix=fix)
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(
                one for one in inner
                if not one.startswith(".") and not matches(folder, one, (*EXCLUDED, *exclude))
                and not os.path.exists(os.path.join(folder, one, "pyvenv.cfg"))
            )  # fmt: skip
            for name in sorted(names):
                if name.endswith((".py", *SCRIPTS)) and not matches(folder, name, exclude):
                    found[os.path.normpath(os.path.join(folder, name))] = None
    return list(found)


def read_facts(path: str, keep: dict[str, File] | None = None) -> Facts | Finding:
    """What the project needs of one file; a finding "unreadable" where it does not parse."""
    line = 1
    try:
        with open(path, "rb") as opened:
            data = opened.read()
        package = path.endswith("__init__.py") and len(data) < 20_000  # it may pass names on
        if path.endswith(SCRIPTS) or not (package or WORDS.search(data)):
            return Facts(path)
        file = File(path, data)
        if keep is not None:
            keep[path] = file
        return facts(file)
    except OSError as error:
        why = f"cannot be read: {error.strerror}"
    except SyntaxError as error:
        line, why = error.lineno or 1, f"does not parse as Python: {error.msg}"
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        why = f"does not parse as Python: {type(error).__name__}: {error}"
    said = f"{why}; the file was passed over"
    return Finding(path, line, 1, "unreadable", "warning", said, "repair it, or --exclude it")


def _check_many(known: dict[str, Facts], ids: list[str], files: list[str]) -> list[Finding]:
    project, chosen = Project(known.values()), tuple(rule for rule in rules.ALL if rule.id in ids)
    return [one for path in files for one in check(project, chosen, path)]


def check(project: Project, chosen: tuple[Rule, ...], path: str, file: File | None = None) -> list[Finding]:
    """All findings of one file on disk."""
    if path not in project.files:
        return []
    with open(path, "rb") as opened:
        return check_data(project, chosen, path, opened.read(), file)


def check_data(
    project: Project, chosen: tuple[Rule, ...], path: str, data: bytes, file: File | None = None
) -> list[Finding]:
    """All findings of one file with this content, without those silenced by comments."""
    if path.endswith(SCRIPTS):
        return list(rules.migrate.in_script(path, data)) if rules.migrate.torch_distributed_launch in chosen else []
    if not WORDS.search(data):
        return []
    file = file or File(path, data)
    file.join(project)
    lines, whole = file.ignores()
    tests = bool(TESTS.search(os.path.basename(path)))
    asked = [rule for rule in chosen if (rule.in_tests or not tests) and not {rule.id, "*"} & whole]
    found = dict.fromkeys(one for rule in asked for one in rule.findings(file))
    return [one for one in found if not {one.rule, "*"} & lines.get(one.line, set())]


def with_file(project: Project, path: str, data: bytes) -> Project:
    """The project with other content for one file (while it is being fixed)."""
    return Project([facts(File(path, data)), *(other for other in project.files.values() if other.path != path)])
