"""Which rows a rank sees: samplers and loaders."""

from __future__ import annotations

import ast
import re

from evener.lint.names import loops_over_epochs
from evener.lint.rule import Checked, Edit, Hits, Rule, add_argument, hit, indent_of, newline, remove_argument, replace
from evener.lint.source import hides_arguments, keyword, last, literal

HELD_OUT = re.compile(
    r"(^|_|\b)(val|valid|validation|test|eval|evaluation|dev)(\d*)(_|$|\b)|(valid|val|test|eval)(_?data|_?set|_?loader|_?sampler)",
    re.I,
)
TRAINED = re.compile(r"train|\btr_", re.I)


def samplers(file: Checked) -> list[ast.Call]:
    """Every DistributedSampler that is made, subclasses of the same name in other libraries too."""
    return [call for call in file.making("sampler") if last(file.name(call.func)) == "DistributedSampler"]


def shuffles(call: ast.Call) -> bool:
    """A sampler's default; what is in **kwargs is not known."""
    shuffle = keyword(call, "shuffle", 3)
    return not hides_arguments(call) and (shuffle is None or literal(shuffle) is True)


def about(file: Checked, call: ast.Call) -> str:
    """The names around a sampler or loader: what it is bound to, and of which rows it is."""
    return f"{name_of(file, call)} {file.segment(call.args[0]) if call.args else ''}"


def held_out(text: str) -> bool:
    return bool(HELD_OUT.search(text)) and not TRAINED.search(text)


def name_of(file: Checked, node: ast.AST) -> str:
    """What the value is bound to: `val_sampler = ...`, or the keyword it is given to."""
    for up in file.above(node):
        if isinstance(up, ast.Assign):
            return file.segment(up.targets[0])
        if isinstance(up, ast.stmt):
            break
    return ""


class SamplerNoSetEpoch(Rule, in_tests=False, fix="call sampler.set_epoch(epoch) at the start of every epoch"):
    """A shuffling DistributedSampler whose `set_epoch` is never called.

    Every epoch then has the same order.

    bad -, good +:
          sampler = torch.utils.data.distributed.DistributedSampler(dataset)
          loader = torch.utils.data.DataLoader(dataset, sampler=sampler)
          for epoch in range(10):
        +     sampler.set_epoch(epoch)
              for x, y in loader:
                  train_step(x, y)
    """

    def check(self, file: Checked) -> Hits:
        if file.calls("set_epoch") or file.uses("accelerator"):
            return
        for call in samplers(file):
            if not shuffles(call) or held_out(about(file, call)):
                continue
            bound, function = name_of(file, call), file.function(call)
            loops = [
                loop for loop in file.source.loops()
                if file.function(loop) is function and loops_over_epochs(file.names, loop)
            ]  # fmt: skip
            if not loops and not file.uses("epoch loop"):
                continue
            edit, after = None, [loop for loop in loops if loop.lineno > call.lineno]
            loop = after[0] if len(after) == 1 and bound.isidentifier() else None
            if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
                if file.at(call).tests == file.at(loop).tests and loop.body[0].lineno > loop.lineno:
                    at = file.starts[loop.body[0].lineno - 1]
                    indent = indent_of(file, loop.body[0])
                    edit = Edit(at, at, f"{indent}{bound}.set_epoch({loop.target.id}){newline(file)}")
            yield hit(call, "set_epoch is called nowhere: every epoch has the same order", edit)


class SamplerRankSeed(Rule, level="error", fix="give every rank the same seed"):
    """The sampler's seed contains the rank.

    Ranks draw their shares from different permutations: some rows are seen twice, others never.

    bad -, good +:
        - sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True, seed=seed + rank)
        + sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True, seed=seed)
          sampler.set_epoch(0)
    """

    def check(self, file: Checked) -> Hits:
        for call in samplers(file):
            seed = keyword(call, "seed", 4)
            if seed is None or not any(file.is_rank(node) for node in ast.walk(seed)):
                continue
            edit = remove_argument(file, call, seed)
            if isinstance(seed, ast.BinOp) and isinstance(seed.op, ast.Add) and file.is_rank(seed.right):
                edit = Edit(file.span(seed.left)[1], file.span(seed)[1], "")
            yield hit(call, "the seed differs by rank: shares overlap, and rows are missed", edit)


class DdpLoaderNoSampler(Rule, in_tests=False, fix="sampler=DistributedSampler(dataset) instead of shuffle=True"):
    """A DDP program shuffles its training loader without a DistributedSampler.

    Every rank goes through all rows; an epoch costs as much as on one GPU and sees every row `world_size` times.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        + sampler = torch.utils.data.distributed.DistributedSampler(train_set)
        + sampler.set_epoch(0)
        - train_loader = torch.utils.data.DataLoader(train_set, batch_size=32, shuffle=True)
        + train_loader = torch.utils.data.DataLoader(train_set, batch_size=32, sampler=sampler)
    """

    def check(self, file: Checked) -> Hits:
        if not file.making("ddp") or file.uses("sampler", "accelerator", "fsdp"):
            return
        if file.calls("split_dataset_by_node", "random_split_by_rank"):
            return
        if any("Sampler" in alias for alias in file.aliases):
            return
        if re.search(r"Sampler\(|IterableDataset|\[rank::|shard\(", file.text):
            return
        for call in file.making("loader"):
            if hides_arguments(call) or literal(keyword(call, "shuffle")) is not True or keyword(call, "batch_sampler"):
                continue
            alone = any("dist" in test.text and not test.wanted for test in file.at(call).tests)
            if not alone and not file.guard(call) and not held_out(about(file, call)):
                yield hit(call, "every rank goes through all rows: the loader has no DistributedSampler")


class EvalSamplerShuffles(Rule, in_tests=False, fix="shuffle=False"):
    """The sampler of a validation or test set shuffles.

    DistributedSampler shuffles by default and repeats rows to fill the last batch: which rows count twice then differs
    from epoch to epoch, and so does the metric.

    bad -, good +:
        - val_sampler = torch.utils.data.distributed.DistributedSampler(val_set)
        + val_sampler = torch.utils.data.distributed.DistributedSampler(val_set, shuffle=False)
    """

    def check(self, file: Checked) -> Hits:
        for call in samplers(file):
            names, function = about(file, call), file.function(call)
            if function is not None and not held_out(names):  # build_val_loader(...)
                loader = re.search(r"(val|valid|test|eval)\w*?_?(loader|dataset|data)", function.name, re.I)
                names = "val" if loader and not TRAINED.search(names + function.name) else ""
            if not shuffles(call) or not held_out(names):
                continue
            shuffle = keyword(call, "shuffle", 3)
            edit = replace(file, shuffle, "False") if shuffle else add_argument(file, call, "shuffle=False")
            yield hit(call, "the validation sampler shuffles (the default) and repeats rows", edit)


class EvalMetricNotReduced(Rule, level="hint", fix="all_reduce the counts before dividing"):
    """A metric is counted over this rank's share and printed as if it were the whole.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
          sampler = torch.utils.data.distributed.DistributedSampler(test_set, shuffle=False)
          def evaluate(loader):
        -     correct = total = 0
        +     counts = torch.zeros(2, device="cuda")
              for x, y in loader:
        -         correct += (model(x).argmax(1) == y).sum().item()
        -         total += len(y)
        -     return correct / total
        +         counts += torch.stack([(model(x).argmax(1) == y).sum(), torch.tensor(len(y), device="cuda")])
        +     torch.distributed.all_reduce(counts)
        +     return (counts[0] / counts[1]).item()
    """

    def check(self, file: Checked) -> Hits:
        if not file.uses("ddp") or not file.uses("sampler") or file.uses("collective", "accelerator"):
            return
        if file.calls("all_reduce", "all_gather", "reduce", "gather", "synchronize_between_processes"):
            return
        for function in file.of(ast.FunctionDef):
            if not re.search(r"eval|valid|test", function.name):
                continue
            counted = {
                file.segment(aug.target) for aug in file.of(ast.AugAssign)
                if file.function(aug) is function and file.at(aug).loops and isinstance(aug.op, ast.Add)
                and re.search(r"correct|total|count|hits", file.segment(aug.target))
            }  # fmt: skip
            if counted:
                names = ", ".join(sorted(counted))
                yield hit(function, f"{names}: counted on this rank's share, never reduced")
