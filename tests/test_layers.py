"""The layers that tensor parallelism cuts: equal to the dense ones for every number of ranks, and what they say to each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimeg.comm import Group, ledger
from minimeg.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding, check_range
from minimeg.models.config import GPTConfig
from minimeg.models.transformer import TransformerLayer
from minimeg.parallel_state import single_process
from minimeg.parameter import initialise, name_globally
from tests.rank_functions import Outside, close, strided, tensor_group

SIZES = (1, 2, 4)
S, B, IN, OUT = 8, 3, 8, 12


def on_ranks(ranks: Any, t: int, function: Any, *args: Any) -> list[Any]:
    return [function(*args)] if t == 1 else ranks(t, function, *args)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fill(param: nn.Parameter, values: Tensor) -> None:
    with torch.no_grad():
        param.copy_(values)


class Dense:
    """The linear in one process: its output and gradients for the loss <y, c>."""

    def __init__(self, x: Tensor, c: Tensor, biased: bool = True) -> None:
        self.weight = draw(OUT, IN, seed=1).requires_grad_()
        self.bias = (100 * torch.arange(OUT, dtype=torch.float64)).requires_grad_()
        x = x.detach().clone().requires_grad_()
        y = F.linear(x, self.weight, self.bias if biased else None)
        (y * c).sum().backward()
        self.x_grad, self.y = x.grad, y.detach()
        self.bias_grad = self.bias.grad if biased else None


# ---- linears -----------------------------------------------------------------------------------------------------------------


def column(t: int, options: dict[str, bool], dims: int) -> int:
    g, compared = tensor_group(t), 0
    sp, gathers = options.get("sequence_parallel", False), options.get("gather_output", False)
    skips, biased = options.get("skip_bias_add", False), options.get("bias", True)
    layer = ColumnParallelLinear(IN, OUT, group=g, **options).double()
    shape = (S, B) if dims == 3 else (S,)
    x_full, c = draw(*shape, IN, seed=2), draw(*shape, OUT, seed=3)
    dense = Dense(x_full, c, biased)
    width, r = OUT // t, g.rank
    fill(layer.weight, dense.weight.detach()[r * width : (r + 1) * width])
    if biased:
        fill(layer.bias, dense.bias.detach()[r * width : (r + 1) * width])
    assert layer.weight.shape == (width, IN)
    x_mine = x_full[r * S // t : (r + 1) * S // t] if sp else x_full
    for kind, x, storage in strided(x_mine):
        before = storage.clone()
        x = x.detach().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        if skips:
            assert isinstance(y, tuple)
            y, bias = y
            assert bias is layer.bias
            if gathers and biased:
                bias = torch.cat(tuple(g.all_gather(bias.detach().unsqueeze(0)))).requires_grad_()
            y = y if bias is None else y + bias
        mine = slice(0, OUT) if gathers else slice(r * width, (r + 1) * width)
        where = f"{options} {kind} {dims}-D at t={t}, rank {r}"
        assert close(y.detach(), dense.y[..., mine]), f"{where}: forward"
        (y * c[..., mine]).sum().backward()
        x_grad = dense.x_grad[r * S // t : (r + 1) * S // t] if sp else dense.x_grad
        assert close(x.grad, x_grad), f"{where}: gradient of x"
        assert close(layer.weight.grad, dense.weight.grad[r * width : (r + 1) * width]), f"{where}: of the weight"
        if biased and not (skips and gathers):
            assert close(layer.bias.grad, dense.bias_grad[r * width : (r + 1) * width]), f"{where}: of the bias"
        assert torch.equal(storage, before)
        compared += 1
    return compared


def row(t: int, options: dict[str, bool], dims: int) -> int:
    g, compared = tensor_group(t), 0
    sp, parallel = options.get("sequence_parallel", False), options.get("input_is_parallel", True)
    skips, biased = options.get("skip_bias_add", False), options.get("bias", True)
    layer = RowParallelLinear(IN, OUT, group=g, **options).double()
    shape = (S, B) if dims == 3 else (S,)
    x_full, c = draw(*shape, IN, seed=2), draw(*shape, OUT, seed=3)
    dense = Dense(x_full, c, biased)
    width, r = IN // t, g.rank
    columns, tokens = slice(r * width, (r + 1) * width), slice(r * S // t, (r + 1) * S // t) if sp else slice(0, S)
    fill(layer.weight, dense.weight.detach()[:, columns])
    if biased:
        fill(layer.bias, dense.bias.detach())
        assert layer.bias.shape == (OUT,)
        assert layer.bias.shard.partial_over_tp == (sp and t > 1)
    assert layer.weight.shape == (OUT, width)
    for kind, x, storage in strided(x_full[..., columns] if parallel else x_full):
        before = storage.clone()
        x = x.detach().requires_grad_()
        layer.zero_grad()
        z = layer(x)
        if skips:
            z, bias = z
            assert bias is layer.bias
            z = z if bias is None else z + bias
        where = f"{options} {kind} {dims}-D at t={t}, rank {r}"
        assert close(z.detach(), dense.y[tokens]), f"{where}: forward"
        (z * c[tokens]).sum().backward()
        x_grad = dense.x_grad[..., columns] if parallel else dense.x_grad
        assert close(x.grad, x_grad), f"{where}: gradient of x"
        assert close(layer.weight.grad, dense.weight.grad[:, columns]), f"{where}: gradient of the weight"
        if biased:  # whole on every rank; under sequence parallelism the sum over the ranks is
            grad = g.all_reduce(layer.bias.grad) if sp else layer.bias.grad
            assert close(grad, dense.bias_grad), f"{where}: gradient of the bias"
        assert torch.equal(storage, before)
        compared += 1
    return compared


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"gather_output": True},
        {"sequence_parallel": True},
        {"skip_bias_add": True},
        {"skip_bias_add": True, "gather_output": True},
        {"skip_bias_add": True, "bias": False, "sequence_parallel": True},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("t", SIZES)
def test_column_parallel_equals_dense(ranks: Any, t: int, options: dict[str, bool], dims: int) -> None:
    assert on_ranks(ranks, t, column, t, options, dims) == [5] * t


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"input_is_parallel": False},
        {"sequence_parallel": True},
        {"skip_bias_add": True},
        {"skip_bias_add": True, "sequence_parallel": True},
        {"skip_bias_add": True, "bias": False},
    ],
    ids=lambda options: "+".join(options) or "plain",
)
@pytest.mark.parametrize("t", SIZES)
def test_row_parallel_equals_dense(ranks: Any, t: int, options: dict[str, bool], dims: int) -> None:
    """CASE 08: a bias of 100, 200, ... that every rank added would show as (t - 1) times itself."""
    assert on_ranks(ranks, t, row, t, options, dims) == [5] * t


def specimen(t: int) -> tuple[list[list[float]], list[list[float]]]:
    """relu(X A) B + (0, 100), small enough to compute in the head; and what is said."""
    g = tensor_group(t)
    a = torch.tensor([[1.0, -1, 2, 0], [0, 1, -1, 1]])
    b = torch.tensor([[1.0, 0], [2, 1], [0, 3], [1, 1]])
    first, second = ColumnParallelLinear(2, 4, group=g, bias=False), RowParallelLinear(4, 2, group=g)
    width, r = 4 // t, g.rank
    fill(first.weight, a.t()[r * width : (r + 1) * width])
    fill(second.weight, b.t()[:, r * width : (r + 1) * width])
    fill(second.bias, torch.tensor([0.0, 100.0]))
    hidden = torch.relu(first(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    partial = (hidden @ second.weight.t()).tolist()
    return second(hidden).tolist(), partial


@pytest.mark.parametrize("t", SIZES)
def test_column_then_row_on_a_specimen(ranks: Any, t: int) -> None:
    """CASE 08: the bias is added after the sum, once. With it inside: 5 and 100 t + 3."""
    seen = on_ranks(ranks, t, specimen, t)
    assert [out for out, _ in seen] == [[[5, 103], [9, 111]]] * t
    if t == 2:
        assert [partial for _, partial in seen] == [[[3, 1], [5, 1]], [[2, 2], [4, 10]]]


# ---- the vocabulary ----------------------------------------------------------------------------------------------------------


def look_up(t: int, v: int, sp: bool) -> None:
    g, h = tensor_group(t), 4
    layer = VocabParallelEmbedding(v, h, group=g, sequence_parallel=sp).double()
    rows = -(-v // t)
    table = draw(t * rows, h, seed=4)  # padded rows filled with numbers that must never be seen
    fill(layer.weight, table[g.rank * rows : (g.rank + 1) * rows])
    assert layer.weight.shape == (rows, h)
    # Every id, the first and the last of each rank's range among them, and id 0 three times.
    ids = torch.cat([torch.arange(v), torch.zeros(2, dtype=torch.int64), torch.arange(v)])
    ids = ids[: len(ids) // (2 * t) * 2 * t].view(-1, 2)  # [s, b] with s a multiple of t
    dense = table.clone().requires_grad_()
    right = F.embedding(ids, dense)
    c = draw(*right.shape, seed=5)
    (right * c).sum().backward()
    s = ids.shape[0]
    mine = slice(g.rank * s // t, (g.rank + 1) * s // t) if sp else slice(0, s)
    for kind, strange, storage in strided(ids):
        before = storage.clone()
        layer.zero_grad()
        out = layer(strange)
        assert torch.equal(out.detach(), right.detach()[mine]), f"v={v}, {kind}, rank {g.rank}"
        (out * c[mine]).sum().backward()
        grad = layer.weight.grad
        assert close(grad, dense.grad[g.rank * rows : (g.rank + 1) * rows]), f"gradient, v={v}, {kind}, rank {g.rank}"
        real = max(0, min(rows, v - g.rank * rows))
        assert not grad[real:].any(), "padding has no gradient"
        assert torch.equal(storage, before)
    assert not layer(ids).isnan().any()


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("v", [2, 5, 8, 27])
@pytest.mark.parametrize("t", SIZES)
def test_embedding_equals_dense(ranks: Any, t: int, v: int, sp: bool) -> None:
    """CASES 11 and 15: every id, any vocabulary (of 2 over 4 ranks two have none), padding never touched."""
    on_ranks(ranks, t, look_up, t, v, sp)


def edges_of_the_vocabulary(t: int) -> dict[str, Any]:
    g = tensor_group(t)
    layer = VocabParallelEmbedding(8, 1, group=g)
    rows = 8 // t
    fill(layer.weight, torch.arange(8.0).view(8, 1)[g.rank * rows : (g.rank + 1) * rows])
    edges = torch.tensor([0, rows - 1, rows % 8, 5, 7])
    errors = []
    with ledger() as book:
        for ids in ([[-1]], [[8]], [[3, 9], [7, 100]], [[2, -7], [8, 0]]):
            with pytest.raises(IndexError) as caught:
                layer(torch.tensor(ids))
            errors.append(str(caught.value))
    layer(torch.tensor([0])).sum().backward()
    zero = layer.weight.grad.clone()
    layer.zero_grad()
    (layer(torch.tensor([5, 7])) * torch.tensor([[torch.inf], [torch.nan]])).sum().backward()
    return {
        "values": layer(edges).flatten().tolist(),
        "edges": edges.tolist(),
        "shapes": [tuple(layer(torch.empty(shape, dtype=torch.int64)).shape) for shape in ((0,), (3, 0))],
        "scalar": layer(torch.tensor(5)).tolist(),
        "int32": layer(torch.tensor([5], dtype=torch.int32)).tolist(),
        "errors": errors,
        "said before the error": len(book.records),
        "gradient of id 0": zero.flatten().tolist(),
        "gradient of row 0 after ids 5, 7": layer.weight.grad[0].item(),
    }


@pytest.mark.parametrize("t", SIZES)
def test_ids_at_the_edges(ranks: Any, t: int) -> None:
    """CASE 15: first and last ids are right, others raise the same error at every t, and row 0 of a rank that does not own an id
    gets exactly no gradient, although the id is looked up there as 0."""
    for rank, seen in enumerate(on_ranks(ranks, t, edges_of_the_vocabulary, t)):
        assert seen["values"] == seen["edges"]
        assert (seen["shapes"], seen["scalar"], seen["int32"]) == ([(0, 1), (3, 0, 1)], [5], [[5]])
        assert seen["errors"] == [f"token id {bad} is outside the vocabulary 0..7" for bad in (-1, 8, 9, -7)]
        assert seen["said before the error"] == 0
        assert seen["gradient of id 0"] == [1.0 if rank == 0 and row == 0 else 0.0 for row in range(8 // t)]
        assert seen["gradient of row 0 after ids 5, 7"] == 0


def test_check_range_leaves_fake_tensors_alone() -> None:
    check_range("token id", torch.empty(3, dtype=torch.int64, device="meta"), 1)
    with torch._subclasses.FakeTensorMode():
        check_range("token id", torch.full((3,), 9), 1)
    with pytest.raises(IndexError, match=r"target 9 is outside the vocabulary 0\.\.8"):
        check_range("target", torch.tensor([9]), 9)


# ---- norms -------------------------------------------------------------------------------------------------------------------


def norm_gradients(t: int, sp: bool) -> tuple[list[float], bool, bool]:
    """8 tokens, the upstream gradient is the token's number: the norm's bias sees 0 + .. + 7 = 28."""
    g = tensor_group(t)
    layer = LayerNorm(4, group=g, sequence_parallel=sp)
    x, upstream = draw(8, 1, 4, seed=6).float(), torch.arange(8.0).view(8, 1, 1).expand(8, 1, 4)
    mine = slice(g.rank * 8 // t, (g.rank + 1) * 8 // t) if sp else slice(0, 8)
    out = layer(x[mine])
    assert torch.equal(out, F.layer_norm(x, (4,), layer.weight, layer.bias)[mine])
    out.backward(upstream[mine])
    return layer.bias.grad.tolist(), layer.weight.shard.partial_over_tp, layer.bias.shard.partial_over_tp


@pytest.mark.parametrize(("t", "shares"), [(1, [28]), (2, [6, 22]), (4, [1, 5, 9, 13])])
def test_norm_gradients_are_partial_under_sequence_parallelism(ranks: Any, t: int, shares: list[float]) -> None:
    """They sum to 28 over the ranks, and their Shards say that this sum is still to be made."""
    seen = on_ranks(ranks, t, norm_gradients, t, True)
    assert [bias for bias, _, _ in seen] == [[share] * 4 for share in shares]
    assert all(partial == other == (t > 1) for _, partial, other in seen)
    assert on_ranks(ranks, t, norm_gradients, t, False) == [([28] * 4, False, False)] * t


# ---- what a layer says -------------------------------------------------------------------------------------------------------


def layer_traffic(t: int, sp: bool) -> dict[str, Any]:
    """One transformer layer, forward and backward: counted below minimeg, and by the ledger."""
    g = tensor_group(t)
    config = GPTConfig(1, 16, 4, 8, 8, sequence_parallel=sp)
    layer = TransformerLayer(config, g, 0)
    name_globally(layer)
    initialise(layer, seed=1)
    x = draw(8 // t if sp else 8, 1, 16, seed=7).float().requires_grad_()
    with Outside() as outside, ledger() as book:
        y = layer(x, torch.full((8, 8), -torch.inf).triu(1), None)
        forward = len(outside.communication)
        y.sum().backward()
    return {
        "forward": outside.communication[:forward],
        "backward": outside.communication[forward:],
        "ledger": [(record.op, record.payload, record.phase) for record in book.records],
        "wire": book.total("wire"),
    }


@pytest.mark.parametrize("t", [2, 4])
def test_four_all_reduces_of_sbh_a_layer(ranks: Any, t: int) -> None:
    sbh = 8 * 1 * 16 * 4
    for seen in ranks(t, layer_traffic, t, False):
        assert seen["forward"] == [("all_reduce", sbh)] * 2
        assert seen["backward"] == [("all_reduce", sbh)] * 2
        assert seen["ledger"] == [("all_reduce", sbh, "forward")] * 2 + [("all_reduce", sbh, "backward")] * 2
        assert seen["wire"] == 8 * sbh * (t - 1) / t


@pytest.mark.parametrize("t", [2, 4])
def test_traffic_of_a_layer_under_sequence_parallelism(ranks: Any, t: int) -> None:
    """5 bytes for every 4 without it: backward gathers the inputs of the two column-parallel linears again."""
    sbh = 8 * 1 * 16 * 4
    for seen in ranks(t, layer_traffic, t, True):
        pair = [("all_gather", sbh), ("reduce_scatter", sbh)]
        names = [
            ("reduce_scatter" if op == "all_to_all" else op, size) for op, size in seen["forward"] + seen["backward"]
        ]
        assert names == [(op, size) for op, size, _ in seen["ledger"]]
        assert [(op, size) for op, size, phase in seen["ledger"] if phase == "forward"] == pair * 2
        backward = [op for op, _, phase in seen["ledger"] if phase == "backward"]
        assert (backward.count("all_gather"), backward.count("reduce_scatter")) == (4, 2)
        assert seen["wire"] == 10 * sbh * (t - 1) / t
        assert seen["wire"] / 4 == {2: 640, 4: 960}[t]  # elements; 512 and 768 without


# ---- refusals ----------------------------------------------------------------------------------------------------------------


def group_of(t: int) -> Group:
    """A group that is never used: to see that constructors refuse before they communicate."""
    return Group(tuple(range(t)), 0, "tp")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ColumnParallelLinear(8, 10, group=group_of(4)), ["out_features=10", "4 ranks of tp", "use 8 or 12"]),
        (lambda: ColumnParallelLinear(8, 3, group=group_of(4)), ["out_features=3", "use 4"]),
        (lambda: ColumnParallelLinear(8, 0, group=group_of(1)), ["out_features=0", "use 1"]),
        (lambda: ColumnParallelLinear(0, 8, group=group_of(2)), ["in_features=0", "use 1"]),
        (lambda: RowParallelLinear(10, 8, group=group_of(4)), ["in_features=10", "use 8 or 12"]),
        (lambda: RowParallelLinear(-4, 8, group=group_of(4)), ["in_features=-4", "use 4"]),
        (lambda: RowParallelLinear(4, -8, group=group_of(4)), ["out_features=-8", "use 1"]),
        (
            lambda: ColumnParallelLinear(8, 8, group=group_of(2), gather_output=True, sequence_parallel=True),
            ["gather_output=True", "sequence_parallel=True"],
        ),
        (
            lambda: RowParallelLinear(8, 8, group=group_of(2), input_is_parallel=False, sequence_parallel=True),
            ["sequence_parallel=True needs input_is_parallel=True"],
        ),
        (
            lambda: RowParallelLinear(7, 8, group=group_of(2), input_is_parallel=False, sequence_parallel=True),
            ["in_features=7", "use 6 or 8", "sequence_parallel=True needs input_is_parallel=True"],
        ),
        (lambda: VocabParallelEmbedding(0, 4, group=group_of(2)), ["num_embeddings=0", "e.g. 256"]),
        (lambda: VocabParallelEmbedding(4, -1, group=group_of(2)), ["embedding_dim=-1", "64"]),
    ],
)
def test_refusals_name_the_field_and_a_legal_value(make: Any, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_initial_values() -> None:
    """Layers built alone start from normal(0.02), biases from zero, norms from one."""
    torch.manual_seed(0)
    g = single_process().tp
    for layer in (ColumnParallelLinear(64, 64, group=g), RowParallelLinear(64, 64, group=g)):
        assert 0.019 < layer.weight.std().item() < 0.021
        assert not layer.bias.any()
    assert 0.018 < VocabParallelEmbedding(64, 64, group=g).weight.std().item() < 0.022
    norm = LayerNorm(8, group=g)
    assert norm.weight.tolist() == [1] * 8
    assert norm.bias.tolist() == [0] * 8
