"""An exception that nobody caught, explained below its traceback when a script with `Run` ends by it.

Under `evener run` the supervisor explains, with every rank's record before it; here there is one process to know.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from evener.errors import EvenerError

# Kinds that say nothing more than the traceback does.
_SAID = (None, "python-exception", "stopped-by-signal", "evener-error", "evener-stopped")


def explain_uncaught() -> None:
    """From now on an uncaught exception of a known kind is followed by its cause and fix. Twice changes nothing."""
    previous = sys.excepthook
    if getattr(previous, "explains", False) or "EVENER_PLAN" in os.environ:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        previous(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, EvenerError):
            sys.stderr.write(explanation(error))
            sys.stderr.flush()

    hook.explains = hook.shows_evener_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def explanation(error: Exception) -> str:
    """A few lines for the end of a traceback; empty when no kind is known."""
    from evener.explain import explain_error

    answer = explain_error(error)
    if answer.kind in _SAID:
        return ""
    lines = [f"evener: {answer.kind}: {answer.summary}", *(f"  {one}" for one in answer.cause)]
    lines += [f"  {'fix: ' if n == 0 else '     '}{one}" for n, one in enumerate(answer.fix)]
    return "\n".join([*lines, f"  more: evener explain {answer.kind}", ""])
