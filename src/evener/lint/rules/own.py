"""evener's own interface: what `Run` promises, and how a script breaks it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.rule import Checked, Hits, Rule, hit
from evener.lint.source import Function, keyword, last, literal

COLLECTIVE = {"evaluate", "predict", "save", "load", "export", "digest", "step", "updates", "epochs", "batches"}


def runs(file: Checked) -> dict[str, ast.Call]:
    """name -> the call that makes the evener.Run it holds."""
    found: dict[str, ast.Call] = {}
    for call in file.of(ast.Call):
        if file.name(call.func) not in ("evener.Run", "evener.run.Run"):
            continue
        up = file.parent[call]
        if isinstance(up, ast.withitem) and up.optional_vars is not None:
            found[file.segment(up.optional_vars)] = call
        elif isinstance(up, ast.Assign):
            found[file.segment(up.targets[0])] = call
        else:
            found[f"<{call.lineno}>"] = call
    return found


class TokenMeanAsRowMean(Rule):
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

    level = "error"
    fix = "return evener.Mean(total=loss_sum, count=number_of_tokens)"

    def check(self, file: Checked) -> Hits:
        for call in runs(file).values():
            given = keyword(call, "loss_fn", 2)
            if not isinstance(given, ast.Name) or keyword(call, "loss_is") is not None:
                continue
            function = next((one for one in file.of(ast.FunctionDef) if one.name == given.id), None)
            if function is None or "Mean" in file.segment(function):
                continue
            for inner in file.of(ast.Call):
                if file.function(inner) is not function or last(file.name(inner.func)) not in (
                    "cross_entropy",
                    "nll_loss",
                ):
                    continue
                if keyword(inner, "ignore_index") is not None and literal(keyword(inner, "reduction")) in (..., "mean"):
                    yield hit(inner, "a mean over tokens is weighted by rows: the update depends on the cut")
            for div in file.of(ast.BinOp):
                masked = re.search(r"(mask\w*|attention_mask\W.*|labels\s*!=\s*-100\))\.sum\(", file.segment(div.right))
                if file.function(div) is function and isinstance(div.op, ast.Div) and masked:
                    yield hit(div, "a mean over tokens is weighted by rows: the update depends on the cut")


class RunCollectiveOnOneRank(Rule):
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

    level = "error"
    fix = "call it on every rank; run.print prints on rank 0 only"

    def check(self, file: Checked) -> Hits:
        made = runs(file)
        for call in file.of(ast.Call):
            func = call.func
            if not isinstance(func, ast.Attribute) or func.attr not in COLLECTIVE:
                continue
            if file.segment(func.value) in made and file.guard(call):
                yield hit(call, f"run.{func.attr} communicates: every rank must call it")


class StateOutsideRun(Rule):
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

    fix = 'run.state["best"] instead of a variable: it is saved and restored'

    def check(self, file: Checked) -> Hits:
        made = runs(file)
        for loop in file.of(ast.For):
            if not isinstance(loop.iter, ast.Call) or not isinstance(loop.iter.func, ast.Attribute):
                continue
            if (
                loop.iter.func.attr not in ("epochs", "updates", "batches")
                or file.segment(loop.iter.func.value) not in made
            ):
                continue
            if re.search(r"resume\s*=\s*.never", file.segment(made[file.segment(loop.iter.func.value)])):
                continue
            function = file.function(loop)
            for name, kept in self._kept(file, loop, function):
                compared = any(
                    isinstance(node, ast.Compare)
                    and any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))
                    for node in ast.walk(loop)
                )
                if compared:
                    yield hit(kept, f"{name} decides something and is in no checkpoint")

    def _kept(self, file: Checked, loop: ast.For, function: Function | None) -> Iterator[tuple[str, ast.stmt]]:
        """Names that begin as a number before the loop and change in it."""
        for (scope, name), bound in file.names.bound.items():
            if scope is not function or not name.isidentifier():
                continue
            before = [v for s, v in bound if s.lineno < loop.lineno]
            inside = [s for s, _ in bound if file.inside(s, loop)]
            inside += [s for s in file.of(ast.AugAssign) if file.inside(s, loop) and file.segment(s.target) == name]
            number = before and (
                isinstance(literal(before[-1]), int | float | None) or "inf" in file.segment(before[-1])
            )
            if (number and literal(before[-1]) is not ... and inside) or (
                number and inside and "inf" in file.segment(before[-1])
            ):
                yield name, inside[0]


class RunOfWrappedModel(Rule):
    """Run is given a wrapped model.

    evener cuts the batch and reduces by itself; a wrapper would reduce a second time. Run refuses it.

    bad -, good +:
          import evener
        - run = evener.Run(torch.nn.DataParallel(model), optimizer, loss_fn, dataset, global_batch_size=64)
        + run = evener.Run(model, optimizer, loss_fn, dataset, global_batch_size=64)
    """

    level = "error"
    fix = "give the plain model"

    def check(self, file: Checked) -> Hits:
        for call in runs(file).values():
            model = keyword(call, "model", 0)
            if model is not None and file.holds(model, "ddp", "dp", "fsdp"):
                yield hit(call, "Run takes the plain model, not a wrapped one")


class BackwardInLoss(Rule):
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

    level = "error"
    fix = "return the loss, and nothing else"

    def check(self, file: Checked) -> Hits:
        losses = {
            given.id for call in runs(file).values() if isinstance(given := keyword(call, "loss_fn", 2), ast.Name)
        }
        for events in file.events:
            for event in events:
                if (
                    event.ctx.function is not None
                    and event.ctx.function.name in losses
                    and event.kind in ("backward", "step", "zero")
                ):
                    yield hit(event.node, f"{event.kind} inside the loss function of a Run")
