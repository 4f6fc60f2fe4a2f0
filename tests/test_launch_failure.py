"""Which rank is to blame, from how all of them ended; tested as values and as text."""

from __future__ import annotations

import json
import signal
import types

import pytest

from evener.launch.console import Console, Follower
from evener.launch.failure import as_error, clean, find_cause, ranks_text
from evener.launch.records import Line, Raised, RankEnd, read_ends

BAD_ROW = Raised(
    "ValueError", "builtins", "bad row 17", Line("/home/me/train.py", 12, "load", "raise ValueError(...)"), ""
)
CLOSED = Raised(
    "RuntimeError", "builtins", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1", None, ""
)
REMOTE = Raised(
    "DistBackendError", "torch.distributed", "NCCL error: remote process exited or there was a network error", None, ""
)
LATE = Raised("RuntimeError", "builtins", "Timed out waiting 10000ms for recv operation to complete", None, "")


def raised(rank: int, when: int, *errors: Raised) -> RankEnd:
    return RankEnd(rank, how="exception", code=1, monotonic_ns=when, errors=errors)


def killed(rank: int, signum: int, *, stopped: bool = False) -> RankEnd:
    return RankEnd(rank, code=-signum, stopped=stopped)


def finished(rank: int) -> RankEnd:
    return RankEnd(rank, how="finished", code=0, monotonic_ns=5)


STOPPED = killed(9, signal.SIGTERM, stopped=True)


@pytest.mark.parametrize(
    "ends, rank, code",
    [
        # the victim is first on the clock, because cleaning up took the culprit long
        ([raised(0, 1, CLOSED), raised(1, 2, BAD_ROW)], 1, 1),
        ([raised(0, 1, REMOTE), raised(1, 2, LATE), raised(2, 3, BAD_ROW)], 2, 1),
        # two real errors: the earlier one
        ([raised(0, 7, BAD_ROW), raised(1, 3, BAD_ROW)], 1, 1),
        # an error on top of the real one, while cleaning up
        ([raised(0, 1, CLOSED), raised(1, 2, CLOSED, BAD_ROW)], 1, 1),
        # killed: beats what the others raise, known or not
        ([raised(0, 1, CLOSED), killed(1, signal.SIGKILL)], 1, 137),
        ([raised(0, 1, BAD_ROW), killed(1, signal.SIGSEGV)], 1, 139),
        # stopped by the launcher: never the cause, also when it had to be killed for it
        ([STOPPED, raised(1, 2, BAD_ROW)], 1, 1),
        ([killed(0, signal.SIGKILL, stopped=True), raised(1, 2, BAD_ROW)], 1, 1),
        # native code that aborts is a consequence of another rank's error
        ([killed(0, signal.SIGABRT), raised(1, 2, BAD_ROW)], 1, 1),
        ([killed(0, signal.SIGABRT), raised(1, 2, CLOSED)], 0, 134),
        # stopped from outside
        ([raised(0, 1, CLOSED), killed(1, signal.SIGTERM)], 1, 143),
        # left in the middle: with a code, or with 0, which looks like success
        ([raised(0, 1, CLOSED), RankEnd(1, code=5)], 1, 5),
        ([raised(0, 1, CLOSED), RankEnd(1, code=0)], 1, 1),
        ([RankEnd(0, how="exit", code=75, monotonic_ns=1), STOPPED], 0, 75),
        # only victims: the earliest
        ([raised(0, 2, LATE), raised(1, 1, CLOSED), finished(2)], 1, 1),
        # ended well, and before those that then missed it; a real error is still the error
        ([raised(0, 9, CLOSED), finished(1)], 1, 1),
        ([raised(0, 9, CLOSED), RankEnd(1, how="exit", code=0, monotonic_ns=3)], 1, 1),
        ([raised(0, 9, CLOSED), finished(1), STOPPED], 1, 1),
        ([raised(0, 9, BAD_ROW), finished(1)], 0, 1),
    ],
)
def test_the_rank_to_blame(ends, rank, code):
    found = find_cause(ends)
    assert found is not None
    assert (found.cause.rank, found.exit_code) == (rank, code)


def test_nobody_is_blamed_when_nobody_failed():
    assert find_cause([finished(0), finished(1)]) is None
    assert find_cause([RankEnd(0), RankEnd(1)]) is None


def text(*ends: RankEnd) -> str:
    found = find_cause(ends)
    assert found is not None
    return str(as_error(found, "/home/me/runs/logs/r", "/home/me"))


def test_the_report_of_an_exception():
    others = [raised(rank, 9, CLOSED) for rank in (0, 2, 3)]
    assert text(others[0], raised(1, 12, CLOSED, BAD_ROW), *others[1:], killed(4, 15, stopped=True), finished(5)) == (
        "rank 1 failed: ValueError: bad row 17\n"
        "  at train.py:12 in load: raise ValueError(...)\n"
        "  ranks 0, 2, 3 failed as a consequence: RuntimeError: [gloo/transport/tcp/pair.cc:553] "
        "Connection closed by peer [127.0.0.1]:1\n"
        "  rank 4 was stopped by the launcher (SIGTERM)\n"
        "  rank 5 had finished\n"
        "  logs: runs/logs/r/rank1.log (every rank's, and agent.log, are there)"
    )


def test_the_report_of_a_kill_says_what_it_often_is():
    assert text(raised(0, 1, CLOSED), killed(1, signal.SIGKILL)).startswith(
        "rank 1 was killed by SIGKILL (9)\n  often the kernel's out-of-memory killer: `dmesg | tail`"
    )


def test_the_report_of_a_silent_exit():
    report = text(raised(0, 1, CLOSED), RankEnd(1, code=0))
    assert report.startswith("rank 1 left with exit code 0 in the middle of the script\n  no exception reached")


def test_the_report_of_a_rank_that_ended_too_early():
    assert text(raised(0, 9, CLOSED), finished(1)).startswith(
        "rank 1 finished its script before the others\n  rank 0 failed as a"
    )
    left = RankEnd(1, how="exit", code=0, monotonic_ns=5)
    assert text(raised(0, 9, CLOSED), left).startswith("rank 1 left with exit code 0 before the others\n")


def test_words_of_a_rank_cannot_steer_the_terminal():
    assert clean("\x1b[2J\x9b31mred\r\nnext\x00") == "?[2J?31mred\n  next?"
    assert clean("one\ntwo", limit=100) == "one" and clean("x" * 300, limit=10) == "xxxxxxxxx…"


def test_ranks_are_named_shortly():
    assert ranks_text([3]) == "rank 3" and ranks_text([0, 2, 3, 4, 7, 8]) == "ranks 0, 2-4, 7, 8"


def test_exit_codes_come_from_the_agent_and_reasons_from_the_rank(tmp_path):
    (tmp_path / "agent.log").write_text(
        "W1129 api.py:1028] Sending process 41 closing signal SIGTERM\n"
        '{"name": "x", "metadata": {"global_rank": 0, "state": "FAILED", "metadata": "{\\"exit_code\\": [-15]}"}}\n'
        '{"name": "x", "metadata": {"global_rank": 1, "state": "START", "metadata": "{\\"exit_code\\": [null]}"}}\n'
        '{"name": "x", "metadata": {"global_rank": 1, "state": "FAILED", "metadata": "{\\"exit_code\\": [3]}"}}\n'
        '{"name": "x", "metadata": {"global_rank": null, "state": "FAILED", "raw_error": "exit_code"}}\n'
        "not json {\n"
    )
    (tmp_path / "rank0.json").write_text('{"rank": 0, "pid": 41, "started": 1.0}')
    (tmp_path / "rank1.json").write_text('{"rank": 1, "pi')  # the disk was full
    assert read_ends(str(tmp_path), 3) == [
        RankEnd(0, pid=41, code=-15, stopped=True),
        RankEnd(1, code=3),
        RankEnd(2),
    ]


@pytest.mark.parametrize(
    "how, told, seen, expected",
    [
        ("exit", 75, -15, 75),  # the launcher stopped it while it was already leaving
        ("exception", 1, -6, 1),  # native code aborted on the way out
        ("finished", 0, -15, 0),
        ("finished", 0, -11, -11),  # a crash at the very end is a failure
        ("interrupted", 1, -2, -2),
    ],
)
def test_the_exit_code_of_a_rank_that_dies_while_leaving(tmp_path, how, told, seen, expected):
    ended = {"how": how, "code": told, "time": 1.0, "monotonic_ns": 1, "errors": []}
    (tmp_path / "rank0.json").write_text(json.dumps({"rank": 0, "pid": 41, "started": 1.0, "ended": ended}))
    event = {"metadata": {"global_rank": 0, "state": "FAILED", "metadata": json.dumps({"exit_code": [seen]})}}
    stop = "Sending process 41 closing signal SIGTERM\n" if seen == -15 else ""
    (tmp_path / "agent.log").write_text(stop + json.dumps(event) + "\n")
    (end,) = read_ends(str(tmp_path), 1)
    assert end.code == expected


def test_a_followed_log_is_shown_in_whole_lines(tmp_path):
    path = tmp_path / "rank1.log"
    follower = Follower(str(path), 1)
    assert follower.lines() == b""
    path.write_bytes(b"one\ntw")
    assert follower.lines() == b"[rank 1] one\n"
    with path.open("ab") as file:
        file.write(b"o\n\rbar\rbar 2")
    assert follower.lines() == b"[rank 1] two\n"
    assert follower.lines(last=True) == b"[rank 1] \rbar\rbar 2\n" and follower.lines(last=True) == b""


def test_a_rank_inside_of_a_users_function_waits_for_nobody():
    """evener's own step calls the loss function: its frames further out say nothing about what hangs inside."""
    import evener.engine.step as step

    def stack(*innermost: str) -> tuple[Line, ...]:
        outside = (step.__file__, "/home/evener/train.py", "/usr/lib/python3.11/runpy.py")
        return tuple(Line(file, 3, "f", "") for file in (*innermost, *outside))

    site = "/opt/site-packages/torch"
    timed_out = raised(0, 1, LATE)
    stuck = RankEnd(1, how="exception", code=1, stopped=True, stack=stack("/home/evener/model.py"))
    in_module = RankEnd(1, code=-15, stopped=True, stack=stack(f"{site}/nn/modules/linear.py", "/home/evener/model.py"))
    waiting = RankEnd(
        1, code=-15, stopped=True, stack=stack(f"{site}/distributed/distributed_c10d.py", "/home/evener/model.py")
    )
    for end in (stuck, in_module):
        found = find_cause([timed_out, end])
        assert found.cause.rank == 1 and found.absent
    assert find_cause([timed_out, waiting]).cause.rank == 0


@pytest.mark.parametrize("tee", ["rank0", "none"])
def test_the_traceback_of_another_rank_keeps_its_shape_and_is_not_shown_to_whoever_wants_nothing(tmp_path, capsys, tee):
    launch = types.SimpleNamespace(first_rank=0, nproc=2, tee=tee, logs=str(tmp_path), private=str(tmp_path))
    console = Console(launch)
    console.show_error(1, "Traceback:\n  File x\n    load(\x1b[2J)\n")
    console.close()
    shown = "[rank 1] Traceback:\n[rank 1]   File x\n[rank 1]     load(?[2J)\n"
    assert capsys.readouterr().err == (shown if tee == "rank0" else "")
