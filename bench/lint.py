"""Recall and precision of `evener lint` on known places in public repositories, and its speed.

    python -m bench.lint --checkouts DIR [--part develop|held-out|all] [--missed]

DIR holds one folder per repository, named owner__name, at the commit of the list (tests/cases/lint_instances.tsv). The
held-out part is two fifths of the repositories, drawn with seed 9 before the first rule was written.
"""

from __future__ import annotations

import argparse
import csv
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

from evener.lint import Options, lint, rules

LIST = Path(__file__).parents[1] / "tests" / "cases" / "lint_instances.tsv"


def held_out(rows: list[dict[str, str]]) -> set[str]:
    repos = sorted({row["repo"] for row in rows})
    random.Random(9).shuffle(repos)
    return set(repos[: len(repos) * 2 // 5])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--checkouts", type=Path, required=True)
    options.add_argument("--part", choices=("develop", "held-out", "all"), default="all")
    options.add_argument(
        "--missed", action="store_true", help="name every missed instance, fired trap and loud clean script"
    )
    options.add_argument(
        "--alone", action="store_true", help="lint every listed file alone, without the rest of its repository"
    )
    given = options.parse_args()
    with LIST.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    out = held_out(rows)
    if given.part != "all":
        rows = [row for row in rows if (row["repo"] in out) == (given.part == "held-out")]
    level = {rule.id: rule.level for rule in rules.ALL}
    found: dict[tuple[str, str], dict[int, set[str]]] = {}
    started, files = time.perf_counter(), 0
    wanted = Options(hints=True, processes=2)
    for repo in sorted({row["repo"] for row in rows}):
        folder = given.checkouts / repo.replace("/", "__")
        paths = sorted({folder / row["path"] for row in rows if row["repo"] == repo})
        for group in [[one] for one in paths] if given.alone else [[folder]]:
            report = lint(group, wanted)
            files += report.files
            for one in report.findings:
                key = (repo, str(Path(one.path).relative_to(folder)))
                found.setdefault(key, defaultdict(set))[one.line].add(one.rule)
    seconds = time.perf_counter() - started
    total, hit, missed = Counter[str](), Counter[str](), []
    fired, loud = [], []
    for row in rows:
        here = found.get((row["repo"], row["path"]), {})
        at = f"{row['repo']} {row['path']}:{row['line']} {row['rule']}  {row['note']}"
        if row["kind"] == "instance":
            kind = level.get(row["rule"], "none")
            total[kind] += 1
            if row["rule"] in here.get(int(row["line"]), set()):
                hit[kind] += 1
            else:
                near = sorted(line for line, names in here.items() if row["rule"] in names)
                missed.append(f"{kind:8} {at}" + (f"  (fires at {near})" if near else ""))
        elif row["kind"] == "trap":
            if row["rule"] in here.get(int(row["line"]), set()):
                fired.append(at)
        else:
            shown = [f"{line} {name}" for line, names in here.items() for name in names if level.get(name) != "hint"]
            loud += [f"{row['repo']} {row['path']}: {', '.join(shown)}"] if shown else []
    for kind in ("error", "warning", "hint", "none"):
        if total[kind]:
            print(f"{kind:8} {hit[kind]:3} of {total[kind]:3}  {hit[kind] / total[kind]:.1%}")
    print(f"all      {hit.total():3} of {total.total():3}  {hit.total() / max(total.total(), 1):.1%}")
    print(f"traps fired {len(fired)} of {sum(row['kind'] == 'trap' for row in rows)}")
    print(f"clean scripts with a warning or an error {len(loud)} of {sum(row['kind'] == 'clean' for row in rows)}")
    print(f"{files} files in {seconds:.1f} s")
    if given.missed:
        for title, lines in (("missed", missed), ("fired traps", fired), ("loud", loud)):
            print(f"\n{title}", *lines, sep="\n  ")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
