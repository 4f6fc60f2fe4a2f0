"""Wrapped models: what goes through the wrapper, and what goes around it."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import replace
from evener.lint.file import SAME, File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal, method


@rule("error", "call model.module under no_grad, or let all ranks take part")
def ddp_forward_on_one_rank(file: File) -> Hits:
    why = "the DDP model is called on one rank: it waits for the others in its buffers"
    called = [one for one in file.of(ast.Call) if isinstance(one.func, ast.Name | ast.Attribute)]
    for call in (one for one in called if file.holds(one.func, "ddp") and file.guard(one) == "one"):
        same = (file.function(call), file.segment(call.func))
        others = (one for one in called if (file.function(one), file.segment(one.func)) == same)
        if any(file.guard(one) == "others" for one in others):
            continue  # the other ranks call it too, in their own branch
        values = file.latest(call.func, call.lineno - 1)
        if not values or file.holds(values[0], "ddp"):  # else it was made anew, or unwrapped
            quiet = values and file.without_grad(call)
            edit = replace(file, call.func, f"{file.exact(call.func)}.module") if quiet else None
            yield hit(call, why, edit, unsafe=True)


@rule("error", "unfreeze before wrapping, or wrap again after it")
def requires_grad_after_ddp(file: File) -> Hits:
    wraps = file.making("ddp")
    changed: list[tuple[ast.stmt | ast.expr, ast.expr]] = [
        (stmt, stmt.targets[0].value) for stmt in file.of(ast.Assign)
        if isinstance(stmt.targets[0], ast.Attribute) and stmt.targets[0].attr == "requires_grad"
        and literal(stmt.value) is True
    ]  # fmt: skip
    calls = file.methods("requires_grad_")
    changed += [(call, func.value) for call, func in calls if not call.args or literal(call.args[0]) is True]
    for where, target in changed:
        above = [one for one in wraps if file.function(one) is file.function(where) and one.lineno < where.lineno]
        again = any(wrap.lineno > where.lineno for wrap in wraps)
        if above and not again and _of_model(file, where, target, above[-1]):
            yield hit(where, "unfrozen after DDP looked: these gradients are never averaged")


def _of_model(file: File, where: ast.AST, target: ast.expr, wrap: ast.Call) -> bool:
    """The changed thing is a parameter of the wrapped model: p of `for p in model....parameters()`, or model.x."""
    stmt = file.statement(wrap)
    models = [file.segment(one) for one in (*wrap.args[:1], *(stmt.targets if isinstance(stmt, ast.Assign) else ()))]
    texts = [file.segment(target)]
    texts += [file.segment(loop.iter) for loop in file.at(where).loops if isinstance(loop, ast.For)]
    return any(re.match(rf"{re.escape(model)}(\.|$)", text) for model in models for text in texts)


@rule("error", "call the DDP model itself")
def ddp_module_bypass(file: File) -> Hits:
    for call, func in file.methods("module"):
        if not file.holds(func.value, "ddp") or file.without_grad(call) or file.guard(call):
            continue
        here = (one for one in file.backwards if one.ctx.function is file.function(call))
        evaluates = any("eval" in test.text or "valid" in test.text for test in file.at(call).tests)
        detached = any(isinstance(up, ast.Attribute) and up.attr == "detach" for up in file.above(call))
        if any(one.place > (call.lineno, 0) for one in here) and not evaluates and not detached:
            edit = replace(file, func, file.exact(func.value))
            yield hit(call, ".module goes around DDP: these gradients are not averaged", edit)


@rule("warning", "save model.module.state_dict()", in_tests=False)
def wrapped_state_dict(file: File) -> Hits:
    if re.search(r"""["']module\.["']|replace\(["']module|consume_prefix""", file.text):
        return
    saved = [node for call in file.calls_of("torch.save") for arg in call.args[:1] for node in ast.walk(arg)]
    for call, func in ((node, func) for node in saved if (func := method(node, "state_dict"))):
        model = func.value
        if not isinstance(model, ast.Name | ast.Attribute) or not file.holds(model, "ddp", "dp"):
            continue
        bound = file.now(model)
        unwrapped = any(isinstance(value, ast.Attribute) and value.attr == "module" for _, value in bound)
        wrapped = [file.holds(value, "ddp", "dp") for _, value in bound]
        if not unwrapped and (any(wrapped) or not file.values(model)):
            always = bound and wrapped[-1] and not file.at(bound[-1][0]).tests
            edit = replace(file, model, f"{file.exact(model)}.module") if always else None
            # Unsafe: whatever loads it, here or elsewhere, may expect the names as they were.
            yield hit(call, 'the saved keys begin with "module."', edit, unsafe=True)


@rule("error", "put the model on device_ids[0]")
def dp_model_off_first(file: File) -> Hits:
    for call in file.making("dp"):
        ids = keyword(call, "device_ids", 1)
        first = literal(ids.elts[0]) if isinstance(ids, ast.List | ast.Tuple) and ids.elts else ...
        if not call.args or not isinstance(first, int):
            continue
        for value in (call.args[0], *file.latest(call.args[0], call.lineno)):
            if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args):
                continue
            where = literal(value.args[0])
            index = re.fullmatch(r"(?:cuda:)?(\d+)", str(where))
            if SAME.fullmatch(value.func.attr) and index and int(index[1]) != first:
                edit = replace(file, value.args[0], f'"cuda:{first}"' if isinstance(where, str) else str(first))
                yield hit(call, f"the model is on GPU {index[1]}, device_ids begins with {first}", edit)


@rule("hint", "DistributedDataParallel, one process per GPU (or evener.Run), is faster on one machine too")
def dataparallel(file: File) -> Hits:
    for call in file.making("dp"):
        if last(file.name(call.func)) == "DataParallel":
            yield hit(call, "DataParallel copies the model at every forward, from one process")


@rule("hint", "leave it out, unless DDP raises about unused parameters")
def find_unused_parameters(file: File) -> Hits:
    for call in file.making("ddp"):
        if literal(keyword(call, "find_unused_parameters")) is True:
            yield hit(call, "the graph is walked at every step to find unused parameters")
