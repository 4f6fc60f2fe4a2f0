"""Which rows a rank sees: samplers and loaders."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import Edit, add_argument, indent_of, remove_argument, replace
from evener.lint.file import File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal

HELD_OUT = re.compile(
    r"(^|_|\b)(val|valid|validation|test|eval|evaluation|dev)(\d*)(_|$|\b)|(valid|val|test|eval)(_?data|_?set|_?loader|_?sampler)",
    re.I,
)
TRAINED = re.compile(r"train|\btr_", re.I)


def _samplers(file: File) -> list[ast.Call]:
    """Every DistributedSampler that is made, subclasses of the same name in other libraries too."""
    return [call for call in file.making("sampler") if last(file.name(call.func)) == "DistributedSampler"]


def _shuffles(call: ast.Call) -> bool:
    """A sampler's default; what is in **kwargs is not known."""
    shuffle = keyword(call, "shuffle", 3)
    return not _hides_arguments(call) and (shuffle is None or literal(shuffle) is True)


def _hides_arguments(call: ast.Call) -> bool:
    return any(one.arg is None for one in call.keywords) or any(isinstance(arg, ast.Starred) for arg in call.args)


def _bound_to(file: File, call: ast.Call) -> str:
    stmt = file.statement(call)
    return file.segment(stmt.targets[0]) if isinstance(stmt, ast.Assign) else ""


def _about(file: File, call: ast.Call) -> str:
    """The names around a sampler or loader: what it is bound to, and of which rows it is."""
    return f"{_bound_to(file, call)} {file.segment(call.args[0]) if call.args else ''}"


def _held_out(text: str) -> bool:
    return bool(HELD_OUT.search(text)) and not TRAINED.search(text)


@rule("warning", "call sampler.set_epoch(epoch) at the start of every epoch", in_tests=False)
def sampler_no_set_epoch(file: File) -> Hits:
    if file.calls("set_epoch") or file.uses("accelerator"):
        return
    for call in _samplers(file):
        if not _shuffles(call) or _held_out(_about(file, call)):
            continue
        bound, here = _bound_to(file, call), file.function(call)
        loops = [loop for loop in file.loops() if file.function(loop) is here and file.over_epochs(loop)]
        if not loops and not file.uses("epoch loop"):
            continue
        edit, after = None, [loop for loop in loops if loop.lineno > call.lineno]
        loop = after[0] if len(after) == 1 and bound.isidentifier() else None
        if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
            first = loop.body[0]
            if file.at(call).tests == file.at(loop).tests and first.lineno > loop.lineno:
                at = file.starts[first.lineno - 1]
                line = f"{indent_of(file, first)}{bound}.set_epoch({loop.target.id}){file.newline}"
                edit = Edit(at, at, line)
        yield hit(call, "set_epoch is called nowhere: every epoch has the same order", edit)


@rule("error", "give every rank the same seed")
def sampler_rank_seed(file: File) -> Hits:
    for call in _samplers(file):
        seed = keyword(call, "seed", 4)
        if seed is not None and any(file.is_rank(node) for node in ast.walk(seed)):
            edit = remove_argument(file, call, seed)
            if isinstance(seed, ast.BinOp) and isinstance(seed.op, ast.Add) and file.is_rank(seed.right):
                edit = Edit(file.span(seed.left)[1], file.span(seed)[1], "")
            yield hit(call, "the seed differs by rank: shares overlap, and rows are missed", edit)


@rule("warning", "sampler=DistributedSampler(dataset) instead of shuffle=True", in_tests=False)
def ddp_loader_no_sampler(file: File) -> Hits:
    if not file.making("ddp") or file.uses("sampler", "accelerator", "fsdp"):
        return
    if file.calls("split_dataset_by_node", "random_split_by_rank") or any("Sampler" in one for one in file.aliases):
        return
    if re.search(r"Sampler\(|IterableDataset|\[rank::|shard\(", file.text):
        return
    for call in file.making("loader"):
        if _hides_arguments(call) or literal(keyword(call, "shuffle")) is not True or keyword(call, "batch_sampler"):
            continue
        alone = any("dist" in test.text and not test.wanted for test in file.at(call).tests)
        if not alone and not file.guard(call) and not _held_out(_about(file, call)):
            yield hit(call, "every rank goes through all rows: the loader has no DistributedSampler")


@rule("warning", "shuffle=False", in_tests=False)
def eval_sampler_shuffles(file: File) -> Hits:
    for call in _samplers(file):
        names, function = _about(file, call), file.function(call)
        if function is not None and not _held_out(names):  # build_val_loader(...)
            loader = re.search(r"(val|valid|test|eval)\w*?_?(loader|dataset|data)", function.name, re.I)
            names = "val" if loader and not TRAINED.search(names + function.name) else ""
        if _shuffles(call) and _held_out(names):
            shuffle = keyword(call, "shuffle", 3)
            edit = replace(file, shuffle, "False") if shuffle else add_argument(file, call, "shuffle=False")
            yield hit(call, "the validation sampler shuffles (the default) and repeats rows", edit)
