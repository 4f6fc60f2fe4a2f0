"""The scripts of docs/loggers.md, run against the real packages, offline: every point arrives, once, from rank 0.

W&B, MLflow and trackio are not installed in CI (requirements/extra.txt): there these tests are skipped and counted.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "loggers.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"^## (.*?)\n\n```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def wandb_points(folder):
    """An offline run is a log of protobuf records: blocks of 32 KiB, each record with checksum, length and kind."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-*/*.wandb")  # one run: rank 0's
    data, at, record, points = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole, or the last part
            one = wandb_internal_pb2.Record()
            one.ParseFromString(record)
            record = b""
            if one.WhichOneof("record_type") == "history":
                items = {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in one.history.item
                }
                points += [(items["_step"], name, value) for name, value in items.items() if name[0] != "_"]
    return points


def mlflow_points(folder):
    points = []
    for path in folder.glob("mlruns/*/*/metrics/**/*"):
        if path.is_file():
            name = str(path).partition("/metrics/")[2]
            for line in path.read_text().splitlines():
                _, value, step = line.split()[:3]
                points.append((int(step), name, float(value)))
    return points


def trackio_points(folder):
    with sqlite3.connect(folder / "trackio" / "digits.db") as database:
        rows = database.execute("select step, metrics from metrics order by id").fetchall()
    return [(step, name, value) for step, text in rows for name, value in json.loads(text).items()]


LOGGERS = [
    ("wandb", "Weights & Biases", wandb_points),
    ("mlflow", "MLflow", mlflow_points),
    ("trackio", "trackio", trackio_points),
]


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("package, title, points_of", LOGGERS, ids=[package for package, *_ in LOGGERS])
def test_every_point_arrives_once(tmp_path, package, title, points_of, nproc):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: requirements/extra.txt")
    (tmp_path / "train.py").write_text(SCRIPTS[title])
    done = subprocess.run(
        [sys.executable, "-m", "evener", "run", "--cpu", "--nproc", str(nproc), "train.py"], cwd=tmp_path,
        capture_output=True, text=True, timeout=300,
        env={
            **os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "TRACKIO_DIR": str(tmp_path / "trackio"),
            "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path), "HOME": str(tmp_path),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "could not be written" not in done.stdout
    points = points_of(tmp_path)
    assert len({(step, name) for step, name, _ in points}) == len(points)
    steps = {name: sorted(step for step, one, _ in points if one == name) for _, name, _ in points}
    assert steps["epoch"] == steps["evaluate/loss"] == steps["evaluate/accuracy"] == [4, 9]
    assert steps["train/loss"][-1] == 9 and set(steps["train/loss"]) <= set(range(10))
    events = [json.loads(line) for line in (tmp_path / "runs" / "train" / "events.jsonl").read_text().splitlines()]
    evaluated = [event["metrics"]["loss"] for event in events if event["kind"] == "evaluate"]
    assert [value for _, name, value in sorted(points) if name == "evaluate/loss"] == pytest.approx(evaluated)


def test_the_page_has_a_script_for_each():
    assert {title for _, title, _ in LOGGERS} < set(SCRIPTS)
    for text in SCRIPTS.values():
        compile(text, "loggers.md", "exec")
