"""Gradient accumulation: the window, its divisor, its tail, and what belongs behind its gate."""

from __future__ import annotations

import ast
import re

from evener.lint.events import STEPS, Window, exclusive
from evener.lint.rule import Checked, Hits, Rule, hit, replace
from evener.lint.source import keyword, last, literal


class AccumulationNotNormalised(Rule, fix="divide the loss by the number of microbatches before backward"):
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

    def check(self, file: Checked) -> Hits:
        for window in file.windows:
            plain = [one for one in window.backwards if one.how in ("plain", "scaled", "apex")]
            if not plain or literal(window.every) == 1 or _scaled_elsewhere(file, window):
                continue
            every = file.segment(window.every)
            divided = rf"/=?\s*(float\()?\(?({re.escape(every)}|[\w.]*accum\w*)|\*\s*inv_|1(\.0?)?\s*/"
            if not re.search(divided, file.segment(window.loop)):
                yield hit(plain[0].node, f"{every} losses are summed, none is divided by it")


def _scaled_elsewhere(file: Checked, window: Window) -> bool:
    """Signs that a sum is meant: the loss is scaled by a batch size, or gradients are scaled later."""
    if re.search(
        r"\.grad(\.data)?\.(div_|mul_)|grad_scale|multiply_grads|scale_grad|nominal|reduction\s*=\s*.sum|loss_scale\b"
        r"|no_division", file.segment(window.loop),
    ):  # fmt: skip
        return True
    parts = [node for back in window.backwards for node in ast.walk(file.statement(back.node))]
    losses = [node for node in parts if isinstance(node, ast.Name) and "loss" in node.id.lower()]
    made = [file.segment(value) for node in losses for _, value in file.values(node)]
    return (
        any(re.search(r"/|\bdiv\(|\* ?(world_size|batch_size|bs\b)", text) for text in made)
        or any(
            file.inside(aug, window.loop)
            and isinstance(aug.op, ast.Mult | ast.Div)
            and "loss" in file.segment(aug.target).lower()
            for aug in file.of(ast.AugAssign)
        )
        # The counter advances inside an inner loop, or a trainer's own step divides.
        or any("loss" not in file.segment(back.node).lower() for back in window.backwards)
    )


class AccumulationTailDropped(
    Rule, fix="also step at the last batch (`or i + 1 == len(loader)`), divided by the microbatches that it really has"
):
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

    def check(self, file: Checked) -> Hits:
        last_turn = r"\blen\(|\blast|\bor\b.*==|final|is_end|end_of|num_batches|n_batches|steps_per_epoch"
        for window in file.windows:
            if not _counts_per_epoch(file, window) or re.search(last_turn, file.segment(window.gate.node)):
                continue
            end = window.steps[-1].place
            behind = [one for one in window.events if one.kind in STEPS and one.place > end]
            if all(window.loop in one.ctx.loops for one in behind):
                where = file.statement(window.modulo)
                yield hit(where, "the last incomplete window of the loader is never applied")


def _counts_per_epoch(file: Checked, window: Window) -> bool:
    """The counter starts again with the loop over the loader: by enumerate, or because the loop around it resets it.

    A counter that goes on over epochs loses nothing: the window goes on too.
    """
    loop = window.loop
    if not isinstance(loop, ast.For) or (not file.is_loader(loop.iter) and "enumerate(" not in file.segment(loop.iter)):
        return False
    counters = {node.id for node in ast.walk(window.modulo.left) if isinstance(node, ast.Name)}
    if counters & {node.id for node in ast.walk(loop.target) if isinstance(node, ast.Name)}:
        return True
    around = window.steps[0].ctx.loops
    outer = around[around.index(loop) - 1] if around.index(loop) else None
    return outer is not None and any(
        file.inside(stmt, outer) and not file.inside(stmt, loop)
        for name in counters
        for stmt, _ in file.names.bound.get((window.steps[0].ctx.function, name), [])
    )


class AccumulationOffByOne(Rule, level="error", fix="(i + 1) % n == 0"):
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

    def check(self, file: Checked) -> Hits:
        for window in file.windows:
            counter, test = window.modulo.left, file.parent[window.modulo]
            if not isinstance(counter, ast.Name) or not isinstance(test, ast.Compare) or literal(window.every) == 1:
                continue
            gate = [type(op) for op in test.ops], literal(test.comparators[0])
            if gate == ([ast.Eq], 0) and _starts_at(file, window, counter.id) == 0:
                edit = replace(file, counter, f"({counter.id} + 1)")
                why = f"{counter.id} starts at 0: the first window holds one microbatch"
                yield hit(file.statement(test), why, edit)


def _starts_at(file: Checked, window: Window, counter: str) -> object:
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
            for stmt, value in file.names.bound.get((window.events[0].ctx.function, counter), [])
        )  # fmt: skip
    start = keyword(call, "start", 1)
    return None if not fits else 0 if start is None else literal(start)


class ClipEveryMicrobatch(Rule, level="error", fix="clip once, in the branch that steps"):
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

    def check(self, file: Checked) -> Hits:
        for window in file.windows:
            for event in window.ungated("clip"):
                if not all(exclusive(event, step) for step in window.steps):
                    yield hit(event.node, "clipped at every microbatch, applied only at some")


class NoSyncWithoutForward(Rule, fix="put the forward inside no_sync() too"):
    """Only the backward is inside `no_sync()`.

    DDP decides in the forward whether the backward reduces: with the forward outside, every microbatch is reduced.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - loss = loss_fn(model(x), y)
          with model.no_sync():
        +     loss = loss_fn(model(x), y)
              loss.backward()
    """

    def check(self, file: Checked) -> Hits:
        quiet = {"backward", "scale", "item", "detach", "update", "append", "mean", "sum", "float", "print", "div"}
        for block in file.of(ast.With):
            entered = [one.context_expr.func for one in block.items if isinstance(one.context_expr, ast.Call)]
            if not any(isinstance(one, ast.Attribute) and one.attr == "no_sync" for one in entered):
                continue
            calls = [node for stmt in block.body for node in ast.walk(stmt) if isinstance(node, ast.Call)]
            words = [last(file.name(one.func)) or getattr(one.func, "attr", "") for one in calls]
            backs = [one for one, word in zip(calls, words) if word == "backward"]
            if backs and quiet.issuperset(words) and not any(one.args for one in backs):
                yield hit(block, "the forward is outside of no_sync(): DDP reduces all the same")


class AccumulationWithoutNoSync(Rule, fix="run forward and backward of all but the last microbatch in model.no_sync()"):
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

    def check(self, file: Checked) -> Hits:
        if not file.windows or not file.uses("ddp") or file.uses("accelerator", "fsdp"):
            return
        if file.calls("no_sync") or re.search(r"require_backward_grad_sync|delay_allreduce", file.text):
            return
        why = "every microbatch is reduced over all ranks; one reduction per update is enough"
        for window in file.windows:
            if literal(window.every) != 1 and not any(one.how == "managed" for one in window.backwards):
                yield hit(window.backwards[-1].node, why)
