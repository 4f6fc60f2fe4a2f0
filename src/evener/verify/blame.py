"""What a difference says about the script, in words: the likely causes, the most likely first, each with what to do."""

from __future__ import annotations

from typing import Literal

from evener.verify.compare import Comparison

Kind = Literal["repeat", "microbatch", "world", "resume", "evaluate"]

# What the script keeps beside the run, by the first word of its name, and where it belongs instead.
_WHERE = {
    "tensor": "register_buffer() makes it part of the model: saved, and the same on every rank",
    "attribute": "keep it in a buffer or in run.state, or run.register() an object with state_dict()",
    "variable": "keep it in run.state, or run.register() an object with state_dict()",
    "global": "keep it in run.state, or run.register() an object with state_dict()",
    "defaults": "a mutable default remembers: keep it in run.state",
    "the": "give it state_dict() and load_state_dict(), and run.register() it",
    "generator": "inside an update torch's draws are derived from (seed, update), these are not",
}
_COUPLED = "rows look at each other (in-batch negatives, mixup): coupled=True shows them one slice at a time"
_FALLBACK = {
    "repeat": "the update depends on the clock, a generator without a seed, or a kernel that is not deterministic",
    "resume": "the update depends on something that no checkpoint holds and that starts anew with the process",
    "evaluate": "what evaluation computes is kept and used by a later update",
}


def likely(kind: Kind, found: Comparison, microbatch_held: bool | None) -> tuple[str, ...]:
    """The causes that fit. microbatch_held: another microbatch on one process changed nothing (None: untried)."""
    first = found.findings[0].what if found.findings else ""
    word = first.partition(" ")[0]
    data = [one for one in found.suspects if one.endswith("of the dataset")]
    beside = [_unsaved(one) for one in found.suspects if one not in data and not one.startswith("generator")]
    if "on rank" in first:
        return ("code that runs on some ranks only (`if rank == 0:`), or asks for its rank, changes the run's state",)
    if word == "run.state":
        return (f"{first} is computed from what is not the same in every start: the clock, a process id",)
    if word in ("lr", "schedule"):
        return ("the schedule depends on more than the number of updates: the clock, a file, a random number", *beside)
    if found.before and found.batch == 0 and word in ("parameter", "buffer", "ema"):
        return ("the weights are drawn without a seed: evener.seed(0) before the model is made",)
    if found.before:
        return (f"{first} is not what was saved: code before the loop changes it in every start",)
    if word == "order":
        return (
            "order= is no function of (seed, epoch): it remembers earlier calls, or draws without the seed it gets",
        )
    if word == "row":
        inside = [
            f"`{one}` changes while rows are read: a row is (dataset, epoch, index) and nothing else" for one in data
        ]
        own = (
            "rows are changed in place, or drawn with a generator of their own: inside __getitem__ the default ones of"
        )
        return (*inside, *beside, f"{own} torch, random and numpy are seeded by (seed, epoch, row)")
    if word == "prepared":
        return (*beside, "prepare(batch, generator) draws from something else than the generator it is given")
    if kind in _FALLBACK:
        return (*map(_unsaved, found.suspects), _FALLBACK[kind])
    if kind == "world" and microbatch_held:
        return ("loss_fn or the model has a branch on the rank, or on the number of ranks", *beside, _COUPLED)
    mean = "the loss is no mean over rows: a mean over tokens or over a mask is evener.Mean(total=..., count=...)"
    return (*beside, mean, _COUPLED, *(["a branch on the rank, or on the number of ranks"] if kind == "world" else []))


def _unsaved(name: str) -> str:
    where = _WHERE.get(name.partition(" ")[0])
    return f"`{name}` is not the same, and no checkpoint holds it" + (f": {where}" if where else "")
