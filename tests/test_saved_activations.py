"""`saved_activations`: "offload" changes no bit, "int8" is close and says so, and parameters are never touched."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import evener
from evener.engine.cut import Cut
from evener.engine.saved import Cell, Rounded, Saved
from tests.models import seeded
from tests.test_fsdp_gradients import new_engine
from tests.test_recompute import Block, Net, data, loss_fn

ROWS = 14


def tiny(monkeypatch=None):
    """Every tensor counts, however small the models of these tests are."""
    import evener.engine.saved as saved

    saved.Saved.__init__.__defaults__ = (0,)


def train(strategy, what, precision="fp32", recomputed=None, exact=True):
    tiny()
    model = seeded(Net)
    how = {"exact": True} if exact else {}
    engine = new_engine(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn, strategy=strategy, precision=precision,
        activation_checkpointing=recomputed, saved_activations=what, slice_size=4, **how,
    )  # fmt: skip
    cut = Cut(evener.rank(), evener.world_size(), None, 4)
    for k in range(3):
        batch = data(ROWS, seed=k)
        update = engine.step_parts([(i, b - a, tuple(t[a:b] for t in batch)) for i, (a, b) in cut.numbered(ROWS)], ROWS)
    digest = engine.digest()
    engine.close()
    return digest, update.loss


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_offload_changes_no_bit(ranks, precision):
    expected = ranks(1)(train, "single", "keep", precision)[0]
    for recomputed in (None, "full"):
        assert ranks(1)(train, "single", "offload", precision, recomputed)[0] == expected
    assert set(ranks(3)(train, "ddp", "offload", precision)) == {expected}
    assert set(ranks(2)(train, "fsdp", "offload", precision, "every:2")) == {expected}


class Nets:
    """Layers with their own ways of saving: in-place, views, outputs, attention, channels last, no gradient, BatchNorm."""

    class Conv(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
            self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3))
            self.relu, self.head = nn.ReLU(inplace=True), nn.Linear(16, 5)

        def forward(self, x):
            x = self.relu(self.norms[0](self.stem(x.contiguous(memory_format=torch.channels_last))))
            for layer, norm in zip(self.layers, self.norms[1:]):
                y = norm(layer(x))
                y += x
                x = F.max_pool2d(self.relu(y), 2)
            return self.head(x.mean((2, 3)))

        rows = staticmethod(lambda: torch.randn(4, 3, 16, 16))

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(8, 24).requires_grad_(False)
            self.scale, self.head = nn.Parameter(torch.ones(24)), nn.Linear(8, 5)
            self.register_buffer("mask", torch.ones(64, 64).tril())

        def forward(self, x):
            q, k, v = (self.frozen(x) * self.scale).view(4, 64, 3, 2, 4).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(2, 3)).masked_fill(self.mask == 0, -1e9).softmax(3)
            y = F.scaled_dot_product_attention(q, k, F.dropout(weights, 0.1) @ v)
            return self.head(torch.sigmoid(y.transpose(1, 2).reshape(4, 64, 8)).mean(1))

        rows = staticmethod(lambda: torch.randn(4, 64, 8))


def gradients(build, what, precision="fp32", watch=None):
    model = seeded(build)
    saved = Saved(what, model, torch.device("cpu"), small=0) if what != "keep" else None
    torch.manual_seed(1)
    x = build.rows()
    pack = saved.pack if saved else None
    if watch is not None:
        saved.pack = lambda tensor: watch(tensor, pack(tensor))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        if saved is None:
            loss = F.cross_entropy(model(x), torch.arange(4))
        else:
            with saved():
                loss = F.cross_entropy(model(x), torch.arange(4))
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("build", [Nets.Conv, Nets.Attention])
def test_whatever_is_saved_comes_back(build, precision):
    expected = gradients(build, "keep", precision)
    got = gradients(build, "offload", precision)
    assert expected.keys() == got.keys() and all(torch.equal(expected[name], got[name]) for name in got)
    rounded = gradients(build, "int8", precision)
    for name, gradient in expected.items():
        assert not torch.equal(rounded[name], gradient) or gradient.ndim == 1, name
        error = (rounded[name] - gradient).norm() / gradient.norm()
        assert error < 0.03, (name, float(error))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("what", ["offload", "int8"])
@pytest.mark.parametrize("build", [Nets.Conv, Nets.Attention])
def test_parameters_and_what_is_no_activation_stay(build, what, precision):
    """Of everything that was packed: parameters in any shape or cast, buffers, and (int8) integers, masks, statistics."""
    seen = []

    def watch(tensor, cell):
        seen.append((tensor, cell, tensor.requires_grad))
        return cell

    gradients(build, what, precision, watch)
    model = seeded(build)
    shapes = {shape for p in model.parameters() if p.ndim > 1 for shape in (p.shape, p.shape[::-1])}
    of_parameters = [cell for tensor, cell, flows in seen if tensor.shape in shapes and flows]
    assert of_parameters and all(not hasattr(cell, "piece") for cell in of_parameters)
    taken = [tensor for tensor, cell, _ in seen if hasattr(cell, "piece")]
    assert taken and all(tensor.shape != (64, 64) or tensor.dtype == torch.bool for tensor in taken)
    if what == "int8":
        assert all(tensor.is_floating_point() for tensor in taken)
        assert all(not hasattr(cell, "piece") for tensor, cell, _ in seen if tensor.ndim < 2)


def test_memory_is_taken_once():
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    x = torch.randn(16, 8, requires_grad=True)
    for what in ("offload", "int8"):
        saved, cells = Saved(what, model, torch.device("cpu"), small=0), []
        pack = saved.pack
        saved.pack = lambda tensor, pack=pack, cells=cells: cells.append(pack(tensor)) or cells[-1]
        with saved():
            y = x * 1
            loss = sum(layer(y).sum() for layer in model)
        pieces = {id(cell.piece) for cell in cells if hasattr(cell, "piece")}
        assert len(pieces) == 1
        loss.backward()
        cells.clear()
        del loss, y
        assert not saved.pieces


def test_an_output_that_is_saved_twice_is_rounded_once_and_let_go():
    """A ReLU keeps its result, the next layer keeps it too: whole in one and rounded in the other would cost more."""
    for inplace in (False, True):
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace), nn.Linear(8, 8))
        saved, cells = Saved("int8", model, torch.device("cpu"), small=0), []
        pack = saved.pack
        saved.pack = lambda tensor, pack=pack, cells=cells: cells.append(pack(tensor)) or cells[-1]
        with saved():
            model(torch.randn(16, 8)).sum()
        whole = [tuple(cell.tensor.shape) for cell in cells if cell.tensor is not None]
        assert sorted(whole) == [(8, 8), (16, 8)], inplace  # the second weight, and the data


def test_int8_is_off_by_at_most_a_254th_of_its_block():
    generator = torch.Generator().manual_seed(0)
    for dtype, size in ((torch.float32, 1000), (torch.bfloat16, 256), (torch.float64, 5), (torch.float16, 7000)):
        x = (torch.randn(size, generator=generator) * torch.logspace(-3, 3, size)).to(dtype)
        x[:3] = torch.tensor([0.0, -1e-3, 2e-4])
        back = Rounded(x).back()
        assert back.dtype == dtype and back.shape == x.shape
        for a, b in zip(x.split(256), back.split(256)):
            most, eps = float(a.double().abs().max()), torch.finfo(dtype).eps
            bound = torch.where(a.abs() > most / 250, most / 254, most / 127) + most * eps
            assert bool(((a.double() - b.double()).abs() <= bound).all())
            assert torch.equal(a.sign(), b.sign())
    assert torch.equal(Rounded(torch.zeros(300)).back(), torch.zeros(300))
    for bad in (float("nan"), float("inf")):  # a skipped update stays a skipped update
        x = torch.ones(600)
        x[300] = bad
        assert (~torch.isfinite(Rounded(x).back())).sum() == 256


def test_a_tensor_changed_in_place_is_noticed():
    x = torch.ones(3)
    cell = Cell(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified in place"):
        cell.get()


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_offload_with_compile():
    def update(what):
        model = seeded(Block).eval()
        x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(0))
        engine = new_engine(
            model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(),
            strategy="single", compile=True, saved_activations=what,
        )  # fmt: skip
        for _ in range(2):
            engine.step(x)
        digest = engine.digest()
        engine.close()
        return digest

    tiny()
    assert update("offload") == update("keep")


def test_the_contract_line_says_it(tmp_path):
    lines = {}
    for what in ("keep", "offload", "int8"):
        model = seeded(Net)
        with evener.Run(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, data(8), global_batch_size=8,
            precision="fp32", saved_activations=what, dir=tmp_path / "run", save_every=1,
        ) as run:  # fmt: skip
            lines[what] = run.contract_line()
            for update in run.updates(updates=1):
                assert update.loss > 0
            if what == "int8":
                assert str(run.path).endswith("run-3")  # rounding is another run; where activations wait is not
    assert "activations wait on the host" in lines["offload"] and "approximate: int8 activations" in lines["int8"]
    assert "approximate" not in lines["keep"] + lines["offload"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"saved_activations": "disk"}, "keep, offload, int8"),
        (
            {"saved_activations": "int8", "exact": True, "slice_size": 2},
            '"int8" with exact=True: what is kept is rounded',
        ),
        ({"saved_activations": "int8", "compile": True}, '"int8" with compile=True'),
        ({"saved_activations": "offload", "strategy": "dp"}, '"offload" with strategy="dp"'),
    ],
)
def test_what_cannot_be_is_refused(how, text):
    model = nn.Linear(2, 2)
    with pytest.raises(evener.EvenerError) as error:
        new_engine(model, loss=loss_fn, **{"strategy": "single", **how})
    assert text in str(error.value)
