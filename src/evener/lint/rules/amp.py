"""Mixed precision: the order of scale, backward, unscale, clip, step and update."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.events import dominates, exclusive
from evener.lint.names import in_checkpoint
from evener.lint.rule import Checked, Finding, Rule, insert_after, insert_before, replace
from evener.lint.source import keyword, last


class ClipBeforeUnscale(Rule):
    """Gradients are clipped while they still carry the loss scale.

    The scale is 65,536 at the start, so the norm is huge, everything is clipped, and the unscaled rest is about zero:
    training all but stops, without an error.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
          for x, y in loader:
              scaler.scale(loss_fn(model(x), y)).backward()
        +     scaler.unscale_(optimizer)
              torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
              scaler.step(optimizer)
              scaler.update()
    """

    level = "error"
    fix = "call scaler.unscale_(optimizer) before clipping"

    def check(self, file: Checked) -> Iterator[Finding]:
        for events in file.events:
            for clip in (one for one in events if one.kind == "clip"):
                before = [one for one in events if one.place < clip.place and not exclusive(one, clip)]
                scaled = [one for one in before if one.kind == "backward" and one.how == "scaled"]
                others = [one for one in before if one.kind == "backward" and one.how != "scaled"]
                if not scaled or any(dominates(one, clip) and one.place > scaled[-1].place for one in others):
                    continue
                if any(one.kind == "unscale" for one in before):
                    continue
                step = next((one for one in events if one.kind == "scaler-step" and not exclusive(one, clip)), None)
                # A clip of the step before, at the top of the loop, is not of this update.
                if step is None or step.place < clip.place:
                    continue
                edit = None
                always = all(any(test == own for own in clip.ctx.tests) for test in step.ctx.tests)
                if always or {t.text for t in scaled[-1].ctx.tests} <= {t.text for t in clip.ctx.tests}:
                    code = f"{step.how}.unscale_({step.on})"
                    edit = insert_before(file.source, file.source.statement(clip.node), code)
                yield self.found(
                    file,
                    clip.node,
                    "the gradients are clipped while they carry the loss scale",
                    *([edit] if edit else []),
                )


class UnscaleEveryMicrobatch(Rule):
    """`unscale_` runs at every microbatch, but the scaler steps only at some.

    A second `unscale_` before `scaler.update()` raises a RuntimeError.

    bad -, good +:
          for i, (x, y) in enumerate(loader):
              scaler.scale(loss_fn(model(x), y) / accumulate).backward()
        -     scaler.unscale_(optimizer)
              if (i + 1) % accumulate == 0 or i + 1 == len(loader):
        +         scaler.unscale_(optimizer)
                  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                  scaler.step(optimizer)
                  scaler.update()
                  optimizer.zero_grad()
    """

    level = "error"
    fix = "move unscale_ into the branch that steps"

    def check(self, file: Checked) -> Iterator[Finding]:
        for window in file.windows:
            for event in window.events:
                inside = event.kind == "unscale" and window.loop in event.ctx.loops
                if (
                    inside
                    and not any(test.node is window.gate.node for test in event.ctx.tests)
                    and not any(exclusive(event, step) for step in window.steps if step.kind == "scaler-step")
                    and any(step.kind == "scaler-step" for step in window.steps)
                ):
                    yield self.found(file, event.node, "unscale_ runs at every microbatch, scaler.step only at some")


class UnscaledBackward(Rule):
    """The scaler steps, but the backward was not scaled.

    `scaler.step` divides the gradients by a scale that they never had: they shrink by 65,536, without an error.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
          for x, y in loader:
              loss = loss_fn(model(x), y)
        -     loss.backward()
        +     scaler.scale(loss).backward()
              scaler.step(optimizer)
              scaler.update()
    """

    level = "error"
    fix = "scaler.scale(loss).backward()"

    def check(self, file: Checked) -> Iterator[Finding]:
        for events in file.events:
            for step in (one for one in events if one.kind == "scaler-step"):
                before = [
                    one for one in events
                    if one.kind == "backward" and one.place < step.place and not exclusive(one, step)
                ]  # fmt: skip
                if not before or any(one.how != "plain" for one in before):
                    continue
                back = before[-1].node
                if "scale" in file.source.segment(back) or back.args or not isinstance(back.func, ast.Attribute):
                    continue
                edit = replace(file.source, back.func.value, f"{step.how}.scale({file.source.exact(back.func.value)})")
                yield self.found(file, back, f"{step.how}.step divides by a scale that this backward never had", edit)


class UnscaledStepWithScaler(Rule):
    """The loss was scaled, but the optimizer steps without the scaler.

    The update is 65,536 times too large; after `unscale_`, updates with inf or NaN are not skipped.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
          for x, y in loader:
              scaler.scale(loss_fn(model(x), y)).backward()
        -     optimizer.step()
        +     scaler.step(optimizer)
              scaler.update()
    """

    level = "error"
    fix = "scaler.step(optimizer)"

    def check(self, file: Checked) -> Iterator[Finding]:
        for events in file.events:
            scaler_steps = [one for one in events if one.kind == "scaler-step"]
            for step in (one for one in events if one.kind == "step"):
                before = [one for one in events if one.place < step.place and not exclusive(one, step)]
                backs = [one for one in before if one.kind == "backward" and one.ctx.loops == step.ctx.loops]
                unscaled = [
                    one for one in before if one.kind == "unscale" and one.on == step.on and dominates(one, step)
                ]
                if any(one.on == step.on and not exclusive(one, step) for one in scaler_steps):
                    continue
                if unscaled:
                    scaler: str | None = unscaled[-1].how
                elif backs and all(one.how == "scaled" for one in backs) and dominates(backs[-1], step):
                    scaler = _scaler_of(file, backs[-1].node)
                else:
                    continue
                updated = any(one.kind == "update" for one in events) and scaler and len(step.node.args) < 2
                edits = (replace(file.source, step.node, f"{scaler}.step({step.on})"),) if updated else ()
                why = "the loss was scaled, and this step does not go through the scaler"
                yield self.found(file, step.node, why, *edits)


def _scaler_of(file: Checked, backward: ast.Call) -> str | None:
    for call in ast.walk(backward):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "scale":
            return file.source.segment(call.func.value)
    return None


class ScalerNotUpdated(Rule):
    """`scaler.step` is called, `scaler.update` is not.

    The scale never adapts, and the second `unscale_` or `step` raises a RuntimeError.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
          for x, y in loader:
              scaler.scale(loss_fn(model(x), y)).backward()
              scaler.step(optimizer)
        +     scaler.update()
    """

    level = "error"
    fix = "call scaler.update() after the step"

    def check(self, file: Checked) -> Iterator[Finding]:
        updated = {
            file.source.segment(call.func.value)
            for call in file.source.of(ast.Call)
            if isinstance(call.func, ast.Attribute) and call.func.attr == "update"
        }
        for events in file.events:
            for step in (one for one in events if one.kind == "scaler-step"):
                owner = step.node.func.value if isinstance(step.node.func, ast.Attribute) else step.node.func
                if not file.names.holds(owner, "scaler") or step.how in updated or not step.ctx.loops:
                    continue
                edit = insert_after(file.source, file.source.statement(step.node), f"{step.how}.update()")
                yield self.found(file, step.node, f"{step.how}.update() is never called", *([edit] if edit else []))


class ScalerNotSaved(Rule):
    """A checkpoint holds the optimizer's state, but not the scaler's.

    After a resume the scale starts again at 65,536: the first updates overflow and are skipped.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
        - torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        + state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        + torch.save(state, "last.pt")
    """

    in_tests = False
    fix = 'save "scaler": scaler.state_dict() too, and load it on resume'

    def check(self, file: Checked) -> Iterator[Finding]:
        if not file.uses("scaler") and not re.search(r"\bamp\.(initialize|scale_loss)\b", file.source.text):
            return
        if file.project.uses(file.source.path, "accelerator"):
            return
        if any("scaler" in one.saved for one in file.project.related(file.source.path)) or _scaler_state(file):
            return
        for call in file.source.of(ast.Call):
            dotted = file.source.name(call.func)
            if dotted not in ("torch.save", "torch.distributed.checkpoint.save") or not call.args:
                continue
            held = set(in_checkpoint(file.names, call.args[0])) | _from_callers(file, call)
            if "optimizer" in held and "scaler" not in held:
                yield self.found(file, call, "the optimizer's state is saved, the loss scaler's is not")


def _scaler_state(file: Checked) -> bool:
    return bool(re.search(r"scaler\w*(\(\))?\.state_dict\(|amp\.state_dict\(", file.source.text))


def _from_callers(file: Checked, call: ast.Call) -> set[str]:
    """What a parameter holds that is saved as it is: the dicts that this file's other functions pass in."""
    source, saved = file.source, call.args[0]
    function = source.function(call)
    if function is None or not isinstance(saved, ast.Name) or saved.id not in source.params[function]:
        return _dataclass(file, saved)
    position = (
        [arg.arg for arg in function.args.args].index(saved.id)
        if saved.id in [a.arg for a in function.args.args]
        else 0
    )
    held: set[str] = set()
    for other in source.of(ast.Call):
        if last(source.name(other.func)) == function.name:
            passed = keyword(other, saved.id, position)
            held |= set(in_checkpoint(file.names, passed)) if passed is not None else set()
    return held


def _dataclass(file: Checked, saved: ast.expr) -> set[str]:
    """asdict(Snapshot(model_state=..., optimizer_state=...))"""
    if isinstance(saved, ast.Call) and last(file.source.name(saved.func)) == "asdict" and saved.args:
        saved = saved.args[0]
    made = [value for _, value in file.names.values(saved)] if isinstance(saved, ast.Name) else [saved]
    held = set()
    for one in made:
        if isinstance(one, ast.Call) and last(file.source.name(one.func))[:1].isupper():
            for argument in one.keywords:
                text = file.source.segment(argument.value)
                if "state_dict" in text:
                    held |= {word for word in ("optimizer", "scaler") if word in text}
    return held
