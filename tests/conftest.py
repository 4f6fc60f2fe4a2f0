"""Shared fixtures: worker pools per world size, one printed seed, and guards against leaks between tests."""

from __future__ import annotations

import os
import random
import signal

import hypothesis
import pytest

from tests.pool import pool, stop_all

# In the environment, so that both workers of `-n 2` draw the same (they must collect the same tests).
SEED = int(os.environ.setdefault("EVENER_TEST_SEED", str(random.randrange(2**31))))


# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_report_header() -> str:
    return f"EVENER_TEST_SEED={SEED} (set it to repeat the same samples)"


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    # A shell starts what runs in the background with Ctrl-C ignored, and every child would inherit that.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # hypothesis draws its samples from the same printed seed
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = SEED


def pytest_collection_modifyitems(items):
    """Files with the longest tests first: `make test-all` deals files in this order, so both workers end together."""
    longest: dict[object, float] = {}
    for item in items:
        allowed = item.get_closest_marker("timeout")
        longest[item.path] = max(longest.get(item.path, 0), allowed.args[0] if allowed else 0)
    items.sort(key=lambda item: -longest[item.path])


@pytest.fixture(scope="session")
def test_seed() -> int:
    return SEED


@pytest.fixture(scope="session")
def ranks():
    """`ranks(3)(function, *args)` runs a top-level function on three gloo ranks and returns their results."""
    yield pool
    stop_all()


@pytest.fixture(autouse=True)
def no_environment_leak():
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    # pytest keeps the first itself, torch sets the others when it first compiles
    allowed = ("PYTEST_CURRENT_TEST", "TORCHINDUCTOR_", "_TORCHINDUCTOR_")
    changed = {k for k in before.keys() | after.keys() if before.get(k) != after.get(k) and not k.startswith(allowed)}
    for name in changed:
        if name in before:
            os.environ[name] = before[name]
        else:
            del os.environ[name]
    assert not changed, f"the test left the environment changed: {sorted(changed)}"
