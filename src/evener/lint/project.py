"""What one file needs to know of the others: who calls whom, under which rank test, with what in its hands.

`facts()` reduces a file to a small value that crosses process borders; `Project` joins those of all linted files (and
of the files that they import). Imports are followed by path, nearest folder first.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from evener.lint.source import last

if TYPE_CHECKING:
    from evener.lint.file import File


@dataclass(frozen=True)
class Call:
    """A call of a function that this file or an imported one may define."""

    callee: str  # dotted, imports resolved: "engine.train_one_epoch", "save_checkpoint", "Trainer.fit"
    caller: str  # qualified name of the function around it, "" at module level
    guard: str  # "one", "others" or "": the rank test around it
    without_grad: bool
    args: tuple[tuple[int | str, frozenset[str]], ...]  # position or keyword -> kinds; "param:x" passes x on


@dataclass(frozen=True)
class Facts:
    path: str
    imports: tuple[str, ...] = ()
    functions: dict[str, tuple[str, ...]] = field(default_factory=dict)  # qualified name -> parameters
    calls: tuple[Call, ...] = ()
    attributes: frozenset[str] = frozenset()  # every attribute that is called: "set_epoch", "no_sync"
    uses: frozenset[str] = frozenset()  # kinds made here ("ddp"), and what it does: "epoch loop", "init"
    saved: frozenset[str] = frozenset()  # what its checkpoints hold: "args", "optimizer", "scaler", "numpy"
    collectives: frozenset[str] = frozenset()  # functions in which every rank communicates
    exports: dict[str, str] = field(default_factory=dict)  # of a package's __init__: name -> where it has it from


def facts(file: File) -> Facts:
    """The small value that stands for a file in the project."""
    uses, saved, collectives = set[str](), set[str](), set[str]()
    calls: list[Call] = []
    own = {one.name for one in [*file.functions(), *file.of(ast.ClassDef)]}
    roots = {"self", *own, *(dotted.partition(".")[0] for dotted in file.aliases.values())} - {"torch"}
    for call in file.of(ast.Call):
        dotted, ctx = file.name(call.func), file.at(call)
        uses |= {kind for kind in file.made(call) if not kind.startswith("param:")}
        if dotted.endswith(("init_process_group", "init_distributed_mode")):
            uses.add("init")
        caller = file.qualname(ctx.function)
        if file.is_collective(call):
            uses.add("collective")
            if ctx.function and not ctx.tests and not ctx.handlers:
                collectives.add(caller)
        if call.args and re.search(r"(^|_)save(_|$)", last(dotted)):  # torch.save, save_checkpoint, save_on_master
            saved |= file.in_checkpoint(call.args[0])
        if dotted and (dotted.partition(".")[0] in roots or dotted.startswith(".")):
            at: list[tuple[int | str, ast.expr]] = [*enumerate(call.args)]
            at += [(one.arg, one.value) for one in call.keywords if one.arg]
            held = tuple((where, kinds) for where, value in at if (kinds := file.kinds(value)))
            calls.append(Call(file.callee(call), caller, file.guard(ctx), file.without_grad(call), held))
    if any(node.attr == "local_rank" and isinstance(node.ctx, ast.Load) for node in file.of(ast.Attribute)):
        uses.add("local_rank")
    if re.search(r"environ.*CUDA_VISIBLE_DEVICES", file.text):
        uses.add("visible")
    if any(file.over_epochs(loop) for loop in file.loops()):
        uses.add("epoch loop")
    functions = {
        file.qualname(one): tuple(arg.arg for arg in [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs])
        for one in file.functions()
    }
    imports = [name.name for node in file.of(ast.Import) for name in node.names]
    for node in file.of(ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        dot = "" if base.endswith(".") else "."
        imports += [base, *(f"{base}{dot}{name.name}" for name in node.names if name.name != "*")]
    return Facts(
        exports=file.aliases if file.path.endswith("__init__.py") else {},
        path=file.path, imports=tuple(dict.fromkeys(imports)), functions=functions, calls=tuple(calls),
        attributes=frozenset(one.func.attr for one in file.of(ast.Call) if isinstance(one.func, ast.Attribute)),
        uses=frozenset(uses), saved=frozenset(saved), collectives=frozenset(collectives),
    )  # fmt: skip


class Project:
    """The facts of many files, and the questions that rules ask of them."""

    def __init__(self, facts: Iterable[Facts]) -> None:
        self.files = {one.path: one for one in facts}
        self._words = {word for path in self.files for word in path.removesuffix(".py").split(os.sep)}
        self._split_of: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._related: dict[str, list[Facts]] = {}
        self.imported: dict[str, set[str]] = {}
        self.importers: dict[str, set[str]] = {path: set() for path in self.files}
        self.callers: defaultdict[tuple[str, str], list[tuple[str, Call]]] = defaultdict(list)
        for path, one in self.files.items():
            targets = {found[0][0] for dotted in one.imports if (found := self._split(path, dotted))} - {path}
            self.imported[path] = targets
            for target in targets:
                self.importers[target].add(path)
            for call in one.calls:
                if called := self.function(path, call.callee):
                    self.callers[called].append((path, call))
        self.collectives = {last(name) for one in self.files.values() for name in one.collectives}
        # (path, function, parameter) -> kinds
        self.held: defaultdict[tuple[str, str, str], frozenset[str]] = defaultdict(frozenset)
        for _ in range(4):  # a kind is passed on over at most so many calls
            if not self._pass_on():
                break

    def _split(self, path: str, dotted: str) -> list[tuple[str, str]]:
        """(file, rest) of every way to read `dotted`, imported in `path`: long modules first, near folders first."""
        bare = dotted.lstrip(".")
        if bare and bare.partition(".")[0] not in self._words:
            return []
        key = (path.rpartition(os.sep)[0], dotted)
        if key not in self._split_of:
            self._split_of[key] = list(self._ways(key[0], dotted, bare))
        return self._split_of[key]

    def _ways(self, folder: str, dotted: str, bare: str) -> Iterator[tuple[str, str]]:
        level = len(dotted) - len(bare)
        for _ in range(level - 1):
            folder = folder.rpartition(os.sep)[0]
        folders = [folder]
        while not level and folder and len(folders) < 24:
            folder = folder.rpartition(os.sep)[0]
            folders += [folder, f"{folder}{os.sep}src" if folder else "src"]
        parts = bare.split(".") if bare else []
        for size in range(len(parts), -1 if level else 0, -1):
            for start in folders:
                stem = os.sep.join([*([start] if start else []), *parts[:size]])
                name = next((one for one in (f"{stem}.py", f"{stem}{os.sep}__init__.py") if one in self.files), None)
                if name:
                    yield name, ".".join(parts[size:])
                    break

    def function(self, path: str, callee: str) -> tuple[str, str] | None:
        """(path, qualified name) of the function that a call means, where it is in the linted files."""
        for target, rest in [(path, callee), *self._split(path, callee)]:
            there = self.files[target]
            for name in (rest, f"{rest}.__init__"):
                if rest and name in there.functions:
                    return target, name
            first, _, more = rest.partition(".")
            passed_on = there.exports.get(first)  # a package that imports it from one of its modules
            if passed_on and target != path:
                return self.function(target, f"{passed_on}.{more}" if more else passed_on)
        return None

    def related(self, path: str) -> list[Facts]:
        """The file, those that import it, directly or not, and what all of them import."""
        if path not in self._related:
            up = _closure({path}, self.importers)
            self._related[path] = [self.files[one] for one in sorted(_closure(up, self.imported))]
        return self._related[path]

    def guards(self, path: str, function: str, depth: int = 4) -> set[str]:
        """The rank tests under which the function is called: {"one"}, {"", "one"}; empty: nobody is seen calling it."""
        seen: set[str] = set()
        for where, call in self.callers.get((path, function), []):
            if call.guard or not depth or not call.caller:
                seen.add(call.guard)
            else:
                seen |= self.guards(where, call.caller, depth - 1) or {""}
        return seen

    def never_needs_grad(self, path: str, function: str) -> bool:
        """Every call that is seen stands under no_grad."""
        calls = self.callers.get((path, function), [])
        return bool(calls) and all(call.without_grad for _, call in calls)

    def _pass_on(self) -> bool:
        changed = False
        for (path, function), calls in self.callers.items():
            names = self.files[path].functions[function]
            positions = names[1:] if names[:1] in (("self",), ("cls",)) else names
            for where, call in calls:
                for at, kinds in call.args:
                    if isinstance(at, int) and at >= len(positions):
                        continue
                    real = {kind for kind in kinds if not kind.startswith("param:")}
                    for kind in kinds - real:
                        real |= self.held[where, call.caller, kind.removeprefix("param:")]
                    key = (path, function, positions[at] if isinstance(at, int) else at)
                    if not real <= self.held[key]:
                        self.held[key] |= real
                        changed = True
        return changed


def _closure(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    found, queue = set(start), list(start)
    while queue:
        fresh = edges[queue.pop()] - found
        found |= fresh
        queue += fresh
    return found
