"""The keywords of Run: one table, later sources win, every value knows its origin, every mistake says what to write."""

from __future__ import annotations

import datetime
import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from evener.config import Config, ConfigFile, RunKeywords, keyword_groups, nearest_valid
from evener.errors import BatchSizeError, PrecisionError, UsageError


def refused(error: type[UsageError] = UsageError, **keywords: object) -> str:
    with pytest.raises(UsageError) as caught:
        Config.merge({"global_batch_size": 8, **keywords})
    assert type(caught.value) is error
    return str(caught.value)


def in_file(tmp_path: Path, text: str) -> ConfigFile:
    (tmp_path / "evener.toml").write_text(text)
    found = ConfigFile.find(tmp_path)
    assert found is not None
    return found


def test_the_typed_keywords_and_the_table_are_in_step():
    assert list(RunKeywords.__annotations__) == list(keyword_groups())


def test_defaults():
    config = Config.merge({"global_batch_size": 512})
    assert {name: getattr(config, name) for name in keyword_groups()} == {
        "global_batch_size": 512,
        "slice_size": None,
        "exact": False,
        "coupled": None,
        "order": None,
        "drop_last": False,
        "collate_fn": None,
        "num_workers": "auto",
        "prepare": None,
        "stream": None,
        "on_bad_sample": "raise",
        "seed": 0,
        "loss_is": None,
        "precision": "auto",
        "strategy": "auto",
        "scheduler": None,
        "schedule_by": "update",
        "max_grad_norm": None,
        "before_step": None,
        "on_nonfinite": "skip",
        "scaler": None,
        "compile": False,
        "batchnorm": "slice",
        "ema": None,
        "device_ids": None,
        "output_device": None,
        "scatter": None,
        "microbatch_size": None,
        "weights": None,
        "fsdp": None,
        "activation_checkpointing": None,
        "saved_activations": "keep",
        "gradient_compression": None,
        "sync_every": None,
        "dir": None,
        "save_every": "10min",
        "keep_checkpoints": 3,
        "resume": "auto",
        "accept_changed_data": False,
        "timeout": 600,
        "logger": None,
        "profile": None,
        "split": None,
    }
    assert set(config.origins) == set(keyword_groups())
    assert {name for name, origin in config.origins.items() if origin != "default"} == {"global_batch_size"}


def test_every_default_passes_its_own_check():
    config = Config.merge({"global_batch_size": 512})
    again = Config.merge({name: getattr(config, name) for name in keyword_groups()})
    assert all(getattr(config, name) == getattr(again, name) for name in keyword_groups())
    assert set(again.origins.values()) == {"code"}


def test_later_sources_win_keyword_by_keyword(tmp_path):
    file = in_file(tmp_path, 'seed = 2\nprecision = "bf16"\nmicrobatch_size = 64\ndevice_ids = [0, 1]')
    config = Config.merge(
        {"global_batch_size": 512, "seed": 1, "exact": True},
        file=file,
        flags={"microbatch_size": 32, "precision": "fp16"},
        lesson={"microbatch_size": 8},
    )
    assert (config.seed, config.precision, config.microbatch_size, config.device_ids) == (2, "fp16", 8, [0, 1])
    assert {name: origin for name, origin in config.origins.items() if origin != "default"} == {
        "global_batch_size": "code",
        "exact": "code",
        "seed": "evener.toml",
        "device_ids": "evener.toml",
        "precision": "flag",
        "microbatch_size": "lesson",
    }


def test_a_seed_has_64_bits():
    assert Config.merge({"global_batch_size": 8, "seed": 2**64 - 1}).seed == 2**64 - 1
    with pytest.raises(UsageError, match="seed=18446744073709551616 is not allowed") as raised:
        Config.merge({"global_batch_size": 8, "seed": 2**64})
    assert "from 0 to 2**64 - 1" in raised.value.fix[-1]


def test_a_replaced_mistake_is_still_a_mistake():
    with pytest.raises(UsageError, match=r"seed=-1 is not allowed\."):
        Config.merge({"global_batch_size": 8, "seed": -1}, flags={"seed": 1})


def test_the_file_may_give_the_batch():
    assert Config.merge({}, flags={"global_batch_size": 8}).origins["global_batch_size"] == "flag"


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        Config.merge({"global_batch_size": 8}).seed = 1  # type: ignore[misc]


def test_pyproject_is_found_from_a_folder_below(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\n[tool.evener]\nseed = 7\n')
    below = tmp_path / "scripts" / "deep"
    below.mkdir(parents=True)
    config = Config.merge({"global_batch_size": 8}, file=ConfigFile.find(below))
    assert (config.seed, config.origins["seed"]) == (7, "pyproject.toml")


def test_files_above_the_project_do_not_count(tmp_path):
    (tmp_path / "evener.toml").write_text("seed = 7")
    project, plain = tmp_path / "project", tmp_path / "plain"
    (project / ".git").mkdir(parents=True)
    plain.mkdir()
    assert ConfigFile.find(project) is None
    assert ConfigFile.find(plain) is None  # no project at all: only the folder itself
    assert ConfigFile.find(tmp_path) is not None


def test_two_files_are_refused(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.evener]\nseed = 7\n")
    with pytest.raises(UsageError, match="are both there"):
        in_file(tmp_path, "seed = 8")


def test_a_broken_file_is_named(tmp_path):
    with pytest.raises(UsageError) as caught:
        in_file(tmp_path, "seed = = 8")
    assert f"{tmp_path / 'evener.toml'} is not TOML." in str(caught.value)
    assert "line 1" in str(caught.value)


def test_a_mistake_in_a_file_names_the_file(tmp_path):
    with pytest.raises(BatchSizeError) as caught:
        Config.merge({}, file=in_file(tmp_path, "global_batch_size = 0"))
    assert str(caught.value) == (
        "global_batch_size=0 is not allowed.\n"
        f"  in {tmp_path / 'evener.toml'}\n"
        "  fix: global_batch_size is a whole number from 1: the rows of one update, over all ranks"
    )


def test_functions_cannot_come_from_a_file_or_a_flag(tmp_path):
    with pytest.raises(UsageError) as caught:
        Config.merge({"global_batch_size": 8}, file=in_file(tmp_path, 'collate_fn = "my.module:collate"'))
    assert str(caught.value) == (
        "collate_fn='my.module:collate': collate_fn is a function and cannot come from a file, a flag or a lesson.\n"
        f"  in {tmp_path / 'evener.toml'}\n"
        "  fix: give collate_fn= to Run in the script"
    )
    with pytest.raises(UsageError, match="scheduler is an object built for the optimizer and cannot come from"):
        Config.merge({"global_batch_size": 8}, flags={"scheduler": "cosine"})
    with pytest.raises(UsageError, match="order is not a JSON value and cannot come from"):
        Config.merge({"global_batch_size": 8}, flags={"order": sorted})


def test_a_misspelt_keyword_names_the_nearest_and_its_group():
    assert refused(micro_batch_size=4) == (
        "Run has no keyword 'micro_batch_size'.\n  fix: microbatch_size=\n       memory keywords: microbatch_size, weights, fsdp, activation_checkpointing, "
        "saved_activations, gradient_compression, sync_every"
    )
    assert (
        "output keywords: dir, save_every, keep_checkpoints, resume, accept_changed_data, timeout, logger, profile, split"
        in refused(time_out=4)
    )
    everything = refused(zzz=4)
    assert all(f"{group} keywords: " in everything for group in ("batch", "step", "memory", "output"))


def test_words_of_other_libraries_are_translated():
    assert "fix: here it is global_batch_size= (the rows of one update over all ranks)" in refused(batch_size=4)
    assert "fix: here it is microbatch_size=" in refused(gradient_accumulation_steps=4)
    assert 'fix: precision="bf16"' in refused(PrecisionError, precision="bfloat16")


def test_the_batch_is_required():
    with pytest.raises(BatchSizeError) as caught:
        Config.merge({})
    assert str(caught.value) == (
        "global_batch_size is missing.\n"
        "  fix: global_batch_size=512\n"
        "       global_batch_size is a whole number from 1: the rows of one update, over all ranks"
    )


@pytest.mark.parametrize("value", [0, -3, "512", 512.0, True, None, [512], np.ones(3), np.bool_(True)])
def test_sizes_that_are_no_sizes(value):
    text = refused(BatchSizeError, global_batch_size=value)
    assert "global_batch_size is a whole number from 1: the rows of one update, over all ranks" in text
    assert ("fix: global_batch_size=512\n" in text) == (value in ("512", 512.0) if np.isscalar(value) else False)


def test_numpy_numbers_are_taken_as_numbers():
    config = Config.merge({"global_batch_size": np.int64(8), "max_grad_norm": np.float32(0.5)})
    assert type(config.global_batch_size) is int
    assert type(config.max_grad_norm) is float


def test_parts_larger_than_the_batch_are_refused():
    assert refused(BatchSizeError, microbatch_size=16) == (
        "microbatch_size=16 is more than global_batch_size=8.\n"
        "  microbatch_size comes from: code\n"
        "  global_batch_size comes from: code\n"
        "  fix: microbatch_size=8 or less, or leave microbatch_size out\n"
        "       or a larger global_batch_size: that changes what one update is"
    )
    assert "slice_size=9 is more than" in refused(BatchSizeError, slice_size=9)
    assert Config.merge({"global_batch_size": 8, "microbatch_size": 8}).microbatch_size == 8


@pytest.mark.parametrize(
    ("keywords", "text"),
    [
        ({"exact": 1}, "exact=1 is not allowed.\n  fix: exact is True or False"),
        ({"coupled": "yes"}, "coupled='yes' is a str.\n  fix: coupled is None, True or False"),
        ({"order": "shuffel"}, "order='shuffel' is not known.\n  fix: order=\"shuffle\"\n"),
        ({"order": [2, 1]}, "order=[2, 1] is a list.\n  fix: order=lambda seed, epoch: rows\n"),
        ({"num_workers": -1}, 'num_workers is "auto" or a whole number of processes, 0 or more'),
        ({"num_workers": "4"}, "num_workers='4' is a str.\n  fix: num_workers=4\n"),
        ({"prepare": "mixup"}, "prepare is None or a function f(batch, generator)"),
        ({"loss_is": "mean"}, "loss_is is one of: row mean"),
        ({"strategy": "dpp"}, "strategy='dpp' is not known.\n  fix: strategy=\"dp\""),
        ({"scheduler": "cosine"}, "scheduler='cosine' is a str.\n  fix: scheduler=torch.optim.lr_scheduler."),
        ({"schedule_by": "step"}, "schedule_by is one of: update, epoch"),
        ({"max_grad_norm": 0}, "max_grad_norm=0 is not allowed.\n  fix: max_grad_norm is None or a finite number"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan is not allowed."),
        ({"max_grad_norm": True}, "max_grad_norm=True is a bool."),
        ({"on_nonfinite": "stop:0"}, 'on_nonfinite is "skip", "stop", or "stop:N"'),
        ({"scaler": True}, "scaler is None, a torch.amp.GradScaler, or its arguments"),
        ({"batchnorm": "synced"}, "batchnorm is one of: slice, sync, frozen"),
        ({"device_ids": 0}, 'device_ids is None or a list of devices for strategy="dp", such as [0, 1]'),
        ({"device_ids": []}, "device_ids=[] is empty."),
        ({"output_device": -1}, "output_device is a device number from 0, or a torch.device"),
        ({"dir": ""}, "dir='' is not a directory.\n  fix: dir=\"runs/digits\""),
        ({"timeout": "10min"}, "timeout is a finite number of seconds above 0"),
        ({"timeout": datetime.timedelta(minutes=5)}, "is a timedelta.\n  fix: timeout=300\n"),
        ({"logger": logging.getLogger("x")}, "logger= is a logging.Logger, which logs text."),
        ({"logger": 3}, "logger is an object with log(values, step), such as wandb's run, or a function"),
        ({"seed": -1}, "seed is a whole number from 0"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(keywords, text):
    assert text in refused(**keywords)


@pytest.mark.parametrize("value", ["b16", None, 16, {}, {"parm": "bf16"}, {"param": "int8"}])
def test_wrong_precisions(value):
    assert "fix: " in refused(PrecisionError, precision=value)


def test_values_of_every_kind_are_taken():
    class Scheduler:
        def step_update(self, n: int) -> None: ...

    config = Config.merge(
        {
            "global_batch_size": 8,
            "order": lambda seed, epoch: range(8),
            "precision": {"param": "bf16", "reduce": "fp32"},
            "scheduler": Scheduler(),
            "on_nonfinite": "stop:3",
            "scaler": {"init_scale": 1024.0},
            "device_ids": [0, "cuda:1"],
            "dir": Path("runs/x"),
            "logger": print,
            "split": len,
        }
    )
    values = {name: entry["value"] for name, entry in config.as_json().items() if entry["origin"] == "code"}
    assert values == {
        "global_batch_size": 8,
        "order": "tests.test_config.test_values_of_every_kind_are_taken.<locals>.<lambda>",
        "precision": {"param": "bf16", "reduce": "fp32"},
        "scheduler": "tests.test_config.test_values_of_every_kind_are_taken.<locals>.Scheduler",
        "on_nonfinite": "stop:3",
        "scaler": {"init_scale": 1024.0},
        "device_ids": [0, "cuda:1"],
        "dir": "runs/x",
        "logger": "builtins.print",
        "split": "builtins.len",
    }
    assert config.as_json()["seed"] == {"value": 0, "origin": "default"}


def test_nearest_valid():
    assert nearest_valid(10, 4, 512) == (8, 12)
    assert nearest_valid(8, 4, 512) == (8,)
    assert nearest_valid(3, 4, 512) == (4,)
    assert nearest_valid(510, 4, 510) == (508,)


def test_importing_the_table_imports_no_torch_and_no_numpy():
    code = (
        "import sys, evener.config; print([m for m in ('torch', 'numpy', 'rich', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
