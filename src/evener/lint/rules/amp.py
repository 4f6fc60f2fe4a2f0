"""Mixed precision: the order of scale, backward, unscale, clip, step and update."""

from __future__ import annotations

import ast
import re

from evener.lint.events import dominates, exclusive
from evener.lint.names import in_checkpoint
from evener.lint.rule import Checked, Hits, Rule, hit, insert_after, insert_before, replace
from evener.lint.source import keyword, last, method


class ClipBeforeUnscale(Rule, level="error", fix="call scaler.unscale_(optimizer) before clipping"):
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

    def check(self, file: Checked) -> Hits:
        for clip, before, after in file.moments("clip"):
            backs = [one for one in before if one.kind == "backward"]
            scaled = [one for one in backs if one.how == "scaled"]
            step = next((one for one in after if one.kind == "scaler-step"), None)
            # Behind a step, at the top of the loop, it is the clip of another update.
            if step is None or not scaled or any(one.kind in ("unscale", "scaler-step") for one in before):
                continue
            if any(one.how != "scaled" and dominates(one, clip) and one.place > scaled[-1].place for one in backs):
                continue
            edit = None
            always = set(step.ctx.tests) <= set(clip.ctx.tests)
            if always or {t.text for t in scaled[-1].ctx.tests} <= {t.text for t in clip.ctx.tests}:
                edit = insert_before(file, file.statement(clip.node), f"{step.how}.unscale_({step.on})")
            yield hit(clip.node, "the gradients are clipped while they carry the loss scale", edit)


class UnscaleEveryMicrobatch(Rule, level="error", fix="move unscale_ into the branch that steps"):
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

    def check(self, file: Checked) -> Hits:
        for window in file.windows:
            steps = [step for step in window.steps if step.kind == "scaler-step"]
            for event in window.ungated("unscale") if steps else ():
                if not any(exclusive(event, step) for step in steps):
                    yield hit(event.node, "unscale_ runs at every microbatch, scaler.step only at some")


class UnscaledBackward(Rule, level="error", fix="scaler.scale(loss).backward()"):
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

    def check(self, file: Checked) -> Hits:
        for step, before, _ in file.moments("scaler-step"):
            backs = [one for one in before if one.kind == "backward"]
            if not backs or any(one.how != "plain" for one in backs):
                continue
            back, loss = backs[-1].node, backs[-1].owner
            if "scale" not in file.segment(back) and not back.args:
                edit = replace(file, loss, f"{step.how}.scale({file.exact(loss)})")
                yield hit(back, f"{step.how}.step divides by a scale that this backward never had", edit)


class UnscaledStepWithScaler(Rule, level="error", fix="scaler.step(optimizer)"):
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

    def check(self, file: Checked) -> Hits:
        for step, before, after in file.moments("step"):
            if any(one.kind == "scaler-step" and one.on == step.on for one in before + after):
                continue
            backs = [one for one in before if one.kind == "backward" and one.ctx.loops == step.ctx.loops]
            unscaled = [one for one in before if one.kind == "unscale" and one.on == step.on and dominates(one, step)]
            if unscaled:
                scaler = unscaled[-1].how
            elif backs and all(one.how == "scaled" for one in backs) and dominates(backs[-1], step):
                calls = (method(one, "scale") for one in ast.walk(backs[-1].node))
                scaler = next((file.segment(one.value) for one in calls if one), "")
            else:
                continue
            updated = any(one.kind == "update" for one in before + after) and scaler and len(step.node.args) < 2
            edit = replace(file, step.node, f"{scaler}.step({step.on})") if updated else None
            yield hit(step.node, "the loss was scaled, and this step does not go through the scaler", edit)


class ScalerNotUpdated(Rule, level="error", fix="call scaler.update() after the step"):
    """`scaler.step` is called, `scaler.update` is not.

    The scale never adapts, and the second `unscale_` or `step` raises a RuntimeError.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
          for x, y in loader:
              scaler.scale(loss_fn(model(x), y)).backward()
              scaler.step(optimizer)
        +     scaler.update()
    """

    def check(self, file: Checked) -> Hits:
        updated = {file.segment(func.value) for _, func in file.methods("update")}
        for step, _, _ in file.moments("scaler-step"):
            if file.holds(step.owner, "scaler") and step.how not in updated and step.ctx.loops:
                edit = insert_after(file, file.statement(step.node), f"{step.how}.update()")
                yield hit(step.node, f"{step.how}.update() is never called", edit)


class ScalerNotSaved(Rule, in_tests=False, fix='save "scaler": scaler.state_dict() too, and load it on resume'):
    """A checkpoint holds the optimizer's state, but not the scaler's.

    After a resume the scale starts again at 65,536: the first updates overflow and are skipped.

    bad -, good +:
          scaler = torch.amp.GradScaler("cuda")
        - torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
        + state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
        + torch.save(state, "last.pt")
    """

    def check(self, file: Checked) -> Hits:
        if not file.uses("scaler") and not re.search(r"\bamp\.(initialize|scale_loss)\b", file.text):
            return
        if file.uses("accelerator") or re.search(r"scaler\w*(\(\))?\.state_dict\(|amp\.state_dict\(", file.text):
            return
        if any("scaler" in one.saved for one in file.project.related(file.path)):
            return
        for call in file.calls_of("torch.save", "torch.distributed.checkpoint.save"):
            held = set(in_checkpoint(file.names, call.args[0])) | _from_callers(file, call) if call.args else set()
            if "optimizer" in held and "scaler" not in held:
                yield hit(call, "the optimizer's state is saved, the loss scaler's is not")


def _from_callers(file: Checked, call: ast.Call) -> set[str]:
    """What a parameter holds that is saved as it is: the dicts that this file's other functions pass in."""
    saved, function = call.args[0], file.function(call)
    if function is None or not isinstance(saved, ast.Name) or saved.id not in file.params[function]:
        return _dataclass(file, saved)
    names = [arg.arg for arg in function.args.args]
    position = names.index(saved.id) if saved.id in names else 0
    held: set[str] = set()
    for other in file.of(ast.Call):
        if last(file.name(other.func)) == function.name:
            passed = keyword(other, saved.id, position)
            held |= set(in_checkpoint(file.names, passed)) if passed is not None else set()
    return held


def _dataclass(file: Checked, saved: ast.expr) -> set[str]:
    """asdict(Snapshot(model_state=..., optimizer_state=...))"""
    if isinstance(saved, ast.Call) and last(file.name(saved.func)) == "asdict" and saved.args:
        saved = saved.args[0]
    held = set()
    for one in [value for _, value in file.values(saved)] if isinstance(saved, ast.Name) else [saved]:
        if isinstance(one, ast.Call) and last(file.name(one.func))[:1].isupper():
            texts = [file.segment(argument.value) for argument in one.keywords]
            held |= {word for word in ("optimizer", "scaler") for t in texts if "state_dict" in t and word in t}
    return held
