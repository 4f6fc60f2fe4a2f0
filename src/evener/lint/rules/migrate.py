"""What old scripts use and PyTorch 2.13 has no more, or not for long. `--fix --select migrate` rewrites them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from evener.lint.apex import codemod
from evener.lint.rule import Checked, Edit, Finding, Hits, Rule, hit, remove_argument, replace
from evener.lint.source import Function, keyword, last, literal, method


@cache
def table() -> dict[str, list[dict[str, Any]]]:
    """renames.toml: names that are gone or deprecated, and what replaces them."""
    import tomllib  # both cost what parsing a file costs: only when a rule asks

    return tomllib.loads(Path(__file__).parents[1].joinpath("renames.toml").read_text("utf-8"))


def imported(file: Checked) -> Iterator[tuple[ast.Import | ast.ImportFrom, ast.alias, str]]:
    """(statement, alias, dotted name) of everything that is imported."""
    for plain in file.of(ast.Import):
        for alias in plain.names:
            yield plain, alias, alias.name
    for taken in file.of(ast.ImportFrom):
        if not taken.level:
            for alias in taken.names:
                yield taken, alias, f"{taken.module}.{alias.name}"


def part_of(node: ast.expr, dotted: str, old: str) -> ast.expr | None:
    """The part of the reference that is `old` itself: `dist.reduce_op` of `dist.reduce_op.SUM`."""
    for _ in range(dotted.count(".") - old.count(".")):
        if not isinstance(node, ast.Attribute):
            return None
        node = node.value
    return node


class ApexRemoved(
    Rule, level="error", fix="torch.autocast and torch.amp.GradScaler; torch.nn.parallel.DistributedDataParallel"
):
    """apex.amp and apex.parallel were deleted from Apex.

    O1 and O2 are autocast with a GradScaler today; O0 is fp32; apex.parallel is DistributedDataParallel of PyTorch.

    bad -, good +:
          import torch
        + scaler = torch.amp.GradScaler("cuda")
        - from apex import amp
        - model, optimizer = amp.initialize(model, optimizer, opt_level="O1")
          for x, y in loader:
              optimizer.zero_grad()
        +     with torch.autocast("cuda", dtype=torch.float16):
        -     loss = loss_fn(model(x), y)
        +         loss = loss_fn(model(x), y)
        -     with amp.scale_loss(loss, optimizer) as scaled_loss:
        -         scaled_loss.backward()
        +     scaler.scale(loss).backward()
        -     optimizer.step()
        +     scaler.step(optimizer)
        +     scaler.update()
    """

    gone = ("apex.amp", "apex.parallel", "apex.fp16_utils")

    def check(self, file: Checked) -> Hits:
        statements: dict[ast.stmt, str] = {}
        for stmt, alias, dotted in imported(file):
            if dotted.startswith(self.gone) and stmt not in statements:
                statements[stmt] = dotted
            elif dotted == "apex" and alias.asname is None and stmt not in statements:
                used = {one for _, one in file.references if one.startswith(self.gone)}
                if used and not any(d.startswith(self.gone) for _, _, d in imported(file)):
                    statements[stmt] = ".".join(min(used).split(".")[:2])
        edits = codemod(file) if statements else ()
        for where, dotted in statements.items():
            what = ".".join(dotted.split(".")[:2])
            yield hit(where, f"{what} no longer exists", *edits)


class CudaAmpDeprecated(Rule, fix='torch.amp.autocast("cuda", ...), torch.amp.GradScaler("cuda", ...)'):
    """torch.cuda.amp warns; torch.amp takes the device type.

    bad -, good +:
        - from torch.cuda.amp import autocast, GradScaler
        + from torch.amp import autocast, GradScaler
        - scaler = GradScaler(enabled=True)
        + scaler = GradScaler("cuda", enabled=True)
        - with autocast(False, dtype=torch.float16):
        + with autocast("cuda", enabled=False, dtype=torch.float16):
              loss = loss_fn(model(x), y)
    """

    def check(self, file: Checked) -> Hits:
        order = {row["name"]: row.get("order") for row in table()["amp"]}
        uses = []
        for node, dotted in file.references:
            match = re.fullmatch(r"torch\.(cuda|cpu)\.amp(?:\.autocast_mode|\.grad_scaler)?\.(\w+)", dotted)
            if match and match[2] in order and not file.at(node).handlers:  # an except keeps old versions going
                uses.append((node, match[1], match[2]))
        imports = []
        for stmt, alias, dotted in imported(file):
            if (re.match(r"torch\.(cuda|cpu)\.amp\b", dotted) and isinstance(stmt, ast.ImportFrom)) or re.match(
                r"torch\.(cuda|cpu)\.amp$", dotted
            ):
                imports.append((stmt, alias))
        every = [self._use(file, node, device, name, order[name]) for node, device, name in uses]
        roots = [self._import(file, stmt, alias) for stmt, alias in imports]
        # Uses of an imported name and its import change together, or not at all.
        joint = (
            None if any(one is None for one in (*every, *roots)) else [e for one in (*every, *roots) for e in one or ()]
        )
        for (node, _, name), edits in zip(uses, every):
            chain = isinstance(node, ast.Attribute) and file.segment(node).startswith("torch.")
            mine = edits if chain else joint
            yield hit(node, f"torch.cuda.amp.{name} is deprecated", *(mine or ()))
        for stmt in {stmt: None for stmt, _ in imports}:
            yield hit(stmt, "torch.cuda.amp is deprecated", *(joint or ()))

    def _use(self, file: Checked, node: ast.expr, device: str, name: str, order: list[str] | None) -> list[Edit] | None:
        edits = []
        if file.segment(node).startswith("torch."):
            edits.append(replace(file, node, f"torch.amp.{name}"))
        elif isinstance(node, ast.Attribute) and not isinstance(node.value, ast.Name):
            return None
        up = file.parent[node]
        if isinstance(up, Function) and node in up.decorator_list:
            if name not in ("custom_fwd", "custom_bwd"):
                return None
            end = file.span(node)[1]
            return [*edits, Edit(end, end, f'(device_type="{device}")')]
        if not (isinstance(up, ast.Call) and up.func is node):
            return edits if name == "GradScaler" else None
        if any(isinstance(arg, ast.Starred) for arg in up.args):
            return None
        first = f'device_type="{device}"' if name.startswith("custom") else f'"{device}"'
        names = order or []
        if len(up.args) > len(names) and order is not None:
            return None
        words = [*names, *[""] * len(up.args)]
        for arg, word in list(zip(up.args, words))[1:]:
            start = file.span(arg)[0]
            edits.append(Edit(start, start, f"{word}=" if word else ""))
        at = file.span(up.args[0])[0] if up.args else file.data.index(b"(", file.span(node)[1]) + 1
        named = f"{names[0]}=" if names and up.args else ""
        edits.append(Edit(at, at, first + (", " if up.args or up.keywords else "") + named))
        return [one for one in edits if one.text]

    def _import(self, file: Checked, stmt: ast.Import | ast.ImportFrom, alias: ast.alias) -> list[Edit] | None:
        text = file.exact(stmt)
        start = file.span(stmt)[0]
        if isinstance(stmt, ast.Import):
            return [replace(file, alias, f"torch.amp as {alias.asname}")] if alias.asname else None
        match = re.match(r"from\s+(torch\.(?:cuda|cpu)(\.amp)?[\w.]*)\s+import", text)
        known = {row["name"] for row in table()["amp"]}
        wanted = {"amp"} if match and not match[2] else known
        if not match or any(one.name not in wanted for one in stmt.names):
            return None
        begin = start + len(text[: match.start(1)].encode())
        return [Edit(begin, begin + len(match[1].encode()), "torch.amp" if match[2] else "torch")]


class RemovedImport(Rule, level="error", fix="import the replacement"):
    """An import that no longer exists.

    bad -, good +:
        - from torch._six import inf
        + from torch import inf
    """

    def check(self, file: Checked) -> Hits:
        rows = {row["old"]: row for row in table()["import"]}
        for stmt, alias, dotted in imported(file):
            old = next((name for name in rows if dotted == name or dotted.startswith(f"{name}.")), None)
            if old is None or file.at(stmt).handlers:
                continue
            new, edit = rows[old].get("new"), None
            if new and isinstance(stmt, ast.ImportFrom) and len(stmt.names) == 1:
                module, _, name = new.rpartition(".")
                was = alias.asname or alias.name
                edit = replace(file, stmt, f"from {module} import {name}" + (f" as {was}" if was != name else ""))
            yield hit(stmt, f"{old} no longer exists", edit, fix=f"use {new}" if new else rows[old]["note"])


class RemovedApi(Rule, level="error", fix="use what replaced it"):
    """A name, argument or habit that raises today.

    `total_mem`, `.next()` of an iterator, `verbose=` of schedulers, `loss.data[0]`, `correct[:k].view(-1)` of a
    transposed tensor, `volatile=`, the `*_multigpu` collectives.

    bad -, good +:
        - total = torch.cuda.get_device_properties(0).total_mem
        + total = torch.cuda.get_device_properties(0).total_memory
    """

    def check(self, file: Checked) -> Hits:
        rows = {row["old"]: row for row in table()["gone"]}
        for node, dotted in file.references:
            if dotted in rows:
                yield hit(node, f"{dotted} no longer exists", fix=rows[dotted]["note"])
        for attribute in file.of(ast.Attribute) if "torch" in file.aliases else ():
            if attribute.attr == "total_mem":
                end = file.span(attribute)[1]
                yield hit(attribute, "total_mem is total_memory", Edit(end - len("total_mem"), end, "total_memory"))
        for call, func in file.methods("next"):
            if not call.args and self._iterator(file, func.value):
                edit = replace(file, call, f"next({file.exact(func.value)})")
                yield hit(call, "an iterator has no next method", edit)
        for call in file.of(ast.Call):
            verbose, dotted = keyword(call, "verbose"), file.name(call.func)
            if verbose is not None and dotted.startswith("torch.optim.lr_scheduler."):
                yield hit(call, "schedulers take no verbose any more", remove_argument(file, call, verbose))
            if last(dotted) == "Variable" and keyword(call, "volatile") is not None:
                yield hit(call, "volatile does nothing: the graph is built", fix="with torch.no_grad():")
        for call, func in file.methods("view"):
            if [literal(arg) for arg in call.args] == [-1] and self._first_rows(file, func.value):
                end = file.span(func)[1]
                edit = Edit(end - len("view"), end, "reshape")
                yield hit(call, "view of a transposed tensor's rows raises", edit, fix="reshape(-1)")
        for item in file.of(ast.Subscript):
            data = item.value
            if not isinstance(data, ast.Attribute) or data.attr != "data" or literal(item.slice) != 0:
                continue
            loss = file.segment(data.value)
            scalar = re.search(r"loss|err", loss, re.I) or loss.endswith((".sum()", ".mean()"))
            if scalar and isinstance(item.ctx, ast.Load):
                yield hit(item, "a scalar has no element 0", replace(file, item, f"{file.exact(data.value)}.item()"))

    def _iterator(self, file: Checked, node: ast.expr) -> bool:
        values = [node] if isinstance(node, ast.Call) else [value for _, value in file.values(node)]
        return bool(values) and all(isinstance(one, ast.Call) and file.name(one.func) == "iter" for one in values)

    def _first_rows(self, file: Checked, node: ast.expr) -> bool:
        """correct[:k], where correct is `pred.eq(...)` of a transposed pred."""
        if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
            return False
        if not isinstance(node.value, ast.Name) or (node.slice.lower is not None and literal(node.slice.lower) != 0):
            return False
        made = [value for stmt, value in file.values(node.value) if stmt.lineno < node.lineno][-1:]
        equal = method(made[0], "eq") if made else None
        turned = re.compile(r"\.t\(\)|\.T\b|transpose\(")
        return equal is not None and any(turned.search(file.segment(value)) for _, value in file.values(equal.value))


class DeprecatedName(Rule, fix="use the new name"):
    """A name that works today and warns.

    bad -, good +:
        - torch.nn.utils.clip_grad_norm(model.parameters(), 1.0)
        + torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    """

    def check(self, file: Checked) -> Hits:
        rows = {row["old"]: row for row in table()["deprecated"]}
        for node, dotted in file.references:
            old = next((name for name in rows if dotted == name or dotted.startswith(f"{name}.")), None)
            if old is None:
                continue
            row = rows[old]
            new = row.get("new", "")
            at = part_of(node, dotted, old)
            edits: tuple[Edit, ...] = ()
            if new and isinstance(at, ast.Attribute):
                end = file.span(at)[1]
                edits = (Edit(end - len(last(old).encode()), end, last(new)),)
            elif new and isinstance(at, ast.Name) and at.id == last(old):
                edits = self._with_import(file, old, new)
            yield hit(node, f"{old} is deprecated", *edits, fix=f"use {new}" if new else row["note"])

    def _with_import(self, file: Checked, old: str, new: str) -> tuple[Edit, ...]:
        names = [replace(file, node, last(new)) for node, dotted in file.references if dotted == old]
        imports = [
            replace(file, alias, last(new)) for _, alias, dotted in imported(file) if dotted == old and not alias.asname
        ]
        return (*names, *imports) if len(imports) == 1 else ()


class SchedulerEpochArg(Rule, fix="scheduler.step() after the epoch's updates"):
    """`scheduler.step(epoch)`: the argument is deprecated.

    It jumps to the closed form of the schedule, and some schedules have none.

    bad -, good +:
          scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 30)
          for epoch in range(90):
              train(model)
        -     scheduler.step(epoch)
        +     scheduler.step()
    """

    def check(self, file: Checked) -> Hits:
        for call, func in file.methods("step"):
            given = call.args[0] if call.args else keyword(call, "epoch")
            if given is not None and file.kinds(func.value) == {"scheduler"}:
                edit = remove_argument(file, call, given)
                yield hit(call, "a scheduler's step takes no epoch any more", edit, unsafe=True)


class LocalRankFlag(Rule, level="error", fix='read LOCAL_RANK: default=int(os.environ.get("LOCAL_RANK", 0))'):
    """The local rank comes from `--local_rank`.

    torchrun passes no flag: every rank keeps the default. `torch.distributed.launch` passes `--local-rank`, dashed.

    bad -, good +:
        + local_rank = int(os.environ["LOCAL_RANK"])
        - parser = argparse.ArgumentParser()
        - parser.add_argument("--local_rank", type=int, default=0)
        - args = parser.parse_args()
        - torch.cuda.set_device(args.local_rank)
        + torch.cuda.set_device(local_rank)
    fixed:
        parser = argparse.ArgumentParser()
        parser.add_argument("--local-rank", "--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
        args = parser.parse_args()
        torch.cuda.set_device(args.local_rank)
    """

    def check(self, file: Checked) -> Hits:
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
            flag = replace(file, call.args[flags.index("--local_rank")], '"--local-rank", "--local_rank"')
            if default is not None:
                edits = (flag, replace(file, default, value)) if isinstance(literal(default), int) else ()
            else:
                end = max(file.span(one)[1] for one in [*call.args, *(word.value for word in call.keywords)])
                edits = (flag, Edit(end, end, f", default={value}"))
            why = "torchrun passes no --local_rank: every rank keeps the default"
            yield hit(call, why, *edits, imports=("import os",))


TOLD = {"print", "add_argument", "ArgumentParser", "info", "warning", "warn", "error", "exit"}
TOLD |= {"RuntimeError", "ValueError"}
LAUNCH = re.compile(r"(?P<python>\bpython3?\s+(?:-u\s+)?-m\s+)torch\.distributed\.launch(?P<rest>[^\n\"']*)")


class TorchDistributedLaunch(Rule, fix="torchrun (or `evener run`)"):
    """`python -m torch.distributed.launch` is deprecated.

    bad -, good +:
          import subprocess
          import torch
        - subprocess.run("python -m torch.distributed.launch --nproc_per_node=2 --use_env train.py", shell=True)
        + subprocess.run("torchrun --nproc_per_node=2 train.py", shell=True)
    """

    why = "torch.distributed.launch is deprecated"

    def check(self, file: Checked) -> Hits:
        for node in file.of(ast.Constant):
            if not isinstance(node.value, str) or "torch.distributed.launch" not in node.value:
                continue
            up = file.parent[node]
            told = isinstance(up, ast.Expr) or (isinstance(up, ast.Call) and last(file.name(up.func)) in TOLD)
            new = to_torchrun(file.exact(node))
            if node.value == "torch.distributed.launch":
                new = new.replace("torch.distributed.launch", "torch.distributed.run")
            if not told and node.lineno == node.end_lineno and new != file.exact(node):  # else words for people
                yield hit(node, self.why, replace(file, node, new))
        for stmt, _, dotted in imported(file):
            if re.match(r"torch\.distributed\.launch(\.|$)", dotted):
                yield hit(stmt, self.why, fix="torch.distributed.run")

    def check_script(self, path: str, data: bytes) -> Iterator[Finding]:
        """The same in a shell script, line by line."""
        at = 0
        for number, raw in enumerate(data.splitlines(keepends=True), 1):
            line = raw.decode(errors="replace")
            if "torch.distributed.launch" in line and not line.lstrip().startswith("#"):
                new = to_torchrun(line)
                column = line.index("torch.distributed.launch") + 1
                edits = (Edit(at, at + len(raw), new),) if new != line and "\ufffd" not in line else ()
                yield Finding(path, number, column, self.id, self.level, self.why, self.fix, edits, end=column + 24)
            at += len(raw)


def to_torchrun(line: str) -> str:
    def swap(match: re.Match[str]) -> str:
        return "torchrun" + re.sub(r"\s--use[_-]env\b", "", match["rest"])

    return LAUNCH.sub(swap, line)
