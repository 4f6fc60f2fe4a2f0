"""`evener run`: the command line of the launch room."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import sys
import tomllib
from typing import TYPE_CHECKING, Any

from evener.cli.parser import Parser
from evener.errors import EXIT_STOPPED, LaunchError, UsageError, nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from evener.gpus.leases import Lease
    from evener.gpus.pick import Wish
    from evener.launch.command import Launch, Request
    from evener.launch.layout import Layout, Round
    from evener.launch.machine import Gpus
    from evener.launch.supervise import Ending


def parser() -> Parser:
    with open(os.path.join(os.path.dirname(__file__), "run.toml"), "rb") as file:
        texts = tomllib.load(file)
    options = Parser(
        prog="evener run",
        usage="evener run [options] SCRIPT [ARGS ...]\n       evener run [options] -m MODULE [ARGS ...]",
        description=texts["description"],
        epilog=texts["examples"],
    )
    add = options.add_argument
    for name, (value, text) in texts["value"].items():
        add(name, metavar=value, help=text, dest="module" if name == "-m" else None)
    for name, (value, default, text) in texts["default"].items():
        add(name, metavar=value, default=default, help=text)
    for name, text in texts["switch"].items():
        add(name, action="store_true", help=text)
    text = "wait for the GPUs; --wait=90, --wait=10min: so long at most"
    add("--wait", metavar="TIME", nargs="?", const="", help=text)
    text = "which ranks to show here; all of them have log files (default: rank0)"
    add("--tee", choices=("rank0", "all", "none"), default="rank0", help=text)
    text = "a keyword of evener.Run, above the script's own; VALUE is JSON or a plain word; repeatable"
    add("--set", metavar="KEY=VALUE", action="append", default=[], help=text)
    text = "slow, and says where a fault is: NaN traced, collectives compared; --debug=single: on one process first"
    add("--debug", nargs="?", const="all", choices=("all", "single"), help=text)
    return options


def main(argv: list[str]) -> int:
    options = parser()
    own, target = split(argv, options)
    given = options.parse_args(own)
    request = to_request(given, target)

    import secrets
    import time

    from evener.launch import batch, command, detach, layout, machine

    if given.gpus and request.cpu:
        raise UsageError(f"--cpu hides the GPUs, and --gpus {given.gpus} asks for some.", fix=["leave one of them out"])
    if not re.fullmatch(r"\d{1,6}", given.restarts):
        raise UsageError(f"--restarts {given.restarts} is not a number.", fix=["--restarts 5"])
    if given.sbatch or given.trainjob is not None:
        print(batch.text(given, own, target), end="")
        return 0
    hosts = layout.read(os.environ, given.nodes, given.head, given.node_rank)
    if hosts is not None:
        if hosts.task is not None and request.nproc not in (None, 1):
            fix = ["leave --nproc out", "or srun --ntasks-per-node=1 evener run SCRIPT"]
            what = f"started one task for every rank, and --nproc {request.nproc} asks for more in each"
            raise UsageError(f"{hosts.source} {what}.", fix=fix)
        if given.debug == "single":
            fix = ["--debug, or --debug=single --nodes 1 on one of them"]
            raise UsageError("--debug=single is for one host.", fix=fix)
        request = dataclasses.replace(request, nproc=request.nproc or hosts.nproc)
    if given.requeue:
        batch.check_requeue(os.environ)
    if os.name != "posix" and not given.dry_run:
        fix = ["run one process with `python script.py`"]
        raise LaunchError("`evener run` starts processes on Linux and macOS only.", fix=fix)
    run_id = command.name_run(request.script, time.strftime("%Y%m%d-%H%M%S"), secrets.token_hex(2))
    if given.detach and not given.dry_run:
        detach.leave(os.path.join(request.logs, f"{run_id}.out"))
    environ = layout.environ_of(hosts, os.environ)
    gpus, lease = (machine.Gpus(()), None) if request.cpu else take_gpus(given, request.nproc, environ)
    here = machine.look(gpus)
    nproc = command.processes(request, here)[0]
    if given.plan is None and given.module is None and hosts is None:
        planned, note = kept_plan(given, target, gpus, nproc)
        request = dataclasses.replace(request, **planned)
        tell(note)

    def launch_of(attempt: int, round: Round | None = None, request: Request = request, run_id: str = run_id) -> Launch:
        return command.decide(request, here, environ, run_id=run_id, cwd=os.getcwd(), attempt=attempt, round=round)

    if given.dry_run:
        show(launch_of(0, None if hosts is None else layout.sketch(hosts, nproc, run_id)), hosts)
        return 0
    with contextlib.closing(lease) if lease is not None else contextlib.nullcontext():
        if hosts is not None:
            code = together(hosts, request, nproc, launch_of, run_id, given)
        else:
            if given.debug == "single" and nproc > 1:
                one = launch_of(0, None, dataclasses.replace(request, nproc=1), f"{run_id}-single")
                ending = told(one)[0]
                if ending.exit_code != 0:
                    tell("it fails on one process already: the others add nothing")
                    return ending.exit_code
                tell(f"one process ran to its end; now {nproc}")
            code = carry_out(launch_of, given)
    if given.requeue and code == EXIT_STOPPED and (hosts is None or not hosts.rank):
        batch.requeue(os.environ)
    return code


def tell(text: str) -> None:
    if text:
        print(f"evener: {text}", file=sys.stderr)


def show(launch: Launch, hosts: Layout | None) -> None:
    """What `--dry-run` prints."""
    from evener.plan.handed import VARIABLE

    print(*(f"# {note}" for note in launch.notes), sep="\n")
    if hosts is not None:
        many = hosts.most if hosts.least == hosts.most else f"{hosts.least} to {hosts.most}"
        print(f"# {hosts.source}: {many} members meet at {hosts.head}:{hosts.port}, and agree on ranks there")
    print(f"# logs: {launch.logs}")
    print(f"# {VARIABLE} holds: {launch.plan.to_json()}")
    print(launch.command)


def carry_out(launch_of: Callable[[int], Launch], given: argparse.Namespace) -> int:
    """Until it has ended well, or was stopped, or has failed too often. Returns the exit code."""
    import time

    from evener.launch.restart import Attempt, seconds_to_wait, why_again

    attempts: list[Attempt] = []
    restarts, longest = int(given.restarts), to_seconds(given, "restart_wait", 0.1)
    while True:
        ending, seconds = told(launch_of(len(attempts)))
        attempts.append(Attempt(ending, seconds))
        wait = seconds_to_wait(attempts, restarts, longest)
        if not isinstance(wait, float):
            tell(wait or "")
            return ending.exit_code
        tell(f"{why_again(attempts, restarts)} in {wait:.0f} s")
        time.sleep(wait)


def told(launch: Launch) -> tuple[Ending, float]:
    """One attempt on this host alone, its end explained."""
    ending, seconds = one_attempt(launch)
    tell(ending.text)
    return ending, seconds


def one_attempt(launch: Launch, others: Callable[[], str | None] = lambda: None) -> tuple[Ending, float]:
    """How it ended, with what is said about it, and how many seconds it took."""
    import time

    from evener.cli.explain import explain_run
    from evener.explain.host import oom_kills
    from evener.launch.supervise import supervise

    kills, started = oom_kills(), time.monotonic()
    ending = supervise(launch, os.environ, others)
    seconds = time.monotonic() - started
    text = "" if ending.error is None else explain_run(ending.error, launch.logs, started, kills)
    return dataclasses.replace(ending, text=text), seconds


def together(
    hosts: Layout,
    request: Request,
    nproc: int,
    launch_of: Callable[..., Launch],
    run_id: str,
    given: argparse.Namespace,
) -> int:
    """The same on several hosts: they meet, start, and end together. Returns the exit code, the same on all of them."""
    from evener.launch.head import join

    times = to_seconds(given, "join_timeout"), int(given.restarts), to_seconds(given, "restart_wait", 0.1)
    module = ["-m"] if request.module else []
    what = " ".join([*module, request.script, *request.args, *map(repr, sorted(given.set))])
    job, attempt = None, 0
    with join(hosts, run_id, nproc, what, *times) as tie:
        while True:
            round = tie.gather(job, attempt)
            launch = launch_of(round.attempt, round, run_id=round.job)
            verdict = tie.ended(one_attempt(launch, tie.tick)[0])
            if verdict.text:
                own = verdict.host == round.name
                tell(verdict.text if own else f"{verdict.host}: {verdict.text}\n  logs of this host: {launch.logs}")
            tell(verdict.why)
            if not verdict.again:
                return verdict.code
            job, attempt = round.job, round.attempt + 1


def split(argv: list[str], options: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """evener's own words, and the script with its arguments.

    By hand, because argparse takes the value of a misspelt option for the script, and options of the script for ours.
    """
    takes_value = {
        name: action.nargs is None and not isinstance(action, argparse._HelpAction | argparse._StoreTrueAction)
        for action in options._actions
        for name in action.option_strings
    }
    i = 0
    while i < len(argv):
        word = argv[i]
        if word == "--":
            return argv[:i], argv[i + 1 :]
        if not word.startswith("-") or word == "-":
            return argv[:i], argv[i:]
        name, equals, _ = word.partition("=")
        if name not in takes_value:
            close = nearest(name, takes_value)
            keyword = name[2:].replace("-", "_")
            if "--set" in takes_value and keyword in keywords_of_run():
                close = f"--set {keyword}={'VALUE' if equals else 'true'}"
            fix = [*([close] if close else []), f"options of the script go after the script; {options.prog} --help"]
            raise UsageError(f"{name} is not an option of `{options.prog}`.", fix=fix)
        i += 1 if equals or not takes_value[name] else 2
        if name == "-m":  # what follows the module belongs to it
            return argv[:i], argv[i:]
    return argv, []


def keywords_of_run() -> frozenset[str]:
    """What people write as an option of the launcher, and is a keyword of the script's Run."""
    from evener.config import RunKeywords

    return frozenset(RunKeywords.__annotations__)


def to_request(given: argparse.Namespace, target: list[str]) -> Request:
    from evener.launch.command import Request

    if given.module is not None:
        target = [given.module, *(target[1:] if target[:1] == ["--"] else target)]
    elif target:
        check_script(target[0])
    else:
        raise UsageError("evener run: which script?", fix=["evener run SCRIPT [ARGS ...], or -m MODULE; --help"])
    nproc = None if given.nproc is None else to_count(given.nproc)
    planned: dict[str, Any] = {}
    if given.plan not in (None, "none"):
        from evener.plan.make import read_plan_file

        ranks, planned = read_plan_file(given.plan)
        if ranks is not None and nproc not in (None, ranks):
            fix = [f"--nproc {ranks}, or leave it out", f"evener plan --nproc {nproc} makes another plan"]
            raise UsageError(f"{given.plan} is a plan for {ranks} processes, not {nproc}.", fix=fix)
        nproc = nproc or ranks
    flags = {"accept_changed_data": True} if given.accept_changed_data else {}
    planned |= {"overrides": planned.get("overrides", {}) | dict(map(to_override, given.set)) | flags}
    planned |= {"hang_after": None if given.hang_after is None else to_seconds(given, "hang_after", 1.0)}
    asked = {"cpu": given.cpu, "bind": not given.no_numa, "debug": given.debug is not None}
    asked |= {"logs": given.log_dir, "tee": given.tee, "module": given.module is not None}
    return Request(target[0], tuple(target[1:]), nproc=nproc, **asked, **planned)


def kept_plan(given: argparse.Namespace, target: list[str], gpus: Gpus, nproc: int) -> tuple[dict[str, Any], str]:
    """What `evener plan` has found for this script on these devices before, and what to say about it."""
    from evener import facts
    from evener.plan import kept

    kind = "cpu" if gpus.words == () else gpus.kinds[0] if len(gpus.kinds) == 1 else None
    if kind is None or not kept.folder().is_dir():
        return {}, ""
    known = facts.find(kind) if kind != "cpu" else None
    planned, note = kept.find(kept.place(target, given.set, known.name if known else kind, nproc), target[0])
    planned.pop("overrides", None)  # the same words are on this command line
    return planned, note


def take_gpus(given: argparse.Namespace, nproc: int | None, environ: Mapping[str, str]) -> tuple[Gpus, Lease | None]:
    """The GPUs of this launch, leased unless it is a dry run or a scheduler granted them."""
    from evener.gpus import Gpu, leases, look, pick, visible
    from evener.launch.machine import Gpus

    wish = to_wish(given, nproc)
    # In here an index is what nvidia-smi shows, and the ranks get the same order.
    environ = {visible.ORDER: "PCI_BUS_ID", **environ}
    folder = leases.Folder(given.lock_folder or leases.default_path())
    snapshot = look.look(environ, holder_of=folder.holder)
    if given.gpus is None:
        hidden = environ.get(visible.VARIABLE, "unset").strip() in ("", "-1")
        trouble = snapshot.trouble
        if hidden or (trouble is not None and trouble.kind == "no-gpu"):
            return Gpus(()), None  # there is nothing that could be taken, and nobody asked for it
        if trouble is not None and nproc is not None:
            notes = (f"no GPU is chosen and none is leased: {trouble.cause}",)
            return Gpus(None, trouble.cause, notes=notes), None
    pick.refuse_trouble(snapshot)
    if given.dry_run:
        picked = pick.choose(wish, pick.universe(snapshot, environ))
    else:
        picked = pick.pick(wish, environ, lock_folder=folder.path, say=pick.say_on_stderr)
    kinds = tuple(dict.fromkeys(gpu.name or "no name" for gpu in picked.gpus))
    names = ", ".join(str(gpu.index) if isinstance(gpu, Gpu) else str(gpu.uuid) for gpu in picked.gpus)
    nodes = tuple(gpu.numa_node if isinstance(gpu, Gpu) else None for gpu in picked.gpus)
    held = picked.lease.descriptors if picked.lease is not None else ()
    return Gpus(picked.uuids, "", f"GPU {names} ({', '.join(kinds)})", kinds, nodes, held, picked.notes), picked.lease


def to_wish(given: argparse.Namespace, nproc: int | None) -> Wish:
    from evener.gpus import pick

    wish, wait = pick.parse(given.gpus or "auto"), given.wait
    return dataclasses.replace(
        wish,
        count=nproc if wish.count is None and not wish.words and nproc and nproc > 0 else wish.count,
        min_free_bytes=pick.parse_size(given.min_free, "--min-free") if given.min_free else 0,
        model=given.model,
        share=given.share,
        lease=not given.no_lease,
        wait_seconds=None if wait is None else pick.parse_seconds(wait, "--wait") if wait else float("inf"),
    )


def to_count(word: str) -> int:
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    auto = "leave --nproc out: one process per GPU is the default"
    fixes = {"gpu": auto, "auto": auto, "cpu": "--cpu --nproc N: N processes on the CPU"}
    fix = fixes.get(word, "--nproc N, a whole number of processes")
    raise UsageError(f"--nproc {word} is not a number.", fix=[fix])


def to_seconds(given: argparse.Namespace, name: str, least: float = 0.0) -> float:
    from evener.gpus.pick import parse_seconds

    option, word = f"--{name.replace('_', '-')}", getattr(given, name)
    seconds = parse_seconds(word, option)
    if seconds < least:
        raise UsageError(f"{option} {word}: at least {least:g} s.", fix=[f"{option} 10min"])
    return seconds


def to_override(word: str) -> tuple[str, Any]:
    """A keyword that Run does not have is one error here, instead of one per rank after torch was imported."""
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        raise UsageError(f"--set {word}: not KEY=VALUE.", fix=["--set microbatch_size=8"])
    known = keywords_of_run()
    if key not in known:
        close = nearest(key, known)
        fix = [f"--set {close}={text} is the closest"] * (close is not None) + ["docs/keywords.md has all of them"]
        raise UsageError(f"--set {word}: evener.Run has no keyword {key!r}.", fix=fix)
    try:
        return key, json.loads(text)
    except ValueError:
        return key, text


def check_script(path: str) -> None:
    """The script is a file; otherwise one error here instead of one per rank."""
    if os.path.isfile(path):
        return
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder.", fix=["give the script in it, or a package with -m"])
    folder, name = os.path.split(path)
    if folder and not os.path.isdir(folder):
        raise UsageError(f"There is no script {path}.", evidence=[f"there is no folder {folder} either"])
    scripts = sorted(one.removesuffix(".py") for one in os.listdir(folder or ".") if one.endswith(".py"))
    close = nearest(name.removesuffix(".py"), scripts)  # the ending alone makes any two scripts alike
    fix = [f"evener run {os.path.join(folder, close)}.py"] if close else []
    if re.fullmatch(r"\d+\w*", path):
        fix.append(f"--wait={path} is written with an equals sign, if it is a time")
    if re.fullmatch(r"\w+(\.\w+)+", path) and not path.endswith(".py"):
        fix.append(f"evener run -m {path}, if it is a module")
    shown = ", ".join([*(f"{one}.py" for one in scripts[:8]), *["..."] * (len(scripts) > 8)]) or "no .py file"
    raise UsageError(f"There is no script {path}.", fix=fix or [f"in that folder: {shown}"])
