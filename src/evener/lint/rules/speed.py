"""The loop: what happens at every step and should not, and in which order."""

from __future__ import annotations

import ast
import re

from evener.lint.events import Event, exclusive, training_loops
from evener.lint.names import loops_over_epochs
from evener.lint.rule import Checked, Edit, Hits, Rule, alone, hit, line_start, replace
from evener.lint.source import Context, Loop, last, literal


def per_batch(file: Checked, ctx: Context) -> bool:
    """The innermost loop goes over batches: it holds a backward, or iterates over a loader."""
    if not ctx.loops:
        return False
    loop = ctx.loops[-1]
    if not isinstance(loop, ast.While) and file.is_loader(loop.iter):
        return True
    inner = {one for events in file.events for one in training_loops(events)}
    return loop in inner or (isinstance(loop, ast.While) and any(file.inside(one, loop) for one in inner))


def gated(file: Checked, ctx: Context) -> bool:
    """Not at every turn of the innermost loop: behind a test that counts, or one for the last or a logging step."""
    loop = ctx.loops[-1]
    return any(
        test.wanted
        and file.inside(test.node, loop)
        and re.search(r"%|==|log|print|freq|interval|every|last|verbose|debug|profil|bench|first|>=", test.text)
        for test in ctx.tests
    )


class SchedulerBeforeOptimizer(Rule):
    """The scheduler steps before the optimizer.

    The first learning rate is skipped; torch warns once.

    bad -, good +:
          scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
          for x, y in loader:
              loss_fn(model(x), y).backward()
        +     optimizer.step()
              scheduler.step()
        -     optimizer.step()
    """

    fix = "optimizer.step() first, then scheduler.step()"

    def check(self, file: Checked) -> Hits:
        for events in file.events:
            steps = [one for one in events if one.kind in ("step", "scaler-step")]
            for event in events:
                if event.kind != "schedule" or event.node.args or event.node.keywords or not (event.ctx.loops or steps):
                    continue
                owner = event.node.func.value if isinstance(event.node.func, ast.Attribute) else event.node
                if (
                    file.holds(owner, "foreign scheduler", "plateau", "managed")
                    or last(file.segment(event.node.func)) != "step"
                ):
                    continue
                depth = len(event.ctx.loops)
                own = [one for one in steps if one.ctx.loops[:depth] == event.ctx.loops and not exclusive(one, event)]
                if not depth and not any(one.kind == "backward" for one in events):
                    continue
                before = [one for one in own if one.place < event.place]
                after = [one for one in own if one.place > event.place and one.node.lineno != event.node.lineno]
                if after and not before and not self._skips_first(file, event):
                    yield hit(event.node, "the scheduler steps first: the first learning rate is skipped",
                        *self._swap(file, event, after[0]),
                    )  # fmt: skip

    def _skips_first(self, file: Checked, event: Event) -> bool:
        return any(re.search(r">\s*0|!=\s*0|epoch|start", test.text) for test in event.ctx.tests if test.wanted)

    def _swap(self, file: Checked, event: Event, step: Event) -> tuple[Edit, ...]:
        """Moves the scheduler's line behind the optimizer's, where both are lines of one block."""
        first, second = file.statement(event.node), file.statement(step.node)
        if file.parent[first] is not file.parent[second] or not (alone(file, first) and alone(file, second)):
            return ()
        if file.at(first).tests != file.at(second).tests or isinstance(second, ast.If):
            return ()
        start, end = line_start(file, first), file.starts[first.end_lineno or first.lineno]
        behind = file.starts[second.end_lineno or second.lineno]
        moved = file.data[start:end].decode()
        if not file.data[:behind].endswith((b"\n", b"\r")):
            return ()
        return Edit(start, end, ""), Edit(behind, behind, moved)


class LossGraphAccumulate(Rule):
    """Losses are summed over steps with their graphs.

    Every batch's activations stay in memory until the sum is dropped.

    bad -, good +:
          total = 0.0
          for x, y in loader:
              loss = loss_fn(model(x), y)
              loss.backward()
              optimizer.step()
        -     total += loss
        +     total += loss.detach()
    """

    fix = "total += loss.detach()"

    def check(self, file: Checked) -> Hits:
        for aug in file.of(ast.AugAssign):
            ctx = file.at(aug)
            if not isinstance(aug.op, ast.Add) or not ctx.loops or not isinstance(aug.target, ast.Name | ast.Attribute):
                continue
            value = aug.value
            while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
                value = value.left if "loss" in file.segment(value.left).lower() else value.right
            if not isinstance(value, ast.Name) or "loss" not in value.id.lower() or file.without_grad(aug):
                continue
            target = file.segment(aug.target)
            loop = ctx.loops[-1]
            starts = file.names.bound.get((file.names.scope(aug.target), target), [])
            outside = starts and not any(file.inside(stmt, loop) for stmt, _ in starts)
            if not outside or not self._has_graph(file, value, loop):
                continue
            reads = {
                id(up) for node in file.of(ast.Name)
                if node.id == target and node.lineno > aug.lineno and file.function(node) is ctx.function
                for up in file.above(node) if isinstance(up, ast.Assign | ast.Return | ast.Call)
            }  # fmt: skip
            backs = [
                one
                for events in file.events
                for one in events
                if one.kind == "backward" and one.ctx.function is ctx.function
            ]
            summed = any(target in file.segment(one.node.func) for one in backs) or any(
                id(up) in reads for one in backs for up in file.above(one.node)
            )
            inside = [one for one in backs if loop in one.ctx.loops]
            later = [one for one in backs if one.place > (aug.lineno, 0) and loop not in one.ctx.loops]
            if summed or later:
                continue  # one step's loss, made of parts
            if inside or per_batch(file, ctx) or self._evaluates(file, ctx, target):
                edit = replace(file, value, f"{value.id}.detach()")
                yield hit(aug, f"{target} keeps every step's graph", edit)

    def _has_graph(self, file: Checked, name: ast.Name, loop: Loop) -> bool:
        """The nearest assignment above is the result of a call that may need gradients, and no number."""
        number = re.compile(
            r"\.item\(\)|\.detach\(\)|float\(|\.data\b|\.tolist\(|\.numpy\(|\.cpu\(\)\.|_value|\bnp\.|sum\(\w+\.values"
        )
        before = [(stmt, value) for stmt, value in file.values(name) if stmt.lineno <= name.lineno]
        near = [(stmt, value) for stmt, value in before if file.inside(stmt, loop)]
        if not near:
            return False
        if any(number.search(file.segment(value)) for _, value in near):
            return False
        backs = [one for events in file.events for one in events if one.kind == "backward"]
        if any(name.id in file.segment(one.node) for one in backs):
            return True
        calls = [value for _, value in near if isinstance(value, ast.Call)]
        named = re.compile(r"(crit|loss|model|net|ce|mse|func|fn)\w*$", re.I)
        first = [value for _, value in near[:1] if isinstance(value, ast.Subscript | ast.Name)]
        return bool(first) or any(named.search(file.segment(call.func)) for call in calls)

    def _evaluates(self, file: Checked, ctx: Context, target: str) -> bool:
        """An evaluation loop without a loader: it calls the model, and does not return the sum as a loss."""
        returned = any(
            target in file.segment(one.value) for one in file.of(ast.Return)
            if one.value is not None and file.function(one) is ctx.function
        )  # fmt: skip
        return (
            not returned and not file.events and bool(re.search(r"\bmodel(\.forward)?\(", file.segment(ctx.loops[-1])))
        )


class BarrierEveryStep(Rule):
    """A barrier at every step.

    All ranks wait for the slowest at every batch. Collectives wait by themselves, where they must.

    bad -, good +:
          for x, y in loader:
              loss = loss_fn(model(x), y)
        -     torch.distributed.barrier()
              torch.distributed.all_reduce(loss)
    """

    fix = "delete it"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            dotted = file.name(call.func)
            waits = dotted == "torch.distributed.barrier" or last(dotted) == "wait_for_everyone"
            ctx = file.at(call)
            if not waits or not per_batch(file, ctx) or gated(file, ctx) or file.guard(ctx):
                continue
            stmt = file.statement(call)
            edits = ()
            if isinstance(stmt, ast.Expr) and alone(file, stmt) and len(_siblings(file, stmt)) > 1:
                edits = (Edit(line_start(file, stmt), file.starts[stmt.end_lineno or stmt.lineno], ""),)  # type: ignore[assignment]
            yield hit(call, "all ranks wait for the slowest at every step", *edits, unsafe=True)


def _siblings(file: Checked, stmt: ast.stmt) -> list[ast.stmt]:
    up = file.parent[stmt]
    return next((body for name in ("body", "orelse", "finalbody") if stmt in (body := getattr(up, name, []))), [stmt])


class EmptyCacheInLoop(Rule):
    """`empty_cache()` in a loop.

    The allocator gives its memory back to the driver and asks for it again: slow, and no memory is won.

    bad -, good +:
          for x, y in loader:
              train_step(x, y)
        -     torch.cuda.empty_cache()
    """

    fix = "delete it; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragments"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            if file.name(call.func) != "torch.cuda.empty_cache":
                continue
            ctx = file.at(call)
            if not ctx.loops or ctx.handlers or loops_over_epochs(file.names, ctx.loops[-1]):
                continue
            loop = ctx.loops[-1]
            counts = (
                isinstance(loop, ast.For) and isinstance(loop.iter, ast.Call) and file.name(loop.iter.func) == "range"
            )
            fixed = counts and all(literal(arg) is not ... for arg in loop.iter.args)  # type: ignore[union-attr]
            if per_batch(file, ctx) or (counts and not fixed):
                yield hit(call, "the cache is emptied at every turn of the loop, and filled again")


class DebugLeftOn(Rule):
    """A debugging aid is left on.

    Anomaly mode keeps a traceback per operation; CUDA_LAUNCH_BLOCKING makes every kernel wait.

    bad -, good +:
        - torch.autograd.set_detect_anomaly(True)
        + torch.autograd.set_detect_anomaly(args.debug)
    """

    fix = "switch it on from outside, for one run"

    def check(self, file: Checked) -> Hits:

        def meant(node: ast.AST) -> bool:
            return any(re.search(r"debug|anomaly|detect|trace|block", test.text, re.I) for test in file.at(node).tests)

        for call in file.of(ast.Call):
            dotted = file.name(call.func)
            on = dotted == "torch.autograd.set_detect_anomaly" and call.args and literal(call.args[0]) is True
            if (on or dotted == "torch.autograd.detect_anomaly") and not meant(call):
                yield hit(call, "anomaly mode is on for the whole run")
        for assign in file.of(ast.Assign):
            target = assign.targets[0]
            if (
                (
                    isinstance(target, ast.Subscript)
                    and literal(target.slice) == "CUDA_LAUNCH_BLOCKING"
                    and str(literal(assign.value)) == "1"
                )
                and file.name(target.value) in ("os.environ", "environ")
                and not meant(assign)
            ):
                yield hit(assign, "every CUDA kernel waits for the one before")


class SyncEveryStep(Rule):
    """The host waits for the device at every step.

    bad -, good +:
          for x, y in loader:
              loss = loss_fn(model(x), y)
              loss.backward()
              optimizer.step()
        -     total += loss.item()
        +     total += loss.detach()
    """

    level = "hint"
    fix = "sum on the device, read at log steps"

    def check(self, file: Checked) -> Hits:
        training = {loop for events in file.events for loop in training_loops(events)}
        for call in file.of(ast.Call):
            ctx = file.at(call)
            if not ctx.loops or ctx.handlers:
                continue
            item = isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args
            waits = file.name(call.func) == "torch.cuda.synchronize"
            if not item and not waits:
                continue
            trains = ctx.loops[-1] in training or (
                (waits or bool(ctx.function and re.search(r"train", ctx.function.name))) and per_batch(file, ctx)
            )
            if trains and not gated(file, ctx):
                yield hit(call, "the host waits for the device at every step")


class BenchmarkAndDeterministic(Rule):
    """cudnn.benchmark is switched on beside cudnn.deterministic.

    Benchmark chooses among kernels by the clock: the seed no longer decides.

    bad -, good +:
          torch.backends.cudnn.deterministic = True
        - torch.backends.cudnn.benchmark = True
        + torch.backends.cudnn.benchmark = False
    """

    level = "hint"
    fix = "benchmark = False where runs must repeat"

    def check(self, file: Checked) -> Hits:
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
