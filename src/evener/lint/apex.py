"""Apex's amp, rewritten as torch.autocast and torch.amp.GradScaler: one edit of the whole file, or none.

What is understood: `amp.initialize` once and outside of any test, `amp.scale_loss` around a lone backward with the loss
computed in the same block, `amp.master_params` in a clip, the state dicts, apex.parallel's DDP and SyncBatchNorm.
Whatever else of Apex's amp is used leaves the file as it is.
"""

from __future__ import annotations

import ast
import re

from evener.lint.edits import Edit, alone, indent_of, insert, replace, siblings, whole_lines
from evener.lint.file import File
from evener.lint.source import Source, keyword, literal

DDP = "apex.parallel.DistributedDataParallel"
RENAMED = {
    DDP: "torch.nn.parallel.DistributedDataParallel",
    "apex.parallel.convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "apex.parallel.SyncBatchNorm": "torch.nn.SyncBatchNorm",
}
KNOWN = {"initialize", "scale_loss", "master_params", "state_dict", "load_state_dict"}


class NotUnderstood(Exception):
    """Something that the codemod does not rewrite."""


def needs(fits: object) -> None:
    if not fits:
        raise NotUnderstood


def codemod(file: File) -> tuple[Edit, ...]:
    """The edits, or () where something is not understood."""
    try:
        return tuple(dict.fromkeys(_edits(file)))
    except NotUnderstood:
        return ()


def _uses(file: File, dotted: str) -> list[ast.AST]:
    return [node for node, name in file.references if name == dotted]


def _calls(file: File, dotted: str) -> list[ast.Call]:
    """All uses of the name, which must be calls."""
    found = []
    for node in _uses(file, dotted):
        up = file.parent[node]
        if not isinstance(up, ast.Call) or up.func is not node:
            raise NotUnderstood
        found.append(up)
    return found


def _edits(file: File) -> list[Edit]:
    used = {name for _, name in file.references}
    mine = [name for name in used if name.startswith(("apex.amp", "apex.fp16_utils"))]
    needs(all(name.removeprefix("apex.amp.") in KNOWN for name in mine))
    needs(all(name in RENAMED for name in used if name.startswith("apex.parallel")))
    needs(file.aliases.get("torch") == "torch")
    edits: list[Edit] = []
    if mine:
        needs(not re.search(r"\bscaler\b", file.text))  # the name is taken
        edits += _amp(file)
    for call in _calls(file, DDP):
        needs(len(call.args) == 1)
        dropped = ("delay_allreduce", "message_size", "gradient_predivide_factor")
        kept = [file.exact(one) for one in call.keywords if one.arg not in dropped]
        if not any(one.startswith("device_ids") for one in kept):
            kept.insert(0, "device_ids=[torch.cuda.current_device()]")
        edits.append(Edit(file.span(call.args[0])[1], file.span(call)[1] - 1, ", " + ", ".join(kept)))
    for old, new in RENAMED.items():  # a bare name of DDP stays: its import changes
        nodes = (node for node in _uses(file, old) if old != DDP or not isinstance(node, ast.Name))
        edits += [replace(file, node, new) for node in nodes]
    return edits + _imports(file)


def _amp(file: File) -> list[Edit]:
    starts, scaled = _calls(file, "apex.amp.initialize"), _calls(file, "apex.amp.scale_loss")
    needs(len(starts) == 1 and scaled)
    start = starts[0]
    stmt, ctx, level = file.parent[start], file.at(start), keyword(start, "opt_level", 3)
    asked = literal(level) if level is not None else "O1"
    if not isinstance(stmt, ast.Assign):
        raise NotUnderstood
    needs(alone(file, stmt) and not ctx.tests and not ctx.loops and asked in ("O0", "O1", "O2", ...))
    needs({one.arg for one in start.keywords} <= {"opt_level", "verbosity", "models", "optimizers"})
    given, target = [file.exact(arg) for arg in start.args[:2]], stmt.targets[0]
    targets = [file.exact(one) for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
    needs(len(targets) == len(given))
    on, inside = (", enabled=False",) * 2 if asked == "O0" else ("", "")
    if level is not None and asked is ...:
        on, inside = f', enabled={file.exact(level)} != "O0"', ", enabled=scaler.is_enabled()"
    scaler = f'scaler = torch.amp.GradScaler("cuda"{on})'
    lines = [] if targets == given else [f"{', '.join(targets)} = {', '.join(given)}"]
    edits = []
    if all(file.function(call) is ctx.function for call in scaled):
        lines.append(scaler)
    else:  # the loop is in another function: one scaler for the module
        at, fixed = end_of_imports(file), asked is not ...
        first = scaler if fixed else 'scaler = torch.amp.GradScaler("cuda")'
        edits.append(Edit(at, at, f"{file.newline}{first}{file.newline}"))
        lines += [] if fixed else ["global scaler", scaler]
    edits.append(_instead(file, stmt, lines))
    for call in scaled:
        edits += _scale_loss(file, call, inside, {"model", "net", "network", *(given[:1])})
    for call in _calls(file, "apex.amp.master_params"):
        clip = file.statement(call)
        if len(call.args) != 1 or not isinstance(call.args[0], ast.Name) or "clip_grad" not in file.segment(clip):
            raise NotUnderstood
        name = call.args[0].id
        edits += [_inserted(file, clip, f"scaler.unscale_({name})")]
        edits += [replace(file, call, f'[p for group in {name}.param_groups for p in group["params"]]')]
    for name in ("state_dict", "load_state_dict"):
        edits += [replace(file, node, f"scaler.{name}") for node in _uses(file, f"apex.amp.{name}")]
    return edits


def _scale_loss(file: File, call: ast.Call, inside: str, models: set[str]) -> list[Edit]:
    item = file.parent[call]
    block = file.parent[item]
    if not isinstance(item, ast.withitem) or not isinstance(block, ast.With):
        raise NotUnderstood
    needs(len(block.items) == 1 and len(call.args) == 2 and not call.keywords and len(block.body) == 1)
    name, loss, optimizer = item.optional_vars, call.args[0], file.exact(call.args[1])
    if not isinstance(name, ast.Name) or not isinstance(loss, ast.Name):
        raise NotUnderstood
    needs(file.segment(block.body[0]) == f"{name.id}.backward()")
    around = siblings(file, block)
    before = around[: around.index(block)]
    named = [(stmt, file.segment(one.func)) for stmt in before for one in ast.walk(stmt) if isinstance(one, ast.Call)]
    forward = [stmt for stmt, called in named if called in models]
    names = [(stmt, one) for stmt in before for one in ast.walk(stmt) if isinstance(one, ast.Name)]
    computed = [stmt for stmt, one in names if one.id == loss.id and isinstance(one.ctx, ast.Store)]
    needs(forward and computed and forward[0].lineno <= computed[-1].lineno)
    head = f'with torch.autocast("cuda", dtype=torch.float16{inside}):'
    edits = _indented(file, forward[0], computed[-1], head)
    edits.append(replace(file, block, f"scaler.scale({loss.id}).backward()"))
    function = file.function(call)
    steps = [one for one in file.of(ast.Call) if file.segment(one) == f"{optimizer}.step()"]
    steps = [one for one in steps if file.function(one) is function]
    needs(steps and not any(one.how == "plain" for one in file.backwards if one.ctx.function is function))
    for step in steps:
        stmt = file.statement(step)
        needs(isinstance(stmt, ast.Expr) and alone(file, stmt))
        text = f"scaler.step({optimizer}){file.newline}{indent_of(file, stmt)}scaler.update()"
        edits.append(replace(file, stmt, text))
    return edits


def _inserted(file: File, stmt: ast.stmt, code: str) -> Edit:
    edit = insert(file, stmt, code)
    if edit is None:
        raise NotUnderstood
    return edit


def _indented(file: File, first: ast.stmt, last: ast.stmt, head: str) -> list[Edit]:
    """`head`, and the lines from `first` to `last` four columns deeper."""
    rows = range(first.lineno, (last.end_lineno or last.lineno) + 1)
    texts = (one for one in file.of(ast.Constant) if isinstance(one.value, str) and one.lineno in rows)
    needs(all(one.lineno == one.end_lineno for one in texts))  # its text would change
    opened = _inserted(file, first, head)
    deeper = [file.starts[row - 1] for row in rows[1:] if file.lines[row - 1].strip()]
    # one edit per place: the head and the first line's indentation begin at the same byte
    return [Edit(opened.start, opened.end, opened.text + "    "), *(Edit(at, at, "    ") for at in deeper)]


def _imports(file: File) -> list[Edit]:
    edits: list[Edit] = []
    for stmt in (one for one in file.of(ast.ImportFrom) if (one.module or "").startswith("apex")):
        kept, lines = [], []
        for alias in stmt.names:
            dotted = f"{stmt.module}.{alias.name}"
            if dotted == DDP:
                lines.append(f"from torch.nn.parallel import {file.exact(alias)}")
            elif not dotted.startswith(("apex.amp", "apex.parallel", "apex.fp16_utils")):
                kept.append(file.exact(alias))
        if len(kept) < len(stmt.names):
            lines = [f"from {stmt.module} import {', '.join(kept)}", *lines] if kept else lines
            edits.append(_instead(file, stmt, lines))
    for plain in file.of(ast.Import):
        if any(alias.name.startswith(("apex.amp", "apex.parallel")) for alias in plain.names):
            needs(len(plain.names) == 1)
            edits.append(_instead(file, plain, []))
    return edits


def _instead(file: File, stmt: ast.stmt, lines: list[str]) -> Edit:
    """The statement becomes these lines; none: it goes, or becomes `pass` where it is alone in its block."""
    needs(alone(file, stmt))
    if not lines and len(siblings(file, stmt)) == 1:
        lines = ["pass"]
    text = "".join(f"{indent_of(file, stmt)}{line}{file.newline}" for line in lines)
    return Edit(*whole_lines(file, stmt), text)


def end_of_imports(source: Source) -> int:
    """Behind the last top-level import (one in a `try` counts), or behind the module's docstring."""
    end = 0
    for i, stmt in enumerate(source.tree.body):
        inner = stmt.body if isinstance(stmt, ast.Try) else [stmt]
        docstring = i == 0 and isinstance(stmt, ast.Expr) and isinstance(literal(stmt.value), str)
        if docstring or any(isinstance(one, ast.Import | ast.ImportFrom) for one in inner):
            end = stmt.end_lineno or stmt.lineno
    return source.starts[end]
