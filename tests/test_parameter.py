"""Shards: what is initialised, gathered, normed and trained must not depend on how the model is cut."""

from __future__ import annotations

import copy
import hashlib
import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minimeg.data import MicroBatch
from minimeg.data_parallel import GradientReducer
from minimeg.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT, WORD_EMBEDDING
from minimeg.optimizer import GradientNorm, Optimizer, clip_factor
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import (
    Shard,
    ShardedModule,
    constant,
    full_state,
    initialise,
    load_full_state,
    name_globally,
    named_shards,
    normal,
    xavier_uniform,
)
from minimeg.pipeline import run
from minimeg.schedule import one_f_one_b
from tests.rank_functions import close
from tests.reference.gpt import ReferenceGPT, parameter_shapes, random_state

CONFIG = GPTConfig(
    num_layers=4, hidden_size=16, num_attention_heads=4, vocab_size=27, max_sequence_length=8
)  # 27 rows: no t divides them


def on_ranks(ranks: Any, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    return [function(*args)] if world == 1 else ranks(world, function, *args)


def state_of(tp: int, pp: int = 1, dp: int = 1) -> ParallelState:
    return single_process() if tp * pp * dp == 1 else initialize_model_parallel(tp, pp)


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


# ---- Shard: arithmetic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 8])
def test_cut_and_join_are_inverse(parts: int, dim: int) -> None:
    full = torch.arange(5 * 7.0).view(5, 7) + 1
    size = full.shape[dim]
    padded = -size % parts
    shards = [Shard("w", (5, 7), dim, index, parts, padded) for index in range(parts)]
    pieces = [shard.cut(full) for shard in shards]
    joined = torch.cat(pieces, dim)
    assert [tuple(piece.shape) for piece in pieces] == [shard.shape for shard in shards]
    assert joined.shape[dim] == size + padded
    assert not joined.narrow(dim, size, padded).any(), "padding is zero"
    assert torch.equal(shards[0].join(joined), full)
    assert shards[0].join(joined).is_contiguous()
    for piece in pieces:
        piece.fill_(-1)
    assert int(full.min()) == 1, "a slice is a copy"


def test_a_whole_shard_is_a_copy() -> None:
    full, shard = torch.ones(3, 2), Shard("norm", (3, 2))
    shard.cut(full).fill_(7)
    assert torch.equal(full, torch.ones(3, 2))
    assert shard.shape == (3, 2)
    assert shard.join(full) is full


def test_a_misshapen_full_tensor_is_named() -> None:
    with pytest.raises(ValueError, match=r"layers\.3\.w: the full tensor has shape \[3, 2\], expected \[2, 3\]"):
        Shard("layers.3.w", (2, 3), 0, 0, 2).cut(torch.ones(3, 2))


# ---- initial values do not depend on the layout ----------------------------------------------------------------------------------


class Zoo(nn.Module):
    """Every kind of layer, by normal or Xavier initial values; sizes that 1 to 4 divide, apart from the vocabulary's."""

    def __init__(self, state: ParallelState, init: Callable[[], Any]) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(6, 24, group=state.tp, init=init())
        self.row = RowParallelLinear(24, 12, group=state.tp, init=init())
        self.words = VocabParallelEmbedding(7, 5, group=state.tp, init=init())
        self.norm = LayerNorm(6, group=state.tp)
        name_globally(self)


def zoo(t: int, init: Callable[[], Any], dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    state = state_of(t)
    model = Zoo(state, init).to(dtype)
    torch.manual_seed(state.tp.rank)  # ranks whose default generators disagree
    before = torch.get_rng_state()
    initialise(model, seed)
    assert torch.equal(torch.get_rng_state(), before), "the default generator has no part in it"
    gathered = full_state(model, state)
    assert gathered["words.weight"].shape == (7, 5)
    assert not gathered["words.weight"].requires_grad
    gathered["norm.weight"].fill_(9)  # what is gathered is not the parameter
    assert model.norm.weight.tolist() == [1] * 6
    gathered["norm.weight"].fill_(1)
    local = model.words.weight
    real = max(0, min(7 - state.tp.rank * local.shape[0], local.shape[0]))
    assert not local[real:].any(), "padded rows are zero"
    return gathered


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("init", [normal, xavier_uniform])
def test_initial_values_are_bit_equal_at_every_t(ranks: Any, init: Callable[[], Any], dtype: torch.dtype) -> None:
    alone = zoo(1, init, dtype, 5)
    for t in (2, 3, 4):
        for gathered in ranks(t, zoo, t, init, dtype, 5):
            assert same(gathered, alone)
    assert alone["column.weight"].dtype == dtype
    for weight in (alone["column.weight"].double(), alone["row.weight"].double(), alone["words.weight"].double()):
        if init is xavier_uniform:  # the full fans: a shard's own would give a larger bound
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.85 * bound < float(weight.abs().max()) <= bound * (1 + 2**-8)
        else:
            assert 0.012 < float(weight.std()) < 0.028


def test_values_depend_on_seed_and_name_only() -> None:
    first, again, other = (zoo(1, normal, torch.float64, seed) for seed in (5, 5, 6))
    assert same(first, again)
    assert not torch.equal(first["column.weight"], other["column.weight"])
    flat = [first[name].flatten()[:30] for name in ("column.weight", "row.weight", "words.weight")]
    assert not any(torch.equal(flat[i], flat[j]) for i in range(3) for j in range(i)), "names draw differently"
    assert same(
        {"w": zoo(1, normal, torch.float32, 5)["row.weight"].bfloat16()},
        {"w": zoo(1, normal, torch.bfloat16, 5)["row.weight"]},
    ), "half precision is the rounded float32"


def drawn_alone(t: int) -> list[Tensor]:
    """Layers without initialise(): from torch's default generator, which all ranks have in the same state."""
    state = state_of(t)
    torch.manual_seed(11)
    model = Zoo(state, xavier_uniform)
    return list(full_state(model, state).values())


def test_layers_built_alone_are_slices_of_one_draw(ranks: Any) -> None:
    alone = drawn_alone(1)
    for t in (2, 4):
        for gathered in ranks(t, drawn_alone, t):
            assert all(torch.equal(a, b) for a, b in zip(alone, gathered, strict=True))


def gpt_chunks(config: GPTConfig, state: ParallelState, chunks: int = 1) -> list[GPT]:
    p = state.pp.size
    return [GPT(config, state.tp, c * p + state.pp.rank, p * chunks) for c in range(chunks)]


def gpt_state(tp: int, pp: int, chunks: int, tied: bool, sp: bool = False) -> tuple[dict[str, Tensor], dict[str, Any]]:
    state = state_of(tp, pp, 4 // (tp * pp) if (tp, pp) != (1, 1) else 1)
    model = gpt_chunks(replace(CONFIG, tied=tied, sequence_parallel=sp), state, chunks)
    initialise(model, seed=3)
    heads = {path: param for chunk in model for path, param, _ in named_shards(chunk) if "output_layer" in path}
    words = {path: param for chunk in model for path, param, _ in named_shards(chunk) if path == WORD_EMBEDDING}
    return full_state(model, state), {"head": [*heads.values()], "words": [*words.values()], "tp": state.tp.rank}


@pytest.mark.parametrize("tied", [True, False])
def test_a_gpt_starts_alike_in_every_layout(ranks: Any, tied: bool) -> None:
    """CASE 14: the gathered fused QKV is the same at every t. And both copies of a tied embedding are drawn alike."""
    alone, _ = gpt_state(1, 1, 1, tied)
    shapes = parameter_shapes(4, 16, 27, 8, tied=tied)
    assert {name: tuple(x.shape) for name, x in alone.items()} == shapes
    for tp, pp, chunks, sp in ((2, 1, 1, True), (4, 1, 1, False), (2, 2, 1, False), (1, 4, 1, False), (1, 2, 2, False)):
        seen = ranks(4, gpt_state, tp, pp, chunks, tied, sp)
        for gathered, _ in seen:
            assert same(gathered, alone), f"tp={tp} pp={pp} n={chunks}"
        for rank, (_, local) in enumerate(seen):
            for head in local["head"]:
                first_stage = seen[local["tp"]][1]["words"]
                if tied and first_stage and pp > 1 and rank >= tp:
                    assert torch.equal(head, first_stage[0])


# ---- gathered and given back -----------------------------------------------------------------------------------------------------


def round_trip(tp: int, pp: int, full: dict[str, Tensor]) -> dict[str, Any]:
    state = state_of(tp, pp)
    model = gpt_chunks(CONFIG, state)
    for chunk in model:
        chunk.double()
    load_full_state(model, full)
    gathered = full_state(model, state)
    mine = next(named_shards(model))[2].name
    with pytest.raises(KeyError, match=mine):
        load_full_state(model, {name: x for name, x in full.items() if name != mine})
    with pytest.raises(ValueError, match=r"layernorm\.weight: the full tensor has shape \[1, 16\], expected \[16\]"):
        load_full_state(model, {name: x[None] if name.endswith("layernorm.weight") else x for name, x in full.items()})
    load_full_state(model, full | {"layers.99.of.another.stage": torch.ones(1)})
    parameters = [param for _, param, _ in named_shards(model)]
    parameters[0].grad = torch.ones_like(parameters[0])
    grads = full_state(model, state, lambda param: param.grad)
    return {
        "gathered": gathered,
        "grads": {name: (int(x.sum()), tuple(x.shape)) for name, x in grads.items()},
    }


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (2, 2), (1, 4)])
def test_loading_and_gathering_are_inverse(ranks: Any, tp: int, pp: int) -> None:
    """CASE 11: padding never leaves the rank. A parameter without a gradient counts as zeros."""
    full = random_state(parameter_shapes(4, 16, 27, 8), seed=1)
    for seen in on_ranks(ranks, tp * pp, round_trip, tp, pp, full):
        assert same(seen["gathered"], full)
        assert {name: shape for name, (_, shape) in seen["grads"].items()} == parameter_shapes(4, 16, 27, 8)
        assert seen["grads"][WORD_EMBEDDING][0] == 27 * 16, "the padded rows' ones are gone"
        touched = {name for name, (total, _) in seen["grads"].items() if total}
        assert len(touched) == pp, "the first parameter of every stage, and no other"


def from_another_t(t: int, full: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor], list[list[int]]]:
    """Logits [s, b, 27] of the model that holds ``full``, what is gathered again, and whose QKV rows this rank holds."""
    state = state_of(t)
    model = GPT(CONFIG, state.tp).double()
    load_full_state(model, full)
    tokens = torch.randint(27, (2, 8), generator=torch.Generator().manual_seed(8))
    with torch.no_grad():
        logits = model(None, MicroBatch(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), 0, 0))
    gathered = full_state(model, state)
    # Number the heads: all rows of head i hold i, those of q, k, v one after another.
    numbered = torch.arange(4.0).repeat_interleave(12).double()
    load_full_state(model, full | {"layers.1.self_attention.linear_qkv.bias": numbered})
    held = model.layers["1"].self_attention.linear_qkv.bias.view(-1, 12)
    return state.tp.all_gather(logits, -1)[..., :27], gathered, held.long().tolist()


def test_a_state_moves_between_all_t(ranks: Any) -> None:
    """CASES 11 and 14: gathered at t = 4, loaded at 2 and 1: bit-equal; the logits are the dense model's; head h lies whole on
    rank h // (a/t)."""
    dense = random_state(parameter_shapes(4, 16, 27, 8), seed=2)
    tokens = torch.randint(27, (2, 8), generator=torch.Generator().manual_seed(8))
    right = ReferenceGPT(dense, num_layers=4, num_attention_heads=4).forward(tokens)
    full = dense
    for t in (4, 2, 1, 4):  # each loads what the one before gathered
        seen = on_ranks(ranks, t, from_another_t, t, full)
        for rank, (logits, gathered, held) in enumerate(seen):
            assert same(gathered, dense)
            assert close(logits, right)
            assert held == [[head] * 12 for head in range(rank * 4 // t, (rank + 1) * 4 // t)]
        full = seen[0][1]


# ---- what torch does to parameters ----------------------------------------------------------------------------------------------


def shards_of(model: nn.Module) -> dict[str, str]:
    """By attribute, as a reader of param.shard finds them; AttributeError where one is lost."""
    return {path: param.shard.name for path, param in model.named_parameters()}


def treatments() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def assign(model: nn.Module) -> nn.Module:
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
        return model

    return {
        "deepcopy": copy.deepcopy,
        "double": lambda model: model.double(),
        "bfloat16": lambda model: model.to(torch.bfloat16),
        "to meta": lambda model: model.to("meta"),
        "to_empty": lambda model: model.to("meta").to_empty(device="cpu"),
        "assign": assign,
        "frozen": lambda model: model.requires_grad_(False),
        "deepcopy of deepcopy to meta": lambda model: copy.deepcopy(copy.deepcopy(model).to("meta")),
    }


def survive(t: int) -> list[str]:
    state, lost = state_of(t), []
    for tied in (True, False):
        for name, treat in treatments().items():
            model = GPT(replace(CONFIG, tied=tied, sequence_parallel=True), state.tp)
            before = {path: shard for path, _, shard in named_shards(model)}
            model = treat(model)
            after = {path: shard for path, _, shard in named_shards(model)}
            if after != before or shards_of(model) != {path: shard.name for path, shard in before.items()}:
                lost.append(f"{name}, tied={tied}")
            if any(shard.index != state.tp.rank for shard in after.values() if shard.dim is not None):
                lost.append(f"{name}: index")
    return lost


def test_shards_survive_what_torch_does(ranks: Any) -> None:
    assert survive(1) == []
    assert ranks(2, survive, 2) == [[], []]


def test_a_model_that_was_never_real_starts_like_any_other() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG, single_process().tp)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    initialise(model, seed=3)
    assert same(full_state(model, single_process()), gpt_state(1, 1, 1, tied=True)[0])


def test_pickle_keeps_shards_and_initial_values() -> None:
    layer = ColumnParallelLinear(4, 6, group=single_process().tp, init=xavier_uniform())
    read = pickle.loads(pickle.dumps(layer))
    assert read.weight.shard == layer.weight.shard
    assert read.bias.shard is read.own_shards()["bias"]
    initialise([layer], 1), initialise([read], 1)
    assert torch.equal(read.weight, layer.weight)
    for init in (normal(0.5), constant(3)):
        full = torch.zeros(4)
        pickle.loads(pickle.dumps(init))(full, torch.Generator().manual_seed(1))
        assert full.abs().sum() > 0


def test_functional_call_needs_no_shard() -> None:
    layer = RowParallelLinear(4, 2, group=single_process().tp)
    other = {"weight": torch.ones(2, 4), "bias": torch.full((2,), 100.0)}
    assert torch.func.functional_call(layer, other, torch.ones(4)).tolist() == [104, 104]
    assert layer.weight.shard.name == "weight"


def test_parameters_that_nobody_describes_or_two_of_one_name_are_refused() -> None:
    g = single_process().tp
    plain = nn.Sequential(LayerNorm(4, group=g), nn.Linear(4, 4))
    with pytest.raises(
        ValueError, match=r"parameter 1\.weight has no Shard: make it with ShardedModule\.add_parameter"
    ):
        list(named_shards(plain))
    twice = nn.Sequential(LayerNorm(4, group=g), LayerNorm(4, group=g))
    for use in (lambda: initialise(twice, 1), lambda: full_state(twice, single_process())):
        with pytest.raises(ValueError, match=r"0\.weight and 1\.weight are both called 'weight'; call name_globally"):
            use()
    name_globally(twice)
    assert sorted(full_state(twice, single_process())) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    shared = nn.ModuleList([layer := LayerNorm(4, group=g), layer])
    name_globally(shared)
    assert len(list(named_shards(shared))) == 2, "a module that appears twice counts once"


# ---- CASE 18: the norm ----------------------------------------------------------------------------------------------------------


class Pair(ShardedModule):
    """A weight that is cut over tp and a gain that every rank holds."""

    def __init__(self, state: ParallelState) -> None:
        super().__init__()
        t, r = state.tp.size, state.tp.rank
        self.cut = self.add_parameter("cut", Shard("cut", (2,), 0, r, t))
        self.whole = self.add_parameter("whole", Shard("whole", (1,)))
        self.cut.grad, self.whole.grad = torch.full((2 // t,), 3.0), torch.tensor([4.0])


def example_norm(t: int) -> float:
    state = state_of(t)
    return GradientNorm(Pair(state), state)()


@pytest.mark.parametrize("t", [1, 2])
def test_replicated_parameters_count_once_in_the_norm(ranks: Any, t: int) -> None:
    """CASE 18: shards with gradients [3], [3] and a replicated [4]: 5.8310, where counting twice gives 7.0711."""
    for norm in on_ranks(ranks, t, example_norm, t):
        assert norm == pytest.approx(math.sqrt(9 + 9 + 16), abs=1e-12)
        assert round(norm, 4) == 5.8310


def norm_and_clip(
    t: int, sp: bool, full: dict[str, Tensor], max_norm: float
) -> tuple[float, float, dict[str, Tensor], float]:
    """-> (norm, again from Optimizer.step, how far SGD with learning rate 1 moved each parameter, clipping factor)"""
    state = state_of(t)
    model = GPT(replace(CONFIG, sequence_parallel=sp), state.tp).double()
    load_full_state(model, full)
    batch = microbatch(0)
    reducer = GradientReducer([model], state)
    run(
        one_f_one_b(1, 1), [model], [batch], group=state.pp, loss=model.loss, normaliser=16,
        on_gradients_ready=reducer.ready,
    )  # fmt: skip
    reducer.finish()
    norm = GradientNorm(model, state)()
    optimizer = Optimizer(model, state, kind="sgd", max_norm=max_norm)
    stepped = optimizer.step(1.0)
    moved = {name: full[name] - x for name, x in full_state(model, state).items()}
    return norm, stepped, moved, clip_factor(norm, max_norm)


def microbatch(index: int, step: int = 0) -> MicroBatch:
    generator = torch.Generator().manual_seed(100 * step + index)
    tokens, targets = (torch.randint(27, (2, 8), generator=generator) for _ in range(2))
    return MicroBatch(tokens, targets, torch.ones_like(tokens, dtype=torch.bool), index, step)


@pytest.mark.parametrize(("t", "sp"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
def test_norm_and_clipping_equal_the_dense_model(ranks: Any, t: int, sp: bool) -> None:
    """CASE 18: the norm of the whole model at every t; clipping at half of it halves every gradient."""
    full = random_state(parameter_shapes(4, 16, 27, 8), seed=4)
    leaves = {name: x.clone().requires_grad_() for name, x in full.items()}
    batch = microbatch(0)
    ReferenceGPT(leaves, num_layers=4, num_attention_heads=4).loss(batch.tokens, batch.targets, batch.valid).backward()
    right = math.sqrt(sum(float(leaf.grad.square().sum()) for leaf in leaves.values()))
    seen = on_ranks(ranks, t, norm_and_clip, t, sp, full, right / 2)
    for norm, stepped, moved, factor in seen:
        assert norm == stepped == seen[0][0], "the same number on every rank"
        assert norm == pytest.approx(right, abs=1e-10)
        assert factor == pytest.approx(0.5, abs=1e-5)
        for name, leaf in leaves.items():
            assert close(moved[name], factor * leaf.grad), name


# ---- CASE 13: which parameters are equal where ------------------------------------------------------------------------------------


def fingerprints(model: Iterable[nn.Module] | nn.Module) -> dict[str, str]:
    return {
        shard.name: hashlib.sha256(param.detach().numpy().tobytes()).hexdigest()
        for _, param, shard in named_shards(model)
    }


def train_five_steps(sp: bool) -> dict[str, Any]:
    """tp = 2, dp = 2, other data on each data-parallel rank: a hash of every parameter before and after."""
    state = initialize_model_parallel(2)
    model = GPT(replace(CONFIG, sequence_parallel=sp), state.tp)
    initialise(model, seed=1)
    before = fingerprints(model)
    optimizer, reducer = Optimizer(model, state, max_norm=1.0, weight_decay=0.1), GradientReducer([model], state)
    for step in range(5):
        batches = [microbatch(2 * state.dp.rank + k, step) for k in range(2)]
        run(
            one_f_one_b(1, 2), [model], batches, group=state.pp, loss=model.loss, normaliser=64,
            on_gradients_ready=reducer.ready,
        )  # fmt: skip
        reducer.finish()
        optimizer.step(1e-2)
    cut = {shard.name for _, _, shard in named_shards(model) if shard.dim is not None}
    partial = {shard.name for _, _, shard in named_shards(model) if shard.partial_over_tp}
    return {"before": before, "after": fingerprints(model), "cut": cut, "partial": partial}


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_shards_differ_over_tp_and_all_else_is_equal(ranks: Any, sp: bool) -> None:
    """CASE 13 at tp = 2, dp = 2 (ranks 0 1 | 2 3): shards differ inside tp, replicated parameters are equal there, all is equal over
    dp; at step 0 and after 5 optimizer steps."""
    seen = ranks(4, train_five_steps, sp)
    names = set(parameter_shapes(4, 16, 27, 8))
    cut = {name for name in names if "linear_qkv" in name or "linear_fc1" in name or "word_embeddings" in name}
    cut |= {name for name in names if name.endswith(("linear_proj.weight", "linear_fc2.weight"))}
    for one in seen:
        assert one["before"].keys() == names
        assert one["cut"] == cut
        assert one["partial"] == (names - cut if sp else set())
    for when in ("before", "after"):
        zero, one, two, three = (rank[when] for rank in seen)
        assert zero == two, f"{when}: data-parallel replicas"
        assert one == three, f"{when}: data-parallel replicas"
        differing = {name for name in names if zero[name] != one[name]}
        biases = {name for name in cut if name.endswith("bias")}  # all zero at the start
        assert differing == (cut - biases if when == "before" else cut), when
    assert not any(seen[0]["before"][name] == seen[0]["after"][name] for name in names), "everything was trained"
