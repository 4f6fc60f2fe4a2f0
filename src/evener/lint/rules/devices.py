"""Devices: which GPUs are visible, what they are called, and what a context manager does."""

from __future__ import annotations

import ast
import re

from evener.lint.rule import Checked, Hits, Rule, hit, replace
from evener.lint.source import keyword, last, literal

QUERIES = {
    "is_available", "device_count", "current_device", "get_device_name", "get_device_properties", "set_device",
    "mem_get_info", "get_device_capability", "init", "empty_cache", "synchronize", "manual_seed_all",
}  # fmt: skip


class CvdAfterCudaQuery(
    Rule, level="error", fix="set it before the first call into torch.cuda, best before the program starts"
):
    """CUDA_VISIBLE_DEVICES is set after CUDA was asked.

    CUDA reads it once, at the first question: setting it later changes nothing.

    bad -, good +:
        + os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
          count = torch.cuda.device_count()
        - os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    """

    def check(self, file: Checked) -> Hits:
        asked = [
            call for call in file.of(ast.Call)
            if (dotted := file.name(call.func)).startswith("torch.cuda.") and last(dotted) in QUERIES
            and not any(isinstance(up, ast.If) and "__name__" in file.segment(up.test) for up in file.above(call))
        ]  # fmt: skip
        for stmt, _, _ in file.environment("CUDA_VISIBLE_DEVICES"):
            here = file.at(stmt)
            known = {(test.text, test.wanted) for test in here.tests}
            for call in asked:
                there = file.at(call)
                same = there.function is here.function or (there.function is None and there.owner is None)
                always = {(test.text, test.wanted) for test in there.tests} <= known and not file.inside(call, stmt)
                tested = any(file.inside(call, test.node) for test in here.tests)
                if same and (always or tested) and call.lineno < stmt.lineno:
                    yield hit(stmt, f"CUDA was asked in line {call.lineno}: this setting is ignored")
                    break


class PhysicalIdsAfterCvd(Rule, fix="count from 0 among the visible GPUs"):
    """Physical GPU numbers are used although CUDA_VISIBLE_DEVICES renumbers.

    With "2,3" visible, they are cuda:0 and cuda:1; number 2 does not exist.

    bad -, good +:
          os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
        - model = torch.nn.DataParallel(net, device_ids=[2, 3])
        + model = torch.nn.DataParallel(net, device_ids=[0, 1])
    """

    def check(self, file: Checked) -> Hits:
        for stmt, value, _ in file.environment("CUDA_VISIBLE_DEVICES"):
            text = re.sub(r"^str\((.*)\)$", r"\1", file.segment(value))
            given = literal(value)
            count = len(given.split(",")) if isinstance(given, str) else None
            for call in file.of(ast.Call):
                ids = keyword(call, "device_ids", 1) if file.kinds(call) & {"dp", "ddp"} else None
                if ids is None and file.name(call.func) == "torch.cuda.set_device" and call.args:
                    ids = call.args[0]
                if ids is None or call.lineno < stmt.lineno:
                    continue
                if count is None:
                    again = rf"\b{re.escape(text)}\b.*split|for \w+ in {re.escape(text)}\b"
                    wrong = "." in text and bool(re.search(again, file.segment(ids)))
                else:
                    listed = ids.elts if isinstance(ids, ast.List | ast.Tuple) else [ids]
                    wrong = any(isinstance(n := literal(one), int) and n >= count for one in listed)
                if wrong:
                    yield hit(call, f"CUDA_VISIBLE_DEVICES (line {stmt.lineno}) renumbers the GPUs from 0")


class DeviceComparedToStr(Rule, level="error", fix="compare device.type"):
    """A torch.device is compared with a string.

    They are never equal: the branch is dead.

    bad -, good +:
          device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        - if device == "cuda":
        + if device.type == "cuda":
              torch.backends.cudnn.benchmark = True
    """

    def check(self, file: Checked) -> Hits:
        for test in file.of(ast.Compare):
            if len(test.ops) != 1 or not isinstance(test.ops[0], ast.Eq | ast.NotEq | ast.In | ast.NotIn):
                continue
            left, right = test.left, test.comparators[0]
            for device, other in ((left, right), (right, left)):
                if not self._strings(other) or not self._device(file, device):
                    continue
                if isinstance(test.ops[0], ast.In | ast.NotIn) and (device is right or isinstance(other, ast.Constant)):
                    continue
                bare = isinstance(other, ast.Constant) and re.fullmatch(r"[a-z]+", str(other.value))
                edits = (replace(file, device, f"{file.exact(device)}.type"),) if bare else ()
                yield hit(test, "a torch.device never equals a string", *edits)

    def _strings(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            return bool(node.elts) and all(isinstance(literal(one), str) for one in node.elts)
        return isinstance(literal(node), str)

    def _device(self, file: Checked, node: ast.expr) -> bool:
        """It surely is one: every value that it is seen to get is one. A parameter may be given a string as well."""
        if isinstance(node, ast.Name | ast.Attribute):
            function = file.function(node)
            if isinstance(node, ast.Name) and function is not None and node.id in file.params[function]:
                return False
            values = [value for _, value in file.now(node)]
            return bool(values) and all(self._device(file, value) for value in values)
        if isinstance(node, ast.IfExp):
            return self._device(file, node.body) and self._device(file, node.orelse)
        return isinstance(node, ast.Call) and file.name(node.func) == "torch.device"


class ContextManagerNotEntered(Rule, level="error", fix="with ...:"):
    """A context manager is made and dropped.

    Without `with` it does nothing.

    bad -, good +:
          model.eval()
        - torch.no_grad()
        + with torch.no_grad():
        - out = model(x)
        +     out = model(x)
    """

    managers = (
        "torch.no_grad", "torch.enable_grad", "torch.inference_mode", "torch.autocast", "torch.amp.autocast",
        "torch.cuda.amp.autocast", "torch.cpu.amp.autocast", "torch.cuda.device", "torch.cuda.stream",
        "torch.accelerator.device_index", "torch.random.fork_rng", "torch.autograd.no_grad",
    )  # fmt: skip

    def check(self, file: Checked) -> Hits:
        for stmt in file.of(ast.Expr):
            call = stmt.value
            if not isinstance(call, ast.Call):
                continue
            dotted = file.name(call.func)
            waits = isinstance(call.func, ast.Attribute) and call.func.attr == "no_sync" and not call.args
            if dotted in self.managers or waits:
                yield hit(call, f"{file.segment(call.func)}() does nothing without `with`")


class NvidiaSmiText(Rule, fix="NVML (nvidia-ml-py), torch.cuda.mem_get_info(), or `evener gpus --json`"):
    """The output of nvidia-smi is parsed as text.

    Its layout changes; its order is not CUDA's; memory alone does not say that a GPU is idle; two users race.

    bad -, good +:
        - free = os.popen("nvidia-smi --query-gpu=memory.free --format=csv").read()
        + free, total = torch.cuda.mem_get_info()
    """

    sure = ("check_output", "Popen")
    run = ("popen", "run", "getoutput", "system", "call", "getstatusoutput")
    modules = ("os.", "subprocess.", "commands.", "sp.")

    def check(self, file: Checked) -> Hits:
        for node in file.of(ast.Constant):
            if not isinstance(node.value, str) or not re.match(r"\s*(\S*/)?nvidia-smi\b", node.value):
                continue
            up = next(up for up in file.above(node) if isinstance(up, ast.Call | ast.stmt))
            dotted = file.name(up.func) if isinstance(up, ast.Call) else ""
            if last(dotted) in self.sure or (last(dotted) in self.run and dotted.startswith(self.modules)):
                yield hit(up, "nvidia-smi's output is read as text")


class OomByMessage(Rule, fix="except torch.OutOfMemoryError (a RuntimeError)"):
    """Out of memory is recognised by the text of its message.

    The text changes; the class does not.

    bad -, good +:
          try:
              train_step(batch)
        + except torch.OutOfMemoryError:
        - except RuntimeError as error:
        -     if "out of memory" not in str(error):
        -         raise
              torch.cuda.empty_cache()
    fixed:
        try:
            train_step(batch)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError):
                raise
            torch.cuda.empty_cache()
    """

    def check(self, file: Checked) -> Hits:
        for test in file.of(ast.Compare):
            text = literal(test.left)
            if not isinstance(text, str) or "out of memory" not in text.lower():
                continue
            if len(test.ops) != 1 or not isinstance(test.ops[0], ast.In | ast.NotIn):
                continue
            handler = next((up for up in file.above(test) if isinstance(up, ast.ExceptHandler)), None)
            name = handler.name if handler else None
            edit = None
            if name and re.search(rf"\b{name}\b", file.segment(test.comparators[0])):
                if file.aliases.get("torch") == "torch":
                    negated = "not " if isinstance(test.ops[0], ast.NotIn) else ""
                    edit = replace(file, test, f"{negated}isinstance({name}, torch.OutOfMemoryError)")
            yield hit(test, "out of memory is recognised by its message", edit)
