"""What the site has and the folder has not: a page of every command's --help, and links into the source tree."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
VERB = re.compile(r"^  ([a-z]+) {2,}\S", re.MULTILINE)
OUTSIDE = re.compile(r"\[([^]]*)\]\((?:\.\./)+(?:tests|src|bench|examples)/[^)]*\)")


def help_of(*words: str) -> str:
    command = [sys.executable, "-m", "evener", *words, "--help"]
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


def on_files(files: Files, config) -> Files:
    overview = help_of()
    parts = ["# Every command", "What `--help` prints.", f"```text\n{overview}```"]
    for verb in VERB.findall(overview):
        parts += [f"## evener {verb}", f"```text\n{help_of(verb)}```"]
    files.append(File.generated(config, "commands.md", content="\n\n".join(parts) + "\n"))
    return files


def on_page_markdown(markdown: str, **_) -> str:
    return OUTSIDE.sub(r"`\1`", markdown)  # the source tree is no part of the site
