"""The command line of every verb: argparse, with errors as UsageError instead of a usage dump."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from evener.errors import UsageError


def write(path: str, text: str, option: str) -> None:
    """The file of an option such as --record. Raises UsageError where it cannot be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", fix=[f"{option} FILE: elsewhere"]) from None


class Parser(argparse.ArgumentParser):
    """Long texts are shown as they are written; an option is its whole name."""

    def __init__(self, **words: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **words)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", fix=[f"{self.prog} --help"])
