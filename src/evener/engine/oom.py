"""Out of memory: an update is a transaction. What was begun is undone, the microbatch is cut, and it is made again.

Forward and backward. While a cut is unproven, microbatches run unsynchronised and the ranks vote once before anything
is reduced; whoever failed says which microbatch it would try, and all take the smallest. A cut that has survived with
headroom is proven: nothing is asked any more, and the reduction overlaps the last backward. One process needs no vote
and recovers always. Slices (exact, coupled) are never cut: free, try again, else stop.

Optimizer. Until it has made its first step (only then does its state exist) what it changes is kept on the host. A cut
is proven by an update that began with that state in memory, so never by the first.

Where a rank would have to recover alone (proven cuts on several ranks, a forward that communicates, a proven
optimizer) the error is a lesson: the process ends, and a restart goes on from the checkpoint with the smaller cut.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]
import torch
from torch.utils._pytree import tree_leaves, tree_map

from evener import batch as batches
from evener.dist import comm
from evener.engine.cut import chop
from evener.engine.join import Part
from evener.errors import EvenerError, LessonError, MemoryLimitError

if TYPE_CHECKING:
    from evener.engine.engine import Engine
    from evener.engine.target import Target

UNTRIED, STEPPED, PROVEN = range(3)  # of a target: nothing; its optimizer has stepped; its cut is proven too
MARK = "out of memory"  # instead of what a rank has to say in the first update
PHASES = ("forward", "backward", "reduction", "optimizer")
# After the reduction: where, and why it is not tried again there.
_LATE = {
    "before_step": ("before_step", "before_step may have changed a part of the gradients already"),
    "optimizer": ("the optimizer's step", "a part of the parameters may have been changed already"),
}
_HEADROOM = 0.05  # of the device's memory, at the peak of an update
_SPARE = 0.25  # of the host's free memory, for all ranks of a machine, while an optimizer has not stepped
_SURVIVED = 8  # updates without headroom that prove a cut as well
_CALM, _LONGEST_CALM = 256, 1 << 14  # updates before a larger cut is tried again; doubled when that was too much
# Not everything that has no memory left says so by its type.
_DISGUISED = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


class Again(RuntimeError):
    """Another rank ran out of memory: this rank's pieces are void too. `votes` where the ranks have voted already."""

    def __init__(self, votes: list[list[int]] | None = None) -> None:
        super().__init__(MARK)
        self.votes = votes


def is_oom(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(one in str(error) for one in _DISGUISED)


def first_line(error: Exception) -> str:
    """As evidence; never empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def free(device: torch.device) -> None:
    """Give cached memory back. The peak starts anew: that of the attempt that failed says nothing about the next."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def figures(device: torch.device) -> list[str]:
    """A line of evidence; none where the device has no figures."""
    if device.type != "cuda":
        return []
    peak, (left, total) = torch.cuda.max_memory_allocated(device), torch.cuda.mem_get_info(device)
    named = (("this process's peak", peak), ("free now", left), ("in all", total))
    return [", ".join(f"{name} {size / 2**30:.1f} GiB" for name, size in named)]


def _is_tight(device: torch.device) -> bool:
    """Whether the peak left too little. Where the device cannot say (CPU), surviving is enough."""
    if device.type != "cuda":
        return False
    left, total = torch.cuda.mem_get_info(device)
    left += torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return left < _HEADROOM * total


class Ladder:
    """How many rows go through the model at once, as learnt from what did not fit. One per engine.

    `level`, `changed` and `tries` are the same on every rank; limits are remembered per target and shape of a row,
    which may differ between ranks. With uneven numbers of microbatches ranks still make one global batch.
    """

    def __init__(self, engine: Engine, *, why_whole: str) -> None:
        self.why_whole = why_whole  # why pieces must not be cut; "" where they may
        # User-coupled code may communicate inside of loss_fn: a rank that failed there could not be waited for.
        said = engine.batch.coupled and engine.batch.why_coupled is None
        self.votes = engine.distributed and engine.join is None and not said
        self.limits: dict[tuple[str, int], int] = {}  # (target, elements of a row) -> rows
        self.level = 0  # how often the cut was halved since it was whole
        self.changed = 0  # the update in which it last changed
        self.calm = _CALM
        self.grown = False
        self.tries = 0  # retries of an update whose pieces cannot get smaller

    # ------------------------------------------------------------------------------------------------ the cut

    def cut(self, engine: Engine, target: Target, parts: Sequence[Part]) -> Sequence[Part]:
        """The pieces as they fit. After a calm, the next larger ones: unproven again, on all ranks alike."""
        if engine.number - self.changed >= self.calm:
            self.level, self.changed, self.grown = self.level - 1, engine.number, True
            self.limits = {key: 2 * rows for key, rows in self.limits.items()} if self.level else {}
            for one in engine.targets.values():
                one.trust = min(one.trust, STEPPED)
            engine.report("grow", engine.number, {"microbatch_size": self.smallest()})
        limit = self._limit(target.name, _elements(parts))
        if limit is None or all(rows <= limit for _, rows, _ in parts):
            return parts
        if not all(batches.cuttable(batch, rows, engine.split) for _, rows, batch in parts):
            return parts
        pieces = [
            (stop - start, batches.part(batch, start, stop, engine.split))
            for _, rows, batch in parts
            for start, stop in chop(0, rows, limit)
        ]
        return [(i, rows, batch) for i, (rows, batch) in enumerate(pieces)]

    def _limit(self, name: str, elements: int) -> int | None:
        """Rows of this shape that fit: of the nearest larger shape that is known, else of the largest."""
        known = {size: rows for (target, size), rows in self.limits.items() if target == name}
        if not known:
            return None
        return known[min((size for size in known if size >= elements), default=max(known))]

    def smallest(self) -> int | None:
        """For the contract line: no piece has more rows. None: as the batch was cut."""
        return min(self.limits.values(), default=None)

    # ------------------------------------------------------------------------------------------------ the vote

    def agree(self, engine: Engine, target: Target) -> None:
        """The pieces are computed and nothing is reduced yet. Called on all ranks while the cut is unproven."""
        votes = comm.all_gather_integers([0, 0, 0, int(_is_tight(engine.device))])
        if any(failed for failed, *_ in votes):
            raise Again(votes)
        if target.trust == STEPPED:
            target.survived += 1
            if target.survived >= _SURVIVED or not any(tight for *_, tight in votes):
                target.trust, target.survived = PROVEN, 0

    def learn(
        self, engine: Engine, target: Target, parts: Sequence[Part], words: str, votes: list[list[int]] | None
    ) -> None:
        """What failed is undone already: agree on what to try next. On all ranks that take part in the vote.

        words: Of this rank's error; "" where it was another rank's.

        Raises:
            LessonError: this rank cannot recover alone; the others do not know.
            MemoryLimitError: on all ranks: nothing smaller is left to try.
        """
        rows = max((rows for _, rows, _ in parts), default=0)
        whole = self.why_whole or _why_whole(engine, parts)
        half = 0 if whole or rows < 2 else -(-rows // 2)
        if engine.distributed and (not self.votes or target.trust == PROVEN or target.phase == "reduction"):
            raise self.error(engine, target.phase, words, rows, half, whole)
        mine = [int(bool(words)), half, PHASES.index(target.phase), 0]
        if not engine.distributed:
            votes = [mine]
        elif votes is None:
            if words and target.names is None:
                comm.all_gather(MARK)  # the others wait in the agreement of the first update
            votes = comm.all_gather_integers(mine)
        failed = {rank: vote for rank, vote in enumerate(votes) if vote[0]}
        half = min(vote[1] for vote in failed.values())
        phase = PHASES[next(iter(failed.values()))[2]]
        target.trust = min(target.trust, STEPPED)
        if half:
            self.limits[target.name, _elements(parts)] = half
            self.level, self.changed = self.level + 1, engine.number
            self.calm = min(2 * self.calm, _LONGEST_CALM) if self.grown else self.calm
            self.grown = False
        elif self.tries and (phase == "optimizer" or not engine.recompute_more()):
            raise self.error(engine, phase, words, rows, 0, whole, list(failed))
        self.tries += not half
        fields = {"phase": phase, "ranks": list(failed), "microbatch_size": half or None, "text": words}
        engine.report("oom", engine.number, fields)

    # ------------------------------------------------------------------------------------------------ the end

    def error(
        self, engine: Engine, phase: str, words: str, rows: int, half: int, whole: str = "", ranks: Sequence[int] = ()
    ) -> EvenerError:
        """Why this is the end, with figures where they are known, and what would help."""
        rank = engine.group.rank
        who = ranks or [rank]
        where = f" on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}" if engine.distributed else ""
        late = _LATE.get(phase)
        what = f"in {late[0]}" if late else f"in the {phase} of {_rows(rows)}"
        evidence = [words] if words else [f"rank {who[0]} has the error's own words"]
        evidence += figures(engine.device)
        cause = f"Out of memory {what}{where}."
        if half:
            why = "the ranks could not agree on another cut: this one was proven, or the forward communicates"
            evidence.append(late[1] if late else why)
            fix = [f"start it again: it goes on from the newest checkpoint with microbatch_size={half}"]
            return LessonError(cause, evidence=[*evidence, "`evener run` does that by itself"], fix=fix).of(half)
        if whole:
            evidence.append(f"it is not cut smaller: {whole}")
        elif not late:
            evidence.append("a single row does not fit, with all cached memory freed")
        size = engine.cut.slice_size
        fix = ['activation_checkpointing="full" (the same result, about a third more time)']
        if size is not None and size > 1 and not late:
            fix.append(f"slice_size={size // 2}: another slice is another result with dropout or BatchNorm")
        elif whole and size is None and rows > 1 and not late:
            fix.append(f"microbatch_size={rows // 2} in the script, knowing that")
        if engine.strategy != "fsdp":
            fix.append('strategy="fsdp" on more GPUs: parameters and optimizer state are sharded')
        fix.append('precision="bf16", shorter rows, a smaller model; evener.memory() says who holds memory')
        return MemoryLimitError(cause, evidence=evidence, fix=fix)


def _rows(rows: int) -> str:
    return f"{rows} row{'' if rows == 1 else 's'}"


def _elements(parts: Sequence[Part]) -> int:
    """Elements of one row, of the widest piece."""
    return max((sum(leaf.numel() for _, leaf in batches.leaves(b)) // max(1, n) for _, n, b in parts), default=0)


def _why_whole(engine: Engine, parts: Sequence[Part]) -> str:
    if all(batches.cuttable(batch, rows, engine.split) for _, rows, batch in parts):
        return ""
    return "batches whose first dimension is not their rows need split=f(batch, start, stop)"


class Held:
    """What `apply` changes, kept on the host until the optimizer has made its first step: made by `of`."""

    @staticmethod
    def of(engine: Engine, target: Target) -> Held | None:
        """None where a rank cannot try again alone (its `apply` communicates), or the host has no room to spare."""
        if engine.shards is not None or (engine.distributed and engine.before_step is not None):
            return None
        parameters = [p for group in target.optimizer.param_groups for p in group["params"]]
        state = dict(target.optimizer.state)
        size = sum(tensor.nbytes for tensor in (*parameters, *target.spread.gradients(), *_tensors(state)))
        ranks = engine.group.place.local_world_size
        if size * ranks > _SPARE * psutil.virtual_memory().available:
            return None
        target.settle()  # its schedule step belongs to the groups that are kept
        return Held(engine, target)

    def __init__(self, engine: Engine, target: Target) -> None:
        self.target = target
        held = [p for group in target.optimizer.param_groups for p in group["params"]]
        self.gradients = [(p, p.grad) for p in target.parameters]
        self.state = {p: _same(of) for p, of in target.optimizer.state.items()}
        self.groups = [dict(group) for group in target.optimizer.param_groups]
        tensors: list[torch.Tensor] = [*held, *(grad for _, grad in self.gradients if grad is not None)]
        tensors += _tensors(self.state)
        if target.loss_scale is not None:
            tensors += [target.loss_scale.scale, target.loss_scale.growth_tracker]
        if engine.ema is not None:
            tensors += [*engine.ema.average, *engine.ema.rounded, *(mine for mine, _ in engine.ema.buffers)]
        self.values = [(tensor, tensor.detach().to("cpu", copy=True)) for tensor in tensors]

    @torch.no_grad()
    def put_back(self) -> None:
        state: Any = self.target.optimizer.state
        state.clear()
        state.update({p: _same(of) for p, of in self.state.items()})
        for group, was in zip(self.target.optimizer.param_groups, self.groups):
            group.clear()
            group.update(was)
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        for tensor, value in self.values:
            tensor.copy_(value)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _same(value: Any) -> Any:
    """New containers around the same tensors."""
    return tree_map(lambda leaf: leaf, value)
