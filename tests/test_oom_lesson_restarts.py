"""Out of memory where no rank recovers alone: a lesson in the run directory, all ranks end, and `evener run` goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

import evener
import evener.config
from evener.errors import EXIT_LESSON, EXIT_MEMORY, LaunchError, MemoryLimitError
from evener.launch.restart import Attempt, seconds_to_wait
from evener.launch.supervise import Ending
from evener.run.lesson import lesson_of
from tests.models import make, mlp_rows, row_loss

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
UPDATES = 6
# From update 3 on the last rank cannot hold more than three rows at once.
TRAIN = """
import os, sys
sys.path.insert(0, {root!r})
import torch, evener
from tests.test_oom_lesson_restarts import train
train("runs/here", {how!r})
"""


def train(dir, how, **keywords):
    model = make("mlp")
    state = {"number": 0}
    strategy = {"fsdp": "fsdp"}.get(how, "auto")

    def loss_fn(model, batch):
        last = evener.rank() == evener.world_size() - 1
        if how in ("ddp", "fsdp") and last and state["number"] >= 3 and len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")
        return row_loss(model, batch)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with evener.Run(
        model, optimizer, loss_fn, mlp_rows(48), global_batch_size=12, precision="fp32", save_every=2, dir=dir,
        strategy=strategy, **keywords,
    ) as run:  # fmt: skip
        for update in run.updates(updates=UPDATES):
            state["number"] = update.number + 1
            if how == "optimizer" and update.number == 2 and run.config.microbatch_size is None:
                run.optimizer.register_step_pre_hook(no_memory)
        run.export("weights.safetensors" if how else f"{dir}.safetensors")
    return run


def no_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB (injected)")


def check(tmp_path, how, nproc, lesson):
    train(str(tmp_path / "calm"), "")
    (tmp_path / "train.py").write_text(TRAIN.format(root=ROOT, how=how))
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", str(nproc), "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=900, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    here = tmp_path / "runs" / "here"
    assert json.loads((here / "lesson.json").read_text())["microbatch_size"] == lesson, said
    assert "Out of memory in the" in said and "start with the lesson in 1 s" in said, said
    assert f"microbatch_size={lesson}, as learnt from running out of memory" in said, said
    config = json.loads((here / "config.json").read_text())
    assert config["microbatch_size"] == {"value": lesson, "origin": "lesson"}
    events = [json.loads(line) for line in (here / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events if event["kind"] in ("resume", "finish")] == ["resume", "finish"]
    got, want = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "calm.safetensors")
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=2e-6, msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="evener run")
def test_a_proven_optimizer(tmp_path):
    check(tmp_path, "optimizer", 1, 6)


def test_a_lesson_is_no_restart_of_the_users():
    def ended(code):
        return Attempt(Ending(code, LaunchError("rank 1 failed")), 5.0)

    assert seconds_to_wait([ended(EXIT_LESSON)], 0) == 1.0
    assert seconds_to_wait([ended(EXIT_LESSON), ended(1)], 1) == 1.0
    assert seconds_to_wait([ended(EXIT_LESSON), ended(1), ended(EXIT_LESSON)], 0) == 1.0
    assert "out of memory 13 times" in str(seconds_to_wait([ended(EXIT_LESSON)] * 13, 5))
    assert seconds_to_wait([Attempt(Ending(EXIT_LESSON, stopped=True), 5.0)], 3) is None
    assert seconds_to_wait([ended(EXIT_MEMORY)], 0) is None


def test_the_lesson_is_of_the_newest_unfinished_run_of_that_name(tmp_path):
    def config(**keywords):
        return evener.config.Config.merge({"global_batch_size": 64, "dir": tmp_path / "run", **keywords})

    assert lesson_of(config()) == ({}, [])
    for name, size in (("run", 8), ("run-2", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lesson.json").write_text(json.dumps({"microbatch_size": size}))
    learnt, (line,) = lesson_of(config())
    assert learnt == {"microbatch_size": 4} and "run-2" in line and "delete it to forget" in line
    assert lesson_of(config(microbatch_size=2)) == ({}, [])  # smaller already
    assert lesson_of(config(resume="never")) == ({}, [])
    (tmp_path / "run-2" / "lesson.json").write_text("torn{")
    assert lesson_of(config()) == ({}, [])
    (tmp_path / "run-2" / "lesson.json").write_text('{"microbatch_size": 4}')
    (tmp_path / "run-2" / "finished").write_text("")
    assert lesson_of(config()) == ({}, [])


def test_resume_never_makes_it_the_end(tmp_path):
    with pytest.raises(MemoryLimitError) as caught:
        train(str(tmp_path / "run"), "optimizer", resume="never")
    assert caught.value.exit_code == EXIT_MEMORY
    assert str(caught.value).startswith(
        "Out of memory in the optimizer's step.\n  CUDA out of memory. Tried to allocate 1"
    )
    assert 'resume="never": a restart would begin anew' in str(caught.value)
    assert not (tmp_path / "run" / "lesson.json").exists()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("how", "nproc", "lesson"), [("ddp", 2, 3), ("fsdp", 2, 3), ("fsdp", 3, 2)])
def test_overlapped_ddp_and_fsdp(tmp_path, how, nproc, lesson):
    check(tmp_path, how, nproc, lesson)


DEAF = """
import os, pathlib, signal, sys, time
sys.path.insert(0, {root!r})
import evener
from evener.errors import LessonError
raised, pulse = pathlib.Path("raised"), pathlib.Path("pulse")
if raised.exists():
    sys.exit()
if evener.rank() == 0:
    while not pulse.exists():
        time.sleep(0.05)
    raised.write_text(str(time.time()))
    raise LessonError("Out of memory in the backward of 8 rows on rank 0.").of(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    pulse.touch()
    time.sleep(0.05)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="evener run")
def test_a_rank_that_hears_nothing_is_ended_in_seconds(tmp_path):
    """torch's agent alone would wait half a minute for it, a collective ten."""
    (tmp_path / "train.py").write_text(DEAF.format(root=ROOT))
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", "2", "train.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0 and "start with the lesson in 1 s" in done.stderr, done.stderr
    lived = (tmp_path / "pulse").stat().st_mtime - float((tmp_path / "raised").read_text())
    print(f"the deaf rank lived {lived:.1f} s longer")
    assert lived < 20  # 5 s are promised on an idle machine; with the agent's patience it is 30
