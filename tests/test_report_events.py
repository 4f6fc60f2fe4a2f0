"""events.jsonl: strict JSON, one line an event, no line lost to a torn neighbour."""

from __future__ import annotations

import json
import math
import os

import numpy as np
import pytest

from evener.report.events import KINDS, Events, read_events


def lines(path) -> list[str]:
    return path.read_text().splitlines()


def test_every_event_has_its_time_kind_update_and_rank(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    events.write("stop", update=3, rank=1, reason="SIGTERM", more=[1, 2])
    events.write("warning", text="a\nb")
    events.close()
    first, second = (json.loads(line) for line in lines(tmp_path / "events.jsonl"))
    assert list(first) == ["t", "kind", "update", "rank", "reason", "more"]
    assert isinstance(first.pop("t"), float)
    assert first == {"kind": "stop", "update": 3, "rank": 1, "reason": "SIGTERM", "more": [1, 2]}
    assert (second["update"], second["rank"], second["text"]) == (None, 0, "a\nb")


def test_the_schema_is_a_table_of_meanings_and_fields():
    assert set(KINDS) == {
        *("start", "contract", "update", "phases", "epoch", "skip", "zero_count", "scale_falling", "bad_row"),
        *("unused_parameters", "oom", "grow", "evaluate", "checkpoint", "resume", "stop", "finish", "peak", "warning"),
        *("checkpoint_failed", "error", "flops"),
    }
    for meaning, fields in KINDS.values():
        assert meaning
        assert not {"t", "kind", "update", "rank"} & set(fields)


def test_unknown_kinds_and_missing_fields_are_refused(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    with pytest.raises(ValueError, match="unknown event kind 'skp'; the kinds are: start, contract"):
        events.write("skp")
    with pytest.raises(ValueError, match=r"event 'skip': missing \['row_ids', 'scale'\]"):
        events.write("skip", grad_norm="inf")
    with pytest.raises(ValueError, match="t is reserved"):
        events.write("stop", reason="", t=1)
    events.close()
    assert lines(tmp_path / "events.jsonl") == []


def test_every_kind_can_be_written_with_its_fields(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    for kind, (_, fields) in KINDS.items():
        events.write(kind, **dict.fromkeys(fields))
    events.close()
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == list(KINDS)


def test_numbers_that_are_not_finite_are_text(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    events.write("evaluate", metrics={"a": math.nan, "b": -math.inf}, rows=np.int64(3), seconds=np.float32("inf"))
    events.write("bad_row", row=(1, tmp_path), error=ValueError("x"))
    events.close()

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    first, second = (json.loads(line, parse_constant=no_constants) for line in lines(tmp_path / "events.jsonl"))
    assert first["metrics"] == {"a": "nan", "b": "-inf"}
    assert (first["rows"], first["seconds"]) == (3, "inf")
    assert (second["row"], second["error"]) == ([1, str(tmp_path)], "x")


def test_the_file_is_pure_ascii(tmp_path):
    events = Events(tmp_path / "events.jsonl")
    text = "\u4e2d \x1b[31m \x9b \udc80"
    events.write("warning", text=text)
    events.close()
    assert (tmp_path / "events.jsonl").read_bytes().isascii()
    assert b"\x1b" not in (tmp_path / "events.jsonl").read_bytes()
    assert next(read_events(tmp_path / "events.jsonl"))["text"] == text


def test_a_torn_last_line_is_said(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "stop", "reason": "x"}\n\n{"kind": "upd')
    stop, torn = read_events(path)
    assert stop["kind"] == "stop"
    assert torn == {"kind": "torn", "line": 3, "text": '{"kind": "upd'}


def test_bytes_and_values_that_are_no_event_are_torn_too(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'[1]\n\xff\xfe\n{"kind": "of a later version"}\n')
    assert [event["kind"] for event in read_events(path)] == ["torn", "torn", "of a later version"]


def test_a_torn_line_does_not_swallow_the_next_event(tmp_path):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "upd')
    events = Events(path)
    events.write("stop", reason="x")
    events.close()
    assert [event["kind"] for event in read_events(path)] == ["torn", "stop"]


def test_a_write_that_the_disk_cut_short_raises_and_is_closed_by_the_next(tmp_path, monkeypatch):
    events = Events(tmp_path / "events.jsonl")
    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:10]))
        with pytest.raises(OSError, match="only 10 of"):
            events.write("stop", reason="x")
    events.write("stop", reason="y")
    events.close()
    assert [event["kind"] for event in read_events(tmp_path / "events.jsonl")] == ["torn", "stop"]


def test_two_writers_append_to_one_file(tmp_path):
    one, two = Events(tmp_path / "events.jsonl"), Events(tmp_path / "events.jsonl")
    for number in range(20):
        (one, two)[number % 2].write("stop", update=number, reason="x" * 500)
    one.close()
    two.close()
    assert [event["update"] for event in read_events(tmp_path / "events.jsonl")] == list(range(20))
