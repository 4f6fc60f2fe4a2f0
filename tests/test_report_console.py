"""The console: quiet when nothing is due, plain lines in files, a bar on terminals that leaves no trace of itself."""

from __future__ import annotations

import fcntl
import io
import itertools
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time

import pytest

from evener.report import console as room
from evener.report.console import Console


class Clock:
    """`time.monotonic` by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(room, "time", one)
    return one


def fields(loss: float = 0.41234) -> dict[str, object]:
    return {"loss": loss, "lr": 1e-3, "rows_per_second": 5210.4}


def test_plain_lines_first_every_tenth_and_last(clock):
    stream = io.StringIO()
    console = Console(True, stream)
    for done in range(1, 4691):
        clock.now += 0.001
        console.progress(done, 4690, fields)
    console.progress(4690, 4690, fields)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 11
    assert lines[0] == "update 1/4,690 · loss 0.4123 · lr 1e-3 · 5,210 rows/s"
    assert lines[1] == "update 470/4,690 · loss 0.4123 · lr 1e-3 · 5,210 rows/s · 4 s left"
    assert lines[-1] == "update 4,690/4,690 · loss 0.4123 · lr 1e-3 · 5,210 rows/s"


def test_plain_lines_at_most_every_ten_seconds_and_rarer_in_long_runs(clock):
    stream = io.StringIO()
    console = Console(True, stream)
    for done in range(1, 7201):  # two hours, an update a second
        clock.now += 1.0
        console.progress(done, 1_000_000, {})
    times = [
        int(line.split("/")[0].removeprefix("update ").replace(",", "")) for line in stream.getvalue().splitlines()
    ]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert set(gaps[:50]) == {10}
    assert max(gaps) == gaps[-1] == 60
    assert len(times) < 300
    assert "left" in stream.getvalue().splitlines()[-1]


def test_values_are_read_only_when_a_line_is_due(clock):
    read = []
    console = Console(True, io.StringIO())

    def numbers() -> dict[str, object]:
        return {"loss": lambda: read.append("loss") or 0.5}

    for done in range(1, 100):
        console.progress(done, 1000, numbers)
    assert read == ["loss"]
    clock.now += 10.0
    console.progress(100, 1000, numbers)
    assert read == ["loss", "loss"]


def test_nothing_due_costs_nothing():
    console = Console(True, io.StringIO())
    console.progress(1, 10**9, fields)
    best = min(_seconds_of_a_call(console) for _ in range(5))
    assert best < 2e-6


def _seconds_of_a_call(console: Console) -> float:
    calls = 20_000
    start = time.perf_counter()
    for done in range(2, calls + 2):
        console.progress(done, 10**9, fields)
    return (time.perf_counter() - start) / calls


def test_a_second_loop_begins_anew(clock):
    stream = io.StringIO()
    console = Console(True, stream)
    for done, total in ((1, 2), (2, 2), (1, 2), (2, 2), (1, 5)):
        console.progress(done, total, {})
    assert stream.getvalue().splitlines() == [
        *("update 1/2", "update 2/2", "update 1/2", "update 2/2", "update 1/5"),
    ]


def test_without_an_end_and_with_other_values(clock):
    stream = io.StringIO()
    Console(True, stream).progress(
        1234,
        None,
        {
            "loss": float("nan"),
            "accuracy": 0.5,
            "grad_norm": None,
            "tokens_per_second": 2.5,
            "phase\x1b[31m": "warm\nup",
            "lr": 3.2e-4,
        },
    )
    assert stream.getvalue() == (
        "update 1,234 · loss nan · accuracy 0.5000 · 2.5 tokens/s · phase warm up · lr 3.2e-4\n"
    )


def test_other_ranks_show_nothing():
    stream = io.StringIO()
    console = Console(False, stream)
    console.say("x")
    console.contract("x")
    console.progress(1, 2, {"loss": lambda: 1 / 0})
    console.close()
    assert stream.getvalue() == ""


def test_foreign_text_reaches_no_terminal_as_it_is():
    stream = io.StringIO()
    Console(True, stream).say("ValueError: \x1b]0;owned\x07[bold]x[/bold]\nsecond line\x1b[2J")
    assert stream.getvalue() == "ValueError: [bold]x[/bold]\nsecond line\n"


def test_an_encoding_without_the_characters():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(True, stream).contract("global batch 512 · 中")
    assert raw.getvalue() == b"global batch 512 | ?\n"


def test_a_reader_that_went_away_does_not_end_the_run():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    console = Console(True, Closed())
    console.say("x")
    console.progress(1, 2, {})
    console.close()
    stream = io.StringIO()
    console = Console(True, stream)
    stream.close()
    console.say("x")


# --- on a terminal: a child with a pseudo-terminal, and what a terminal of 80 columns would show ---

LOOP = """
import os, signal, sys, time
from evener.report.console import Console
console = Console(True)
console.contract("global batch 512 = 4 ranks x 8 microbatches x 16 · "
    "bf16 (parameters fp32, gradients reduced in fp32) · ddp · lr per update · exact")
for done in range(1, 31):
    time.sleep(0.01)
    console.progress(done, 30, lambda: {"loss": 0.4123, "lr": 1e-3, "rows_per_second": 5210})
    BODY
console.close()
console.say("end")
"""
CONTRACT = [
    "global batch 512 = 4 ranks x 8 microbatches x 16",
    "  · bf16 (parameters fp32, gradients reduced in fp32) · ddp · lr per update",
    "  · exact",
]
LAST = "update 30/30 · loss 0.4123 · lr 1e-3 · 5,210 rows/s"


def on_terminal(code: str, columns: int = 80, **environment: str) -> str:
    """Everything that `python -c code` writes to a terminal."""
    terminal, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    given = {**inherited, "TERM": "xterm-256color", "PYTHONUTF8": "1", **environment}
    child = subprocess.Popen([sys.executable, "-c", code], stdin=theirs, stdout=theirs, stderr=theirs, env=given)
    os.close(theirs)
    parts = []
    try:
        while select.select([terminal], [], [], 20)[0]:
            parts.append(os.read(terminal, 65536))
    except OSError:  # the child has ended
        pass
    finally:
        os.close(terminal)
        child.kill()
        child.wait()
    return b"".join(parts).decode()


def screen(written: str) -> list[str]:
    """The lines that are left: carriage return, erase to the end of the line and colours are understood."""
    lines, column = [""], 0
    for text in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|.", written, re.DOTALL):
        if text == "\n":
            lines.append("")
            column = 0
        elif text == "\r":
            column = 0
        elif text == "\x1b[K":
            lines[-1] = lines[-1][:column]
        elif text.startswith("\x1b"):
            assert text.endswith("m"), f"only colours are expected, not {text!r}"
        else:
            lines[-1] = lines[-1][:column] + text + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


def drawn(written: str) -> list[str]:
    """Every state of the bar."""
    return [re.sub(r"\x1b\[[0-9;]*m", "", one) for one in re.findall(r"\r([^\r\n]+?)\x1b\[K", written)]


def test_a_bar_that_fits_80_columns_and_leaves_its_last_numbers():
    written = on_terminal(LOOP.replace("BODY", ""))
    assert screen(written) == [*CONTRACT, LAST, "end", ""]
    bars = drawn(written)
    assert 2 <= len(bars) <= 30  # at most ten a second; the wake-ups of a loaded machine come late
    assert all(len(bar) < 80 for bar in bars)
    assert bars[0].startswith("update 1/30 ")
    assert "━" in bars[1]
    assert re.search(r" +\d+% · loss 0.4123 · lr 1e-3 · 5,210 rows/s · [\d.]+ s left$", bars[1])
    assert "100% · loss 0.4123 · lr 1e-3 · 5,210 rows/s" in bars[-1]


def test_a_narrow_terminal_keeps_the_counts_and_the_time():
    written = on_terminal(LOOP.replace("BODY", ""), columns=40)
    assert all(len(bar) < 40 for bar in drawn(written))
    # On a slow machine the time may take one character less, and the rate fits.
    assert re.match(r"\d+/30 [━╸╺]{8,} +\d+% · (lr 1e-3 · )?[\d.]+ s left$", drawn(written)[1])


def test_prints_and_half_lines_of_the_user_stay_whole():
    body = """
    if done == 10: print("a line", file=sys.stderr)
    if done == 15: print("half", end="", flush=True); time.sleep(0.15)
    if done == 20: print(" and half")
    """
    written = on_terminal(LOOP.replace("BODY", body))
    assert screen(written) == [*CONTRACT, "a line", "half and half", LAST, "end", ""]
    assert written.split("half", 1)[1].startswith(" and half")  # no bar was drawn behind the half line


def test_a_redirected_stream_keeps_its_file(tmp_path):
    body = f"""
    if done == 1: sys.stderr = open({str(tmp_path / "err")!r}, "w")
    if done == 10: print("to the file", file=sys.stderr, flush=True)
    """
    written = on_terminal(LOOP.replace("BODY", body))
    assert screen(written) == [*CONTRACT, LAST, "end", ""]
    assert (tmp_path / "err").read_text() == "to the file\n"


def test_an_exception_leaves_a_clean_terminal():
    shown = screen(on_terminal(LOOP.replace("BODY", "if done == 30: raise ValueError('boom')")))
    assert shown[:3] == CONTRACT
    assert shown[3] == "Traceback (most recent call last):"
    assert shown[-3:] == ["ValueError: boom", LAST, ""]


def test_ctrl_c_leaves_a_clean_terminal():
    shown = screen(on_terminal(LOOP.replace("BODY", "if done == 30: os.kill(os.getpid(), signal.SIGINT)")))
    assert shown[-3:] == ["KeyboardInterrupt", LAST, ""]


def test_the_streams_are_given_back():
    check = "\nprint(type(sys.stdout).__name__, type(sys.stderr).__name__)"
    assert screen(on_terminal(LOOP.replace("BODY", "") + check))[-2] == "TextIOWrapper TextIOWrapper"


def test_no_color_is_respected():
    coloured, plain = (on_terminal(LOOP.replace("BODY", ""), **one) for one in ({}, {"NO_COLOR": "1"}))
    assert "\x1b[36m" in coloured
    assert not re.search(r"\x1b\[[0-9;]*m", plain)
    assert screen(plain) == [*CONTRACT, LAST, "end", ""]


def test_a_dumb_terminal_gets_lines():
    shown = on_terminal(LOOP.replace("BODY", ""), TERM="dumb")
    assert "\x1b" not in shown
    assert shown.replace("\r\n", "\n").endswith(f"{LAST}\nend\n")


def test_rich_is_imported_for_a_bar_only():
    code = (
        "import sys; from evener.report.console import Console; console = Console(True); console.contract('a · b');"
        "console.progress(1, 2, {'loss': 1.0}); console.close(); print('rich' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["a · b", "update 1/2 · loss 1.0000", "False"]
