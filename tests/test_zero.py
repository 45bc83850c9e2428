"""ZeRO-1 is plain data parallelism with another place for things: the same numbers, 1/d of the optimizer's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from minimeg.buckets import cut_into_buckets
from minimeg.comm import ledger
from minimeg.cost import megatron_bytes_per_parameter, zero_bytes
from minimeg.data_parallel import GradientReducer
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard, ShardedModule
from tests.pipeline.layouts import LEARNING_RATES, MAX_NORM, WEIGHT_DECAY, Layout, dense
from tests.rank_functions.training import Training, training

LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, tied=False),
    Layout(dp=4),
    Layout(dp=4, pp=2, tied=False),
    Layout(tp=2, dp=2),
    Layout(tp=2, dp=2, sequence_parallel=True),
    Layout(dp=2, pp=2),
    Layout(dp=2, pp=2, tied=False, schedule="zb-h1"),
    Layout(dp=2, pp=2, schedule="interleaved", chunks=2),
    Layout(dp=2, pp=2, schedule="zb-v", chunks=2),
    Layout(tp=2, dp=2, pp=2, sequence_parallel=True),
    Layout(dp=4, pp=2),
]


# ---- the same numbers --------------------------------------------------------------------------------------------------------


def gathered_state(run: Training) -> dict[str, Tensor]:
    """Moments and main values of this rank's shards, put together over dp."""
    mine = [
        [name, kind, piece.start, piece.end, piece.tensor.flatten().tolist(), list(piece.shard.shape)]
        for (name, kind), piece in run.optimizer.state_pieces().items()
    ]
    found: dict[str, Tensor] = {}
    for its in run.state.dp_cp.all_gather_json(mine):
        for name, kind, start, end, values, shape in its:
            whole = found.setdefault(f"{kind} {name}", torch.full(shape, torch.nan, dtype=torch.float64))
            whole.view(-1)[start:end] = torch.tensor(values, dtype=torch.float64)
    assert not any(bool(x.isnan().any()) for x in found.values()), "the pieces cover every shard"
    return found


def tied_copies(run: Training) -> list[list[float]]:
    buckets = [bucket for buckets in run.reducer.buckets for bucket in buckets if bucket.tied]
    return [param.flatten().tolist() for bucket in buckets for param, _ in bucket.members]


def both_ways(layout: Layout, dtype: torch.dtype, max_norm: float) -> dict[str, Any]:
    """The same steps plain and with ZeRO-1, on this rank; everything that could differ."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        outcome: dict[str, Any] = {}
        for way in ("plain", "zero"):
            run = training(layout, state, dtype=dtype, zero=way == "zero", max_norm=max_norm, weight_decay=WEIGHT_DECAY)
            assert [run.optimizer.update.state[main]["step"].item() for main in run.optimizer.main[:1]] == [0]
            numbers = [run.step(step, rate) for step, rate in enumerate(LEARNING_RATES)]
            outcome[way] = {
                "losses": [loss for loss, _ in numbers],
                "norms": [norm for _, norm in numbers],
                "parameters": run.parameters(),
                "state": gathered_state(run),
            }
            copies = [copy for its in state.world.all_gather_json(tied_copies(run)) for copy in its]
            halves = [copies[0::2], copies[1::2]] if layout.tp == 1 else []
            assert all(copy == copies[0] for half in halves for copy in half), (
                "copies of a tied embedding are bit-equal"
            )
            assert bool(copies) == (layout.tied and layout.pp > 1)
        return outcome


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def without_key_biases(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """Their gradient is 0 (softmax does not notice a shift of all scores); AdamW divides its rounding noise by itself + 1e-8."""
    found = {name: value.clone() for name, value in parameters.items()}
    for name, value in found.items():
        if name.endswith("linear_qkv.bias"):
            value.view(8, 3, 2)[:, 1] = 0  # heads, (query, key, value), head dimension
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_same_numbers_as_plain_data_parallelism(run_on_ranks: Any, layout: Layout) -> None:
    """Bit for bit at d = 2, where a sum of two has one order; else within 1e-12. Without clipping the norm decides nothing."""
    for seen in run_on_ranks(layout.world, both_ways, layout, torch.float64, 0.0):
        plain, zero = seen["plain"], seen["zero"]
        if layout.dp == 2:
            assert unequal(plain["parameters"], zero["parameters"]) == []
            assert unequal(plain["state"], zero["state"]) == []
        assert furthest(plain["state"], zero["state"]) <= 1e-12
        assert furthest(without_key_biases(plain["parameters"]), without_key_biases(zero["parameters"])) <= 1e-12
        assert furthest(plain["parameters"], zero["parameters"]) <= 1e-10
        assert plain["losses"] == (zero["losses"] if layout.dp == 2 else pytest.approx(zero["losses"], abs=1e-12))
        assert plain["norms"] == pytest.approx(zero["norms"], rel=1e-12)


@pytest.mark.parametrize(
    "layout", [Layout(dp=4), Layout(tp=2, dp=2, sequence_parallel=True), Layout(dp=2, pp=2)], ids=str
)
def test_with_clipping_it_equals_plain_and_the_dense_reference(run_on_ranks: Any, layout: Layout) -> None:
    """The norm is added up in another order, so the last bit of the factor may differ."""
    results = run_on_ranks(layout.world, both_ways, layout, torch.float64, MAX_NORM)
    right = dense(layout.config().num_layers, layout.tied, layout.dp * layout.microbatches)
    for seen in results:
        plain, zero = seen["plain"], seen["zero"]
        assert furthest(without_key_biases(plain["parameters"]), without_key_biases(zero["parameters"])) <= 1e-12
        assert max(zero["norms"][:2]) > MAX_NORM, "it was clipped"
        assert zero["norms"] == results[0]["zero"]["norms"], "one norm for all ranks"
        assert zero["norms"] == pytest.approx(right.norms, abs=1e-10)
        assert zero["losses"] == pytest.approx(right.losses, abs=1e-10)
        assert furthest(zero["parameters"], right.parameters) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_half_precision_and_its_main_values_bit_for_bit(run_on_ranks: Any, dtype: torch.dtype) -> None:
    for seen in run_on_ranks(4, both_ways, Layout(dp=2, pp=2), dtype, 0.0):
        assert unequal(seen["plain"]["parameters"], seen["zero"]["parameters"]) == []
        assert unequal(seen["plain"]["state"], seen["zero"]["state"]) == []
        assert seen["plain"]["losses"] == seen["zero"]["losses"]
        kinds = {name.split()[0] for name in seen["zero"]["state"]}
        assert kinds == {"exp_avg", "exp_avg_sq", *(["main"] if dtype != torch.float32 else [])}


# ---- where things lie --------------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    parts=st.integers(1, 9),
    limit=st.integers(1, 100),
    tied=st.integers(0, 8),
)
@settings(max_examples=60, deadline=None)
def test_the_pieces_of_all_ranks_are_every_element_once(sizes: list[int], parts: int, limit: int, tied: int) -> None:
    members = [
        (nn.Parameter(torch.zeros(size)), Shard(f"p{i}", (size,), tied=i == tied)) for i, size in enumerate(sizes)
    ]
    buckets = cut_into_buckets(members, limit, parts)
    assert [shard.name for bucket in buckets for _, shard in bucket.members] == [f"p{i}" for i in range(len(sizes))][
        ::-1
    ]
    owners = {shard.name: torch.zeros(shard.shape) for _, shard in members}
    for bucket in buckets:
        assert bucket.buffer.numel() % parts == 0
        assert len(bucket.members) == 1 or sum(p.numel() for p, _ in bucket.members) <= limit
        assert len(bucket.members) == 1 or not any(shard.tied for _, shard in bucket.members)
        for rank in range(parts):
            filled = torch.zeros_like(bucket.slice_of(rank))
            at = 0
            bucket.buffer.zero_()
            for piece in bucket.pieces(rank):
                owners[piece.shard.name].view(-1)[piece.start : piece.end] += 1
                # the same elements as this rank's slice of the buffer, in the same order
                view = bucket.views[[p is piece.param for p, _ in bucket.members].index(True)]
                piece.of(view).copy_(torch.arange(at + 1, at + 1 + piece.end - piece.start))
                at += piece.end - piece.start
                filled[:at] = torch.arange(1, at + 1)
            assert torch.equal(bucket.slice_of(rank), filled)
    assert all(bool((count == 1).all()) for count in owners.values())


class Few(ShardedModule):
    """Three elements: fewer than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.add_parameter("weight", Shard("weight", (3,)), draw=False)
        with torch.no_grad():
            self.weight.copy_(torch.tensor([1.0, 2.0, 3.0]))


def more_ranks_than_elements() -> tuple[list[float], int, float]:
    with initialize_model_parallel() as state:
        model = Few()
        reducer = GradientReducer([model], state, use_distributed_optimizer=True)
        optimizer = Optimizer([model], state, kind="sgd", reducer=reducer)
        (model.weight * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
        reducer.ready(0)
        reducer.finish()
        norm = optimizer.step(0.01)
        return model.weight.tolist(), len(optimizer.pieces), norm


def test_more_ranks_than_elements(ranks: Any) -> None:
    results = ranks(4, more_ranks_than_elements)
    assert [pieces for _, pieces, _ in results] == [1, 1, 1, 0]
    for weight, _, norm in results:
        assert weight == pytest.approx([1 - 0.04, 2 - 0.4, 3 - 4.0])
        assert norm == pytest.approx(4 * (1 + 100 + 10_000) ** 0.5)


# ---- memory and bytes --------------------------------------------------------------------------------------------------------


def memory(layout: Layout, dtype: torch.dtype) -> dict[str, Any]:
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        found = {}
        for way in ("plain", "zero"):
            run = training(layout, state, dtype=dtype, zero=way == "zero")
            before = run.optimizer.model_states()
            run.step(0)
            after = run.optimizer.model_states()
            assert before == after, "nothing grows with the first step"
            padding = sum(b.buffer.numel() for buckets in run.reducer.buckets for b in buckets) - after.parameters
            found[way] = (after, padding, str(after))
        return {"stage": state.pp.rank, **found}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_memory_is_that_of_the_formula(run_on_ranks: Any, dtype: torch.dtype) -> None:
    """ZeRO paper, Table 1, with gradients in float32: 18 -> 6 + 12/d in bf16, 16 -> 8 + 8/d in float32; d = 2, two stages."""
    layout = Layout(dp=2, pp=2)
    results = run_on_ranks(layout.world, memory, layout, dtype)
    wide = 8 if dtype == torch.float64 else 4
    for seen in results:
        (plain, padding, _), (zero, _, text) = seen["plain"], seen["zero"]
        psi = plain.parameters
        assert padding == 0, "plain data parallelism pads nothing"
        assert plain.measured == plain.formula(False)
        precision = "bf16_fp32" if dtype == torch.bfloat16 else "fp32_fp32"
        times = 2 if dtype == torch.float64 else 1
        assert plain.formula(False) == times * psi * megatron_bytes_per_parameter(precision, 2, distributed=False)
        assert zero.formula(True) == times * psi * megatron_bytes_per_parameter(precision, 2)
        if dtype == torch.bfloat16:
            assert zero.paper(True) == zero_bytes(psi, 2, stage=1, optimizer_bytes=12)
            assert zero.paper(False) == zero_bytes(psi, 2, stage=0, optimizer_bytes=12)
        # A rank's part is half of every bucket, rounded up: at most one element a bucket more or less than the formula says.
        buckets = 40
        assert abs(zero.measured - zero.formula(True)) <= buckets * (zero.state_bytes + wide)
        assert zero.measured < 0.9 * plain.measured
        assert f"{psi:,} parameters, d = 2, optimizer state shared" in text
    for stage in (0, 1):  # together the replicas hold every element's state exactly once
        states = [seen["zero"][0] for seen in results if seen["stage"] == stage]
        assert sum(one.optimizer for one in states) == states[0].state_bytes * states[0].parameters


def bytes_of_a_step(zero: bool) -> dict[str, float]:
    with initialize_model_parallel() as state:
        run = training(Layout(dp=4), state, dtype=torch.float32, zero=zero, bucket_elements=10**9)
        with ledger() as book:
            run.step(0)
        ops = ("all_reduce", "reduce_scatter", "all_gather")
        return {op: book.total("wire", "dp-cp", op, phase) for op in ops for phase in ("gradients", "parameters")
                if book.total("wire", "dp-cp", op, phase)}  # fmt: skip


def test_not_one_byte_more_travels(run_on_ranks: Any) -> None:
    """A reduce-scatter and an all-gather are what an all-reduce does: ZeRO paper, section 7.1."""
    plain = run_on_ranks(4, bytes_of_a_step, False)[0]
    zero = run_on_ranks(4, bytes_of_a_step, True)[0]
    psi = single_parameters()
    assert plain == {"all_reduce": 2 * 3 / 4 * 4 * psi}
    assert zero == {"reduce_scatter": 3 / 4 * 4 * psi, "all_gather": 3 / 4 * 4 * psi}


def single_parameters() -> int:
    run = training(Layout(dp=4), single_process(), dtype=torch.float32)
    return sum(param.numel() for chunk in run.chunks for param in chunk.parameters())
