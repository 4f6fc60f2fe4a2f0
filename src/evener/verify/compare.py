"""Two traces of trials, batch by batch: equal to the bit, close, or different, and which part differs first.

The order of looking is the order of causes: what was there before the batch, which rows, what is in them, the learning
rate, the loss, the gradient, and what is there after it.

Levels. "bits": everything the run's checkpoints hold, every loss, every gradient. "close": for another cut in fast
mode. What precedes the first batch is still compared to the bit; the gradient of every batch, element by element, to
TOLERANCE times its largest element; the loss to the same share of itself. From the second batch on parameters differ by
rounding (an Adam step turns gradients of 1e-9 and -1e-9 into opposite steps of the same size): later batches are
held to GROWTH times that. "distribution": random layers in fast mode draw per rank and microbatch; only what precedes
them can be compared.
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
Values = Mapping[str, Any]  # one line of a trace


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
        trace, path = cls(folder), Path(folder, "trace.jsonl")
        for text in path.read_text("ascii").splitlines(keepends=True) if path.exists() else ():
            if not text.endswith("\n"):
                break  # killed while it was written
            line = json.loads(text)
            if line["kind"] == "batch":
                trace.batches[line["batch"]] = line
            elif line["kind"] == "evaluate":
                trace.evaluations += 1
            else:
                setattr(trace, line["kind"], line)
        return trace

    @property
    def drawn(self) -> bool:
        """Whether a forward or backward drew from torch's generators."""
        return any(batch["drawn"] for batch in self.batches.values())

    def there(self, batch: int) -> Values:
        """What is there before `batch`; {} where nobody saw it."""
        return self.begin if batch == self.begin["batch"] else self.batches.get(batch - 1, {})

    def tensors(self, batch: int, prefix: str) -> dict[str, Any]:
        """Kept tensors of that kind after `batch`, by name, as numpy arrays; {} where none were kept."""
        from safetensors.numpy import load_file

        path = os.path.join(self.folder, f"tensors-{batch + 1}.safetensors")
        kept = load_file(path) if os.path.exists(path) else {}
        return {name.removeprefix(prefix): one for name, one in kept.items() if name.startswith(prefix)}


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
    start, last = case.begin["batch"], max(ref.batches)
    worst = max(_offs(ref, case, last, "parameter ")[0].values(), default=None)
    before = ref.there(start)
    found = (*_unequal(before, case.begin, "state"), *_unequal(before, case.begin, "run.state", "run.state ", noise))
    if found:
        return Comparison("different", worst, found, start, True, tuple(differing(before, case.begin, noise)))
    gradient = _gradient(ref, case, start)[0] if level == "close" else None
    for batch in range(start, last + 1):
        if batch not in case.batches:
            text = f"it made {len(case.batches) + start} batches, not {last + 1}"
            return Comparison("different", worst, (Finding("the number of batches", text),), batch)
        if found := tuple(_batch(ref, case, batch, level, noise)):
            earlier = differing(ref.there(batch), case.there(batch), noise)
            later = differing(ref.batches[batch], case.batches[batch], noise)
            suspects = tuple(dict.fromkeys([*earlier, *later]))
            return Comparison("different", worst, found, batch, False, suspects, gradient)
    equal = level == "bits" or all(_same_bits(ref.batches[k], case.batches[k]) for k in range(start, last + 1))
    return Comparison("bit-equal" if equal else "close", 0.0 if equal else worst, gradient=gradient)


def _batch(ref: Trace, case: Trace, batch: int, level: Level, noise: frozenset[str]) -> Iterator[Finding]:
    """What differs in one batch. Rows that were read in another way are named only where something else differs."""
    one, other = ref.batches[batch], case.batches[batch]
    if one["cursor"] != other["cursor"] or one["ids"] != other["ids"]:
        k = next((k for k, (a, b) in enumerate(zip(one["ids"], other["ids"])) if a != b), 0)
        yield Finding("order of rows", f"position {k} is row {other['ids'][k]}, was row {one['ids'][k]}")
        return
    found = list(_results(ref, case, batch, level, noise))
    if found and level != "distribution":
        yield from _rows(one, other)
    yield from found


def _results(ref: Trace, case: Trace, batch: int, level: Level, noise: frozenset[str]) -> Iterator[Finding]:
    one, other, allowed = ref.batches[batch], case.batches[batch], 0.0
    if level == "close":
        dtype = next((str(one.dtype) for one in case.tensors(batch, "gradient ").values()), "float32")
        precision = case.begin["precision"]
        allowed = TOLERANCE["float64"] if dtype == "float64" else TOLERANCE.get(precision, HALF)
        allowed *= 1 if batch == case.begin["batch"] else GROWTH
    for a, b in zip(one["updates"], other["updates"]):
        if a["lr"] != b["lr"]:
            yield Finding("lr", f"lr is {b['lr']!r}, was {a['lr']!r}")
        if level == "distribution":
            continue
        if not _near(a["loss"], b["loss"], allowed):
            yield Finding("loss", f"loss is {b['loss']!r}, was {a['loss']!r}")
        if a["skipped"] != b["skipped"]:
            yield Finding("skipped", "the update is skipped" if b["skipped"] else "the update is not skipped")
    if level == "bits":
        yield from _unequal(one, other, "gradient", "gradient ")
        yield from _unequal(one, other, "state")
        yield from _unequal(one, other, "run.state", "run.state ", noise)
    elif level == "close":
        worst, name = _gradient(ref, case, batch)
        if worst is not None and not worst <= allowed:
            off = f"off by {worst:.2g} of the gradient's largest element; {allowed:.0e} allowed"
            yield Finding(f"gradient {name}", f"gradient {name} {off}")
    for name, ranks in other["ranks_differ"].items():
        yield Finding(f"{name} on rank {ranks[0]}", f"rank {ranks[0]} holds another {name} than rank 0")


def _same_bits(one: Values, other: Values) -> bool:
    return all(one[key] == other[key] for key in ("state", "gradient")) and all(
        _near(a["loss"], b["loss"], 0.0) for a, b in zip(one["updates"], other["updates"])
    )


def _unequal(
    one: Values, other: Values, key: str, prefix: str = "", noise: frozenset[str] = frozenset()
) -> Iterator[Finding]:
    a, b = one.get(key, {}), other.get(key, {})
    for name in {**a, **b}:
        if a.get(name) != b.get(name) and f"{prefix}{name}" not in noise:
            yield Finding(f"{prefix}{name}", f"{prefix}{name} has other bits")


def _rows(one: Values, other: Values) -> Iterator[Finding]:
    """Rows whose content differs: as they were read, and after `prepare` where they were read alike."""
    for column, what in ((1, "row"), (2, "prepared row")):
        wrong = [k for k, (a, b) in enumerate(zip(one["rows"], other["rows"])) if a[column] != b[column]]
        if wrong:
            name = f"{what} {one['ids'][wrong[0]]}"
            many = f" (and {len(wrong) - 1} more of {len(one['rows'])})" if len(wrong) > 1 else ""
            yield Finding(name, f"{name} of the dataset is another{many}")
            return


def differing(one: Values, other: Values, noise: frozenset[str] = frozenset()) -> list[str]:
    """Names of what is beside the run and differs; attributes first, then variables and globals, then generators."""
    found = []
    for key, prefix in (("user", ""), ("run.state", "run.state "), ("generators", "generator ")):
        a, b = one.get(key, {}), other.get(key, {})
        found += [
            f"{prefix}{name}" for name in a if name in b and a[name] != b[name] and f"{prefix}{name}" not in noise
        ]
    ranks = ("tensor", "attribute", "variable", "defaults", "the ", "global", "train", "run.state", "generator")
    return sorted(found, key=lambda name: next(i for i, word in enumerate(ranks) if name.startswith(word)))


def _near(a: float, b: float, allowed: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=allowed)


def _gradient(ref: Trace, case: Trace, batch: int) -> tuple[float | None, str]:
    """The largest difference of any element over the largest element of the whole gradient, and where it is."""
    off, scale = _offs(ref, case, batch, "gradient ")
    worst = max(off, key=lambda name: off[name], default="")
    return (off[worst] / (scale or 1.0) if off else None), worst


def _offs(ref: Trace, case: Trace, batch: int, prefix: str) -> tuple[dict[str, float], float]:
    """The largest difference in every tensor that both traces kept after `batch`, and the largest element in `ref`."""
    one, other = ref.tensors(batch, prefix), case.tensors(batch, prefix)
    names = [name for name in one if name in other]
    scale = max((float(abs(one[name]).max(initial=0.0)) for name in names), default=0.0)
    return {name: _off(one[name], other[name]) for name in names}, scale


def _off(a: Any, b: Any) -> float:
    if a.shape != b.shape:
        return math.inf
    off = abs(a.astype("float64") - b.astype("float64"))
    off[(a == b) | ((a != a) & (b != b))] = 0.0  # equal infinities, and NaN on both sides
    largest = float(off.max(initial=0.0))
    return math.inf if math.isnan(largest) else largest
