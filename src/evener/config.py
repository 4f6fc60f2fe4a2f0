"""The keywords of `Run`: one table, merged from code, file, flags and lesson; every value knows where it came from.

The table is the dataclass `Config`: a field is a keyword, its metadata holds the group and the check. `RunKeywords`
repeats the names once, for type checkers (PEP 692); a test holds the two in step. Checks here are about one value
alone, and about sizes that can never fit; what depends on the model or on the ranks is checked by the engine.

Importing this module imports nothing but the standard library.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from evener import config_checks as checks
from evener.errors import BatchSizeError, UsageError, nearest

Origin: TypeAlias = Literal["default", "plan", "code", "evener.toml", "pyproject.toml", "flag", "lesson"]

# How other libraries call the same thing: what to write here instead.
_ELSEWHERE = {
    "batch_size": "global_batch_size= (the rows of one update over all ranks)",
    "accumulate_grad_batches": "microbatch_size= (the number of microbatches follows from it)",
    "gradient_accumulation_steps": "microbatch_size= (the number of microbatches follows from it)",
    "gradient_clip_val": "max_grad_norm=",
    "mixed_precision": "precision=",
    "lr_scheduler": "scheduler=",
    "shuffle": 'order="shuffle" or order="sequential"',
    "sampler": "order= (a function of seed and epoch that returns the indices)",
    "find_unused_parameters": "not needed: unused parameters are found and reported without a switch",
}


_GLOBAL = "a whole number from 1: the rows of one update, over all ranks"
_MICRO = "None or a whole number from 1: the rows that go through the model at once on one rank"
_SLICE = "None or a whole number from 1: the rows that random or coupled code sees together"
_NORM = "None or a finite number above 0"
_SYNCS = checks.whole(1, "None or a whole number of updates from 1", none=True)
_MICROBATCHES = checks.whole(1, _MICRO, BatchSizeError, none=True)
_SLICES = checks.whole(1, _SLICE, BatchSizeError, none=True)


def _row(group: str, check: checks.Check, only_in_code: str = "") -> dict[str, Any]:
    """The metadata of a keyword. `only_in_code` says what a value is that no file and no flag can write."""
    return {"group": group, "check": check, "only_in_code": only_in_code}


def _function(group: str, signature: str = "") -> dict[str, Any]:
    return _row(group, checks.call(f"a function {signature}".rstrip()), "a function")


class RunKeywords(TypedDict, total=False):
    """The keywords of `Run` for type checkers: `def __init__(self, ..., **keywords: Unpack[RunKeywords])`."""

    global_batch_size: int
    slice_size: int | None
    exact: bool
    coupled: bool | None
    order: Literal["shuffle", "sequential"] | Callable[[int, int], Sequence[int]] | None
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int | Literal["auto"]
    prepare: Callable[[Any, Any], Any] | None
    stream: Literal["split", "mine"] | None
    on_bad_sample: Literal["raise", "skip"]
    seed: int
    loss_is: Literal["row mean"] | None
    precision: str | Mapping[str, str]
    strategy: Literal["auto", "single", "dp", "ddp", "fsdp", "hsdp"]
    scheduler: Any
    schedule_by: Literal["update", "epoch"]
    max_grad_norm: float | Mapping[str, float] | None
    before_step: Callable[..., Any] | None
    on_nonfinite: str
    scaler: Any
    compile: bool
    batchnorm: Literal["slice", "sync", "frozen"]
    ema: float | None
    device_ids: Sequence[Any] | None
    output_device: Any
    scatter: Sequence[float] | Callable[..., Any] | None
    microbatch_size: int | None
    weights: str | os.PathLike[str] | None
    fsdp: Mapping[str, Any] | None
    activation_checkpointing: str | Sequence[Any] | None
    saved_activations: Literal["keep", "offload", "int8"]
    gradient_compression: Literal["fp16", "bf16"] | None
    sync_every: int | None
    dir: str | os.PathLike[str] | None
    save_every: int | str | None
    keep_checkpoints: int
    resume: Literal["auto", "must", "never"]
    accept_changed_data: bool
    timeout: float
    logger: Any
    profile: range | None
    split: Callable[..., Any] | None


@dataclass(frozen=True, kw_only=True)
class Config:
    """What was asked for, keyword by keyword. Made by `Config.merge`; `origins` says where each value came from."""

    # batch
    global_batch_size: int = field(metadata=_row("batch", checks.whole(1, _GLOBAL, BatchSizeError)))
    slice_size: int | None = field(default=None, metadata=_row("batch", _SLICES))
    exact: bool = field(default=False, metadata=_row("batch", checks.switch()))
    coupled: bool | None = field(default=None, metadata=_row("batch", checks.switch(none=True)))
    order: str | Callable[[int, int], Sequence[int]] | None = field(default=None, metadata=_row("batch", checks.order))
    drop_last: bool = field(default=False, metadata=_row("batch", checks.switch()))
    collate_fn: Callable[[list[Any]], Any] | None = field(default=None, metadata=_function("batch", "f(rows)"))
    num_workers: int | Literal["auto"] = field(default="auto", metadata=_row("batch", checks.workers))
    prepare: Callable[[Any, Any], Any] | None = field(default=None, metadata=_function("batch", "f(batch, generator)"))
    stream: str | None = field(default=None, metadata=_row("batch", checks.word("split", "mine", none=True)))
    on_bad_sample: str = field(default="raise", metadata=_row("batch", checks.word("raise", "skip")))
    seed: int = field(
        default=0, metadata=_row("batch", checks.whole(0, "a whole number from 0 to 2**64 - 1", most=2**64 - 1))
    )
    loss_is: str | None = field(default=None, metadata=_row("batch", checks.word("row mean", none=True)))
    # step
    precision: str | Mapping[str, str] = field(default="auto", metadata=_row("step", checks.precision))
    strategy: str = field(default="auto", metadata=_row("step", checks.word(*checks.STRATEGIES)))
    scheduler: Any = field(default=None, metadata=_row("step", checks.scheduler, "an object built for the optimizer"))
    schedule_by: str = field(default="update", metadata=_row("step", checks.word("update", "epoch")))
    max_grad_norm: Any = field(default=None, metadata=_row("step", checks.each(checks.above_zero(_NORM, none=True))))
    before_step: Callable[..., Any] | None = field(default=None, metadata=_function("step"))
    on_nonfinite: str = field(default="skip", metadata=_row("step", checks.on_nonfinite))
    scaler: Any = field(default=None, metadata=_row("step", checks.scaler))
    compile: bool = field(default=False, metadata=_row("step", checks.switch()))
    batchnorm: str = field(default="slice", metadata=_row("step", checks.word("slice", "sync", "frozen")))
    ema: float | None = field(default=None, metadata=_row("step", checks.decay))
    device_ids: list[Any] | None = field(default=None, metadata=_row("step", checks.devices))
    output_device: Any = field(default=None, metadata=_row("step", checks.device))
    scatter: Any = field(default=None, metadata=_row("step", checks.scatter))
    # memory
    microbatch_size: int | None = field(default=None, metadata=_row("memory", _MICROBATCHES))
    weights: str | os.PathLike[str] | None = field(default=None, metadata=_row("memory", checks.existing))
    fsdp: Mapping[str, Any] | None = field(default=None, metadata=_row("memory", checks.fsdp))
    activation_checkpointing: Any = field(default=None, metadata=_row("memory", checks.recompute))
    saved_activations: str = field(default="keep", metadata=_row("memory", checks.word("keep", "offload", "int8")))
    gradient_compression: str | None = field(
        default=None, metadata=_row("memory", checks.word("fp16", "bf16", none=True))
    )
    sync_every: int | None = field(default=None, metadata=_row("memory", _SYNCS))
    # survival and output
    dir: str | os.PathLike[str] | None = field(default=None, metadata=_row("output", checks.dir))
    save_every: int | str | None = field(default="10min", metadata=_row("output", checks.every))
    keep_checkpoints: int = field(default=3, metadata=_row("output", checks.whole(1, "a whole number from 1")))
    resume: str = field(default="auto", metadata=_row("output", checks.word("auto", "must", "never")))
    accept_changed_data: bool = field(default=False, metadata=_row("output", checks.switch()))
    timeout: float = field(
        default=600, metadata=_row("output", checks.above_zero("a finite number of seconds above 0"))
    )
    logger: Any = field(default=None, metadata=_row("output", checks.logger, "an object or a function"))
    profile: range | None = field(default=None, metadata=_row("output", checks.updates, "a range"))
    split: Callable[..., Any] | None = field(default=None, metadata=_function("output"))

    origins: Mapping[str, Origin] = field(default_factory=dict)

    @classmethod
    def merge(
        cls,
        code: Mapping[str, Any],
        file: ConfigFile | None = None,
        flags: Mapping[str, Any] | None = None,
        lesson: Mapping[str, Any] | None = None,
        plan: Mapping[str, Any] | None = None,
    ) -> Config:
        """The later of code < file < flags < lesson wins, keyword by keyword; every given value is checked.

        What is left open then, or is "auto", a plan decides.

        A value that a later source replaces is checked too: a mistake in the code does not hide behind a flag.
        """
        table = _table()
        values: dict[str, Any] = {}
        origins: dict[str, Origin] = dict.fromkeys(table, "default")
        sources: list[tuple[Origin, Mapping[str, Any]]] = [("code", code)]
        if file is not None:
            sources.append((file.origin, file.keywords))
        sources += [("flag", flags or {}), ("lesson", lesson or {})]
        for origin, given in sources:
            for name, value in given.items():
                try:
                    values[name] = _checked(table, name, value, origin)
                except UsageError as error:
                    if origin == "code":
                        raise
                    where = f"in {file.path}" if file is not None and origin == file.origin else f"given by a {origin}"
                    raise type(error)(error.cause, evidence=(*error.evidence, where), fix=error.fix) from None
                origins[name] = origin
        for name, value in (plan or {}).items():
            if values.get(name, "auto") in ("auto", None):
                values[name], origins[name] = _checked(table, name, value, "plan"), "plan"
        if "global_batch_size" not in values:
            fix = ("global_batch_size=512", f"global_batch_size is {_GLOBAL}")
            raise BatchSizeError("global_batch_size is missing.", fix=fix)
        config = cls(**values, origins=origins)
        for name in ("microbatch_size", "slice_size"):
            config._must_fit(name)
        return config

    def _must_fit(self, name: str) -> None:
        size = getattr(self, name)
        if size is not None and size > self.global_batch_size:
            raise BatchSizeError(
                f"{name}={size} is more than global_batch_size={self.global_batch_size}.",
                evidence=[f"{one} comes from: {self.origins[one]}" for one in (name, "global_batch_size")],
                fix=[
                    f"{name}={self.global_batch_size} or less, or leave {name} out",
                    "or a larger global_batch_size: that changes what one update is",
                ],
            )

    def as_json(self) -> dict[str, dict[str, Any]]:
        """`{keyword: {"value": ..., "origin": ...}}` in the order of the table, for config.json.

        Functions are their "module.qualname", other objects the name of their type: a record, not a way back.
        """
        return {
            name: {"value": _as_json(getattr(self, name)), "origin": self.origins[name]} for name in keyword_groups()
        }


@dataclass(frozen=True)
class ConfigFile:
    """The keywords that a file gives: the whole of `evener.toml`, or `[tool.evener]` of `pyproject.toml`."""

    path: Path
    keywords: Mapping[str, Any]

    @property
    def origin(self) -> Origin:
        return "evener.toml" if self.path.name == "evener.toml" else "pyproject.toml"

    @classmethod
    def find(cls, directory: str | os.PathLike[str] = ".") -> ConfigFile | None:
        """The file that counts for `directory`: there, or in the nearest parent of the same project.

        The project's root is the first directory upwards with a `pyproject.toml` or a `.git`. Nothing above it counts,
        and without a root only `directory` itself: a file left in a home directory does not change a training.
        """
        here = Path(directory).absolute()
        upwards = (here, *here.parents)
        root = next((one for one in upwards if (one / "pyproject.toml").is_file() or (one / ".git").exists()), here)
        for folder in upwards[: upwards.index(root) + 1]:
            own, project = folder / "evener.toml", folder / "pyproject.toml"
            table = _read_toml(project).get("tool", {}).get("evener") if project.is_file() else None
            if isinstance(table, dict) and "lint" in table:  # the linter's own section says nothing about a run
                table = {key: value for key, value in table.items() if key != "lint"} or None
            if own.is_file():
                if table is not None:
                    fix = ["keep one of them: move the keywords of [tool.evener] to evener.toml"]
                    raise UsageError(f"{own} and [tool.evener] of {project} are both there.", fix=fix)
                return cls(own, _read_toml(own))
            if table is not None:
                if not isinstance(table, dict):
                    raise UsageError(f"tool.evener in {project} is not a table.", fix=["[tool.evener]"])
                return cls(project, table)
        return None


def keyword_groups() -> dict[str, str]:
    """Every keyword and its group (batch, step, memory, output), in the order of the table."""
    return {name: one.metadata["group"] for name, one in _table().items()}


def nearest_valid(size: int, multiple_of: int, at_most: int) -> tuple[int, ...]:
    """The sizes next to `size`, below and above, that are multiples of `multiple_of` in 1..`at_most`.

    For messages about microbatches of whole slices: `nearest_valid(10, 4, 512)` is (8, 12).
    """
    below = min(size, at_most) // multiple_of * multiple_of
    near = (below,) if below == size else (below, below + multiple_of)
    return tuple(one for one in near if 1 <= one <= at_most)


def _table() -> dict[str, Any]:
    return {one.name: one for one in fields(Config) if one.name != "origins"}


def check_keywords(**given: Any) -> None:
    """Each value alone, as `Run` checks it: for an Engine, which has no file and no flags."""
    for name, value in given.items():
        _checked(_table(), name, value, "code")


def _checked(table: Mapping[str, Any], name: str, value: Any, origin: Origin) -> Any:
    if name not in table:
        raise _unknown(name, table)
    row = table[name].metadata
    if origin != "code" and not _is_json(value, row["only_in_code"]):
        what = row["only_in_code"] or "not a JSON value"
        cause = f"{name}={checks.shown(value)}: {name} is {what} and cannot come from a file, a flag or a lesson."
        raise UsageError(cause, fix=[f"give {name}= to Run in the script"])
    return row["check"](name, value)


def _unknown(name: str, table: Mapping[str, Any]) -> UsageError:
    known = keyword_groups()
    here = _ELSEWHERE.get(name)
    close = here.split("=")[0] if here else nearest(name, table)
    fix = [f"here it is {here}"] if here else [f"{close}="] if close else []
    for group in dict.fromkeys(known.values()):
        if close not in known or known[close] == group:
            fix.append(f"{group} keywords: {', '.join(one for one, its in known.items() if its == group)}")
    return UsageError(f"Run has no keyword {name!r}.", fix=fix)


def _is_json(value: object, only_in_code: str) -> bool:
    if value is None or only_in_code:
        return value is None
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(one, "") for key, one in value.items())
    if isinstance(value, list | tuple):
        return all(_is_json(one, "") for one in value)
    return isinstance(value, str | int | float | bool)


def _as_json(value: Any) -> Any:
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    if named is not value and type(value).__name__ == "device":  # a torch.device says more as text: "cuda:1"
        return str(value)
    return f"{named.__module__}.{named.__qualname__}"


def _read_toml(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML.", evidence=[str(error)], fix=["correct it, or move it away"]) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read.", evidence=[str(error)], fix=["make it readable"]) from None
