"""Mixed precision: the order of scale, backward, unscale, clip, step and update."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import insert, replace
from evener.lint.events import dominates, exclusive
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, method


@rule("error", "call scaler.unscale_(optimizer) before clipping")
def clip_before_unscale(file: File) -> Hits:
    for clip, before, after in file.moments("clip"):
        backs = [one for one in before if one.kind == "backward"]
        scaled = [one for one in backs if one.how == "scaled"]
        step = next((one for one in after if one.kind == "scaler-step"), None)
        # Behind a step, at the top of the loop, it is the clip of another update.
        if step is None or not scaled or any(one.kind in ("unscale", "scaler-step") for one in before):
            continue
        if any(one.how != "scaled" and dominates(one, clip) and one.place > scaled[-1].place for one in backs):
            continue
        edit, here = None, {test.text for test in clip.ctx.tests}
        if set(step.ctx.tests) <= set(clip.ctx.tests) or {test.text for test in scaled[-1].ctx.tests} <= here:
            edit = insert(file, file.statement(clip.node), f"{step.how}.unscale_({step.on})")
        yield hit(clip.node, "the gradients are clipped while they carry the loss scale", edit)


@rule("error", "move unscale_ into the branch that steps")
def unscale_every_microbatch(file: File) -> Hits:
    for window in file.windows:
        steps = [step for step in window.steps if step.kind == "scaler-step"]
        for event in window.ungated("unscale") if steps else ():
            if not any(exclusive(event, step) for step in steps):
                yield hit(event.node, "unscale_ runs at every microbatch, scaler.step only at some")


@rule("error", "scaler.scale(loss).backward()")
def unscaled_backward(file: File) -> Hits:
    for step, before, _ in file.moments("scaler-step"):
        backs = [one for one in before if one.kind == "backward"]
        if not backs or any(one.how != "plain" for one in backs):
            continue
        back, loss = backs[-1].node, backs[-1].owner
        if "scale" not in file.segment(back) and not back.args:
            edit = replace(file, loss, f"{step.how}.scale({file.exact(loss)})")
            yield hit(back, f"{step.how}.step divides by a scale that this backward never had", edit)


@rule("error", "scaler.step(optimizer)")
def unscaled_step_with_scaler(file: File) -> Hits:
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


@rule("error", "call scaler.update() after the step")
def scaler_not_updated(file: File) -> Hits:
    updated = {file.segment(func.value) for _, func in file.methods("update")}
    for step, _, _ in file.moments("scaler-step"):
        if file.holds(step.owner, "scaler") and step.how not in updated and step.ctx.loops:
            edit = insert(file, file.statement(step.node), f"{step.how}.update()", after=True)
            yield hit(step.node, f"{step.how}.update() is never called", edit)


@rule("warning", 'save "scaler": scaler.state_dict() too, and load it on resume', in_tests=False)
def scaler_not_saved(file: File) -> Hits:
    if not file.uses("scaler") and not re.search(r"\bamp\.(initialize|scale_loss)\b", file.text):
        return
    if file.uses("accelerator") or re.search(r"scaler\w*(\(\))?\.state_dict\(|amp\.state_dict\(", file.text):
        return
    if any("scaler" in one.saved for one in file.project.related(file.path)):
        return
    for call in file.calls_of("torch.save", "torch.distributed.checkpoint.save"):
        held = file.in_checkpoint(call.args[0]) | _passed_in(file, call) if call.args else set()
        if "optimizer" in held and "scaler" not in held:
            yield hit(call, "the optimizer's state is saved, the loss scaler's is not")


def _passed_in(file: File, call: ast.Call) -> set[str]:
    """What a parameter holds that is saved as it is: the dicts that this file's other functions pass in."""
    saved, function = call.args[0], file.function(call)
    held = set[str]()
    if function is not None and isinstance(saved, ast.Name) and saved.id in file.params[function]:
        names = [arg.arg for arg in function.args.args]
        position = names.index(saved.id) if saved.id in names else 0
        others = [one for one in file.of(ast.Call) if last(file.name(one.func)) == function.name]
        given = [passed for one in others if (passed := keyword(one, saved.id, position))]
        return held.union(*map(file.in_checkpoint, given))
    if isinstance(saved, ast.Call) and last(file.name(saved.func)) == "asdict" and saved.args:
        saved = saved.args[0]  # asdict(Snapshot(model_state=..., optimizer_state=...))
    for one in file.values(saved) if isinstance(saved, ast.Name) else [saved]:
        if isinstance(one, ast.Call) and last(file.name(one.func))[:1].isupper():
            texts = [text for argument in one.keywords if "state_dict" in (text := file.segment(argument.value))]
            held |= {word for word in ("optimizer", "scaler") for text in texts if word in text}
    return held
