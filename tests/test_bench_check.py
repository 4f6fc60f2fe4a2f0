"""`make bench-check`: a slow-down is an error, noise is none; and the stored ratios are of the pairs that are measured."""

from __future__ import annotations

import json

import pytest

from bench import check
from bench.timing import Timings, error_of_median
from evener.engine import Engine

NAME = "step: SGD fp32 plain"


@pytest.fixture
def one_pair(monkeypatch, tmp_path):
    """The smallest pair alone, in a few short blocks, against a ratio of 1."""
    monkeypatch.setattr(check, "CASES", {NAME: (*check.CASES[NAME][:1], 5, 7)})
    monkeypatch.setattr(check, "STORED", tmp_path / "baseline.json")
    check.STORED.write_text(json.dumps({"machine": "a test", "ratios": {NAME: {"ratio": 1.3, "noise": 0.0}}}))


def test_a_planted_slow_down_is_an_error(one_pair, monkeypatch, capsys):
    step = Engine.step

    def slow(engine, batch):
        for _ in range(7):
            step(engine, batch)
        return step(engine, batch)

    monkeypatch.setattr(Engine, "step", slow)
    assert check.main([]) == 1
    assert "SLOWER" in capsys.readouterr().out
    assert check.main(["--quick"]) == 0, "a smoke test judges nothing"


def test_what_is_no_slower_passes_and_can_be_stored(one_pair, capsys):
    check.STORED.write_text(json.dumps({"machine": "a test", "ratios": {NAME: {"ratio": 4.0, "noise": 0.0}}}))
    assert check.main([]) == 0
    assert "SLOWER" not in capsys.readouterr().out
    assert check.main(["--store"]) == 0
    assert set(json.loads(check.STORED.read_text())["ratios"]) == {NAME}


def test_the_noise_of_both_runs_is_no_regression():
    stored = {"ratio": 1.0, "noise": 0.03}
    assert check.limit(stored, 0.04) == pytest.approx(1.05 + 3 * 0.05)
    quiet = Timings({"a": [1.0] * 9, "b": [1.0] * 9})
    assert quiet.noise("a", "b") == 0.0
    values = [0.9, 0.95, 1.0, 1.05, 1.1] * 20
    assert error_of_median(values) == pytest.approx(1.25 * 0.1 / 1.35 / 10, rel=0.01)
    assert error_of_median([*values, 50.0, 60.0]) < 2 * error_of_median(values), "a few odd rounds count for little"


def test_every_pair_has_a_stored_ratio():
    assert set(json.loads(check.STORED.read_text())["ratios"]) == set(check.CASES)
