"""One parsed file: its tree, what surrounds every statement, its names with imports resolved, its text.

Offsets are bytes of the UTF-8 text, as in `ast`. Nothing here runs the code it reads.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
Loop = ast.For | ast.AsyncFor | ast.While
IGNORE = re.compile(r"#\s*evener:\s*ignore(-file)?(?:\[([^\]]*)\])?")
BARE = frozenset({ast.Name, ast.Constant, ast.alias, ast.Pass})  # nodes without nodes of interest below
NO_NODES = frozenset({"ctx", "op", "ops", "attr", "id", "arg", "name", "kind", "type_comment"})


class Test(NamedTuple):
    """A condition that holds where a statement runs: `node` is true (or false, where `wanted` is False)."""

    node: ast.expr
    wanted: bool
    text: str  # of the positive form, so that `x is None` and `x is not None` have one text


class Context(NamedTuple):
    """What surrounds a statement, inside its function."""

    function: Function | None = None
    owner: ast.ClassDef | None = None
    tests: tuple[Test, ...] = ()
    loops: tuple[Loop, ...] = ()
    withs: tuple[ast.expr, ...] = ()
    handlers: tuple[ast.ExceptHandler, ...] = ()


class Source:
    """A file that parses. `SyntaxError` (with line and text) from the constructor where it does not."""

    def __init__(self, path: str, data: bytes) -> None:
        self.path = path
        self.encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        self.text = data.decode(self.encoding)
        self.data = self.text.encode()
        self.tree = ast.parse(self.text)
        self.lines = self.data.splitlines(keepends=True) or [b""]
        self.newline = "\r\n" if self.lines[0].endswith(b"\r\n") else "\n"
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.parent: dict[ast.AST, ast.AST] = {}
        self.context: dict[ast.stmt, Context] = {}
        self.by_type: defaultdict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self.aliases: dict[str, str] = {}
        self.params: dict[Function, set[str]] = {}
        self._resolved: dict[ast.AST, str] = {}
        self._block(self.tree.body, Context(), self.tree)
        self._imports()

    # --- the walk -------------------------------------------------------------------------------------------------
    def _block(self, body: list[ast.stmt], ctx: Context, parent: ast.AST) -> None:
        for stmt in body:
            self.parent[stmt], self.context[stmt] = parent, ctx
            self.by_type[type(stmt)].append(stmt)
            below: list[ast.AST] = []
            blocks: list[tuple[str, list[ast.stmt]]] = []
            for name in stmt._fields:
                value = getattr(stmt, name, None)
                if isinstance(value, ast.AST):
                    below.append(value)
                elif isinstance(value, list) and value:
                    if isinstance(value[0], ast.stmt):
                        blocks.append((name, value))
                    elif isinstance(value[0], ast.match_case):
                        blocks += [("case", case.body) for case in value]
                    elif not isinstance(value[0], ast.ExceptHandler):
                        below += [one for one in value if isinstance(one, ast.AST)]
            self._expressions(stmt, below)
            if not blocks:
                continue
            inner = self._inside(stmt, ctx)
            for name, block in blocks:
                self._block(block, inner.get(name, ctx), stmt)
                if isinstance(stmt, ast.Try | ast.TryStar) and name == "body":
                    for handler in stmt.handlers:
                        self._expressions(stmt, [handler], walk=False)
                        self._expressions(handler, [handler.type] if handler.type else [])
                        self._block(handler.body, ctx._replace(handlers=(*ctx.handlers, handler)), handler)
            if isinstance(stmt, ast.If) and (leaves(stmt.body) or leaves(stmt.orelse)):
                ctx = inner["orelse" if leaves(stmt.body) else "body"]

    def _inside(self, stmt: ast.stmt, ctx: Context) -> dict[str, Context]:
        """What surrounds the statements of a block, where it is not what surrounds the statement itself."""
        if isinstance(stmt, Function):
            args = stmt.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            self.params[stmt] = {arg.arg for arg in named if arg}
            return {"body": Context(stmt, ctx.owner)}
        if isinstance(stmt, ast.ClassDef):
            return {"body": Context(ctx.function, stmt)}
        if isinstance(stmt, ast.If):
            both = (("body", True), ("orelse", False))
            return {name: ctx._replace(tests=(*ctx.tests, *self.conjuncts(stmt.test, wanted))) for name, wanted in both}
        if isinstance(stmt, Loop):
            return {"body": ctx._replace(loops=(*ctx.loops, stmt))}
        if isinstance(stmt, ast.With | ast.AsyncWith):
            return {"body": ctx._replace(withs=(*ctx.withs, *(item.context_expr for item in stmt.items)))}
        return {}

    def _expressions(self, parent: ast.AST, nodes: list[ast.AST], walk: bool = True) -> None:
        by_type, parents = self.by_type, self.parent
        for node in nodes:
            parents[node] = parent
        stack = nodes[::-1]
        while stack:
            node = stack.pop()
            kind = node.__class__
            by_type[kind].append(node)
            if kind in BARE or not walk:
                continue
            below: list[ast.AST] = []
            for name in node._fields:
                if name not in NO_NODES:
                    value = getattr(node, name, None)
                    if value.__class__ is list:
                        below += [one for one in value if isinstance(one, ast.AST)]
                    elif isinstance(value, ast.AST):
                        below.append(value)
            for child in below:
                parents[child] = node
            stack += below[::-1]

    def conjuncts(self, test: ast.expr, wanted: bool) -> Iterator[Test]:
        """The parts that all hold when `test` is `wanted`; one Test of the whole where it cannot be split."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield from self.conjuncts(test.operand, not wanted)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == wanted:
            for part in test.values:
                yield from self.conjuncts(part, wanted)
        else:
            text = self.segment(test)
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot | ast.NotEq):
                text, wanted = text.replace(" is not ", " is ").replace("!=", "=="), not wanted
            if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Is | ast.IsNot):
                if literal(test.comparators[0]) is None:  # `x is None` is `not x` here
                    text, wanted = self.segment(test.left), not wanted
            yield Test(test, wanted, text)

    def _imports(self) -> None:
        for node in self.of(ast.Import):
            for name in node.names:
                root = name.name.split(".")[0]
                self.aliases[name.asname or root] = name.name if name.asname else root
        for source in self.of(ast.ImportFrom):
            base = "." * source.level + (source.module or "")
            joint = "" if base.endswith(".") or not base else "."
            for name in source.names:
                self.aliases.setdefault(name.asname or name.name, f"{base}{joint}{name.name}")
        for assign in self.of(ast.Assign):  # DDP = torch.nn.parallel.DistributedDataParallel
            target = assign.targets[0]
            if isinstance(target, ast.Name) and isinstance(assign.value, ast.Attribute):
                dotted = self.name(assign.value)
                if dotted.startswith(("torch.", "apex.")) and last(dotted)[:1].isupper():
                    self.aliases.setdefault(target.id, dotted)

    # --- questions ------------------------------------------------------------------------------------------------
    def of(self, kind: type[Node]) -> list[Node]:
        """All nodes of one type, in source order within each statement."""
        return self.by_type[kind]  # type: ignore[return-value]

    def functions(self) -> list[Function]:
        return [*self.of(ast.FunctionDef), *self.of(ast.AsyncFunctionDef)]

    def loops(self) -> list[Loop]:
        return [*self.of(ast.For), *self.of(ast.AsyncFor), *self.of(ast.While)]

    def name(self, node: ast.AST | None) -> str:
        """The dotted name, imports resolved: `DDP` -> "torch.nn.parallel.DistributedDataParallel"; "" for others."""
        if node is None:
            return ""
        found = self._resolved.get(node)
        if found is None:
            found = ""
            if isinstance(node, ast.Attribute):
                above = self.name(node.value)
                found = f"{above}.{node.attr}" if above else ""
            elif isinstance(node, ast.Name):  # a parameter hides an import
                hidden = node.id not in self.aliases or self.is_param(node)
                found = node.id if hidden else self.aliases[node.id]
            self._resolved[node] = found
        return found

    def is_param(self, node: ast.AST) -> Function | None:
        """The function, of those around the name, that has a parameter of this name."""
        function = self.function(node) if isinstance(node, ast.Name) else None
        while function is not None and node.id not in self.params[function]:  # type: ignore[attr-defined]
            function = self.context[function].function
        return function

    def statement(self, node: ast.AST) -> ast.stmt:
        while not isinstance(node, ast.stmt):
            node = self.parent[node]
        return node

    def at(self, node: ast.AST) -> Context:
        """What surrounds the node. A decorator or default value counts as outside of its function."""
        while node not in self.context:
            node = self.parent[node]
        return self.context[node]

    def function(self, node: ast.AST) -> Function | None:
        return self.at(node).function

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while (up := self.parent.get(node)) is not None:
            yield up
            node = up

    def inside(self, node: ast.AST, outer: ast.AST) -> bool:
        return node is outer or any(up is outer for up in self.above(node))

    def qualname(self, function: Function | None) -> str:
        if function is None:
            return ""
        owner = self.context[function].owner
        return f"{owner.name}.{function.name}" if owner else function.name

    # --- text -----------------------------------------------------------------------------------------------------
    def span(self, node: ast.AST) -> tuple[int, int]:
        start = self.starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def exact(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def segment(self, node: ast.AST) -> str:
        """The node's own text, on one line."""
        return " ".join(self.exact(node).split())

    def ignores(self) -> tuple[dict[int, set[str]], set[str]]:
        """line -> the rules silenced there ("*" for all), and those silenced in the whole file."""
        lines: defaultdict[int, set[str]] = defaultdict(set)
        whole: set[str] = set()
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline) if "evener:" in self.text else ()
        for token in tokens:
            found = IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if found:
                words = found[2] if found[2] is not None else "*"
                rules = {word.strip() for word in words.split(",") if word.strip()}
                alone = not token.line[: token.start[1]].strip()
                (whole if found[1] else lines[token.start[0] + alone]).update(rules)
        return lines, whole


def leaves(body: list[ast.stmt]) -> bool:
    """The block never reaches what follows it."""
    last = body[-1] if body else None
    if isinstance(last, ast.Expr) and isinstance(last.value, ast.Call):
        called = last.value.func
        return (isinstance(called, ast.Attribute) and called.attr in ("exit", "_exit", "abort")) or (
            isinstance(called, ast.Name) and called.id in ("exit", "quit")
        )
    if isinstance(last, ast.If):
        return leaves(last.body) and leaves(last.orelse)
    return isinstance(last, ast.Return | ast.Raise | ast.Continue | ast.Break)


def keyword(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument given by keyword, or at a position; None when absent (or hidden in *args)."""
    for one in call.keywords:
        if one.arg == name:
            return one.value
    found = call.args[position] if position is not None and position < len(call.args) else None
    return None if isinstance(found, ast.Starred) else found


def method(node: ast.AST, *words: str) -> ast.Attribute | None:
    """The `x.word` of a call `x.word(...)`, else None."""
    called = node.func if isinstance(node, ast.Call) else None
    return called if isinstance(called, ast.Attribute) and called.attr in words else None


def literal(node: ast.AST | None) -> object:
    """The value of a constant (negative numbers too), else Ellipsis: unknown."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
        value = node.operand.value
        return -value if isinstance(value, int | float) else ...
    return ...


def last(dotted: str) -> str:
    return dotted.rpartition(".")[2]
