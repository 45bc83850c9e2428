"""The Function under every parallel linear: equal to the dense one, its overlap, its deferred weight gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimeg.comm import Group, Pending, ledger
from minimeg.linear import WeightGradientStore, accumulate, linear
from minimeg.parallel_state import single_process
from tests.rank_functions import Outside, close, strided, tensor_group

SIZES = (1, 2, 4)
S, B, IN, OUT = 8, 3, 8, 12
MODES = ("local", "all-reduce", "reduce-scatter")


def on_ranks(ranks: Any, t: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if t == 1 else ranks(t, function, *args)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ---- equal to the dense one --------------------------------------------------------------------------------------------------


def column_parts(t: int, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """This rank's rows of one weight [OUT, IN] and bias [OUT]."""
    weight, bias = draw(OUT, IN, seed=1).chunk(t)[rank], 100 * torch.arange(OUT, dtype=torch.float64).chunk(t)[rank]
    return nn.Parameter(weight.clone()), nn.Parameter(bias.clone())


def against_dense(t: int, mode: str, dims: int) -> None:
    """Forward and all three gradients, for contiguous and strided x and dy, of 1 to 3 dimensions."""
    g = tensor_group(t)
    weight, bias = column_parts(t, g.rank)
    shape = {1: (IN,), 2: (S, IN), 3: (S, B, IN)}[dims]
    x_full, dy_full = draw(*shape, seed=2), draw(*shape[:-1], OUT, seed=3)
    dense_x = x_full.clone().requires_grad_()
    dense_w, dense_b = column_parts(1, 0)
    dense_y = F.linear(dense_x, dense_w, dense_b)
    right = dense_y.detach()
    # "local": no sum over the ranks, so the gradient of x is what this rank's columns want.
    dy_seen = dy_full.clone()
    if mode == "local":
        width = OUT // t
        dy_seen[..., : g.rank * width], dy_seen[..., (g.rank + 1) * width :] = 0, 0
    (right_dx,) = torch.autograd.grad(dense_y, dense_x, dy_seen, retain_graph=True)
    right_dw, right_db = torch.autograd.grad(dense_y, (dense_w, dense_b), dy_full)
    mine = (lambda whole: whole.chunk(t)[g.rank]) if mode == "reduce-scatter" else (lambda whole: whole)
    x_plain, dy_plain = mine(x_full).contiguous(), dy_full.chunk(t, -1)[g.rank].contiguous()
    x_layouts = list(strided(x_plain)) if dims > 1 else [("1-D", x_plain, x_plain)]
    dy_layouts = list(strided(dy_plain)) if dims > 1 else [("1-D", dy_plain, dy_plain)]
    for (kind, x, storage), (_, dy, dy_storage) in zip(x_layouts, dy_layouts, strict=True):
        before, dy_before = storage.clone(), dy_storage.clone()
        x = x.detach().requires_grad_()
        y = linear(x, weight, bias, g, input_gradient=mode)  # type: ignore[arg-type]
        dx, dw, db = torch.autograd.grad(y, (x, weight, bias), dy)
        where = f"{mode}, {kind}, {dims}-D, rank {g.rank}"
        assert close(y.detach(), right.chunk(t, -1)[g.rank]), f"{where}: forward"
        assert close(dx, mine(right_dx)), f"{where}: gradient of x"
        assert close(dw, right_dw.chunk(t)[g.rank]), f"{where}: gradient of the weight"
        assert close(db, right_db.chunk(t)[g.rank]), f"{where}: gradient of the bias"
        assert torch.equal(storage, before)
        assert torch.equal(dy_storage, dy_before)


@pytest.mark.parametrize(
    ("mode", "dims"), [(mode, dims) for mode in MODES for dims in (1, 2, 3) if (mode, dims) != ("reduce-scatter", 1)]
)
@pytest.mark.parametrize("t", SIZES)
def test_equals_the_dense_linear(ranks: Any, t: int, mode: str, dims: int) -> None:
    on_ranks(ranks, t, against_dense, t, mode, dims)


def test_no_tokens_give_zero_gradients() -> None:
    weight, bias = column_parts(1, 0)
    for shape in ((0, B, IN), (S, 0, IN), (0, IN)):
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        linear(x, weight, bias, single_process().tp, input_gradient="all-reduce").sum().backward()
        assert x.grad.shape == shape
    assert not weight.grad.any()
    assert not bias.grad.any()


def what_is_computed(t: int) -> dict[str, list[str]]:
    """Which communication and matrix products a backward has, by what needs a gradient."""
    g, found = tensor_group(t), {}
    weight, bias = column_parts(t, g.rank)
    for name, x_wants, weight_wants in (("all", True, True), ("first layer", False, True), ("frozen", True, False)):
        weight.requires_grad_(weight_wants)
        for mode in MODES:
            x = draw(S, B, IN, seed=4).requires_grad_(x_wants)
            y = linear(x, weight, bias, g, input_gradient=mode)  # type: ignore[arg-type]
            with Outside() as outside:
                y.sum().backward()
            found[f"{name}, {mode}"] = [
                op.split("::")[1] for op in outside.operators if op == "aten::mm" or op.startswith("c10d")
            ]
            assert (x.grad is not None) == x_wants
            weight.grad = None
    return found


def test_only_what_is_wanted_is_computed(ranks: Any) -> None:
    """The re-gather of x belongs to the weight's gradient, the sum over the ranks to the input's."""
    gather, total, scatter = "_allgather_base_", "allreduce_", "alltoall_base_"
    for seen in ranks(2, what_is_computed, 2):
        assert seen == {
            "all, local": ["mm", "mm"],
            "all, all-reduce": ["mm", total, "mm"],
            "all, reduce-scatter": ["mm", scatter, gather, "mm"],
            "first layer, local": ["mm"],
            "first layer, all-reduce": ["mm"],
            "first layer, reduce-scatter": [gather, "mm"],
            "frozen, local": ["mm"],
            "frozen, all-reduce": ["mm", total],
            "frozen, reduce-scatter": ["mm", scatter],
        }


# ---- overlap and memory ------------------------------------------------------------------------------------------------------


def order_of_work() -> list[str]:
    """Matrix products, the launch of the all-reduce, and the wait for it, in the order in which backward meets them."""
    g = tensor_group(2)
    outside = Outside()
    spied = replace(g)

    def all_reduce_async(x: Tensor) -> Pending:
        pending = g.all_reduce_async(x)
        outside.operators.append("returned")

        def finish() -> Tensor:
            outside.operators.append("waits")
            return pending.wait()

        return Pending(finish)

    spied.all_reduce_async = all_reduce_async  # type: ignore[method-assign,assignment]
    weight, bias = column_parts(2, g.rank)
    x = draw(S, B, IN, seed=5).requires_grad_()
    y = linear(x, weight, bias, spied, input_gradient="all-reduce")
    with outside:
        y.sum().backward()
    return [op for op in outside.operators if op in ("aten::mm", "c10d::allreduce_", "returned", "waits")]


def test_the_all_reduce_travels_while_the_weight_gradient_is_computed(ranks: Any) -> None:
    order = ["aten::mm", "c10d::allreduce_", "returned", "aten::mm", "waits"]
    assert ranks(2, order_of_work) == [order, order]


def kept_for_backward(t: int, mode: str) -> list[tuple[int, ...]]:
    g = tensor_group(t)
    weight, bias = column_parts(t, g.rank)
    x = draw(S // t if mode == "reduce-scatter" else S, B, IN, seed=6).requires_grad_()
    kept: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(tuple(y.shape)) or y, lambda y: y):
        linear(x, weight, bias, g, input_gradient=mode)  # type: ignore[arg-type]
    return kept


@pytest.mark.parametrize("t", SIZES)
def test_sequence_parallelism_keeps_the_small_piece(ranks: Any, t: int) -> None:
    for mode, rows in (("all-reduce", S), ("reduce-scatter", S // t)):
        kept = on_ranks(ranks, t, kept_for_backward, t, mode)
        assert kept == [[(rows, B, IN), (OUT // t, IN)]] * t


def second_derivative(t: int, mode: str) -> float | str:
    g = tensor_group(t)
    weight, _ = column_parts(t, g.rank)
    x = draw(S, B, IN, seed=7).requires_grad_()
    y = linear(x, weight, None, g, input_gradient=mode)  # type: ignore[arg-type]
    try:
        (first,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
    except ValueError as error:
        return str(error)
    z = F.linear(x, weight)
    (right,) = torch.autograd.grad((z**3).sum(), x, create_graph=True)
    (right,) = torch.autograd.grad(right.sum(), x)
    return float((second - right).abs().max())


def test_second_derivatives_are_right_or_refused(ranks: Any) -> None:
    """What the ranks tell each other inside this Function has no derivative of its own: an error, not a wrong number."""
    for mode in MODES:
        assert second_derivative(1, mode) <= 1e-10
    assert max(ranks(2, second_derivative, 2, "local")) <= 1e-10
    for mode in ("all-reduce", "reduce-scatter"):
        for message in ranks(2, second_derivative, 2, mode):
            assert "a Group does not differentiate" in message


# ---- deferred weight gradients -----------------------------------------------------------------------------------------------


def backward_all(g: Group, mode: str, store: WeightGradientStore | None, keep_order: bool = True) -> list[Tensor]:
    """Two layers, three micro-batches, all gradients; with a store each B comes before all W's."""
    first, first_bias = column_parts(g.size, g.rank)
    second = nn.Parameter(draw(IN, OUT, seed=8).chunk(g.size, 1)[g.rank].contiguous())
    parameters, inputs = [first, first_bias, second], []
    for k in range(3):
        x = draw(S, B, IN, seed=20 + k)
        x = (x.chunk(g.size)[g.rank] if mode == "reduce-scatter" else x).clone().requires_grad_()
        y = linear(x, first, first_bias, g, input_gradient=mode, store=store)  # type: ignore[arg-type]
        z = linear(y.sin(), second, None, g, input_gradient="local", store=store)
        inputs.append(x)
        if store is not None:
            store.record((0, k))
            assert store.recording
        (z**2).sum().backward()
        if store is not None:
            store.stop()
            assert not store.recording
            assert first.grad is None
            assert second.grad is None, "B leaves the weights alone"
            assert first_bias.grad is not None, "biases end in B"
    if store is not None:
        with pytest.raises(
            RuntimeError, match=r"left over at the end of the step: \['\(0, 0\)', '\(0, 1\)', '\(0, 2\)'\]"
        ):
            store.require_empty()
        for k in range(3):
            with ledger() as book:
                store.run((0, k))
            gathers = ["all_gather"] if mode == "reduce-scatter" and g.size > 1 else []
            assert [record.op for record in book.records] == gathers, "W gathers its input again, and nothing else"
        store.require_empty()
    return [*(param.grad for param in parameters), *(x.grad for x in inputs)]


def deferred_equals_at_once(t: int, mode: str) -> None:
    g = tensor_group(t)
    at_once, deferred = backward_all(g, mode, None), backward_all(g, mode, WeightGradientStore())
    assert all(torch.equal(a, b) for a, b in zip(at_once, deferred, strict=True))
    assert not any(grad.requires_grad for grad in deferred)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("t", SIZES)
def test_deferred_weight_gradients_are_bit_equal(ranks: Any, t: int, mode: str) -> None:
    on_ranks(ranks, t, deferred_equals_at_once, t, mode)


def test_a_store_that_does_not_record_changes_nothing() -> None:
    g, store = single_process().tp, WeightGradientStore()
    weight, bias = column_parts(1, 0)
    linear(draw(S, B, IN, seed=9), weight, bias, g, input_gradient="local", store=store).sum().backward()
    assert weight.grad is not None
    store.require_empty()


def test_a_frozen_weight_puts_nothing_aside() -> None:
    store, (weight, bias) = WeightGradientStore(), column_parts(1, 0)
    weight.requires_grad_(False)
    y = linear(draw(S, B, IN, seed=9), weight, bias, single_process().tp, input_gradient="local", store=store)
    store.record("B")
    y.sum().backward()
    store.stop()
    store.run("B")
    assert weight.grad is None
    assert bias.grad is not None


def test_a_store_finds_every_mistake_of_its_caller() -> None:
    store, done = WeightGradientStore(), []
    store.record("a")
    store.put(lambda: done.append("a1"))
    store.put(lambda: done.append("a2"))
    store.stop()
    with pytest.raises(RuntimeError, match="weight gradients of a were put aside before and never run"):
        store.record("a")
    store.record("b")
    store.put(lambda: done.append("b1"))
    store.stop()
    with pytest.raises(RuntimeError, match="no weight gradients were put aside for c: its B must come before its W"):
        store.run("c")
    store.run("b")
    store.run("a")
    assert done == ["b1", "a1", "a2"]
    with pytest.raises(RuntimeError, match="no weight gradients were put aside for a"):
        store.run("a")
    store.require_empty()
    store.record("a")  # the next step uses the same keys
    store.stop()
    store.run("a")
    store.require_empty()


def test_accumulate_takes_the_first_and_adds_the_rest() -> None:
    param, first = nn.Parameter(torch.zeros(2)), torch.tensor([1.0, 2.0])
    accumulate(param, first)
    assert param.grad is first
    accumulate(param, torch.tensor([10.0, 20.0]))
    assert param.grad.tolist() == [11, 22]
