"""`python -m evener` is the `evener` command."""

from __future__ import annotations

import sys

from evener.cli import main

if __name__ == "__main__":
    sys.exit(main())
