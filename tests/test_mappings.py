"""f, g and their relatives: forward, backward, and that backward is the transpose, with integers and with real numbers.

What the ranks computed is sent home and judged here, by sums that use no communication of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg import mappings as m
from minimeg.comm import Group, ledger
from minimeg.parallel_state import single_process
from tests.rank_functions import close, strided, tensor_group

SIZES = (1, 2, 3, 4)


def gather_replicated(x: Tensor, group: Group) -> Tensor:
    return m.gather_from_sequence_parallel_region(x, group, tensor_parallel_output_grad=False)


# name -> (mapping, kind of input, kind of output, operation of forward, of backward)
#   R replicated: one tensor, of which every rank holds a copy    S sharded: parts of one tensor
#   P: every rank has a tensor of its own; what counts is their sum
TABLE: dict[str, tuple[Callable[..., Tensor], str, str, str | None, str | None]] = {
    "f": (m.copy_to_tensor_model_parallel_region, "R", "P", None, "all_reduce"),
    "g": (m.reduce_from_tensor_model_parallel_region, "P", "R", "all_reduce", None),
    "scatter last": (m.scatter_to_tensor_model_parallel_region, "R", "S", None, "all_gather"),
    "gather last": (m.gather_from_tensor_model_parallel_region, "S", "R", "all_gather", None),
    "scatter first": (m.scatter_to_sequence_parallel_region, "R", "S", None, "all_gather"),
    "gather first, sharded use": (m.gather_from_sequence_parallel_region, "S", "P", "all_gather", "reduce_scatter"),
    "gather first, replicated use": (gather_replicated, "S", "R", "all_gather", None),
    "g-bar": (m.reduce_scatter_to_sequence_parallel_region, "P", "S", "reduce_scatter", "all_gather"),
    "gather last, sharded use": (
        m.all_gather_last_dim_from_tensor_parallel_region, "S", "P", "all_gather", "reduce_scatter",
    ),
    "reduce-scatter last": (
        m.reduce_scatter_last_dim_to_tensor_parallel_region, "P", "S", "reduce_scatter", "all_gather",
    ),
}  # fmt: skip


def right_forward(name: str, xs: list[Tensor]) -> list[Tensor]:
    """What each rank should get from what all ranks put in."""
    t, total = len(xs), torch.stack(xs).sum(0)
    last = -1 if "last" in name else 0
    if name == "f":
        return xs
    if name == "g":
        return [total] * t
    if name.startswith("scatter"):
        return list(xs[0].tensor_split(t, last))
    if name.startswith("gather"):
        return [torch.cat(xs, last)] * t
    return list(total.tensor_split(t, last))


def right_backward(name: str, ys: list[Tensor]) -> list[Tensor]:
    """The gradient that each rank should get, from the gradients that all ranks have for their outputs."""
    t, total = len(ys), torch.stack(ys).sum(0)
    last = -1 if "last" in name else 0
    if name == "f":
        return [total] * t
    if name == "g":
        return ys
    if name.startswith("scatter"):
        return [torch.cat(ys, last)] * t
    if name in ("gather last", "gather first, replicated use"):
        return list(ys[0].tensor_split(t, last))
    if name.startswith("gather"):
        return list(total.tensor_split(t, last))
    return [torch.cat(ys, last)] * t


def draw(kind: str, shape: tuple[int, ...], rank: int, seed: int, integers: bool) -> Tensor:
    """A replicated tensor is the same on every rank, the others differ."""
    generator = torch.Generator().manual_seed(1000 * seed + (0 if kind == "R" else rank + 1))
    if integers:
        return torch.randint(-9, 10, shape, generator=generator).double()
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shapes(name: str, t: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of input and output on one rank; the whole tensor is [2t, 3, 4t]."""
    whole = (2 * t, 3, 4 * t)
    cut = (2 * t, 3, 4) if "last" in name else (2, 3, 4 * t)
    _, source, target, _, _ = TABLE[name]
    return (cut if source == "S" else whole), (cut if target == "S" else whole)


def through(t: int, integers: bool) -> dict[str, Any]:
    """Each mapping on this rank: x, y = mapping(x), the gradient v of y, the gradient of x, and what was communicated."""
    g, result = tensor_group(t), {}
    for seed, (name, (mapping, source, target, _, _)) in enumerate(TABLE.items()):
        of_x, of_y = shapes(name, t)
        x, v = draw(source, of_x, g.rank, seed, integers), draw(target, of_y, g.rank, seed + 100, integers)
        leaf = x.clone().requires_grad_()
        with ledger() as book:
            y = mapping(leaf, g)
            y.backward(v)
        said = [(record.op, record.phase, record.payload) for record in book.records]
        result[name] = (x, y.detach(), v, leaf.grad, said)
        assert torch.equal(leaf.detach(), x), f"{name} changed its input"
    return result


def on_ranks(ranks: Any, t: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if t == 1 else ranks(t, function, *args)


def inner(kind: str, left: list[Tensor], right: list[Tensor]) -> float:
    """<left, right> over all elements and ranks; a replicated tensor counts once."""
    products = [(a * b).sum().item() for a, b in zip(left, right, strict=True)]
    return products[0] if kind == "R" else sum(products)


@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("t", SIZES)
def test_forward_backward_and_the_adjoint_identity(ranks: Any, t: int, integers: bool) -> None:
    """<f x, v> = <x, f* v>: exactly with integers."""
    seen = on_ranks(ranks, t, through, t, integers)
    for name, (_, source, target, forward, backward) in TABLE.items():
        xs, ys, vs, grads, said = zip(*(one[name] for one in seen), strict=True)
        for rank, (y, right) in enumerate(zip(ys, right_forward(name, list(xs)), strict=True)):
            assert close(y, right, 0 if integers else 1e-14), f"{name}: forward on rank {rank}"
        for rank, (grad, right) in enumerate(zip(grads, right_backward(name, list(vs)), strict=True)):
            assert close(grad, right, 0 if integers else 1e-14), f"{name}: backward on rank {rank}"
        here, there = inner(target, list(ys), list(vs)), inner(source, list(xs), list(grads))
        assert here != 0, name
        assert here == there if integers else abs(here - there) <= 1e-10, f"{name}: {here} and {there}"
        whole = 2 * t * 3 * 4 * t * 8
        expected = [(op, when, whole) for op, when in ((forward, "forward"), (backward, "backward")) if op and t > 1]
        assert list(said) == [expected] * t, f"{name}: what is said, when, and of how many bytes"


# ---- CASE 06: one loss of which every rank holds a copy ----------------------------------------------------------------------


def slice_of_dense(t: int) -> list[tuple[float, float]]:
    """y = g(w_r f(x)): values and gradients of the specimen, then of two layers in a row."""
    g, found = tensor_group(t), []
    for layers in (1, 2):
        x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
        w = torch.tensor(g.rank + 1.0, dtype=torch.float64, requires_grad=True)
        y = x
        for _ in range(layers):
            y = m.reduce_from_tensor_model_parallel_region(w * m.copy_to_tensor_model_parallel_region(y, g), g)
        y.backward()
        found.append((y.item(), x.grad.item(), w.grad.item()))
    return found


@pytest.mark.parametrize("t", SIZES)
def test_gradient_of_a_replicated_result_is_the_dense_one(ranks: Any, t: int) -> None:
    """CASE 06: neither t times too large (torch's own all-reduce) nor a rank's share only (f forgotten)."""
    total = t * (t + 1) // 2  # 10 at t = 4
    for one, two in on_ranks(ranks, t, slice_of_dense, t):
        assert one == (total, total, 1)
        assert two == (total**2, total**2, 2 * total)


def vocabulary_slice(t: int) -> float:
    """log-sum-exp of logits cut over t, by mappings alone: largest error of the local gradient against the dense slice."""
    g = tensor_group(t)
    dense = torch.randn(5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    (right,) = torch.autograd.grad(dense.logsumexp(-1).pow(2).sum(), dense)
    local = dense.detach().chunk(t, -1)[g.rank].clone().requires_grad_()
    total = m.reduce_from_tensor_model_parallel_region(local.exp().sum(-1), g)
    (mine,) = torch.autograd.grad(total.log().pow(2).sum(), local)
    return float((mine - right.chunk(t, -1)[g.rank]).abs().max())


@pytest.mark.parametrize("t", SIZES)
def test_gradient_of_a_shard_is_the_slice_of_the_dense_one(ranks: Any, t: int) -> None:
    """CASE 06, with shards that do not own the largest value."""
    assert max(on_ranks(ranks, t, vocabulary_slice, t)) <= 1e-12


# ---- used twice, used strangely ----------------------------------------------------------------------------------------------


def used_again(t: int) -> dict[str, Any]:
    """g(h) + h, and f(x) + x with another upstream gradient on every rank: an in-place all-reduce corrupts both."""
    g = tensor_group(t)
    h = torch.tensor([g.rank + 1.0], requires_grad=True)
    doubled = h * 1  # not a leaf: an in-place change would raise nothing
    out = m.reduce_from_tensor_model_parallel_region(doubled, g) + doubled
    out.backward(torch.tensor([1.0]))
    x = torch.tensor([5.0], requires_grad=True)
    y = m.copy_to_tensor_model_parallel_region(x, g) + x
    upstream = torch.tensor([g.rank + 1.0])
    y.backward(upstream)
    return {
        "g(h) + h": out.item(),
        "h.grad": h.grad.item(),
        "f(x) + x": y.item(),
        "x.grad": x.grad.item(),
        "v": upstream.item(),
    }


@pytest.mark.parametrize("t", SIZES)
def test_the_argument_of_a_mapping_may_be_used_again(ranks: Any, t: int) -> None:
    total = t * (t + 1) / 2
    for rank, seen in enumerate(on_ranks(ranks, t, used_again, t)):
        mine = rank + 1  # 11 12 13 14 at t = 4; in place it would be 20 on every rank
        assert seen == {"g(h) + h": total + mine, "h.grad": 2, "f(x) + x": 10, "x.grad": total + mine, "v": mine}


def strided_inputs(t: int) -> int:
    """Strided inputs, and strided gradients: the .sum() of an output sends an expanded one."""
    g, compared = tensor_group(t), 0
    for name, (mapping, source, target, _, _) in TABLE.items():
        of_x, of_y = shapes(name, t)
        plain = draw(source, of_x, g.rank, 7, integers=True)
        leaf = plain.clone().requires_grad_()
        right = mapping(leaf, g)
        right.sum().backward()
        v = draw(target, of_y, g.rank, 8, integers=True)
        (right_v,) = torch.autograd.grad(mapping(leaf, g), leaf, v)
        for (kind, x, storage), (_, strided_v, v_storage) in zip(strided(plain), strided(v), strict=True):
            before, v_before = storage.clone(), v_storage.clone()
            x = x.detach().requires_grad_()
            y = mapping(x, g)
            (ones,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            (mine,) = torch.autograd.grad(y, x, strided_v)
            assert torch.equal(y, right), f"{name} of a {kind}"
            assert torch.equal(ones, leaf.grad), f"gradient of {name} of a {kind}"
            assert torch.equal(mine, right_v), f"{kind} gradient of {name}"
            assert torch.equal(storage, before), f"{name} of a {kind} changed it"
            assert torch.equal(v_storage, v_before), f"{name} changed its {kind} gradient"
            compared += 1
    return compared


@pytest.mark.parametrize("t", [2, 3])
def test_strided_inputs_and_gradients(ranks: Any, t: int) -> None:
    assert on_ranks(ranks, t, strided_inputs, t) == [len(TABLE) * 5] * t


def second_derivatives(t: int) -> dict[str, float]:
    """Largest relative errors of second derivatives, against the formulas of one process."""
    g, errors = tensor_group(t), {}
    total = t * (t + 1) / 2
    w = torch.tensor(g.rank + 1.0, dtype=torch.float64)

    def error(loss: Tensor, x: Tensor, right: Tensor) -> float:
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        return float((second - right.detach()).abs().max() / right.detach().abs().max())

    # One loss, replicated: (sum_r w_r x^2)^2 = W^2 x^4, whose second derivative is 12 W^2 x^2.
    x = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    z = m.reduce_from_tensor_model_parallel_region(w * m.copy_to_tensor_model_parallel_region(x, g) ** 2, g)
    errors["f and g"] = error((z**2).sum(), x, 12 * total**2 * x**2)
    # The same with the tokens cut over the ranks, whose losses add up.
    whole = torch.linspace(-2, 2, 3 * t, dtype=torch.float64)
    x = whole.chunk(t)[g.rank].clone().requires_grad_()
    z = m.reduce_scatter_to_sequence_parallel_region(w * m.gather_from_sequence_parallel_region(x, g) ** 2, g)
    errors["sequence"] = error((z**2).sum(), x, 12 * total**2 * x**2)
    z = m.reduce_scatter_last_dim_to_tensor_parallel_region(
        w * m.all_gather_last_dim_from_tensor_parallel_region(x, g) ** 2, g
    )
    errors["last dimension"] = error((z**2).sum(), x, 12 * total**2 * x**2)
    # Cut, cube each part, join: x^3 everywhere. The loss is replicated again.
    x = whole.clone().requires_grad_()
    for name, scatter, gather in (
        (
            "scatter and gather last",
            m.scatter_to_tensor_model_parallel_region,
            m.gather_from_tensor_model_parallel_region,
        ),
        ("scatter and gather first", m.scatter_to_sequence_parallel_region, gather_replicated),
    ):
        errors[name] = error((gather(scatter(x, g) ** 3, g) ** 2).sum(), x, 30 * x**4)
    return errors


@pytest.mark.parametrize("t", SIZES)
def test_second_derivatives(ranks: Any, t: int) -> None:
    for errors in on_ranks(ranks, t, second_derivatives, t):
        assert max(errors.values()) <= 1e-12, errors
        assert len(errors) == 5


# ---- edges -------------------------------------------------------------------------------------------------------------------


def test_a_group_of_one_rank_is_the_identity() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    for name, (mapping, *_) in TABLE.items():
        assert mapping(x, single_process().tp) is x, name


def refusals(t: int) -> None:
    g, odd = tensor_group(t), torch.ones(t + 1, t + 1, dtype=torch.float64, requires_grad=True)
    shape = rf"\[{t + 1}, {t + 1}\]"
    with ledger() as book:
        for name, which in (("scatter first", "first"), ("scatter last", "last")):
            with pytest.raises(
                ValueError, match=rf"the {which} dimension of shape {shape} must be a multiple of the {t} ranks"
            ):
                TABLE[name][0](odd, g)
            with pytest.raises(ValueError, match=rf"the {which} dimension of shape \[\]"):
                TABLE[name][0](torch.tensor(1.0), g)
        for name in ("g-bar", "reduce-scatter last"):
            with pytest.raises(ValueError, match=rf"of shape {shape} must be a multiple of the group's {t} ranks"):
                TABLE[name][0](odd, g)
    assert book.records == []


@pytest.mark.parametrize("t", [2, 4])
def test_what_does_not_divide_is_refused(ranks: Any, t: int) -> None:
    on_ranks(ranks, t, refusals, t)


def kinds_of_numbers(t: int) -> None:
    g = tensor_group(t)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.full((t, 2), g.rank + 1.0, dtype=dtype, requires_grad=True)
        for name, (mapping, *_) in TABLE.items():
            if name == "scatter last":
                continue  # 2 columns are not a multiple of t
            y = mapping(x if "reduce-scatter last" not in name else x.t(), g)
            (grad,) = torch.autograd.grad(y.sum(), x)
            assert y.dtype == grad.dtype == dtype, name
    counts = torch.arange(4 * t)
    assert torch.equal(m.scatter_to_tensor_model_parallel_region(counts, g), counts.chunk(t)[g.rank])
    with torch.no_grad():
        assert not m.reduce_from_tensor_model_parallel_region(x, g).requires_grad
    frozen = x.detach()
    assert not m.gather_from_tensor_model_parallel_region(frozen, g).requires_grad


def test_dtypes_and_tensors_without_gradient(ranks: Any) -> None:
    on_ranks(ranks, 4, kinds_of_numbers, 4)
