"""Gradient accumulation: the window, its divisor, its tail, and what belongs behind its gate."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.events import Window, exclusive
from evener.lint.rule import Checked, Finding, Rule, replace
from evener.lint.source import Source, keyword, last, literal


class AccumulationNotNormalised(Rule):
    """The loss of a microbatch is not divided by the number of microbatches.

    The gradient of the update is N times too large: with N = 8 the learning rate is in effect 8 times what it says.

    bad -, good +:
          for i, (x, y) in enumerate(loader):
        -     loss = loss_fn(model(x), y)
        +     loss = loss_fn(model(x), y) / accumulate
              loss.backward()
              if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                  optimizer.step()
                  optimizer.zero_grad()
    """

    fix = "divide the loss by the number of microbatches before backward"

    def check(self, file: Checked) -> Iterator[Finding]:
        source = file.source
        for window in file.windows:
            plain = [one for one in window.backwards if one.how in ("plain", "scaled", "apex")]
            if not plain or literal(window.every) == 1 or _scaled_elsewhere(file, window):
                continue
            text = source.segment(window.loop)
            every = re.escape(source.segment(window.every))
            if re.search(rf"/=?\s*(float\()?\(?({every}|\w*accum\w*|[\w.]*accum\w*)", text) or re.search(
                r"\*\s*inv_|1(\.0?)?\s*/", text
            ):
                continue
            yield self.found(
                file, plain[0].node, f"{source.segment(window.every)} losses are summed, none is divided by it"
            )


def _scaled_elsewhere(file: Checked, window: Window) -> bool:
    """Signs that a sum is meant: the loss is scaled by a batch size, or gradients are scaled later."""
    text = file.source.segment(window.loop)
    if re.search(
        r"\.grad(\.data)?\.(div_|mul_)|grad_scale|multiply_grads|scale_grad|nominal|reduction\s*=\s*.sum|loss_scale\b|no_division",
        text,
    ):
        return True
    for back in window.backwards:
        for node in ast.walk(file.source.statement(back.node)):
            if isinstance(node, ast.Name) and "loss" in node.id.lower():
                for stmt, value in file.names.values(node):
                    if isinstance(stmt, ast.AugAssign) or re.search(
                        r"/|\bdiv\(|\* ?(world_size|batch_size|bs\b)", file.source.segment(value)
                    ):
                        return True
    for aug in file.source.of(ast.AugAssign):
        if (
            file.source.inside(aug, window.loop)
            and isinstance(aug.op, ast.Mult | ast.Div)
            and "loss" in file.source.segment(aug.target).lower()
        ):
            return True
    # The counter advances inside an inner loop, or a trainer's own step divides.
    return any("loss" not in file.source.segment(back.node).lower() for back in window.backwards)


class AccumulationTailDropped(Rule):
    """The last, incomplete window of an epoch is never applied.

    Its gradients are thrown away, or leak into the first update of the next epoch.

    bad -, good +:
          for epoch in range(10):
              for i, (x, y) in enumerate(loader):
                  (loss_fn(model(x), y) / accumulate).backward()
        -         if (i + 1) % accumulate == 0:
        +         if (i + 1) % accumulate == 0 or i + 1 == len(loader):
                      optimizer.step()
                      optimizer.zero_grad()
    """

    fix = "also step at the last batch (`or i + 1 == len(loader)`), divided by the microbatches that it really has"

    def check(self, file: Checked) -> Iterator[Finding]:
        for window in file.windows:
            if not isinstance(window.loop, ast.For) or not _counts_per_epoch(file, window):
                continue
            test = file.source.segment(window.gate.node)
            if re.search(r"\blen\(|\blast|\bor\b.*==|final|is_end|end_of|num_batches|n_batches|steps_per_epoch", test):
                continue
            after = [
                one for one in window.events
                if one.kind in ("step", "scaler-step") and window.loop not in one.ctx.loops
                and one.place > window.steps[-1].place
            ]  # fmt: skip
            if not after:
                where = file.source.statement(window.modulo)
                yield self.found(file, where, "the last incomplete window of the loader is never applied")


def _counts_per_epoch(file: Checked, window: Window) -> bool:
    """The counter starts again with the loop over the loader: by enumerate, or because the loop around it resets it.

    A counter that goes on over epochs loses nothing: the window goes on too.
    """
    loop = window.loop
    if not isinstance(loop, ast.For) or (
        not file.names.is_loader(loop.iter) and "enumerate(" not in file.source.segment(loop.iter)
    ):
        return False
    counters = {node.id for node in ast.walk(window.modulo.left) if isinstance(node, ast.Name)}
    if counters & {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}:
        return True
    around = window.steps[0].ctx.loops
    outer = around[around.index(loop) - 1] if around.index(loop) else None
    return outer is not None and any(
        file.source.inside(stmt, outer) and not file.source.inside(stmt, loop)
        for name in counters
        for stmt, _ in file.names.bound.get((window.steps[0].ctx.function, name), [])
    )


class AccumulationOffByOne(Rule):
    """The window's gate counts from 0: the first update sees one microbatch.

    `i % n == 0` is true at i = 0, so the first window has one microbatch (divided by n), and every other is shifted.

    bad -, good +:
          for i, (x, y) in enumerate(loader):
              (loss_fn(model(x), y) / accumulate).backward()
        -     if i % accumulate == 0:
        +     if (i + 1) % accumulate == 0:
                  optimizer.step()
                  optimizer.zero_grad()
          optimizer.step()
    """

    level = "error"
    fix = "(i + 1) % n == 0"

    def check(self, file: Checked) -> Iterator[Finding]:
        source = file.source
        for window in file.windows:
            counter = window.modulo.left
            node = _comparison(source, window.modulo)
            if not isinstance(counter, ast.Name) or literal(window.every) == 1 or node is None:
                continue
            start = _starts_at(file, window, counter.id)
            if start != 0 or literal(node.comparators[0]) != 0 or not isinstance(node.ops[0], ast.Eq):
                continue
            where = next((up for up in source.above(node) if isinstance(up, ast.stmt)), node)
            yield self.found(
                file, where, f"{counter.id} starts at 0: the first window holds one microbatch",
                replace(source, counter, f"({counter.id} + 1)"),
            )  # fmt: skip


def _comparison(source: Source, modulo: ast.BinOp) -> ast.Compare | None:
    up = source.parent[modulo]
    return up if isinstance(up, ast.Compare) and len(up.ops) == 1 else None


def _starts_at(file: Checked, window: Window, counter: str) -> int | None:
    """The counter's first value: of enumerate, or of a sum that begins with it (`ni = i + len(loader) * epoch`)."""
    loop = window.loop
    if (
        not isinstance(loop, ast.For)
        or not isinstance(loop.target, ast.Tuple)
        or not isinstance(loop.target.elts[0], ast.Name)
    ):
        return None
    for call in ast.walk(loop.iter):
        if isinstance(call, ast.Call) and last(file.source.name(call.func)) == "enumerate":
            start = keyword(call, "start", 1)
            first = 0 if start is None else literal(start)
            own = loop.target.elts[0].id
            if own == counter:
                changed = any(
                    isinstance(aug.target, ast.Name) and aug.target.id == counter
                    for aug in file.source.of(ast.AugAssign)
                    if file.source.inside(aug, loop)
                )  # fmt: skip
                return first if isinstance(first, int) and not changed else None
            for stmt, value in file.names.bound.get((window.events[0].ctx.function, counter), []):
                inside = file.source.inside(stmt, loop)
                plus = (
                    isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add) and isinstance(value.left, ast.Name)
                )
                if inside and plus and value.left.id == own and literal(value.right) is ...:  # type: ignore[attr-defined]
                    return first if isinstance(first, int) else None
    return None


class ClipEveryMicrobatch(Rule):
    """Gradients are clipped at every microbatch, but applied only at some.

    The partial sum is cut down again and again: early microbatches count less than late ones.

    bad -, good +:
          for i, (x, y) in enumerate(loader):
              (loss_fn(model(x), y) / accumulate).backward()
        -     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
              if (i + 1) % accumulate == 0 or i + 1 == len(loader):
        +         torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                  optimizer.step()
                  optimizer.zero_grad()
    """

    level = "error"
    fix = "clip once, in the branch that steps"

    def check(self, file: Checked) -> Iterator[Finding]:
        for window in file.windows:
            for event in window.events:
                inside = event.kind == "clip" and window.loop in event.ctx.loops
                gated = any(test.node is window.gate.node for test in event.ctx.tests)
                if inside and not gated and not all(exclusive(event, step) for step in window.steps):
                    yield self.found(file, event.node, "clipped at every microbatch, applied only at some")


class NoSyncWithoutForward(Rule):
    """Only the backward is inside `no_sync()`.

    DDP decides in the forward whether the backward reduces: with the forward outside, every microbatch is reduced.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - loss = loss_fn(model(x), y)
          with model.no_sync():
        +     loss = loss_fn(model(x), y)
              loss.backward()
    """

    fix = "put the forward inside no_sync() too"

    def check(self, file: Checked) -> Iterator[Finding]:
        source = file.source
        quiet = {"backward", "scale", "item", "detach", "update", "append", "mean", "sum", "float", "print", "div"}
        for block in source.of(ast.With):
            entered = [one.context_expr.func for one in block.items if isinstance(one.context_expr, ast.Call)]
            if not any(isinstance(one, ast.Attribute) and one.attr == "no_sync" for one in entered):
                continue
            calls = [node for stmt in block.body for node in ast.walk(stmt) if isinstance(node, ast.Call)]
            words = [last(source.name(one.func)) or getattr(one.func, "attr", "") for one in calls]
            backs = [one for one, word in zip(calls, words) if word == "backward"]
            if backs and quiet.issuperset(words) and not any(one.args for one in backs):
                yield self.found(file, block, "the forward is outside of no_sync(): DDP reduces all the same")


class AccumulationWithoutNoSync(Rule):
    """Every microbatch is reduced over all ranks, though only the last needs it.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
          for i, (x, y) in enumerate(loader):
        +     last = (i + 1) % accumulate == 0 or i + 1 == len(loader)
        +     with contextlib.nullcontext() if last else model.no_sync():
        -     (loss_fn(model(x), y) / accumulate).backward()
        +         (loss_fn(model(x), y) / accumulate).backward()
        -     if (i + 1) % accumulate == 0 or i + 1 == len(loader):
        +     if last:
                  optimizer.step()
                  optimizer.zero_grad()
    """

    fix = "run forward and backward of all but the last microbatch in model.no_sync()"

    def check(self, file: Checked) -> Iterator[Finding]:
        if not file.windows or not file.uses("ddp") or file.uses("accelerator", "fsdp"):
            return
        if file.calls("no_sync") or re.search(r"require_backward_grad_sync|delay_allreduce", file.source.text):
            return
        for window in file.windows:
            if any(one.how == "managed" for one in window.backwards) or literal(window.every) == 1:
                continue
            yield self.found(
                file,
                window.backwards[-1].node,
                "every microbatch is reduced over all ranks; one reduction per update is enough",
            )
