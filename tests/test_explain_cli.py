"""The verb `evener explain`: what it takes, what it prints, its JSON contract, its exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from evener.cli import main
from evener.cli.explain import explain_run, text_of
from evener.errors import LaunchError
from evener.explain import explain_text
from evener.explain.kinds import all_kinds
from evener.launch.failure import as_error, find_cause
from evener.launch.records import Line, Raised, RankEnd

OOM = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 158.00 MiB. GPU 1 has a total capacity of 23.69 "
    "GiB of which 115.69 MiB is free. Of the allocated memory 22.14 GiB is allocated by PyTorch, and 910.35 MiB is reserved "
    "by PyTorch but unallocated.\n[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:21404\n"
)


@pytest.fixture
def log(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    path = tmp_path / "train.log"
    path.write_text(f"step 1\n{OOM}")
    return str(path)


def test_the_answer_has_its_order(log, capsys):
    assert main(["explain", log]) == 0
    out = capsys.readouterr().out
    heads = [
        "Rank 1: ",
        "oom-capacity",
        "Culprit",
        "Evidence",
        "Cause",
        "It could also be",
        "Fix",
        "To confirm",
        "Do not",
        "Only consequences",
    ]
    places = [out.index(head) for head in heads]
    assert places == sorted(places)
    assert "  2: [rank1]: torch.OutOfMemoryError" in out and "22.14 GiB of 23.69 GiB (93 %)" in out


def test_the_json_is_the_contract(log, capsys):
    assert main(["explain", "--json", log]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert list(answer) == (
        [
            "kind",
            "sub_cause",
            "culprit_rank",
            "culprit_known",
            "culprit",
            "confidence",
            "summary",
            "evidence",
            "cause",
            "fix",
            "confirm",
            "avoid",
            "consequences",
            "alternatives",
        ]
    )
    assert answer["kind"] == "oom-capacity" and answer["culprit_rank"] == 1 and answer["culprit_known"] is True
    assert answer["confidence"] in ("high", "medium", "low") and isinstance(answer["cause"], str)
    assert answer["evidence"][0].keys() == {"line", "source", "text"} and answer["evidence"][0]["line"] == 2
    for key in ("fix", "confirm", "avoid", "consequences", "alternatives"):
        assert all(isinstance(one, str) and one for one in answer[key])


def test_nothing_found_is_said_and_has_an_exit_code(tmp_path, capsys):
    (tmp_path / "ok.log").write_text("step 1\nstep 2\n")
    assert main(["explain", "--lang", "en", str(tmp_path / "ok.log")]) == 1
    assert capsys.readouterr().out.startswith("Nothing in these 2 lines says that something failed.")
    assert main(["explain", "--json", str(tmp_path / "ok.log")]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] is None and answer["culprit_known"] is False and answer["fix"] == []


def test_the_language_is_the_locales_or_the_one_asked_for(log, capsys, monkeypatch):
    main(["explain", "--lang", "zh", log])
    chinese = capsys.readouterr().out
    assert "显存" in chinese and "怎么修" in chinese and "Fix" not in chinese
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    main(["explain", log])
    assert capsys.readouterr().out == chinese


def test_standard_input_several_files_and_folders(log, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(OOM.encode()), isatty=lambda: False))
    assert main(["explain", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["culprit_rank"] == 1
    for rank, text in enumerate(["RuntimeError: Connection closed by peer [10.0.0.1]:9", "KeyError: 'labels'"]):
        (tmp_path / f"rank{rank}.log").write_text(f"Traceback (most recent call last):\n{text}\n")
    assert main(["explain", "--json", str(tmp_path / "rank0.log"), str(tmp_path / "rank1.log")]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["kind"] == "python-exception" and answer["culprit_rank"] == 1
    assert answer["evidence"][0]["source"].endswith("rank1.log")


def test_lists_and_pages(capsys):
    assert main(["explain", "--list", "--lang", "en"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in all_kinds())
    assert main(["explain", "--list", "--json"]) == 0
    assert {one["kind"] for one in json.loads(capsys.readouterr().out)} == set(all_kinds())
    assert main(["explain", "nccl-timeout", "--lang", "zh"]) == 0
    assert "集合通信" in capsys.readouterr().out
    assert main(["explain", "nccl-timeout", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "nccl-timeout"


def test_a_lint_rule_has_its_page_under_the_same_verb(capsys):
    lint = pytest.importorskip("evener.lint")
    from evener.lint import rules

    name = rules.ALL[0].id
    assert main(["explain", name]) == 0
    assert capsys.readouterr().out.startswith(lint.page(name)[:20])
    assert main(["explain", name, "--lang", "zh"]) == 0
    assert capsys.readouterr().out.rstrip() == lint.page(name, "zh").rstrip() != lint.page(name).rstrip()


@pytest.mark.parametrize(
    "words, said",
    [
        (["oom-capcity"], ["oom-capcity is no file, and no kind of failure.", "fix: evener explain oom-capacity"]),
        (["clip-before-unscal"], ["fix: evener explain clip-before-unscale"]),
        (["none.log"], ["none.log is no file", "evener explain --list"]),
        (["--lang", "fr", "x"], ["--lang", "evener explain --help"]),
        (["--jsno"], ["--jsno", "evener explain --help"]),
    ],
)
def test_a_mistake_is_one_message(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["explain", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and all(one in captured.err for one in said), captured.err


def test_without_a_log_it_asks_which(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(), isatty=lambda: True))
    assert main(["explain"]) == 2
    assert "which log?" in capsys.readouterr().err


def test_colours_are_for_terminals(monkeypatch):
    answer = explain_text(OOM)
    terminal = SimpleNamespace(isatty=lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in text_of(answer, terminal) and "\x1b[" not in text_of(answer, io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" not in text_of(answer, terminal)


def test_a_closed_pipe_is_no_error():
    command = f"{sys.executable} -m evener explain --list | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stderr == "" and done.stdout.strip() == "amp"


# --- the end of `evener run` ----------------------------------------------------------------------------------------


def record(folder: Path, rank: int, *errors: tuple[str, str], how: str = "exception", when: int = 1) -> None:
    told = [
        {"type": kind, "module": "evener.errors" if kind == "CollectiveError" else "builtins", "message": text, "where": None,
         "traceback": f"Traceback (most recent call last):\n{kind}: {text}\n"}
        for kind, text in errors
    ]  # fmt: skip
    ended = {"how": how, "code": 1, "time": 1.0, "monotonic_ns": when, "errors": told}
    (folder / f"rank{rank}.json").write_text(
        json.dumps({"rank": rank, "pid": 40 + rank, "started": 1.0, "ended": ended})
    )
    (folder / f"rank{rank}.log").write_text("step 1\n")


def said(folder: Path, cause: str) -> str:
    error = LaunchError(cause, evidence=["at train.py:9", f"logs: {folder}/rank0.log"])
    return explain_run(error, str(folder), 1e12, None)


def test_one_error_of_evener_on_all_ranks_is_told_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    for rank in range(3):
        record(tmp_path, rank, ("CollectiveError", "The ranks disagree about the call."), when=9 - rank)
    text = said(tmp_path, "rank 2 failed: evener.errors.CollectiveError: The ranks disagree about the call.")
    assert (
        text
        == f"all ranks stopped with the same error: The ranks disagree about the call.\n  logs: {tmp_path}/rank0.log"
    )


def test_the_fix_of_an_error_on_all_ranks_is_told_where_rank_0_was_ended_before_it_could(tmp_path, monkeypatch):
    """It has its record, and the launcher's signal came before its traceback: nobody had shown the fix."""
    monkeypatch.setenv("LC_ALL", "C")
    message = "The ranks disagree about the call.\n  fix: make the same call on all ranks"
    for rank in range(2):
        record(tmp_path, rank, ("CollectiveError", message))
    cause = f"rank 1 failed: evener.errors.CollectiveError: {message}"
    whole = f"all ranks stopped with the same error: {message}\n  logs: {tmp_path}/rank0.log"
    assert said(tmp_path, cause) == whole
    (tmp_path / "rank0.log").write_text(f"evener: {message}\n  at train.py:9\n")
    assert said(tmp_path, cause) == whole.replace("\n  fix: make the same call on all ranks", "")


def test_a_mistake_that_every_rank_would_make_is_told_once_and_without_a_rank(tmp_path, monkeypatch):
    """Rank 0 was ended before it had got so far; or it was the first, and has shown it."""
    monkeypatch.setenv("LC_ALL", "C")
    where = Line("/home/me/train.py", 9, "main", "with evener.Run(...)")
    message = "microbatch_size=-4 is not allowed.\n  fix: microbatch_size is None or a whole number from 1"
    mistake = Raised("UsageError", "evener.errors", message, where, f"evener.errors.UsageError: {message}\n")
    ends = [RankEnd(0, code=-15, stopped=True), RankEnd(1, how="exception", code=2, monotonic_ns=1, errors=(mistake,))]
    failure = find_cause(ends)
    text = str(as_error(failure, f"{tmp_path}", "/home/me"))
    assert text.startswith(f"{message}\n  at train.py:9 in main: with evener.Run(...)\n  logs: "), text
    assert "rank " not in text and failure.exit_code == 2
    for rank in range(2):
        (tmp_path / f"rank{rank}.log").write_text(f"evener: {message}\n" * rank)
    assert explain_run(as_error(failure, f"{tmp_path}", "/home/me"), f"{tmp_path}", 1e12, None) == text
    (tmp_path / "rank0.log").write_text(f"evener: {message}\n")
    short = explain_run(as_error(failure, f"{tmp_path}", "/home/me"), f"{tmp_path}", 1e12, None)
    assert short.startswith("microbatch_size=-4 is not allowed.\n  at train.py:9 in main"), short
    # A rank that had got beyond it and waits for others does not make this mistake.
    waits = Line("/env/torch/distributed/distributed_c10d.py", 1, "all_reduce", "")
    other = [RankEnd(0, code=-15, stopped=True, stack=(waits,)), ends[1]]
    assert str(as_error(find_cause(other), "logs", "/home/me")).startswith("rank 1 failed: evener.errors.UsageError: ")


def test_the_records_of_a_bad_row_name_the_row(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    row = "row 137 of the dataset could not be read (epoch 0): KeyError: 137"
    record(tmp_path, 0, ("RuntimeError", "Connection closed by peer [127.0.0.1]:9"), when=2)
    record(tmp_path, 1, ("evener.errors.DataError", f"{row}\n  fix: dataset[137] shows it"), ("KeyError", "137"))
    for shown in ("step 1\n", f"evener: {row}\n  at /home/me/port.py:29\n  fix: dataset[137] shows it\n"):
        (tmp_path / "rank1.log").write_text(shown)
        assert main(["explain", str(tmp_path)]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"Rank 1: {row}\nevener-error") and "- dataset[137] shows it" in out


def test_the_directory_of_a_run_leads_to_the_logs_of_its_newest_job(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    mine, logs = tmp_path / "mine", tmp_path / "runs" / "logs" / "job-2"
    mine.mkdir()
    logs.mkdir(parents=True)
    starts = [{"kind": "start", "job": f"job-{n}", "attempt": 0, "cwd": str(tmp_path), "rank": 0} for n in (1, 2)]
    (mine / "events.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in starts))
    hang = "evener: rank 1 hangs: nothing was done for 8 s\n  rank 1 is in the script, at train.py:9 in main: wait()\n"
    (logs / "hang.log").write_text(f"{hang}  rank 0 waits in the script, at train.py:12 in main: loss.backward()\n")
    assert main(["explain", str(mine)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Rank 1: no progress for 8 s, at train.py:9\nhang") and "Look at train.py:9" in out


def test_a_known_kind_follows_the_launchers_word(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    record(tmp_path, 0, ("RuntimeError", "Connection closed by peer [127.0.0.1]:9"), when=1)
    record(tmp_path, 1, ("RuntimeError", "Attempting to unscale FP16 gradients."), when=2)
    text = said(tmp_path, "rank 1 failed: RuntimeError: Attempting to unscale FP16 gradients.").splitlines()
    assert text[:2] == ["rank 1 failed: RuntimeError: Attempting to unscale FP16 gradients.", "  at train.py:9"]
    assert text[3].startswith("  amp-unscale-fp16: Rank 1: the trainable weights are fp16")
    assert any(line.startswith("  Fix: ") for line in text) and any(line.startswith("  Do not: ") for line in text)
    assert text[-2] == f"  logs: {tmp_path}/rank0.log" and text[-1].startswith("  evener explain ")


def test_a_victim_that_the_launcher_has_taken_gives_way(tmp_path, monkeypatch):
    monkeypatch.setenv("LC_ALL", "C")
    record(tmp_path, 0, ("RuntimeError", "Connection closed by peer [127.0.0.1]:9"))
    (tmp_path / "rank1.json").write_text('{"rank": 1, "pid": 41, "started": 1.0}')
    (tmp_path / "rank1.log").write_text("step 1\n")
    text = said(tmp_path, "rank 0 failed: RuntimeError: Connection closed by peer [127.0.0.1]:9")
    assert text.startswith("Rank 1: it left in the middle of the script, without an exception")


def test_an_exception_of_the_script_stays_the_launchers_word(tmp_path):
    record(tmp_path, 0, ("KeyError", "'labels'"))
    error = "rank 0 failed: KeyError: 'labels'\n  at train.py:9"
    text = said(tmp_path, "rank 0 failed: KeyError: 'labels'")
    assert text.startswith(error) and re.search(r"\n  evener explain \S+$", text), text
    assert (
        said(tmp_path / "nowhere", "rank 0 failed")
        == f"rank 0 failed\n  at train.py:9\n  logs: {tmp_path}/nowhere/rank0.log"
    )


# --- uncaught in a script with Run ----------------------------------------------------------------------------------

SCRIPT = """
import torch, evener
model = torch.nn.Linear(2, 2)
rows = torch.utils.data.TensorDataset(torch.randn(8, 2))
def loss_fn(model, batch):
    return {loss}
run = evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, rows, global_batch_size=4, precision="fp32")
for update in run.updates(updates=1):
    pass
"""


@pytest.mark.parametrize(
    "loss, there, absent",
    [
        (
            "model(batch[0].double()).mean()",
            ["evener: dtype-mismatch: ", "fix: ", "more: evener explain dtype-mismatch"],
            [],
        ),
        pytest.param("{}['labels']", ["KeyError: 'labels'"], ["evener: "], marks=pytest.mark.full),
    ],
)
def test_an_uncaught_exception_of_a_known_kind_is_explained_below_its_traceback(tmp_path, loss, there, absent):
    (tmp_path / "train.py").write_text(SCRIPT.replace("{loss}", loss))
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("Traceback"), done.stderr
    assert all(one in done.stderr for one in there) and not any(one in done.stderr for one in absent), done.stderr


def test_a_job_whose_ends_nobody_recorded_did_not_leave(tmp_path, capsys):
    """It may be running: a hang was looked at while its processes lived, and was told to grep for exit()."""
    for rank in (0, 1):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps({"rank": rank, "pid": 400 + rank, "started": 1.0}))
        (tmp_path / f"rank{rank}.log").write_text("epoch 0 loss 2.1\n")
    assert main(["explain", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert "left in the middle" not in text
