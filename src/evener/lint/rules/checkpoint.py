"""Checkpoints: activation checkpointing, and what is written to disk and read back."""

from __future__ import annotations

import ast
import re

from evener.lint.names import entries, in_checkpoint
from evener.lint.rule import Checked, Hits, Rule, add_argument, hit
from evener.lint.source import keyword, literal

CHECKPOINT = ("torch.utils.checkpoint.checkpoint", "torch.utils.checkpoint.checkpoint_sequential")


class CheckpointUseReentrant(Rule, fix="use_reentrant=False"):
    """Activation checkpointing without `use_reentrant`.

    The default is the reentrant form: where the input needs no gradient, the block's parameters get none, silently.

    bad -, good +:
        - out = torch.utils.checkpoint.checkpoint(block, x)
        + out = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
    """

    def check(self, file: Checked) -> Hits:
        why = "the reentrant default drops gradients where the input needs none"
        for call in file.calls_of(*CHECKPOINT):
            if call.args and not any(one.arg in (None, "use_reentrant") for one in call.keywords):
                yield hit(call, why, add_argument(file, call, "use_reentrant=False"))


class CheckpointCalledEarly(
    Rule, level="error", fix="wrap with checkpoint_wrapper(module), or call checkpoint in forward"
):
    """checkpoint() runs the module at once; it does not wrap it.

    Without inputs the call raises a TypeError.

    bad -, good +:
        - block.attention = torch.utils.checkpoint.checkpoint(block.attention, use_reentrant=False)
        + from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
        + block.attention = checkpoint_wrapper(block.attention)
    """

    def check(self, file: Checked) -> Hits:
        known = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug"}
        for call in file.calls_of(CHECKPOINT[0]):
            assign = file.parent[call]
            if not isinstance(assign, ast.Assign) or len(call.args) != 1 or {one.arg for one in call.keywords} - known:
                continue
            if all(isinstance(one, ast.Attribute | ast.Subscript) for one in (assign.targets[0], call.args[0])):
                yield hit(call, "checkpoint() calls the module at once, without inputs")


def loads(file: Checked) -> list[ast.Call]:
    return [call for call in file.calls_of("torch.load") if not any(one.arg is None for one in call.keywords)]


class LoadNeedsWeightsOnly(
    Rule,
    level="error",
    in_tests=False,
    fix="save vars(args) or plain values; weights_only=False only for files that you trust",
):
    """A checkpoint that holds more than tensors is loaded with the default.

    `torch.load` reads weights only since 2.6: a Namespace, a configuration object or a numpy scalar raises.

    bad -, good +:
          args = parser.parse_args()
        - torch.save({"model": model.state_dict(), "args": args}, "last.pt")
        + torch.save({"model": model.state_dict(), "args": vars(args)}, "last.pt")
          state = torch.load("last.pt", map_location="cpu")
          model.load_state_dict(state["model"])
    """

    def check(self, file: Checked) -> Hits:
        own = file.project.files[file.path].saved  # a file that saves loads what it saves
        related = [] if own else file.project.related(file.path)
        held = own.union(*(one.saved for one in related)) & {"args", "numpy"}
        what = "a Namespace or configuration object" if "args" in held else "numpy values"
        for call in loads(file) if held else ():
            given = keyword(call, "weights_only") or keyword(call, "pickle_module")
            if given is None and self._keyed(file, call):
                yield hit(call, f"the checkpoints saved here hold {what}: weights_only=True (the default) refuses them")

    def _keyed(self, file: Checked, call: ast.Call) -> bool:
        """The result is used as a checkpoint: looked into by the name of a part. Plain weights are not."""
        up = file.parent[call]
        if isinstance(up, ast.Subscript):
            return isinstance(literal(up.slice), str)
        paths = [call.args[0], *(value for _, value in file.values(call.args[0]))] if call.args else []
        if any(isinstance(path := literal(one), str) and file.text.count(path) < 2 for one in paths):
            return False  # weights from elsewhere: nothing here writes a file of this name
        if not isinstance(up, ast.Assign) or not isinstance(up.targets[0], ast.Name | ast.Attribute):
            return False
        text = re.escape(file.segment(up.targets[0]))
        part = r"""(["']\w+["']|\w*key\w*)"""
        return bool(re.search(rf"\b{text}(\[|\.get\(|\.pop\(){part}|{part} (not )?in {text}\b", file.text))


class LoadNoMapLocation(Rule, in_tests=False, fix='map_location="cpu", or this rank\'s device'):
    """A DDP program loads a checkpoint without map_location.

    Tensors go back to the GPU that saved them: every rank loads onto GPU 0, which runs out of memory.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
        - state = torch.load("last.pt")
        + state = torch.load("last.pt", map_location="cpu")
    """

    def check(self, file: Checked) -> Hits:
        for call in loads(file) if file.making("ddp") else ():
            if keyword(call, "map_location", 1) is None and not file.guard(call):
                edit = add_argument(file, call, 'map_location="cpu"')
                yield hit(call, "every rank loads onto the GPU that saved: GPU 0", edit)


class HalfResumeCheckpoint(Rule, fix="save fp32 weights in the file that is resumed from; round in an export"):
    """Weights are rounded to half precision beside an optimizer's state.

    A run that resumes from the file starts from rounded weights.

    bad -, good +:
        - torch.save({"model": copy.deepcopy(model).half(), "optimizer": optimizer.state_dict()}, "last.pt")
        + torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")
    """

    def check(self, file: Checked) -> Hits:
        for call in file.calls_of("torch.save"):
            if not call.args or "optimizer" not in set(in_checkpoint(file.names, call.args[0])):
                continue
            for key, value in entries(file.names, call.args[0]):
                halved = re.search(r"\.half\(\)|\.to\(torch\.float16\)|\.bfloat16\(\)", file.segment(value))
                if halved and key != "ema":
                    yield hit(value, f"{key!r} is rounded to half precision in a file that is resumed from")


class SaveWholeModule(Rule, fix="save model.state_dict()"):
    """The module object itself is saved.

    The file needs pickle and today's classes to load; `torch.load` refuses it by default.

    bad -, good +:
          model = Net()
          model.train()
        - torch.save(model, "model.pt")
        + torch.save(model.state_dict(), "model.pt")
    """

    def check(self, file: Checked) -> Hits:
        for call in file.calls_of("torch.save"):
            saved = call.args[0] if len(call.args) > 1 else None
            if isinstance(saved, ast.Attribute) and saved.attr == "module":
                saved = saved.value
            if not isinstance(saved, ast.Name | ast.Attribute):
                continue
            text = re.escape(file.segment(saved))
            used = re.search(rf"\b{text}(\.module)?\.(train|eval|parameters|named_parameters|zero_grad)\(", file.text)
            values = [value for _, value in file.values(saved)]
            if used and not any(isinstance(one, ast.Dict) or "state_dict" in file.segment(one) for one in values):
                yield hit(call, "the module object is pickled; torch.load refuses it by default")
