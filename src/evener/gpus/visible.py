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
from typing import Any

from evener.errors import DeviceError
from evener.gpus.values import Gpu, Snapshot

VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Visible:
    """What a process started with this environment would see.

    Attributes:
        slots: The UUID behind every slot; None where only CUDA knows.
        because: Why words do not count, or why slots are unknown.
    """

    value: str | None
    slots: tuple[str | None, ...]
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
        short = self.value if len(self.value) <= 40 else f"{self.value[:37]}..."
        return [f"{VARIABLE}={short}: {', '.join(pairs) or 'no GPU is visible'}", *self.because]


def parse(value: str) -> tuple[list[Any], str | None]:
    """(the words that count: indices, or UUIDs; why what follows them does not). Never raises."""
    words, found, ended = value.split(","), list[Any](), None
    prefix = value[:4] if value.startswith(("GPU-", "MIG-")) else ""
    item: Any
    for word in words:
        if prefix:
            item, counts, shown = word, word.startswith(prefix), word
            why = "begins with a space" if word.lstrip().startswith(prefix) else f"does not begin with {prefix}"
        else:
            number = re.match(r"[+-]?[0-9]+", shown := word.strip())
            item = int(number[0]) if number else None
            counts, why = item is not None and item >= 0, "is negative" if number else "is no index"
        if counts and item not in found:
            found.append(item)
            continue
        if counts:
            found, ended = [], f"{item} is there twice, which hides every GPU"
        elif value.strip() not in ("", "-1"):
            rest = "" if word is words[-1] else " and what follows it"
            ended = f"{shown!r} {why}: it{rest} does not count"
        break
    return found, ended


def read(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> Visible:
    """What the environment leaves visible of these GPUs (all of the machine, in the driver's order)."""
    value = environ.get(VARIABLE)
    indices: list[Any] = list(range(len(gpus)))
    because: list[str] = []
    if value is not None:
        indices, ended = parse(value)
        because += [ended] if ended else []
    if value is not None and value.startswith(("GPU-", "MIG-")):
        return _by_uuid(value, indices, gpus, because)
    counted = next((i for i, index in enumerate(indices) if index >= len(gpus)), len(indices))
    if counted < len(indices):
        there = f"GPUs 0 to {len(gpus) - 1}" if len(gpus) > 1 else "GPU 0" if gpus else "no GPU"
        because.insert(0, f"{indices[counted]} is not there ({there}): the list ends before it")
    known = environ.get(ORDER) == "PCI_BUS_ID" or len({gpu.name for gpu in gpus if gpu.name}) <= 1
    if not known:
        because.append(f"the GPUs differ and {ORDER} is not PCI_BUS_ID: which one an index means is not known")
    return Visible(value, tuple(gpus[i].uuid if known else None for i in indices[:counted]), tuple(because))


def _by_uuid(value: str | None, words: Iterable[str], gpus: Sequence[Gpu], because: list[str]) -> Visible:
    slots: list[str] = []
    for word in words:
        found = [one.uuid for one in Snapshot(gpus=tuple(gpus)).devices if one.uuid and one.uuid.startswith(word)]
        if len(found) != 1:
            why = f"means {len(found)} GPUs" if found else "is no GPU of this machine"
            because.insert(0, f"{word} {why}: the list ends before it")
            break
        if found[0] in slots:
            return Visible(value, (), (f"{word} means a GPU that is already there, which hides every GPU",))
        slots.append(found[0])
    if len(slots) > 1 and slots[0].startswith("MIG-"):
        because.append("CUDA uses one MIG device per process: the first")
    return Visible(value, tuple(slots), tuple(because))


def to_variable(uuids: Iterable[str]) -> dict[str, str]:
    """The two variables that mean exactly these GPUs, in this order, in every tool."""
    return {ORDER: "PCI_BUS_ID", VARIABLE: ",".join(uuids)}


def explain_slots(wanted: Iterable[int], visible: Visible, gpus: Sequence[Gpu]) -> DeviceError | None:
    """Why `device_ids=wanted` (or `cuda:N`) cannot be, or None when every slot exists."""
    count = len(visible.slots)
    missing = [slot for slot in wanted if not 0 <= slot < count]
    if not missing:
        return None
    fix = []
    for slot in reversed(missing):
        gpu = next((one for one in gpus if one.index == slot), None)
        at = visible.slot_of(gpu.uuid) if gpu else None
        if at is not None:
            fix.append(f"GPU {slot} of nvidia-smi is cuda:{at} here")
        elif gpu is not None and gpu.uuid and visible.value is not None:
            fix.append(f"GPU {slot} of nvidia-smi is hidden here: add it to {VARIABLE}")
    inside = "torch counts inside CUDA_VISIBLE_DEVICES: the first one listed is cuda:0, whatever nvidia-smi calls it"
    fix.append("`evener gpus` shows the GPUs of this machine" if visible.value is None else inside)
    there = f"cuda:0 to cuda:{count - 1}" if count > 1 else "cuda:0 only" if count else "none"
    names = ", ".join(f"cuda:{slot}" for slot in missing)
    cause = f"{names}: no such device here; there {'is' if count == 1 else 'are'} {there}."
    return DeviceError(cause, evidence=visible.lines(gpus), fix=list(dict.fromkeys(fix)))
