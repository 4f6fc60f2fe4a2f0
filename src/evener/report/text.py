"""How numbers are worded, and what foreign text must lose before it may reach a terminal."""

from __future__ import annotations

import math
import re

# Sequences first, so that no "[31m" is left over from a colour; then every other character that moves or hides text.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # CSI: colours, cursor
    r"|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)?"  # OSC: titles, links, the clipboard
    r"|\x1b[PX^_][^\x1b\n]*(?:\x1b\\)?"  # DCS and its kin
    r"|\x1b[ -/]*[0-~]?"
)
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]"  # C0, C1, text direction
)
_SURROGATES = re.compile("[\ud800-\udfff]")  # undecodable bytes of a file name: no stream can write them


def clean(text: object, *, lines: bool = False) -> str:
    """Foreign `text` without anything that a terminal would act on. Line ends stay with `lines=True`, or are spaces."""
    plain = str(text)
    if plain.isprintable():
        return plain
    plain = _SEQUENCES.sub("", plain.replace("\r\n", "\n"))
    if not lines:
        plain = plain.replace("\n", " ").replace("\t", " ")
    return _SURROGATES.sub("\ufffd", _CONTROLS.sub("", plain))


def format_count(value: int) -> str:
    """12345 -> 12,345"""
    return f"{value:,}"


def format_lr(value: float) -> str:
    """0.001 -> 1e-3, 0.00032 -> 3.2e-4, 0.1 -> 0.1: three significant digits, no zeros that say nothing."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def format_number(value: float) -> str:
    """A loss or a metric, in a width that hardly changes from update to update: 0.4123, 12.346, 1,234.6."""
    size = abs(value)
    if isinstance(value, int) or not math.isfinite(value) or size == 0:
        return f"{value:,}" if isinstance(value, int) else f"{value:.4f}" if size == 0 else str(value)
    if size < 1e-3 or size >= 1e6:
        return format_lr(value)
    return f"{value:,.{max(1, 4 - max(0, math.floor(math.log10(size))))}f}"


def format_seconds(value: float) -> str:
    """0.42 -> 0.4 s, 12 s, 3 min 20 s, 2 h 05 min, 3 d 04 h; a value that is not finite is `?`."""
    if not math.isfinite(value):
        return "?"
    if value < 0.95:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    minutes, seconds = divmod(seconds, 60)
    hours, days = minutes // 60, minutes // 1440
    if days:
        return f"{days} d {hours % 24:02d} h"
    return f"{hours} h {minutes % 60:02d} min" if hours else f"{minutes} min {seconds:02d} s"
