"""Devices: which GPUs are visible, what they are called, and what a context manager does."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import replace
from evener.lint.events import branches
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal, method

QUERIES = {
    "is_available", "device_count", "current_device", "get_device_name", "get_device_properties", "set_device",
    "mem_get_info", "get_device_capability", "init", "empty_cache", "synchronize", "manual_seed_all",
}  # fmt: skip
MANAGERS = {
    "torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.autocast", "torch.amp.autocast",
    "torch.cuda.amp.autocast", "torch.cpu.amp.autocast", "torch.cuda.device", "torch.cuda.stream",
    "torch.accelerator.device_index", "torch.random.fork_rng", "torch.autograd.no_grad",
}  # fmt: skip


@rule("error", "set it before the first call into torch.cuda, best before the program starts")
def cvd_after_cuda_query(file: File) -> Hits:
    asked = [
        call for call in file.of(ast.Call)
        if (dotted := file.name(call.func)).startswith("torch.cuda.") and last(dotted) in QUERIES
        and not any(isinstance(up, ast.If) and "__name__" in file.segment(up.test) for up in file.above(call))
    ]  # fmt: skip
    for stmt, _, _ in file.environment("CUDA_VISIBLE_DEVICES"):
        here = file.at(stmt)
        for call in asked:
            there = file.at(call)
            same = there.function is here.function or (there.function is None and there.owner is None)
            always = branches(there) <= branches(here) and not file.inside(call, stmt)
            tested = any(file.inside(call, test.node) for test in here.tests)
            if same and (always or tested) and call.lineno < stmt.lineno:
                yield hit(stmt, f"CUDA was asked in line {call.lineno}: this setting is ignored")
                break


@rule("warning", "count from 0 among the visible GPUs")
def physical_ids_after_cvd(file: File) -> Hits:
    for stmt, _, _ in file.environment("CUDA_VISIBLE_DEVICES"):
        text = re.sub(r"^str\((.*)\)$", r"\1", file.segment(stmt.value))
        given = literal(stmt.value)
        for call in (one for one in file.of(ast.Call) if one.lineno >= stmt.lineno):
            ids = keyword(call, "device_ids", 1) if file.holds(call, "dp", "ddp") else None
            if ids is None and file.name(call.func) == "torch.cuda.set_device" and call.args:
                ids = call.args[0]
            if ids is None:
                continue
            if isinstance(given, str):
                listed = ids.elts if isinstance(ids, ast.List | ast.Tuple) else [ids]
                count = len(given.split(","))
                wrong = any(isinstance(n := literal(one), int) and n >= count for one in listed)
            else:
                again = rf"\b{re.escape(text)}\b.*split|for \w+ in {re.escape(text)}\b"
                wrong = "." in text and bool(re.search(again, file.segment(ids)))
            if wrong:
                yield hit(call, f"CUDA_VISIBLE_DEVICES (line {stmt.lineno}) renumbers the GPUs from 0")


@rule("error", "compare device.type")
def device_compared_to_str(file: File) -> Hits:
    for test in (one for one in file.of(ast.Compare) if len(one.ops) == 1):
        left, right, op = test.left, test.comparators[0], test.ops[0]
        pairs = [(left, right), (right, left)] if isinstance(op, ast.Eq | ast.NotEq) else []
        if isinstance(op, ast.In | ast.NotIn) and not isinstance(right, ast.Constant):
            pairs = [(left, right)]
        for device, other in pairs:
            if _is_text(other) and _is_device(file, device):
                bare = isinstance(other, ast.Constant) and re.fullmatch(r"[a-z]+", str(other.value))
                edit = replace(file, device, f"{file.exact(device)}.type") if bare else None
                yield hit(test, "a torch.device never equals a string", edit)


def _is_text(node: ast.expr) -> bool:
    several = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    return bool(several) and all(isinstance(literal(one), str) for one in several)


def _is_device(file: File, node: ast.expr) -> bool:
    """It surely is one: every value that it is seen to get is one. A parameter may be given a string as well."""
    if isinstance(node, ast.Name | ast.Attribute):
        function = file.function(node)
        if isinstance(node, ast.Name) and function is not None and node.id in file.params[function]:
            return False
        bound = file.now(node)
        return bool(bound) and all(_is_device(file, value) for _, value in bound)
    if isinstance(node, ast.IfExp):
        return _is_device(file, node.body) and _is_device(file, node.orelse)
    return isinstance(node, ast.Call) and file.name(node.func) == "torch.device"


@rule("error", "with ...:")
def context_manager_not_entered(file: File) -> Hits:
    for call in (one.value for one in file.of(ast.Expr) if isinstance(one.value, ast.Call)):
        if file.name(call.func) in MANAGERS or (method(call, "no_sync") and not call.args):
            yield hit(call, f"{file.segment(call.func)}() does nothing without `with`")


@rule("warning", "NVML (nvidia-ml-py), torch.cuda.mem_get_info(), or `evener gpus --json`")
def nvidia_smi_text(file: File) -> Hits:
    run = ("popen", "run", "getoutput", "system", "call", "getstatusoutput")
    for node in file.of(ast.Constant):
        if isinstance(node.value, str) and re.match(r"\s*(\S*/)?nvidia-smi\b", node.value):
            up = next(up for up in file.above(node) if isinstance(up, ast.Call | ast.stmt))
            dotted = file.name(up.func) if isinstance(up, ast.Call) else ""
            known = last(dotted) in run and dotted.startswith(("os.", "subprocess.", "commands.", "sp."))
            if known or last(dotted) in ("check_output", "Popen"):
                yield hit(up, "nvidia-smi's output is read as text")


@rule("warning", "except torch.OutOfMemoryError (a RuntimeError)")
def oom_by_message(file: File) -> Hits:
    for test in file.of(ast.Compare):
        text = literal(test.left)
        if not isinstance(text, str) or "out of memory" not in text.lower():
            continue
        if len(test.ops) == 1 and isinstance(test.ops[0], ast.In | ast.NotIn):
            name = next((up.name for up in file.above(test) if isinstance(up, ast.ExceptHandler)), None)
            named = name and re.search(rf"\b{name}\b", file.segment(test.comparators[0]))
            negated = "not " if isinstance(test.ops[0], ast.NotIn) else ""
            edit = replace(file, test, f"{negated}isinstance({name}, torch.OutOfMemoryError)")
            known = named and file.aliases.get("torch") == "torch"
            yield hit(test, "out of memory is recognised by its message", edit if known else None)
