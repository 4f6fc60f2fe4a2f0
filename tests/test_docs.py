"""The documentation is true: tables match the code, links lead somewhere, both READMEs are in step, marked blocks run."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
import tokenize
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from evener import errors
from evener.config import Config
from evener.report.events import KINDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"^(?P<mark><!-- run -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[bool, str, str]]:
    """(marked to run, language, text) of every fenced block."""
    found = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [(bool(block["mark"]), block["language"], block["text"]) for block in found]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def table(page: str, first_column: str) -> list[list[str]]:
    """The rows of the table whose first column has this title."""
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def bare(cell: str) -> str:
    return cell.strip("`")


def test_both_readmes_have_the_same_blocks_and_as_many_headings():
    english, chinese = ROOT / "README.md", ROOT / "README.zh-CN.md"
    assert blocks(english) == blocks(chinese)
    levels = [re.findall(r"^#+", prose(page), re.MULTILINE) for page in (english, chinese)]
    assert levels[0] == levels[1]
    links = [re.findall(r"\]\(([^)]+)\)", prose(page)) for page in (english, chinese)]
    assert links[0][1:] == links[1][1:]  # the first is the other language


def test_both_five_minutes_have_the_same_code_and_pictures():
    pages = [ROOT / "docs" / folder / "five-minutes.md" for folder in ("guide", "zh")]
    code = [[text for _, language, text in blocks(page) if language != "console"] for page in pages]
    pictures = [re.findall(r"!\[.*?\]\((.*?)\)", prose(page)) for page in pages]
    levels = [re.findall(r"^#+", prose(page), re.MULTILINE) for page in pages]
    assert code[0] == code[1] and pictures[0] == pictures[1] and levels[0] == levels[1]


def test_both_main_pages_lead_to_the_same_places():
    pages = [ROOT / "docs" / name for name in ("index.md", "zh/index.md")]
    links = [[(page.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", prose(page))] for page in pages]
    english, chinese = [[link for link in of if link not in (page.resolve() for page in pages)] for of in links]
    assert [link.name for link in english] == [link.name for link in chinese]


def test_the_readme_stays_one_page():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 315


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            titles = re.findall(r"^#+ (.*)$", prose(target), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles], link


def test_every_keyword_is_in_the_table_with_its_group_and_default():
    shown = [tuple(bare(cell) for cell in row[:3]) for row in table("keywords.md", "keyword")]
    expected = []
    for field in fields(Config):
        if field.name == "origins":
            continue
        default = "required" if field.default is MISSING else repr(field.default).replace("'", '"')
        expected.append((field.name, field.metadata["group"], default))
    assert shown == expected


def test_every_event_is_in_the_table():
    shown = {
        bare(kind): (says, tuple(re.findall(r"`(\w+)`", names))) for kind, says, names in table("events.md", "kind")
    }
    assert shown == dict(KINDS)


def test_every_promise_names_tests_that_are_there():
    page = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", page)
    assert [row[0].split()[0] for row in table("faults.md", "promise")] == [f"R{number}" for number in range(1, 23)]
    for file, name in named:
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"
    assert len(named) > 30


def test_every_exit_code_is_in_the_table():
    from evener.run import Stopped

    shown = {bare(row[0]): int(row[1]) for row in table("events.md", "exception")}
    classes = [one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, errors.EvenerError)]
    assert shown == {one.__name__: one.exit_code for one in classes} | {"Stopped": Stopped("").code}


def only_on_cuda(source: str) -> bool:
    """Whether the code itself, not its comments and messages, names CUDA or NCCL."""
    words = [
        token.string
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type in (tokenize.NAME, tokenize.OP) or token.string in ('"cuda"', '"nccl"')
    ]
    text = "".join(words)
    return any(word in text for word in ("torch.cuda", '"cuda"', '"nccl"', ".is_cuda", "pynvml"))


def test_every_file_with_lines_for_cuda_is_in_the_table():
    source = ROOT / "src" / "evener"
    shown = {bare(row[0]) for row in table("measurements.md", "file")}
    found = {str(file.relative_to(source)) for file in source.rglob("*.py") if only_on_cuda(file.read_text("utf-8"))}
    assert shown == {file for file in found if not file.startswith("lint/")}  # rules read such words in scripts


def test_the_file_tree_names_what_is_there():
    tree = next(text for _, _, text in blocks(ROOT / "README.md") if text.startswith("src/evener/\n"))
    folders: list[tuple[int, Path]] = []
    named = set()
    for line in tree.splitlines():
        depth, name = len(line) - len(line.lstrip()), line.split()[0]
        folders = [(at, folder) for at, folder in folders if at < depth]
        path = (folders[-1][1] if folders else ROOT) / name
        assert path.exists(), line
        named.add(path)
        if name.endswith("/"):
            folders.append((depth, path))
    rooms = {folder.parent for folder in (ROOT / "src" / "evener").glob("*/__init__.py")}
    assert rooms <= named
    assert set((ROOT / "examples").glob("*.py")) <= named


def test_every_page_is_in_the_site():
    listed = set(re.findall(r"([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages == listed - {"commands.md"}  # made when the site is built


RUNNABLE = [
    pytest.param(language, text, id=f"{page.name}-{number}")
    for page in PAGES
    if page.name != "README.zh-CN.md"  # its blocks are those of README.md
    for number, (marked, language, text) in enumerate(blocks(page))
    if marked
]


# Blocks that are not marked, and the test that runs them.
ELSEWHERE = {
    "lint.md": "test_lint_rules.py",  # each rule's wrong and right code, from the rules
    "loggers.md": "test_loggers_of_others.py",
    "migrate": "test_migration_pages.py",
    "five-minutes.md": "test_docs.py",  # in Chinese: the code of the English page
    "gpus.md": "test_docs.py",
    "run.md": "test_docs.py",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_block_of_python_is_left_out(page):
    left = [text for marked, language, text in blocks(page) if language in ("python", "diff") and not marked]
    runs = ELSEWHERE.get(page.name, ELSEWHERE.get(page.parent.name))
    assert not left or page.name == "README.zh-CN.md" or (runs and (ROOT / "tests" / runs).is_file()), left
    assert len(left) <= 1 or runs != "test_docs.py"


def unmarked(page: str) -> str:
    return next(text for marked, language, text in blocks(ROOT / "docs" / page) if language == "python" and not marked)


def test_the_block_about_picking_gpus_says_that_there_are_none(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(errors.EvenerError, match="GPU"):
        run_here(unmarked("gpus.md"), tmp_path, monkeypatch)


CELL = """
import torch, evener
from torch.nn import functional as F
make_model = lambda: torch.nn.Linear(4, 3)
loss_fn = lambda model, batch: (
    F.cross_entropy(model(batch[0]), batch[1]),
    {"accuracy": evener.Mean(total=(model(batch[0]).argmax(1) == batch[1]).sum(), count=len(batch[1]))},
)
x = torch.randn(128, 4)
train_set = validation_set = (x, x.argmax(1) % 3)
"""


@pytest.mark.full
def test_the_cell_about_spawning_gives_one_result_a_rank(tmp_path):
    script = f"{CELL}{unmarked('run.md')}\nassert 0 <= accuracy <= 1 and set(weights) == {{'weight', 'bias'}}\n"
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environ, check=True, timeout=300)


def sides(language: str, text: str) -> list[str]:
    """The scripts in a block: a `diff` is the one before and the one after."""
    if language != "diff":
        return [text]
    lines = text.splitlines(keepends=True)
    return ["".join(line[1:] or "\n" for line in lines if line[0] != sign) for sign in "+-"]


def run_here(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, because importing torch would cost more than the script."""
    monkeypatch.chdir(folder)
    monkeypatch.delenv("EVENER_PLAN", raising=False)
    monkeypatch.setattr(sys, "argv", ["block.py"])
    (folder / "block.py").write_text(script, encoding="utf-8")
    runpy.run_path("block.py", run_name="__main__")


@pytest.mark.parametrize("language, text", RUNNABLE)
def test_marked_blocks_run(tmp_path, monkeypatch, language, text):
    for script in sides(language, text):
        run_here(script, tmp_path, monkeypatch)


def test_the_ported_script_prints_on_one_process_what_the_readme_shows_of_four(tmp_path, monkeypatch, capsys):
    """Rows and learning rates as they are; losses up to the order of sums."""
    _, language, port = next(block for block in blocks(ROOT / "README.md") if block[0])
    shown = next(text for _, _, text in blocks(ROOT / "README.md") if "--nproc 4 --cpu train.py" in text)
    run_here(sides(language, port)[1], tmp_path, monkeypatch)
    printed, expected = (
        [line.partition(" loss ") for line in text.splitlines() if line.startswith(("rows", "epoch"))]
        for text in (capsys.readouterr().out, shown)
    )
    assert [words for words, _, _ in printed] == [words for words, _, _ in expected]
    losses = [[float(loss) for _, _, loss in lines if loss] for lines in (printed, expected)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], abs=2e-5)


def test_the_numbers_of_kinds_and_rules_are_those_that_there_are():
    kinds = len(list((ROOT / "src/evener/explain/kinds").glob("*.toml")))
    rules = sum(path.read_text("utf-8").count("\n@rule") for path in (ROOT / "src/evener/lint/rules").glob("*.py"))
    for name in ("README.md", "README.zh-CN.md", "CHANGELOG.md"):
        text = (ROOT / name).read_text("utf-8")
        assert set(re.findall(r"(\d+) (?:kinds|种故障)", text)) == {str(kinds)}, name
        assert set(re.findall(r"(\d+) (?:rules|条规则)", text)) == {str(rules)}, name
