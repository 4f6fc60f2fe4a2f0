"""Ranks: who does what, where the rank comes from, and how processes find each other."""

from __future__ import annotations

import ast
import re

from evener.lint.events import STEPS
from evener.lint.names import GLOBAL_RANK, ONE_RANK
from evener.lint.rule import Checked, Hits, Rule, hit, replace
from evener.lint.source import keyword, last, literal


class RankGuardedStep(Rule, level="error", fix="let every rank step"):
    """The optimizer, scaler or scheduler steps on one rank only.

    The other replicas keep the old weights; with a sharded optimizer the step hangs.

    bad -, good +:
          model = torch.nn.parallel.DistributedDataParallel(net)
          loss_fn(model(x), y).backward()
        - if torch.distributed.get_rank() == 0:
        -     optimizer.step()
        + optimizer.step()
    """

    def check(self, file: Checked) -> Hits:
        if not file.uses("ddp", "fsdp", "init", "collective"):
            return
        spread = ("broadcast", "broadcast_object_list", "scatter")
        if any(last(file.name(call.func)) in spread for call in file.of(ast.Call)):
            return
        for events in file.events:
            guarded = [(one, file.guard(one.ctx)) for one in events if one.kind in (*STEPS, "schedule")]
            for step, who in guarded:
                if who == "one" and (step.kind, "others") not in [(one.kind, other) for one, other in guarded]:
                    yield hit(step.node, f"{step.how or step.on}.step runs on one rank: replicas drift apart")


class RankGuardedCollective(Rule, level="error", fix="call it on every rank, outside of the rank test"):
    """A collective runs on some ranks only.

    Those ranks wait for the others until the process group times out.

    bad -, good +:
        + torch.distributed.all_reduce(loss)
          if torch.distributed.get_rank() == 0:
        -     torch.distributed.all_reduce(loss)
              print(loss)
    """

    def check(self, file: Checked) -> Hits:
        named = ((call, self._communicates(file, call)) for call in file.of(ast.Call))
        calls = [(call, name, file.guard(call), file.function(call)) for call, name in named if name]
        for call, name, guard, function in calls:
            if not guard or (function and any(isinstance(node, ast.Yield) for node in ast.walk(function))):
                continue  # a context manager such as zero_first: the others meet at its second half
            paired = any(
                other is not call and where is function and who not in ("", guard)
                and (word == name or not word.startswith("."))
                for other, word, who, where in calls
            )  # fmt: skip
            if not paired:
                who = "one rank calls" if guard == "one" else "some ranks call"
                yield hit(call, f"{name.lstrip('.')} communicates, and only {who} it")

    def _communicates(self, file: Checked, call: ast.Call) -> str:
        """The collective's name; for a function of this project that calls one on all ranks, ".name"."""
        dotted = file.name(call.func)
        if file.names.is_collective(call):
            return last(dotted)
        if last(dotted) not in file.project.collectives or dotted.startswith("torch."):
            return ""
        owner = file.at(call).owner
        callee = f"{owner.name}.{last(dotted)}" if owner and dotted == f"self.{last(dotted)}" else dotted
        target = file.project.function(file.path, callee)
        return f".{last(dotted)}" if target and target[1] in file.project.files[target[0]].collectives else ""


class UncalledRankPredicate(Rule, level="error", fix="call it: add ()"):
    """A function is tested instead of its result.

    `if is_main_process:` is always true: every rank logs and saves.

    bad -, good +:
          def is_main_process():
              return torch.distributed.get_rank() == 0
        - if is_main_process:
        + if is_main_process():
              print("epoch")
    """

    def check(self, file: Checked) -> Hits:
        tests = [one.test for one in file.of(ast.If)] + [loop.test for loop in file.of(ast.While)]
        tests += [choice.test for choice in file.of(ast.IfExp)]
        while tests:
            part = tests.pop(0)
            if isinstance(part, ast.BoolOp):
                tests += part.values
            elif isinstance(part, ast.UnaryOp):
                tests.append(part.operand)
            if not isinstance(part, ast.Name | ast.Attribute):
                continue
            dotted = file.name(part)
            asks = last(dotted) in ("is_initialized", "is_available", "get_rank")
            if not asks and not ONE_RANK.search(last(dotted)):
                continue
            target, function = file.project.function(file.path, dotted), file.function(part)
            hidden = isinstance(part, ast.Name) and (
                file.values(part) or (function is not None and part.id in file.params[function])
            )
            own = target and not hidden and not target[1].endswith("__init__")
            if own or (asks and dotted.startswith("torch.")):
                edit = replace(file, part, f"{file.exact(part)}()")
                yield hit(part, f"{last(dotted)} is a function: the test is always true", edit)


class GlobalRankAsDevice(Rule, level="error", in_tests=False, fix="use the local rank (LOCAL_RANK)"):
    """The global rank is used as a GPU's number.

    Right on one machine; on the second one rank 8 looks for GPU 8.

    bad -, good +:
        - rank = int(os.environ["RANK"])
        + local_rank = int(os.environ["LOCAL_RANK"])
        - torch.cuda.set_device(rank)
        + torch.cuda.set_device(local_rank)
    """

    def check(self, file: Checked) -> Hits:
        for call in file.of(ast.Call):
            dotted = file.name(call.func)
            index: ast.expr | None = None
            if dotted in ("torch.cuda.set_device", "torch.accelerator.set_device_index") and call.args:
                index = call.args[0]
            elif dotted == "torch.device" and len(call.args) == 2:
                index = call.args[1]
            elif "ddp" in file.kinds(call):
                ids = keyword(call, "device_ids", 1)
                index = ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
            if index is not None and self._global(file, index):
                yield hit(call, f"{file.segment(index)} is the global rank: on a second machine there is no such GPU")

    def _global(self, file: Checked, node: ast.expr) -> bool:
        """It surely is the global rank: read from RANK, or from get_rank(). A bare parameter may be a local one."""
        if isinstance(node, ast.Call) and last(file.name(node.func)) == "get_rank":
            return file.name(node.func).startswith("torch.distributed")
        if file.is_rank(node, re.compile(r"^RANK$|^SLURM_PROCID$")):
            return not isinstance(node, ast.BinOp)
        if not isinstance(node, ast.Name) or not GLOBAL_RANK.search(node.id):
            return False
        values = [value for _, value in file.values(node)]
        return bool(values) and all(self._global(file, value) for value in values if value is not node)


class LiteralRank(
    Rule, level="error", in_tests=False, fix="leave them out under torchrun, or read RANK and WORLD_SIZE"
):
    """`init_process_group` gets its rank or world size as a number.

    Every process then claims the same rank: they hang, or fail.

    bad -, good +:
        - torch.distributed.init_process_group("nccl", world_size=4, rank=0)
        + torch.distributed.init_process_group("nccl")
    """

    def check(self, file: Checked) -> Hits:
        for call in file.calls_of("torch.distributed.init_process_group"):
            rank, world = literal(keyword(call, "rank", 4)), literal(keyword(call, "world_size", 3))
            fake = literal(keyword(call, "backend", 0)) == "fake"
            if isinstance(rank, int) and rank >= 0 and world != 1 and not fake:
                yield hit(call, f"every process claims rank {rank}")


class DeviceCountAsWorldSize(
    Rule, in_tests=False, fix="torch.distributed.get_world_size(), or WORLD_SIZE from the environment"
):
    """This machine's GPU count is taken for the world size.

    On two machines the world has twice as many ranks: means and batch shares are wrong.

    bad -, good +:
        - world_size = torch.cuda.device_count()
        - torch.distributed.init_process_group("nccl", world_size=world_size, rank=rank)
        + torch.distributed.init_process_group("nccl")
        + world_size = torch.distributed.get_world_size()
          batch_size = global_batch_size // world_size
    """

    def check(self, file: Checked) -> Hits:
        shared = "the batch is divided by this machine's GPUs, not by the world size"
        size = "this machine's GPU count is used as the world size"
        for call in file.calls_of("torch.cuda.device_count") if file.uses("ddp", "init") else ():
            up = file.parent[call]
            if self._divides(file, up, call):
                yield hit(file.statement(call), shared)
            if not isinstance(up, ast.Assign):
                continue
            target = file.segment(up.targets[0])
            text, word = re.escape(target), last(target)
            if re.search(rf"{text}\s*\*|\*\s*{text}\b", file.text):
                continue  # times the number of machines
            given = re.search(rf"world_size\s*=\s*{text}\b", file.text)
            used = given or re.search(rf"//?\s*{text}\b|reduce_mean\([^)]*{text}\)", file.text)
            unset = word == "world_size" and not re.search(r"WORLD_SIZE|get_world_size", file.text)
            honest = re.search(r"gpu", word, re.I)  # a name that says what it is: wrong is what is done with it
            if unset or (used and re.search(r"world|nproc|size", word, re.I)) or (given and honest):
                yield hit(up, size)
            elif used and honest:
                for div in file.of(ast.BinOp):
                    if file.segment(div.right) == target and self._divides(file, div, div.right):
                        yield hit(file.statement(div), shared)

    def _divides(self, file: Checked, node: ast.AST, by: ast.expr) -> bool:
        """`batch_size // gpus`, in one function with nothing that says it is this machine's batch."""
        return (
            isinstance(node, ast.BinOp)
            and isinstance(node.op, ast.FloorDiv | ast.Div)
            and node.right is by
            and "batch" in file.segment(node.left)
            and not any("multiprocessing_distributed" in test.text for test in file.at(node).tests)
        )


class MasterEnvOverwritten(
    Rule, in_tests=False, fix="os.environ.setdefault(...), or start with torchrun and set nothing"
):
    """MASTER_ADDR or MASTER_PORT is set whatever the launcher said.

    It breaks torchrun, a second job on the machine, and every second machine.

    bad -, good +:
        - os.environ["MASTER_ADDR"] = "localhost"
        + os.environ.setdefault("MASTER_ADDR", "localhost")
        - os.environ["MASTER_PORT"] = "12355"
        + os.environ.setdefault("MASTER_PORT", "12355")
    """

    def check(self, file: Checked) -> Hits:
        alone = r"world_size\s*(==|<=)\s*1\b|debug|single"
        for assign, value, name in file.environment("MASTER_ADDR", "MASTER_PORT"):
            ctx = file.at(assign)
            asked = rf"{name}|is_torchelastic|is_torchrun|TORCHELASTIC"
            asks = (re.search(asked, test.text) or re.search(alone, test.text, re.I) for test in ctx.tests)
            if not isinstance(literal(value), str) or ctx.handlers or any(asks):
                continue
            target = assign.targets[0]
            assert isinstance(target, ast.Subscript)
            text = f"{file.exact(target.value)}.setdefault({file.exact(target.slice)}, {file.exact(value)})"
            yield hit(assign, f"{name} is overwritten, whatever the launcher said", replace(file, assign, text))


class MasterPortInvalid(Rule, level="error", fix="a port between 1024 and 65535"):
    """The port is above 65535.

    `init_process_group` raises a ValueError.

    bad -, good +:
        - os.environ.setdefault("MASTER_PORT", "80000")
        + os.environ.setdefault("MASTER_PORT", "29500")
    """

    def check(self, file: Checked) -> Hits:
        for node in file.of(ast.Constant):
            up, port = file.parent[node], None
            if isinstance(up, ast.Assign) and "MASTER_PORT" in file.segment(up.targets[0]):
                port = node.value
            elif isinstance(up, ast.Call) and last(file.name(up.func)) in ("setdefault", "get", "getenv"):
                if len(up.args) == 2 and up.args[1] is node and literal(up.args[0]) == "MASTER_PORT":
                    port = node.value
            elif isinstance(node.value, str) and (found := re.fullmatch(r"tcp://[\w.\-]+:(\d+)", node.value)):
                port = found[1]
            if isinstance(port, str | int) and str(port).isdigit() and int(port) > 65535:
                yield hit(node, f"{port} is no port")


class SaveUnguarded(Rule, in_tests=False, fix="save on rank 0 only"):
    """Every rank writes the same file.

    They overwrite each other while writing: the file can be torn.

    bad -, good +:
          torch.distributed.init_process_group("nccl")
          model = torch.nn.parallel.DistributedDataParallel(net)
        + if torch.distributed.get_rank() == 0:
        - torch.save(model.module.state_dict(), "model.pt")
        +     torch.save(model.module.state_dict(), "model.pt")
    """

    def check(self, file: Checked) -> Hits:
        if not file.uses("ddp") or file.uses("fsdp", "accelerator"):
            return
        some = re.compile(r"rank|main|master|primary|chief|is_dist|distributed|gpu\b|worker", re.I)
        for call in file.calls_of("torch.save"):
            path, ctx = keyword(call, "f", 1), file.at(call)
            if path is None or file.guard(ctx) or any(some.search(test.text) for test in ctx.tests):
                continue
            function, guards = ctx.function, set[str]()
            while function is not None:
                guards |= file.project.guards(file.path, file.source.qualname(function)) or {"unknown"}
                function = file.source.context[function].function
            if guards <= {""} and not self._per_rank(file, path) and self._distributed(file, call):
                yield hit(call, "all ranks write this file at the same time")

    def _per_rank(self, file: Checked, path: ast.expr) -> bool:
        texts = [file.segment(path)]
        for node in ast.walk(path):
            if isinstance(node, ast.Name | ast.Attribute):
                texts += [file.segment(value) for _, value in file.values(node)]
        return any(re.search(r"rank|BytesIO|buffer|local|proc|uuid|tmp", text, re.I) for text in texts)

    def _distributed(self, file: Checked, call: ast.Call) -> bool:
        """DDP is made in this file, or in one that calls this function."""
        function = file.source.qualname(file.function(call))
        callers = {where for where, _ in file.project.callers.get((file.path, function), [])}
        return any("ddp" in file.project.files[one].uses for one in {file.path, *callers})
