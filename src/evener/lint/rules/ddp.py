"""Wrapped models: what goes through the wrapper, and what goes around it."""

from __future__ import annotations

import ast
import re

from evener.lint.names import SAME
from evener.lint.rule import Checked, Hits, Rule, hit, replace
from evener.lint.source import keyword, last, literal, method


class DdpForwardOnOneRank(Rule, level="error", fix="call model.module under no_grad, or let all ranks take part"):
    """A DDP model is called on one rank only.

    DDP's forward broadcasts buffers (BatchNorm): the rank waits for the others until the process group times out.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
          if torch.distributed.get_rank() == 0:
              with torch.no_grad():
        -         score = metric(model(x), y)
        +         score = metric(model.module(x), y)
    """

    def check(self, file: Checked) -> Hits:
        why = "the DDP model is called on one rank: it waits for the others in its buffers"
        for call in file.of(ast.Call):
            if not isinstance(call.func, ast.Name | ast.Attribute) or not file.holds(call.func, "ddp"):
                continue
            same = (file.function(call), file.segment(call.func))
            if file.guard(call) != "one" or any(
                file.guard(other) == "others" and (file.function(other), file.segment(other.func)) == same
                for other in file.of(ast.Call)
            ):
                continue  # or the other ranks call it too, in their own branch
            values = [value for stmt, value in file.values(call.func) if stmt.lineno < call.lineno][-1:]
            if not values or file.holds(values[0], "ddp"):  # else it was made anew, or unwrapped
                quiet = values and file.without_grad(call)
                edit = replace(file, call.func, f"{file.exact(call.func)}.module") if quiet else None
                yield hit(call, why, edit, unsafe=True)


class RequiresGradAfterDdp(Rule, level="error", fix="unfreeze before wrapping, or wrap again after it"):
    """A parameter is unfrozen after the model was wrapped.

    DDP looks at `requires_grad` once, when it wraps: later unfrozen parameters are never averaged, and replicas drift.

    bad -, good +:
        + for p in net.parameters():
        +     p.requires_grad = True
          model = torch.nn.parallel.DistributedDataParallel(net)
        - for p in model.parameters():
        -     p.requires_grad = True
    """

    def check(self, file: Checked) -> Hits:
        wraps = file.making("ddp")
        changed: list[tuple[ast.stmt | ast.expr, ast.expr]] = [
            (stmt, stmt.targets[0].value) for stmt in file.of(ast.Assign)
            if isinstance(stmt.targets[0], ast.Attribute) and stmt.targets[0].attr == "requires_grad"
            and literal(stmt.value) is True
        ]  # fmt: skip
        for call, func in file.methods("requires_grad_"):
            if not call.args or literal(call.args[0]) is True:
                changed.append((call, func.value))
        for where, target in changed:
            above = [one for one in wraps if file.function(one) is file.function(where) and one.lineno < where.lineno]
            again = any(wrap.lineno > where.lineno for wrap in wraps)
            if above and not again and _of_model(file, where, target, above[-1]):
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


class DdpModuleBypass(Rule, level="error", fix="call the DDP model itself"):
    """A DDP model is trained through `.module`.

    That goes around the wrapper: gradients are not averaged, replicas drift apart.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - loss = loss_fn(model.module(x), y)
        + loss = loss_fn(model(x), y)
          loss.backward()
    """

    def check(self, file: Checked) -> Hits:
        for call, func in file.methods("module"):
            if not file.holds(func.value, "ddp") or file.without_grad(call) or file.guard(call):
                continue
            trains = any(
                one.place > (call.lineno, 0) and one.ctx.function is file.function(call) for one in file.backwards
            )
            evaluates = any("eval" in test.text or "valid" in test.text for test in file.at(call).tests)
            detached = any(isinstance(up, ast.Attribute) and up.attr == "detach" for up in file.above(call))
            if trains and not evaluates and not detached:
                edit = replace(file, func, file.exact(func.value))
                yield hit(call, ".module goes around DDP: these gradients are not averaged", edit)


class WrappedStateDict(Rule, in_tests=False, fix="save model.module.state_dict()"):
    """The state dict of a wrapped model is saved.

    All keys then begin with "module.", and an unwrapped model cannot load them.

    bad -, good +:
          model = torch.nn.DataParallel(net)
        - torch.save(model.state_dict(), "model.pt")
        + torch.save(model.module.state_dict(), "model.pt")
    """

    def check(self, file: Checked) -> Hits:
        if re.search(r"""["']module\.["']|replace\(["']module|consume_prefix""", file.text):
            return
        for call in file.calls_of("torch.save"):
            for inner in ast.walk(call.args[0]) if call.args else ():
                func = method(inner, "state_dict")
                model = func.value if func else None
                if not isinstance(model, ast.Name | ast.Attribute) or not file.holds(model, "ddp", "dp"):
                    continue
                values = file.now(model)
                unwrapped = any(isinstance(v, ast.Attribute) and v.attr == "module" for _, v in values)
                wrapped = [file.holds(value, "ddp", "dp") for _, value in values]
                if unwrapped or (file.values(model) and not any(wrapped)):
                    continue
                always = values and wrapped[-1] and not file.at(values[-1][0]).tests
                edit = replace(file, model, f"{file.exact(model)}.module") if always else None
                yield hit(inner, 'the saved keys begin with "module."', edit)


class DpModelOffFirst(Rule, level="error", fix="put the model on device_ids[0]"):
    """The model is on another GPU than the first of `device_ids`.

    DataParallel wants parameters on `device_ids[0]`: the forward raises.

    bad -, good +:
        - model = torch.nn.DataParallel(net.cuda(1), device_ids=[0, 1])
        + model = torch.nn.DataParallel(net.cuda(0), device_ids=[0, 1])
    """

    def check(self, file: Checked) -> Hits:
        for call in file.making("dp"):
            ids = keyword(call, "device_ids", 1)
            first = literal(ids.elts[0]) if isinstance(ids, ast.List | ast.Tuple) and ids.elts else ...
            if not call.args or not isinstance(first, int):
                continue
            made = [value for stmt, value in file.values(call.args[0]) if stmt.lineno <= call.lineno][-1:]
            for value in (call.args[0], *made):
                if not (isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.args):
                    continue
                where = literal(value.args[0])
                index = re.fullmatch(r"(?:cuda:)?(\d+)", str(where))
                if SAME.fullmatch(value.func.attr) and index and int(index[1]) != first:
                    edit = replace(file, value.args[0], f'"cuda:{first}"' if isinstance(where, str) else str(first))
                    yield hit(call, f"the model is on GPU {index[1]}, device_ids begins with {first}", edit)


class Dataparallel(
    Rule, level="hint", fix="DistributedDataParallel, one process per GPU (or evener.Run), is faster on one machine too"
):
    """nn.DataParallel copies the model to every GPU at every forward, from one process.

    bad -, good +:
        - model = torch.nn.DataParallel(net)
        + model = torch.nn.parallel.DistributedDataParallel(net)
    """

    def check(self, file: Checked) -> Hits:
        for call in file.making("dp"):
            if last(file.name(call.func)) == "DataParallel":
                yield hit(call, "DataParallel copies the model at every forward, from one process")


class FindUnusedParameters(Rule, level="hint", fix="leave it out, unless DDP raises about unused parameters"):
    """`find_unused_parameters=True` walks the graph at every step.

    Needed only where some parameters get no gradient in some steps.

    bad -, good +:
        - model = torch.nn.parallel.DistributedDataParallel(net, find_unused_parameters=True)
        + model = torch.nn.parallel.DistributedDataParallel(net)
    """

    def check(self, file: Checked) -> Hits:
        for call in file.making("ddp"):
            if literal(keyword(call, "find_unused_parameters")) is True:
                yield hit(call, "the graph is walked at every step to find unused parameters")
