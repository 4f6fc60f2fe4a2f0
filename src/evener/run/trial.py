"""A trial of `evener verify`: the first batches of a run are written down, so that runs can be compared without torch.

Rank 0 writes `trace.jsonl`, one object a line: `begin` (the cut, what is there before the first batch), `batch` (what
each batch did and what is there after it), `evaluate` (what an evaluation returned), `end` (rows and order, asked for a
second time). What is there: a hash of the bits of every tensor of the run's state, and of whatever else the script
holds (its globals, attributes of its modules and dataset, variables its functions share): that never counts in a
comparison, it is where to look when one fails. The training itself is not changed: a trial only reads, between updates.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import safetensors.torch
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import Subset

from evener import batch as batches
from evener.data import Cursor, Portion
from evener.data.columns import Columns
from evener.data.order import Order
from evener.dist import comm
from evener.engine.randomness import Randomness
from evener.engine.setup import plain_name
from evener.plan.handed import Trial

if TYPE_CHECKING:
    from evener.run.batch import Batch
    from evener.run.run import Run

_LARGE = 1 << 26  # bytes of a thing beside the run's state that are still hashed after every batch
_ROOM = 1 << 30  # bytes of tensors that a trace may keep after every batch; else after those asked for only
_PLAIN = (type(None), bool, int, float, complex, str, bytes, range, slice, numpy.generic)
_GENERATORS: dict[type, Callable[[Any], Any]] = {
    torch.Generator: torch.Generator.get_state,
    random.Random: random.Random.getstate,
    numpy.random.Generator: lambda one: one.bit_generator.state,
    numpy.random.RandomState: lambda one: one.get_state(legacy=False),
}


class Watch:
    """Watches one run. Called on all ranks together; `between`, `begin` and `finish` communicate."""

    def __init__(self, run: Run, trial: Trial) -> None:
        self.run, self.trial = run, trial
        path = Path(trial.folder, "trace.jsonl")
        self.file = open(path, "a", encoding="ascii") if run.is_main else None  # noqa: SIM115
        self.begun = self.finished = False
        self.updates: list[dict[str, Any]] = []
        self.rows: list[Any] = []  # of the batch in work: [position, hash, hash after prepare]
        self.first_rows: list[Any] | None = None
        self.batch: Batch | None = None
        self.gradient: dict[str, torch.Tensor] = {}
        self.names = {id(one): plain_name(name) for name, one in run.engine.model.named_parameters()}
        self.user = _users_modules()
        self.operations = self.injected = 0
        if trial.no_memory:
            run.engine.step_parts = functools.partial(self._without_memory, run.engine.step_parts)  # type: ignore[method-assign]
        self.randomness = run.engine.randomness = Listening(run.engine.randomness)
        self.answers: list[dict[str, float]] | None = None
        if trial.answers is not None:
            lines = map(json.loads, Path(trial.answers).read_text("ascii").splitlines())
            self.answers = [line["means"] for line in lines if line["kind"] == "evaluate"]
        if trial.still:
            for module in run.engine.model.modules():
                if isinstance(module, torch.nn.modules.dropout._DropoutNd):
                    module.p = 0.0
        for target in run.engine.targets.values():
            target.optimizer.register_step_pre_hook(functools.partial(self._before_optimizer, target.parameters))

    def begin(self) -> None:
        """Before the first batch of this process; a resumed run stands where it was restored to."""
        if self.begun:
            return
        self.begun = True
        engine, config, size = self.run.engine, self.run.config, self.run.config.global_batch_size
        columns = isinstance(self.run.feed.source.dataset, Columns)
        about: dict[str, Any] = {"global_batch_size": size, "number": self.run.number, "compile": config.compile}
        about |= {"largest_piece": max((stop - start for start, stop in engine.cut.pieces(size)), default=0)}
        about |= {"slice_size": engine.cut.slice_size, "exact": engine.batch.exact, "precision": engine.precision.name}
        about |= {"reads": "stream" if config.stream else "columns" if columns else "rows"}
        self._write("begin", batch=self.run.loop.batches, **about, **self._there())

    def stepped(self, batch: Batch, update: Any) -> None:
        """After an update, before the loop's body sees it."""
        if batch is not self.batch:
            self.batch = batch
            self.rows = list(self._row_digests(batch))
        self.updates.append({name: getattr(update, name) for name in ("loss", "lr", "skipped")})

    def between(self) -> None:
        """The loop asks for the next batch: write down the one that is done. Ends the process after the last one."""
        done = self.run.loop.batches
        if self.batch is not None:
            self._turn(done, self.batch.portion)
        self.updates, self.gradient, self.batch = [], {}, None
        if self.trial.evaluate and done == 2:
            source = self.run.feed.source
            few = range(min(64, source.rows))
            self.run.evaluate(replace(source, dataset=Subset(source.dataset, few), rows=len(few)))
        if done >= self.trial.batches:
            self.finish()
            raise SystemExit(0)

    def answer(self) -> dict[str, float] | None:
        """What the next evaluation returned in the trace that is answered from; None: evaluate."""
        return self.answers.pop(0) if self.answers else None

    def evaluated(self, means: Mapping[str, float]) -> None:
        self._write("evaluate", means=dict(means))

    def finish(self) -> None:
        """The rows of the first batch are read, and the order asked for, a second time."""
        if self.finished:
            return
        self.finished = True
        again: dict[str, Any] = {"injected": self.injected}
        feed, config = self.run.feed, self.run.config
        if self.first_rows is not None and config.stream is None:
            found: list[Any] = []
            for portion in feed.portions(Cursor(0, 0), updates=1):
                for piece in portion.pieces:
                    hashes = _rows_of(piece.batch, piece.rows, config.split)
                    found += [[piece.start + i, one] for i, one in enumerate(hashes)]
            again["rows"] = [self.first_rows, self._gathered(found)]
        order = getattr(feed, "order", None)
        if isinstance(order, Order) and callable(order.kind):
            twice = (order, Order(order.rows, order.seed, order.kind))
            both = [(o.indices(e, 0, o.length(e)).tolist(), e) for o in twice for e in (1, 0)]
            again["order"] = [[digest(ids) for ids, epoch in both if epoch == e] for e in (0, 1)]
        self._write("end", **again)

    def _without_memory(self, step: Any, *args: Any, **how: Any) -> Any:
        """One update, in which memory is missing once."""
        if self.injected > 1 or not self.run.is_main:
            return step(*args, **how)
        target = self.run.engine._target(how.get("optimizer"))
        with NoMemory(target, self.operations // 2 if self.injected else 5) as mode:
            update = step(*args, **how)
        self.operations, self.injected = mode.count, self.injected + mode.raised
        return update

    def _turn(self, done: int, portion: Portion) -> None:
        rows = self._gathered(self.rows)
        if portion.cursor == Cursor(0, 0):
            self.first_rows = rows
        kept = {name: tensor for name, tensor in self._state() if isinstance(tensor, torch.Tensor)}
        kept |= {f"gradient {name}": tensor for name, tensor in self.gradient.items()}
        small = sum(tensor.nbytes for tensor in kept.values()) * self.trial.batches <= _ROOM
        if (small or done in self.trial.keep) and self.file is not None:
            whole = {name: _wide(tensor) for name, tensor in kept.items()}
            safetensors.torch.save_file(whole, Path(self.trial.folder) / f"tensors-{done}.safetensors")
        self._write(
            "batch",
            batch=done - 1,
            cursor=[portion.cursor.epoch, portion.cursor.offset],
            ids=portion.ids().tolist(),
            rows=rows,
            updates=self.updates,
            gradient={name: digest(tensor) for name, tensor in self.gradient.items()},
            drawn=self.randomness.drawn,
            **self._there(),
        )

    def _there(self) -> dict[str, Any]:
        """Hashes of the run's state, and of everything else that is in sight. Collective."""
        tensors = {name: digest(value) for name, value in self._state()}
        every = comm.all_gather(digest(tensors))
        differ: dict[str, list[int]] = {}
        if any(one != every[0] for one in every):
            all_of_them = comm.all_gather(tensors)
            for name in tensors:
                ranks = [rank for rank, one in enumerate(all_of_them) if one.get(name) != tensors[name]]
                differ |= {name: ranks} if ranks else {}
        drawn = (("torch", torch.get_rng_state()), ("random", random.getstate()), ("numpy", numpy.random.get_state()))
        return {
            "state": tensors,
            "run.state": {str(key): digest(value) for key, value in self.run.state.items()},
            "ranks_differ": differ,
            "generators": {name: digest(value) for name, value in drawn},
            "user": {name: digest(value, self.user, limit=_LARGE) for name, value in self._users_values()},
        }

    def _state(self) -> Iterator[tuple[str, Any]]:
        """(kind and name, value) of everything that a checkpoint of the engine holds; tensors are clones."""
        engine = self.run.engine
        state = engine.state_dict()
        trained = set(self.names.values())
        for name, tensor in state["model"].items():
            yield f"{'parameter' if name in trained else 'buffer'} {name}", tensor
        for name, value in (state["buffers"] or {}).items():
            yield f"buffer {name}", value
        if state["ema"] is not None:
            yield from ((f"ema {name}", value) for name, value in state["ema"].items())
        for target, values in state["targets"].items():
            order = [name for group in state["groups"][target] for name in group]
            for number, entries in values["optimizer"]["state"].items():
                yield from ((f"optimizer state {order[number]}/{key}", value) for key, value in entries.items())
            for key in ("schedule", "scaler", "provisional"):
                yield f"{key} {target}".strip(), values[key]

    def _users_values(self) -> Iterator[tuple[str, Any]]:
        """What the script keeps beside the run: no checkpoint holds it."""
        run, seen = self.run, set()
        functions = [run.engine.loss_fn, *(getattr(run.config, name) for name in ("order", "prepare", "collate_fn"))]
        for name in self.user:
            for key, value in list(vars(sys.modules[name]).items()):
                if isinstance(value, types.FunctionType):
                    functions.append(value)
                elif not key.startswith("__") and not isinstance(value, types.ModuleType | type):
                    yield f"global {key}" + ("" if name == "__main__" else f" of {name}"), value
        for function in functions:
            if isinstance(function, types.FunctionType) and function not in seen and function.__module__ in self.user:
                seen.add(function)
                cells = zip(function.__code__.co_freevars, function.__closure__ or ())
                yield from ((f"variable {key} of {function.__name__}", _content(cell)) for key, cell in cells)
                if function.__defaults__:
                    yield f"defaults of {function.__name__}", function.__defaults__
            elif hasattr(function, "__dict__") and type(function).__module__ in self.user:
                yield f"the {type(function).__name__} object", vars(function)
        for path, module in run.engine.model.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "training" and not isinstance(value, torch.nn.Module):
                    what = "tensor attribute" if isinstance(value, torch.Tensor) else "attribute"
                    yield f"{what} {'.'.join(part for part in (path, key) if part)}", value
        yield "train and eval modes", [module.training for module in run.engine.model.modules()]
        dataset = run.feed.source.dataset
        if type(dataset).__module__ in self.user:
            yield from ((f"attribute {key} of the dataset", value) for key, value in vars(dataset).items())

    def _row_digests(self, batch: Batch) -> Iterator[list[Any]]:
        split = self.run.config.split
        pieces = [piece for piece in batch.portion.pieces if piece.rows]
        for piece, (_, rows, prepared) in zip(pieces, batch.parts):
            raw = _rows_of(piece.batch, piece.rows, split)
            after = raw if prepared is piece.batch else _rows_of(prepared, rows, split)
            yield from ([piece.start + i, *both] for i, both in enumerate(zip(raw, after)))

    def _before_optimizer(self, parameters: Any, *_: Any) -> None:
        if self.trial.kill == self.run.loop.batches - 1 and self.run.rank == self.run.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for parameter in parameters:
            if parameter.grad is not None:
                self.gradient[self.names[id(parameter)]] = parameter.grad.detach().clone()

    def _gathered(self, rows: list[Any]) -> list[Any]:
        return sorted((row for rank in comm.all_gather(rows) for row in rank), key=lambda row: row[0])

    def _write(self, kind: str, **values: Any) -> None:
        if self.file is not None:
            self.file.write(json.dumps({"kind": kind, **values}) + "\n")
            self.file.flush()


class Listening(Randomness):
    """The engine's randomness, and whether a forward or backward drew from it."""

    def __init__(self, heard: Randomness) -> None:
        self.__dict__.update(vars(heard))
        self.drawn = False
        self.seeded: list[torch.Tensor] | None = None

    def begin_piece(self, update: int, number: int) -> None:
        self._listen()
        super().begin_piece(update, number)
        self.seeded = self.torch_states()

    def restore(self, saved: Any) -> None:
        self._listen()
        super().restore(saved)

    def _listen(self) -> None:
        if self.seeded is not None:
            self.drawn |= any(not torch.equal(a, b) for a, b in zip(self.seeded, self.torch_states()))
        self.seeded = None


class NoMemory(TorchDispatchMode):
    """Raises once, in place of operation `at` of a target's forwards and backwards."""

    def __init__(self, target: Any, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.target, self.at, self.count, self.raised = target, at, 0, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.target.phase in ("forward", "backward"):
            self.count += 1
            if self.count > self.at and not self.raised:
                self.raised, self.count = 1, 0
                raise torch.OutOfMemoryError("out of memory, as asked by a trial")
        return function(*args, **(kwargs or {}))


def digest(value: Any, user: frozenset[str] = frozenset(), *, limit: int | None = None) -> str:
    """A hash of a value's bits. Objects of classes from the modules `user` count by their attributes."""
    total = hashlib.blake2b(digest_size=8)
    _add(total, value, user, limit, 0)
    return total.hexdigest()


def _add(total: Any, value: Any, user: frozenset[str], limit: int | None, depth: int) -> None:
    for kind, state_of in _GENERATORS.items():
        value = state_of(value) if isinstance(value, kind) else value
    if isinstance(value, torch.Tensor):
        total.update(f"{value.dtype} {tuple(value.shape)}".encode())
        if not value.is_meta and (limit is None or value.nbytes <= limit) and value.layout is torch.strided:
            total.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject is False:
        total.update(f"{value.dtype} {value.shape}".encode())
        total.update(b"" if limit is not None and value.nbytes > limit else numpy.ascontiguousarray(value).tobytes())
        return
    total.update(type(value).__name__.encode())
    if isinstance(value, _PLAIN) or type(value).__module__ == "itertools":
        total.update(repr(value).encode())
    elif depth < 5 and isinstance(value, Mapping):
        for key, one in list(value.items())[:10_000]:
            total.update(repr(key).encode())
            _add(total, one, user, limit, depth + 1)
    elif depth < 5 and isinstance(value, list | tuple):
        for one in value[:100_000]:
            _add(total, one, user, limit, depth + 1)
    elif isinstance(value, set | frozenset):
        total.update(repr(sorted(map(repr, value))).encode())
    elif depth < 5 and type(value).__module__ in user and not isinstance(value, torch.nn.Module):
        _add(total, getattr(value, "__dict__", {}), user, limit, depth + 1)


def _rows_of(batch: Any, rows: int, split: Any) -> list[str]:
    """One hash per row of a batch: of that row in every tensor that has so many rows."""
    if rows == 0:
        return []
    if split is not None:
        return [digest([leaf for _, leaf in batches.leaves(batch)])] * rows
    leaves = [leaf.detach().cpu() for _, leaf in batches.leaves(batch) if leaf.ndim and leaf.shape[0] == rows]
    return [digest([leaf[i] for leaf in leaves]) for i in range(rows)]


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, in a dtype that numpy has too."""
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype.itemsize < 4 and tensor.is_floating_point() else tensor).contiguous().clone()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _users_modules() -> frozenset[str]:
    """`__main__`, and the modules beside the script."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    folder = os.path.dirname(os.path.abspath(file)) + os.sep if file else None
    found = {"__main__"}
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None) or ""
        if folder and where.startswith(folder) and "site-packages" not in where and name.partition(".")[0] != "evener":
            found.add(name)
    return frozenset(found)
