"""Ranks: who does what, where the rank comes from, and how processes find each other."""

from __future__ import annotations

import ast
import re

from evener.lint.edits import replace
from evener.lint.events import STEPS
from evener.lint.file import ONE_RANK, File
from evener.lint.rule import Hits, hit, rule
from evener.lint.source import keyword, last, literal, method

_MOVES = ("to", "cuda", "train", "eval", "float", "half")  # DDP(...).cuda() holds what DDP(...) holds
GLOBAL_RANK = re.compile(r"^(global_?rank|world_rank|rank|ddp_rank|distributed_rank|RANK|get_rank|SLURM_PROCID)$")


@rule("error", "let every rank step")
def rank_guarded_step(file: File) -> Hits:
    spread = ("broadcast", "broadcast_object_list", "scatter")
    if not file.uses("ddp", "fsdp", "init", "collective"):
        return
    if any(last(file.name(call.func)) in spread for call in file.of(ast.Call)):
        return
    for events in file.events:
        guarded = [(one, file.guard(one.ctx)) for one in events if one.kind in (*STEPS, "schedule")]
        for step, who in guarded:
            if who == "one" and (step.kind, "others") not in [(one.kind, other) for one, other in guarded]:
                yield hit(step.node, f"{step.how or step.on}.step runs on one rank: replicas drift apart")


@rule("error", "call it on every rank, outside of the rank test")
def rank_guarded_collective(file: File) -> Hits:
    named = ((call, _communicates(file, call)) for call in file.of(ast.Call))
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


def _communicates(file: File, call: ast.Call) -> str:
    """The collective's name; for a function of this project that calls one on all ranks, ".name"."""
    dotted = file.name(call.func)
    if file.is_collective(call):
        return last(dotted)
    if last(dotted) not in file.project.collectives or dotted.startswith("torch."):
        return ""
    target = file.project.function(file.path, file.callee(call))
    return f".{last(dotted)}" if target and target[1] in file.project.files[target[0]].collectives else ""


@rule("error", "call it: add ()")
def uncalled_rank_predicate(file: File) -> Hits:
    tests = [*(one.test for one in file.of(ast.If)), *(one.test for one in file.of(ast.While))]
    tests += [one.test for one in file.of(ast.IfExp)]
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


@rule("error", "use the local rank (LOCAL_RANK)", in_tests=False)
def global_rank_as_device(file: File) -> Hits:
    for call in file.of(ast.Call):
        dotted = file.name(call.func)
        index: ast.expr | None = None
        if dotted in ("torch.cuda.set_device", "torch.accelerator.set_device_index") and call.args:
            index = call.args[0]
        elif dotted == "torch.device" and len(call.args) == 2:
            index = call.args[1]
        elif file.holds(call, "ddp"):
            ids = keyword(call, "device_ids", 1)
            index = ids.elts[0] if isinstance(ids, ast.List) and len(ids.elts) == 1 else None
        if index is not None and _is_global(file, index):
            yield hit(call, f"{file.segment(index)} is the global rank: on a second machine there is no such GPU")


def _is_global(file: File, node: ast.expr) -> bool:
    """It surely is the global rank: read from RANK, or from get_rank(). A bare parameter may be a local one."""
    if isinstance(node, ast.Call) and last(file.name(node.func)) == "get_rank":
        return file.name(node.func).startswith("torch.distributed")
    if file.is_rank(node, re.compile(r"^RANK$|^SLURM_PROCID$")):
        return not isinstance(node, ast.BinOp)
    values = file.values(node) if isinstance(node, ast.Name) and GLOBAL_RANK.search(node.id) else []
    return bool(values) and all(_is_global(file, value) for value in values if value is not node)


@rule("error", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before the first .cuda()', in_tests=False)
def rank_without_device(file: File) -> Hits:
    own = r"""environ.*CUDA_VISIBLE_DEVICES|set_device|cuda:(?!0\b)|cuda\.device\(|device\(["']cuda["'],"""
    own += r"|\.cuda\((?!\)|non_blocking|async)|\.to\(\s*[\w.]*(rank|gpu|local|dev_?id)"
    wraps = [call for call in file.making("ddp") if method(call, *_MOVES) is None]
    given = (one.arg in (None, "device_ids") for call in wraps for one in call.keywords)
    if not wraps or any(given) or any(len(call.args) > 1 for call in wraps) or re.search(own, file.text):
        return
    if file.uses("accelerator", "visible") or not file.uses("init") or file.calls("set_device", "set_device_index"):
        return
    if "gloo" in file.text and "nccl" not in file.text.lower():
        return  # ranks may share a GPU there
    moves = [call for call, _ in file.methods("cuda")]
    named = [*(call for call, _ in file.methods("to")), *file.calls_of("torch.device")]
    moves += [call for call in named if call.args and re.match(r"""["']cuda["']( if |$)""", file.segment(call.args[0]))]
    for move in sorted(moves, key=lambda one: one.lineno)[:1]:
        yield hit(move, "no rank chooses a GPU of its own: all of them use GPU 0")


@rule("error", "leave them out under torchrun, or read RANK and WORLD_SIZE", in_tests=False)
def literal_rank(file: File) -> Hits:
    for call in file.calls_of("torch.distributed.init_process_group"):
        rank, world = literal(keyword(call, "rank", 4)), literal(keyword(call, "world_size", 3))
        fake = literal(keyword(call, "backend", 0)) == "fake"
        if isinstance(rank, int) and rank >= 0 and world != 1 and not fake:
            yield hit(call, f"every process claims rank {rank}")


@rule("warning", "torch.distributed.get_world_size(), or WORLD_SIZE from the environment", in_tests=False)
def device_count_as_world_size(file: File) -> Hits:
    shared = "the batch is divided by this machine's GPUs, not by the world size"
    size = "this machine's GPU count is used as the world size"
    for call in file.calls_of("torch.cuda.device_count") if file.uses("ddp", "init") else ():
        up = file.parent[call]
        if _divides_batch(file, up, call):
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
                if file.segment(div.right) == target and _divides_batch(file, div, div.right):
                    yield hit(file.statement(div), shared)


def _divides_batch(file: File, node: ast.AST, by: ast.expr) -> bool:
    """`batch_size // gpus`, in one function with nothing that says it is this machine's batch."""
    return (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.FloorDiv | ast.Div) and node.right is by
        and "batch" in file.segment(node.left)
        and not any("multiprocessing_distributed" in test.text for test in file.at(node).tests)
    )  # fmt: skip


@rule("warning", "os.environ.setdefault(...), or start with torchrun and set nothing", in_tests=False)
def master_env_overwritten(file: File) -> Hits:
    for assign, target, name in file.environment("MASTER_ADDR", "MASTER_PORT"):
        ctx, alone = file.at(assign), r"(?i:world_size\s*(==|<=)\s*1\b|debug|single)"
        asked = rf"{name}|is_torchelastic|is_torchrun|TORCHELASTIC|{alone}"
        asks = ctx.handlers or any(re.search(asked, test.text) for test in ctx.tests)
        if isinstance(literal(assign.value), str) and not asks:
            text = f"{file.exact(target.value)}.setdefault({file.exact(target.slice)}, {file.exact(assign.value)})"
            yield hit(assign, f"{name} is overwritten, whatever the launcher said", replace(file, assign, text))


@rule("error", "a port between 1024 and 65535")
def master_port_invalid(file: File) -> Hits:
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


@rule("warning", "save on rank 0 only", in_tests=False)
def save_unguarded(file: File) -> Hits:
    if not file.uses("ddp") or file.uses("fsdp", "accelerator"):
        return
    some = re.compile(r"rank|main|master|primary|chief|is_dist|distributed|gpu\b|worker", re.I)
    for call in file.calls_of("torch.save"):
        path, ctx = keyword(call, "f", 1), file.at(call)
        if path is None or file.guard(ctx) or any(some.search(test.text) for test in ctx.tests):
            continue
        function, guards = ctx.function, set[str]()
        while function is not None:
            guards |= file.project.guards(file.path, file.qualname(function)) or {"unknown"}
            function = file.context[function].function
        # DDP is made in this file, or in one that calls this function.
        callers = {where for where, _ in file.project.callers.get((file.path, file.qualname(ctx.function)), [])}
        made = any("ddp" in file.project.files[one].uses for one in {file.path, *callers})
        if made and guards <= {""} and not _per_rank(file, path):
            yield hit(call, "all ranks write this file at the same time")


def _per_rank(file: File, path: ast.expr) -> bool:
    names = [node for node in ast.walk(path) if isinstance(node, ast.Name | ast.Attribute)]
    texts = [file.segment(one) for one in (path, *(value for name in names for value in file.values(name)))]
    return any(re.search(r"rank|BytesIO|buffer|local|proc|uuid|tmp", text, re.I) for text in texts)
