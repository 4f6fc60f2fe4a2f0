"""The user's own step, traced: the engine's code runs for two updates on tensors without memory.

    Step(model, optimizer, loss_fn, batch, keywords).trace(cut) -> Trace

What runs is `Engine` itself, with the user's modules, optimizer, loss function and metrics. Exchanged for the time of a
trace is only what reads values that do not exist: the flag of a finished update, and what ranks tell each other once in
the first update. `trace` uses up its objects (parameters become fake), so `trace_forked` does it in a copy of the
process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch

from evener import batch as batches
from evener.engine import Engine, saved, shards
from evener.engine import batchnorm as bn
from evener.engine.oom import PROVEN
from evener.engine.optim import _FUSED, check_rowwise
from evener.engine.setup import by_name
from evener.errors import EvenerError, UsageError
from evener.measure import private
from evener.measure.cuda import cuda_rules
from evener.measure.ledger import Ledger
from evener.plan import blocks
from evener.plan.memory import rows_for
from evener.plan.values import Collective, Cut, Trace

# Keywords of Run that the step depends on, apart from those a Cut decides.
STEP_KEYWORDS = ("precision", "exact", "coupled", "max_grad_norm", "before_step", "scaler", "batchnorm", "ema", "split",
                 "fsdp", "scheduler", "schedule_by", "gradient_compression")  # fmt: skip
_PIECES = 2  # the second shows what the first one's gradients cost; more repeat it
_BLOCKS = 5  # of many equal ones: two at each end, whose neighbours are other ones, and one that is repeated
_MANY = 16


class Step:
    """The user's objects, ready to be traced.

    Args:
        model, optimizer, loss_fn: As for `Run`; a model on the meta device is all right.
        batch: At least one row, as the data gives it; its shapes are taken, not its values.
        keywords: Of `Run`. Those in STEP_KEYWORDS count, and compile, which is not traced; a `precision` by part
            ({"param": ...}) goes before the cut's.
    """

    def __init__(
        self, model: Any, optimizer: Any, loss_fn: Any, batch: Any, keywords: Mapping[str, Any] | None = None
    ) -> None:
        self.model, self.optimizer, self.loss_fn, self.batch = model, optimizer, loss_fn, batch
        self.keywords = {key: value for key, value in (keywords or {}).items() if key in STEP_KEYWORDS}
        self.compiled = bool((keywords or {}).get("compile"))

    def trace(self, cut: Cut, *, device: str = "cpu", capability: tuple[int, int] | None = None) -> Trace:
        """Two updates of rank 0 under `cut`. The objects are fake afterwards: once per Step.

        Raises:
            EvenerError: the step cannot be traced; the line of the user's code is in the evidence.
        """
        untraced = private.refuse_if_broken(private.check(), cut.world_size)
        models, optimizers = by_name("model", self.model), by_name("optimizer", self.optimizer)
        names = {
            id(module): f"{name}.{path}".strip(".") for name, m in models.items() for path, module in m.named_modules()
        }
        ledger, notes = Ledger(names, rows_for(device, capability)), list[str]()
        untraced += ["torch.compile: the eager step was traced"] * self.compiled
        collecting = gc.isenabled()
        gc.collect()
        gc.disable()  # or frees would come at random
        try:
            with ExitStack() as stack:
                stack.enter_context(private.one_rank_of(cut.world_size))
                stack.enter_context(private.fake_mode())
                if device == "cuda":
                    stack.enter_context(cuda_rules(capability or (8, 0), notes))
                stack.enter_context(ledger.watching())
                trace = self._trace(cut, ledger, models, optimizers, device, stack)
                told = [line for line in notes if not line.startswith("untraced: ")]
                untraced += [line.removeprefix("untraced: ") for line in notes if line not in told]
                untraced += ledger.unknown(device)
                return replace(trace, capability=capability, untraced=tuple(untraced), notes=tuple(told))
        except private.DATA_DEPENDENT as error:
            raise _names_the_line(error) from error
        finally:
            if collecting:
                gc.enable()

    def _trace(
        self,
        cut: Cut,
        ledger: Ledger,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, torch.optim.Optimizer],
        device: str,
        stack: ExitStack,
    ) -> Trace:
        for name, model in models.items():
            for path, tensor in (*model.named_parameters(), *model.named_buffers()):
                _fake(ledger, tensor, f"{name}.{path}".strip("."), isinstance(tensor, torch.nn.Parameter))
        for optimizer in optimizers.values():
            for state in optimizer.state.values():
                for tensor in filter(torch.is_tensor, state.values()):
                    private.faked(tensor)
                    ledger.tag(tensor, "optimizer")
            _choose_kernels(optimizer, device, exact=bool(self.keywords.get("exact")))
        stack.enter_context(private.exchanged(saved, "_PLAIN", (torch.Tensor, private.FakeTensor)))
        stack.enter_context(private.exchanged(saved, "StorageWeakRef", ledger.weak()))
        if device == "cuda":
            stack.enter_context(private.exchanged(saved, "OnHost", _pinned(ledger)))
        pieces = min(_PIECES, cut.microbatches)
        engine = self._engine(cut, pieces)
        target = engine._target(None)
        for path, held in engine.named().items():  # under fsdp this rank's rows
            ledger.names[id(held)] = path.rpartition(".")[0]
            ledger.tag(held, "parameter", path.rpartition(".")[0])
        _answer(engine, device)
        if device == "cpu":  # generators' states are host memory: 5,056 bytes each, kept for what is computed again
            stack.enter_context(private.exchanged(torch, "get_rng_state", ledger.noting(torch.get_rng_state)))
            engine.randomness.torch_states = ledger.noting(engine.randomness.torch_states)  # type: ignore[method-assign]
        _watch(ledger, engine, target)
        rows = cut.microbatch_size * pieces
        total = rows * cut.world_size
        batch = _of_rows(self.batch, rows, self.keywords.get("split"))
        for _, leaf in batches.leaves(batch):
            ledger.tag(leaf, "batch")
        parts = [
            (number, stop - start, batches.part(batch, start, stop, self.keywords.get("split")))
            for number, (start, stop) in engine.cut.numbered(total)
        ]
        if device == "cuda":
            ledger.leave_out(len(ledger.events))
        marks = []
        for _ in range(2):
            marks.append(len(ledger.events))
            engine.step_parts(parts, total)
            for parameter, state in target.optimizer.state.items():
                name = ledger.names.get(id(parameter), "")
                for tensor in filter(torch.is_tensor, state.values()):
                    ledger.tag(tensor, "optimizer", name)
            ledger.begin("start")
        events, (first, second) = ledger.finished(marks)
        return Trace(
            cut,
            events,
            (first, second),
            device=device,
            pieces=len(parts),
            row_bytes=sum(leaf.numel() * leaf.element_size() for _, leaf in batches.leaves(batch)) // rows,
            rows=rows,
        )

    def trace_forked(
        self, cut: Cut, *, device: str = "cpu", capability: tuple[int, int] | None = None, seconds: float | None = None
    ) -> Trace:
        """`trace` in a copy of this process, which keeps this one's objects as they are and survives an abort in C++.
        Of a model with many equal blocks few are traced, where that gives the same.

        Raises:
            EvenerError: as `trace`; and when the copy ended without an answer.
            TimeoutError: it had not ended after so many `seconds`.
        """
        path, count = self._repeated()
        if count >= _MANY:
            with contextlib.suppress(EvenerError):  # one that is the step's own comes again
                both = [(path, _BLOCKS + i) for i in range(2)]
                few, more = self._forked(cut, device, capability, seconds, both)
                return blocks.deeper(few, more, path, count - _BLOCKS)
        return self._forked(cut, device, capability, seconds, [None])[0]

    def _forked(
        self,
        cut: Cut,
        device: str,
        capability: tuple[int, int] | None,
        seconds: float | None,
        shortened: Sequence[tuple[str, int] | None],
    ) -> list[Trace]:
        """One copy for each, side by side: of a list of blocks only so many are left."""
        private.check()  # once for all copies
        sys.stdout.flush()
        sys.stderr.flush()
        copies = []
        for few in shortened:
            answers, answer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    signal.signal(signal.SIGALRM, signal.SIG_DFL)
                    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
                    torch.set_num_threads(1)  # OpenMP's threads were not copied
                    self._tell(answer, cut, device, capability, few)
                finally:
                    os._exit(0)
            os.close(answer)
            copies.append((child, answers))
        ends = []
        for child, answers in copies:  # all of them, before the first error is raised
            with os.fdopen(answers, "r", encoding="utf-8") as file:
                text = file.read()
            ends.append((text, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        return [_told(text, ended, cut) for text, ended in ends]

    def _tell(
        self, answer: int, cut: Cut, device: str, capability: tuple[int, int] | None, few: tuple[str, int] | None
    ) -> None:
        try:
            if few is not None:
                self._shorten(*few)
            told: dict[str, Any] = {"trace": self.trace(cut, device=device, capability=capability).to_json()}
        except BaseException as error:
            told = {"error": words(error, f"the step could not be traced as {cut.words()}.")}
        with os.fdopen(answer, "w", encoding="utf-8") as file:
            json.dump(told, file)

    def _repeated(self) -> tuple[str, int]:
        """The longest list of equal blocks: its path in traces, and how many."""
        found = [("", 0)]
        for name, model in by_name("model", self.model).items():
            for path, module in model.named_modules():
                equal = list(module) if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential) else []
                if len(equal) >= _MANY and len({_kind(block) for block in equal}) == 1:
                    found.append((f"{name}.{path}".strip("."), len(equal)))
        return max(found, key=lambda one: one[1])

    def _shorten(self, path: str, keep: int) -> None:
        models = by_name("model", self.model)
        whole = {f"{name}.{inside}".strip("."): one for name, m in models.items() for inside, one in m.named_modules()}
        gone = {id(p) for block in list(whole[path])[keep:] for p in block.parameters()}
        del whole[path][keep:]
        gone -= {id(p) for model in models.values() for p in model.parameters()}
        for optimizer in by_name("optimizer", self.optimizer).values():
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in gone]
            for p in [p for p in optimizer.state if id(p) in gone]:
                del optimizer.state[p]

    def _sliced(self) -> bool:
        """Whether a microbatch is a slice: rows that see each other."""
        coupled = self.keywords.get("coupled")
        if coupled is None and self.keywords.get("batchnorm", "slice") == "slice":
            coupled = any(bn.has_batchnorm(one) for one in by_name("model", self.model).values())
        return bool(self.keywords.get("exact") or coupled)

    def _engine(self, cut: Cut, pieces: int) -> Engine:
        keywords: dict[str, Any] = dict(self.keywords)
        keywords["slice_size" if self._sliced() else "microbatch_size"] = cut.microbatch_size
        if cut.replicas > 1:
            keywords["fsdp"] = {"shard_ranks": cut.world_size // cut.replicas, **(keywords.get("fsdp") or {})}
        precision = keywords.pop("precision", None)
        check = private.exchanged(shards, "check_rowwise", private.outside(check_rowwise))
        with private.models_stay(), check, warnings.catch_warnings():
            # An average of the weights is a copy of the model.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            return Engine(
                self.model,
                self.optimizer,
                self.loss_fn,
                device="cpu",
                precision=precision if isinstance(precision, Mapping) else cut.precision,
                strategy=cut.strategy,
                global_batch_size=cut.microbatch_size * pieces * cut.world_size,
                activation_checkpointing=cut.activation_checkpointing,
                saved_activations=cut.saved_activations,
                loss_is="row mean",
                report=_say_nothing,
                **keywords,
            )


def _told(text: str, ended: int, cut: Cut) -> Trace:
    told = dict(json.loads(text)) if text else {}
    if "trace" in told:
        return Trace.from_json(told["trace"])
    if "error" in told:
        raise EvenerError(**told["error"])
    if ended == -signal.SIGALRM:
        raise TimeoutError(cut.words())
    cause, evidence = f"the step could not be traced as {cut.words()}.", [f"signal {-ended}"]
    if ended >= 0:
        cause = f"the step ended its process with exit code {ended}, so nothing was traced."
        evidence = ["os._exit, or a thread that ends the process"]
    raise EvenerError(cause, evidence=evidence, fix=[_AS_IT_IS.replace("fail", "end")])


def _say_nothing(*_: Any) -> None:
    """In place of a report, and of a vote."""


def _fake(ledger: Ledger, tensor: torch.Tensor, path: str, is_parameter: bool) -> None:
    module = path.rpartition(".")[0]
    private.faked(tensor)
    ledger.tag(tensor, "parameter" if is_parameter else "buffer", module)
    ledger.names[id(tensor)] = module


def _choose_kernels(optimizer: torch.optim.Optimizer, device: str, *, exact: bool) -> None:
    """What the engine finds out by trying a kernel on values: fused where there is one and the user left it open. And
    what torch.optim takes by itself on CUDA: foreach."""
    given = [
        (group.get("fused"), group.get("foreach"), group.get("differentiable")) for group in optimizer.param_groups
    ]
    if any(one not in ((None, None, None), (None, None, False)) for one in given):
        return
    fused = type(optimizer) in _FUSED and not exact
    for group in optimizer.param_groups:
        if fused or (device == "cuda" and "foreach" in group):
            group["fused" if fused else "foreach"] = True
    if fused:
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _no_flags() -> Any:
    """Every update counts: its flag has no value."""
    return SimpleNamespace(requests=[0.0, 0.0], take=_say_nothing, land=_say_nothing, read_now=lambda found: False)


def _answer(engine: Engine, device: str) -> None:
    """Take the engine's questions about values and about other ranks out of the step.

    For a GPU the step is traced as one whose cut is proven. Before, a copy of what the first optimizer step changes is
    kept on the host: other memory there, and the same on a CPU.
    """
    engine.buffers.agree = sorted
    engine.ladder.agree = _say_nothing  # type: ignore[assignment, method-assign]
    for target in engine.targets.values():
        target.trust = PROVEN if device == "cuda" else target.trust
        target.flags = _no_flags()
        if hasattr(target.spread, "compare"):
            target.spread.compare = _say_nothing
        target.agree = functools.partial(_agree, target)  # type: ignore[method-assign]


def _agree(target: Any, tally: Any, rows: int | None, mine_rows: int) -> None:
    target.names = tuple(sorted(tally.metrics[0])) if tally.metrics else ()


def _pinned(ledger: Ledger) -> type:
    """saved.Pinned without CUDA: nothing of it is the device's but what is back, and that comes two pieces ahead."""

    def copied(kind: str, flat: torch.Tensor) -> None:
        ledger.events.append(Collective(kind, flat.nbytes, 1, ledger.phase))

    order: WeakValueDictionary[int, Any] = WeakValueDictionary()
    numbers = itertools.count()

    class Pinned:
        def __init__(self, flat: torch.Tensor) -> None:
            self.number, self.like = next(numbers), (flat.shape, flat.dtype)
            self.flat: torch.Tensor | None = None
            order[self.number] = self
            copied("to_host", flat)

        def back(self) -> torch.Tensor:
            for number in range(self.number, self.number - saved._AHEAD - 1, -1):
                one = order.get(number)
                if one is not None and one.flat is None:
                    one.flat = torch.empty(one.like[0], dtype=one.like[1])
                    copied("to_device", one.flat)
            assert self.flat is not None
            return self.flat

    return Pinned


def _watch(ledger: Ledger, engine: Engine, target: Any) -> None:
    """Tell the ledger where the step stands, and which storages become gradients."""
    spread = target.spread
    buckets = getattr(getattr(spread, "inner", spread), "buckets", ())

    def tag() -> None:
        for parameter in target.parameters:
            if parameter.grad is not None:
                ledger.tag(parameter.grad, "gradient", ledger.names.get(id(parameter), ""))
        for bucket in buckets:  # gradients are views of them in the end, but they stay
            for tensor in bucket.held():
                ledger.tag(tensor, "communication", "")

    def around(owner: Any, name: str, phase: str, before: Any = _say_nothing, after: Any = _say_nothing) -> None:
        call = getattr(owner, name)

        def told(*args: Any) -> Any:
            before()
            ledger.begin(phase)
            result = call(*args)
            after()
            return result

        setattr(owner, name, told)

    tag()
    around(spread, "forward", "forward")
    around(spread, "before_backward", "backward", before=ledger.keep_for_backward)
    around(spread, "after_backward", "reduce", after=tag)
    around(target, "optimize", "optimizer", before=tag)


def _of_rows(batch: Any, rows: int, split: Any) -> Any:
    """A fake batch of so many rows, of the shapes and dtypes of `batch`."""
    if split is None:
        return batches.apply(batch, lambda leaf: torch.empty((rows, *leaf.shape[1:])[: leaf.ndim], dtype=leaf.dtype))
    have = batches.rows(batch, split)
    if have < rows:
        cause = f"split= cuts batches of its own kind: {rows} rows are needed to trace, {have} were given."
        raise UsageError(cause, fix=["plan with a larger batch of the dataset"])
    return batches.apply(batches.part(batch, 0, rows, split), torch.empty_like)


def _kind(block: torch.nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that look alike."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    return type(block), repr(block), tuple((name, one.shape, one.dtype, one.requires_grad) for name, one in tensors)


_AS_IT_IS = "run it on the CPU first: evener run --cpu; does it fail there, too?"


def _their_line(error: BaseException) -> tuple[list[str], bool]:
    """The line of the user's code where it happened: the innermost frame outside of installed packages, torch and
    evener. And whether it was raised there: what a library raised in a trace may be the trace's fault."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    libraries = [path for name, path in sysconfig.get_paths().items() if name.endswith("lib")]
    others = (here, os.path.dirname(os.path.abspath(torch.__file__)), *libraries)
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [one for one in frames if not os.path.abspath(one.filename).startswith(others)]
    lines = [f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}"] if own else []
    return lines, bool(own) and own[-1] is frames[-1]


def words(error: BaseException, cause: str = "the step could not be traced.") -> dict[str, Any]:
    """Of any error in a trace, or before it: what is raised on the other side."""
    if isinstance(error, EvenerError):
        return {"cause": error.cause, "evidence": list(error.evidence), "fix": list(error.fix)}
    line, theirs = _their_line(error)
    evidence = [*line, *(text.strip() for text in traceback.format_exception_only(error))]
    if theirs:
        return {"cause": "the script's own code failed in its step.", "evidence": evidence, "fix": [_AS_IT_IS]}
    fix = ["plan another strategy or precision", "report it: the last lines say where tracing broke"]
    return {"cause": cause, "evidence": evidence, "fix": fix}


def _names_the_line(error: Exception) -> EvenerError:
    return UsageError(
        "the step reads a value, so it cannot be traced without data.",
        evidence=[*_their_line(error)[0], str(error).splitlines()[0]],
        fix=[
            "keep it on the device: torch.where and masks times values in place of .item(), bool() and x[mask]",
            "or plan nothing: microbatch_size=8, or a run that is out of memory cuts it by itself",
        ],
    )
