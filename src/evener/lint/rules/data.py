"""Which rows a rank sees: samplers and loaders."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.names import loops_over_epochs
from evener.lint.rule import Checked, Edit, Hits, Rule, add_argument, hit, indent_of, newline, remove_argument
from evener.lint.source import hides_arguments, keyword, last, literal

HELD_OUT = re.compile(
    r"(^|_|\b)(val|valid|validation|test|eval|evaluation|dev)(\d*)(_|$|\b)|(valid|val|test|eval)(_?data|_?set|_?loader|_?sampler)",
    re.I,
)
TRAINED = re.compile(r"train|\btr_", re.I)


def samplers(file: Checked) -> Iterator[ast.Call]:
    """Every DistributedSampler that is made, subclasses of the same name in other libraries too."""
    for call in file.of(ast.Call):
        if last(file.name(call.func)) == "DistributedSampler" and file.holds(call, "sampler"):
            yield call


def name_of(file: Checked, node: ast.AST) -> str:
    """What the value is bound to: `val_sampler = ...`, or the keyword it is given to."""
    for up in file.above(node):
        if isinstance(up, ast.Assign):
            return file.segment(up.targets[0])
        if isinstance(up, ast.stmt):
            break
    return ""


class SamplerNoSetEpoch(Rule):
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

    in_tests = False
    fix = "call sampler.set_epoch(epoch) at the start of every epoch"

    def check(self, file: Checked) -> Hits:
        if file.calls("set_epoch") or file.uses("accelerator"):
            return
        for call in samplers(file):
            shuffle = keyword(call, "shuffle", 3)
            if hides_arguments(call) or (shuffle is not None and literal(shuffle) is not True):
                continue
            bound = name_of(file, call)
            about = bound + " " + (file.segment(call.args[0]) if call.args else "")
            if HELD_OUT.search(about) and not TRAINED.search(about):
                continue
            function = file.function(call)
            loops = [
                loop for loop in file.source.loops()
                if file.function(loop) is function and loops_over_epochs(file.names, loop)
            ]  # fmt: skip
            if not loops and not file.uses("epoch loop"):
                continue
            edits: list[Edit] = []
            after = [loop for loop in loops if loop.lineno > call.lineno]
            if (
                len(after) == 1
                and bound.isidentifier()
                and isinstance(after[0], ast.For)
                and isinstance(after[0].target, ast.Name)
            ):
                loop = after[0]
                if file.at(call).tests == file.at(loop).tests and loop.body[0].lineno > loop.lineno:
                    at = file.starts[loop.body[0].lineno - 1]
                    indent = indent_of(file, loop.body[0])
                    edits = [Edit(at, at, f"{indent}{bound}.set_epoch({after[0].target.id}){newline(file)}")]
            yield hit(call, "set_epoch is called nowhere: every epoch has the same order", *edits)


class SamplerRankSeed(Rule):
    """The sampler's seed contains the rank.

    Ranks draw their shares from different permutations: some rows are seen twice, others never.

    bad -, good +:
        - sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True, seed=seed + rank)
        + sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True, seed=seed)
          sampler.set_epoch(0)
    """

    level = "error"
    fix = "give every rank the same seed"

    def check(self, file: Checked) -> Hits:
        for call in samplers(file):
            seed = keyword(call, "seed", 4)
            if seed is None or not any(file.is_rank(node) for node in ast.walk(seed) if isinstance(node, ast.expr)):
                continue
            edit = remove_argument(file, call, seed)
            if isinstance(seed, ast.BinOp) and isinstance(seed.op, ast.Add) and file.is_rank(seed.right):
                edit = Edit(file.span(seed.left)[1], file.span(seed)[1], "")
            yield hit(call, "the seed differs by rank: shares overlap, and rows are missed", edit)


class DdpLoaderNoSampler(Rule):
    """A DDP program shuffles its training loader without a DistributedSampler.

    Every rank goes through all rows; an epoch costs as much as on one GPU and sees every row `world_size` times.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        + sampler = torch.utils.data.distributed.DistributedSampler(train_set)
        + sampler.set_epoch(0)
        - train_loader = torch.utils.data.DataLoader(train_set, batch_size=32, shuffle=True)
        + train_loader = torch.utils.data.DataLoader(train_set, batch_size=32, sampler=sampler)
    """

    in_tests = False
    fix = "sampler=DistributedSampler(dataset) instead of shuffle=True"

    def check(self, file: Checked) -> Hits:
        here = [call for call in file.of(ast.Call) if "ddp" in file.made(call)]
        if (
            not here
            or file.uses("sampler", "accelerator", "fsdp")
            or file.calls("split_dataset_by_node", "random_split_by_rank")
        ):
            return
        if any("Sampler" in alias for alias in file.aliases) or re.search(
            r"Sampler\(|IterableDataset|\[rank::|shard\(", file.text
        ):
            return
        for call in file.of(ast.Call):
            if "loader" not in file.made(call) or hides_arguments(call):
                continue
            if literal(keyword(call, "shuffle")) is True and not keyword(call, "batch_sampler"):
                about = name_of(file, call) + " " + (file.segment(call.args[0]) if call.args else "")
                one = file.guard(call) or any("dist" in test.text and not test.wanted for test in file.at(call).tests)
                if not one and not (HELD_OUT.search(about) and not TRAINED.search(about)):
                    yield hit(call, "every rank goes through all rows: the loader has no DistributedSampler")


class EvalSamplerShuffles(Rule):
    """The sampler of a validation or test set shuffles.

    DistributedSampler shuffles by default and repeats rows to fill the last batch: which rows count twice then differs
    from epoch to epoch, and so does the metric.

    bad -, good +:
        - val_sampler = torch.utils.data.distributed.DistributedSampler(val_set)
        + val_sampler = torch.utils.data.distributed.DistributedSampler(val_set, shuffle=False)
    """

    in_tests = False
    fix = "shuffle=False"

    def check(self, file: Checked) -> Hits:
        for call in samplers(file):
            shuffle = keyword(call, "shuffle", 3)
            if hides_arguments(call) or (shuffle is not None and literal(shuffle) is not True):
                continue
            bound = name_of(file, call)
            rows = file.segment(call.args[0]) if call.args else ""
            function = file.function(call)
            about = f"{bound} {rows}"
            if not HELD_OUT.search(about) or TRAINED.search(about):
                loader = function and re.search(
                    r"(val|valid|test|eval)\w*?_?(loader|dataset|data)", function.name, re.I
                )
                if function is None or not loader or TRAINED.search(about + function.name):
                    continue
            edit = add_argument(file, call, "shuffle=False") if shuffle is None else Edit(*file.span(shuffle), "False")
            yield hit(call, "the validation sampler shuffles (the default) and repeats rows", edit)


class EvalMetricNotReduced(Rule):
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

    level = "hint"
    fix = "all_reduce the counts before dividing"

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
                yield hit(function, f"{', '.join(sorted(counted))}: counted on this rank's share, never reduced")
