"""The contract line, held as text."""

from __future__ import annotations

import pytest

from evener.report.contract import Contract, PrecisionWords, contract_line, lr_line
from evener.report.text import clean, format_count, format_lr, format_number, format_seconds

BF16 = PrecisionWords(compute="bf16")


def line(**changes: object) -> str:
    plain = {"global_batch_size": 512, "world_size": 1, "microbatches": 1, "microbatch_size": 512}
    return contract_line(Contract(**{**plain, **changes}))  # type: ignore[arg-type]


def product(size: int, ranks: int, microbatches: int, rows: int, slice_size: int | None = None) -> str:
    text = line(
        global_batch_size=size,
        world_size=ranks,
        microbatches=microbatches,
        microbatch_size=rows,
        slice_size=slice_size,
    )
    return text.split(" · ")[0]


def test_the_whole_line():
    four = {"world_size": 4, "microbatches": 8, "microbatch_size": 16, "slice_size": 16}
    assert line(**four, precision=BF16, strategy="ddp", exact=True) == (
        "global batch 512 = 4 ranks x 8 microbatches x 16 · bf16 (parameters fp32, gradients reduced in fp32)"
        " · ddp · lr per update · exact"
    )


def test_the_plainest_line():
    assert line() == "global batch 512 = 1 rank x 1 microbatch x 512 · fp32 · single · lr per update"


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ((512, 1, 8, 64), "global batch 512 = 1 rank x 8 microbatches x 64"),
        ((1048576, 64, 8, 2048), "global batch 1,048,576 = 64 ranks x 8 microbatches x 2,048"),
        ((9, 2, 1, 5), "global batch 9 = 2 ranks x 1 microbatch x up to 5"),
        ((9, 2, 2, 3), "global batch 9 = 2 ranks x 2 microbatches x up to 3"),  # 5 = 3 + 2 and 4 = 3 + 1
        ((10, 4, 3, 1), "global batch 10 = 4 ranks x up to 3 microbatches x 1"),  # 3, 3, 2, 2 rows
        ((10, 3, 2, 3), "global batch 10 = 3 ranks x up to 2 microbatches x up to 3"),  # 4, 3, 3 rows
        ((3, 4, 1, 1), "global batch 3 = 4 ranks x up to 1 microbatch x 1"),  # one rank has none
        ((10, 1, 3, 4), "global batch 10 = 1 rank x 3 microbatches x up to 4"),
        ((48, 4, 3, 4, 4), "global batch 48 = 4 ranks x 3 microbatches x 4"),
        ((20, 3, 2, 4, 4), "global batch 20 = 3 ranks x up to 2 microbatches x 4"),  # five slices: 2, 2, 1
        ((18, 3, 2, 4, 4), "global batch 18 = 3 ranks x up to 2 microbatches x up to 4"),  # the last slice has 2 rows
    ],
)
def test_the_product(factors, text):
    assert product(*factors) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (PrecisionWords(), "fp32"),
        (BF16, "bf16 (parameters fp32, gradients reduced in fp32)"),
        (
            PrecisionWords(compute="fp16", scaler=True),
            "fp16 with loss scaling (parameters fp32, gradients reduced in fp32)",
        ),
        (PrecisionWords(compute="tf32"), "tf32 (parameters fp32, gradients reduced in fp32)"),
        (PrecisionWords(compute="bf16", reduce="bf16"), "bf16 (parameters fp32, gradients reduced in bf16)"),
        (PrecisionWords(compute="bf16", master="bf16", reduce="bf16"), "bf16 throughout"),
    ],
)
def test_precision(words, text):
    assert line(precision=words).split(" · ")[1] == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"exact": True, "slice_size": 512}, "exact"),
        ({"exact": True, "slice_size": 32}, "exact (slices of 32)"),
        ({"coupled": True, "slice_size": 512}, "coupled (slices of 512)"),
        ({"exact": True, "coupled": True, "slice_size": 32}, "exact, coupled (slices of 32)"),
        ({"schedule_by": "epoch"}, "lr per epoch"),
        ({"schedule_by": None}, "lr constant"),
        ({"one_scalar_read": True}, "one scalar read per update: this optimizer cannot skip on the device"),
        ({"approximate": ("int8 activations", "local SGD")}, "approximate: int8 activations, local SGD"),
        ({"notes": ("BatchNorm found", "close, not exact")}, "BatchNorm found · close, not exact"),
    ],
)
def test_what_else_is_said(changes, text):
    assert line(**changes).endswith(f" · {text}")


def test_lr_lines():
    assert lr_line(1e-3, 1e-5, 4690) == "lr 1e-3 -> 1e-5 over 4,690 updates"
    assert lr_line(1e-3, 1e-3, 1) == "lr 1e-3, constant over 1 update"
    assert lr_line(0.0, 0.0, 100, peak=1e-3) == "lr 0 -> 1e-3 -> 0 over 100 updates"
    assert lr_line(1e-3, 0, 100, peak=1e-3) == "lr 1e-3 -> 0 over 100 updates"
    assert lr_line(1e-3, 1e-3, None) == "lr 1e-3, constant"
    assert lr_line(1e-3, 1e-5, 100, schedule_updates=95) == "lr 1e-3 -> 1e-5 over 100 updates"


def test_a_schedule_that_does_not_fit_is_said():
    assert lr_line(1e-3, 1e-5, 4690, schedule_updates=10) == (
        "lr 1e-3 -> 1e-5 over 4,690 updates\n"
        '  warning: the schedule ends after 10 updates, the run after 4,690 (schedule_by="epoch"?)'
    )
    assert lr_line(1e-3, 9e-4, 4690, schedule_updates=46900) == (
        "lr 1e-3 -> 9e-4 over 4,690 updates\n"
        "  warning: the schedule needs 46,900 updates, the run ends after 4,690: it never arrives"
    )


def test_numbers_are_worded():
    assert [format_lr(x) for x in (1e-3, 3.2e-4, 0.1, 0.05, 1.0, 0, 1.234e-5, 2e-10, 0.01, 0.00999, float("nan"))] == [
        *("1e-3", "3.2e-4", "0.1", "0.05", "1", "0", "1.23e-5", "2e-10", "0.01", "9.99e-3", "nan")
    ]
    numbers = (0.4123, 2.302585, 12.3456, 123.456, 1234.5, 0.0, 9.99999, 1e-5, 2.5e7, -0.5, float("inf"), 12345)
    assert [format_number(x) for x in numbers] == [
        *("0.4123", "2.3026", "12.346", "123.46", "1,234.5", "0.0000", "10.0000", "1e-5", "2.5e7", "-0.5000", "inf"),
        "12,345",
    ]
    seconds = (0.42, 0.97, 12, 59.6, 200, 3599.7, 7500, 86399, 273600, float("inf"))
    assert [format_seconds(x) for x in seconds] == [
        *("0.4 s", "1 s", "12 s", "1 min 00 s", "3 min 20 s", "1 h 00 min", "2 h 05 min", "23 h 59 min", "3 d 04 h"),
        "?",
    ]
    assert format_count(1234567) == "1,234,567"


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain · 中文 é", "plain · 中文 é"),
        ("\x1b[31mred\x1b[0m \x1b[2J", "red "),
        ("\x9b31mred", "red"),
        ("a\x1b]0;title\x07b\x1b]8;;http://x\x1b\\c", "abc"),
        ("a\x1b]0;never ended", "a"),
        ("\x1bPdevice\x1b\\x\x1bcy", "xy"),
        ("bell\x07 back\x08 nul\x00 del\x7f", "bell back nul del"),
        ("one\r\ntwo\nthree\tfour\rfive", "one two three fourfive"),
        ("\u202eevil\u2066", "evil"),
        ("\udcff.txt", "\ufffd.txt"),
        (ValueError("x"), "x"),
    ],
)
def test_foreign_text_is_harmless(text, cleaned):
    assert clean(text) == cleaned


def test_line_ends_stay_where_asked():
    assert clean("a\r\n\tb\x1b[1m\nc", lines=True) == "a\n\tb\nc"
