"""What old scripts use and PyTorch 2.13 has no more, or not for long. `--fix --select migrate` rewrites them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from evener.lint.apex import codemod
from evener.lint.edits import Edit, remove_argument, replace
from evener.lint.file import File
from evener.lint.rule import Finding, Hits, hit, rule
from evener.lint.source import Function, keyword, last, literal, method


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """renames.toml: names that are gone or deprecated, and what replaces them."""
    import tomllib  # both cost what parsing a file costs: only when a rule asks

    return tomllib.loads(Path(__file__).parents[1].joinpath("renames.toml").read_text("utf-8"))


def _row(kind: str, dotted: str) -> dict[str, Any] | None:
    """The first row whose old name this is, or begins with."""
    return next((row for row in table()[kind] if f"{dotted}.".startswith(f"{row['old']}.")), None)


@rule("error", "torch.autocast and torch.amp.GradScaler; torch.nn.parallel.DistributedDataParallel")
def apex_removed(file: File) -> Hits:
    gone = ("apex.amp", "apex.parallel", "apex.fp16_utils")
    statements: dict[ast.stmt, str] = {}
    parts = any(dotted.startswith(gone) for _, _, dotted in file.imported)
    used = {dotted for _, dotted in file.references if dotted.startswith(gone)}
    for stmt, alias, dotted in file.imported:
        if dotted.startswith(gone):
            statements.setdefault(stmt, dotted)
        elif dotted == "apex" and alias.asname is None and used and not parts:
            statements.setdefault(stmt, min(used))
    edits = codemod(file) if statements else ()
    for where, dotted in statements.items():
        yield hit(where, f"{'.'.join(dotted.split('.')[:2])} no longer exists", *edits)


@rule("warning", 'torch.amp.autocast("cuda", ...), torch.amp.GradScaler("cuda", ...)')
def cuda_amp_deprecated(file: File) -> Hits:
    order = {row["name"]: row.get("order") for row in table()["amp"]}
    uses: list[tuple[ast.expr, str, list[Edit] | None]] = []
    for node, dotted in file.references:
        match = re.fullmatch(r"torch\.(cuda|cpu)\.amp(?:\.autocast_mode|\.grad_scaler)?\.(\w+)", dotted)
        if match and match[2] in order and not file.at(node).handlers:  # an except keeps old versions going
            uses.append((node, match[2], _amp_use(file, node, match[1], match[2], order[match[2]])))
    roots: list[tuple[ast.stmt, list[Edit] | None]] = []
    for taken, alias, dotted in file.imported:
        whole = r"\b" if isinstance(taken, ast.ImportFrom) else "$"
        if re.match(rf"torch\.(cuda|cpu)\.amp{whole}", dotted):
            roots.append((taken, _amp_import(file, taken, alias)))
    # Uses of an imported name and its import change together, or not at all.
    every = [edits for _, _, edits in uses] + [edits for _, edits in roots]
    joint = [edit for edits in every for edit in edits or ()] if None not in every else []
    for where, name, edits in uses:
        chain = isinstance(where, ast.Attribute) and file.segment(where).startswith("torch.")
        yield hit(where, f"torch.cuda.amp.{name} is deprecated", *((edits or ()) if chain else joint))
    for stmt in {stmt: None for stmt, _ in roots}:
        yield hit(stmt, "torch.cuda.amp is deprecated", *joint)


def _amp_use(file: File, node: ast.expr, device: str, name: str, order: list[str] | None) -> list[Edit] | None:
    edits, up, end = [], file.parent[node], file.span(node)[1]
    if file.segment(node).startswith("torch."):
        edits.append(replace(file, node, f"torch.amp.{name}"))
    elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
        return None
    if isinstance(up, Function) and node in up.decorator_list:
        return [*edits, Edit(end, end, f'(device_type="{device}")')] if name.startswith("custom") else None
    if not (isinstance(up, ast.Call) and up.func is node):
        return edits if name == "GradScaler" else None
    if any(isinstance(arg, ast.Starred) for arg in up.args) or (order is not None and len(up.args) > len(order)):
        return None
    names = order or [""] * len(up.args)
    for arg, word in list(zip(up.args, names))[1:]:
        if word:
            start = file.span(arg)[0]
            edits.append(Edit(start, start, f"{word}="))
    at = file.span(up.args[0])[0] if up.args else file.data.index(b"(", end) + 1
    first = f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'
    named = f"{order[0]}=" if order and up.args else ""
    return [*edits, Edit(at, at, first + (", " if up.args or up.keywords else "") + named)]


def _amp_import(file: File, stmt: ast.Import | ast.ImportFrom, alias: ast.alias) -> list[Edit] | None:
    if isinstance(stmt, ast.Import):
        return [replace(file, alias, f"torch.amp as {alias.asname}")] if alias.asname else None
    match = re.match(r"from\s+(torch\.(?:cuda|cpu)(\.amp)?[\w.]*)\s+import", file.exact(stmt))
    wanted = {"amp"} if match and not match[2] else {row["name"] for row in table()["amp"]}
    if not match or any(one.name not in wanted for one in stmt.names):
        return None
    begin = file.span(stmt)[0] + match.start(1)
    return [Edit(begin, begin + len(match[1]), "torch.amp" if match[2] else "torch")]


@rule("error", "import the replacement")
def removed_import(file: File) -> Hits:
    for stmt, alias, dotted in file.imported:
        row = _row("import", dotted)
        if row is None or file.at(stmt).handlers:
            continue
        new, edit = row.get("new"), None
        if new and isinstance(stmt, ast.ImportFrom) and len(stmt.names) == 1:
            module, _, name = new.rpartition(".")
            was = alias.asname or alias.name
            edit = replace(file, stmt, f"from {module} import {name}" + (f" as {was}" if was != name else ""))
        yield hit(stmt, f"{row['old']} no longer exists", edit, fix=f"use {new}" if new else row["note"])


@rule("error", "use what replaced it")
def removed_api(file: File) -> Hits:
    rows = {row["old"]: row for row in table()["gone"]}
    for node, dotted in file.references:
        if dotted in rows:
            yield hit(node, f"{dotted} no longer exists", fix=rows[dotted]["note"])
    for attribute in file.of(ast.Attribute) if "torch" in file.aliases else ():
        if attribute.attr == "total_mem":
            edit = _other_attribute(file, attribute, "total_memory")
            yield hit(attribute, "total_mem is total_memory", edit)
    for call, func in file.methods("next"):
        made = [func.value] if isinstance(func.value, ast.Call) else file.values(func.value)
        iterators = [one for one in made if isinstance(one, ast.Call) and file.name(one.func) == "iter"]
        if not call.args and made and len(iterators) == len(made):
            edit = replace(file, call, f"next({file.exact(func.value)})")
            yield hit(call, "an iterator has no next method", edit)
    for call in file.of(ast.Call):
        verbose, dotted = keyword(call, "verbose"), file.name(call.func)
        if verbose is not None and dotted.startswith("torch.optim.lr_scheduler."):
            yield hit(call, "schedulers take no verbose any more", remove_argument(file, call, verbose))
        if last(dotted) == "Variable" and keyword(call, "volatile") is not None:
            yield hit(call, "volatile does nothing: the graph is built", fix="with torch.no_grad():")
    for call, func in file.methods("view"):
        if [literal(arg) for arg in call.args] == [-1] and _is_transposed(file, func.value):
            edit = _other_attribute(file, func, "reshape")
            yield hit(call, "view of a transposed tensor's rows raises", edit, fix="reshape(-1)")
    for item in file.of(ast.Subscript):
        data = item.value
        if isinstance(data, ast.Attribute) and data.attr == "data" and literal(item.slice) == 0:
            loss = file.segment(data.value)
            scalar = re.search(r"loss|err", loss, re.I) or loss.endswith((".sum()", ".mean()"))
            if scalar and isinstance(item.ctx, ast.Load):
                yield hit(item, "a scalar has no element 0", replace(file, item, f"{file.exact(data.value)}.item()"))


def _other_attribute(file: File, node: ast.Attribute, new: str) -> Edit:
    end = file.span(node)[1]
    return Edit(end - len(node.attr.encode()), end, new)


def _is_transposed(file: File, node: ast.expr) -> bool:
    """correct[:k], where correct is `pred.eq(...)` of a transposed pred."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return False
    if not isinstance(node.value, ast.Name) or (node.slice.lower is not None and literal(node.slice.lower) != 0):
        return False
    equal = [found for made in file.latest(node.value, node.lineno - 1) if (found := method(made, "eq"))]
    turned = re.compile(r"\.t\(\)|\.T\b|transpose\(")
    return any(turned.search(file.segment(value)) for one in equal for value in file.values(one.value))


@rule("warning", "use the new name")
def deprecated_name(file: File) -> Hits:
    for node, dotted in file.references:
        row = _row("deprecated", dotted)
        if row is None:
            continue
        old, new = row["old"], row.get("new", "")
        edits: tuple[Edit, ...] = ()
        at: ast.expr = node  # the part that is `old` itself: `dist.reduce_op` of `dist.reduce_op.SUM`
        for _ in range(dotted.count(".") - old.count(".")):
            at = at.value if isinstance(at, ast.Attribute) else at
        if new and isinstance(at, ast.Attribute):
            edits = (_other_attribute(file, at, last(new)),)
        elif new and isinstance(at, ast.Name) and at.id == last(old):
            edits = _renamed(file, old, last(new))
        yield hit(node, f"{old} is deprecated", *edits, fix=f"use {new}" if new else row["note"])


def _renamed(file: File, old: str, new: str) -> tuple[Edit, ...]:
    """A name and its import change together."""
    names = [replace(file, node, new) for node, dotted in file.references if dotted == old]
    imports = [alias for _, alias, dotted in file.imported if dotted == old and not alias.asname]
    return (*names, replace(file, imports[0], new)) if len(imports) == 1 else ()


@rule("warning", "scheduler.step() after the epoch's updates")
def scheduler_epoch_arg(file: File) -> Hits:
    for call, func in file.methods("step"):
        given = call.args[0] if call.args else keyword(call, "epoch")
        if given is not None and file.kinds(func.value) == {"scheduler"}:
            edit = remove_argument(file, call, given)
            yield hit(call, "a scheduler's step takes no epoch any more", edit, unsafe=True)


@rule("error", 'read LOCAL_RANK: default=int(os.environ.get("LOCAL_RANK", 0))')
def local_rank_flag(file: File) -> Hits:
    read = r"""(environ(\.get\(|\[)|getenv\()\s*["']LOCAL_RANK["'](?!\]\s*=[^=]|\s*,\s*(str\()?\w+\.local_rank)"""
    used = re.search(r"\[.local_rank.\]", file.text) or file.uses("local_rank")
    if re.search(read, file.text) or not used:
        return
    for call, _ in file.methods("add_argument"):
        flags = [literal(arg) for arg in call.args]
        if "--local_rank" not in flags or "--local-rank" in flags:
            continue
        default = keyword(call, "default")
        value = f'int(os.environ.get("LOCAL_RANK", {file.exact(default) if default is not None else 0}))'
        edits = [replace(file, call.args[flags.index("--local_rank")], '"--local-rank", "--local_rank"')]
        if default is None:
            end = max(file.span(one)[1] for one in [*call.args, *(word.value for word in call.keywords)])
            edits.append(Edit(end, end, f", default={value}"))
        else:
            edits = [*edits, replace(file, default, value)] if isinstance(literal(default), int) else []
        why = "torchrun passes no --local_rank: every rank keeps the default"
        yield hit(call, why, *edits, imports=("import os",))


LAUNCH = re.compile(r"\bpython3?\s+(?:-u\s+)?-m\s+torch\.distributed\.launch(?P<rest>[^\n\"']*)")
OLD_LAUNCH = "torch.distributed.launch is deprecated"
# Words for people, and no command:
TOLD = {"print", "add_argument", "ArgumentParser", "info", "warning", "warn", "error", "exit"}
TOLD |= {"RuntimeError", "ValueError"}


@rule("warning", "torchrun (or `evener run`)")
def torch_distributed_launch(file: File) -> Hits:
    for node in file.of(ast.Constant):
        if not isinstance(node.value, str) or "torch.distributed.launch" not in node.value:
            continue
        up, text = file.parent[node], file.exact(node)
        told = isinstance(up, ast.Expr) or (isinstance(up, ast.Call) and last(file.name(up.func)) in TOLD)
        new = _to_torchrun(text)
        if node.value == "torch.distributed.launch":
            new = new.replace("torch.distributed.launch", "torch.distributed.run")
        if not told and node.lineno == node.end_lineno and new != text:
            yield hit(node, OLD_LAUNCH, replace(file, node, new))
    for stmt, _, dotted in file.imported:
        if f"{dotted}.".startswith("torch.distributed.launch."):
            yield hit(stmt, OLD_LAUNCH, fix="torch.distributed.run")


def in_script(path: str, data: bytes) -> Iterator[Finding]:
    """torch_distributed_launch in a shell script, line by line."""
    rule, at = torch_distributed_launch, 0
    for number, raw in enumerate(data.splitlines(keepends=True), 1):
        line = raw.decode(errors="replace")
        if "torch.distributed.launch" in line and not line.lstrip().startswith("#"):
            new, column = _to_torchrun(line), line.index("torch.distributed.launch") + 1
            edits = (Edit(at, at + len(raw), new),) if new != line and "\ufffd" not in line else ()
            yield Finding(path, number, column, rule.id, rule.level, OLD_LAUNCH, rule.fix, edits, end=column + 24)
        at += len(raw)


def _to_torchrun(line: str) -> str:
    return LAUNCH.sub(lambda match: "torchrun" + re.sub(r"\s--use[_-]env\b", "", match["rest"]), line)
