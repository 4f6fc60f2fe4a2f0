"""What the names of one file hold (DDP models, scalers, samplers, ranks ...), and what its tests say about ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.project import Call, Facts, Project
from evener.lint.source import Context, Function, Loop, Source, Test, last, literal

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
GLOBAL_RANK = re.compile(r"^(global_?rank|world_rank|rank|ddp_rank|distributed_rank|RANK|get_rank|SLURM_PROCID)$")
LOOSE_RANK = re.compile(r"^(gpu|gpu_id|device_id|node_id|local_gpu|proc_id)$")
NO_GRAD = ("torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad", "torch.set_grad_enabled")
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "reduce", "reduce_scatter", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "scatter", "scatter_object_list", "all_to_all",
    "all_to_all_single", "barrier", "monitored_barrier", "reduce_scatter_tensor", "new_group", "all_reduce_coalesced",
}  # fmt: skip


class Names:
    """Answers per file; `project` is None while facts are collected."""

    def __init__(self, source: Source, project: Project | None = None) -> None:
        self.source, self.project = source, project
        self.bound: dict[tuple[object, str], list[tuple[ast.stmt, ast.expr]]] = {}
        self._kinds: dict[ast.expr, frozenset[str]] = {}
        for stmt, target, value in self._bindings():
            self.bound.setdefault((self.scope(target), source.segment(target)), []).append((stmt, value))

    def _bindings(self) -> Iterator[tuple[ast.stmt, ast.expr, ast.expr]]:
        for assign in self.source.of(ast.Assign):
            for target in assign.targets:
                if isinstance(target, ast.Tuple | ast.List):
                    values = assign.value.elts if isinstance(assign.value, ast.Tuple | ast.List) else None
                    if values is not None and len(values) == len(target.elts):
                        yield from ((assign, one, value) for one, value in zip(target.elts, values))
                    else:  # model, optimizer = accelerator.prepare(...); loss, logits = outputs[:2]
                        named = (one for one in target.elts if not isinstance(one, ast.Starred))
                        yield from ((assign, one, assign.value) for one in named)
                else:
                    yield assign, target, assign.value
        for annotated in self.source.of(ast.AnnAssign):
            if annotated.value is not None:
                yield annotated, annotated.target, annotated.value
        for walrus in self.source.of(ast.NamedExpr):
            yield self.source.statement(walrus), walrus.target, walrus.value

    def scope(self, node: ast.expr) -> object:
        """A name belongs to its function, `self.x` to its class, `args.x` to the file."""
        if isinstance(node, ast.Name):
            return self.source.function(node)
        root = node
        while isinstance(root, ast.Attribute | ast.Subscript):
            root = root.value
        if isinstance(root, ast.Name) and root.id == "self":
            return self.source.at(node).owner
        return None

    def values(self, node: ast.expr) -> list[tuple[ast.stmt, ast.expr]]:
        """All that is assigned to this name where it can be seen from here, in source order."""
        text = self.source.segment(node)
        scope = self.scope(node)
        found = self.bound.get((scope, text), [])
        while not found and isinstance(scope, Function):  # the functions around it, then the module
            if isinstance(node, ast.Name) and node.id in self.source.params[scope]:
                return []
            scope = self.source.context[scope].function
            found = self.bound.get((scope, text), [])
        return found

    def now(self, node: ast.expr) -> list[tuple[ast.stmt, ast.expr]]:
        """The values that the name may have at this line: those assigned above, where it belongs to this function."""
        found = self.values(node)
        here = self.source.function(node)
        line = node.lineno
        return [one for one in found if one[0].lineno < line or self.source.function(one[0]) is not here]

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
        if isinstance(node, ast.Name | ast.Attribute):
            found = frozenset[str]().union(*(self.kinds(value) for _, value in self.values(node)))
            function = self.source.function(node)
            while isinstance(node, ast.Name) and function is not None:
                if node.id in self.source.params[function]:
                    if self.project is None:
                        return found | {f"param:{node.id}"}
                    key = (self.source.path, self.source.qualname(function), node.id)
                    return found | self.project.held.get(key, frozenset())
                function = self.source.function(self.source.parent[function])
            return found
        return frozenset()

    def made(self, call: ast.Call) -> frozenset[str]:
        dotted = self.source.name(call.func)
        root, _, rest = dotted.partition(".")
        end = last(dotted)
        if end in MADE and (root in LIBRARIES or (end == "DistributedSampler" and rest)):
            return frozenset({MADE[end]})
        if ".lr_scheduler." in dotted and root == "torch":
            return frozenset({"scheduler"})
        makes = dotted.startswith(("torch.optim.", "apex.optimizers.")) and end[:1].isupper()
        if makes or end in ("AdamW", "FusedAdam"):
            return frozenset({"optimizer"})
        if end in ("create_scheduler", "create_scheduler_v2") or (root == "timm" and "Scheduler" in end):
            return frozenset({"foreign scheduler"})
        if isinstance(call.func, ast.Attribute):
            if end == "prepare" or call.func.attr == "prepare":
                return frozenset({"managed"})
            if SAME.fullmatch(call.func.attr):
                return self.kinds(call.func.value)
        if end == "initialize" and call.args:  # amp.initialize(model, optimizer), deepspeed.initialize
            return frozenset({"managed"}) if root == "deepspeed" else frozenset()
        return frozenset({"device"}) if dotted == "torch.device" else frozenset()

    def holds(self, node: ast.expr, *kinds: str) -> bool:
        return not self.kinds(node).isdisjoint(kinds)

    def is_optimizer(self, node: ast.expr) -> bool:
        kinds = self.kinds(node)
        if kinds & {"scheduler", "plateau", "scaler", "foreign scheduler"}:
            return False
        word = last(self.source.segment(node)).lower()
        return "optimizer" in kinds or (
            bool(re.search(r"optim|(^|_)opt(_|$)|(^|_)opt_?[a-z0-9]$", word)) and "sched" not in word
        )

    def is_scheduler(self, node: ast.expr) -> bool:
        word = last(self.source.segment(node)).lower()
        return self.holds(node, "scheduler", "plateau", "foreign scheduler") or (
            "sched" in word and "profil" not in word and not self.holds(node, "optimizer")
        )

    def is_scaler(self, node: ast.expr) -> bool:
        return self.holds(node, "scaler") or "scaler" in last(self.source.segment(node)).lower()

    # --- ranks ----------------------------------------------------------------------------------------------------
    def is_rank(self, node: ast.AST, pattern: re.Pattern[str] = RANK, depth: int = 3) -> bool:
        """The expression is a rank: by its name, by `get_rank()`, by the environment, or by what was assigned."""
        if isinstance(node, ast.Call):
            if last(self.source.name(node.func)) in ("int", "str") and node.args:
                return self.is_rank(node.args[0], pattern, depth)
            end = last(self.source.name(node.func)) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
            if end in ("getenv", "get") and node.args:
                return bool(pattern.search(str(literal(node.args[0]))))
            return bool(pattern.search(end)) or end == "get_rank"
        if isinstance(node, ast.Subscript):
            return bool(pattern.search(str(literal(node.slice))))
        if isinstance(node, ast.Name | ast.Attribute):
            word = node.id if isinstance(node, ast.Name) else node.attr
            if pattern.search(word):
                return True
            return depth > 0 and any(self.is_rank(value, pattern, depth - 1) for _, value in self.values(node))
        return False

    def one_rank(self, test: ast.expr, wanted: bool = True, depth: int = 3) -> str:
        """Who passes the test: "one" rank (per job or node), the "others", or "" where it says nothing of ranks."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self.one_rank(test.operand, not wanted, depth) or (
                ("one" if wanted else "others") if self.is_rank(test.operand) else ""
            )
        found = ""
        if isinstance(test, ast.BoolOp):
            parts = {self.one_rank(part, True, depth) for part in test.values}
            if isinstance(test.op, ast.And):
                found = "one" if "one" in parts else "others" if "others" in parts else ""
                return found if wanted else ("others" if parts == {"one"} else "")
            found = "one" if "one" in parts else ""  # `not distributed or rank == 0`
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            found = self._compared(test)
        elif isinstance(test, ast.Name | ast.Attribute | ast.Call):
            called = test.func if isinstance(test, ast.Call) else test
            word = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if ONE_RANK.search(word):
                found = "one"
            elif depth and isinstance(test, ast.Name | ast.Attribute):
                found = next((one for _, v in self.values(test) if (one := self.one_rank(v, True, depth - 1))), "")
        if found and not wanted:
            return "others" if found == "one" else "one"
        return found

    def _compared(self, test: ast.Compare) -> str:
        left, right, op = test.left, test.comparators[0], test.ops[0]
        if not self._rank_like(left):
            if not self._rank_like(right) or isinstance(op, ast.In | ast.NotIn):
                return ""
            left, right = right, left
        value = literal(right)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple | ast.Set):
            values = {literal(one) for one in right.elts}
            return ("one" if isinstance(op, ast.In) else "others") if values in ({-1, 0}, {0}, {None, 0}) else ""
        who = {ast.Eq: "one", ast.NotEq: "others"}.get(type(op), "")
        if value is ...:  # rank == dst
            return who if isinstance(right, ast.Name | ast.Attribute) else ""
        if not isinstance(value, int) or value < 0:
            return ""
        bounds = {(ast.LtE, 0): "one", (ast.Lt, 1): "one", (ast.Gt, 0): "others", (ast.GtE, 1): "others"}
        return who or bounds.get((type(op), value), "")

    def _rank_like(self, node: ast.expr) -> bool:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):  # rank % gpus_per_node == 0
            node = node.left
        word = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        return self.is_rank(node) or bool(LOOSE_RANK.search(word))

    def guard(self, ctx: Context) -> str:
        """The rank test around a statement: "one", "others" or ""."""
        return next((who for test in ctx.tests if (who := self.one_rank(test.node, _polarity(test)))), "")

    def without_grad(self, node: ast.AST) -> bool:
        ctx = self.source.at(node)
        if any(isinstance(one, ast.Call) and self.source.name(one.func) in NO_GRAD for one in ctx.withs):
            return True
        function = ctx.function
        while function is not None:
            for mark in function.decorator_list:
                if self.source.name(mark.func if isinstance(mark, ast.Call) else mark) in NO_GRAD:
                    return True
            outer = self.source.context[function].function
            if self.project is not None:
                if self.project.never_needs_grad(self.source.path, self.source.qualname(function)):
                    return True
            function = outer
        return False

    def is_collective(self, call: ast.Call) -> bool:
        """A collective over all ranks. With a group of its own, or of another library, nothing is known."""
        dotted = self.source.name(call.func)
        if last(dotted) not in COLLECTIVES or any(one.arg == "group" for one in call.keywords):
            return False
        return dotted.startswith(("torch.distributed.", "evener.comm."))

    def is_loader(self, node: ast.expr) -> bool:
        """The expression gives batches: a loader, or enumerate/tqdm of one."""
        if isinstance(node, ast.Call) and node.args:
            return any(self.is_loader(arg) for arg in node.args[:2])
        word = last(self.source.segment(node)).lower()
        return self.holds(node, "loader") or bool(re.search(r"loader|(^|_)dl$|prefetcher|_iter(ator)?$|batches", word))


def _polarity(test: Test) -> bool:
    """`wanted` of the node as written: a Test keeps the polarity of its positive text."""
    node = test.node
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotEq):
        return not test.wanted
    return test.wanted


def loops_over_epochs(names: Names, loop: Loop) -> bool:
    """An epoch loop: it is called so, or it goes over a loader again and again."""
    text = names.source.segment(loop.iter if not isinstance(loop, ast.While) else loop.test).lower()
    target = "" if isinstance(loop, ast.While) else names.source.segment(loop.target).lower()
    if "epoch" in text + target and not (not isinstance(loop, ast.While) and names.is_loader(loop.iter)):
        return True
    forever = isinstance(loop, ast.While)
    return forever and any(isinstance(n, ast.For) and names.is_loader(n.iter) for n in loop.body)


def facts(source: Source) -> Facts:
    """The small value that stands for a file in the project."""
    names = Names(source)
    uses: set[str] = set()
    attributes: set[str] = set()
    calls: list[Call] = []
    collectives: set[str] = set()
    saved: set[str] = set()
    own = {one.name for one in [*source.functions(), *source.of(ast.ClassDef)]}
    roots = {dotted.partition(".")[0] for dotted in source.aliases.values()}
    for call in source.of(ast.Call):
        if isinstance(call.func, ast.Attribute):
            attributes.add(call.func.attr)
        dotted = source.name(call.func)
        uses |= {kind for kind in names.made(call) if not kind.startswith("param:")}
        if dotted.endswith(("init_process_group", "init_distributed_mode")):
            uses.add("init")
        ctx = source.at(call)
        if names.is_collective(call):
            uses.add("collective")
            if ctx.function and not ctx.tests and not ctx.handlers:
                collectives.add(source.qualname(ctx.function))
        if call.args and re.search(r"(^|_)save(_|$)", last(dotted)):  # torch.save, save_checkpoint, save_on_master
            saved |= set(in_checkpoint(names, call.args[0]))
        root = dotted.partition(".")[0]
        known = root in own or root == "self" or dotted.startswith(".") or root in roots
        if not dotted or root == "torch" or not known:
            continue
        owner = ctx.owner
        callee = f"{owner.name}.{last(dotted)}" if owner and dotted == f"self.{last(dotted)}" else dotted
        at: list[tuple[int | str, frozenset[str]]] = [(i, names.kinds(arg)) for i, arg in enumerate(call.args)]
        at += [(one.arg, names.kinds(one.value)) for one in call.keywords if one.arg]
        held = tuple((where, kinds) for where, kinds in at if kinds)
        caller = source.qualname(ctx.function)
        calls.append(Call(callee, caller, names.guard(ctx), names.without_grad(call), held))
    if any(node.attr == "local_rank" and isinstance(node.ctx, ast.Load) for node in source.of(ast.Attribute)):
        uses.add("local_rank")
    uses |= {"epoch loop" for loop in source.loops() if loops_over_epochs(names, loop)}
    functions = {
        source.qualname(one): tuple(arg.arg for arg in [*one.args.posonlyargs, *one.args.args, *one.args.kwonlyargs])
        for one in source.functions()
    }
    imports = [name.name for node in source.of(ast.Import) for name in node.names]
    for node in source.of(ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        dot = "" if base.endswith(".") else "."
        imports += [base, *(f"{base}{dot}{name.name}" for name in node.names if name.name != "*")]
    return Facts(
        exports=source.aliases if source.path.endswith("__init__.py") else {},
        path=source.path, imports=tuple(dict.fromkeys(imports)), functions=functions, calls=tuple(calls),
        attributes=frozenset(attributes), uses=frozenset(uses), saved=frozenset(saved),
        collectives=frozenset(collectives),
    )  # fmt: skip


def entries(names: Names, node: ast.expr, depth: int = 2) -> Iterator[tuple[str, ast.expr]]:
    """(key, value) of the dict that is saved: a display, dict(...), a name bound to one, or filled key by key."""
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values):
            if key is None:
                yield from entries(names, value, depth - 1)
            else:
                yield str(literal(key)), value
    elif isinstance(node, ast.Call) and names.source.name(node.func) == "dict":
        yield from ((one.arg, one.value) for one in node.keywords if one.arg)
    elif isinstance(node, ast.Call) and last(names.source.name(node.func)) == "deepcopy" and node.args:
        yield from entries(names, node.args[0], depth)
    elif isinstance(node, ast.Name) and depth:
        for _, value in names.values(node):
            yield from entries(names, value, depth - 1)
        for (_, text), bound in names.bound.items():  # state["args"] = args
            for stmt, value in bound:
                if text.startswith(f"{node.id}[") and names.source.function(stmt) is names.source.function(node):
                    yield text[len(node.id) + 1 : -1].strip("'\""), value


def in_checkpoint(names: Names, node: ast.expr) -> Iterator[str]:
    """What a saved object holds, in words that rules ask for."""
    for key, value in entries(names, node):
        yield "parts"
        text = names.source.segment(value)
        if literal(value) is None:
            continue
        if re.search(r"\bscaler\b.*state_dict|amp\.state_dict", text) or "scaler" in key or key == "amp":
            yield "scaler"
        elif re.search(r"optim\w*(\[.*\])?\.state_dict|\bopt\w*\.state_dict", text) or key in ("optimizer", "optim"):
            yield "optimizer"
        elif isinstance(value, ast.Name | ast.Attribute) and re.fullmatch(
            r"(self\.)?(args|opt|hparams|config|cfg|opts|flags)", text
        ):
            yield from ("args" for _ in range(_is_namespace(names, value, key)))
        elif names.source.name(value.func if isinstance(value, ast.Call) else value).startswith("numpy."):
            yield "numpy"


def _is_namespace(names: Names, node: ast.expr, key: str) -> bool:
    """An argparse namespace or a configuration object, and not a plain dict."""
    for _, value in names.values(node):
        if isinstance(value, ast.Dict | ast.Constant):
            return False
        plain = ("vars", "dict", "asdict", "to_dict", "load")
        if isinstance(value, ast.Call) and last(names.source.name(value.func)) in plain:
            return False
    return True
