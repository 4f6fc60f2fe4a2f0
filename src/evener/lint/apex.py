"""Apex's amp, rewritten as torch.autocast and torch.amp.GradScaler: one edit of the whole file, or none.

What is understood: `amp.initialize` once and outside of any test, `amp.scale_loss` around a lone backward with the loss
computed in the same block, `amp.master_params` in a clip, the state dicts, apex.parallel's DDP and SyncBatchNorm.
Whatever else of Apex's amp is used leaves the file as it is.
"""

from __future__ import annotations

import ast
import re

from evener.lint.rule import Checked, Edit, alone, indent_of, insert_before, line_start, newline, replace, siblings
from evener.lint.source import Source, keyword, literal

RENAMED = {
    "apex.parallel.DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
}


def codemod(file: Checked) -> tuple[Edit, ...]:
    """The edits, or () where something is not understood."""
    try:
        return tuple(dict.fromkeys(Codemod(file).edits()))
    except NotUnderstood:
        return ()


class NotUnderstood(Exception):
    """Something that the codemod does not rewrite."""


class Codemod:
    def __init__(self, file: Checked) -> None:
        self.file = file
        self.uses: dict[str, list[ast.AST]] = {}
        for kind in (ast.Attribute, ast.Name):
            for node in self.file.of(kind):
                dotted = self.file.name(node)
                if dotted.startswith("apex.") and not isinstance(self.file.parent[node], ast.Attribute):
                    self.uses.setdefault(dotted, []).append(node)

    def edits(self) -> list[Edit]:
        file = self.file
        known = {"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"}
        mine = [name for name in self.uses if name.startswith(("apex.amp", "apex.fp16_utils"))]
        bad = [name for name in mine if name.removeprefix("apex.amp.") not in known]
        other = [n for n in self.uses if n.startswith("apex.parallel") and n not in RENAMED]
        if bad or other or file.aliases.get("torch", "torch") != "torch" or "torch" not in file.aliases:
            raise NotUnderstood
        edits: list[Edit] = []
        if mine:
            if re.search(r"\bscaler\b", file.text):
                raise NotUnderstood  # the name is taken
            edits += self.amp()
        for old, new in RENAMED.items():
            for node in self.uses.get(old, []):
                edits += self.renamed(node, new)
        return edits + self.imports()

    def call(self, node: ast.AST) -> ast.Call:
        up = self.file.parent[node]
        if not isinstance(up, ast.Call) or up.func is not node:
            raise NotUnderstood
        return up

    def amp(self) -> list[Edit]:
        file = self.file
        starts = [self.call(node) for node in self.uses.get("apex.amp.initialize", [])]
        scaled = [self.call(node) for node in self.uses.get("apex.amp.scale_loss", [])]
        if len(starts) != 1 or not scaled:
            raise NotUnderstood
        start = starts[0]
        stmt = file.parent[start]
        ctx = file.at(start)
        level = keyword(start, "opt_level", 3)
        known = {"opt_level", "verbosity", "models", "optimizers"}
        if (
            not isinstance(stmt, ast.Assign)
            or ctx.tests
            or ctx.loops
            or any(one.arg not in known for one in start.keywords)
        ):
            raise NotUnderstood
        if (level is not None and literal(level) not in ("O0", "O1", "O2", ...)) or not alone(file, stmt):
            raise NotUnderstood
        given = [file.exact(arg) for arg in start.args[:2]]
        target = stmt.targets[0]
        targets = [file.exact(one) for one in target.elts] if isinstance(target, ast.Tuple) else [file.exact(target)]
        if len(targets) != len(given):
            raise NotUnderstood
        on, inside = "", ""
        if level is not None and literal(level) == "O0":
            on = inside = ", enabled=False"
        elif level is not None and literal(level) is ...:
            on, inside = f', enabled={file.exact(level)} != "O0"', ", enabled=scaler.is_enabled()"
        lines = [] if targets == given else [f"{', '.join(targets)} = {', '.join(given)}"]
        here = all(file.at(call).function is ctx.function for call in scaled)
        edits = []
        if not here:  # the loop is in another function: one scaler for the module
            edits.append(self.after_imports(f'scaler = torch.amp.GradScaler("cuda"{on if "False" in on else ""})'))
            if on and "False" not in on:
                lines += ["global scaler", f'scaler = torch.amp.GradScaler("cuda"{on})']
        else:
            lines.append(f'scaler = torch.amp.GradScaler("cuda"{on})')
        indent, line = indent_of(file, stmt), newline(file)
        last = file.starts[stmt.end_lineno or stmt.lineno]
        edits.append(Edit(line_start(file, stmt), last, "".join(f"{indent}{one}{line}" for one in lines)))
        for call in scaled:
            edits += self.scale_loss(call, inside)
        for node in self.uses.get("apex.amp.master_params", []):
            edits += self.master_params(self.call(node))
        for name in ("state_dict", "load_state_dict"):
            edits += [replace(file, node, f"scaler.{name}") for node in self.uses.get(f"apex.amp.{name}", [])]
        return edits

    def scale_loss(self, call: ast.Call, inside: str) -> list[Edit]:
        file = self.file
        item = file.parent[call]
        block = file.parent[item]
        if (
            not isinstance(item, ast.withitem)
            or not isinstance(block, ast.With)
            or len(block.items) != 1
            or len(call.args) != 2
        ):
            raise NotUnderstood
        name, loss, optimizer = item.optional_vars, call.args[0], file.exact(call.args[1])
        if not isinstance(name, ast.Name) or len(block.body) != 1 or call.keywords or not isinstance(loss, ast.Name):
            raise NotUnderstood
        if file.segment(block.body[0]) != f"{name.id}.backward()":
            raise NotUnderstood
        siblings = next(body for part in ("body", "orelse") if block in (body := getattr(file.parent[block], part, [])))
        at = siblings.index(block)
        forward = [i for i in range(at) if self._calls_model(siblings[i])]
        computed = [i for i in range(at) if self._assigns(siblings[i], loss.id)]
        if not forward or not computed or forward[0] > computed[-1]:
            raise NotUnderstood
        edits = self.indent(
            siblings[forward[0]], siblings[computed[-1]], f'with torch.autocast("cuda", dtype=torch.float16{inside}):'
        )
        edits.append(replace(file, block, f"scaler.scale({loss.id}).backward()"))
        steps = [
            one for one in file.of(ast.Call)
            if file.segment(one) == f"{optimizer}.step()" and file.function(one) is file.function(call)
        ]  # fmt: skip
        others = [
            e
            for events in self.file.events
            for e in events
            if e.kind == "backward" and e.ctx.function is file.function(call)
        ]
        if not steps or any(one.how == "plain" for one in others):
            raise NotUnderstood
        for step in steps:
            stmt = file.statement(step)
            if not isinstance(stmt, ast.Expr) or not alone(file, stmt):
                raise NotUnderstood
            text = f"scaler.step({optimizer}){newline(file)}{indent_of(file, stmt)}scaler.update()"
            edits.append(replace(file, stmt, text))
        return edits

    def _calls_model(self, stmt: ast.stmt) -> bool:
        """The statement runs a model: one of those that initialize got, or a name that says so."""
        models = {"model", "net", "network"}
        for node in self.uses.get("apex.amp.initialize", []):
            first = self.call(node).args[:1]
            models |= {self.file.segment(one) for one in first}
        return any(isinstance(one, ast.Call) and self.file.segment(one.func) in models for one in ast.walk(stmt))

    def _assigns(self, stmt: ast.stmt, name: str) -> bool:
        return any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store) for n in ast.walk(stmt))

    def indent(self, first: ast.stmt, last: ast.stmt, head: str) -> list[Edit]:
        """`head`, and the lines from `first` to `last` four columns deeper."""
        file = self.file
        rows = range(first.lineno, (last.end_lineno or last.lineno) + 1)
        for node in file.of(ast.Constant):
            if isinstance(node.value, str) and node.lineno != node.end_lineno and node.lineno in rows:
                raise NotUnderstood  # its text would change
        opened = insert_before(file, first, head)
        if opened is None:
            raise NotUnderstood
        edits = [opened]
        for row in rows:
            if file.source.lines[row - 1].strip():
                at = file.starts[row - 1]
                edits.append(Edit(at, at, "    "))
        # one edit per place: the head and the first line's indentation begin at the same byte
        return [Edit(opened.start, opened.end, opened.text + "    "), *edits[2:]]

    def master_params(self, call: ast.Call) -> list[Edit]:
        file = self.file
        stmt = file.statement(call)
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Name) or "clip_grad" not in file.segment(stmt):
            raise NotUnderstood
        name = call.args[0].id
        before = insert_before(file, stmt, f"scaler.unscale_({name})")
        if before is None:
            raise NotUnderstood
        return [before, replace(file, call, f'[p for group in {name}.param_groups for p in group["params"]]')]

    def renamed(self, node: ast.AST, new: str) -> list[Edit]:
        file = self.file
        edits = [] if isinstance(node, ast.Name) and "Distributed" in new else [replace(file, node, new)]
        up = file.parent[node]
        if "Distributed" not in new:
            return edits
        if not isinstance(up, ast.Call) or up.func is not node or len(up.args) != 1:
            raise NotUnderstood
        kept = [
            file.exact(one)
            for one in up.keywords
            if one.arg not in ("delay_allreduce", "message_size", "gradient_predivide_factor")
        ]
        if not any(one.startswith("device_ids") for one in kept):
            kept.insert(0, "device_ids=[torch.cuda.current_device()]")
        start = file.span(up.args[0])[1]
        edits.append(Edit(start, file.span(up)[1] - 1, ", " + ", ".join(kept)))
        return edits

    def imports(self) -> list[Edit]:
        file = self.file
        edits: list[Edit] = []
        for stmt in file.of(ast.ImportFrom):
            base = stmt.module or ""
            if not base.startswith("apex"):
                continue
            gone, kept, added = [], [], []
            for alias in stmt.names:
                dotted = f"{base}.{alias.name}"
                text = file.exact(alias)
                if "Distributed" in RENAMED.get(dotted, ""):
                    added.append(f"from torch.nn.parallel import {text}")
                elif dotted.startswith(("apex.amp", "apex.parallel", "apex.fp16_utils")):
                    gone.append(alias)
                else:
                    kept.append(text)
            if not gone and not added:
                continue
            lines = [*([f"from {base} import {', '.join(kept)}"] if kept else []), *added]
            edits.append(self.statement(stmt, lines))
        for plain in file.of(ast.Import):
            if any(alias.name.startswith(("apex.amp", "apex.parallel")) for alias in plain.names):
                if len(plain.names) > 1:
                    raise NotUnderstood
                edits.append(self.statement(plain, []))
        return edits

    def statement(self, stmt: ast.stmt, lines: list[str]) -> Edit:
        """The import statement becomes these lines; none: it goes, or becomes `pass` where it is alone in its block."""
        file = self.file
        if not alone(file, stmt):
            raise NotUnderstood
        if not lines and len(siblings(file, stmt)) == 1:
            lines = ["pass"]
        indent = indent_of(file, stmt)
        text = "".join(f"{indent}{line}{newline(file)}" for line in lines)
        return Edit(line_start(file, stmt), file.starts[stmt.end_lineno or stmt.lineno], text)

    def after_imports(self, line: str) -> Edit:
        at = end_of_imports(self.file.source)
        return Edit(at, at, f"{newline(self.file)}{line}{newline(self.file)}")


def end_of_imports(source: Source) -> int:
    """Behind the last top-level import (one in a `try` counts), or behind the module's docstring."""
    last = 0
    for stmt in source.tree.body:
        imports = isinstance(stmt, ast.Import | ast.ImportFrom)
        guarded = isinstance(stmt, ast.Try) and any(isinstance(one, ast.Import | ast.ImportFrom) for one in stmt.body)
        if imports or guarded:
            last = stmt.end_lineno or stmt.lineno
    first = source.tree.body[0] if source.tree.body else None
    if not last and isinstance(first, ast.Expr) and isinstance(literal(first.value), str):
        last = first.end_lineno or 0
    return source.starts[last]
