"""`evener checkpoint`: what is saved in a run directory, whether it is whole, and its weights as a plain file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    # Checkpoints are read where torch is; the command line never imports it.
    return subprocess.run([sys.executable, "-m", "evener.checkpoint", *argv], check=False).returncode
