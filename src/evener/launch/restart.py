"""Starting a failed job again: whether it makes sense, and how long to wait. Values only; the caller starts and sleeps.

Every attempt is a launch of its own, with its own agent, private folder and stores: torch's agent would give restarted
ranks the addresses of dead ones, and its restarts are not there when the agent itself is killed.
"""

from __future__ import annotations

from dataclasses import dataclass

from evener.errors import EXIT_LESSON
from evener.launch.supervise import Ending

# What comes out the same however often it is tried: wrong usage (2), too many updates that were not finite (66).
# And what was asked for: stopped with a checkpoint (75), Ctrl-C (130).
_FINAL = {0, 2, 66, 75, 130}
LONGEST_SECONDS, _LONGEST_AFTER_A_KILL_SECONDS = 60.0, 10.0  # a kill is not cured by waiting for it to pass
_SOON_SECONDS = 30.0
_LESSONS = 12  # each at least halves the microbatch


@dataclass(frozen=True)
class Attempt:
    ending: Ending
    seconds: float


def seconds_to_wait(attempts: list[Attempt], allowed: int, longest: float = LONGEST_SECONDS) -> float | str | None:
    """Seconds before the next attempt, or why there is none; None where nothing has to be said about it.

    attempts: all so far, the newest last. allowed, longest: how many restarts, and how many seconds before one.
    """
    newest, failures = attempts[-1].ending, _failures(attempts)
    if newest.exit_code == EXIT_LESSON and not newest.stopped:  # not one of the user's restarts: it starts another cut
        lessons = len(attempts) - len(failures)
        return 1.0 if lessons <= _LESSONS else f"out of memory {lessons} times, with ever smaller cuts"
    if allowed == 0 or newest.stopped or newest.exit_code in _FINAL:
        return None
    if len(failures) > allowed:
        return f"no restart is left of {allowed}"
    if len(failures) > 1 and _same(failures[-2], failures[-1]):
        return "it failed twice in the same way, soon after its start: not restarted"
    longest = min(longest, _LONGEST_AFTER_A_KILL_SECONDS) if newest.exit_code > 128 else longest
    return float(min(longest, 2 ** (len(failures) - 1)))


def why_again(attempts: list[Attempt], allowed: int) -> str:
    """What the user is told about the next start."""
    lesson = attempts[-1].ending.exit_code == EXIT_LESSON
    return "start with the lesson" if lesson else f"restart {len(_failures(attempts))} of {allowed}"


def _failures(attempts: list[Attempt]) -> list[Attempt]:
    return [one for one in attempts if one.ending.exit_code != EXIT_LESSON]


def _same(one: Attempt, other: Attempt) -> bool:
    """A script's own error that repeats. Not a kill: whoever kills may well kill again."""
    first, second = one.ending.error, other.ending.error
    if first is None or second is None or one.ending.exit_code > 128 or max(one.seconds, other.seconds) > _SOON_SECONDS:
        return False
    return first.cause == second.cause
