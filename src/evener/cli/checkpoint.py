"""`evener checkpoint`: what is saved in a run directory, whether it is whole, and its weights as a plain file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

from evener.cli.parser import Parser

EXAMPLES = """\
examples:
  evener checkpoint ls runs/digits
  evener checkpoint verify runs/digits
  evener checkpoint export runs/digits/checkpoints/best model.safetensors
"""


def parser() -> Parser:
    options = Parser(
        prog="evener checkpoint",
        description="What is in a run directory, a checkpoints folder or one checkpoint.",
        epilog=EXAMPLES,
    )
    actions = options.add_subparsers(dest="action", required=True, metavar="ls | verify | export")
    for name, line in (
        ("ls", "list them with update and size; only the manifests are read"),
        ("verify", "compare every byte with its sha256; exit code 1 when one is refused"),
    ):
        one = actions.add_parser(name, help=line, description=line)
        one.add_argument("dir")
        one.add_argument("--json", action="store_true", help="one object for each checkpoint, in a list")
    line = "write a model's weights as safetensors, with the names of the plain module"
    one = actions.add_parser("export", help=line, description=line)
    one.add_argument("dir", help="a checkpoint, or a run directory: its newest whole one")
    one.add_argument("file", help="ends in .safetensors")
    one.add_argument("--ema", action="store_true", help="the average of the weights instead")
    one.add_argument("--model", metavar="NAME", help="one of several models")
    return options


def main(argv: Sequence[str]) -> int:
    given = json.dumps(vars(parser().parse_args(argv)))
    # Checkpoints are read where torch is; the command line never imports it.
    return subprocess.run([sys.executable, "-m", "evener.checkpoint", given], check=False).returncode
