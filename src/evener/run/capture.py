"""The capture of `evener plan`: a script runs up to its first `Run`, whose step is then traced instead of trained.

    python -m evener.run.capture SHIM JOB.json [-m] SCRIPT [ARGS...]

is the child process: it runs the script as a rank of `evener run` would be (through the launcher's shim), with one
difference: what the script moves to "cuda" before its Run stays on the CPU. In the constructor of the first Run `serve`
takes over: it tells what it found, answers requests for traces, and ends the process; nothing after that line runs.
Two pipes carry it, one JSON object a line:

    -> {"captured": {...}}              <- {"cut": {...}, "device": "cuda", "capability": [9, 0], "seconds": null}
    -> {"trace": {...}}, {"late": true} or {"error": {cause, evidence, fix}}
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import sys
from contextvars import ContextVar
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any, NoReturn, Unpack

import psutil  # type: ignore[import-untyped]
import torch
from torch.overrides import TorchFunctionMode

from evener import batch as batches
from evener.config import Config, ConfigFile, RunKeywords
from evener.data import Cursor, make_feed, source_of
from evener.data.columns import Columns
from evener.data.source import Source
from evener.dist.info import cpu_name
from evener.engine import batchnorm as bn
from evener.engine.precision import decide
from evener.engine.setup import by_name, decide_batch
from evener.errors import UsageError
from evener.plan.captured import Captured, dataset_words
from evener.plan.make import calibrated, machine_of, make
from evener.plan.search import Plan
from evener.plan.values import Cut, Trace

if TYPE_CHECKING:
    from evener.measure.trace import Step

_STAYING: ContextVar[StayOnCpu | None] = ContextVar("what a captured script moved to cuda", default=None)


class StayOnCpu(TorchFunctionMode):
    """`.cuda()`, `.to("cuda")` and `device="cuda"` mean the CPU; `lines` are the places that said so."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.over = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.over:
            return func(*args, **kwargs)
        moves = func in (torch.Tensor.cuda, torch.Tensor.pin_memory)
        if moves or any(map(_is_cuda, (*args, *kwargs.values()))):
            self._said()
            if moves:
                return args[0]
            args = [torch.device("cpu") if _is_cuda(one) else one for one in args]
            kwargs = {name: torch.device("cpu") if _is_cuda(one) else one for name, one in kwargs.items()}
        return func(*args, **kwargs)

    def _said(self) -> None:
        frame, here = sys._getframe(2), (__file__, os.path.dirname(torch.__file__))
        while frame is not None and frame.f_back is not None and frame.f_code.co_filename.startswith(here):
            frame = frame.f_back
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if line not in self.lines:
            self.lines.append(line)


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).partition(":")[0] == "cuda"


def main() -> None:
    from evener.run import capture  # not this module, which is __main__ for a moment: the one that Run imports

    shim, sys.argv[:] = sys.argv[1], sys.argv[1:]
    staying = capture.StayOnCpu()
    capture._STAYING.set(staying)
    with staying:
        runpy.run_path(shim)["main"]()


def serve(config: Config, model: Any, optimizer: Any, loss_fn: Any, dataset: Any, pipes: tuple[int, int]) -> NoReturn:
    """Answers what the other end of `pipes` (read, write) asks about this Run's step, then ends the process."""
    from evener.measure.trace import words

    staying = _STAYING.get()
    if staying is not None:
        staying.over = True
    # The answers are evener's; what the script printed so far is in its log.
    with os.fdopen(pipes[0], "r", encoding="utf-8") as requests, os.fdopen(pipes[1], "w", encoding="utf-8") as answers:
        try:  # dataset and modules are the user's, and their errors belong in the plan
            step, captured = _look(config, model, optimizer, loss_fn, dataset, tuple(staying.lines if staying else ()))
            _tell(answers, captured=asdict(captured))
            for asked in map(json.loads, requests):
                how = {**asked, "capability": asked["capability"] and tuple(asked["capability"])}
                cut = Cut(**how.pop("cut"))
                try:
                    _tell(answers, trace=step.trace_forked(cut, **how).to_json())
                except TimeoutError:
                    _tell(answers, late=True)
                except Exception as error:
                    _tell(answers, error=words(error))
        except Exception as error:
            _tell(answers, error=words(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing of the script runs after its Run, no exit handler either


def make_plan(
    model: Any,
    optimizer: Any,
    loss_fn: Any,
    dataset: Any,
    *,
    gpu: str | None = None,
    gpus: str | None = None,
    cpu: bool = False,
    nproc: int | None = None,
    nodes: int = 1,
    **keywords: Unpack[RunKeywords],
) -> Plan:
    """What `evener plan` finds, for objects at hand: a frozen `Plan` with its reasons. Nothing of them is changed.

    Each trace runs in a copy of this process (a fork), so call it before CUDA is used and before a process group is
    made. Communicates nothing.

    Args:
        model, optimizer, loss_fn, dataset, keywords: As for `Run`.
        gpu, gpus, cpu, nproc, nodes: As the options of `evener plan`; none of them: this machine.

    Raises:
        EvenerError: a wrong keyword or name; a step that cannot be traced, with the line.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise UsageError("make_plan() comes before the process group.", fix=["plan first, or use `evener plan`"])
    devices = machine_of(gpu=gpu, recorded=gpus, cpu=cpu, nproc=nproc, nodes=nodes)
    machine = calibrated(devices, cpu=cpu_name())
    step, captured = _look(Config.merge(keywords, ConfigFile.find()), model, optimizer, loss_fn, dataset, ())

    def trace(cut: Cut, seconds: float | None) -> Trace:
        return step.trace_forked(cut, device=machine.device, capability=machine.capability, seconds=seconds)

    return make(trace, captured, machine)


def _tell(answers: IO[str], **values: Any) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def _look(
    config: Config, model: Any, optimizer: Any, loss_fn: Any, dataset: Any, on_cpu: tuple[str, ...]
) -> tuple[Step, Captured]:
    from evener.measure.trace import Step

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # tracing needs one of its own, with as many ranks as it likes
    models, optimizers = by_name("model", model), by_name("optimizer", optimizer)
    if len(optimizers) > 1 or loss_fn is None:
        what = "this script's loop says which loss belongs to which optimizer: evener plan does not see it."
        raise UsageError(what, fix=["evener.make_plan(model, optimizer, loss_fn, dataset, ...) plans one of them"])
    whole = torch.nn.ModuleList(models.values())
    batch, rows, source, words = sample(config, dataset)
    coupled = bn.has_batchnorm(whole) and config.batchnorm != "sync"
    slices = decide_batch(
        global_batch_size=config.global_batch_size,
        microbatch_size=config.microbatch_size,
        slice_size=config.slice_size,
        exact=config.exact,
        coupled=True if config.prepare is not None and config.coupled is None else config.coupled,
        batchnorm=coupled,
        rank=0,
        world_size=1,
    )
    parameters = list(whole.parameters())
    held = sum(one.nbytes for one in (*parameters, *whole.buffers()) if not one.is_meta)
    known = config.as_json()
    captured = Captured(
        global_batch_size=config.global_batch_size,
        rows=None if source.stream else source.rows,
        row_bytes=sum(leaf.nbytes for _, leaf in batches.leaves(batch)) // rows,
        parameters=sum(one.numel() for one in parameters),
        trainable=sum(one.numel() for one in parameters if one.requires_grad),
        parameter_bytes=sum(one.nbytes for one in parameters),
        optimizers=tuple(type(one).__name__ for one in optimizers.values()),
        slice_size=slices.cut.slice_size,
        exact=config.exact,
        given={name: one for name, one in known.items() if one["origin"] != "default"},
        cpu_precision=decide("auto", torch.device("cpu")).name,
        process_bytes=max(0, psutil.Process().memory_info().rss - held),
        on_cpu=on_cpu,
        cpu=cpu_name(),
        dataset=words,
        num_workers=_workers(config, source),
    )
    return Step(model, optimizer, loss_fn, batch, {name: getattr(config, name) for name in known}), captured


def _workers(config: Config, source: Source) -> int | None:
    """As `Feed` decides, but for the number of CPUs, which are those of another machine."""
    if config.num_workers != "auto":
        return config.num_workers
    gathered = isinstance(source.dataset, Columns) and config.collate_fn is None and source.collate_fn is None
    return 0 if gathered or (source.in_memory and source.num_workers is None) else source.num_workers


def sample(config: Config, dataset: Any) -> tuple[Any, int, Source, str]:
    """A few real rows as the loss function gets them, how many, of what, and what a calibration calls that."""
    source = source_of(dataset, config.stream)
    feed = make_feed(
        source,
        stream=config.stream,
        order=config.order,
        global_batch_size=min(2, config.global_batch_size, source.rows or 2),
        drop_last=False,
        rank=0,
        world_size=1,
        cut=lambda rows: [(0, rows)],
        device=torch.device("cpu"),
        seed=config.seed,
        num_workers=0,
        collate_fn=config.collate_fn,
        on_bad_sample=config.on_bad_sample,
    )
    with contextlib.closing(feed):
        piece = next(iter(feed.portions(Cursor(0, 0), updates=1))).pieces[0]
    batch = piece.batch
    row_bytes = sum(leaf.nbytes for _, leaf in batches.leaves(batch)) // piece.rows
    words = "" if source.stream else dataset_words(type(source.dataset).__name__, source.rows, row_bytes)
    if config.prepare is not None:
        batch = config.prepare(batch, torch.Generator().manual_seed(config.seed))
    return batch, piece.rows, source, words


if __name__ == "__main__":
    main()
