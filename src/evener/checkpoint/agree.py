"""One outcome for all ranks: what failed on one is raised on every one, so that none waits for the others for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from evener.dist import comm, here
from evener.errors import CheckpointError, EvenerError, ModelError, UsageError

T = TypeVar("T")
_KINDS: dict[str, type[EvenerError]] = {kind.__name__: kind for kind in (CheckpointError, ModelError, UsageError)}


def on_main(act: Callable[[], T]) -> T:
    """`act()` on rank 0; its result (a JSON value) or its error on all ranks. One broadcast; the others wait in it."""
    failure = result = None
    if here().is_main:
        result, failure = _try(act)
    outcome = comm.broadcast([result, failure and failure[0]])
    _raise(outcome[1], failure)
    return outcome[0]  # type: ignore[no-any-return]


def on_all(act: Callable[[], T]) -> T:
    """`act()` on every rank; when it fails on some, the first of their errors is raised on all. One gather."""
    result, failure = _try(act)
    failures = comm.all_gather(failure and failure[0])
    for rank, one in enumerate(failures):
        if one is not None and any(other != one for other in failures):
            one[1] = f"rank {rank}: {one[1]}"  # not the same everywhere: say whose it is
        _raise(one, failure)
    return result  # type: ignore[return-value]


def _try(act: Callable[[], T]) -> tuple[T | None, tuple[list[Any], Exception] | None]:
    try:
        return act(), None
    except EvenerError as error:
        return None, ([type(error).__name__, error.cause, error.evidence, error.fix], error)
    except Exception as error:
        return None, (["CheckpointError", f"{type(error).__name__}: {error}", [], []], error)


def _raise(told: list[Any] | None, own: tuple[list[Any], Exception] | None) -> None:
    if told is not None:
        kind, cause, evidence, fix = told
        raise _KINDS.get(kind, CheckpointError)(cause, evidence=evidence, fix=fix) from (own and own[1])
