"""`evener checkpoint`: what is saved in a run directory, whether it is whole, and its weights as a plain file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from evener.cli.parser import Parser

EXAMPLES = {
    "ls": "evener checkpoint ls runs/digits",
    "verify": "evener checkpoint verify runs/digits",
    "export": "evener checkpoint export runs/digits/checkpoints/best model.safetensors",
}


def parser() -> Parser:
    def one(action: str, line: str) -> Parser:
        return actions.add_parser(action, help=line, description=line, epilog=f"example:\n  {EXAMPLES[action]}")

    options = Parser(
        prog="evener checkpoint",
        description="What is in a run directory, a checkpoints folder or one checkpoint.",
        epilog="examples:\n" + "".join(f"  {line}\n" for line in EXAMPLES.values()),
    )
    actions = options.add_subparsers(dest="action", required=True, metavar="ls | verify | export")
    ls = one("ls", "list them with update and size; only the manifests are read")
    verify = one("verify", "compare every byte with its sha256; exit code 1 when one is refused")
    for action in (ls, verify):
        action.add_argument("dir", help="a run directory, its checkpoints folder, or one checkpoint")
        action.add_argument("--json", action="store_true", help="one object for each checkpoint, in a list")
    export = one("export", "write a model's weights as safetensors, with the names of the plain module")
    export.add_argument("dir", help="a checkpoint, or a run directory: its newest whole one")
    export.add_argument("file", help="ends in .safetensors")
    export.add_argument("--ema", action="store_true", help="the average of the weights instead")
    export.add_argument("--model", metavar="NAME", help="one of several models")
    return options


def main(argv: Sequence[str]) -> int:
    given = json.dumps(vars(parser().parse_args(argv)))
    # Checkpoints are read where torch is; the command line never imports it.
    return subprocess.run([sys.executable, "-m", "evener.checkpoint", given], check=False).returncode
