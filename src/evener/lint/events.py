"""The order of what happens in a function: forward, backward, unscale, clip, step, update, zero, schedule, collective.

Every event keeps the tests and loops around it. Two events exclude each other when they stand in different branches of
one `if`, or when their tests need opposite values of one text (`if scaler is not None:` ... `if scaler is None:`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from evener.lint.names import Names
from evener.lint.source import Context, Function, Loop, Source, Test, last

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


def events_of(names: Names, function: Function | None) -> list[Event]:
    """All events of one function (None: of the module's own lines), in the order of the source."""
    source = names.source
    found = []
    for call in source.of(ast.Call):
        ctx = source.at(call)
        if ctx.function is function and isinstance(call.func, ast.Name | ast.Attribute):
            event = _event(names, call, ctx)
            if event:
                found.append(event)
    return sorted(found, key=lambda event: event.place)


def all_events(names: Names) -> list[list[Event]]:
    """Per function that has a backward or a step, its events."""
    source = names.source
    words = {"backward", "step"}
    functions: dict[Function | None, None] = {}
    for call in source.of(ast.Call):
        if isinstance(call.func, ast.Attribute) and call.func.attr in words:
            functions[source.at(call).function] = None
    return [found for one in functions if (found := events_of(names, one))]


def _event(names: Names, call: ast.Call, ctx: Context) -> Event | None:
    source, func = names.source, call.func
    end = last(source.name(func)) or (func.attr if isinstance(func, ast.Attribute) else "")
    parameters = bool(call.args) and "param" in source.segment(call.args[0])
    if end in CLIPS or (parameters and re.search(r"clip_?grad|grad\w*_?clip", f"{source.segment(func)}", re.I)):
        managed = isinstance(func, ast.Attribute) and names.holds(func.value, "accelerator", "managed")
        return None if managed else Event("clip", call, end, source.segment(call.args[0]) if call.args else "", ctx)
    if not isinstance(func, ast.Attribute):
        return None
    owner, on = func.value, source.segment(func.value)
    argument = source.segment(call.args[0]) if call.args else ""
    if end == "backward":
        return Event("backward", call, _how(names, call, owner, ctx), on, ctx)
    if end == "unscale_":
        return Event("unscale", call, on, argument, ctx)
    if end == "zero_grad":
        return Event("zero", call, on, on, ctx)
    if end == "update" and names.is_scaler(owner):
        return Event("update", call, on, on, ctx)
    if end in ("step", "step_update"):
        if end == "step" and names.is_scaler(owner) and call.args:
            return Event("scaler-step", call, on, argument, ctx)
        if names.is_scheduler(owner):
            return Event("schedule", call, on, on, ctx)
        if end == "step" and names.is_optimizer(owner):
            return Event("step", call, on, on, ctx)
    return None


def _how(names: Names, call: ast.Call, owner: ast.expr, ctx: Context) -> str:
    source = names.source
    scaled = [owner, *[value for stmt, value in names.values(owner) if stmt.lineno <= call.lineno][-1:]]
    for one in scaled:
        if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute) and one.func.attr == "scale":
            return "scaled"
    if any(isinstance(one, ast.Call) and last(source.name(one.func)) == "scale_loss" for one in ctx.withs):
        return "apex"
    word = last(source.segment(owner)).lower()
    if names.holds(owner, "accelerator", "managed") or (call.args and not re.search(r"loss|err|cost", word)):
        return "managed"  # accelerator.backward(loss), engine.backward(loss), optimizer.backward(loss)
    return "plain"


# --- order and branches ---------------------------------------------------------------------------------------------
def exclusive(a: Event, b: Event) -> bool:
    """They never happen in one pass: their tests contradict each other."""
    wanted = {test.text: test.wanted for test in a.ctx.tests}
    return any(wanted.get(test.text, test.wanted) != test.wanted for test in b.ctx.tests)


def dominates(a: Event, b: Event) -> bool:
    """Where b happens, a has happened before, in the same turn of the same loops."""
    known = {(test.text, test.wanted) for test in b.ctx.tests}
    return (
        a.place < b.place
        and b.ctx.loops[: len(a.ctx.loops)] == a.ctx.loops
        and all((test.text, test.wanted) in known for test in a.ctx.tests)
    )


def gate(names: Names, event: Event) -> Test | None:
    """The test that lets only every n-th turn of the innermost loop through: `(i + 1) % n == 0`, or a name for it."""
    for test in event.ctx.tests:
        loop = event.ctx.loops[-1] if event.ctx.loops else None
        if loop is not None and not names.source.inside(test.node, loop):
            continue
        if modulo(names, test.node) is not None and not _is_logging(names, test.node):
            return test
    return None


def modulo(names: Names, test: ast.expr, depth: int = 2) -> ast.BinOp | None:
    """The `a % n` of a test that compares it with a number."""
    for node in ast.walk(test):
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Mod):
            return node.left
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and isinstance(node.operand, ast.BinOp):
            if isinstance(node.operand.op, ast.Mod):
                return node.operand
    if depth and isinstance(test, ast.Name | ast.Attribute):
        for _, value in names.values(test):
            if isinstance(value, ast.Compare | ast.BoolOp) and (found := modulo(names, value, depth - 1)):
                return found
    return None


def _is_logging(names: Names, test: ast.expr) -> bool:
    return bool(
        re.search(r"log|print|eval|save|valid|disp|vis|freq|interval", names.source.segment(test), re.I)
    ) and not re.search(r"accum|grad|update", names.source.segment(test), re.I)


@dataclass(frozen=True)
class Window:
    """Gradient accumulation in one function: backwards at every turn, a step behind a gate."""

    source: Source
    loop: Loop
    gate: Test
    modulo: ast.BinOp
    backwards: tuple[Event, ...]
    steps: tuple[Event, ...]  # those behind the gate
    events: tuple[Event, ...]  # all of the function

    @property
    def every(self) -> ast.expr:
        """The number of microbatches."""
        return self.modulo.right

    def ungated(self, kind: str) -> list[Event]:
        """The events in the loop that the gate does not hold back."""
        inside = [one for one in self.events if one.kind == kind and self.loop in one.ctx.loops]
        return [one for one in inside if not any(test.node is self.gate.node for test in one.ctx.tests)]


def windows(names: Names, events: list[Event]) -> Iterator[Window]:
    """Every accumulation window: a gated step whose backward, in the same loop, is not gated."""
    seen = set()
    for step in events:
        test = gate(names, step) if step.kind in STEPS and step.ctx.loops else None
        if test is None or test.node in seen:
            continue
        steps = tuple(one for one in events if one.kind in STEPS and any(t.node is test.node for t in one.ctx.tests))
        backs = tuple(
            one
            for one in events
            if one.kind == "backward"
            and one.ctx.loops[: len(step.ctx.loops)] == step.ctx.loops
            and one.place < steps[-1].place
            and not all(exclusive(one, other) for other in steps)
            and gate(names, one) is None
        )
        found = modulo(names, test.node)
        if backs and found is not None:
            seen.add(test.node)
            yield Window(names.source, step.ctx.loops[-1], test, found, backs, steps, tuple(events))


def training_loops(events: list[Event]) -> set[Loop]:
    """The innermost loops that hold a backward: one turn is one (micro)batch."""
    return {one.ctx.loops[-1] for one in events if one.kind == "backward" and one.ctx.loops}
