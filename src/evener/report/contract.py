"""The contract line: what one update is and how it is cut, in one line before training and after every change.

Pure functions of plain values: nothing is measured, asked or printed here.
"""

from __future__ import annotations

from dataclasses import dataclass

from evener.report.text import format_count, format_lr

# A schedule this much shorter or longer than the run is a mistake more often than a wish.
_ENDS_EARLY, _ENDS_LATE = 0.9, 1.1


@dataclass(frozen=True, kw_only=True)
class PrecisionWords:
    """What is stored, computed and reduced in which type, in words: fp32, tf32, bf16, fp16."""

    compute: str = "fp32"
    master: str = "fp32"  # the parameters that the optimizer updates
    reduce: str = "fp32"  # the sum of gradients over microbatches and ranks
    scaler: bool = False  # the loss is scaled up before the backward


@dataclass(frozen=True, kw_only=True)
class Contract:
    """The factors of one update.

    Ranks hold balanced shares: their rows differ by one row at most, or by one slice where there are slices.
    """

    global_batch_size: int
    world_size: int
    microbatches: int  # of the rank that has most of them
    microbatch_size: int  # rows of a full microbatch
    slice_size: int | None = None  # None: fast mode without coupled code, nothing depends on slices
    precision: PrecisionWords = PrecisionWords()
    strategy: str = "single"
    exact: bool = False
    coupled: bool = False
    schedule_by: str | None = "update"  # "update", "epoch", or None without a scheduler
    one_scalar_read: bool = False  # this optimizer cannot skip on the device
    approximate: tuple[str, ...] = ()  # lossy options, each by its name
    notes: tuple[str, ...] = ()


def contract_line(contract: Contract) -> str:
    """One line. Every factor that changes the result or its cost is in it; what is absent does not happen."""
    parts = [_product(contract), _precision(contract.precision), contract.strategy]
    parts.append(f"lr per {contract.schedule_by}" if contract.schedule_by else "lr constant")
    words = [word for word, said in (("exact", contract.exact), ("coupled", contract.coupled)) if said]
    # In exact mode a slice that is a whole microbatch is in the line already; coupled code always says what it sees.
    shown = contract.slice_size is not None and (contract.coupled or contract.slice_size != contract.microbatch_size)
    if words:
        parts.append(", ".join(words) + (f" (slices of {format_count(contract.slice_size or 0)})" if shown else ""))
    if contract.one_scalar_read:
        parts.append("one scalar read per update: this optimizer cannot skip on the device")
    if contract.approximate:
        parts.append(f"approximate: {', '.join(contract.approximate)}")
    return " · ".join([*parts, *contract.notes])


def _product(contract: Contract) -> str:
    """`global batch 512 = 4 ranks x 8 microbatches x 16`; a factor that not every rank fills says "up to"."""
    size, world = contract.global_batch_size, contract.world_size
    unit = contract.slice_size or 1
    units = -(-size // unit)
    most, least = -(-units // world) * unit, units // world * unit  # rows of the fullest and the emptiest rank
    fewest = -(-least // contract.microbatch_size)
    full = all(rows % contract.microbatch_size == 0 for rows in (size, most, least))
    even = world * contract.microbatches * contract.microbatch_size == size
    ranks = f"{format_count(world)} {'rank' if world == 1 else 'ranks'}"
    number = f"{format_count(contract.microbatches)} {'microbatch' if contract.microbatches == 1 else 'microbatches'}"
    number = f"up to {number}" if not even and fewest != contract.microbatches else number
    rows = f"{'up to ' if not even and not full else ''}{format_count(contract.microbatch_size)}"
    return f"global batch {format_count(size)} = {ranks} x {number} x {rows}"


def _precision(words: PrecisionWords) -> str:
    scaled = " with loss scaling" if words.scaler else ""
    if words.compute == words.master == words.reduce:
        return f"{words.compute}{'' if words.compute == 'fp32' else ' throughout'}{scaled}"
    return f"{words.compute}{scaled} (parameters {words.master}, gradients reduced in {words.reduce})"


def lr_line(
    first: float, last: float, updates: int | None, *, peak: float | None = None, schedule_updates: int | None = None
) -> str:
    """`lr 1e-3 -> 1e-5 over 4,690 updates`, and a second line when the schedule does not fit the run.

    `updates`: of the run; None when it has no end. `peak`: the highest in between, when it is above both (warm-up).
    `schedule_updates`: until the schedule ends, when it says so (T_max, total_steps), else None.
    """
    ways = [first, last] if peak is None or peak <= max(first, last) else [first, peak, last]
    words = [format_lr(way) for way in ways]
    over = f" over {format_count(updates)} {'update' if updates == 1 else 'updates'}" if updates is not None else ""
    line = f"lr {words[0]}, constant{over}" if len(set(words)) == 1 else f"lr {' -> '.join(words)}{over}"
    if schedule_updates is None or not updates:
        return line
    if schedule_updates <= 0:
        return f"{line}\n  the schedule has ended"
    ends, runs = format_count(schedule_updates), format_count(updates)
    if schedule_updates < _ENDS_EARLY * updates:
        return f'{line}\n  warning: the schedule ends after {ends} updates, the run after {runs} (schedule_by="epoch"?)'
    if schedule_updates > _ENDS_LATE * updates:
        return f"{line}\n  warning: the schedule needs {ends} updates, the run ends after {runs}: it never arrives"
    return line
