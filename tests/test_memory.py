"""The memory microscope: bytes of a transformer layer as the paper has them, each storage once, live and peak, with recomputation."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from minimeg.memory import activation_memory, label
from minimeg.recompute import WATCHERS, checkpoint

S, B, H, A = 128, 2, 256, 8  # sequence, micro-batch, hidden, heads
SBH = S * B * H
WHOLE = 34 + 5 * A * S / H  # bytes in units of sbh: 54


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def dropout(x: Tensor, p: float = 0.1) -> Tensor:
    return x * torch.empty(x.shape, dtype=torch.bool).bernoulli_(1 - p) * (1 / (1 - p))  # one byte an element is kept


class Layer(nn.Module):
    """A pre-norm transformer layer with three dropouts, in bf16. ``core`` runs the middle of attention."""

    def __init__(self, core: Callable[..., Any] = plain) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(H), nn.LayerNorm(H)
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H)
        self.register_buffer("causal", torch.full((S, S), -math.inf).triu(1))
        self.run_core = core
        self.bfloat16()

    def core(self, qkv: Tensor) -> Tensor:
        q, k, v = (part.reshape(S, B * A, H // A).transpose(0, 1) for part in qkv.view(S, B, A, 3, H // A).unbind(3))
        scores = torch.baddbmm(self.causal, q, k.transpose(1, 2), alpha=1 / math.sqrt(H // A))
        return (dropout(scores.softmax(-1)) @ v).transpose(0, 1).reshape(S, B, H)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.proj(self.run_core(self.core, self.qkv(self.norm1(x)))))
        return x + dropout(self.down(F.gelu(self.up(self.norm2(x)))))


def layer_input() -> Tensor:
    return torch.randn(S, B, H, dtype=torch.bfloat16, requires_grad=True)


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Whatever these tests see released was released by reference counting."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---- a layer against the paper -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole_model", [False, True])
@pytest.mark.parametrize(
    ("core", "outer", "expected", "statistics"),
    [(plain, plain, WHOLE, 4), (checkpoint, plain, 34, 4), (plain, checkpoint, 2, 0), (checkpoint, checkpoint, 2, 0)],
    ids=["none", "selective", "full", "full and selective"],
)
def test_bytes_of_a_layer(core: Any, outer: Any, expected: float, statistics: int, whole_model: bool) -> None:
    layer, x = Layer(core), layer_input()
    with activation_memory(layer if whole_model else None) as m:
        y = outer(layer, x)
        assert m.statistics() == statistics * S * B * 2
        assert m.live - m.statistics() == pytest.approx(expected * SBH, rel=1e-3)
        assert m.live == m.peak == sum(saved.nbytes for saved in m.tensors())
        y.sum().backward()
    assert m.live == 0
    # While a layer is replayed, its insides are there; the input it starts from is one of them.
    at_peak = WHOLE if outer is checkpoint and core is plain else max(expected, 34)
    assert m.peak - m.statistics() == pytest.approx(at_peak * SBH, rel=1e-3)
    assert all(p.grad is not None for p in layer.parameters())


def test_the_tensors_of_a_layer_one_by_one() -> None:
    layer = Layer()
    with activation_memory(layer) as m:
        y = layer(layer_input())
    sizes = sorted(saved.nbytes / SBH for saved in m.tensors() if not saved.statistic)
    # masks of h; inputs of norms and linears, the context; mask of the scores; q, k, v; softmax before and after its dropout,
    # MLP before and after GELU
    assert sizes == [1, 1, 2, 2, 2, 2, 2, 4, 6, 8, 8, 8, 8]
    assert m.tensors("now") == m.tensors("peak")
    del y
    assert m.tensors("now") == []
    assert len(m.tensors()) == 17
    assert {name: size.peak / SBH for name, size in m.modules().items()} == {
        "norm1": 2 + 4 / H,
        "qkv": 2,
        "(model)": 6 + 5 * A * S / H + 1 + 1 + 8,
        "proj": 2,
        "norm2": 2 + 4 / H,
        "up": 2,
        "down": 8,
    }


@pytest.mark.parametrize("every", [1, 2, 3])
def test_peak_of_a_stack_of_layers(every: int) -> None:
    """Recomputing groups of k layers: the inputs of the groups and the insides of one (its input counted once)."""
    layers = nn.ModuleList([Layer() for _ in range(3)])

    def group(x: Tensor, first: int) -> Tensor:
        for layer in layers[first : first + every]:
            x = layer(x)
        return x

    with activation_memory(layers) as m:
        y = layer_input()
        for first in range(0, 3, every):
            y = checkpoint(group, y, first)
        groups = -(-3 // every)
        assert m.live == 2 * groups * SBH
        y.sum().backward()
    assert m.live == 0
    largest = [2 * done + min(every, 3 - done * every) * WHOLE for done in range(groups)]
    assert m.peak - m.statistics() == pytest.approx(max(largest) * SBH, rel=1e-3)


def test_the_count_agrees_with_plain_hooks() -> None:
    layer, x = Layer(), layer_input()
    storages: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        if not isinstance(saved, nn.Parameter) and not isinstance(saved._base, nn.Parameter):
            storages[saved.untyped_storage().data_ptr()] = saved.detach()
        return saved.detach()

    with saved_tensors_hooks(pack, lambda saved: saved):
        y = layer(x)
    with activation_memory() as m:
        z = layer(x)
    assert m.live == sum(saved.untyped_storage().nbytes() for saved in storages.values())
    assert y.shape == z.shape


# ---- what counts, and when ---------------------------------------------------------------------------------------------------


def test_each_storage_once_and_no_parameters() -> None:
    x = torch.randn(10, 4, requires_grad=True)
    weight, linear = nn.Parameter(torch.randn(4)), nn.Linear(4, 4)
    with activation_memory() as m:
        y = x * weight  # x; the weight is none
        assert m.live == 160
        z = y[:5].sin() * y[5:].view(5, 4) + x[:5].cos()  # y once, sin(y) 80, x is held already
        assert m.live == 160 + 160 + 80
        w = linear(z) + z @ linear.weight.t()  # z; neither the weight nor its transpose
        assert m.live == 160 + 160 + 80 + 80
        assert [saved.shape for saved in m.tensors()] == [(10, 4), (5, 4), (5, 4), (5, 4)]
        del y, z
        w.sum().backward()
        assert m.live == 0
    assert m.peak == 480
    assert m.curve[-1] == 0
    assert max(m.curve) == 480


def test_buffers_and_their_views_are_left_out_given_the_model() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.mask[:2] * self.mask.detach()[1:3]

    model = Masked()
    for given, expected in ((None, 64), (model, 0)):
        with activation_memory(given) as m:
            y = model(torch.ones(2, 4, requires_grad=True))
        assert m.live == expected
        del y


def test_released_when_the_graph_is_dropped_or_used_up() -> None:
    x = torch.randn(8, requires_grad=True)
    with activation_memory() as m:
        y = x.sin().exp()
        y.sum().backward(retain_graph=True)
        assert m.live == 64
        y.sum().backward()
        assert m.live == 0  # y, an output that its own node saved, is still there, but no longer for backward
        y = x.sin().exp()
        assert m.live == 64
        del y
        assert m.live == 0
        z = x.exp()
    assert m.live == 32
    x.sin()  # outside nothing is counted
    assert m.live == m.curve[-1] == 32
    del z
    assert m.live == 0


def test_measuring_changes_nothing() -> None:
    layer, found = Layer(checkpoint), []
    for watch in (False, True):
        torch.manual_seed(1)
        x = layer_input()
        layer.zero_grad()
        if watch:
            with activation_memory(layer):
                layer(x).sum().backward()
        else:
            layer(x).sum().backward()
        found.append([x.grad, *(p.grad for p in layer.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called")
    assert not any(getattr(module, name) for module in layer.modules() for name in hooks)


def test_autograd_still_guards_what_it_saved() -> None:
    x = torch.randn(4, requires_grad=True)
    with activation_memory():
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_double_backward() -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    with activation_memory() as m:
        (g,) = torch.autograd.grad(x.sin().exp().sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.sum(), x)
    y = x.detach()
    assert torch.allclose(gg, (y.cos() ** 2 - y.sin()) * y.sin().exp())
    del g
    assert m.live == 0


def test_a_large_model_on_paper() -> None:
    with FakeTensorMode(), activation_memory() as m:
        x = torch.empty(2048, 1, 12288, dtype=torch.bfloat16, requires_grad=True)
        y = F.gelu(checkpoint(torch.sin, x))
    assert m.live == 2 * 2048 * 12288 * 2
    del y
    assert m.live == 0


# ---- who: modules, labels ----------------------------------------------------------------------------------------------------


def test_labels_micro_batches_in_flight() -> None:
    x = torch.randn(8, requires_grad=True)
    graphs: list[Tensor] = []

    def forward(k: int) -> None:
        with label(f"micro-batch {k}"):
            graphs.append(checkpoint(lambda x: x.sin().exp(), x * (k + 1.0)).sum())

    with activation_memory() as m:
        for k in range(3):
            forward(k)
        assert m.live == 3 * 32
        with m.label("micro-batch 0"):
            graphs.pop(0).backward()
        assert m.live == 2 * 32
        forward(3)
        with label("outer"), label("micro-batch 1"):
            graphs.pop(0).backward()
        x.sin()
    labels = m.labels()
    assert labels["micro-batch 0"] == (
        0,
        3 * 32 - 32,
    )  # a replay adds sin(x), which exp needs not: exp keeps its own result
    assert labels["micro-batch 2"] == (32, 32)
    assert set(labels) == {f"micro-batch {k}" for k in range(4)} | {""}
    assert m.peak == 4 * 32


def test_a_replay_saves_on_the_account_of_its_forward() -> None:
    with activation_memory() as m:
        with label("micro-batch 0"):
            y = checkpoint(lambda x: x.sin().exp(), torch.ones(8, requires_grad=True))
        with label("another"):
            y.sum().backward()
    assert m.labels() == {"micro-batch 0": (0, 64)}


def test_modules_by_name_also_in_a_replay_that_stops_early() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.Tanh())
    with activation_memory(model) as m:
        x = torch.randn(2, 4, requires_grad=True)
        y = checkpoint(model, x)
        z = checkpoint(model, y)  # the stack of names must be as before the exception
        z.sum().backward()
        model(x)
        w = x.exp()
    # The inputs of both blocks; GELU's input and Tanh's result in the replays; the linear's input only in the last line, since
    # in a replay it is the block's, which is held already.
    assert m.modules() == {"": (32, 64), "0.1": (0, 32), "1": (0, 32), "0.0": (0, 32)}
    assert set(m.modules(depth=1)) == {"", "0", "1"}
    del w
    assert m.live == 0


def test_one_microscope_at_a_time() -> None:
    with activation_memory(), pytest.raises(RuntimeError, match=r"use label\(\)"), activation_memory():
        pass
    with pytest.raises(ZeroDivisionError), activation_memory(nn.Linear(1, 1)):
        raise ZeroDivisionError
    with activation_memory() as m:
        y = torch.ones(1, requires_grad=True).exp()
    assert m.live == 4
    assert y.item() > 2
    assert WATCHERS == []


# ---- in words ----------------------------------------------------------------------------------------------------------------


def test_tables() -> None:
    layer = Layer(checkpoint)
    with activation_memory(layer) as m, m.label("micro-batch 0"):
        y = layer(layer_input())
    tensors = m.table(unit=SBH, formula=34).splitlines()
    assert len(tensors) == 1 + 14 + 2
    assert " ".join(tensors[1].split()) == "[128, 2, 1024] bfloat16 524,288 B 8.000 (model) micro-batch 0"
    assert tensors[-2].split()[:4] == ["peak", "2,230,272", "B", "34.031,"]
    assert tensors[-1] == "measured 34.000 | formula 34.000 | +0.00%"
    modules = m.table("module")
    assert "norm1" in modules
    assert "1,024 B" not in m.table("label")
    assert m.table("label").splitlines()[1].split() == ["micro-batch", "0", "2,230,272", "B", "2,230,272", "B"]
    with pytest.raises(ValueError, match='"tensor", "module" or "label"'):
        m.table("layer")  # type: ignore[arg-type]
    del y
    with activation_memory() as nothing:
        pass
    assert nothing.table().splitlines()[-1].startswith("peak")
    assert nothing.peak == nothing.statistics() == 0
