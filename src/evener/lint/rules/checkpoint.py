"""Checkpoints: activation checkpointing, and what is written to disk and read back."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import add_argument
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, literal

CHECKPOINT = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


@rule("warning", "use_reentrant=False")
def checkpoint_use_reentrant(file: File) -> Hits:
    for call in file.calls_of(*CHECKPOINT):
        if call.args and not any(one.arg in (None, "use_reentrant") for one in call.keywords):
            why = "the reentrant default drops gradients where the input needs none"
            yield hit(call, why, add_argument(file, call, "use_reentrant=False"))


@rule("error", "wrap with checkpoint_wrapper(module), or call checkpoint in forward")
def checkpoint_called_early(file: File) -> Hits:
    known = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"}
    for call in file.calls_of(CHECKPOINT[0]):
        assign = file.parent[call]
        if isinstance(assign, ast.Assign) and len(call.args) == 1 and {one.arg for one in call.keywords} <= known:
            if all(isinstance(one, ast.Attribute | ast.Subscript) for one in (assign.targets[0], call.args[0])):
                yield hit(call, "checkpoint() calls the module at once, without inputs")


def _loads(file: File) -> list[ast.Call]:
    return [call for call in file.calls_of("torch.load") if not any(one.arg is None for one in call.keywords)]


@rule("error", "save vars(args) or plain values; weights_only=False only for files that you trust", in_tests=False)
def load_needs_weights_only(file: File) -> Hits:
    own = file.project.files[file.path].saved  # a file that saves loads what it saves
    related = [] if own else file.project.related(file.path)
    held = own.union(*(one.saved for one in related)) & {"args", "numpy"}
    what = "a Namespace or configuration object" if "args" in held else "numpy values"
    for call in _loads(file) if held else ():
        given = keyword(call, "weights_only") or keyword(call, "pickle_module")
        if given is None and _keyed(file, call):
            yield hit(call, f"the checkpoints saved here hold {what}: weights_only=True (the default) refuses them")


def _keyed(file: File, call: ast.Call) -> bool:
    """The result is used as a checkpoint: looked into by the name of a part. Plain weights are not."""
    up = file.parent[call]
    if isinstance(up, ast.Subscript):
        return isinstance(literal(up.slice), str)
    paths = [call.args[0], *file.values(call.args[0])] if call.args else []
    if any(isinstance(path := literal(one), str) and file.text.count(path) < 2 for one in paths):
        return False  # weights from elsewhere: nothing here writes a file of this name
    if not isinstance(up, ast.Assign) or not isinstance(up.targets[0], ast.Name | ast.Attribute):
        return False
    text = re.escape(file.segment(up.targets[0]))
    part = r"""(["']\w+["']|\w*key\w*)"""
    return bool(re.search(rf"\b{text}(\[|\.get\(|\.pop\(){part}|{part} (not )?in {text}\b", file.text))


@rule("warning", 'map_location="cpu", or this rank\'s device', in_tests=False)
def load_no_map_location(file: File) -> Hits:
    for call in _loads(file) if file.making("ddp") else ():
        if keyword(call, "map_location", 1) is None and not file.guard(call):
            edit = add_argument(file, call, 'map_location="cpu"')
            yield hit(call, "every rank loads onto the GPU that saved: GPU 0", edit)


@rule("warning", "save fp32 weights in the file that is resumed from; round in an export")
def half_resume_checkpoint(file: File) -> Hits:
    for call in file.calls_of("torch.save"):
        if call.args and "optimizer" in file.in_checkpoint(call.args[0]):
            for key, value in file.entries(call.args[0]):
                halved = re.search(r"\.half\(\)|\.to\(torch\.float16\)|\.bfloat16\(\)", file.segment(value))
                if halved and key != "ema":
                    yield hit(value, f"{key!r} is rounded to half precision in a file that is resumed from")


@rule("warning", "save model.state_dict()")
def save_whole_module(file: File) -> Hits:
    for call in file.calls_of("torch.save"):
        saved = call.args[0] if len(call.args) > 1 else None
        if isinstance(saved, ast.Attribute) and saved.attr == "module":
            saved = saved.value
        if isinstance(saved, ast.Name | ast.Attribute):
            text = re.escape(file.segment(saved))
            used = rf"\b{text}(\.module)?\.(train|eval|parameters|named_parameters|zero_grad)\("
            values = file.values(saved)
            plain = any(isinstance(one, ast.Dict) or "state_dict" in file.segment(one) for one in values)
            if not plain and re.search(used, file.text):
                yield hit(call, "the module object is pickled; torch.load refuses it by default")
