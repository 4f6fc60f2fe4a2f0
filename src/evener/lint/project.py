"""What one file needs to know of the others: who calls whom, under which rank test, with what in its hands.

`facts()` reduces a file to a small value that crosses process borders; `Project` joins those of all linted files (and
of the files that they import). Imports are followed by path, nearest folder first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


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
    saved: frozenset[str] = frozenset()  # what its checkpoints hold: "args", "optimizer", "scaler", "numpy", "module"
    collectives: frozenset[str] = frozenset()  # functions in which every rank communicates
    exports: dict[str, str] = field(default_factory=dict)  # of a package's __init__: name -> where it has it from


class Project:
    """The facts of many files, and the questions that rules ask of them."""

    def __init__(self, facts: Iterable[Facts]) -> None:
        self.files = {one.path: one for one in facts}
        self._words = {word for path in self.files for word in path.removesuffix(".py").split(os.sep)}
        self._split_of: dict[tuple[str, str], list[tuple[str, str]]] = {}
        self._related: dict[str, list[Facts]] = {}
        self.imported: dict[str, set[str]] = {}
        self.importers: dict[str, set[str]] = {path: set() for path in self.files}
        for path, one in self.files.items():
            targets = {found[0][0] for dotted in one.imports if (found := self._split(path, dotted))} - {path}
            self.imported[path] = targets
            for target in targets:
                self.importers[target].add(path)
        self.callers: dict[tuple[str, str], list[tuple[str, Call]]] = {}
        for path, one in self.files.items():
            for call in one.calls:
                target_function = self.function(path, call.callee)
                if target_function:
                    self.callers.setdefault(target_function, []).append((path, call))
        self.collectives = {name.rpartition(".")[2] for one in self.files.values() for name in one.collectives}
        self.held: dict[tuple[str, str, str], frozenset[str]] = {}  # (path, function, parameter) -> kinds
        for _ in range(4):  # a kind is passed on over at most so many calls
            if not self._pass_on():
                break

    def _split(self, path: str, dotted: str) -> list[tuple[str, str]]:
        """(file, rest) of every way to read `dotted`, imported in `path`: long modules first, near folders first."""
        bare = dotted.lstrip(".")
        if bare and bare.partition(".")[0] not in self._words:
            return []
        folder = path.rpartition(os.sep)[0]
        key = (folder, dotted)
        if key not in self._split_of:
            self._split_of[key] = list(self._ways(folder, dotted, bare))
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
        own = self.files[path].functions
        if callee in own:
            return path, callee
        if f"{callee}.__init__" in own:
            return path, f"{callee}.__init__"
        for target, rest in self._split(path, callee):
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

    def uses(self, path: str, *kinds: str) -> bool:
        return any(not one.uses.isdisjoint(kinds) for one in self.related(path))

    def calls(self, path: str, *attributes: str) -> bool:
        return any(not one.attributes.isdisjoint(attributes) for one in self.related(path))

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
            for where, call in calls:
                for at, kinds in call.args:
                    if isinstance(at, int):
                        at += 1 if names[:1] in (("self",), ("cls",)) else 0
                        if at >= len(names):
                            continue
                        at = names[at]
                    real = {kind for kind in kinds if not kind.startswith("param:")}
                    for kind in kinds - real:
                        real |= self.held.get((where, call.caller, kind.removeprefix("param:")), frozenset())
                    key = (path, function, at)
                    if not real <= self.held.get(key, frozenset()):
                        self.held[key] = self.held.get(key, frozenset()) | real
                        changed = True
        return changed


def _closure(start: set[str], edges: dict[str, set[str]]) -> set[str]:
    found, queue = set(start), list(start)
    while queue:
        fresh = edges[queue.pop()] - found
        found |= fresh
        queue += fresh
    return found
