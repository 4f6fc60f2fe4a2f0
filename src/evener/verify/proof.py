"""Which trials prove the promise, and what each is held to: equal to the bit, close, or of one distribution.

the same again              bits   new interpreters: nothing but (script, seed) decides
rows and order asked again  bits   they depend on (dataset, seed, epoch, index), not on what was asked before
2 data workers              bits   where rows are read one by one
another cut                 bits with exact=True, else close. With random layers in fast mode one distribution only,
                            and the same cuts once more with dropout off, which can be compared
killed and resumed          bits on as many processes, in either mode; on others as for another cut
newest checkpoint corrupted bits, and the one before it is used
evaluate left out           bits; what it returned in the first run is returned without evaluating. Where nothing is
                            evaluated in the first batches, the loss is evaluated once instead
out of memory               as for another cut: it is missing twice, in a forward and in the middle of an update
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evener.errors import UsageError
from evener.launch.command import Request
from evener.plan.handed import Trial
from evener.verify.blame import Kind, likely
from evener.verify.compare import Comparison, Finding, Level, Trace, compare, differing
from evener.verify.start import Starter

GROUPS = ("repeat", "rows", "workers", "microbatch", "oom", "world", "resume", "corrupt", "evaluate")
# A trial is no run of the user's; rows are read where their dataset can be looked at.
ALWAYS = {"logger": None, "profile": None, "num_workers": 0}
_DEMANDED = {"bits": "bit-equal", "close": "close", "distribution": "one distribution"}
_EARLY = "it ended before the others"


@dataclass(frozen=True)
class Check:
    """One line of the table. result: bit-equal, close, different or failed; holds: whether that is what is promised."""

    name: str
    result: str
    holds: bool
    demanded: str
    seconds: float
    max_abs_difference: float | None = None
    blame: tuple[Mapping[str, Any], ...] = ()
    likely: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Proof:
    """Runs the trials of one script, one after the other. `begins` is called with the name of what begins."""

    request: Request
    starter: Starter
    folder: str
    updates: int = 6
    worlds: tuple[int, ...] = (1, 2, 3)  # the first is what others are compared with
    only: tuple[str, ...] = GROUPS
    begins: Callable[[str], None] = lambda name: None
    not_checked: dict[str, str] = field(default_factory=dict)  # name -> why not
    note: str = ""  # how trials with another cut differ from what the script says
    noise: frozenset[str] = frozenset()  # the script's own values that are others in every start
    microbatch_held: bool | None = None
    trials: int = 0
    doing: str = ""

    def checks(self) -> Iterator[Check]:
        """Each check as soon as it is known. When the script does not run by itself, that is the only one."""
        first = self.worlds[0]
        self._begin(f"uninterrupted, {_processes(first)}")
        self.base, cause = self._trial(first)
        if not self.base.batches:
            if not cause:
                raise self._no_run()
            yield self._failed("uninterrupted", "bits", cause if self.base.begin else f"{cause}\nit made no evener.Run")
            return
        self.last = max(self.base.batches)
        if self._wanted("repeat"):
            yield self._compared("the same again", "repeat", fresh=True)
        if self._wanted("rows"):
            yield from self._rows_again()
        if self._wanted("workers") and self.base.begin["reads"] == "rows":
            yield self._compared("2 data workers", "resume", overrides={"num_workers": 2})
        if self._wanted("microbatch", "oom", "world") or (self._wanted("resume") and self.worlds[1:]):
            yield from self._cuts()
        if self._wanted("resume", "corrupt"):
            yield from self._resumes()
        if self._wanted("evaluate"):
            yield from self._evaluations()

    def _no_run(self) -> UsageError:
        made = os.path.exists(os.path.join(self.base.folder, "trace.jsonl"))
        what = "asks its evener.Run for no update" if made else "has no evener.Run"
        fix = [
            "train with `run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=N)` and "
            "`for update in run.updates(...)`; docs/migrate shows how to come from plain torch and others",
            "`evener run`, `evener lint` and `evener explain` serve this script as it is",
        ]
        nothing = "there is nothing here that could be cut otherwise, or resumed"
        return UsageError(f"{self.request.script} {what}: {nothing}.", fix=fix)

    def _rows_again(self) -> Iterator[Check]:
        """No trial of its own: every trial reads its first rows, and asks for its order, once more when it ends."""
        name, end = "rows and order asked again", self.base.end or {}
        self._begin(name)
        if not end.get("rows") and not end.get("order"):
            self.not_checked[name] = "a stream is read once"
            return
        other = [epoch for epoch, hashes in enumerate(end.get("order", ())) if len(set(hashes)) > 1]
        found = [Finding("order of rows", f"the order of epoch {epoch} asked for again is another") for epoch in other]
        first, again = end.get("rows") or ([], [])
        wrong = [k for k, (a, b) in enumerate(zip(first, again)) if a[1] != b[1]]
        if wrong:
            row = f"row {self.base.batches[0]['ids'][wrong[0]]}"
            found.append(Finding(row, f"{row} read again is another; so are {len(wrong)} of {len(first)}"))
        changed = differing(self.base.begin, self.base.batches[self.last]) if wrong else []
        suspects = tuple(one for one in changed if one.endswith("of the dataset"))
        result = "different" if found else "bit-equal"
        yield self._check(name, "repeat", Comparison(result, None, tuple(found), 0, False, suspects), "bits")

    def _evaluations(self) -> Iterator[Check]:
        if self.base.evaluations:
            answers = os.path.join(self.base.folder, "trace.jsonl")
            yield self._compared("evaluate left out", "evaluate", answers=answers)
            return
        check = self._compared("evaluate put in", "evaluate", evaluate=True)
        if check.result == "failed":
            why = "the script evaluates nothing in these batches, and its loss cannot be evaluated alone"
            self.not_checked["evaluate left out"] = why
        else:
            yield check

    def _cuts(self) -> Iterator[Check]:
        """Other microbatches, other numbers of processes; what they are compared with is kept for the resumes."""
        begin, first, others = self.base.begin, self.worlds[0], self.worlds[1:]
        exact, per_slice = begin["exact"], begin["slice_size"] is not None
        self.level: Level = "bits" if exact else "close"
        self.cut: dict[str, Any] = {}  # how every trial with another cut is started
        self.whole = {first: self.base}  # number of processes -> its uninterrupted trial
        random_layers = not per_slice and self.base.drawn
        if random_layers and others and self._wanted("world"):
            name = f"{_processes(others[0])}, random layers as they are"
            yield self._compared(name, "world", level="distribution", world=others[0])
        overrides: dict[str, Any] = {}
        notes: list[str] = []
        if not exact and begin["precision"] not in ("fp32", "tf32"):
            overrides["precision"] = "fp32"
            notes.append(f"in fp32 (the rounding of {begin['precision']} would hide a fault)")
        if random_layers:
            notes.append("with dropout off (in fast mode only its distribution is promised)")
        if notes:
            self.cut, self.note = {"overrides": overrides, "still": random_layers}, ", ".join(notes)
            self._begin(f"{_processes(first)} {self.note}: what other cuts are compared with")
            self.whole[first], cause = self._trial(first, **self.cut)
            if random_layers and self.whole[first].drawn:
                overrides |= {"coupled": True, "microbatch_size": None}
                self.note += ", with one random draw per slice where other layers draw (coupled=True)"
                self.whole[first], cause = self._trial(first, **self.cut)
            if max(self.whole[first].batches, default=-1) < self.last:
                yield self._failed("a run that other cuts are compared with", "close", cause or _EARLY)
                self.whole = {}
                return
        begin = self.whole[first].begin
        if self._wanted("microbatch") and (begin["slice_size"] is not None or begin["global_batch_size"] == 1):
            self.not_checked["another microbatch"] = "slices (or single rows) are computed one by one, whatever it is"
        elif self._wanted("microbatch"):
            size = -(-begin["largest_piece"] // 3) if begin["largest_piece"] > 1 else begin["global_batch_size"]
            cut = {**self.cut, "overrides": {**overrides, "microbatch_size": size}}
            check = self._compared(f"microbatches of {size}", "microbatch", self.whole[first], self.level, **cut)
            self.microbatch_held = check.holds
            yield check
        if self._wanted("oom"):
            yield from self._no_memory(self.whole[first])
        for number, world in enumerate(others if self._wanted("world") else ()):
            cut = {**self.cut, "fresh": number == 0}
            yield self._compared(_processes(world), "world", self.whole[first], self.level, world, **cut)
            self.whole[world] = self.newest

    def _no_memory(self, whole: Trace) -> Iterator[Check]:
        name = "out of memory in the middle"
        if whole.begin["compile"]:
            self.not_checked[name] = "it is injected between operations, and compile=True leaves none to see"
            return
        check = self._compared(name, "microbatch", whole, self.level, no_memory=True, **self.cut)
        if check.result != "failed" and (self.newest.end or {}).get("injected") != 2:
            self.not_checked[name] = "rank 0 had too little to compute to run out of memory twice"
            return
        yield check

    def _resumes(self) -> Iterator[Check]:
        """Killed in the middle of an update, and started again."""
        if self.last < 3:
            self.not_checked["killed and resumed"] = f"the script makes {self.last + 1} batches; 4 are needed"
            return
        late, others = self.last - 1, self.worlds[1:]
        for at in sorted({2, late}) if self._wanted("resume") else [late]:
            name = f"killed in update {at}, resumed"
            self._begin(name)
            killed, cause = self._trial(self.worlds[0], kill=at)
            if cause:
                yield self._failed(name, "bits", cause)
            elif self._wanted("resume"):
                yield self._compared(name, "resume", continues=killed, fresh=at == late)
        if self._wanted("corrupt") and not cause:
            yield from self._corrupted(killed)
        if not self._wanted("resume") or not others or not self.whole:
            return
        world, then = others[0], others[1] if len(others) > 1 else self.worlds[0]
        names = [f"killed on {_processes(world)}, resumed on {number}" for number in (world, then)]
        self._begin(names[0])
        if world not in self.whole:
            self.whole[world], _ = self._trial(world, **self.cut)
        whole = self.whole[world]
        killed, cause = self._trial(world, kill=late, **self.cut)
        if cause or max(whole.batches, default=-1) < self.last:
            yield self._failed(names[0], "bits", cause or _EARLY)
            return
        yield self._compared(names[0], "resume", whole, "bits", world, continues=killed, **self.cut)
        yield self._compared(names[1], "resume", whole, self.level, then, continues=killed, **self.cut)

    def _corrupted(self, killed: Trace) -> Iterator[Check]:
        """One bit of the newest checkpoint is turned: it must be refused, and the one before it used."""
        name = "newest checkpoint corrupted"
        saved = Path(killed.folder, "run", "checkpoints")
        numbers = sorted(int(path.name.removeprefix("update-")) for path in saved.glob("update-*"))
        if len(numbers) < 2:
            self.not_checked[name] = "two checkpoints are needed, and the kill came before: --updates 6 or more"
            return
        target = next((saved / f"update-{numbers[-1]}").glob("*.safetensors"))
        content = bytearray(target.read_bytes())
        content[-1] ^= 1
        target.write_bytes(content)
        check = self._compared(name, "resume", continues=killed)
        if self.newest.begin.get("number", -1) >= numbers[-1]:
            check = replace(check, result="failed", holds=False, likely=("the corrupt checkpoint was used",))
        yield check

    def _compared(
        self,
        name: str,
        kind: Kind,
        ref: Trace | None = None,
        level: Level = "bits",
        world: int | None = None,
        **how: Any,
    ) -> Check:
        """A trial, compared with `ref` (the first one)."""
        self._begin(name)
        ref = ref or self.base
        self.newest, cause = self._trial(world or self.worlds[0], **how)
        if cause or not self.newest.begin:
            return self._failed(name, level, cause or _EARLY)
        if kind != "repeat":
            return self._check(name, kind, compare(ref, self.newest, level, self.noise), level)
        # What the script keeps for itself may hold the clock: that trains nothing.
        pairs = [(ref.begin, self.newest.begin), *((ref.batches[k], one) for k, one in self.newest.batches.items())]
        noise = frozenset(name for one, other in pairs for name in differing(one, other))
        found = compare(ref, self.newest, level, frozenset(name for name in noise if name.startswith("run.state ")))
        self.noise = noise if found.result == "bit-equal" else frozenset()
        return self._check(name, kind, found, level)

    def _check(self, name: str, kind: Kind, found: Comparison, level: Level) -> Check:
        holds, result, note = found.result != "different", found.result, ""
        if level == "distribution" and result == "close":
            result, note = "different", "as promised: random layers draw per rank and microbatch; exact=True: per slice"
        elif found.gradient is not None:
            note = f"gradient of its first update: off by {found.gradient:.1g} of the largest element"
        blame = [{"part": one.what, "update": found.batch, "text": one.text} for one in found.findings[:20]]
        if blame:
            blame[0]["text"] = f"{blame[0]['text']}, {'before' if found.before else 'in'} update {found.batch}"
        why = () if holds else likely(kind, found, self.microbatch_held)
        off, seconds = found.max_abs_difference, time.monotonic() - self.began
        return Check(name, result, holds, _DEMANDED[level], seconds, off, tuple(blame), why, note)

    def _failed(self, name: str, level: str, cause: str) -> Check:
        blame = ({"part": "the script", "update": None, "text": cause},)
        return Check(name, "failed", False, _DEMANDED[level], time.monotonic() - self.began, blame=blame)

    def _begin(self, name: str) -> None:
        if name != self.doing:
            self.doing, self.began = name, time.monotonic()
            self.begins(name)

    def _wanted(self, *groups: str) -> bool:
        return any(group in self.only for group in groups)

    def _trial(
        self,
        world: int,
        *,
        overrides: Mapping[str, Any] | None = None,
        continues: Trace | None = None,
        fresh: bool = False,
        kill: int | None = None,
        **asked: Any,
    ) -> tuple[Trace, str]:
        """Start the script once, with what is `asked` of the trial. Returns its trace, and why it did not end as it
        should ("" when it did). continues: go on from a copy of that trial's run directory.
        """
        self.trials += 1
        folder = os.path.join(self.folder, f"{self.trials:02d}")
        os.makedirs(folder)
        given = {**self.request.overrides, **ALWAYS, **(overrides or {}), "dir": os.path.join(folder, "run")}
        given["resume"] = "never" if continues is None else "must"
        if kill is not None or continues is not None:
            given["save_every"] = 1
        if continues is not None:
            shutil.copytree(os.path.join(continues.folder, "run"), given["dir"])
        logs = os.path.join(folder, "logs")
        request = replace(self.request, nproc=world, cpu=True, logs=logs, tee="none", overrides=given)
        trial = Trial(folder, self.updates, keep=(1, self.updates), kill=kill, **asked)
        ended = self.starter.run(request, trial, f"verify-{os.getpid()}-{self.trials}", fresh=fresh)
        trace, cause = Trace.read(folder), ended.cause
        if kill is not None:
            never = f"rank {world - 1} was to be killed in update {kill}, and never came to its optimizer"
            cause = "" if ended.codes[-1] == -9 and len(trace.batches) == kill else cause or never
        return trace, cause


def _processes(count: int) -> str:
    return f"{count} process{'es' if count > 1 else ''}"
