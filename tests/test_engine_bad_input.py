"""Bad input gives one clear error: what was given, what is allowed, what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from tests.models import MLP, make, mlp_rows, row_loss


def engine_of(loss_fn=row_loss, model=None, optimizer=None, **keywords):
    model = model if model is not None else make("mlp")
    optimizer = optimizer if optimizer is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    keywords = {"device": "cpu", "precision": "fp32", **keywords}
    return evener.Engine(model, optimizer, loss_fn, **keywords)


def refused(text, **keywords):
    batch = keywords.pop("batch", None)
    with pytest.raises(evener.EvenerError) as error:
        engine = engine_of(**keywords)
        engine.step(batch if batch is not None else mlp_rows(8))
    assert text in str(error.value), str(error.value)
    assert "fix:" in str(error.value)
    assert error.value.exit_code == 2


def test_sizes():
    refused("microbatch_size=0 is not allowed.\n  fix: microbatch_size is None or a whole number", microbatch_size=0)
    refused("slice_size=4 has no meaning here", slice_size=4)
    refused("needs slice_size=", exact=True)
    refused(
        "microbatch_size=10 is not a whole number of slices of 4 rows", exact=True, slice_size=4, microbatch_size=10
    )
    refused("microbatch_size=8 or 12", exact=True, slice_size=4, microbatch_size=10)
    refused("slice_size=9 is larger than the global batch of 8", exact=True, slice_size=9, global_batch_size=8)
    refused("max_grad_norm=0 is not allowed", max_grad_norm=0)


def test_words_name_the_nearest():
    refused('strategy="single"', strategy="sinlge")
    refused("batchnorm is one of: slice, sync, frozen", batchnorm="syncc")
    refused('loss_is="row mean"', loss_is="rowmean")
    refused('schedule_by="epoch"', schedule_by="epochs")


def test_devices():
    refused("there is no CUDA device here: this torch", device="cuda:0")
    refused("device 'gpu' is not known", device="gpu")
    refused("device_ids, output_device and scatter belong to strategy='dp'", device_ids=[0])
    refused("there are no GPUs on cpu", strategy="dp", device_ids=[0, 1])
    refused("one weight per device", strategy="dp", scatter=(0, 0))


def test_visible_and_physical_numbers_are_explained(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    with pytest.raises(evener.EvenerError) as error:
        evener.device("cuda:7")
    assert "cuda:7 does not exist; 2 GPUs are visible" in str(error.value)
    assert "slot 0 is GPU 5, slot 1 is GPU 7" in str(error.value)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(evener.EvenerError, match=r"local rank 2: cuda:2 does not exist"):
        evener.device()


def test_optimizer_over_foreign_parameters():
    other = torch.optim.SGD(MLP().parameters(), lr=0.1)
    refused("6 of the optimizer's 6 parameters do not belong to the model", optimizer=other)
    frozen = make("mlp").requires_grad_(False)
    refused("none of the optimizer's parameters trains", model=frozen, optimizer=torch.optim.SGD(frozen.parameters()))
    model = make("mlp")
    refused("LBFGS.step needs a closure", model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    refused("not a torch.optim.Optimizer", optimizer="adam")


def test_models():
    inner = make("mlp")
    wrapped = nn.DataParallel(inner)
    refused("already wrapped in DataParallel", model=wrapped)
    spread = make("mlp")
    spread.hf_device_map = {"body": 0, "head": 1}
    refused("spread over several devices", model=spread)
    empty = make("mlp").to("meta")
    refused("parameters without storage", model=empty)
    lazy = nn.Sequential(nn.Linear(5, 4), nn.LazyLinear(3))
    refused("not initialised yet", model=lazy, optimizer=torch.optim.SGD(lazy[0].parameters(), lr=0.1))
    with pytest.raises(evener.EvenerError, match=r"is a function, not a torch.nn.Module"):
        engine_of(model=row_loss, optimizer=torch.optim.SGD(make("mlp").parameters(), lr=0.1))


def test_losses():
    def logits(model, batch):
        return model(batch[0])

    refused("the loss has shape (8, 3); it must be one number", loss_fn=logits)
    refused("None (is the `return` missing?)", loss_fn=lambda model, batch: None)
    refused("the loss is not connected to the parameters", loss_fn=lambda m, b: m(b[0]).sum().detach())
    refused("is a Python float, not a tensor", loss_fn=lambda m, b: evener.Mean(total=m(b[0]).sum().item(), count=1))
    refused("loss_fn returned a float", loss_fn=lambda m, b: m(b[0]).sum().item())
    refused("a dict with keys ['loss']", loss_fn=lambda m, b: {"loss": m(b[0]).sum()})
    refused("metric 'accuracy' is a float", loss_fn=lambda m, b: (m(b[0]).sum(), {"accuracy": 0.5}))
    refused(
        "Mean(count=): a tensor of shape (8,)",
        loss_fn=lambda m, b: evener.Mean(total=m(b[0]).sum(), count=torch.ones(8)),
    )
    refused("Mean(count='8'): a str is no number", loss_fn=lambda m, b: evener.Mean(total=m(b[0]).sum(), count="8"))
    refused("Mean(count=-1): a count is at least 0", loss_fn=lambda m, b: evener.Mean(total=m(b[0]).sum(), count=-1))
    refused(
        "Mean(mean=): a tensor of shape (2,)",
        loss_fn=lambda m, b: (m(b[0]).sum(), {"a": evener.Mean(mean=torch.ones(2), count=1)}),
    )
    refused("a metric's name is a int: 3", loss_fn=lambda m, b: (m(b[0]).sum(), {3: evener.Mean(mean=1.0, count=1)}))
    refused("Mean takes exactly one of total= and mean=", loss_fn=lambda m, b: evener.Mean(count=1))
    refused(
        "two Means cannot be added",
        loss_fn=lambda m, b: evener.Mean(total=m(b[0]).sum(), count=8) + evener.Mean(total=m(b[0]).sum(), count=4),
    )


def test_one_denominator_and_the_same_metrics_every_time():
    kinds = iter([row_loss, lambda m, b: evener.Mean(total=row_loss(m, b)[0], count=8)])
    engine = engine_of(lambda m, b: next(kinds)(m, b))
    engine.step(mlp_rows(8))
    with pytest.raises(evener.EvenerError, match="a scalar for one batch and a Mean for another"):
        engine.step(mlp_rows(8))
    names = iter([{}, {"a": evener.Mean(mean=1.0, count=1)}])
    engine = engine_of(lambda m, b: (F.cross_entropy(m(b[0]), b[1]), next(names)))
    engine.step(mlp_rows(8))
    with pytest.raises(evener.EvenerError, match="loss_fn returned other metrics than before"):
        engine.step(mlp_rows(8))


def hf_loss(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def test_ignored_labels_need_a_denominator():
    x, labels = mlp_rows(8)
    labels[:4] = -100
    batch = {"x": x, "labels": labels}
    refused("labels hold -100", loss_fn=hf_loss, batch=batch)
    refused("count = (labels != -100).sum(); return evener.Mean(mean=loss, count=count)", loss_fn=hf_loss, batch=batch)
    assert engine_of(hf_loss, loss_is="row mean").step(batch).loss > 0


def test_batches_that_cannot_be_counted():
    x, y = mlp_rows(8)
    refused("the tensors of the batch disagree", batch=(x, y[:5]))
    refused("batch[1]: 5", batch=(x, y[:5]))
    refused("no tensor in the batch to count rows on", batch={"name": "a"})


def test_apply_without_backward():
    with pytest.raises(evener.EvenerError, match=r"apply\(\) without a backward"):
        engine_of().apply()


def too_many_processes(strategy):
    try:
        engine_of(strategy=strategy)
    except evener.EvenerError as error:
        return str(error)
    return ""


def test_strategies_that_do_not_fit_the_world_size(ranks):
    assert all("each would train alone" in text for text in ranks(2)(too_many_processes, "single"))
    assert all("one process with several GPUs" in text for text in ranks(2)(too_many_processes, "dp"))


def inside_a_slice():
    engine = engine_of(exact=True, slice_size=4)
    try:
        engine.step(mlp_rows(6))
    except evener.EvenerError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_engine_ranks_must_start_at_slices(ranks):
    texts = ranks(2)(inside_a_slice)
    assert texts[0] == texts[1] and texts[1].startswith(
        "rank 1 starts at row 6 of the global batch, inside a slice of 4 rows"
    )
    assert "start it at row 4 or 8" in texts[1]


def unevenly_dealt(rows):
    engine = engine_of(exact=True, slice_size=3)
    mine = rows[evener.rank()]
    try:
        engine.step(mlp_rows(mine) if mine else None)
    except evener.EvenerError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_exact_engine_ranks_must_hold_what_the_tree_expects(ranks):
    for text in ranks(4)(unevenly_dealt, [6, 3, 3, 0]):
        assert text.startswith(
            "exact=True deals the 4 slices of 3 rows evenly: [1, 1, 1, 1] per rank, not [2, 1, 1, 0]"
        )
        assert "rows per rank: 3, 3, 3, 3" in text
    assert ranks(4)(unevenly_dealt, [3, 3, 3, 2]) == ["", "", "", ""]


def different_metrics():
    def loss_fn(model, batch):
        loss, metrics = row_loss(model, batch)
        return loss, metrics if evener.rank() == 0 else {}

    engine = engine_of(loss_fn)
    try:
        engine.step(mlp_rows(6))
    except evener.EvenerError as error:
        return str(error)
    return ""


def test_ranks_with_different_metrics(ranks):
    assert all("ranks returned different metrics" in text for text in ranks(2)(different_metrics))


def test_dp_refuses_what_couples_rows():
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    with pytest.raises(evener.EvenerError, match=r"cuts a batch over GPUs, which coupled rows .BatchNorm. forbids"):
        engine_of(model=model, strategy="dp", global_batch_size=64)


def test_an_uncaught_error_prints_its_text_and_the_users_line(tmp_path):
    import subprocess
    import sys

    script = tmp_path / "train.py"
    script.write_text(
        "import torch, evener\nmodel = torch.nn.Linear(2, 2)\noptimizer = torch.optim.SGD(model.parameters(), lr=.1)\n"
        "evener.Engine(model, optimizer, lambda m, b: None, device='cpu', precision='bf61')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("evener: precision='bf61' is not known.\n  fix: precision=\"bf16\"\n")
    assert f"at {script}:4" in done.stderr
