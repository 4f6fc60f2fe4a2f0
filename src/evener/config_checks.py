"""One check per kind of keyword: what is given comes back normalised, or one error says what is allowed instead.

No check imports torch: values are judged by what they offer (`__index__`, `step`, `log`). Of
functions and objects only the kind is checked.
"""

from __future__ import annotations

import logging
import math
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from evener.errors import PrecisionError, UsageError, one_of

Number = TypeVar("Number", int, float)
Check: TypeAlias = Callable[[str, Any], Any]  # (keyword, given) -> the value to keep; raises a UsageError

PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16", "bf16-true", "fp16-true", "O0", "O1", "O2", "O3")
STRATEGIES = ("auto", "single", "dp", "ddp", "fsdp", "hsdp")


def shown(value: object) -> str:
    """A value as an error message shows it: short, printable, without reading a tensor from a device."""
    if isinstance(value, str | int | float | bool | None | Path | list | tuple | dict):
        text = ascii(value)
        return text if len(text) <= 60 else text[:57] + "..."
    return f"<{type(value).__module__}.{type(value).__qualname__}>"


def refused(name: str, value: object, allowed: str, *fix: str, error: type[UsageError] = UsageError) -> UsageError:
    said = f" is a {type(value).__name__}" if not isinstance(value, int | float) or isinstance(value, bool) else ""
    return error(f"{name}={shown(value)}{said or ' is not allowed'}.", fix=[*fix, f"{name} is {allowed}"])


def _converted(to: Callable[[Any], Number], value: Any) -> Number | None:
    try:
        return to(value)
    except (TypeError, ValueError, OverflowError):  # a list, an array of many numbers
        return None


def whole(
    least: int, allowed: str, error: type[UsageError] = UsageError, none: bool = False, most: int | None = None
) -> Check:
    """A whole number from `least` (to `most`); numpy's are taken, a bool, a float and a text are not."""

    def check(name: str, value: Any) -> int | None:
        if value is None and none:
            return None
        number = None if isinstance(value, bool) else _converted(operator.index, value)
        if number is None:
            text = str(value).replace("_", "") if isinstance(value, str | float) else ""
            fix = [f"{name}={int(float(text))}"] if text.removesuffix(".0").isdecimal() else []
            raise refused(name, value, allowed, *fix, error=error)
        if number < least or (most is not None and number > most):
            raise refused(name, number, allowed, error=error)
        return number

    return check


def above_zero(allowed: str, none: bool = False) -> Check:
    """A finite number above zero."""

    def check(name: str, value: Any) -> float | None:
        if value is None and none:
            return None
        fix = []
        if hasattr(value, "total_seconds"):  # a timedelta
            fix = [f"{name}={value.total_seconds():g}"]
        number = None if isinstance(value, bool | str) else _converted(float, value)
        if number is None:
            raise refused(name, value, allowed, *fix)
        number = value if isinstance(value, int) else number  # 600 stays 600
        if not math.isfinite(number) or number <= 0:
            raise refused(name, number, allowed)
        return number

    return check


def switch(none: bool = False) -> Check:
    def check(name: str, value: Any) -> bool | None:
        if isinstance(value, bool) or (value is None and none):
            return value
        raise refused(name, value, "None, True or False" if none else "True or False")

    return check


def word(*words: str, none: bool = False) -> Check:
    def check(name: str, value: Any) -> str | None:
        return None if value is None and none else one_of(name, value, words)

    return check


def call(allowed: str) -> Check:
    """None or something that can be called."""

    def check(name: str, value: Any) -> Any:
        if value is None or callable(value):
            return value
        raise refused(name, value, f"None or {allowed}")

    return check


def order(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, str):
        return one_of(name, value, ("shuffle", "sequential"))
    allowed = '"shuffle", "sequential" or a function f(seed, epoch) that returns the row numbers of that epoch'
    raise refused(name, value, allowed, f"{name}=lambda seed, epoch: rows")


def workers(name: str, value: Any) -> Any:
    return value if value == "auto" else whole(0, '"auto" or a whole number of processes, 0 or more')(name, value)


def precision(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        parts, words = ("param", "reduce", "output"), ("fp32", "bf16", "fp16")
        if not value or any(part not in parts or one not in words for part, one in value.items()):
            fix = [f'{name}={{"param": "bf16", "reduce": "fp32"}}']
            fix.append(f"the parts are {', '.join(parts)}; each is one of: {', '.join(words)}")
            if any(str(part).startswith("buffer") for part in value):
                fix = ["leave it out: buffers keep their dtype; FSDP1 cast them, FSDP2 has no such dtype", *fix]
            raise PrecisionError(f"{name}={shown(value)} is not known.", fix=fix)
        return dict(value)
    # torch dtypes by their name, so that the message can say the word; torch itself is not imported here.
    text = str(value).removeprefix("torch.")
    known = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float": "fp32"}
    known |= {"bf16-mixed": "bf16", "16-mixed": "fp16", "16": "fp16", "32": "fp32", "no": "fp32", "amp": "auto"}
    if text in known:
        what = f"{name}={shown(value) if isinstance(value, str | int) else value} is another library's word."
        raise PrecisionError(what, fix=[f'{name}="{known[text]}"', f"{name} is one of: {', '.join(PRECISIONS)}"])
    return one_of(name, value, PRECISIONS, PrecisionError)


def on_nonfinite(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else ""
    count = text.removeprefix("stop:")
    if text in ("skip", "stop") or (text.startswith("stop:") and count.isdecimal() and int(count) >= 1):
        return text
    allowed = '"skip", "stop", or "stop:N": stop after N such updates in a row, N a whole number from 1'
    raise UsageError(f"{name}={shown(value)} is not known.", fix=[f"{name} is {allowed}"])


def fsdp(name: str, value: Any) -> Any:
    keys = ("blocks", "reshard_after_forward", "accumulate", "shard_ranks")
    if value is None or (isinstance(value, Mapping) and set(value) <= set(keys)):
        return None if value is None else dict(value)
    if isinstance(value, Mapping):
        one_of(f"{name}'s key", next(key for key in value if key not in keys), keys)
    raise refused(name, value, 'None, or a dict: {"blocks": ["Block"], "reshard_after_forward": False}')


def recompute(name: str, value: Any) -> Any:
    """The word is judged where the model is known."""
    if value is None or isinstance(value, str | list | tuple):
        return list(value) if isinstance(value, tuple) else value
    words = '"none", "full", "selective", "every:2", "segments:4", "auto"'
    allowed = f"None, {words}, or a list of modules, classes or their names"
    raise refused(name, value, allowed)


def existing(name: str, value: Any) -> str | os.PathLike[str] | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise refused(name, value, "None, or the path of a file or directory of weights")
    if not os.path.exists(value):
        what = f"{name}={os.fspath(value)!r} does not exist."
        raise UsageError(what, fix=[f"{name} is the path of a file of weights"])
    return value


def each(check: Check) -> Check:
    """One value, or {optimizer's name: value} where there are several optimizers."""

    def checked(name: str, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return check(name, value)
        return {key: check(f"{name}[{key!r}]", one) for key, one in value.items()}

    return checked


def decay(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = None if isinstance(value, bool | str) else _converted(float, value)
    if number is None or not 0 <= number < 1:
        raise refused(name, value, "None, or the decay of the average: at least 0, below 1 (0.999)")
    return number


def every(name: str, value: Any) -> int | str | None:
    """Updates (500), a time ("30s", "10min", "2h"), or None."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    if isinstance(value, str) and seconds_of(value) is not None:
        return value
    raise refused(name, value, 'None, a number of updates (500), or a time ("30s", "10min", "2h")')


def seconds_of(text: str) -> float | None:
    """ "90s", "10min", "1.5h" in seconds; None for anything else."""
    for unit, seconds in (("min", 60.0), ("s", 1.0), ("h", 3600.0)):
        if text.endswith(unit):
            number = _converted(float, text.removesuffix(unit).strip())
            return number * seconds if number is not None and 0 < number < math.inf else None
    return None


def updates(name: str, value: Any) -> range | None:
    if value is None or (isinstance(value, range) and len(value) and value.step == 1 and value.start >= 0):
        return value
    raise refused(name, value, "None, or a range of updates", f"{name}=range(10, 15)")


def scheduler(name: str, value: Any) -> Any:
    one = list(value.values()) if isinstance(value, Mapping) else [value]
    for scheduler in one:
        takes = callable(scheduler) or hasattr(scheduler, "step") or hasattr(scheduler, "step_update")
        if isinstance(scheduler, type) or (scheduler is not None and not takes):
            allowed = "None, an object with step() or step_update(n), or a function (optimizer, total_updates)"
            raise refused(name, value, allowed, f"{name}=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)")
    return value


def scaler(name: str, value: Any) -> Any:
    if value is None or isinstance(value, Mapping):
        return None if value is None else dict(value)
    if isinstance(value, type) or not (hasattr(value, "scale") and hasattr(value, "update")):
        raise refused(name, value, 'None, a torch.amp.GradScaler, or its arguments: {"init_scale": 1024.0}')
    return value


def devices(name: str, value: Any) -> Any:
    if value is None:
        return None
    allowed = 'None or a list of devices for strategy="dp", such as [0, 1]'
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise refused(name, value, allowed)
    if not value:
        raise UsageError(f"{name}={value} is empty.", fix=[f"{name} is {allowed}"])
    return [device(name, one) for one in value]


def scatter(name: str, value: Any) -> Any:
    """Weights or a function; how many weights there must be, strategy="dp" knows."""
    if value is None or callable(value):
        return value
    weights = isinstance(value, list | tuple) and all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in value
    )
    if not weights or not value:
        raise refused(name, value, "None, weights such as (3, 1), or a function f(batch, parts)")
    return tuple(value)


def device(name: str, value: Any) -> Any:
    if value is None or isinstance(value, str) or hasattr(value, "index"):
        return value
    return whole(0, "a device number from 0, or a torch.device")(name, value)


def dir(name: str, value: Any) -> Any:
    if value is None or (isinstance(value, str | os.PathLike) and str(value).strip()):
        return value
    raise UsageError(f"{name}={shown(value)} is not a directory.", fix=[f'{name}="runs/digits", or None for a new one'])


def logger(name: str, value: Any) -> Any:
    if isinstance(value, logging.Logger):
        # Its log(level, message) would be called with (values, step) and fail at the first update.
        fix = f"{name}=lambda values, step: log.info('%d %s', step, values)"
        raise UsageError(f"{name}= is a logging.Logger, which logs text.", fix=[fix])
    if value is None or callable(value) or callable(getattr(value, "log", None)):
        return value
    raise refused(name, value, "an object with log(values, step), such as wandb's run, or a function f(values, step)")
