"""Crash scripts drawn by hypothesis: whatever happens in which order, every epoch is the permutation it was to be.

A script is a list of starts, each on its own number of processes and data workers, with its own period of checkpoints;
each ends by SIGKILL at a chosen place (in the body, in the forward of one rank, in an evaluation, at the n-th call of a
checkpoint's writer), by `break`, or by finishing. One start may save under a name and another go back to it.
"""

from __future__ import annotations

import shutil
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.chaos import Forks
from tests.test_chaos_kills import EPOCHS, check, result, told, whole_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks through the launcher's shim")
UPDATES = 4 * EPOCHS

kills = st.fixed_dictionaries(
    {
        "rank": st.integers(0, 3),
        "update": st.integers(0, UPDATES - 1),
        "where": st.sampled_from(["body", "forward", "evaluate", "save"]),
        "call": st.integers(0, 12),
    }
)
starts = st.fixed_dictionaries(
    {"world": st.integers(1, 4), "workers": st.sampled_from([0, 0, 1, 2]), "save_every": st.integers(1, 6)},
    optional={
        "kill": kills,
        "break_at": st.integers(0, UPDATES - 1),
        "save_at": st.integers(0, UPDATES - 1),
        "load_at": st.integers(0, UPDATES - 1),
    },
)


@pytest.fixture(scope="module")
def forks():
    server = Forks()
    yield server
    server.close()


@pytest.fixture(scope="module")
def uninterrupted(forks, tmp_path_factory):
    return whole_of(forks, tmp_path_factory.mktemp("whole"))


def play(forks, folder, script, whole):
    shutil.rmtree(folder, ignore_errors=True)
    calm = {"world": 2, "workers": 0, "save_every": 5}
    for attempt, start in enumerate([*script, calm]):
        world = start["world"]
        forks.start(folder, told(folder, **{k: v for k, v in start.items() if k != "world"}), world, "script", attempt)
        codes = forks.codes()
        if -9 not in codes:
            assert set(codes) == {0}, forks.said()
        if result(folder) is not None:
            break
    check(folder, whole)


SCRIPT = [
    {"world": 3, "workers": 1, "save_every": 2, "save_at": 3, "kill": {"rank": 2, "update": 6, "where": "forward", "call": 0}},
    {"world": 2, "workers": 0, "save_every": 5, "break_at": 9, "load_at": 7},
    {"world": 4, "workers": 0, "save_every": 3, "kill": {"rank": 0, "update": 11, "where": "save", "call": 5}},
]  # fmt: skip


def test_one_script_with_everything(forks, uninterrupted, tmp_path):
    play(forks, tmp_path / "run", SCRIPT, uninterrupted)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_any_script(forks, uninterrupted, tmp_path):
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(starts, min_size=1, max_size=4))
    def any_script(script):
        play(forks, tmp_path / "run", script, uninterrupted)

    any_script()
