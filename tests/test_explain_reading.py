"""What `explain` reads: any size in bounded memory, any compression and encoding, any launcher's marks, hostile text."""

from __future__ import annotations

import gzip
import io
import json
import random
import subprocess
import sys
import time

import pytest

from evener.errors import UsageError
from evener.explain import explain_selections, explain_text
from evener.explain.folder import read_folder
from evener.explain.lines import parse, printable
from evener.explain.read import KEPT_BYTES, SAME_ALONE, Raw, Selection, read_file, read_stream

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 158.00 MiB. GPU 3 has a total capacity of 23.69 GiB of "
    "which 115.69 MiB is free. Of the allocated memory 22.14 GiB is allocated by PyTorch, and 910.35 MiB is reserved by "
    "PyTorch but unallocated."
)


def progress(lines: int) -> bytes:
    return b"".join(
        b"node-1:%d:4200 [%d] NCCL INFO Channel %d/0 via P2P\nrank %d step %d loss 0.%d\repoch 3 %d%%|###|\n"
        % (4163 + i % 8, i % 8, i % 32, i % 8, i, i % 977, i % 100)
        for i in range(lines)
    )


def read(data: bytes) -> Selection:
    return read_stream(io.BytesIO(data), "log")


@pytest.mark.parametrize("megabytes", [8, pytest.param(1024, marks=pytest.mark.full)])
def test_a_failure_in_the_middle_of_a_large_log_is_found_in_bounded_memory(tmp_path, megabytes):
    block = progress(20_000)
    half = megabytes * (1 << 19) // len(block)
    with open(tmp_path / "big.log", "wb") as file:
        for n in range(2 * half):
            if n == half:
                file.write(b"[rank3]: Traceback (most recent call last):\n[rank3]:     loss.backward()\n")
                file.write(f"[rank3]: {OOM}\n".encode())
            file.write(block)
    program = (
        "import json, re, time; from evener.explain import explain_selections\n"
        "from evener.explain.read import read_file; start = time.process_time()\n"
        f"answer = explain_selections([read_file({str(tmp_path / 'big.log')!r})]).to_json()\n"
        # Not getrusage: that of a child begins with its parent's. The smaller of two peaks: a sandbox may count pages of
        # the file as resident, a loader may reserve addresses that nobody uses.
        "peaks = re.findall(r'Vm(?:HWM|Peak):\\s+(\\d+)', open('/proc/self/status').read())\n"
        "answer['peak_kib'] = min(map(int, peaks))\n"
        "print(json.dumps(answer | {'seconds': time.process_time() - start}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert (answer["kind"], answer["culprit_rank"]) == ("oom-capacity", 3)
    assert answer["evidence"][-1]["line"] == half * block.count(b"\n") + 3, "an editor's line number"
    assert answer["peak_kib"] < 120 << 10
    assert answer["seconds"] < 2 + 0.03 * megabytes, "1 GB in 30 s of one core; about 6 on an idle machine"


def test_a_message_at_every_step_does_not_push_the_others_out():
    noisy = b"".join(b"WARNING step %d: failed=0 mean_error 0.%d\n" % (i, i % 977) for i in range(60_000))
    selection = read(noisy + b"RuntimeError: Attempting to unscale FP16 gradients.\n" + noisy)
    assert explain_selections([selection]).kind == "amp-unscale-fp16"
    assert sum("failed=0" in raw.text for raw in selection.lines) < 4 * SAME_ALONE


def test_memory_stays_bounded_when_every_line_looks_like_an_error(test_seed):
    draw = random.Random(test_seed)
    words = ["".join(draw.choices("abcdefgh", k=6)) for _ in range(999)]
    data = "".join(f"error {' '.join(draw.choices(words, k=12))}\n" for _ in range(150_000)).encode()
    assert sum(len(raw.text) for raw in read(data).lines) <= 2 * KEPT_BYTES + (1 << 20)


@pytest.mark.parametrize("size", [1, 1000, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_every_line_of_interest_has_its_number_wherever_blocks_end(size):
    data = b"x" * size + b"\nok\nValueError: here\nok\n" + progress(40_000) + b"KeyError: 'there'\n"
    kept = {raw.text: raw.number for raw in read(data).lines if "Error" in raw.text}
    assert kept["ValueError: here"] == 3 and kept["KeyError: 'there'"] == 80_005


def test_no_line_is_kept_twice(test_seed):
    draw = random.Random(test_seed)
    lines = [f"{i} {draw.choice(['ok', 'error', 'Traceback', 'step'])} {draw.random()}" for i in range(60_000)]
    kept = [(raw.number, raw.text) for raw in read("\n".join(lines).encode()).lines]
    assert len(kept) == len(set(kept)) and kept == sorted(kept)
    assert all(lines[number - 1] == text for number, text in kept)


def test_compressed_and_foreign_encodings_are_read():
    text = f"step 1\n{OOM}\n"
    for data in (gzip.compress(text.encode()), text.encode("utf-16"), b"\xef\xbb\xbf" + text.encode(), text.encode()):
        assert explain_selections([read(data)]).kind == "oom-capacity"
    whole = gzip.compress(progress(5000) + text.encode() + progress(20_000))
    assert read(whole[: len(whole) // 2]).lines, "a log that is still being written"
    with pytest.raises(UsageError, match="not a whole gzip file"):
        read(gzip.compress(b"abc")[:11])
    assert explain_selections([read(b"\xff\xfeValueError\x00: \x80\xd8")]).kind in (None, "python-exception")


def test_what_cannot_be_read_is_one_clear_error(tmp_path):
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_file(str(tmp_path / "none.log"))
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 5000)
    with pytest.raises(UsageError, match=r"model\.bin is not a text file"):
        read_file(str(tmp_path / "model.bin"))
    with pytest.raises(UsageError, match="has no logs"):
        read_folder(str(tmp_path))
    for empty in (b"", b"\n", b"\r\r\r"):
        assert explain_selections([read(empty)]).kind is None


@pytest.mark.parametrize(
    "line, found",
    [
        ("[rank3]: KeyError: 'x'", {"rank": 3}),
        ("[rank 3] KeyError: 'x'", {"rank": 3}),
        ("3: KeyError: 'x'", {"rank": 3}),
        ("[default3]:KeyError: 'x'", {"local_rank": 3}),
        ("(Worker pid=91) KeyError: 'x'", {"pid": 91}),
        ("(RayTrainWorker pid=91, ip=10.0.0.3) KeyError: 'x'", {"pid": 91, "host": "10.0.0.3"}),
        ("node-1:4163:4200 [2] NCCL WARN Cuda failure", {"pid": 4163, "host": "node-1", "gpu": 2}),
        ("[pod/train-worker-0/pytorch] KeyError: 'x'", {"host": "train-worker-0"}),
        ("trainer_1  | KeyError: 'x'", {"host": "trainer_1"}),
        ("worker-2: KeyError: 'x'", {"host": "worker-2"}),
        ("[rank4]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank 4] Watchdog", {"rank": 4}),
        ("[E ProcessGroupNCCL.cpp:916] [Rank 7] NCCL watchdog thread terminated", {"rank": 7}),
        ("2026-11-29 10:00:00,123 [rank1]: KeyError: 'x'", {"rank": 1}),
        ("\x1b[31m[rank1]:\x1b[0m KeyError: 'x'", {"rank": 1}),
        ("KeyError: 'x'", {}),
        ("RuntimeError: 3: x", {}),
    ],
)
def test_the_marks_of_every_launcher(line, found):
    (one,) = parse([Raw("log", 1, line)])
    names = ("rank", "local_rank", "pid", "host", "gpu")
    assert {name: getattr(one, name) for name in names if getattr(one, name) is not None} == found
    if "KeyError" in line and "RuntimeError" not in line:
        assert one.text == "KeyError: 'x'"


def test_a_rank_is_taken_from_the_file_too(tmp_path):
    for name in ("rank2.log", "worker_2.out"):
        (one,) = parse([Raw(str(tmp_path / name), 1, "KeyError: 'x'")])
        assert one.rank == 2
    (one,) = parse([Raw("logs/none_abc/attempt_0/2/stderr.log", 1, "KeyError: 'x'")])
    assert one.rank == 2


def test_clocks_are_compared_across_files():
    early = "[rank0]:[E1129 10:00:01.5 x.cpp:1] RuntimeError: Attempting to unscale FP16 gradients."
    late = "[rank1]:[E1129 10:00:09.5 x.cpp:1] RuntimeError: No inf checks were recorded for this optimizer."
    for text in (f"{early}\n{late}", f"{late}\n{early}"):
        answer = explain_text(text)
        assert (answer.kind, answer.culprit_rank) == ("amp-unscale-fp16", 0)


def test_ranks_that_write_into_one_file_are_taken_apart():
    traceback = ["Traceback (most recent call last):", '  File "train.py", line 7, in main', "    step()"]
    left = [
        f"[rank0]: {line}"
        for line in [*traceback, "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:9"]
    ]
    right = [f"[rank1]: {line}" for line in [*traceback, "ValueError: bad row 17"]]
    mixed = [line for pair in zip(left, right) for line in pair]
    answer = explain_text("\n".join(mixed))
    assert (answer.kind, answer.culprit_rank) == ("python-exception", 1)
    assert "train.py:7" in answer.summary and "bad row 17" in answer.summary
    assert answer.consequences and "peer-gone" in answer.consequences[0]


def test_two_writers_in_one_line():
    answer = explain_text(f"[rank11]: {OOM}[rank13]: Traceback (most recent call last):")
    assert (answer.kind, answer.culprit_rank) == ("oom-capacity", 11)


HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J\x1b[31mRuntimeError: \x9b31m<script>alert(1)</script>\u202egnp.exe\x00 {rank} {0} %s \\x1b"
)


def test_hostile_text_does_not_reach_the_terminal():
    answer = explain_text(HOSTILE)
    for text in (str(answer), json.dumps(answer.to_json(), ensure_ascii=False)):
        assert not set(text) & {"\x1b", "\x07", "\x9b", "\x00", "\u202e"}
    assert printable("\x1b[1mbold\x1b[0m\tplain") == "bold\tplain"
    assert "<script>alert(1)</script>" in answer.summary, "a terminal is no browser; JSON is JSON"


@pytest.mark.parametrize(
    "text", ["[" * 5000, "(" * 5000, '"' * 5000, "a: " * 5000, 'File "' * 2000, "\\x1b[" * 2000, "1 " * 9000]
)
def test_no_line_takes_long(text):
    start = time.process_time()
    explain_text("\n".join([f"RuntimeError: {text}", text, f"{text} in state_dict: {text}"]))
    assert time.process_time() - start < 3


def test_a_run_directory_is_one_run(tmp_path):
    logs = tmp_path / "attempt_0"
    for rank, text in enumerate(["RuntimeError: Connection closed by peer [10.0.0.1]:9", OOM]):
        (logs / str(rank)).mkdir(parents=True)
        (logs / str(rank) / "stderr.log").write_text(f"Traceback (most recent call last):\n{text}\n")
    event = {
        "t": 1.0,
        "kind": "error",
        "update": 7,
        "rank": 1,
        "type": "OutOfMemoryError",
        "text": "CUDA out of memory.",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + '\n{"torn')
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    answer = explain_selections(read_folder(str(tmp_path)))
    assert (answer.kind, answer.culprit_rank) == ("oom-capacity", 1)
    assert answer.evidence[0][1].endswith("1/stderr.log"), "several files: each line says which"


def test_events_alone_name_the_failure(tmp_path):
    event = {
        "t": 1.0,
        "kind": "error",
        "update": 7,
        "rank": 2,
        "type": "RuntimeError",
        "text": "Attempting to unscale FP16 gradients.",
    }
    (tmp_path / "events.jsonl").write_text(json.dumps(event) + "\n")
    answer = explain_selections(read_folder(str(tmp_path)))
    assert (answer.kind, answer.culprit_rank) == ("amp-unscale-fp16", 2)


def test_a_run_that_stopped_in_good_order_says_how_to_go_on(tmp_path):
    start = {"kind": "start", "update": 0, "rank": 0}
    stop = {"kind": "stop", "update": 54, "rank": 0, "reason": "SIGTERM"}
    path = tmp_path / "events.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (start, stop)))
    answer = explain_selections(read_folder(str(tmp_path)), "en")
    assert answer.kind == "evener-stopped"
    assert answer.summary.lower().startswith(
        "the run stopped after 55 updates (sigterm), with a checkpoint: run the same"
    )
    path.write_text("".join(json.dumps(one) + "\n" for one in (start, stop, start)))  # it went on
    assert explain_selections(read_folder(str(tmp_path)), "en").kind is None
