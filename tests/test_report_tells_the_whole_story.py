"""`evener report`: one page that says what a run was, from whatever its directory holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.cli import main
from evener.report import record as records
from evener.report.events import KINDS, ORDINARY, Events
from evener.report.record import Points, Record
from evener.report.summary import Explained, summary


def write(folder: Path, *events: dict, rank: int | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    name = "events.jsonl" if rank is None else f"events-rank{rank}.jsonl"
    with open(folder / name, "a", encoding="ascii") as file:
        for event in events:
            file.write(json.dumps({"update": None, "rank": 0, **event}) + "\n")
    return folder


def update(number: int, t: float, loss: object = 1.0, **more) -> dict:
    values = {"epoch": 0, "loss": loss, "metrics": {}, "lr": 0.1, "grad_norm": 1.0, "rows_per_second": 100.0}
    return {"t": t, "kind": "update", "update": number, **values, **more}


def start(t: float, **more) -> dict:
    return {"t": t, "kind": "start", "world_size": 2, "versions": {"torch": "2.13.0"}, "device": "cpu", **more}


def told(folder: Path, capsys, *options: str) -> dict:
    assert main(["report", str(folder), "--json", *options]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    return run


def page_of(*folders: Path, capsys) -> str:
    target = folders[0].parent / "page.html"
    assert main(["report", *map(str, folders), "-o", str(target)]) == 0
    capsys.readouterr()
    return target.read_text("utf-8")


def split(**parts: float) -> dict:
    names = ("data_wait", "host_to_device", "forward", "backward", "reduction", "optimizer", "other", "body")
    return dict.fromkeys(names, 0.0) | parts


def phases(t: float, number: int, updates: int, **parts: float) -> dict:
    event = {"t": t, "kind": "phases", "update": number, "updates": updates, "measured_updates": updates}
    return event | {"seconds": sum(parts.values()), "split": split(**parts), "memory_bytes": 100 << 20}


def loss_fn(model, batch):
    x, y = batch
    return F.mse_loss(model(x).squeeze(1), y), {"distance": evener.Mean(total=x.abs().sum(), count=len(x))}


def test_a_real_run_is_told_from_its_contract_to_its_command(tmp_path, capsys):
    if "torch._dynamo.utils" in sys.modules:  # nothing is counted where other tests compiled something
        sys.modules["torch._dynamo.utils"].counters.clear()
    torch.manual_seed(0)
    model, data = nn.Linear(4, 1), (torch.randn(64, 4), torch.randn(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = evener.Run(model, optimizer, loss_fn, data, global_batch_size=16, dir=tmp_path / "run", max_grad_norm=2.0)
    for epoch in run.epochs(3):
        for _ in epoch:
            pass
    score = run.evaluate(data)
    run.close()
    capsys.readouterr()
    one = told(run.path, capsys)
    assert one["status"] == "finished" and one["updates"] == 12 and one["restarts"] == 0 and one["goodput"] == 1.0
    assert one["evaluation"]["loss"] == pytest.approx(score["loss"]) and one["loss"] is not None
    assert one["headline"].startswith("12 updates in ") and "evaluated loss" in one["headline"]
    assert one["contract"][0].startswith("global batch 16 = 1 rank x 1 microbatch x 16")
    fields = {field["keyword"]: field for field in one["fields"]}
    asked = {"keyword": "max_grad_norm", "value": "2.0", "origin": "code", "reason": "the script says so"}
    assert fields["max_grad_norm"] == asked
    assert any(word in fields["precision"]["reason"] for word in ("bf16", "fp32")), "what auto became, and why"
    assert fields["seed"]["origin"] == "default"
    assert any("bf16" in note for note in one["notes"]) or fields["precision"]["value"] != '"auto"'
    assert sum(one["step_share"].values()) == pytest.approx(1.0) and one["ranks"][0]["own_seconds"] > 0
    assert one["environment"]["torch"] == torch.__version__ and one["environment"]["parameters"] == 5
    assert one["reproduce"].startswith("python ") and one["flops_per_row"] == 16  # 4 weights, twice, 2 operations each
    text = page_of(run.path, capsys=capsys)
    for words in ("global batch 16", "max_grad_norm", "distance", one["headline"], "wall" and "goodput", "finished"):
        assert words in text, words


def small_run(folder: Path) -> evener.Run:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return evener.Run(
        model, optimizer, loss_fn, (torch.randn(64, 4), torch.randn(64)), global_batch_size=16, dir=folder
    )


def test_a_loop_that_was_left_is_finished_and_an_exception_is_an_incident(tmp_path, capsys, monkeypatch):
    run = small_run(tmp_path / "left")
    for update in run.updates(updates=20):
        if update.number == 3:
            break
    run.close()
    run = small_run(tmp_path / "raised")
    next(iter(run.updates(updates=20)))
    monkeypatch.setattr(sys, "last_value", KeyError("labels"), raising=False)  # what Python does before it ends
    run.close()
    monkeypatch.delattr(sys, "last_value")
    capsys.readouterr()
    assert told(tmp_path / "left", capsys)["status"] == "finished"
    one = told(tmp_path / "raised", capsys)
    assert one["status"] == "failed" and one["incidents"][0]["what"] == "KeyError: 'labels'"


CRASH = """
import os, signal, torch, evener
from torch import nn
from torch.nn import functional as F
evener.seed(0)
model = nn.Linear(4, 1)
data = torch.randn(64, 4), torch.randn(64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = evener.Run(model, optimizer, lambda m, b: F.mse_loss(m(b[0]).squeeze(1), b[1]), data, global_batch_size=16,
                 dir="run", save_every=5)
for update in run.updates(updates=20):
    if update.number == 12 and evener.rank() == 1 and not os.path.exists("died"):
        open("died", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
run.close()
"""


@pytest.mark.full
def test_a_real_kill_and_restart_of_two_processes_is_told_with_its_cause(tmp_path, capsys):
    (tmp_path / "crash.py").write_text(CRASH)
    argv = [sys.executable, "-m", "evener", "run", "--nproc", "2", "--cpu", "--restarts", "1", "crash.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    one = told(tmp_path / "run", capsys)
    assert one["status"] == "finished" and one["updates"] == 20 and one["restarts"] == 1
    died, resumed = one["incidents"]
    assert died["kind"] == "died" and "Rank 1" in died["why"] and "SIGKILL" in died["why"]
    assert resumed["kind"] == "resume" and "update-" in resumed["what"]
    assert [rank["rank"] for rank in one["ranks"]] == [0, 1]
    assert one["reproduce"] == "evener run --nproc 2 --cpu crash.py"


RAISES = """
import torch, evener
from torch import nn
from torch.nn import functional as F
class Rows(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.ones(4), {0: torch.ones(1)}[evener.rank()]
model = nn.Linear(4, 1)
with evener.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: F.mse_loss(m(b[0]), b[1]), Rows(),
                global_batch_size=16, dir="run") as run:
    for update in run.updates(updates=20):
        pass
"""


def test_the_rank_that_raised_is_named_and_not_the_one_that_lost_it(tmp_path, capsys):
    (tmp_path / "raises.py").write_text(RAISES)
    argv = [sys.executable, "-m", "evener", "run", "--nproc", "2", "--cpu", "raises.py"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    (row,) = re.findall(r"evener: rank 1 failed: .*row (\d+) of the dataset", done.stdout + done.stderr)
    one = told(tmp_path / "run", capsys)
    (incident,) = one["incidents"]
    assert one["status"] == "failed" and (incident["kind"], incident["rank"]) == ("error", 1)
    assert incident["what"].startswith(f"rank 1: DataError: row {row} of the dataset could not be read")


def error(t: float, kind: str, text: str, rank: int = 0) -> dict:
    return {"t": t, "kind": "error", "update": 8, "rank": rank, "type": kind, "text": text}


CLOSED = "RuntimeError", "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"


def test_of_many_exceptions_the_first_that_no_lost_peer_caused_is_the_story(tmp_path, capsys):
    folder = write(tmp_path / "run", start(1.0, world_size=4, job="one"), update(7, 2.0), error(3.0, *CLOSED))
    write(folder, error(2.9, *CLOSED, rank=1), rank=1)
    for rank in (2, 3):
        write(folder, error(3.0 + rank / 10, "KeyError", "137", rank=rank), rank=rank)
    write(folder, start(10.0, world_size=4, job="two"), update(8, 11.0))  # the second start is killed on the whole
    write(folder, error(12.0, *CLOSED, rank=1), rank=1)
    one = told(folder, capsys)
    first, second = one["incidents"]
    assert (first["rank"], first["title"]) == (2, "An exception ended the run")
    assert first["what"] == "ranks 2, 3: KeyError: 137; as a consequence, or later, ranks 0, 1 failed too"
    assert second["kind"] == "died" and one["incident_counts"] == {"error": 1, "died": 1} and one["status"] == "died"


def test_where_all_lost_a_peer_the_logs_are_asked(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", start(1.0, job="job", cwd=str(tmp_path)), update(7, 2.0), error(3.0, *CLOSED))
    (incident,) = told(folder, capsys)["incidents"]
    assert incident["title"] == "A rank that was gone ended the run" and "consequence" in incident["why"]
    logs = tmp_path / "runs" / "logs" / "job"
    logs.mkdir(parents=True)
    (logs / "rank1.log").write_text(
        'Traceback (most recent call last):\n  File "/x/train.py", line 5, in <module>\n    d[137]\nKeyError: 137\n'
    )
    (incident,) = told(folder, capsys)["incidents"]
    assert incident["why"].startswith("The logs of its job say: ") and "137" in incident["why"]


def test_the_last_point_after_a_stop_is_no_new_life(tmp_path, capsys):
    stop = {"t": 3.0, "kind": "stop", "update": 29, "reason": "SIGINT"}
    folder = write(
        tmp_path / "run", start(1.0), update(28, 2.0), stop, update(29, 3.1), phases(3.1, 29, 30, forward=1.0)
    )
    one = told(folder, capsys)
    assert one["status"] == "stopped" and one["updates"] == 30
    assert [incident["what"] for incident in one["incidents"]] == ["after 30 updates: SIGINT"]
    one = told(write(folder, start(9.0), update(30, 9.5), update(31, 9.6)), capsys)
    assert one["status"] == "died", "a second start that really died"


def test_a_hang_is_told_as_one_and_its_numbers_blame_no_rank(tmp_path):
    folder = write(tmp_path / "run", start(0.0, job="job"), update(30, 1.0))
    write(folder, phases(1.0, 31, 32, forward=6.0, reduction=0.1))
    write(folder, phases(1.0, 31, 32, forward=2.0, reduction=4.0), rank=1)
    record = Record.read(folder)

    def of(kind: str, ranks: list[int]) -> dict:
        return summary(record, {"job": Explained(kind, ranks, "Rank 1: no progress for 8 s.")}, (None, "unknown"))

    one = of("hang", [1])
    assert one["incidents"][0]["title"] == "Ended by the launcher after a hang"
    assert one["incidents"][0]["what"] == "rank 1 did not move any more, update 31"
    assert not any("straggler" in line for line in one["findings"])
    assert of("hang", [])["incidents"][0]["what"] == "its ranks waited for each other, update 31"
    other = of("killed", [1])
    assert other["incidents"][0]["title"] == "The processes ended without a word"
    assert any("Rank 0 is the straggler" in line for line in other["findings"])


def test_a_rank_without_rows_makes_no_other_a_straggler(tmp_path, capsys):
    folder = write(tmp_path / "run", start(0.0, world_size=3), update(0, 1.0))
    cut = "global batch 16 = 3 ranks x up to 1 microbatch x 16 · fp32 · ddp · exact, coupled (slices of 16)"
    write(folder, {"t": 0.5, "kind": "contract", "line": cut}, phases(10.0, 99, 100, reduction=8.0, data_wait=2.0))
    write(folder, phases(10.0, 99, 100, reduction=8.0), rank=1)
    write(folder, phases(10.0, 99, 100, forward=5.0, backward=4.0, reduction=0.1), rank=2)
    assert told(folder, capsys)["findings"] == [
        "2 of 3 ranks have no work (ranks 0, 1): the global batch has no rows for them, because it is cut into slices "
        "of 16 rows. A larger global_batch_size, or fewer processes."
    ]


# ---------------------------------------------------------------------------------------------------------- hostile


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{ 7*7 }}{% raw %}\x1b[31mred\x1b]0;title\x07\u202e"


class Tags(HTMLParser):
    """Every element and attribute of a page, and what is inside its scripts."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.script, self.scripts = [], [], False, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.script = tag == "script"

    def handle_endtag(self, tag):
        self.script = False

    def handle_data(self, data):
        if self.script and data.strip():
            self.scripts.append(data)


def test_names_and_texts_of_others_are_only_ever_text(tmp_path, capsys):
    folder = write(
        tmp_path / "<b>run<b>",
        start(1.0, host=HOSTILE, command=HOSTILE, job=HOSTILE, versions={HOSTILE: HOSTILE}),
        {"t": 1.0, "kind": "contract", "line": HOSTILE},
        {"t": 1.0, "kind": "warning", "text": HOSTILE},
        *(update(n, 2.0 + n, metrics={HOSTILE: 0.5, "</script>": 1.0}) for n in range(3)),
        {"t": 6.0, "kind": "evaluate", "update": 2, "metrics": {HOSTILE: 1.0}, "rows": 1, "seconds": 1.0},
        {"t": 6.0, "kind": "bad_row", "update": 2, "row": HOSTILE, "error": HOSTILE},
        {"t": 6.0, "kind": HOSTILE, "update": 2, HOSTILE: HOSTILE, "a b": [HOSTILE] * 100},
        {"t": 7.0, "kind": "error", "update": 2, "type": HOSTILE, "text": HOSTILE},
    )
    (folder / "config.json").write_text(json.dumps({HOSTILE: {"value": HOSTILE, "origin": HOSTILE}}))
    text = page_of(folder, folder, capsys=capsys) + page_of(folder, capsys=capsys)
    found = Tags(text)
    assert "img" not in found.tags and found.tags.count("script") == 6
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert not {"src", "href"} & {name for name, value in found.attributes if not (value or "").startswith("#")}
    assert "\x1b" not in text and "\u202e" not in text and "{{ 7*7 }}" in text, "shown, and not computed"
    data = [json.loads(script) for script in found.scripts if script.startswith("{")]
    assert len(data) == 2 and any("</script>" in chart["title"] for chart in data[0]["charts"])


ODD = [
    b"",
    b"null",
    b"[]",
    b'{"kind": null}',
    b'{"kind": {"a": 1}, "t": "x"}',
    b"[" * 100_000,
    b'{"kind": "update", "update": "seven", "t": [], "loss": {}}',
    b'{"kind": "update", "update": 1e400, "t": 5, "loss": 1}',
    b'{"kind": "update", "update": 5, "t": 5, "loss": 1' + b"0" * 400 + b', "metrics": []}',
    b'{"kind": "update", "update": 6, "t": 6, "loss": "nan", "metrics": {"a": "inf", "b": true, "c": null}}',
    b'{"kind": "phases", "update": 6, "t": 6, "rank": "x", "split": [], "updates": {}, "measured_updates": 3}',
    b'{"kind": "phases", "update": 6, "t": 6, "split": {"forward": "nan"}, "measured_updates": 3, "memory_bytes": "a"}',
    b'{"kind": "checkpoint", "update": 6, "t": "nan", "path": 7, "seconds": "x"}',
    b'{"kind": "resume", "update": 6, "t": 7, "redone_updates": "x", "checkpoint": []}',
    b'{"kind": "skip", "t": 8, "row_ids": {"a": []}}',
    b"\xff\xfe\x00" * 100,
    b'{"kind": "stop", "t": 9, "upd',
]


def test_a_damaged_file_is_shown_as_far_as_it_goes(tmp_path, capsys):
    folder = write(tmp_path / "run", start(1.0), update(0, 2.0, 3.0), update(1, 3.0, 2.0))
    with open(folder / "events.jsonl", "ab") as file:
        file.write(b"\n".join(ODD))
    (folder / "config.json").write_bytes(b"{torn")
    (folder / "events-rankX.jsonl").write_bytes(b"\n")
    (folder / "events-rank3.jsonl").write_bytes(b'{"kind": "pha')
    one = told(folder, capsys)
    assert one["damaged_lines"] >= 5 and one["updates"] == 7 and one["fields"] == []
    assert "could not be read" in page_of(folder, capsys=capsys)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_is_no_run_and_nothing_waits_for_it(tmp_path, capsys):
    folder = write(tmp_path / "run", start(1.0), update(0, 2.0))
    os.mkfifo(folder / "config.json")
    os.mkfifo(folder / "events-rank1.jsonl")
    assert told(folder, capsys)["updates"] == 1
    (folder / "events.jsonl").unlink()
    os.mkfifo(folder / "events.jsonl")
    assert main(["report", str(folder)]) == 2
    assert "events.jsonl cannot be read (it is no regular file)" in capsys.readouterr().err


def test_times_that_are_none_count_for_nothing(tmp_path, capsys):
    odd = (10**400, -5, "nan", "inf", 1e300)
    folder = write(tmp_path / "run", start(1.0), update(0, 2.0))
    write(folder, *({"kind": "checkpoint", "t": 3.0, "path": "x", "seconds": one} for one in odd))
    write(folder, *({"kind": "resume", "t": 3.0, "checkpoint": "x", "redone_updates": one} for one in odd[:1]))
    write(folder, update(1, 4.0), *(update(number, t) for number, t in enumerate(odd, 2)))
    one = told(folder, capsys)
    assert (one["wall_seconds"], one["redone_updates"]) == (3.0, 0)
    assert 0.0 <= one["goodput"] <= 1.0 and one["headline"].startswith("7 updates in 3 s")
    backwards = told(write(tmp_path / "back", start(10.0), update(0, 2.0)), capsys)
    assert backwards["wall_seconds"] == 0.0 and backwards["goodput"] is None


def test_a_run_that_still_goes_is_shown_up_to_its_newest_word(tmp_path, capsys):
    from evener.report.folder import RunFolder

    folder = RunFolder(tmp_path / "run")
    folder.event("start", world_size=1, versions={})
    for number in range(3):
        point = {"epoch": 0, "loss": 1.0, "lr": 0.1, "grad_norm": 1.0, "rows_per_second": 1.0}
        folder.event("update", update=number, **point)
    with open(tmp_path / "run" / "events.jsonl", "ab") as file:
        file.write(b'{"kind": "upda')  # being written
    one = told(tmp_path / "run", capsys)
    assert one["status"] == "going" and one["updates"] == 3 and one["age_seconds"] < 60
    assert "still going" in page_of(tmp_path / "run", capsys=capsys)
    folder.close()
    assert told(tmp_path / "run", capsys)["status"] == "died"


@pytest.mark.parametrize("age, status", [(5.0, "going"), (5000.0, "died")])
def test_a_run_of_another_machine_lives_as_long_as_it_speaks(tmp_path, capsys, age, status):
    now = time.time()
    folder = write(tmp_path / "run", start(now - 9000, host="elsewhere.invalid"), update(0, now - age))
    assert told(folder, capsys)["status"] == status


def test_many_events_become_few_points_and_extremes_stay(tmp_path, capsys):
    spikes = {1234: 50.0, 7890: -3.0}
    folder = write(
        tmp_path / "run",
        start(0.0),
        *(update(n, 1.0 + n, spikes.get(n, 1.0 + (n % 7) / 100)) for n in range(12_000)),
        *({"t": 12_002.0, "kind": "skip", "update": n, "row_ids": list(range(50)), "loss": 1.0} for n in range(5_000)),
        *({"t": 12_003.0, "kind": "warning", "text": f"note {n}"} for n in range(500)),
    )
    record = Record.read(folder)
    x, y = record.points.series("loss")
    assert len(x) <= records.POINTS and x == sorted(x) and x[0] == 0 and x[-1] == 11_999
    assert max(y) == 50.0 and min(y) == -3.0
    assert len(record.incidents) == 2 * records.INCIDENTS and record.counts["skip"] == 5_000
    assert len(record.notes) <= records.NOTES + 1
    one = told(folder, capsys)
    assert one["skipped_updates"] == 5_000 and any("skipped" in line for line in one["findings"])
    text = page_of(folder, capsys=capsys)
    assert "4,801 more between these" in text and len(text) < 1_500_000  # 5,001 with its death


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_hundred_megabytes_of_events_need_little_memory(tmp_path):
    folder = write(tmp_path / "run", start(0.0))
    events = Events(folder / "events.jsonl")
    for n in range(1_000):
        events.write("bad_row", update=n, row=n, error="x" * 50_000)
    with open(folder / "events.jsonl", "ab") as file:
        for n in range(200_000):
            file.write(json.dumps(update(n, float(n))).encode() + b"\n")
        file.write(b"y" * (30 << 20))
    assert os.path.getsize(folder / "events.jsonl") > 100 << 20
    code = "import sys; from evener.cli import main; main(sys.argv[1:]); print(open('/proc/self/status').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(folder)], capture_output=True, text=True, check=True
    )
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert int(peak) < 200 << 10
    assert (folder / "report.html").stat().st_size < 1 << 20


def test_points_keep_order_and_replace_what_was_made_again():
    points = Points(limit=8)
    for number in (0, 1, 2, 3, 2, 3, 4):
        points.add(number, {"loss": float(number)})
    assert points.series("loss")[0][-3:] == [2, 3, 4] and len(points.series("loss")[0]) == 5
    for name in range(100):
        points.add(10 + name, {f"metric {name}": 1.0})
    assert len(points.names) == records.NAMES


# ------------------------------------------------------------------------------------------------------ what it means


def test_a_death_is_an_incident_with_what_its_logs_say(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "runs" / "logs" / "job-restart1"
    logs.mkdir(parents=True)
    (logs / "rank0.log").write_text(
        "Traceback (most recent call last):\n"
        '  File "/x/train.py", line 5, in <module>\n    loss.backward()\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB"
        " of which 1.06 GiB is free. Process 1 has 78.0 GiB memory in use. Of the allocated memory 76.00 GiB is allocated"
        " by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    folder = write(
        tmp_path / "run",
        start(100.0, job="job", attempt=1, cwd=str(tmp_path)),
        *(update(n, 101.0 + n) for n in range(10)),
        {"t": 105.0, "kind": "checkpoint", "update": 4, "path": "x/update-5", "seconds": 0.5, "blocked_seconds": 0.1},
        start(130.0, job="job-2", cwd=str(tmp_path)),
        {"t": 130.0, "kind": "resume", "update": 4, "checkpoint": "update-5", "redone_updates": 5},
        *(update(n, 131.0 + n - 5, 0.5) for n in range(5, 12)),
        {"t": 140.0, "kind": "finish", "update": 11, "updates": 12, "seconds": 9.0},
    )
    one = told(folder, capsys)
    died, resumed = one["incidents"]
    assert (died["kind"], died["update"]) == ("died", 9) and "memory" in died["why"].lower()
    assert died["why"].startswith("The logs of its job say: ") and died["do"] is None
    assert resumed["what"] == "from update-5; 5 updates were made again"
    assert one["status"] == "finished" and one["restarts"] == 1 and one["redone_updates"] == 5
    assert 0 < one["goodput"] < 1 and "1 restart" in one["headline"] and one["environment"]["starts"] == 2
    x, y = Record.read(folder).points.series("loss")
    assert x == list(range(12)) and y == [1.0] * 5 + [0.5] * 7, "what was made twice is shown once"


def test_the_straggler_is_the_rank_that_works_while_others_wait(tmp_path, capsys):
    folder = write(tmp_path / "run", start(0.0), update(0, 1.0), update(99, 10.0))
    write(folder, phases(10.0, 99, 100, forward=2.0, backward=2.0, reduction=4.0, body=0.5))
    write(folder, phases(10.0, 99, 100, forward=6.0, backward=2.0, reduction=0.1, data_wait=0.4), rank=1)
    write(folder, phases(10.0, 99, 100, forward=2.1, backward=2.0, reduction=3.9, body=0.5), rank=2)
    one = told(folder, capsys)
    assert any(
        line.startswith("Rank 1 is the straggler: 84 ms of own work an update, 45.5 ms") for line in one["findings"]
    )
    assert [round(1000 * rank["own_seconds"]) for rank in one["ranks"]] == [45, 84, 46]
    assert one["seconds_per_update"] == pytest.approx(0.085) and one["step_share"]["reduction"] == pytest.approx(
        4 / 8.5
    )


def test_ranks_are_those_of_the_newest_part_of_a_run(tmp_path, capsys):
    """Three ranks before the restart, two after it: two rows, with what they did since; the page has no noise."""
    folder = write(tmp_path / "run", start(0.0, world_size=3), update(0, 1.0))
    write(folder, phases(10.0, 99, 100, forward=60.0), start(20.0), update(100, 21.0))
    write(folder, phases(30.0, 199, 100, forward=4.0, backward=1.23456))
    for rank in (1, 2):
        old = phases(10.0, 99, 100, forward=60.0) | {"memory_bytes": 300 << 20, "gpu_utilization_percent": 90}
        write(folder, old, rank=rank)
    write(folder, phases(30.0, 199, 100, forward=4.0) | {"gpu_utilization_percent": 40}, rank=1)
    one = told(folder, capsys)
    assert [(rank["rank"], rank["own_seconds"]) for rank in one["ranks"]] == [
        (0, pytest.approx(0.0523456)),
        (1, 0.04),
    ]
    assert one["ranks"][1]["gpu_utilization_percent"] == 40 and one["ranks"][1]["memory_peak_bytes"] == 100 << 20
    assert one["memory_peak_bytes"] == 300 << 20, "of the whole run"
    assert Record.read(folder).ranks[2].memory.series("memory_bytes") == ([99], [300 << 20]), "the curve has all"
    text = page_of(folder, capsys=capsys)
    assert ">52.3</td>" in text and "Since the newest start of which times are known" in text
    assert "<code>evener plan</code> does" in text and "`" not in text.split("<script")[0].split("</style>")[1]


FOUND = {
    "waits for rows 40%": [phases(9.0, 9, 10, data_wait=4.0, forward=6.0)],
    "reductions that no backward hides": [phases(9.0, 9, 10, reduction=4.0, forward=6.0)],
    "the loop's own body": [phases(9.0, 9, 10, body=4.0, forward=6.0)],
    "is not finite": [update(10, 9.0, "nan")],
    "rose again": [update(n, 9.0, 0.1 if n < 90 else 5.0) for n in range(10, 100)],
    "kept the training waiting 56%": [
        {"t": 9.0, "kind": "checkpoint", "update": 3, "path": "x", "seconds": 5.0, "blocked_seconds": 5.0}
    ],
}


@pytest.mark.parametrize("words", FOUND)
def test_what_stands_out_is_said_first(tmp_path, capsys, words):
    quiet = [start(0.0), *(update(n, 0.5 + n / 2) for n in range(10))]
    calm = told(
        write(tmp_path / "calm", *quiet, {"t": 9.0, "kind": "finish", "update": 9, "updates": 10, "seconds": 9.0}),
        capsys,
    )
    assert calm["findings"] == []
    (line,) = told(write(tmp_path / "run", *quiet, *FOUND[words]), capsys)["findings"]
    assert words in line


def test_a_prediction_stands_beside_what_came(tmp_path, capsys):
    folder = write(tmp_path / "run", start(0.0), update(0, 1.0), phases(9.0, 9, 10, forward=6.0))
    assert "Nobody predicted its peak" in page_of(folder, capsys=capsys)
    peak = {"t": 9.5, "kind": "peak", "update": 0, "predicted_bytes": 90 << 20, "real_bytes": 95 << 20}
    write(folder, peak | {"predicted_seconds": None, "real_seconds": 3.0})
    assert "It predicted no time." in page_of(folder, capsys=capsys)
    write(folder, peak | {"predicted_seconds": 0.002, "real_seconds": 0.003})
    one = told(folder, capsys)
    assert (one["predicted_peak_bytes"], one["compared_peak_bytes"]) == (90 << 20, 95 << 20)
    assert (one["predicted_seconds_per_update"], one["compared_seconds_per_update"]) == (0.002, 0.003)
    page = page_of(folder, capsys=capsys)
    assert "predicted a peak of 90 MiB; it was 95 MiB. It predicted 2.0000 ms an update; it was 3.0000 ms." in page


def test_words_are_for_kinds_that_exist():
    from evener.run.phases import PHASES

    words = records.WORDS
    assert set(words["incidents"]) - {"died"} <= set(KINDS) and not set(words["incidents"]) & ORDINARY
    assert all({"title", "what", "why"} <= set(one) for one in words["incidents"].values())
    assert tuple(words["phases"]) == PHASES


def test_words_use_only_what_an_event_promises(tmp_path, capsys):
    kinds = [kind for kind in records.WORDS["incidents"] if kind != "died"]
    values = {name: f"its {name}" for kind in kinds for name in KINDS[kind][1]}
    events = [
        {"t": 2.0, "kind": kind, "update": 3, **{name: values[name] for name in KINDS[kind][1]}} for kind in kinds
    ]
    one = told(write(tmp_path / "run", start(0.0), *events), capsys)
    assert [incident["kind"] for incident in one["incidents"]] == kinds
    for incident in one["incidents"]:
        assert incident["what"] and "unknown" not in incident["what"] and "{" not in incident["what"], incident
    oom = next(incident for incident in one["incidents"] if incident["kind"] == "oom")
    assert oom["what"].startswith("update 3, in the its phase on rank its ranks; made again with microbatches of its")


def test_the_vendored_library_is_what_its_note_says():
    import hashlib

    folder = resources.files("evener.report").joinpath("vendor")
    note = folder.joinpath("VENDORED.txt").read_text("utf-8")
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"):
        assert f"{hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest()}  {name}" in note


# ----------------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_get_one_clear_error(tmp_path, capsys):
    folder = write(tmp_path / "runs" / "digits", start(0.0))
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    cases = [
        (["report"], "RUN_DIR"),
        (["report", str(tmp_path / "none")], "is no run directory: it does not exist"),
        (["report", str(tmp_path / "runs")], f"fix: evener report {folder}"),
        (["report", str(bad)], "is no run directory"),
    ]
    for argv, words in cases:
        assert main(argv) == 2, argv
        assert words in capsys.readouterr().err, argv
    assert main(["report", str(folder), "-o", str(tmp_path / "no" / "page.html")]) == 1
    assert "cannot be written: No such file" in capsys.readouterr().err
