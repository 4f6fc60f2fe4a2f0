"""Gradient accumulation: the window, its divisor, its tail, and what belongs behind its gate."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import replace
from evener.lint.events import STEPS, Window, exclusive
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal, method


@rule("warning", "divide the loss by the number of microbatches before backward")
def accumulation_not_normalised(file: File) -> Hits:
    for window in file.windows:
        plain = [one for one in window.backwards if one.how in ("plain", "scaled", "apex")]
        if not plain or literal(window.modulo.right) == 1 or _scaled_elsewhere(file, window):
            continue
        every = file.segment(window.modulo.right)
        divided = rf"/=?\s*(float\()?\(?({re.escape(every)}|[\w.]*accum\w*)|\*\s*inv_|1(\.0?)?\s*/"
        if not re.search(divided, file.segment(window.loop)):
            yield hit(plain[0].node, f"{every} losses are summed, none is divided by it")


def _scaled_elsewhere(file: File, window: Window) -> bool:
    """Signs that a sum is meant: the loss is scaled by a batch size, or gradients are scaled later."""
    if re.search(
        r"\.grad(\.data)?\.(div_|mul_)|grad_scale|multiply_grads|scale_grad|nominal|reduction\s*=\s*.sum|loss_scale\b"
        r"|no_division", file.segment(window.loop),
    ):  # fmt: skip
        return True
    parts = [node for back in window.backwards for node in ast.walk(file.statement(back.node))]
    losses = [node for node in parts if isinstance(node, ast.Name) and "loss" in node.id.lower()]
    made = [file.segment(value) for node in losses for value in file.values(node)]
    scaled = (one for one in file.of(ast.AugAssign) if isinstance(one.op, ast.Mult | ast.Div))
    return (
        any(re.search(r"/|\bdiv\(|\* ?(world_size|batch_size|bs\b)", text) for text in made)
        or any("loss" in file.segment(one.target).lower() and file.inside(one, window.loop) for one in scaled)
        # The counter advances inside an inner loop, or a trainer's own step divides.
        or any("loss" not in file.segment(back.node).lower() for back in window.backwards)
    )


@rule(
    "warning", "also step at the last batch (`or i + 1 == len(loader)`), divided by the microbatches that it really has"
)
def accumulation_tail_dropped(file: File) -> Hits:
    last_turn = r"\blen\(|\blast|\bor\b.*==|final|is_end|end_of|num_batches|n_batches|steps_per_epoch"
    for window in file.windows:
        if _counts_per_epoch(file, window) and not re.search(last_turn, file.segment(window.gate.node)):
            end = window.steps[-1].place
            behind = [one for one in window.events if one.kind in STEPS and one.place > end]
            if all(window.loop in one.ctx.loops for one in behind):
                where = file.statement(window.modulo)
                yield hit(where, "the last incomplete window of the loader is never applied")


def _counts_per_epoch(file: File, window: Window) -> bool:
    """The counter starts again with the loop over the loader: by enumerate, or because the loop around it resets it.

    A counter that goes on over epochs loses nothing: the window goes on too.
    """
    loop, ctx = window.loop, window.steps[0].ctx
    if not isinstance(loop, ast.For) or (not file.is_loader(loop.iter) and "enumerate(" not in file.segment(loop.iter)):
        return False
    counters = {node.id for node in ast.walk(window.modulo.left) if isinstance(node, ast.Name)}
    if counters & {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}:
        return True
    outer = ctx.loops[: ctx.loops.index(loop)]
    reset = [stmt for name in counters for stmt, _ in file.bound.get((ctx.function, name), []) if outer]
    return any(file.inside(stmt, outer[-1]) and not file.inside(stmt, loop) for stmt in reset)


@rule("error", "(i + 1) % n == 0")
def accumulation_off_by_one(file: File) -> Hits:
    for window in file.windows:
        counter, test = window.modulo.left, file.parent[window.modulo]
        if not isinstance(counter, ast.Name) or not isinstance(test, ast.Compare) or literal(window.modulo.right) == 1:
            continue
        gate = [type(op) for op in test.ops], literal(test.comparators[0])
        if gate == ([ast.Eq], 0) and _starts_at(file, window, counter.id) == 0:
            why = f"{counter.id} starts at 0: the first window holds one microbatch"
            yield hit(file.statement(test), why, replace(file, counter, f"({counter.id} + 1)"))


def _starts_at(file: File, window: Window, counter: str) -> object:
    """The counter's first value: of enumerate, or of a sum that begins with it (`ni = i + len(loader) * epoch`)."""
    loop = window.loop
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Tuple):
        return None
    own = file.segment(loop.target.elts[0])
    named = (one for one in ast.walk(loop.iter) if isinstance(one, ast.Call))
    call = next((one for one in named if last(file.name(one.func)) == "enumerate"), None)
    if call is None:
        return None
    if own == counter:
        changed = (aug for aug in file.of(ast.AugAssign) if file.inside(aug, loop))
        fits = all(file.segment(aug.target) != counter for aug in changed)
    else:
        fits = any(
            file.inside(stmt, loop) and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
            and file.segment(value.left) == own and literal(value.right) is ...
            for stmt, value in file.bound.get((window.events[0].ctx.function, counter), [])
        )  # fmt: skip
    start = keyword(call, "start", 1)
    return None if not fits else 0 if start is None else literal(start)


@rule("error", "clip once, in the branch that steps")
def clip_every_microbatch(file: File) -> Hits:
    for window in file.windows:
        for event in window.ungated("clip"):
            if not all(exclusive(event, step) for step in window.steps):
                yield hit(event.node, "clipped at every microbatch, applied only at some")


@rule("warning", "put the forward inside no_sync() too")
def no_sync_without_forward(file: File) -> Hits:
    quiet = {"backward", "scale", "item", "detach", "update", "append", "mean", "sum", "float", "print", "div"}
    for block in file.of(ast.With):
        if not any(method(one.context_expr, "no_sync") for one in block.items):
            continue
        calls = [node for stmt in block.body for node in ast.walk(stmt) if isinstance(node, ast.Call)]
        words = [last(file.name(one.func)) or getattr(one.func, "attr", "") for one in calls]
        backs = [one for one, word in zip(calls, words) if word == "backward"]
        if backs and quiet.issuperset(words) and not any(one.args for one in backs):
            yield hit(block, "the forward is outside of no_sync(): DDP reduces all the same")


@rule("warning", "run forward and backward of all but the last microbatch in model.no_sync()")
def accumulation_without_no_sync(file: File) -> Hits:
    if not file.windows or not file.uses("ddp") or file.uses("accelerator", "fsdp") or file.calls("no_sync"):
        return
    if not re.search(r"require_backward_grad_sync|delay_allreduce", file.text):
        why = "every microbatch is reduced over all ranks; one reduction per update is enough"
        for window in file.windows:
            if literal(window.modulo.right) != 1 and not any(one.how == "managed" for one in window.backwards):
                yield hit(window.backwards[-1].node, why)
