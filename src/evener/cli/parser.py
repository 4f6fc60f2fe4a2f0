"""The command line of every verb: argparse, with errors as UsageError instead of a usage dump."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from evener.errors import UsageError


def texts_of(verb: str) -> dict[str, Any]:
    """What <verb>.toml says: description, examples, and the options in the order of the help."""
    return tomllib.loads(resources.files("evener.cli").joinpath(f"{verb}.toml").read_text("utf-8"))


def parser_of(verb: str) -> Parser:
    """The command line of a verb, from its texts."""
    texts = texts_of(verb)
    about = {"description": texts["description"], "epilog": texts["examples"], "usage": texts.get("usage")}
    options = Parser(prog=f"evener {verb}", **about)
    alone: Any = None  # options of which at most one may be given
    for names, how in texts["options"].items():
        if "type" in how:
            how["type"] = TYPES[how["type"]]
        if how.pop("exclusive", False):
            alone = alone or options.add_mutually_exclusive_group()
            alone.add_argument(*names.split(), **how)
        else:
            options.add_argument(*names.split(), **how)
    return options


def seconds(word: str) -> float:
    try:
        if 0.1 <= (value := float(word)) < 1e9:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{word} is no time of at least 0.1 seconds")


def count(word: str) -> int:
    if word.isdigit():
        return int(word)
    raise argparse.ArgumentTypeError(f"{word} is not a number")


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


TYPES: dict[str, Callable[[str], Any]] = {one.__name__: one for one in (int, float, Path, seconds, count, words)}


def write(path: str, text: str, option: str) -> None:
    """The file of an option such as --record. Raises UsageError where it cannot be written."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}.", fix=[f"{option} FILE: elsewhere"]) from None


class Parser(argparse.ArgumentParser):
    """Long texts are shown as they are written; an option is its whole name."""

    def __init__(self, **words: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **words)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}.", fix=[f"{self.prog} --help"])
