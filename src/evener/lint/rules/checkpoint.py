"""Checkpoints: activation checkpointing, and what is written to disk and read back."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from evener.lint.names import entries, in_checkpoint
from evener.lint.rule import Checked, Finding, Rule, add_argument
from evener.lint.source import keyword, literal

CHECKPOINT = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


class CheckpointUseReentrant(Rule):
    """Activation checkpointing without `use_reentrant`.

    The default is the reentrant form: where the input needs no gradient, the block's parameters get none, silently.

    bad -, good +:
        - out = torch.utils.checkpoint.checkpoint(block, x)
        + out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    """

    fix = "use_reentrant=False"

    def check(self, file: Checked) -> Iterator[Finding]:
        for call in file.source.of(ast.Call):
            if file.source.name(call.func) in CHECKPOINT and call.args:
                if not any(one.arg in (None, "use_reentrant") for one in call.keywords):
                    edit = add_argument(file.source, call, "use_reentrant=False")
                    yield self.found(
                        file, call, "the reentrant default drops gradients where the input needs none", edit
                    )


class CheckpointCalledEarly(Rule):
    """checkpoint() runs the module at once; it does not wrap it.

    Without inputs the call raises a TypeError.

    bad -, good +:
        - block.attention = torch.utils.checkpoint.checkpoint(block.attention, use_reentrant=False)
        + from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        + block.attention = checkpoint_wrapper(block.attention)
    """

    level = "error"
    fix = "wrap with checkpoint_wrapper(module), or call checkpoint in forward"

    def check(self, file: Checked) -> Iterator[Finding]:
        for assign in file.source.of(ast.Assign):
            call = assign.value
            if not isinstance(call, ast.Call) or file.source.name(call.func) != CHECKPOINT[0] or len(call.args) != 1:
                continue
            known = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"}
            inputs = [one for one in call.keywords if one.arg not in known]
            module = isinstance(call.args[0], ast.Attribute | ast.Subscript)
            if isinstance(assign.targets[0], ast.Attribute | ast.Subscript) and module and not inputs:
                yield self.found(file, call, "checkpoint() calls the module at once, without inputs")


def loads(file: Checked) -> Iterator[ast.Call]:
    for call in file.source.of(ast.Call):
        if file.source.name(call.func) == "torch.load" and not any(one.arg is None for one in call.keywords):
            yield call


class LoadNeedsWeightsOnly(Rule):
    """A checkpoint that holds more than tensors is loaded with the default.

    `torch.load` reads weights only since 2.6: a Namespace, a configuration object or a numpy scalar raises.

    bad -, good +:
          args = parser.parse_args()
        - torch.save({"model": model.state_dict(), "args": args}, "last.pt")
        + torch.save({"model": model.state_dict(), "args": vars(args)}, "last.pt")
          state = torch.load("last.pt", map_location="cpu")
          model.load_state_dict(state["model"])
    """

    level = "error"
    in_tests = False
    fix = "save vars(args) or plain values; weights_only=False only for files that you trust"

    def check(self, file: Checked) -> Iterator[Finding]:
        own = file.project.files[file.source.path].saved  # a file that saves loads what it saves
        related = [] if own else file.project.related(file.source.path)
        held = own.union(*(one.saved for one in related)) & {"args", "numpy"}
        if not held:
            return
        what = "a Namespace or configuration object" if "args" in held else "numpy values"
        for call in loads(file):
            if (
                keyword(call, "weights_only") is None
                and keyword(call, "pickle_module") is None
                and self._keyed(file, call)
            ):
                yield self.found(
                    file, call, f"the checkpoints saved here hold {what}: weights_only=True (the default) refuses them"
                )

    def _keyed(self, file: Checked, call: ast.Call) -> bool:
        """The result is used as a checkpoint: looked into by the name of a part. Plain weights are not."""
        up = file.source.parent[call]
        if isinstance(up, ast.Subscript):
            return isinstance(literal(up.slice), str)
        paths = [call.args[0], *(value for _, value in file.names.values(call.args[0]))] if call.args else []
        if any(isinstance(path := literal(one), str) and file.source.text.count(path) < 2 for one in paths):
            return False  # weights from elsewhere: nothing here writes a file of this name
        if not isinstance(up, ast.Assign) or not isinstance(up.targets[0], ast.Name | ast.Attribute):
            return False
        text = re.escape(file.source.segment(up.targets[0]))
        part = r"""(["']\w+["']|\w*key\w*)"""
        return bool(re.search(rf"\b{text}(\[|\.get\(|\.pop\(){part}|{part} (not )?in {text}\b", file.source.text))


class LoadNoMapLocation(Rule):
    """A DDP program loads a checkpoint without map_location.

    Tensors go back to the GPU that saved them: every rank loads onto GPU 0, which runs out of memory.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - state = torch.load("last.pt")
        + state = torch.load("last.pt", map_location="cpu")
    """

    in_tests = False
    fix = 'map_location="cpu", or this rank\'s device'

    def check(self, file: Checked) -> Iterator[Finding]:
        if not any("ddp" in file.names._made(call) for call in file.source.of(ast.Call)):
            return
        for call in loads(file):
            if keyword(call, "map_location", 1) is None and not file.names.guard(file.source.at(call)):
                yield self.found(
                    file,
                    call,
                    "every rank loads onto the GPU that saved: GPU 0",
                    add_argument(file.source, call, 'map_location="cpu"'),
                )


class HalfResumeCheckpoint(Rule):
    """Weights are rounded to half precision beside an optimizer's state.

    A run that resumes from the file starts from rounded weights.

    bad -, good +:
        - torch.save({"model": copy.deepcopy(model).half(), "optimizer": optimizer.state_dict()}, "last.pt")
        + torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    """

    fix = "save fp32 weights in the file that is resumed from; round in an export"

    def check(self, file: Checked) -> Iterator[Finding]:
        for call in file.source.of(ast.Call):
            if file.source.name(call.func) != "torch.save" or not call.args:
                continue
            if "optimizer" not in set(in_checkpoint(file.names, call.args[0])):
                continue
            for key, value in entries(file.names, call.args[0]):
                if (
                    re.search(r"\.half\(\)|\.to\(torch\.float16\)|\.bfloat16\(\)", file.source.segment(value))
                    and key != "ema"
                ):
                    yield self.found(
                        file, value, f"{key!r} is rounded to half precision in a file that is resumed from"
                    )


class SaveWholeModule(Rule):
    """The module object itself is saved.

    The file needs pickle and today's classes to load; `torch.load` refuses it by default.

    bad -, good +:
          model = Net()
          model.train()
        - torch.save(model, "model.pt")
        + torch.save(model.state_dict(), "model.pt")
    """

    fix = "save model.state_dict()"

    def check(self, file: Checked) -> Iterator[Finding]:
        for call in file.source.of(ast.Call):
            if file.source.name(call.func) != "torch.save" or len(call.args) < 2:
                continue
            saved = call.args[0]
            if isinstance(saved, ast.Attribute) and saved.attr == "module":
                saved = saved.value
            if not isinstance(saved, ast.Name | ast.Attribute):
                continue
            text = re.escape(file.source.segment(saved))
            used = re.search(
                rf"\b{text}(\.module)?\.(train|eval|parameters|named_parameters|zero_grad)\(", file.source.text
            )
            if used and not any(
                "state_dict" in file.source.segment(v) or isinstance(v, ast.Dict) for _, v in file.names.values(saved)
            ):
                yield self.found(file, call, "the module object is pickled; torch.load refuses it by default")
