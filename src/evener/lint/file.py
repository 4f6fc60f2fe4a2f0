"""A file under check: what its names hold (DDP models, scalers, samplers, ranks ...), what its tests say about ranks,
the order of its events, and the project around it. Every rule asks here.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from evener.lint.events import Event, Window, event, exclusive, windows
from evener.lint.project import Project
from evener.lint.source import Context, Function, Loop, Source, Test, keyword, last, literal, method

# the last word of a constructor's name -> what it makes. The name must come from torch, apex or a library around it.
MADE = {
    "DistributedDataParallel": "ddp", "DDP": "ddp", "DataParallel": "dp", "FullyShardedDataParallel": "fsdp",
    "GradScaler": "scaler", "ShardedGradScaler": "scaler", "DistributedSampler": "sampler", "DataLoader": "loader",
    "device": "device", "Accelerator": "accelerator", "ReduceLROnPlateau": "plateau", "Generator": "generator",
    "Fabric": "accelerator", "StatefulDataLoader": "loader",
}  # fmt: skip
LIBRARIES = ("torch", "apex", "accelerate", "torchdata", "lightning", "torchft")
SAME = re.compile(r"to|cuda|cpu|half|float|bfloat16|train|eval|double")  # x.to(device) is what x is
ONE_RANK = re.compile(
    r"(^|_|\b)(is_)?((local_|global_|world_)?(main|master|primary|chief|root|first)(_local)?(_process|_rank|_worker|_proc|_node)?"
    r"|rank_?(0|zero)|global_zero|(local_|world_)?process_zero|logger_rank)$",
    re.IGNORECASE,
)
RANK = re.compile(r"(^|_)(rank|rank_id|process_index)$|^(RANK|SLURM_PROCID|LOCAL_RANK|OMPI_COMM_WORLD_RANK)$", re.I)
LOOSE_RANK = re.compile(r"^(gpu|gpu_id|device_id|node_id|local_gpu|proc_id)$")
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.set_grad_enabled")
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce", "reduce_scatter", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter_tensor", "new_group", "all_reduce_coalesced",
}  # fmt: skip
Bound = list[tuple[ast.stmt, ast.expr]]
FLIPPED = {"one": "others", "others": "one", "": ""}


class File(Source):
    """`project` is None while the facts of the file are collected."""

    def __init__(self, path: str, data: bytes, project: Project | None = None) -> None:
        super().__init__(path, data)
        self._project = project
        self.bound: defaultdict[tuple[object, str], Bound] = defaultdict(list)
        self._kinds: dict[ast.expr, frozenset[str]] = {}
        for stmt, target, value in self._bindings():
            self.bound[self.scope(target), self.segment(target)].append((stmt, value))

    @property
    def project(self) -> Project:
        assert self._project is not None
        return self._project

    def join(self, project: Project) -> None:
        """From now on it knows the other files: what its parameters hold is another answer."""
        self._project, self._kinds = project, {}

    # --- what names hold ------------------------------------------------------------------------------------------
    def _bindings(self) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr]]:
        for assign in self.of(ast.Assign):
            for target in assign.targets:
                if not isinstance(target, ast.Tuple | ast.List):
                    yield assign, target, assign.value
                    continue
                values = assign.value.elts if isinstance(assign.value, ast.Tuple | ast.List) else []
                if len(values) == len(target.elts):
                    yield from ((assign, one, value) for one, value in zip(target.elts, values))
                else:  # model, optimizer = accelerator.prepare(...); loss, logits = outputs[:2]
                    yield from ((assign, one, assign.value) for one in target.elts if not isinstance(one, ast.Starred))
        for annotated in self.of(ast.AnnAssign):
            if annotated.value is not None:
                yield annotated, annotated.target, annotated.value
        for walrus in self.of(ast.NamedExpr):
            yield self.statement(walrus), walrus.target, walrus.value

    def scope(self, node: ast.expr) -> object:
        """A name belongs to its function, `self.x` to its class, `args.x` to the file."""
        if isinstance(node, ast.Name):
            return self.function(node)
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        return self.at(node).owner if isinstance(root, ast.Name) and root.id == "self" else None

    def bindings(self, node: ast.expr) -> Bound:
        """(statement, value) of all that is assigned to this name where it can be seen from here, in source order."""
        text, scope = self.segment(node), self.scope(node)
        found = self.bound.get((scope, text), [])
        while not found and isinstance(scope, Function):  # the functions around it, then the module
            if isinstance(node, ast.Name) and node.id in self.params[scope]:
                return []
            scope = self.context[scope].function
            found = self.bound.get((scope, text), [])
        return found

    def values(self, node: ast.expr) -> list[ast.expr]:
        return [value for _, value in self.bindings(node)]

    def latest(self, node: ast.expr, line: int) -> list[ast.expr]:
        """The value assigned last down to this line, in a list; nothing where there is none."""
        return [value for stmt, value in self.bindings(node) if stmt.lineno <= line][-1:]

    def now(self, node: ast.expr) -> Bound:
        """What the name may be bound to at this line: above, where it belongs to this function."""
        here = self.function(node)
        return [one for one in self.bindings(node) if one[0].lineno < node.lineno or self.function(one[0]) is not here]

    def kinds(self, node: ast.expr) -> frozenset[str]:
        """What the expression may hold; empty where nothing is known."""
        if node not in self._kinds:
            self._kinds[node] = frozenset()  # ends a circle: model = wrap(model)
            self._kinds[node] = self._find(node)
        return self._kinds[node]

    def _find(self, node: ast.expr) -> frozenset[str]:
        if isinstance(node, ast.Call):
            return self.made(node)
        if isinstance(node, ast.IfExp):
            if any(isinstance(one, ast.Attribute) and one.attr == "module" for one in (node.body, node.orelse)):
                return frozenset()  # model.module if hasattr(model, "module") else model
            return self.kinds(node.body) | self.kinds(node.orelse)
        if not isinstance(node, ast.Name | ast.Attribute):
            return frozenset()
        found = frozenset[str]().union(*map(self.kinds, self.values(node)))
        if isinstance(node, ast.Name) and (function := self.is_param(node)):
            if self._project is None:
                return found | {f"param:{node.id}"}
            found |= self._project.held.get((self.path, self.qualname(function), node.id), frozenset())
        return found

    def made(self, call: ast.Call) -> frozenset[str]:
        dotted = self.name(call.func)
        root, _, rest = dotted.partition(".")
        end = last(dotted)
        kind = ""
        if end in MADE and (root in LIBRARIES or (end == "DistributedSampler" and rest)):
            kind = MADE[end]
        elif ".lr_scheduler." in dotted and root == "torch":
            kind = "scheduler"
        elif end in ("AdamW", "FusedAdam") or (
            dotted.startswith(("torch.optim.", "apex.optimizers.")) and end[:1].isupper()
        ):
            kind = "optimizer"
        elif end in ("create_scheduler", "create_scheduler_v2") or (root == "timm" and "Scheduler" in end):
            kind = "foreign scheduler"
        elif method(call, "prepare") or (end == "initialize" and call.args and root == "deepspeed"):
            kind = "managed"
        elif isinstance(call.func, ast.Attribute) and SAME.fullmatch(call.func.attr):
            return self.kinds(call.func.value)
        return frozenset({kind} if kind else ())

    def holds(self, node: ast.expr, *kinds: str) -> bool:
        return not self.kinds(node).isdisjoint(kinds)

    def word(self, node: ast.expr) -> str:
        return last(self.segment(node)).lower()

    def is_optimizer(self, node: ast.expr) -> bool:
        if self.holds(node, "scheduler", "plateau", "scaler", "foreign scheduler"):
            return False
        word = self.word(node)
        named = re.search(r"optim|(^|_)opt(_|$)|(^|_)opt_?[a-z0-9]$", word) and "sched" not in word
        return bool(named) or self.holds(node, "optimizer")

    def is_scheduler(self, node: ast.expr) -> bool:
        word = self.word(node)
        named = "sched" in word and "profil" not in word and not self.holds(node, "optimizer")
        return named or self.holds(node, "scheduler", "plateau", "foreign scheduler")

    def is_scaler(self, node: ast.expr) -> bool:
        return "scaler" in self.word(node) or self.holds(node, "scaler")

    def is_loader(self, node: ast.expr) -> bool:
        """The expression gives batches: a loader, or enumerate/tqdm of one."""
        if isinstance(node, ast.Call) and node.args:
            return any(self.is_loader(arg) for arg in node.args[:2])
        named = re.search(r"loader|(^|_)dl$|prefetcher|_iter(ator)?$|batches", self.word(node))
        return bool(named) or self.holds(node, "loader")

    def is_collective(self, call: ast.Call) -> bool:
        """A collective over all ranks. With a group of its own, or of another library, nothing is known."""
        dotted = self.name(call.func)
        known = last(dotted) in COLLECTIVES and dotted.startswith(("torch.distributed.", "evener.comm."))
        return known and keyword(call, "group") is None

    def callee(self, call: ast.Call) -> str:
        """The dotted name of what is called; a method of the own class by the class's name."""
        dotted, owner = self.name(call.func), self.at(call).owner
        return f"{owner.name}.{last(dotted)}" if owner and dotted == f"self.{last(dotted)}" else dotted

    def over_epochs(self, loop: Loop) -> bool:
        """An epoch loop: it is called so, or it goes over a loader again and again."""
        if isinstance(loop, ast.While):
            inner = any(isinstance(one, ast.For) and self.is_loader(one.iter) for one in loop.body)
            return inner or "epoch" in self.segment(loop.test).lower()
        named = "epoch" in f"{self.segment(loop.iter)} {self.segment(loop.target)}".lower()
        return named and not self.is_loader(loop.iter)

    # --- ranks ----------------------------------------------------------------------------------------------------
    def is_rank(self, node: ast.AST, pattern: re.Pattern[str] = RANK, depth: int = 3) -> bool:
        """The expression is a rank: by its name, by `get_rank()`, by the environment, or by what was assigned."""
        if isinstance(node, ast.Call):
            end = last(self.name(node.func)) or getattr(node.func, "attr", "")
            if node.args and end in ("int", "str"):
                return self.is_rank(node.args[0], pattern, depth)
            if node.args and end in ("getenv", "get"):
                return bool(pattern.search(str(literal(node.args[0]))))
            return bool(pattern.search(end)) or end == "get_rank"
        if isinstance(node, ast.Subscript):
            return bool(pattern.search(str(literal(node.slice))))
        if not isinstance(node, ast.Name | ast.Attribute):
            return False
        named = pattern.search(node.id if isinstance(node, ast.Name) else node.attr)
        return bool(named) or (depth > 0 and any(self.is_rank(one, pattern, depth - 1) for one in self.values(node)))

    def one_rank(self, test: ast.expr, wanted: bool = True, depth: int = 3) -> str:
        """Who passes the test: "one" rank (per job or node), the "others", or "" where it says nothing of ranks."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            who = self.one_rank(test.operand, not wanted, depth)
            return who or (("one" if wanted else "others") if self.is_rank(test.operand) else "")
        found = ""
        if isinstance(test, ast.BoolOp):
            parts = {self.one_rank(part, True, depth) for part in test.values}
            found = "one" if "one" in parts else ""  # `not distributed or rank == 0`
            if isinstance(test.op, ast.And):
                if not wanted:
                    return "others" if parts == {"one"} else ""
                return found or ("others" if "others" in parts else "")
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            found = self._compared(test)
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call):
            called = test.func if isinstance(test, ast.Call) else test
            if ONE_RANK.search(called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")):
                found = "one"
            elif depth and not isinstance(test, ast.Call):
                found = next((one for v in self.values(test) if (one := self.one_rank(v, True, depth - 1))), "")
        return found if wanted else FLIPPED[found]

    def _compared(self, test: ast.Compare) -> str:
        left, right, op = test.left, test.comparators[0], test.ops[0]
        listed = isinstance(op, ast.In | ast.NotIn)
        if not self._rank_like(left):
            if not self._rank_like(right) or listed:
                return ""
            left, right = right, left
        who = "one" if isinstance(op, ast.Eq | ast.In) else "others"
        if listed and isinstance(right, ast.List | ast.Tuple | ast.Set):
            return who if {literal(one) for one in right.elts} in ({-1, 0}, {0}, {None, 0}) else ""
        value = literal(right)
        equal = isinstance(op, ast.Eq | ast.NotEq)
        if value is ...:  # rank == dst
            return who if equal and isinstance(right, ast.Name | ast.Attribute) else ""
        if not isinstance(value, int) or value < 0:
            return ""
        bounds = {(ast.LtE, 0): "one", (ast.Lt, 1): "one", (ast.Gt, 0): "others", (ast.GtE, 1): "others"}
        return who if equal else bounds.get((type(op), value), "")

    def _rank_like(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # rank % gpus_per_node == 0
            node = node.left
        word = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
        return self.is_rank(node) or bool(LOOSE_RANK.search(word))

    def guard(self, where: ast.AST | Context) -> str:
        """The rank test around it: "one", "others" or ""."""
        tests = (self.at(where) if isinstance(where, ast.AST) else where).tests
        return next((who for test in tests if (who := self.one_rank(test.node, _polarity(test)))), "")

    def without_grad(self, node: ast.AST) -> bool:
        ctx = self.at(node)
        marks = [one.func for one in ctx.withs if isinstance(one, ast.Call)]
        function = ctx.function
        while function is not None:
            marks += [one.func if isinstance(one, ast.Call) else one for one in function.decorator_list]
            if self._project and self._project.never_needs_grad(self.path, self.qualname(function)):
                return True
            function = self.context[function].function
        return any(self.name(one) in NO_GRAD for one in marks)

    # --- calls and events -----------------------------------------------------------------------------------------
    @cached_property
    def _calls(self) -> dict[str, list[ast.Call]]:
        found = defaultdict(list)
        for call in self.of(ast.Call):
            found[self.name(call.func)].append(call)
        return found

    def calls_of(self, *dotted: str) -> list[ast.Call]:
        return [call for name in dotted for call in self._calls.get(name, ())]

    def making(self, kind: str) -> list[ast.Call]:
        """The calls that make such a thing: a DDP model, a loader."""
        return [call for call in self.of(ast.Call) if kind in self.kinds(call)]

    def methods(self, *words: str) -> Iterator[tuple[ast.Call, ast.Attribute]]:
        """(call, function) of every `x.word(...)`."""
        return ((call, func) for call in self.of(ast.Call) if (func := method(call, *words)))

    @cached_property
    def references(self) -> list[tuple[ast.Attribute | ast.Name, str]]:
        """(node, dotted name) of every longest dotted name of torch and Apex that is read."""
        nodes: list[ast.Attribute | ast.Name] = [*self.of(ast.Attribute), *self.of(ast.Name)]
        named = ((one, self.name(one)) for one in nodes if isinstance(one.ctx, ast.Load))
        return [
            (node, dotted) for node, dotted in named
            if dotted.startswith(("torch.", "apex.")) and not isinstance(self.parent[node], ast.Attribute)
        ]  # fmt: skip

    @cached_property
    def imported(self) -> list[tuple[ast.Import | ast.ImportFrom, ast.alias, str]]:
        """(statement, alias, dotted name) of everything that is imported."""
        plain = [(stmt, alias, alias.name) for stmt in self.of(ast.Import) for alias in stmt.names]
        taken = [stmt for stmt in self.of(ast.ImportFrom) if not stmt.level]
        return [*plain, *((stmt, alias, f"{stmt.module}.{alias.name}") for stmt in taken for alias in stmt.names)]

    def environment(self, *names: str) -> Iterator[tuple[ast.Assign, ast.Subscript, str]]:
        """(statement, target, name) of every `os.environ["NAME"] = value`."""
        for assign in self.of(ast.Assign):
            target = assign.targets[0]
            if isinstance(target, ast.Subscript) and self.name(target.value) in ("os.environ", "environ"):
                if (name := literal(target.slice)) in names:
                    yield assign, target, str(name)

    @cached_property
    def events(self) -> list[list[Event]]:
        """Per function (or the module's own lines) that has a backward or a step, its events in source order."""
        found: defaultdict[Function | None, list[Event]] = defaultdict(list)
        functions = {self.function(call): None for call, _ in self.methods("backward", "step")}
        for call in self.of(ast.Call) if functions else ():
            if (function := self.function(call)) in functions and (one := event(self, call)):
                found[function].append(one)
        return [sorted(found[one], key=lambda one: one.place) for one in functions if found[one]]

    @cached_property
    def windows(self) -> list[Window]:
        return [window for events in self.events for window in windows(self, events)]

    @cached_property
    def backwards(self) -> list[Event]:
        return [one for events in self.events for one in events if one.kind == "backward"]

    def moments(self, *kinds: str) -> Iterator[tuple[Event, list[Event], list[Event]]]:
        """Every event of these kinds with its function's events before and after it, without those that exclude it."""
        for events in self.events:
            for one in [one for one in events if one.kind in kinds]:
                others = [other for other in events if not exclusive(other, one)]
                yield one, [o for o in others if o.place < one.place], [o for o in others if o.place > one.place]

    # --- the files around it --------------------------------------------------------------------------------------
    def uses(self, *kinds: str) -> bool:
        """This file, one that imports it or one imported by those makes such a thing."""
        return any(not one.uses.isdisjoint(kinds) for one in self.project.related(self.path))

    def calls(self, *attributes: str) -> bool:
        """The same files call such a method."""
        return any(not one.attributes.isdisjoint(attributes) for one in self.project.related(self.path))

    # --- what is saved --------------------------------------------------------------------------------------------
    def entries(self, node: ast.expr, depth: int = 2) -> Iterator[tuple[str, ast.expr]]:
        """(key, value) of the dict that is saved: a display, dict(...), a name bound to one, or filled key by key."""
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                yield from self.entries(value, depth - 1) if key is None else [(str(literal(key)), value)]
        elif isinstance(node, ast.Call) and self.name(node.func) == "dict":
            yield from ((one.arg, one.value) for one in node.keywords if one.arg)
        elif isinstance(node, ast.Call) and last(self.name(node.func)) == "deepcopy" and node.args:
            yield from self.entries(node.args[0], depth)
        elif isinstance(node, ast.Name) and depth:
            for value in self.values(node):
                yield from self.entries(value, depth - 1)
            for (_, text), bound in self.bound.items():  # state["args"] = args
                for stmt, value in bound if text.startswith(f"{node.id}[") else ():
                    if self.function(stmt) is self.function(node):
                        yield text[len(node.id) + 1 : -1].strip("'\""), value

    def in_checkpoint(self, node: ast.expr) -> set[str]:
        """What a saved object holds, in words that rules ask for."""
        found = set()
        for key, value in self.entries(node):
            text = self.segment(value)
            if literal(value) is None:
                continue
            if re.search(r"\bscaler\b.*state_dict|amp\.state_dict", text) or "scaler" in key or key == "amp":
                found.add("scaler")
            elif key in ("optimizer", "optim") or re.search(r"(optim\w*(\[.*\])?|\bopt\w*)\.state_dict", text):
                found.add("optimizer")
            elif re.fullmatch(r"(self\.)?(args|opt|hparams|config|cfg|opts|flags)", text):
                if not any(self._is_plain(one) for one in self.values(value)):
                    found.add("args")
            elif self.name(value.func if isinstance(value, ast.Call) else value).startswith("numpy."):
                found.add("numpy")
        return found

    def _is_plain(self, value: ast.expr) -> bool:
        """A dict, and no argparse namespace or configuration object."""
        called = last(self.name(value.func)) if isinstance(value, ast.Call) else ""
        return isinstance(value, ast.Dict | ast.Constant) or called in ("vars", "dict", "asdict", "to_dict", "load")


def _polarity(test: Test) -> bool:
    """`wanted` of the node as written: a Test keeps the polarity of its positive text."""
    node = test.node
    return test.wanted != (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotEq))
