"""The algebra of CUDA_VISIBLE_DEVICES: from the variable to slots and back, and why a word does not count.

Its rules, as torch reads them (`torch.cuda._parse_visible_devices` is the oracle of the tests):

    unset                   every GPU, in the order of CUDA_DEVICE_ORDER
    0,3  or  1gpu,2x        indices: the number that a word begins with. The first word without one, with a negative
                            one or with one that no GPU has ends the list; the same number twice empties it
    GPU-8f2e,GPU-1c         UUIDs or beginnings of one. The first word of another kind, of no GPU or of two GPUs ends
                            the list; the same GPU twice empties it. A space before GPU- makes it another kind
    MIG-...                 likewise, for MIG devices (by their own UUIDs, which they have since driver 470)
    empty or -1             no GPU

An index is the driver's number (what nvidia-smi shows); a slot is the position in the list, the N of `cuda:N`. Indices
in the variable count in CUDA's own order, which is the driver's only with CUDA_DEVICE_ORDER=PCI_BUS_ID or where all
GPUs are of one kind; otherwise nobody outside CUDA knows it, and a slot's GPU is None.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from evener.errors import DeviceError
from evener.gpus.values import Gpu

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Words:
    """The words of the variable that count, without a look at the machine.

    `indices` or `uuids` is set, or neither: every GPU. `ended` says why what follows them does not count.
    """

    indices: tuple[int, ...] | None = None
    uuids: tuple[str, ...] | None = None
    ended: str | None = None


@dataclass(frozen=True)
class Visible:
    """What a process started with this environment would see.

    Attributes:
        slots: The UUID behind every slot; None where only CUDA knows.
        words: What each slot is called in the variable (or would be, where it is unset).
        because: Why words do not count, or why slots are unknown.
    """

    value: str | None
    slots: tuple[str | None, ...]
    words: tuple[str, ...]
    because: tuple[str, ...] = ()

    def slot_of(self, uuid: str | None) -> int | None:
        return self.slots.index(uuid) if uuid is not None and uuid in self.slots else None

    def lines(self, gpus: Sequence[Gpu]) -> list[str]:
        """The reading in words: which slot is which GPU, and what does not count."""
        if self.value is None:
            return list(self.because)
        named: dict[str | None, str] = {gpu.uuid: f"GPU {gpu.index}" for gpu in gpus if gpu.uuid}
        named |= {part.uuid: f"MIG {gpu.index}.{part.index}" for gpu in gpus for part in gpu.mig if part.uuid}
        pairs = [f"cuda:{i} is {named.get(uuid, 'not known')}" for i, uuid in enumerate(self.slots)]
        text = ", ".join(pairs) if pairs else "no GPU is visible"
        short = self.value if len(self.value) <= 40 else f"{self.value[:37]}..."
        return [f"{VARIABLE}={short}: {text}", *self.because]


def parse(value: str | None) -> Words:
    """The words of the variable that count. Never raises: whatever is in it has a meaning."""
    if value is None:
        return Words()
    words = value.split(",")
    for prefix in ("GPU-", "MIG-"):
        if value.startswith(prefix):
            return _uuids(words, prefix)
    found: list[int] = []
    for word in words:
        number = _leading_number(word.strip())
        if number is not None and number in found:  # a second -1 cannot come: the first one ended the list
            return Words(indices=(), ended=f"{number} is there twice, which hides every GPU")
        if number is None or number < 0:
            if value.strip() in ("", "-1"):
                return Words(indices=(), ended=None)
            why = "is negative" if number is not None else "is no index"
            rest = "" if word is words[-1] else " and what follows it"
            return Words(indices=tuple(found), ended=f"{word.strip()!r} {why}: it{rest} does not count")
        found.append(number)
    return Words(indices=tuple(found))


def _uuids(words: list[str], prefix: str) -> Words:
    found: list[str] = []
    for word in words:
        if word in found:
            return Words(uuids=(), ended=f"{word} is there twice, which hides every GPU")
        if not word.startswith(prefix):
            rest = "" if word is words[-1] else " and what follows it"
            why = "begins with a space" if word.lstrip().startswith(prefix) else f"does not begin with {prefix}"
            return Words(uuids=tuple(found), ended=f"{word!r} {why}: it{rest} does not count")
        found.append(word)
    return Words(uuids=tuple(found))


def _leading_number(word: str) -> int | None:
    match = re.match(r"[+-]?[0-9]+", word)
    return int(match[0]) if match else None


def read(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    """What the environment leaves visible of these GPUs (all of the machine, in the driver's order)."""
    value = environ.get(VARIABLE)
    words = parse(value)
    because = [words.ended] if words.ended else []
    if words.uuids is not None:
        return _by_uuid(value, words.uuids, gpus, because)
    indices = tuple(range(len(gpus))) if words.indices is None else words.indices
    counted = next((i for i, index in enumerate(indices) if index >= len(gpus)), len(indices))
    if counted < len(indices):
        there = f"GPUs 0 to {len(gpus) - 1}" if len(gpus) > 1 else "GPU 0" if gpus else "no GPU"
        because.insert(0, f"{indices[counted]} is not there ({there}): the list ends before it")
    indices = indices[:counted]
    known = environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if gpu.name}) <= 1
    if not known:
        because.append(f"the GPUs differ and {ORDER} is not PCI_BUS_ID: which one an index means is not known")
    slots = tuple(gpus[index].uuid if known else None for index in indices)
    return Visible(value, slots, tuple(str(index) for index in indices), tuple(because))


def _by_uuid(value: str | None, words: Iterable[str], gpus: Sequence[Gpu], because: list[str]) -> Visible:
    uuids = [gpu.uuid for gpu in gpus] + [part.uuid for gpu in gpus for part in gpu.mig]
    slots: list[str] = []
    used: list[str] = []
    for word in words:
        candidates = [uuid for uuid in uuids if uuid and uuid.startswith(word)]
        if len(candidates) != 1:
            why = f"means {len(candidates)} GPUs" if candidates else "is no GPU of this machine"
            because.insert(0, f"{word} {why}: the list ends before it")
            break
        if candidates[0] in slots:
            return Visible(value, (), (), (f"{word} means a GPU that is already there, which hides every GPU",))
        slots.append(candidates[0])
        used.append(word)
    if len(slots) > 1 and slots[0].startswith("MIG-"):
        because.append("CUDA uses one MIG device per process: the first")
    return Visible(value, tuple(slots), tuple(used), tuple(because))


def to_variable(uuids: Iterable[str]) -> dict[str, str]:
    """The two variables that mean exactly these GPUs, in this order, in every tool."""
    return {ORDER: "PCI_BUS_ID", VARIABLE: ",".join(uuids)}


def explain_slots(wanted: Iterable[int], visible: Visible, gpus: Sequence[Gpu]) -> DeviceError | None:
    """Why `device_ids=wanted` (or `cuda:N`) cannot be, or None when every slot exists."""
    wanted = list(wanted)
    missing = [slot for slot in wanted if not 0 <= slot < len(visible.slots)]
    if not missing:
        return None
    count = len(visible.slots)
    there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0 only" if count else "none"
    fix = [
        "torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever nvidia-smi calls it"
        if visible.value is not None
        else "`evener gpus` shows the GPUs of this machine"
    ]
    for slot in missing:
        gpu = next((one for one in gpus if one.index == slot), None)
        at = visible.slot_of(gpu.uuid) if gpu else None
        if at is not None:
            fix.insert(0, f"GPU {slot} of nvidia-smi is cuda:{at} here")
        elif gpu is not None and gpu.uuid and visible.value is not None:
            fix.insert(0, f"GPU {slot} of nvidia-smi is hidden here: add it to {VARIABLE}")
    names = ", ".join(f"cuda:{slot}" for slot in missing)
    cause = f"{names}: no such device here; there {'is' if count == 1 else 'are'} {there}."
    return DeviceError(cause, evidence=visible.lines(gpus), fix=list(dict.fromkeys(fix)))
