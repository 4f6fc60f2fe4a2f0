"""The exception tree: every error says what was given, what is allowed and what to do.

    EvenerError                   exit code 1, the root: `except evener.EvenerError` catches all of them
    ├── UsageError          2     a keyword, a size, a flag: nothing has run yet
    │   ├── BatchSizeError        global batch, slice, microbatch do not fit together
    │   ├── PrecisionError        unknown, or not native on this device
    │   └── DeviceError           a device that does not exist here, or cannot be used
    ├── ModelError          2     wrapped, spread over devices, without trainable parameters
    ├── OptimizerError      2     parameters of another model, a sparse or unsupported state
    ├── LossError           2     not connected, not a number, the wrong denominator
    ├── DataError           2     an empty dataset, a foreign sampler, a row that cannot be read
    │   └── WorkerError     1     a data worker that died or hangs
    ├── CheckpointError     1     a checkpoint or weights that cannot be written, are torn, foreign, or do not fit
    ├── CollectiveError     1     ranks disagree: shapes, calls, a missing rank
    ├── LaunchError         1     processes that could not be started or ended badly
    ├── ShortageError       3     not enough idle GPUs now, or none here at all
    ├── DriverError         4     the GPU driver is broken or does not answer
    ├── NonFiniteError     66     `on_nonfinite="stop"`: too many updates in a row were not finite
    └── MemoryLimitError   67     out of memory, and nothing smaller is left to try
        └── LessonError    69     out of memory, and no rank recovers alone: a restart goes on with a smaller cut

The room of this module is the bottom: it imports nothing but the standard library.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable
from types import TracebackType

EXIT_USAGE = 2
EXIT_STOPPED = 75  # "try again later": what requeueing schedulers look for
EXIT_NONFINITE = 66
EXIT_MEMORY = 67
EXIT_LESSON = 69
EXIT_SHORTAGE = 3
EXIT_DRIVER = 4


class EvenerError(Exception):
    """An error with a cause, the evidence for it and the fix.

    Args:
        cause: One sentence: what was given or what happened.
        evidence: Lines that show it (values, names, row ids).
        fix: Lines that say what is allowed and what to do, most useful first.
    """

    exit_code = 1

    def __init__(self, cause: str, *, evidence: Iterable[str] = (), fix: Iterable[str] = ()) -> None:
        self.cause = cause
        self.evidence = (evidence,) if isinstance(evidence, str) else tuple(evidence)
        self.fix = (fix,) if isinstance(fix, str) else tuple(fix)
        super().__init__(cause)

    def __str__(self) -> str:
        lines = [self.cause]
        lines += [f"  {line}" for line in self.evidence]
        lines += [f"  fix: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.fix)]
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        # Errors cross process borders (data workers, launched ranks); the keywords must survive.
        return (_rebuild, (type(self), self.cause, self.evidence, self.fix))


def _rebuild(kind: type[EvenerError], cause: str, evidence: tuple[str, ...], fix: tuple[str, ...]) -> EvenerError:
    return kind(cause, evidence=evidence, fix=fix)


class UsageError(EvenerError):
    """A keyword, a size or a flag that cannot be accepted; nothing has run yet."""

    exit_code = EXIT_USAGE


class BatchSizeError(UsageError):
    """Global batch, slice size and microbatch size do not fit together."""


class PrecisionError(UsageError):
    """A precision that is unknown, or that this device cannot do natively."""


class DeviceError(UsageError):
    """A device that does not exist here or cannot be used."""


class ModelError(EvenerError):
    """A model that is already wrapped, spread over devices, or has nothing to train."""

    exit_code = EXIT_USAGE


class OptimizerError(EvenerError):
    """An optimizer that does not belong to the model."""

    exit_code = EXIT_USAGE


class LossError(EvenerError):
    """A loss that is not connected, not a number, or has the wrong denominator."""

    exit_code = EXIT_USAGE


class DataError(EvenerError):
    """A dataset that cannot be used, or a row that cannot be read."""

    exit_code = EXIT_USAGE


class WorkerError(DataError):
    """A data worker process that died or does not answer."""

    exit_code = 1


class CheckpointError(EvenerError):
    """A checkpoint or a file of weights that cannot be written, is torn, corrupt or foreign, or does not fit."""


class CollectiveError(EvenerError):
    """Ranks disagree about a collective call, or one of them did not come."""


class LaunchError(EvenerError):
    """Processes that could not be started, or that ended badly."""


class ShortageError(EvenerError):
    """Not enough idle GPUs now, or none on this machine."""

    exit_code = EXIT_SHORTAGE


class DriverError(EvenerError):
    """The GPU driver is broken, differs from its library, or does not answer."""

    exit_code = EXIT_DRIVER


class NonFiniteError(EvenerError):
    """`on_nonfinite="stop"`: too many updates in a row had gradients that are not finite."""

    exit_code = EXIT_NONFINITE


class MemoryLimitError(EvenerError):
    """Out of memory, and nothing smaller is left to try."""

    exit_code = EXIT_MEMORY


class LessonError(MemoryLimitError):
    """Out of memory where no rank recovers alone. Started again, a run goes on from its checkpoint with a smaller cut.

    microbatch_size: The cut to go on with.
    """

    exit_code = EXIT_LESSON
    microbatch_size = 1

    def of(self, microbatch_size: int) -> LessonError:
        self.microbatch_size = microbatch_size
        return self


def nearest(word: str, allowed: Iterable[str]) -> str | None:
    """The allowed word closest to `word`, or None when nothing is close."""
    import difflib  # only when something went wrong: it pulls in `re`

    close = difflib.get_close_matches(word, list(allowed), n=1, cutoff=0.6)
    return close[0] if close else None


def one_of(name: str, value: object, allowed: Iterable[str], error: type[EvenerError] = UsageError) -> str:
    """`value` when it is one of the allowed words; otherwise one error with the nearest of them."""
    words = list(allowed)
    if isinstance(value, str) and value in words:
        return value
    close = nearest(value, words) if isinstance(value, str) else None
    fix = [f"{name} is one of: {', '.join(words)}"]
    if close:
        fix.insert(0, f'{name}="{close}"')
    raise error(f"{name}={value!r} is not known.", fix=fix)


_PREPARED_BY = {"accelerate": "accelerator.prepare()"}
_PREPARED_BY |= dict.fromkeys(("lightning", "lightning_fabric"), "fabric.setup()")


def refuse_prepared(what: str, thing: object, inside: str, error: type[EvenerError] = UsageError) -> None:
    """Raises `error` for what another launcher's wrapper has changed: it counts processes or accumulates by itself."""
    by = _PREPARED_BY.get(type(thing).__module__.partition(".")[0])
    if by is not None:
        raise error(
            f"the {what} went through {by} ({type(thing).__name__}); evener does by itself what that does.",
            fix=[f"leave {by} out and pass the plain {what}", f"or take it out again: {inside}"],
        )


def show_errors_without_traceback() -> None:
    """From now on an uncaught EvenerError prints its own text and the caller's line, not evener's frames.

    Called where a user's script first hands us work (Run, Engine). The process then ends with the error's exit code.
    Any other exception goes to the hook that was there before. Calling it twice changes nothing.
    """
    previous = sys.excepthook
    if getattr(previous, "shows_evener_errors", False):
        return
    code: list[int] = []

    def leave() -> None:
        # Python itself ends with 1 after any uncaught exception. This handler was registered before the ones that close
        # runs and files, so it comes after them.
        if code:
            if "logging" in sys.modules:
                sys.modules["logging"].shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code[0])

    atexit.register(leave)

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, EvenerError):
            previous(kind, error, trace)
            return
        where = _last_line_outside(trace)
        sys.stderr.write(f"evener: {error}\n" + (f"  at {where}\n" if where else ""))
        sys.stderr.flush()
        code.append(error.exit_code)

    hook.shows_evener_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _last_line_outside(trace: TracebackType | None) -> str | None:
    """File and line of the innermost frame that is not evener's own."""
    where = None
    while trace is not None:
        name = trace.tb_frame.f_globals.get("__name__", "")
        if not (name == "evener" or name.startswith("evener.")):
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    return where
