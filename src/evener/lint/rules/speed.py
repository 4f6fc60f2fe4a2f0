"""The loop: what happens at every step and should not, and in which order."""

from __future__ import annotations

import ast
import re

from evener.lint.events import STEPS, Event, training_loops
from evener.lint.names import loops_over_epochs
from evener.lint.rule import Checked, Edit, Hits, Rule, alone, hit, line_start, replace, siblings
from evener.lint.source import Context, Loop, last, literal, method


def per_batch(file: Checked, ctx: Context) -> bool:
    """The innermost loop goes over batches: it holds a backward, or iterates over a loader."""
    loop = ctx.loops[-1] if ctx.loops else None
    if isinstance(loop, ast.For | ast.AsyncFor) and file.is_loader(loop.iter):
        return True
    inner = training_loops(file.backwards)
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


class SchedulerBeforeOptimizer(Rule, fix="optimizer.step() first, then scheduler.step()"):
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

    def check(self, file: Checked) -> Hits:
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
                yield hit(call, why, *self._swap(file, event, later[0]))

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


class LossGraphAccumulate(Rule, fix="total += loss.detach()"):
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

    def check(self, file: Checked) -> Hits:
        for aug in file.of(ast.AugAssign):
            ctx, value = file.at(aug), aug.value
            if not isinstance(aug.op, ast.Add) or not ctx.loops or not isinstance(aug.target, ast.Name | ast.Attribute):
                continue
            while isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
                value = value.left if "loss" in file.segment(value.left).lower() else value.right
            if not isinstance(value, ast.Name) or "loss" not in value.id.lower() or file.without_grad(aug):
                continue
            target, loop = file.segment(aug.target), ctx.loops[-1]
            starts = file.names.bound.get((file.names.scope(aug.target), target), [])
            if not starts or any(file.inside(stmt, loop) for stmt, _ in starts):
                continue
            backs = [one for one in file.backwards if one.ctx.function is ctx.function]
            if not self._has_graph(file, value, loop) or self._one_loss(file, aug, target, loop, backs):
                continue
            inside = any(loop in one.ctx.loops for one in backs)
            if inside or per_batch(file, ctx) or self._evaluates(file, ctx, target):
                yield hit(aug, f"{target} keeps every step's graph", replace(file, value, f"{value.id}.detach()"))

    def _one_loss(self, file: Checked, aug: ast.AugAssign, target: str, loop: Loop, backs: list[Event]) -> bool:
        """One step's loss, made of parts: the sum itself goes backward, or a backward comes behind the loop."""
        reads = {
            up for node in file.of(ast.Name)
            if node.id == target and node.lineno > aug.lineno and file.function(node) is file.function(aug)
            for up in file.above(node) if isinstance(up, ast.Assign | ast.Return | ast.Call)
        }  # fmt: skip
        return any(
            target in file.segment(one.node.func)
            or not reads.isdisjoint(file.above(one.node))
            or (one.place > (aug.lineno, 0) and loop not in one.ctx.loops)
            for one in backs
        )

    def _has_graph(self, file: Checked, name: ast.Name, loop: Loop) -> bool:
        """The nearest assignment above is the result of a call that may need gradients, and no number."""
        number = re.compile(
            r"\.item\(\)|\.detach\(\)|float\(|\.data\b|\.tolist\(|\.numpy\(|\.cpu\(\)\.|_value|\bnp\.|sum\(\w+\.values"
        )
        named = re.compile(r"(crit|loss|model|net|ce|mse|func|fn)\w*$", re.I)
        near = [v for stmt, v in file.values(name) if stmt.lineno <= name.lineno and file.inside(stmt, loop)]
        if not near or any(number.search(file.segment(value)) for value in near):
            return False
        return (
            any(name.id in file.segment(one.node) for one in file.backwards)
            or isinstance(near[0], ast.Subscript | ast.Name)
            or any(isinstance(value, ast.Call) and named.search(file.segment(value.func)) for value in near)
        )

    def _evaluates(self, file: Checked, ctx: Context, target: str) -> bool:
        """An evaluation loop without a loader: it calls the model, and does not return the sum as a loss."""
        returned = any(
            target in file.segment(one.value) for one in file.of(ast.Return)
            if one.value is not None and file.function(one) is ctx.function
        )  # fmt: skip
        calls = re.search(r"\bmodel(\.forward)?\(", file.segment(ctx.loops[-1]))
        return not returned and not file.events and calls is not None


class BarrierEveryStep(Rule, fix="delete it"):
    """A barrier at every step.

    All ranks wait for the slowest at every batch. Collectives wait by themselves, where they must.

    bad -, good +:
          for x, y in loader:
              loss = loss_fn(model(x), y)
        -     torch.distributed.barrier()
              torch.distributed.all_reduce(loss)
    """

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            dotted, ctx = file.name(call.func), file.at(call)
            waits = dotted == "torch.distributed.barrier" or last(dotted) == "wait_for_everyone"
            if not waits or not per_batch(file, ctx) or gated(file, ctx) or file.guard(ctx):
                continue
            stmt, edit = file.statement(call), None
            if isinstance(stmt, ast.Expr) and alone(file, stmt) and len(siblings(file, stmt)) > 1:
                edit = Edit(line_start(file, stmt), file.starts[stmt.end_lineno or stmt.lineno], "")
            yield hit(call, "all ranks wait for the slowest at every step", edit, unsafe=True)


class EmptyCacheInLoop(Rule, fix="delete it; PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps against fragments"):
    """`empty_cache()` in a loop.

    The allocator gives its memory back to the driver and asks for it again: slow, and no memory is won.

    bad -, good +:
          for x, y in loader:
              train_step(x, y)
        -     torch.cuda.empty_cache()
    """

    def check(self, file: Checked) -> Hits:
        for call in file.calls_of("torch.cuda.empty_cache"):
            ctx = file.at(call)
            loop = ctx.loops[-1] if ctx.loops else None
            if loop is None or ctx.handlers or loops_over_epochs(file.names, loop):
                continue
            turns = loop.iter if isinstance(loop, ast.For) else None
            counts = isinstance(turns, ast.Call) and file.name(turns.func) == "range"
            fixed = isinstance(turns, ast.Call) and all(literal(arg) is not ... for arg in turns.args)
            if per_batch(file, ctx) or (counts and not fixed):
                yield hit(call, "the cache is emptied at every turn of the loop, and filled again")


class DebugLeftOn(Rule, fix="switch it on from outside, for one run"):
    """A debugging aid is left on.

    Anomaly mode keeps a traceback per operation; CUDA_LAUNCH_BLOCKING makes every kernel wait.

    bad -, good +:
        - torch.autograd.set_detect_anomaly(True)
        + torch.autograd.set_detect_anomaly(args.debug)
    """

    def check(self, file: Checked) -> Hits:
        def meant(node: ast.AST) -> bool:
            texts = (test.text for test in file.at(node).tests)
            return any(re.search(r"debug|anomaly|detect|trace|block", text, re.I) for text in texts)

        set_on = file.calls_of("torch.autograd.set_detect_anomaly")
        set_on = [call for call in set_on if call.args and literal(call.args[0]) is True]
        for call in (*set_on, *file.calls_of("torch.autograd.detect_anomaly")):
            if not meant(call):
                yield hit(call, "anomaly mode is on for the whole run")
        for assign, value, _ in file.environment("CUDA_LAUNCH_BLOCKING"):
            if str(literal(value)) == "1" and not meant(assign):
                yield hit(assign, "every CUDA kernel waits for the one before")


class SyncEveryStep(Rule, level="hint", fix="sum on the device, read at log steps"):
    """The host waits for the device at every step.

    bad -, good +:
          for x, y in loader:
              loss = loss_fn(model(x), y)
              loss.backward()
              optimizer.step()
        -     total += loss.item()
        +     total += loss.detach()
    """

    def check(self, file: Checked) -> Hits:
        training = training_loops(file.backwards)
        for call in file.of(ast.Call):
            ctx, item = file.at(call), method(call, "item")
            waits = file.name(call.func) == "torch.cuda.synchronize"
            if not ctx.loops or ctx.handlers or not (waits or (item and not call.args)):
                continue
            named = waits or (ctx.function is not None and "train" in ctx.function.name)
            if (ctx.loops[-1] in training or (named and per_batch(file, ctx))) and not gated(file, ctx):
                yield hit(call, "the host waits for the device at every step")


class BenchmarkAndDeterministic(Rule, level="hint", fix="benchmark = False where runs must repeat"):
    """cudnn.benchmark is switched on beside cudnn.deterministic.

    Benchmark chooses among kernels by the clock: the seed no longer decides.

    bad -, good +:
          torch.backends.cudnn.deterministic = True
        - torch.backends.cudnn.benchmark = True
        + torch.backends.cudnn.benchmark = False
    """

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
