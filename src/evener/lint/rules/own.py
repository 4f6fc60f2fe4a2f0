"""evener's own interface: what `Run` promises, and how a script breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.rule import Checked, Hits, Rule, hit
from evener.lint.source import keyword, last, literal, method

COLLECTIVE = {"evaluate", "predict", "save", "load", "export", "digest", "step", "updates", "epochs", "batches"}


def runs(file: Checked) -> dict[str, ast.Call]:
    """name -> the call that makes the evener.Run it holds."""
    found: dict[str, ast.Call] = {}
    for call in file.calls_of("evener.Run", "evener.run.Run"):
        up = file.parent[call]
        target = up.targets[0] if isinstance(up, ast.Assign) else getattr(up, "optional_vars", None)
        found[file.segment(target) if target is not None else f"<{call.lineno}>"] = call
    return found


def loss_functions(file: Checked) -> dict[str, ast.Call]:
    """The name of each loss function -> the Run that gets it."""
    given = [(keyword(call, "loss_fn", 2), call) for call in runs(file).values()]
    return {loss.id: call for loss, call in given if isinstance(loss, ast.Name)}


class TokenMeanAsRowMean(Rule, level="error", fix="return evener.Mean(total=loss_sum, count=number_of_tokens)"):
    """A loss that is a mean over tokens is returned as a plain scalar.

    A scalar is weighted by rows. Rows have unequal numbers of tokens, so the update depends on how the batch is cut.

    bad -, good +:
          import evener
          def loss_fn(model, batch):
              logits = model(batch["input_ids"])
        -     return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        +     nll = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        +     return evener.Mean(total=nll, count=(batch["labels"] != -100).sum())
          run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
    """

    def check(self, file: Checked) -> Hits:
        why = "a mean over tokens is weighted by rows: the update depends on the cut"
        masks = re.compile(r"(mask\w*|attention_mask\W.*|labels\s*!=\s*-100\))\.sum\(")
        losses = {name for name, call in loss_functions(file).items() if keyword(call, "loss_is") is None}
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


class RunCollectiveOnOneRank(Rule, level="error", fix="call it on every rank; run.print prints on rank 0 only"):
    """A method of Run that all ranks must call stands behind a rank test.

    Rank 0 waits for the others until the time-out.

    bad -, good +:
          import evener
          run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
        - if run.rank == 0:
        -     print(run.evaluate(validation_set))
        + scores = run.evaluate(validation_set)
        + run.print(scores)
    """

    def check(self, file: Checked) -> Hits:
        made = runs(file)
        for call, func in file.methods(*COLLECTIVE) if made else ():
            if file.segment(func.value) in made and file.guard(call):
                yield hit(call, f"run.{func.attr} communicates: every rank must call it")


class StateOutsideRun(Rule, fix='run.state["best"] instead of a variable: it is saved and restored'):
    """What the loop remembers is not in `run.state`.

    It is not in the checkpoint: after a restart the best score starts again at zero.

    bad -, good +:
          import evener
          run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
        - best = 0.0
          for epoch in run.epochs(10):
              for update in epoch:
                  pass
              score = run.evaluate(validation_set)["accuracy"]
        -     if score > best:
        +     if score > run.state.get("best", 0):
        -         best = score
        +         run.state["best"] = score
                  run.save(name="best")
    """

    def check(self, file: Checked) -> Hits:
        made = runs(file)
        for loop in file.of(ast.For) if made else ():
            func = method(loop.iter, "epochs", "updates", "batches")
            run = made.get(file.segment(func.value)) if func else None
            if run is None or re.search(r"resume\s*=\s*.never", file.segment(run)):
                continue
            tests = [node for node in ast.walk(loop) if isinstance(node, ast.Compare)]
            compared = {n.id for test in tests for n in ast.walk(test) if isinstance(n, ast.Name)}
            for name, kept in self._kept(file, loop):
                if name in compared:
                    yield hit(kept, f"{name} decides something and is in no checkpoint")

    def _kept(self, file: Checked, loop: ast.For) -> Iterator[tuple[str, ast.stmt]]:
        """Names that begin as a number before the loop and change in it."""
        added = [one for one in file.of(ast.AugAssign) if file.inside(one, loop)]
        for (scope, name), bound in file.names.bound.items():
            before = [value for stmt, value in bound if stmt.lineno < loop.lineno]
            if scope is not file.function(loop) or not name.isidentifier() or not before:
                continue
            inside: list[ast.stmt] = [stmt for stmt, _ in bound if file.inside(stmt, loop)]
            inside += [one for one in added if file.segment(one.target) == name]
            number = isinstance(literal(before[-1]), int | float | None) or "inf" in file.segment(before[-1])
            if inside and number:
                yield name, inside[0]


class RunOfWrappedModel(Rule, level="error", fix="give the plain model"):
    """Run is given a wrapped model.

    evener cuts the batch and reduces by itself; a wrapper would reduce a second time. Run refuses it.

    bad -, good +:
          import evener
        - run = evener.Run(torch.nn.DataParallel(model), optimizer, loss_fn, dataset, global_batch_size=64)
        + run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
    """

    def check(self, file: Checked) -> Hits:
        for call in runs(file).values():
            model = keyword(call, "model", 0)
            if model is not None and file.holds(model, "ddp", "dp", "fsdp"):
                yield hit(call, "Run takes the plain model, not a wrapped one")


class BackwardInLoss(Rule, level="error", fix="return the loss, and nothing else"):
    """The loss function of a Run calls backward or steps.

    Run does both, after it knows the denominator of the update.

    bad -, good +:
          import evener
          def loss_fn(model, batch):
        -     loss = F.mse_loss(model(batch[0]), batch[1])
        +     return F.mse_loss(model(batch[0]), batch[1])
        -     loss.backward()
        -     return loss
          run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
    """

    def check(self, file: Checked) -> Hits:
        losses = loss_functions(file)
        for event in (one for events in file.events for one in events):
            inside = event.ctx.function is not None and event.ctx.function.name in losses
            if inside and event.kind in ("backward", "step", "zero"):
                yield hit(event.node, f"{event.kind} inside the loss function of a Run")
