"""Sequence parallelism: the same sums, the same bytes plus one all-gather, gradients summed over tp exactly once."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.comm import Ledger, ledger
from minimeg.cost import GPTShape
from minimeg.cost.communication import layer_collectives, tensor_parallel_elements
from minimeg.data import MicroBatch
from minimeg.data_parallel import GradientReducer
from minimeg.lab.ranks import RankError
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import Recomputation
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import initialise, load_full_state, named_shards
from minimeg.pipeline import run
from minimeg.schedule import build
from tests.cost.oracles import cases
from tests.pipeline.layouts import B, Layout, S, V, compare, global_batch, initial_state, normaliser
from tests.rank_functions import Outside

# ---- equal to the dense reference ------------------------------------------------------------------------------------------------

LAYOUTS = [
    Layout(2, 1, 1, sequence_parallel=True, tied=False),
    Layout(4, 1, 1, sequence_parallel=True),
    Layout(2, 2, 1, sequence_parallel=True),
    Layout(4, 2, 1, sequence_parallel=True, tied=False),
    Layout(2, 1, 2, sequence_parallel=True),
    Layout(4, 1, 2, sequence_parallel=True),
    Layout(2, 2, 2, sequence_parallel=True, tied=False),
    Layout(2, 1, 2, "interleaved", 2, sequence_parallel=True),
    Layout(2, 2, 2, "interleaved", 2, sequence_parallel=True),
    Layout(2, 1, 2, "zb-h1", sequence_parallel=True),
    Layout(4, 1, 2, "zb-v", 2, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_equal_to_the_dense_reference(run_on_ranks: Any, layout: Layout) -> None:
    """CASE 39: loss, norm, every gradient, and the parameters after three AdamW steps, within 1e-10 in float64."""
    results = run_on_ranks(layout.world, compare, layout)
    assert all((losses, norms) == results[0][:2] for losses, norms, _ in results)
    found = results[0][2]
    assert found["gradients"] > 0 or layout.world == 1
    assert max(found.values()) <= 1e-10, found


# ---- bytes -----------------------------------------------------------------------------------------------------------------------

LENGTH, BATCH, HIDDEN = 8, 1, 16  # COURSE 05


def of_one_layer(t: int, sp: bool, mode: Recomputation | None = None) -> tuple[Ledger, list[tuple[str, int]]]:
    """What one layer sends, forward and backward, as the ledger says and as torch says underneath."""
    state = initialize_model_parallel(t)
    config = GPTConfig(3, HIDDEN, 4, V, LENGTH, sequence_parallel=sp, hidden_dropout=0.1)
    stage = GPT(config, state.tp, 1, 3, recomputation=mode)  # a middle one of three: one layer and nothing else
    initialise(stage, 3)
    x = torch.ones(LENGTH // t if sp else LENGTH, BATCH, HIDDEN, requires_grad=True)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    with ledger() as book, Outside() as outside:
        stage(x, MicroBatch(tokens, tokens, tokens == 0, 0, 0)).sum().backward()
    return book, outside.communication


def counts(book: Ledger) -> dict[str, dict[str, int]]:
    ops = ("all_reduce", "all_gather", "reduce_scatter")
    return {
        phase: {op: int(n) for op in ops if (n := book.total("count", "tp", op, phase))}
        for phase in ("forward", "backward")
    }


@pytest.mark.parametrize("t", [2, 4])
def test_a_layer_sends_the_same_bytes_and_one_all_gather_more(ranks: Any, t: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2 (oracle K6), and the all-gather in backward that it leaves out of the count."""
    (oracle,) = cases("K6")
    shape = GPTShape(1, HIDDEN, 4, sequence=LENGTH)
    size = LENGTH * BATCH * HIDDEN * 4
    for without, below in ranks(t, of_one_layer, t, False):
        assert counts(without) == layer_collectives()
        assert without.total("wire") == 4 * tensor_parallel_elements(shape, BATCH, t)
        assert below == [("all_reduce", size)] * 4
    for with_it, below in ranks(t, of_one_layer, t, True):
        found, published = counts(with_it), oracle["expected"]
        assert found == layer_collectives(sequence_parallel=True, regather=True)
        assert found["forward"] == published["fwd"]
        assert found["backward"] == published["bwd"] | {"all_gather": published["bwd"]["all_gather"] + 2}
        assert all(record.payload == size for record in with_it.records)
        extra = 2 * Fraction(t - 1, t) * size  # one before each of the two column-parallel weight gradients
        assert with_it.total("wire") == without.total("wire") + extra
        # What torch was asked for: gloo's reduce-scatter is an all-to-all and a sum.
        assert sorted(below) == [("all_gather", size)] * 6 + [("all_to_all", size)] * 4
    # COURSE 05, in elements a rank: 8 against 10 bsh (t-1)/t.
    assert (without.total("wire") / 4, with_it.total("wire") / 4) == {2: (512, 640), 4: (768, 960)}[t]


@pytest.mark.parametrize("sp", [False, True], ids=["", "sequence parallel"])
def test_what_recomputation_sends(ranks: Any, sp: bool) -> None:
    """Full: the forward's collectives once more, in backward. Selective: nothing, as the core needs no other rank."""
    for mode in (Recomputation(), Recomputation("selective"), Recomputation("full")):
        kind: Any = mode.granularity or "none"
        for book, _ in ranks(2, of_one_layer, 2, sp, mode):
            assert counts(book) == layer_collectives(sp, kind, regather=sp)


def of_a_model(t: int, sp: bool) -> tuple[Ledger, int, int]:
    """What two micro-batches through a whole GPT send, and how many elements the partial parameters have."""
    state = initialize_model_parallel(t)
    layout = Layout(t, sequence_parallel=sp)
    model = GPT(layout.config(), state.tp).double()
    load_full_state(model, initial_state(layout.config()))
    reducer = GradientReducer([model], state)
    batch = global_batch(0, 2)
    with ledger() as book:
        run(build("1f1b", 1, 2), [model], batch, group=state.pp, loss=model.loss, normaliser=normaliser(batch),
            on_gradients_ready=reducer.ready)  # fmt: skip
        reducer.finish()
    partial = sum(param.numel() for _, param, shard in named_shards(model) if shard.partial_over_tp)
    return book, partial, len(model.layers)


@pytest.mark.parametrize("t", [2, 4])
def test_a_model_sends_the_same_bytes_and_what_is_extra_has_a_name(ranks: Any, t: int) -> None:
    """Also embedding (reduce-scatter, all-gather for all-reduce) and head (its input is gathered again). Then the gradients, once."""
    (without, nothing, layers), *_ = ranks(t, of_a_model, t, False)
    (with_it, partial, _), *others = ranks(t, of_a_model, t, True)
    assert [book.records for book, *_ in others] == [with_it.records] * (t - 1), "the same on every rank"
    share, size = Fraction(t - 1, t), S * B * 16 * 8
    m, column_parallel = 2, 2 * layers + 1
    extra = m * column_parallel * share * size
    gradients = 2 * share * partial * 8
    assert nothing == 0
    assert without.total("wire", phase="gradients") == 0
    assert with_it.total("wire", phase="gradients") == gradients
    assert with_it.total("count", phase="gradients") == 1, "summed exactly once, all in one message"
    assert with_it.total("wire") == without.total("wire") + extra + gradients
    forward = {op: with_it.total("count", "tp", op, "forward") for op in ("reduce_scatter", "all_gather")}
    assert forward == {"reduce_scatter": m * column_parallel, "all_gather": m * column_parallel}
    # All that is still all-reduced in forward are the three numbers a token of the loss.
    assert with_it.total("payload", op="all_reduce", phase="forward") == m * 3 * S * B * 8


# ---- gradients: who is summed, and that all agree --------------------------------------------------------------------------------


def expected_partial(layers: int) -> set[str]:
    """CASE 39's list: whatever is replicated and sees tokens: norms, biases behind a row-parallel linear, position embedding."""
    names = {"embedding.position_embeddings.weight", "final_layernorm.weight", "final_layernorm.bias"}
    for i in range(layers):
        names |= {
            f"layers.{i}.{norm}.{p}" for norm in ("input_layernorm", "pre_mlp_layernorm") for p in ("weight", "bias")
        }
        names |= {f"layers.{i}.self_attention.linear_proj.bias", f"layers.{i}.mlp.linear_fc2.bias"}
    return names


def partial_and_unequal(t: int, sp: bool, dtype: torch.dtype, tied: bool) -> dict[str, set[str]]:
    """Names of replicated parameters: all; those marked partial; those whose gradients differ over tp before and after the sum."""
    state = initialize_model_parallel(t)
    layout = Layout(t, sequence_parallel=sp, tied=tied)
    config = replace(layout.config(), hidden_dropout=0.1, attention_dropout=0.1)
    model = GPT(config, state.tp).to(dtype)
    load_full_state(model, {name: x.to(dtype) for name, x in initial_state(config).items()})
    reducer = GradientReducer([model], state)
    for microbatch in global_batch(0, 3):
        (model.loss(model(None, microbatch), microbatch) / 20).backward()
    replicated = {shard.name: param for _, param, shard in named_shards(model) if shard.dim is None}

    def unequal() -> set[str]:
        seen = {name: state.tp.all_gather(_grad(param)[None]) for name, param in replicated.items()}
        return {name for name, grads in seen.items() if not all(torch.equal(grads[0], grad) for grad in grads)}

    before = unequal()
    reducer.ready(0)
    reducer.finish()
    return {
        "replicated": set(replicated),
        "partial": {shard.name for _, _, shard in named_shards(model) if shard.partial_over_tp},
        "before": before,
        "after": unequal(),
    }


def _grad(param: torch.nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_exactly_the_partial_gradients_are_summed(ranks: Any, t: int, tied: bool, dtype: torch.dtype) -> None:
    """CASE 39: before the sum, the gradients that differ over tp are those of the list; after it, none differs by a bit."""
    expected = expected_partial(Layout().layers)
    for found in ranks(t, partial_and_unequal, t, True, dtype, tied):
        assert found["replicated"] == found["partial"] == found["before"] == expected
        assert found["after"] == set()
    for found in ranks(t, partial_and_unequal, t, False, dtype, tied):
        assert found == {"replicated": expected, "partial": set(), "before": set(), "after": set()}


# ---- lengths that t does not divide ----------------------------------------------------------------------------------------------


def with_an_odd_micro_batch(odd: int) -> None:
    state = initialize_model_parallel(2, 2)
    layout = Layout(2, 1, 2, sequence_parallel=True)
    model = GPT(layout.config(), state.tp, state.pp.rank, 2).double()
    load_full_state(model, initial_state(layout.config()))
    batch = global_batch(0, 4)
    long = batch[odd]
    batch[odd] = replace(long, tokens=long.tokens[:, :7], targets=long.targets[:, :7], valid=long.valid[:, :7])
    run(build("1f1b", 2, 4), [model], batch, group=state.pp, loss=model.loss, normaliser=1.0)


@pytest.mark.parametrize("odd", [0, 2])
def test_a_length_that_t_does_not_divide_is_refused_by_micro_batch(ranks: Any, odd: int) -> None:
    with pytest.raises(RankError) as caught:
        ranks(4, with_an_odd_micro_batch, odd)
    said = f"ranks 0-3: ValueError: sequence length 7 of micro-batch {odd} must be a multiple of tp=2"
    assert said in str(caught.value), "on every rank, by itself"


def with_two_lengths() -> tuple[float, float]:
    """Micro-batches of 8 and of 4 tokens in one step."""
    losses = []
    for state in (initialize_model_parallel(2, 2), single_process()):
        sp = state.tp.size > 1
        config = Layout(2, 1, 2, sequence_parallel=sp).config()
        p = state.pp.size
        model = GPT(config, state.tp, state.pp.rank, p).double()
        load_full_state(model, initial_state(config))
        batch = global_batch(0, 4)
        for i in (1, 2):
            one = batch[i]
            batch[i] = replace(one, tokens=one.tokens[:, :4], targets=one.targets[:, :4], valid=one.valid[:, :4])
        result = run(build("1f1b", p, 4), [model], batch, group=state.pp, loss=model.loss, normaliser=20.0)
        losses.append(float(result.loss))
    return losses[0], losses[1]


def test_lengths_may_differ_between_micro_batches(ranks: Any) -> None:
    for cut, alone in ranks(4, with_two_lengths):
        assert cut == pytest.approx(alone, abs=1e-10)
