"""Two traces of trials, batch by batch: equal to the bit, close, or different, and which part differs first.

The order of looking is the order of causes: what was there before the batch, which rows, what is in them, the learning
rate, the loss, the gradient, and what is there after it.

Two ways to compare. "bits": everything the run's checkpoints hold, every loss, every gradient. "close": for another cut
in fast mode, where sums are taken in another order. What precedes the first batch is still compared to the bit; the
gradient of every batch, element by element, to TOLERANCE times the largest element of that gradient; the loss to the
same share of itself. That is the promise for the first batch, which starts from the same parameters. From then on the
parameters differ by rounding (an Adam step turns a gradient of 1e-9 and one of -1e-9 into the same opposite steps), so
later batches are held to GROWTH times that: a fault shows, rounding does not. "distribution": random layers in fast
mode draw per rank and microbatch; only what precedes them can be compared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

TOLERANCE = {"float64": 1e-11, "fp32": 1e-5, "tf32": 2e-3}
HALF = 1e-2  # 16-bit mantissas: 2^-8 for bfloat16, a few roundings
GROWTH = 30.0

Level = Literal["bits", "close", "distribution"]


@dataclass
class Trace:
    """What one start of the script wrote down."""

    folder: str
    begin: dict[str, Any] = field(default_factory=dict)
    batches: dict[int, dict[str, Any]] = field(default_factory=dict)
    evaluations: int = 0
    end: dict[str, Any] | None = None

    @classmethod
    def read(cls, folder: str) -> Trace:
        trace = cls(folder)
        path = Path(folder, "trace.jsonl")
        for text in path.read_text("ascii").splitlines(keepends=True) if path.exists() else ():
            if not text.endswith("\n"):
                break  # killed while it was written
            line = json.loads(text)
            if line["kind"] == "begin":
                trace.begin = line
            elif line["kind"] == "batch":
                trace.batches[line["batch"]] = line
            elif line["kind"] == "evaluate":
                trace.evaluations += 1
            else:
                trace.end = line
        return trace

    @property
    def start(self) -> int:
        return int(self.begin["batch"])

    def there(self, batch: int) -> dict[str, Any] | None:
        """What is there before `batch`."""
        return self.begin if batch == self.start else self.batches.get(batch - 1)

    def tensors(self, batch: int) -> dict[str, Any]:
        """Kept tensors after `batch` as numpy arrays; {} where none were kept."""
        from safetensors.numpy import load_file

        path = os.path.join(self.folder, f"tensors-{batch + 1}.safetensors")
        return load_file(path) if os.path.exists(path) else {}


@dataclass(frozen=True)
class Finding:
    """One part that differs. what: "parameter fc.weight". text: the same with the figures."""

    what: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """result: bit-equal, close or different. batch, before: where the first difference is; `before`: it was there
    before the batch. suspects: what else differs around it, of what the script keeps beside the run.
    """

    result: str
    max_abs_difference: float | None
    findings: tuple[Finding, ...] = ()
    batch: int | None = None
    before: bool = False
    suspects: tuple[str, ...] = ()
    gradient: float | None = None  # the largest relative difference in the first batch


def compare(ref: Trace, case: Trace, level: Level, noise: frozenset[str] = frozenset()) -> Comparison:
    """`case` from its first batch to the last of `ref`, which went through the same batches without interruption.

    noise: what the script keeps beside the run and is another value in every start.
    """
    start, last = case.start, max(ref.batches)
    worst = _largest(ref, case, last)
    before = ref.there(start) or {}
    found = (*_unequal(before, case.begin, "state"), *_unequal(before, case.begin, "run.state", "run.state ", noise))
    if found:
        return Comparison("different", worst, found, start, True, _suspects(ref, case, start, noise)[0])
    gradient = _gradient(ref, case, start, case.begin["precision"])[0] if level == "close" else None
    for batch in range(start, last + 1):
        one, other = ref.batches[batch], case.batches.get(batch)
        if other is None:
            text = f"it made {len(case.batches) + start} batches, not {last + 1}"
            return Comparison("different", worst, (Finding("the number of batches", text),), batch)
        found = (*_batch(ref, case, batch, level, noise),)
        if found:
            earlier, later = _suspects(ref, case, batch, noise)
            rows = () if level == "distribution" else tuple(_rows(one, other))
            ids = [finding for finding in found if finding.what == "order of rows"]
            return Comparison(
                "different", worst, tuple(ids) or (*rows, *found), batch, False, (*earlier, *later), gradient
            )
    equal = level == "bits" or all(_same_bits(ref.batches[k], case.batches[k]) for k in range(start, last + 1))
    return Comparison("bit-equal" if equal else "close", 0.0 if equal else worst, gradient=gradient)


def tolerance(precision: str, dtype: str, first: bool) -> float:
    """How far a gradient in another cut may be off, relative to its largest element."""
    base = TOLERANCE["float64"] if dtype == "float64" else TOLERANCE.get(precision, HALF)
    return base if first else base * GROWTH


def _batch(ref: Trace, case: Trace, batch: int, level: Level, noise: frozenset[str]) -> Iterator[Finding]:
    one, other = ref.batches[batch], case.batches[batch]
    if one["cursor"] != other["cursor"] or one["ids"] != other["ids"]:
        k = next((k for k, (a, b) in enumerate(zip(one["ids"], other["ids"])) if a != b), 0)
        yield Finding("order of rows", f"position {k} is row {other['ids'][k]}, was row {one['ids'][k]}")
    for a, b in zip(one["updates"], other["updates"]):
        if a["lr"] != b["lr"]:
            yield Finding("lr", f"lr is {b['lr']!r}, was {a['lr']!r}")
        if level == "distribution":
            continue
        allowed = 0.0
        if level == "close":
            allowed = tolerance(case.begin["precision"], _dtype(case, batch), batch == case.start)
        if not _near(a["loss"], b["loss"], allowed):
            yield Finding("loss", f"loss is {b['loss']!r}, was {a['loss']!r}")
        if a["skipped"] != b["skipped"]:
            yield Finding("skipped", "the update is skipped" if b["skipped"] else "the update is not skipped")
    if level == "bits":
        yield from _unequal(one, other, "gradient", "gradient ")
        yield from _unequal(one, other, "state")
        yield from _unequal(one, other, "run.state", "run.state ", noise)
    elif level == "close":
        worst, name = _gradient(ref, case, batch, case.begin["precision"])
        allowed = tolerance(case.begin["precision"], _dtype(case, batch), batch == case.start)
        if worst is not None and not worst <= allowed:
            yield Finding(
                f"gradient {name}",
                f"gradient {name} off by {worst:.2g} of the gradient's largest element; {allowed:.0e} allowed",
            )
    for name, ranks in other["ranks_differ"].items():
        yield Finding(f"{name} on rank {ranks[0]}", f"rank {ranks[0]} holds another {name} than rank 0")


def _same_bits(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one[key] == other[key] for key in ("state", "gradient")) and all(
        a["loss"] == b["loss"] or a["loss"] != a["loss"] for a, b in zip(one["updates"], other["updates"])
    )


def _unequal(
    one: Mapping[str, Any], other: Mapping[str, Any], key: str, prefix: str = "", noise: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    a, b = one.get(key, {}), other.get(key, {})
    for name in {**a, **b}:
        if a.get(name) != b.get(name) and f"{prefix}{name}" not in noise:
            yield Finding(f"{prefix}{name}", f"{prefix}{name} has other bits")


def _rows(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[Finding]:
    """Rows whose content differs: as they were read, and after `prepare` where they were read alike."""
    for column, what in ((1, "row"), (2, "prepared row")):
        wrong = [k for k, (a, b) in enumerate(zip(one["rows"], other["rows"])) if a[column] != b[column]]
        if wrong:
            many = f" (and {len(wrong) - 1} more of {len(one['rows'])})" if len(wrong) > 1 else ""
            yield Finding(
                f"{what} {one['ids'][wrong[0]]}", f"{what} {one['ids'][wrong[0]]} of the dataset is another{many}"
            )
            return


def _suspects(ref: Trace, case: Trace, batch: int, noise: frozenset[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What the script keeps and is different before the batch; and what is only different after it."""
    moments = ((ref.there(batch), case.there(batch)), (ref.batches.get(batch), case.batches.get(batch)))
    found: list[tuple[str, ...]] = []
    for one, other in moments:
        names = [name for name in differing(one or {}, other or {}) if name not in noise]
        found.append(tuple(name for name in names if not found or name not in found[0]))
    return found[0], found[1]


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is beside the run and differs; attributes first, then variables and globals, then generators."""
    found = []
    for key, prefix in (("user", ""), ("run.state", "run.state "), ("generators", "generator ")):
        a, b = one.get(key, {}), other.get(key, {})
        found += [f"{prefix}{name}" for name in a if name in b and a[name] != b[name]]
    ranks = ("tensor", "attribute", "variable", "defaults", "the ", "global", "train", "run.state", "generator")
    return sorted(found, key=lambda name: next(i for i, word in enumerate(ranks) if name.startswith(word)))


def _near(a: float, b: float, allowed: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= allowed * max(abs(a), abs(b))


def _dtype(trace: Trace, batch: int) -> str:
    return next(
        (str(one.dtype) for name, one in trace.tensors(batch).items() if name.startswith("gradient ")), "float32"
    )


def _gradient(ref: Trace, case: Trace, batch: int, precision: str) -> tuple[float | None, str]:
    """The largest difference of any element over the largest element of the whole gradient, and where it is."""
    one, other = ref.tensors(batch), case.tensors(batch)
    names = [name for name in one if name.startswith("gradient ") and name in other]
    if not names:
        return None, ""
    scale = max(float(abs(one[name]).max(initial=0.0)) for name in names)
    off = {name.removeprefix("gradient "): _off(one[name], other[name]) for name in names}
    worst = max(off, key=lambda name: off[name])
    return (off[worst] / scale if scale else off[worst]), worst


def _largest(ref: Trace, case: Trace, batch: int) -> float | None:
    """The largest difference of any parameter after `batch`; None where it was not kept."""
    one, other = ref.tensors(batch), case.tensors(batch)
    names = [name for name in one if name.startswith("parameter ") and name in other]
    return max((_off(one[name], other[name]) for name in names), default=None)


def _off(a: Any, b: Any) -> float:
    if a.shape != b.shape:
        return math.inf
    if not a.size:
        return 0.0
    off = abs(a.astype("float64") - b.astype("float64"))
    off[(a == b) | ((a != a) & (b != b))] = 0.0  # equal infinities, and NaN on both sides
    largest = float(off.max())
    return math.inf if math.isnan(largest) else largest
