"""evener's own interface: what `Run` promises, and how a script breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal, method

COLLECTIVE = ("evaluate", "predict", "save", "load", "export", "digest", "step", "updates", "epochs", "batches")


def _runs(file: File) -> dict[str, ast.Call]:
    """name -> the call that makes the evener.Run it holds."""
    found: dict[str, ast.Call] = {}
    for call in file.calls_of("evener.Run", "evener.run.Run"):
        up = file.parent[call]
        target = up.targets[0] if isinstance(up, ast.Assign) else getattr(up, "optional_vars", None)
        found[file.segment(target) if target is not None else f"<{call.lineno}>"] = call
    return found


def _loss_functions(file: File) -> dict[str, ast.Call]:
    """The name of each loss function -> the Run that gets it."""
    given = [(keyword(call, "loss_fn", 2), call) for call in _runs(file).values()]
    return {loss.id: call for loss, call in given if isinstance(loss, ast.Name)}


@rule("error", "return evener.Mean(total=loss_sum, count=number_of_tokens)")
def token_mean_as_row_mean(file: File) -> Hits:
    why = "a mean over tokens is weighted by rows: the update depends on the cut"
    masks = re.compile(r"(mask\w*|attention_mask\W.*|labels\s*!=\s*-100\))\.sum\(")
    losses = {name for name, call in _loss_functions(file).items() if keyword(call, "loss_is") is None}
    for function in (one for one in file.of(ast.FunctionDef) if one.name in losses):
        if "Mean" in file.segment(function):
            continue
        for call in (one for one in file.of(ast.Call) if file.function(one) is function):
            if last(file.name(call.func)) in ("cross_entropy", "nll_loss") and keyword(call, "ignore_index"):
                if literal(keyword(call, "reduction")) in (..., "mean"):
                    yield hit(call, why)
        for div in (one for one in file.of(ast.BinOp) if file.function(one) is function):
            if isinstance(div.op, ast.Div) and masks.search(file.segment(div.right)):
                yield hit(div, why)


@rule("error", "call it on every rank; run.print prints on rank 0 only")
def run_collective_on_one_rank(file: File) -> Hits:
    made = _runs(file)
    for call, func in file.methods(*COLLECTIVE) if made else ():
        if file.segment(func.value) in made and file.guard(call):
            yield hit(call, f"run.{func.attr} communicates: every rank must call it")


@rule("warning", 'run.state["best"] instead of a variable: it is saved and restored')
def state_outside_run(file: File) -> Hits:
    made = _runs(file)
    for loop in file.of(ast.For) if made else ():
        func = method(loop.iter, "epochs", "updates", "batches")
        run = made.get(file.segment(func.value)) if func else None
        if run is not None and not re.search(r"resume\s*=\s*.never", file.segment(run)):
            tests = [node for node in ast.walk(loop) if isinstance(node, ast.Compare)]
            compared = {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
            for name, kept in _kept(file, loop):
                if name in compared:
                    yield hit(kept, f"{name} decides something and is in no checkpoint")


def _kept(file: File, loop: ast.For) -> Iterator[tuple[str, ast.stmt]]:
    """Names that begin as a number before the loop and change in it."""
    added = [one for one in file.of(ast.AugAssign) if file.inside(one, loop)]
    for (scope, name), bound in file.bound.items():
        before = [value for stmt, value in bound if stmt.lineno < loop.lineno]
        if scope is file.function(loop) and name.isidentifier() and before:
            inside: list[ast.stmt] = [stmt for stmt, _ in bound if file.inside(stmt, loop)]
            inside += [one for one in added if file.segment(one.target) == name]
            number = isinstance(literal(before[-1]), int | float | None) or "inf" in file.segment(before[-1])
            if inside and number:
                yield name, inside[0]


@rule("error", "give the plain model")
def run_of_wrapped_model(file: File) -> Hits:
    for call in _runs(file).values():
        model = keyword(call, "model", 0)
        if model is not None and file.holds(model, "ddp", "dp", "fsdp"):
            yield hit(call, "Run takes the plain model, not a wrapped one")


@rule("error", "return the loss, and nothing else")
def backward_in_loss(file: File) -> Hits:
    losses = _loss_functions(file)
    for event in (one for events in file.events for one in events):
        function = event.ctx.function
        if function is not None and function.name in losses and event.kind in ("backward", "step", "zero"):
            yield hit(event.node, f"{event.kind} inside the loss function of a Run")
