"""Wrapped models: what goes through the wrapper, and what goes around it."""

from __future__ import annotations

import ast
import re

from evener.lint.names import SAME
from evener.lint.rule import Checked, Edit, Hits, Rule, hit, replace
from evener.lint.source import keyword, last, literal


class DdpForwardOnOneRank(Rule):
    """A DDP model is called on one rank only.

    DDP's forward broadcasts buffers (BatchNorm): the rank waits for the others until the process group times out.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
          if torch.distributed.get_rank() == 0:
              with torch.no_grad():
        -         score = metric(model(x), y)
        +         score = metric(model.module(x), y)
    """

    level = "error"
    fix = "call model.module under no_grad, or let all ranks take part"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            if not isinstance(call.func, ast.Name | ast.Attribute) or "ddp" not in file.kinds(call.func):
                continue
            ctx = file.at(call)
            if file.guard(ctx) != "one" or self._elsewhere(file, call):
                continue
            edits: tuple[Edit, ...] = ()
            values = [value for stmt, value in file.values(call.func) if stmt.lineno < call.lineno][-1:]
            if values and "ddp" not in file.kinds(values[0]):
                continue  # it was made anew, or unwrapped
            if file.without_grad(call) and values:
                edits = (replace(file, call.func, f"{file.exact(call.func)}.module"),)
            yield hit(
                call, "the DDP model is called on one rank: it waits for the others in its buffers", *edits, unsafe=True
            )

    def _elsewhere(self, file: Checked, call: ast.Call) -> bool:
        """The other ranks call it too, in their own branch."""
        text = file.segment(call.func)
        function = file.function(call)
        return any(
            file.segment(other.func) == text and file.guard(other) == "others"
            for other in file.of(ast.Call)
            if file.function(other) is function
        )


class RequiresGradAfterDdp(Rule):
    """A parameter is unfrozen after the model was wrapped.

    DDP looks at `requires_grad` once, when it wraps: later unfrozen parameters are never averaged, and replicas drift.

    bad -, good +:
        + for p in net.parameters():
        +     p.requires_grad = True
          model = torch.nn.parallel.DistributedDataParallel(net)
        - for p in model.parameters():
        -     p.requires_grad = True
    """

    level = "error"
    fix = "unfreeze before wrapping, or wrap again after it"

    def check(self, file: Checked) -> Hits:
        wraps = [call for call in file.of(ast.Call) if "ddp" in file.made(call)]
        changed: list[tuple[ast.stmt | ast.expr, ast.expr]] = [
            (stmt, stmt.targets[0].value) for stmt in file.of(ast.Assign)
            if isinstance(stmt.targets[0], ast.Attribute) and stmt.targets[0].attr == "requires_grad"
            and literal(stmt.value) is True
        ]  # fmt: skip
        changed += [
            (call, call.func.value) for call in file.of(ast.Call)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "requires_grad_"
            and (not call.args or literal(call.args[0]) is True)
        ]  # fmt: skip
        for where, target in changed:
            wrapped = [
                wrap for wrap in wraps if file.function(wrap) is file.function(where) and wrap.lineno < where.lineno
            ]
            if wrapped and _of_model(file, where, target, wrapped[-1]):
                again = any(wrap.lineno > where.lineno for wrap in wraps)
                if not again:
                    yield hit(where, "unfrozen after DDP looked: these gradients are never averaged")


def _of_model(file: Checked, where: ast.AST, target: ast.expr, wrap: ast.Call) -> bool:
    """The changed thing is a parameter of the wrapped model: p of `for p in model....parameters()`, or model.x."""
    models = {file.segment(wrap.args[0])} if wrap.args else set()
    stmt = file.statement(wrap)
    if isinstance(stmt, ast.Assign):
        models |= {file.segment(one) for one in stmt.targets}
    texts = [file.segment(target)]
    texts += [file.segment(loop.iter) for loop in file.at(where).loops if isinstance(loop, ast.For)]
    return any(re.match(rf"{re.escape(model)}(\.|$)", text) for model in models for text in texts)


class DdpModuleBypass(Rule):
    """A DDP model is trained through `.module`.

    That goes around the wrapper: gradients are not averaged, replicas drift apart.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - loss = loss_fn(model.module(x), y)
        + loss = loss_fn(model(x), y)
          loss.backward()
    """

    level = "error"
    fix = "call the DDP model itself"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            func = call.func
            if not (isinstance(func, ast.Attribute) and func.attr == "module") or "ddp" not in file.kinds(func.value):
                continue
            function = file.function(call)
            backward = any(
                event.kind == "backward" and event.place > (call.lineno, 0) and event.ctx.function is function
                for events in file.events for event in events
            )  # fmt: skip
            if not backward or file.without_grad(call) or file.guard(call):
                continue
            if any("eval" in test.text or "valid" in test.text for test in file.at(call).tests) or _detached(
                file, call
            ):
                continue
            yield hit(
                call,
                ".module goes around DDP: these gradients are not averaged",
                replace(file, func, file.exact(func.value)),
            )


def _detached(file: Checked, call: ast.Call) -> bool:
    return any(isinstance(up, ast.Attribute) and up.attr == "detach" for up in file.above(call))


class WrappedStateDict(Rule):
    """The state dict of a wrapped model is saved.

    All keys then begin with "module.", and an unwrapped model cannot load them.

    bad -, good +:
          model = torch.nn.DataParallel(net)
        - torch.save(model.state_dict(), "model.pt")
        + torch.save(model.module.state_dict(), "model.pt")
    """

    in_tests = False
    fix = "save model.module.state_dict()"

    def check(self, file: Checked) -> Hits:
        if re.search(r"""["']module\.["']|replace\(["']module|consume_prefix""", file.text):
            return
        for call in file.of(ast.Call):
            if file.name(call.func) != "torch.save" or not call.args:
                continue
            for inner in ast.walk(call.args[0]):
                if not (
                    isinstance(inner, ast.Call)
                    and isinstance(inner.func, ast.Attribute)
                    and inner.func.attr == "state_dict"
                ):
                    continue
                model = inner.func.value
                if not isinstance(model, ast.Name | ast.Attribute) or file.kinds(model).isdisjoint({"ddp", "dp"}):
                    continue
                values = file.now(model)
                unwrapped = [v for _, v in values if isinstance(v, ast.Attribute) and v.attr == "module"]
                wrapped = any(not file.kinds(value).isdisjoint({"ddp", "dp"}) for _, value in values)
                if unwrapped or (file.values(model) and not wrapped):
                    continue
                last_stmt, last_value = values[-1] if values else (None, None)
                always = (
                    last_value is not None and last_stmt is not None
                    and not file.kinds(last_value).isdisjoint({"ddp", "dp"})
                    and not file.at(last_stmt).tests
                )  # fmt: skip
                edits = (replace(file, model, f"{file.exact(model)}.module"),) if always else ()
                yield hit(inner, 'the saved keys begin with "module."', *edits)


class DpModelOffFirst(Rule):
    """The model is on another GPU than the first of `device_ids`.

    DataParallel wants parameters on `device_ids[0]`: the forward raises.

    bad -, good +:
        - model = torch.nn.DataParallel(net.cuda(1), device_ids=[0, 1])
        + model = torch.nn.DataParallel(net.cuda(0), device_ids=[0, 1])
    """

    level = "error"
    fix = "put the model on device_ids[0]"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            if "dp" not in file.made(call) or not call.args:
                continue
            ids = keyword(call, "device_ids", 1)
            first = literal(ids.elts[0]) if isinstance(ids, ast.List | ast.Tuple) and ids.elts else ...
            if not isinstance(first, int):
                continue
            for value in [call.args[0], *[v for s, v in file.values(call.args[0]) if s.lineno <= call.lineno][-1:]]:
                if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args):
                    continue
                where = literal(value.args[0])
                index = (
                    where
                    if isinstance(where, int)
                    else int(m[1])
                    if (m := re.fullmatch(r"cuda:(\d+)", str(where)))
                    else None
                )
                if SAME.fullmatch(value.func.attr) and index is not None and index != first:
                    text = f'"cuda:{first}"' if isinstance(where, str) else str(first)
                    yield hit(
                        call,
                        f"the model is on GPU {index}, device_ids begins with {first}",
                        replace(file, value.args[0], text),
                    )


class Dataparallel(Rule):
    """nn.DataParallel copies the model to every GPU at every forward, from one process.

    bad -, good +:
        - model = torch.nn.DataParallel(net)
        + model = torch.nn.parallel.DistributedDataParallel(net)
    """

    level = "hint"
    fix = "DistributedDataParallel, one process per GPU (or evener.Run), is faster on one machine too"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            if ("dp" in file.made(call) and not isinstance(call.func, ast.Attribute | ast.Name)) or last(
                file.name(call.func)
            ) == "DataParallel":
                if "dp" in file.made(call):
                    yield hit(call, "DataParallel copies the model at every forward, from one process")


class FindUnusedParameters(Rule):
    """`find_unused_parameters=True` walks the graph at every step.

    Needed only where some parameters get no gradient in some steps.

    bad -, good +:
        - model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        + model = torch.nn.parallel.DistributedDataParallel(net)
    """

    level = "hint"
    fix = "leave it out, unless DDP raises about unused parameters"

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            if "ddp" in file.made(call) and literal(keyword(call, "find_unused_parameters")) is True:
                yield hit(call, "the graph is walked at every step to find unused parameters")
