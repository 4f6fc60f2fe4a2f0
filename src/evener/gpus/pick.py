"""Picking: which GPUs a wish gets, and taking them under a lease while nobody else can.

`choose` is a function of values and decides; `pick` looks, chooses, takes and looks again, one picker at a time. What
makes a set of GPUs better, in this order: one kind, the best connected, the least memory in use, the highest indices
(GPU 0 is where people try things out).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from evener.errors import DriverError, ShortageError, UsageError
from evener.gpus import look, owners, visible
from evener.gpus.leases import PICKER_SECONDS, Folder, Lease, default_path
from evener.gpus.nvml import PATHS
from evener.gpus.values import Device, Gpu, Snapshot

POLL_SECONDS = 1.0
MOST_SETS = 20_000  # compared one by one; beyond, sets are grown greedily


@dataclass(frozen=True)
class Wish:
    """What somebody wants.

    Attributes:
        count: How many; None is "auto": all idle ones of one kind.
        words: These and no others: indices as nvidia-smi shows them, UUIDs or beginnings of UUIDs.
        share: Also GPUs that other processes use (never one under another's lease).
        lease: False takes none: for machines where no folder can hold the locks.
        wait_seconds: How long to wait for them; None does not wait, infinity waits.
    """

    count: int | None = None
    words: tuple[str, ...] = ()
    min_free_bytes: int = 0
    model: str | None = None
    share: bool = False
    lease: bool = True
    wait_seconds: float | None = None

    def __str__(self) -> str:
        many = "all idle" if self.count is None else str(self.count)
        what = f"{many}{f' {self.model}' if self.model else ''} GPU{'' if self.count == 1 else 's'}"
        free = f" with {look.size(self.min_free_bytes)} free" if self.min_free_bytes else ""
        return f"{','.join(self.words) or what}{free}"


@dataclass(frozen=True)
class Universe:
    """The GPUs that may be picked at all: those left visible, or those that a scheduler granted."""

    snapshot: Snapshot
    uuids: frozenset[str]
    why: str = ""  # why it is not the whole machine
    scheduler: str | None = None  # then its grant is the claim, and evener takes no lease
    mig: tuple[str, ...] = ()  # MIG devices that were named or granted: CUDA uses the first of them


@dataclass(frozen=True)
class Picked:
    """GPUs that are yours (while `lease` is open), in the order of their indices."""

    gpus: tuple[Device, ...]
    lease: Lease | None
    notes: tuple[str, ...] = ()

    @property
    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in self.gpus if gpu.uuid)


def parse(text: str) -> Wish:
    """`auto`, a count, or words with commas: `2`, `0,3`, `3,` (GPU 3 alone), `GPU-8f2e,GPU-1c`."""
    fix = ["--gpus auto, --gpus 2 (how many), --gpus 0,3 (which), --gpus 3, (GPU 3 alone), --gpus GPU-8f2e..."]
    text = text.strip()
    if text == "auto":
        return Wish()
    if re.fullmatch(r"[0-9]{1,9}", text):
        if int(text) == 0:
            raise UsageError("--gpus 0 asks for no GPU.", fix=["--gpus 0, is GPU 0 alone; --cpu runs on the CPU", *fix])
        return Wish(count=int(text))
    words = tuple(word.strip() for word in text.removesuffix(",").split(","))
    for word in words:
        if not re.fullmatch(r"[0-9]{1,9}|GPU-[0-9a-fA-F-]+|MIG-[0-9a-zA-Z/-]+", word):
            raise UsageError(f"--gpus {text}: {word!r} is no index and no UUID.", fix=fix)
    if len(set(words)) < len(words):
        raise UsageError(f"--gpus {text} names a GPU twice.", fix=fix)
    return Wish(words=words)


def parse_size(text: str, option: str) -> int:
    """`20GB` (10^9), `20GiB` or `20G` (2^30), `500MB`, ... in bytes."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([KMGT])(i?)(B?)", text.strip(), re.IGNORECASE)
    if not match:
        raise UsageError(
            f"{option} {text} is no amount of memory.", fix=[f"{option} 20GB (10^9 bytes) or 20GiB (2^30)"]
        )
    base = 1000 if match[4] and not match[3] else 1024
    return int(float(match[1]) * base ** " KMGT".index(match[2].upper()))


def parse_seconds(text: str, option: str) -> float:
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)\s*(s|sec|min|m|h)?", text.strip())
    if not match:
        raise UsageError(f"{option}={text} is no time.", fix=[f"{option}=90 (seconds), {option}=10min, {option}=2h"])
    return float(match[1]) * {"m": 60, "min": 60, "h": 3600}.get(match[2] or "s", 1)


# --- deciding ---------------------------------------------------------------------------------------------------------


def universe(snapshot: Snapshot, environ: Mapping[str, str]) -> Universe:
    """What may be picked. Raises UsageError where CUDA_VISIBLE_DEVICES cannot be understood from outside."""
    scheduler = "Kubernetes" if environ.get("KUBERNETES_SERVICE_HOST") else None
    if environ.get("SLURM_JOB_ID"):
        scheduler = f"Slurm job {environ['SLURM_JOB_ID']}"
    seen = visible.read(environ, snapshot.gpus)
    named, why = seen.slots, "; ".join(seen.lines(snapshot.gpus))
    if seen.value is None:
        named, why = tuple(one.uuid for one in snapshot.devices), f"granted by {scheduler}" if scheduler else ""
    elif None in named:
        fix = [f"{visible.ORDER}=PCI_BUS_ID makes an index what nvidia-smi shows", "or put UUIDs there: evener gpus"]
        cause = f"{visible.VARIABLE}={seen.value}: which GPUs these are is not known."
        raise UsageError(cause, evidence=seen.because, fix=fix)
    uuids = tuple(uuid for uuid in named if uuid)
    chosen = scheduler is not None or seen.value is not None
    parts = tuple(uuid for uuid in uuids if uuid.startswith("MIG-") and chosen)
    return Universe(snapshot, frozenset(uuids), why, scheduler, parts)


def choose(wish: Wish, world: Universe) -> Picked:
    """The best set that fulfils the wish now; ShortageError says why there is none. A function of its arguments."""
    if wish.words:
        return _choose_named(wish, world)
    if world.mig and wish.count in (None, 1):
        return _choose_named(replace(wish, words=world.mig[:1]), world)
    gpus, kinds = world.snapshot.gpus, dict[tuple[str | None, int | None], list[Gpu]]()
    reasons = {gpu.index: why for gpu in gpus if (why := _unfit(gpu, wish, world))}
    for gpu in gpus:
        if gpu.index not in reasons:
            kinds.setdefault((gpu.name, gpu.memory_total_bytes), []).append(gpu)

    def strength(kind: list[Gpu]) -> tuple[int, float, int]:
        many = len(kind) if wish.count is None else 0
        return many, float(kind[0].compute_capability or 0), kind[0].memory_total_bytes or 0

    best = max((kind for kind in kinds.values() if len(kind) >= (wish.count or 1)), key=strength, default=None)
    if best is None:
        by_reason: dict[str, list[str]] = {}
        for index, why in reasons.items():
            by_reason.setdefault(why, []).append(str(index))
        lines = [f"GPU {', '.join(which)}: {why}" for why, which in by_reason.items()]
        if len(kinds) > 1:
            counts = ", ".join(f"{len(kind)} {kind[0].name}" for kind in kinds.values())
            lines.insert(0, f"they would have to be of one kind; free are {counts}")
        fit = f"{len(gpus) - len(reasons)} of {len(gpus)} GPU{'s' if len(gpus) > 1 else ''} fit now"
        raise _shortage(f"{wish} wanted, {fit if gpus else 'and there is none'}.", wish, world, lines)
    chosen: Sequence[Gpu] = best if wish.count is None else best_set(best, wish.count, world.snapshot)
    notes = []
    if wish.count is None:
        others = [gpu for gpu in gpus if gpu not in best and (gpu.uuid in world.uuids or not gpu.uuid)]
        notes = [f"GPU {gpu.index} left out: {reasons.get(gpu.index, f'another kind ({gpu.name})')}" for gpu in others]
    notes += [f"GPU {gpu.index} is shared: {gpu.busy_because[0]}" for gpu in chosen if gpu.busy_because]
    return Picked(tuple(sorted(chosen, key=lambda gpu: gpu.index)), None, tuple(notes))


def _choose_named(wish: Wish, world: Universe) -> Picked:
    chosen = [_named(word, world) for word in wish.words]
    if twice := [one.uuid for i, one in enumerate(chosen) if one in chosen[:i]]:
        raise UsageError(f"--gpus {','.join(wish.words)} names {twice[0]} twice.")
    reasons = [(word, _unfit(one, wish, world)) for word, one in zip(wish.words, chosen)]
    if lines := [f"{word}: {why}" for word, why in reasons if why]:
        raise _shortage(f"{wish} cannot be taken now.", wish, world, lines)
    notes = [f"{gpu.uuid} is shared: {gpu.busy_because[0]}" for gpu in chosen if gpu.busy_because]
    if len({gpu.name for gpu in chosen}) > 1:
        notes.append(f"these GPUs differ ({', '.join(str(gpu.name) for gpu in chosen)}): the slowest sets the pace")
    return Picked(tuple(chosen), None, tuple(notes))


def _named(word: str, world: Universe) -> Device:
    gpus, found = world.snapshot.gpus, list[Device]()
    if word.isdecimal():
        found += [gpu for gpu in gpus if gpu.index == int(word)]
    else:
        found += [one for one in world.snapshot.devices if one.uuid and one.uuid.lower().startswith(word.lower())]
    if len(found) != 1:
        there = [f"GPU {gpu.index}: {gpu.uuid or gpu.error} {gpu.name or ''}".rstrip() for gpu in gpus]
        what = f"means {len(found)} GPUs" if found else "is no GPU of this machine"
        raise UsageError(f"--gpus: {word} {what}.", evidence=there, fix=["`evener gpus` lists them"])
    if found[0].uuid and found[0].uuid not in world.uuids:
        fix = "ask the scheduler for it" if world.scheduler else f"unset {visible.VARIABLE}, or add it there"
        cause = f"--gpus: {word} is not among the GPUs that this process may use."
        raise UsageError(cause, evidence=[world.why], fix=[fix])
    return found[0]


def _unfit(gpu: Device, wish: Wish, world: Universe) -> str | None:
    """Why this one will not do, or None."""
    if isinstance(gpu, Gpu) and gpu.error:
        return gpu.error
    if gpu.uuid is None:
        return "its UUID cannot be read"
    if gpu.uuid not in world.uuids:
        return f"hidden here: {world.why}"
    if isinstance(gpu, Gpu) and (gpu.mig_enabled or gpu.health.compute_mode == "prohibited"):
        return gpu.busy_because[-1] if gpu.busy_because else "MIG is on"
    if wish.model and wish.model.lower() not in (gpu.name or "").lower():
        return f"another model ({gpu.name or 'not known'})"
    if wish.min_free_bytes and (gpu.memory_free_bytes or 0) < wish.min_free_bytes:
        return f"{look.size(gpu.memory_free_bytes or 0)} free"
    if world.scheduler:  # what runs on granted GPUs is ours or the scheduler's business
        return None
    if wish.share:
        return f"lease of {gpu.lease}" if gpu.lease else None
    return None if gpu.idle else "; ".join(gpu.busy_because) or "not known to be idle"


def _shortage(cause: str, wish: Wish, world: Universe, lines: list[str]) -> ShortageError:
    fix = []
    if any(gpu.uuid in world.uuids for gpu in world.snapshot.gpus):
        fix = ["`evener run --wait` waits for them, first come first served; --wait=10min for so long"]
        if not wish.share and not world.scheduler:
            fix.append("`evener run --share` takes GPUs that others use (their memory, their speed)")
    return ShortageError(cause, evidence=lines, fix=[*fix, "evener gpus shows who has which"])


PATH_QUALITY = {path: 10 * (5 - i) for i, path in enumerate(PATHS.values())}


def best_set(gpus: Sequence[Gpu], count: int, snapshot: Snapshot) -> tuple[Gpu, ...]:
    """The best connected `count` of these: first by the worst pair, then by all pairs."""
    quality = {}
    for link in snapshot.links:
        value = 60 + link.nvlinks if link.nvlinks else PATH_QUALITY.get(link.path or "", 0)
        quality[link.a, link.b] = quality[link.b, link.a] = value if link.p2p in (None, "ok") else value / 4 - 1

    def score(chosen: Sequence[Gpu]) -> tuple[float, ...]:
        pairs = [quality.get((a.index, b.index), 0) for a, b in itertools.combinations(chosen, 2)]
        used = sum(gpu.memory_used_bytes or 0 for gpu in chosen)
        busy = sum(not gpu.idle for gpu in chosen)
        return -busy, min(pairs, default=0), sum(pairs), -used, sum(gpu.index for gpu in chosen)

    if math.comb(len(gpus), count) <= MOST_SETS:
        return max(itertools.combinations(gpus, count), key=score)

    def grown(first: Gpu) -> tuple[Gpu, ...]:
        chosen: tuple[Gpu, ...] = (first,)
        while len(chosen) < count:
            chosen = max(((*chosen, gpu) for gpu in gpus if gpu not in chosen), key=score)
        return chosen

    return max((grown(gpu) for gpu in gpus), key=score)


# --- taking -----------------------------------------------------------------------------------------------------------


def refuse_trouble(snapshot: Snapshot) -> None:
    """Raises DriverError when the driver does not answer, ShortageError when there is no GPU at all."""
    trouble = snapshot.trouble
    if trouble is not None:
        kind = DriverError if trouble.broken else ShortageError
        raise kind(trouble.cause, evidence=trouble.evidence, fix=trouble.fix)


def pick(
    wish: Wish,
    environ: Mapping[str, str],
    *,
    lock_folder: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    poll_seconds: float = POLL_SECONDS,
) -> Picked:
    """Takes GPUs under a lease of this process, waiting for them as long as the wish says. Never half of them.

    First come, first served: whoever asks while others wait comes after them, even when something smaller is free.

    Args:
        lock_folder: The folder of the leases; None is the one that all users of this machine compute.
        say: Gets a line when the reason for waiting changes.

    Raises:
        ShortageError: they are not to be had now, or not in time.
        DriverError: the driver does not answer.
        UsageError: a word that names no GPU.
        LaunchError: the folder of the leases cannot be used.
    """
    snapshot = look.look(environ)
    refuse_trouble(snapshot)
    world = universe(snapshot, environ)
    if world.scheduler or not wish.lease:
        why = f"these GPUs were granted by {world.scheduler}" if world.scheduler else "others may take these GPUs too"
        found = choose(wish, world)
        return replace(found, notes=(*found.notes, f"no lease: {why}"))
    try:
        choose(replace(wish, share=True, min_free_bytes=0), world)  # leases are not in it
    except ShortageError as never:
        fix = ["waiting would not help", *never.fix[-1:]]
        raise ShortageError(never.cause, evidence=never.evidence, fix=fix) from None
    folder = Folder(lock_folder or default_path())
    folder.prepare()
    until = time.monotonic() + (wish.wait_seconds or 0.0)
    patience, said = max(PICKER_SECONDS, wish.wait_seconds or 0.0), ""
    with contextlib.ExitStack() as queue:
        with folder.serial(patience):
            who = f"{owners.user_name(os.getuid())}, pid {os.getpid()}"
            number = queue.enter_context(folder.line_up(f"{who}: {wish}"))
        while True:
            try:
                first = next(folder.waiting(before=number), None)
                if first is not None:
                    raise ShortageError("Others wait for GPUs and come first.", evidence=[first])
                with folder.serial(patience):
                    return _attempt(wish, environ, folder)
            except ShortageError as short:
                if wish.wait_seconds is None:
                    raise
                if time.monotonic() >= until:
                    late = f"Waited {wish.wait_seconds:.0f} s. {short.cause}"
                    raise ShortageError(late, evidence=short.evidence, fix=short.fix) from None
                if short.cause != said:
                    said = short.cause
                    say(f"waiting for {wish}: {said}" + "".join(f"\n  {line}" for line in short.evidence))
            time.sleep(min(poll_seconds, max(0.0, until - time.monotonic())))


def _attempt(wish: Wish, environ: Mapping[str, str], folder: Folder) -> Picked:
    """Look, choose, take, look again. Inside `serial`, so that nobody else does. Raises ShortageError."""
    own = os.path.basename(sys.argv[0]) in ("evener", "__main__.py")
    command = " ".join(["evener" if own else sys.argv[0], *sys.argv[1:]])
    lost = ShortageError("Others took the GPUs at this moment.")
    for _ in range(3):
        snapshot = look.look(environ, holder_of=folder.holder_now)
        refuse_trouble(snapshot)
        found = choose(wish, universe(snapshot, environ))
        if (lease := folder.take(found.uuids, command)) is None:
            continue
        try:  # an outsider, who knows no leases, may have started meanwhile
            choose(replace(wish, words=found.uuids, count=None), universe(look.look(environ), environ))
            return replace(found, lease=lease)
        except ShortageError as error:
            lease.close()
            lost = error
    raise lost


def say_on_stderr(line: str) -> None:
    sys.stderr.write(f"evener: {line}\n")


def pick_gpus(
    n: int = 1,
    *,
    min_free: str | None = None,
    model: str | None = None,
    wait: bool | float = False,
    lock_folder: str | None = None,
) -> tuple[str, ...]:
    """Takes `n` idle GPUs of this machine for this process, and makes them the only ones it sees.

    Sets CUDA_VISIBLE_DEVICES (UUIDs) and CUDA_DEVICE_ORDER, so call it before anything starts CUDA: they are `cuda:0`
    to `cuda:n-1`. The lease ends with the process and with the children that it forks. No communication.

    Args:
        min_free: Free memory that each must have: "20GB", "20GiB".
        model: A part of the name: "A100".
        wait: True waits for them, a number of seconds waits so long; False raises at once.
        lock_folder: Another folder for the leases than this machine's.

    In a process that was launched (`evener run`, torchrun) the choice was made before: it takes nothing and returns
    what is visible.

    Returns:
        Their UUIDs, in the order of their slots.

    Raises:
        ShortageError, DriverError: as `evener gpus` would say.
        UsageError: n is no count, or CUDA has already been started in this process.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UsageError(f"pick_gpus({n!r}): how many GPUs, 1 or more.")
    if "LOCAL_RANK" in os.environ:
        seen = visible.read(os.environ, look.look(os.environ).gpus)
        return tuple(uuid for uuid in seen.slots if uuid)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        cause = "pick_gpus: CUDA has already been started in this process, and sees the GPUs that it saw then."
        fix = ["call evener.pick_gpus() first thing in the script", "or start it with `evener run --gpus N`"]
        raise UsageError(cause, fix=fix)
    free = parse_size(min_free, "min_free") if min_free else 0
    seconds = None if wait is False else float("inf") if wait is True else float(wait)
    wish = Wish(count=n, min_free_bytes=free, model=model, wait_seconds=seconds)
    picked = pick(wish, os.environ, lock_folder=lock_folder, say=say_on_stderr)
    os.environ.update(visible.to_variable(picked.uuids))
    return picked.uuids
