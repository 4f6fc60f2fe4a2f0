"""The loop: what happens at every step and should not, and in which order."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import Edit, alone, replace, siblings, whole_lines
from evener.lint.events import STEPS, Event, training_loops
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import Context, Loop, last, leaves, literal, method


def _per_batch(file: File, ctx: Context) -> bool:
    """The innermost loop goes over batches: it holds a backward, or iterates over a loader."""
    loop = ctx.loops[-1] if ctx.loops else None
    if isinstance(loop, ast.For | ast.AsyncFor) and file.is_loader(loop.iter):
        return True
    inner = training_loops(file.backwards)
    return loop in inner or (isinstance(loop, ast.While) and any(file.inside(one, loop) for one in inner))


def _gated(file: File, ctx: Context) -> bool:
    """Not at every turn of the innermost loop: behind a test that counts, or one for the last or a logging step."""
    some = re.compile(r"%|==|log|print|freq|interval|every|last|verbose|debug|profil|bench|first|>=")
    return any(test.wanted and some.search(test.text) and file.inside(test.node, ctx.loops[-1]) for test in ctx.tests)


@rule("warning", "optimizer.step() first, then scheduler.step()")
def scheduler_before_optimizer(file: File) -> Hits:
    why = "the scheduler steps first: the first learning rate is skipped"
    for event, before, after in file.moments("schedule"):
        call, loops = event.node, event.ctx.loops
        if call.args or call.keywords or method(call, "step") is None:
            continue
        if file.holds(event.owner, "foreign scheduler", "plateau", "managed"):
            continue
        if not loops and not any(one.kind == "backward" for one in before + after):
            continue
        first, later = (
            [one for one in some if one.kind in STEPS and one.ctx.loops[: len(loops)] == loops]
            for some in (before, after)
        )
        later = [one for one in later if one.node.lineno != call.lineno]
        texts = [test.text for test in event.ctx.tests if test.wanted]
        if later and not first and not any(re.search(r">\s*0|!=\s*0|epoch|start", text) for text in texts):
            yield hit(call, why, *_swap(file, event, later[0]))


def _swap(file: File, event: Event, step: Event) -> tuple[Edit, ...]:
    """Moves the scheduler's line behind the optimizer's, where both are lines of one block."""
    first, second = file.statement(event.node), file.statement(step.node)
    together = file.parent[first] is file.parent[second] and file.at(first).tests == file.at(second).tests
    if not together or not (alone(file, first) and alone(file, second)) or isinstance(second, ast.If):
        return ()
    (start, end), (_, behind) = whole_lines(file, first), whole_lines(file, second)
    if not file.data[:behind].endswith((b"\n", b"\r")):
        return ()
    return Edit(start, end, ""), Edit(behind, behind, file.data[start:end].decode())


@rule("error", "model.train() at the top of every turn, or behind the evaluation")
def eval_without_train(file: File) -> Hits:
    trains = [(call, file.segment(func.value)) for call, func in file.methods("train")]
    for call, func in file.methods("eval"):
        ctx, model = file.at(call), file.segment(func.value)
        backs = [one for one in file.backwards if one.ctx.function is ctx.function and one.place < (call.lineno, 0)]
        loop = next((one for one in ctx.loops if any(one in back.ctx.loops for back in backs)), None)
        if loop is None or call.args or leaves(siblings(file, file.statement(call))):
            continue
        above = [one for one, text in trains if text == model and one.lineno < loop.lineno]
        begins = file.values(func.value) if not trains else above  # a new module is in training mode
        if begins and len(above) == len(trains) and all(file.function(one) is ctx.function for one in above):
            yield hit(call, f"{model} never goes back to train(): after this it trains in evaluation mode")


@rule("warning", "total += loss.detach()")
def loss_graph_accumulate(file: File) -> Hits:
    for aug in file.of(ast.AugAssign):
        ctx, value = file.at(aug), aug.value
        if not isinstance(aug.op, ast.Add) or not ctx.loops or not isinstance(aug.target, ast.Name | ast.Attribute):
            continue
        while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            value = value.left if "loss" in file.segment(value.left).lower() else value.right
        if not isinstance(value, ast.Name) or "loss" not in value.id.lower() or file.without_grad(aug):
            continue
        target, loop = file.segment(aug.target), ctx.loops[-1]
        starts = file.bound.get((file.scope(aug.target), target), [])
        if not starts or any(file.inside(stmt, loop) for stmt, _ in starts):
            continue
        backs = [one for one in file.backwards if one.ctx.function is ctx.function]
        if not _has_graph(file, value, loop) or _one_loss(file, aug, target, backs):
            continue
        inside = any(loop in one.ctx.loops for one in backs)
        if inside or _per_batch(file, ctx) or _evaluates(file, ctx, target):
            yield hit(aug, f"{target} keeps every step's graph", replace(file, value, f"{value.id}.detach()"))


def _one_loss(file: File, aug: ast.AugAssign, target: str, backs: list[Event]) -> bool:
    """One step's loss, made of parts: the sum itself goes backward, or a backward comes behind the loop."""
    later = [one for one in file.of(ast.Name) if one.id == target and one.lineno > aug.lineno]
    reads = {
        up for node in later if file.function(node) is file.function(aug)
        for up in file.above(node) if isinstance(up, ast.Assign | ast.Return | ast.Call)
    }  # fmt: skip
    return any(
        target in file.segment(one.node.func)
        or not reads.isdisjoint(file.above(one.node))
        or (one.place > (aug.lineno, 0) and file.at(aug).loops[-1] not in one.ctx.loops)
        for one in backs
    )


def _has_graph(file: File, name: ast.Name, loop: Loop) -> bool:
    """The nearest assignment above is the result of a call that may need gradients, and no number."""
    number = r"\.item\(\)|\.detach\(\)|float\(|\.data\b|\.tolist\(|\.numpy\(|\.cpu\(\)\.|_value|\bnp\.|sum\(\w+\.values"
    named = re.compile(r"(crit|loss|model|net|ce|mse|func|fn)\w*$", re.I)
    near = [v for stmt, v in file.bindings(name) if stmt.lineno <= name.lineno and file.inside(stmt, loop)]
    if not near or any(re.search(number, file.segment(value)) for value in near):
        return False
    return (
        any(name.id in file.segment(one.node) for one in file.backwards)
        or isinstance(near[0], ast.Subscript | ast.Name)
        or any(isinstance(value, ast.Call) and named.search(file.segment(value.func)) for value in near)
    )


def _evaluates(file: File, ctx: Context, target: str) -> bool:
    """An evaluation loop without a loader: it calls the model, and does not return the sum as a loss."""
    here = (one.value for one in file.of(ast.Return) if file.function(one) is ctx.function)
    returned = any(target in file.segment(value) for value in here if value is not None)
    return not returned and not file.events and bool(re.search(r"\bmodel(\.forward)?\(", file.segment(ctx.loops[-1])))


@rule("warning", "delete it")
def barrier_every_step(file: File) -> Hits:
    for call in file.of(ast.Call):
        dotted, ctx = file.name(call.func), file.at(call)
        waits = dotted == "torch.distributed.barrier" or last(dotted) == "wait_for_everyone"
        if waits and _per_batch(file, ctx) and not _gated(file, ctx) and not file.guard(ctx):
            stmt = file.statement(call)
            lone = isinstance(stmt, ast.Expr) and alone(file, stmt) and len(siblings(file, stmt)) > 1
            edit = Edit(*whole_lines(file, stmt), "") if lone else None
            yield hit(call, "all ranks wait for the slowest at every step", edit, unsafe=True)


@rule("warning", "delete it; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragments")
def empty_cache_in_loop(file: File) -> Hits:
    for call in file.calls_of("torch.cuda.empty_cache"):
        ctx = file.at(call)
        loop = ctx.loops[-1] if ctx.loops else None
        if loop is None or ctx.handlers or file.over_epochs(loop):
            continue
        turns = loop.iter if isinstance(loop, ast.For) else None
        counts = isinstance(turns, ast.Call) and file.name(turns.func) == "range"
        fixed = isinstance(turns, ast.Call) and all(literal(arg) is not ... for arg in turns.args)
        if _per_batch(file, ctx) or (counts and not fixed):
            yield hit(call, "the cache is emptied at every turn of the loop, and filled again")


@rule("warning", "switch it on from outside, for one run")
def debug_left_on(file: File) -> Hits:
    set_on = file.calls_of("torch.autograd.set_detect_anomaly")
    set_on = [call for call in set_on if call.args and literal(call.args[0]) is True]
    calls = (*set_on, *file.calls_of("torch.autograd.detect_anomaly"))
    found: list[tuple[ast.AST, str]] = [(call, "anomaly mode is on for the whole run") for call in calls]
    for assign, _, _ in file.environment("CUDA_LAUNCH_BLOCKING"):
        if str(literal(assign.value)) == "1":
            found.append((assign, "every CUDA kernel waits for the one before"))
    for node, why in found:
        asked = (re.search(r"debug|anomaly|detect|trace|block", test.text, re.I) for test in file.at(node).tests)
        if not any(asked):
            yield hit(node, why)


@rule("hint", "sum on the device, read at log steps")
def sync_every_step(file: File) -> Hits:
    training = training_loops(file.backwards)
    for call in file.of(ast.Call):
        ctx, item = file.at(call), method(call, "item")
        waits = file.name(call.func) == "torch.cuda.synchronize"
        if ctx.loops and not ctx.handlers and (waits or (item and not call.args)):
            named = waits or (ctx.function is not None and "train" in ctx.function.name)
            if (ctx.loops[-1] in training or (named and _per_batch(file, ctx))) and not _gated(file, ctx):
                yield hit(call, "the host waits for the device at every step")


@rule("hint", "benchmark = False where runs must repeat")
def benchmark_and_deterministic(file: File) -> Hits:
    switched: dict[str, list[ast.Assign]] = {"deterministic": [], "benchmark": []}
    for assign in file.of(ast.Assign):
        target = assign.targets[0]
        if isinstance(target, ast.Attribute) and target.attr in switched and "cudnn" in file.segment(target):
            if literal(assign.value) is True:
                switched[target.attr].append(assign)
    for assign in switched["benchmark"]:
        mine = {test.text: test.wanted for test in file.at(assign).tests}
        for other in switched["deterministic"]:
            if all(mine.get(test.text, test.wanted) == test.wanted for test in file.at(other).tests):
                yield hit(assign, f"line {other.lineno} asks for determinism, benchmark undoes it")
                break
