"""Real failures made here in one process, explained from the real exception: kind, and the figures of this case."""

from __future__ import annotations

import collections
import io
import os
import resource
import socket
import warnings

import pytest
import torch
from torch import nn

from evener import explain_error
from evener.errors import CheckpointError


def label_out_of_range():
    nn.functional.cross_entropy(torch.randn(2, 3), torch.tensor([0, 3]))


def embedding_out_of_range():
    nn.Embedding(4, 2)(torch.tensor([4]))


def optimizer_groups_differ():
    two = torch.optim.Adam(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).parameters())
    torch.optim.Adam(nn.Linear(2, 2).parameters()).load_state_dict(two.state_dict())


def saved(value, path):
    torch.save(value, path)
    return path


def truncated_checkpoint(tmp_path):
    path = saved({"w": torch.randn(1000)}, tmp_path / "last.pt")
    path.write_bytes(path.read_bytes()[:1500])
    torch.load(path)


def empty_checkpoint(tmp_path):
    (tmp_path / "last.pt").write_bytes(b"")
    torch.load(tmp_path / "last.pt")


def foreign_pickle(tmp_path):
    torch.load(saved({"when": collections.UserDict(a=1)}, tmp_path / "last.pt"))


def prefixed_keys():
    nn.Linear(2, 2).load_state_dict({f"module.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()})


def compiled_keys():
    nn.Linear(2, 2).load_state_dict({f"_orig_mod.{key}": value for key, value in nn.Linear(2, 2).state_dict().items()})


def another_head():
    nn.Linear(2, 9).load_state_dict(nn.Linear(2, 80).state_dict())


def another_architecture():
    nn.Linear(2, 2).load_state_dict({"encoder.w": torch.ones(1), "encoder.b": torch.ones(1)})


def backward_twice():
    loss = (torch.ones(1, requires_grad=True) ** 2).sum()
    loss.backward()
    loss.backward()


def everything_frozen():
    nn.Linear(2, 1).requires_grad_(False)(torch.ones(1, 2)).sum().backward()


def changed_in_place():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y += 1
    y.sum().backward()


def mixed_dtypes():
    nn.Linear(2, 2, dtype=torch.bfloat16)(torch.ones(1, 2))


def shapes_that_do_not_fit():
    nn.Linear(3, 2)(torch.ones(1, 2))


def scaler_without_gradients():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1, requires_grad=True).sum()).backward()
    scaler.step(optimizer)


def scaler_unscales_twice():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def scaler_with_half_weights():
    model = nn.Linear(2, 1).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)


def half_overflow():
    torch.zeros(2, dtype=torch.float16).masked_fill(torch.tensor([True, False]), -1e9)


def nan_under_anomaly_detection():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            (torch.zeros(1, requires_grad=True).sqrt() * 0).sum().backward()


class Rows:
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2:
            raise ValueError(f"row {i} has no image")
        return torch.zeros(i + 1)


def row_that_raises_in_a_worker():
    list(torch.utils.data.DataLoader(Rows(), batch_size=1, num_workers=1))


def rows_of_different_length():
    list(torch.utils.data.DataLoader(Rows(), batch_size=2))


def lambda_under_spawn():
    loader = torch.utils.data.DataLoader(
        Rows(), num_workers=1, collate_fn=lambda rows: rows, multiprocessing_context="spawn"
    )
    list(loader)


def recomputed_differently():
    calls = []

    def region(x):
        calls.append(1)
        return x.exp() if len(calls) == 1 else x[:1].exp()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(region, x, use_reentrant=False).sum().backward()


def port_taken():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        torch.distributed.TCPStore("localhost", port, 1, True)


def too_many_files():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, hard))
    try:
        while True:
            kept.append(open(os.devnull))  # noqa: SIM115
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for file in kept:
            file.close()


def disk_full():
    with open("/dev/full", "w") as file:
        file.write("x" * 10000)


def disk_full_in_torch_save():
    torch.save(torch.ones(100_000), "/dev/full")


def no_cuda():
    torch.zeros(1, device="cuda")


def no_process_group():
    torch.distributed.all_reduce(torch.ones(1))


def no_launcher():
    torch.distributed.init_process_group("gloo")


def no_optimizer_parameters():
    torch.optim.SGD([], lr=0.1)


def whole_model_of_a_lost_class():
    class Lost:
        pass

    Lost.__module__, Lost.__qualname__ = __name__, "Lost"
    globals()["Lost"] = Lost
    file = io.BytesIO()
    torch.save(Lost(), file)
    del globals()["Lost"]
    file.seek(0)
    torch.load(file, weights_only=False)


def module_that_is_not_there():
    import amp_C  # noqa: F401


def file_that_is_not_there():
    open("/data/shards/00017.bin")  # noqa: SIM115


def ascii_only():
    "中文".encode("ascii")


def evener_refuses():
    raise CheckpointError("The checkpoint is torn.", evidence=["runs/a/checkpoint-12"], fix=["use the one before"])


def own_bug():
    {}["labels"]


EXPECTED = {
    label_out_of_range: ("device-assert-label", "cpu", "3"),
    embedding_out_of_range: ("device-assert-index", None, ""),
    optimizer_groups_differ: ("optimizer-state-mismatch", None, ""),
    truncated_checkpoint: ("ckpt-corrupt", None, ""),
    empty_checkpoint: ("ckpt-corrupt", None, ""),
    foreign_pickle: ("ckpt-weights-only", None, "UserDict"),
    prefixed_keys: ("ckpt-prefix", "prefix-in-checkpoint", "'module.'"),
    compiled_keys: ("ckpt-prefix", "prefix-in-checkpoint", "'_orig_mod.'"),
    another_head: ("ckpt-size-mismatch", None, "[80, 2]"),
    another_architecture: ("ckpt-prefix", "other-architecture", "2 missing, 2 unexpected"),
    backward_twice: ("backward-twice", None, ""),
    everything_frozen: ("no-grad-fn", None, ""),
    changed_in_place: ("ddp-buffer-inplace", "own-operation", ""),
    mixed_dtypes: ("dtype-mismatch", None, "BFloat16"),
    shapes_that_do_not_fit: ("shape-mismatch", None, "1x2 and 3x2"),
    scaler_without_gradients: ("amp-no-inf-checks", None, ""),
    scaler_unscales_twice: ("amp-unscale-twice", None, ""),
    scaler_with_half_weights: ("amp-unscale-fp16", None, ""),
    half_overflow: ("fp16-constant-overflow", None, ""),
    nan_under_anomaly_detection: ("not-finite", None, "SqrtBackward0"),
    row_that_raises_in_a_worker: ("dataloader-worker-exception", None, "ValueError"),
    rows_of_different_length: ("collate-shapes", None, "[1]"),
    lambda_under_spawn: ("dataloader-pickle", None, "lambda"),
    recomputed_differently: ("checkpoint-recompute", None, ""),
    port_taken: ("port-in-use", None, ""),
    too_many_files: ("dataloader-too-many-files", None, ""),
    disk_full: ("disk-full", None, ""),
    disk_full_in_torch_save: ("disk-full", None, ""),
    no_cuda: ("torch-without-cuda", None, ""),
    no_process_group: ("process-group-missing", None, ""),
    no_launcher: ("rendezvous-timeout", "no-environment", "evener run"),
    no_optimizer_parameters: ("optimizer-empty", None, ""),
    whole_model_of_a_lost_class: ("ckpt-pickle-class", None, "Lost"),
    module_that_is_not_there: ("missing-cuda-ext", None, "amp_C"),
    file_that_is_not_there: ("file-missing", None, "/data/shards/00017.bin"),
    ascii_only: ("locale-encoding", None, "ascii"),
    evener_refuses: ("evener-error", None, "use the one before"),
    own_bug: ("python-exception", None, "labels"),
}


@pytest.mark.parametrize("fail", EXPECTED, ids=lambda fail: fail.__name__)
def test_a_real_exception_is_explained(fail, tmp_path, monkeypatch):
    kind, sub, told = EXPECTED[fail]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    arguments = (tmp_path,) if fail.__code__.co_argcount else ()
    with pytest.raises(BaseException) as caught:
        fail(*arguments)
    for language in ("en", "zh"):
        answer = explain_error(caught.value, language=language)
        assert (answer.kind, answer.sub_cause) == (kind, sub), str(answer)
        assert answer.culprit_known and answer.culprit_rank is None, "one process: nobody else can be to blame"
        assert "{" not in answer.summary.replace("{}", ""), "every figure is filled"
        if language == "en":
            assert told in str(answer)


def test_the_place_of_an_unknown_exception_is_the_users_line():
    with pytest.raises(KeyError) as caught:
        own_bug()
    answer = explain_error(caught.value, language="en")
    assert "test_explain_real_errors.py" in answer.summary and answer.summary.endswith(": 'labels'")


def test_the_language_follows_the_locale(monkeypatch):
    error = RuntimeError("Attempting to unscale FP16 gradients.")
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert "可训练" in explain_error(error).summary
    monkeypatch.setenv("LC_ALL", "C")
    assert "trainable" in explain_error(error).summary
