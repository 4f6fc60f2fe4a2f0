"""The order of what happens in a function: forward, backward, unscale, clip, step, update, zero, schedule.

Every event keeps the tests and loops around it. Two events exclude each other when they stand in different branches of
one `if`, or when their tests need opposite values of one text (`if scaler is not None:` ... `if scaler is None:`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evener.lint.source import Context, Loop, Test, last, method

if TYPE_CHECKING:
    from evener.lint.file import File

STEPS = ("step", "scaler-step")
CLIPS = {"clip_grad_norm_", "clip_grad_norm", "clip_grad_value_"}


@dataclass(frozen=True)
class Event:
    kind: str  # backward, unscale, clip, step, scaler-step, update, zero, schedule
    node: ast.Call
    how: str  # of a backward: "plain", "scaled", "apex", "managed"; of a step: the receiver's text
    on: str  # the optimizer's, scaler's or loss's text
    ctx: Context

    @property
    def place(self) -> tuple[int, int]:
        return self.node.end_lineno or 0, self.node.end_col_offset or 0

    @property
    def owner(self) -> ast.expr:
        """What stands before the dot."""
        return self.node.func.value if isinstance(self.node.func, ast.Attribute) else self.node.func


def event(file: File, call: ast.Call) -> Event | None:
    func, ctx = call.func, file.at(call)
    if not isinstance(func, ast.Name | ast.Attribute):
        return None
    end = last(file.name(func)) or getattr(func, "attr", "")
    argument = file.segment(call.args[0]) if call.args else ""
    clips = "param" in argument and re.search(r"clip_?grad|grad\w*_?clip", file.segment(func), re.I)
    if end in CLIPS or clips:
        managed = isinstance(func, ast.Attribute) and file.holds(func.value, "accelerator", "managed")
        return None if managed else Event("clip", call, end, argument, ctx)
    if not isinstance(func, ast.Attribute):
        return None
    owner, on = func.value, file.segment(func.value)
    if end == "backward":
        return Event("backward", call, _how(file, call, owner, ctx), on, ctx)
    if end == "unscale_":
        return Event("unscale", call, on, argument, ctx)
    if end == "step" and argument and file.is_scaler(owner):
        return Event("scaler-step", call, on, argument, ctx)
    scheduler = end in ("step", "step_update") and file.is_scheduler(owner)
    kinds = {
        "zero": end == "zero_grad", "update": end == "update" and file.is_scaler(owner), "schedule": scheduler,
        "step": end == "step" and not scheduler and file.is_optimizer(owner),
    }  # fmt: skip
    return next((Event(kind, call, on, on, ctx) for kind, fits in kinds.items() if fits), None)


def _how(file: File, call: ast.Call, owner: ast.expr, ctx: Context) -> str:
    if any(method(one, "scale") for one in (owner, *file.latest(owner, call.lineno))):
        return "scaled"
    if any(isinstance(one, ast.Call) and last(file.name(one.func)) == "scale_loss" for one in ctx.withs):
        return "apex"
    if file.holds(owner, "accelerator", "managed") or (call.args and not re.search(r"loss|err|cost", file.word(owner))):
        return "managed"  # accelerator.backward(loss), engine.backward(loss), optimizer.backward(loss)
    return "plain"


# --- order and branches ---------------------------------------------------------------------------------------------
def exclusive(a: Event, b: Event) -> bool:
    """They never happen in one pass: their tests contradict each other."""
    wanted = {test.text: test.wanted for test in a.ctx.tests}
    return any(wanted.get(test.text, test.wanted) != test.wanted for test in b.ctx.tests)


def branches(ctx: Context) -> set[tuple[str, bool]]:
    return {(test.text, test.wanted) for test in ctx.tests}


def dominates(a: Event, b: Event) -> bool:
    """Where b happens, a has happened before, in the same turn of the same loops."""
    turn = b.ctx.loops[: len(a.ctx.loops)] == a.ctx.loops
    return turn and a.place < b.place and branches(a.ctx) <= branches(b.ctx)


def gate(file: File, event: Event) -> Test | None:
    """The test that lets only every n-th turn of the innermost loop through: `(i + 1) % n == 0`, or a name for it."""
    loop = event.ctx.loops[-1] if event.ctx.loops else None
    for test in event.ctx.tests:
        if loop is None or file.inside(test.node, loop):
            text = file.segment(test.node)
            logs = re.search(r"log|print|eval|save|valid|disp|vis|freq|interval", text, re.I)
            if modulo(file, test.node) and (not logs or re.search(r"accum|grad|update", text, re.I)):
                return test
    return None


def modulo(file: File, test: ast.expr, depth: int = 2) -> ast.BinOp | None:
    """The `a % n` of a test that compares it with a number."""
    for node in ast.walk(test):
        part: ast.expr | None = node.left if isinstance(node, ast.Compare) else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            part = node.operand
        if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
            return part
    if depth and isinstance(test, ast.Name | ast.Attribute):
        made = (value for value in file.values(test) if isinstance(value, ast.Compare | ast.BoolOp))
        return next((found for value in made if (found := modulo(file, value, depth - 1))), None)
    return None


@dataclass(frozen=True)
class Window:
    """Gradient accumulation in one function: backwards at every turn, a step behind a gate."""

    loop: Loop
    gate: Test
    modulo: ast.BinOp  # its right side is the number of microbatches
    backwards: tuple[Event, ...]
    steps: tuple[Event, ...]  # those behind the gate
    events: tuple[Event, ...]  # all of the function

    def ungated(self, kind: str) -> list[Event]:
        """The events in the loop that the gate does not hold back."""
        inside = [one for one in self.events if one.kind == kind and self.loop in one.ctx.loops]
        return [one for one in inside if not any(test.node is self.gate.node for test in one.ctx.tests)]


def windows(file: File, events: list[Event]) -> Iterator[Window]:
    """Every accumulation window: a gated step whose backward, in the same loop, is not gated."""
    seen = set()
    for step in events:
        test = gate(file, step) if step.kind in STEPS and step.ctx.loops else None
        if test is None or test.node in seen:
            continue
        steps = tuple(one for one in events if one.kind in STEPS and any(t.node is test.node for t in one.ctx.tests))
        loops = step.ctx.loops
        before = (one for one in events if one.kind == "backward" and one.ctx.loops[: len(loops)] == loops)
        backs = tuple(
            one for one in before
            if one.place < steps[-1].place and gate(file, one) is None
            and not all(exclusive(one, other) for other in steps)
        )  # fmt: skip
        found = modulo(file, test.node)
        if backs and found is not None:
            seen.add(test.node)
            yield Window(loops[-1], test, found, backs, steps, tuple(events))


def training_loops(events: list[Event]) -> set[Loop]:
    """The innermost loops that hold a backward: one turn is one (micro)batch."""
    return {one.ctx.loops[-1] for one in events if one.kind == "backward" and one.ctx.loops}
