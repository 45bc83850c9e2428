"""Who is reduced over which group, in which order, in which precision; and that it leaves while backward goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minimeg.comm import Group, Pending
from minimeg.data_parallel import GradientReducer
from minimeg.ledger import RECORDER, Entry
from minimeg.linear import WeightGradientStore, linear
from minimeg.models.gpt import GPT
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import Shard, ShardedModule, named_shards
from minimeg.pipeline import run
from tests.pipeline.layouts import Layout, global_batch
from tests.rank_functions.training import training


class Vectors(ShardedModule):
    """Parameters p0, p1, ... of the given sizes, whole on every rank."""

    def __init__(self, *sizes: int, dtype: torch.dtype = torch.float64, **about: Any) -> None:
        super().__init__()
        for i, size in enumerate(sizes):
            self.add_parameter(f"p{i}", Shard(f"p{i}", (size,), **about), draw=False)
        self.to(dtype)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(1)

    def gradients(self) -> list[list[float]]:
        return [param.grad.tolist() for param in self.parameters()]


# ---- buckets -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_gradients_are_views_of_contiguous_wide_buckets_in_reverse_order(dtype: torch.dtype) -> None:
    layout = Layout()
    run_ = training(layout, single_process(), dtype=dtype)
    (buckets,) = run_.reducer.buckets
    names = [shard.name for bucket in buckets for _, shard in bucket.members]
    assert names == [shard.name for _, _, shard in named_shards(run_.chunks)][::-1]
    assert len(buckets) > 3
    run_.gradients(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for bucket in buckets:
        assert bucket.buffer.dtype == wide
        assert len(bucket.members) == 1 or bucket.buffer.numel() <= 3000
        place = bucket.buffer.data_ptr()
        for param, _ in bucket.members:
            assert param.grad.dtype == wide
            assert param.grad.data_ptr() == place, "one after the other, without a gap"
            place += param.numel() * wide.itemsize
    assert sum(float(bucket.buffer.abs().sum()) for bucket in buckets) > 0


def test_a_tied_weight_is_alone_and_partial_ones_come_last() -> None:
    state = single_process()
    two = replace_size(state, 2)
    config = Layout(sequence_parallel=True).config()
    for stage in (0, 1):
        chunk = GPT(config, two, stage, 2)
        (buckets,) = GradientReducer([chunk], state).buckets
        kinds = [(bucket.tied, bucket.partial) for bucket in buckets]
        assert kinds.count((True, False)) == 1
        assert kinds == sorted(kinds, key=lambda kind: kind[1]), "those that wait for a sum over tp keep nobody waiting"
        assert kinds[-1] == (False, True)
        for bucket in buckets:
            assert len({shard.partial_over_tp for _, shard in bucket.members}) == 1
            assert not bucket.tied or len(bucket.members) == 1


def replace_size(state: ParallelState, size: int) -> Group:
    """A tensor-parallel group that says it has ``size`` ranks; nothing is sent in these tests."""
    return Group(tuple(range(size)), 0, "tp")


def test_gradients_that_were_there_before_or_put_there_by_hand_count() -> None:
    model = Vectors(2, 3)
    first, second = model.parameters()
    (3 * first).sum().backward()
    reducer = GradientReducer([model], single_process())
    assert model.gradients() == [[3.0, 3.0], [0.0, 0.0, 0.0]], "none counts as zeros"
    (2 * first).sum().backward()
    second.grad = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    reducer.ready(0)
    reducer.finish()
    assert model.gradients() == [[5.0, 5.0], [1.0, 2.0, 3.0]]
    reducer.zero()
    assert model.gradients() == [[0.0, 0.0], [0.0, 0.0, 0.0]]
    model.zero_grad(set_to_none=True)
    (7 * second).sum().backward()
    reducer.ready(0)
    reducer.finish()
    assert model.gradients() == [[0.0, 0.0], [7.0, 7.0, 7.0]], "the buffer's old values are gone"


def test_frozen_parameters_are_left_alone() -> None:
    model = Vectors(2, 3)
    model.p0.requires_grad_(False)
    reducer = GradientReducer([model], single_process())
    assert [shard.name for bucket in reducer.buckets[0] for _, shard in bucket.members] == ["p1"]
    assert model.p0.grad is None


def test_out_of_turn() -> None:
    chunks = [Vectors(2), Vectors(2)]
    chunks[1].set_shard("p0", Shard("another", (2,)))
    reducer = GradientReducer(chunks, single_process())
    optimizer = Optimizer(chunks, single_process(), reducer=reducer)
    reducer.ready(1)
    with pytest.raises(RuntimeError, match=r"chunks \[1\] are still being summed: call finish\(\) first"):
        optimizer.step(0.1)
    with pytest.raises(RuntimeError, match="chunk 1 was reduced twice"):
        reducer.ready(1)
    with pytest.raises(RuntimeError, match=r"chunks \[0\] were never ready"):
        reducer.finish()
    reducer.ready(0)
    reducer.finish()
    reducer.ready(1)  # the next step


# ---- precision of the sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred weight gradients"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_small_gradients_after_a_large_one(dtype: torch.dtype, deferred: bool) -> None:
    """CASE 50: one micro-batch of gradient 256 (bf16; 2048 in fp16), then as many of gradient 1: half precision stays at the first."""
    large = 256 if dtype == torch.bfloat16 else 2048
    sums = {}
    for wide in (False, True):
        model = Vectors(dtype=dtype)
        shard = Shard("weight", (1, 1))
        weight = model.add_parameter("weight", shard, draw=False)
        weight.data = torch.ones(1, 1, dtype=dtype)
        if wide:
            reducer = GradientReducer([model], single_process())
        else:
            weight.grad_dtype = dtype
        store = WeightGradientStore()
        for microbatch in range(large + 1):
            x = torch.full((1, 1), 1.0 if microbatch else float(large), dtype=dtype)
            if deferred:
                store.record(microbatch)
            linear(x, weight, None, single_process().tp, input_gradient="local", store=store).sum().backward()
            if deferred:
                store.stop()
                store.run(microbatch)
        if wide:
            reducer.ready(0)
            reducer.finish()
            assert weight.grad.dtype == torch.float32
        sums[wide] = weight.grad.item()
    assert sums == {False: large, True: 2 * large}


def gradient_error(dtype: torch.dtype, wide: bool, microbatches: int) -> float:
    """Relative error of a weight's gradient, summed over micro-batches in half precision, against float64 of the same inputs."""
    generator = torch.Generator().manual_seed(3)
    model = Vectors(dtype=dtype)
    weight = model.add_parameter("weight", Shard("weight", (16, 16)), draw=False)
    weight.data = torch.randn(16, 16, generator=generator).to(dtype)
    reducer = GradientReducer([model], single_process()) if wide else None
    right = torch.zeros(16, 16, dtype=torch.float64)
    for _ in range(microbatches):
        x = (1 + torch.rand(1, 16, generator=generator) / 8).to(dtype)
        F.linear(x, weight).sum().backward()
        right += x.double().sum(0).expand(16, 16)
    if reducer is not None:
        reducer.ready(0)
        reducer.finish()
    return float((weight.grad.double() - right).norm() / right.norm())


def test_over_64_microbatches_half_precision_goes_wrong_and_float32_does_not() -> None:
    for dtype, wrong in ((torch.bfloat16, 0.02), (torch.float16, 1e-4)):
        assert gradient_error(dtype, False, 1) == 0, "a single micro-batch's gradient is exact here"
        assert gradient_error(dtype, False, 64) > wrong, "each addition rounds"
        assert gradient_error(dtype, True, 64) < 1e-6


def sum_over_ranks(dtype: torch.dtype, zero: bool) -> list[float]:
    with initialize_model_parallel() as state:
        model = Vectors(4, dtype=dtype)
        reducer = GradientReducer([model], state, use_distributed_optimizer=zero)
        ((256.0 if state.rank == 0 else 1.0) * model.p0).sum().backward()
        reducer.ready(0)
        reducer.finish()
        return [value for piece in reducer.pieces() for value in piece.of(piece.param.grad).tolist()]


@pytest.mark.parametrize("zero", [False, True])
def test_ranks_are_summed_in_float32(ranks: Any, zero: bool) -> None:
    """gloo adds 256 and 1 in bf16 to 256."""
    assert ranks(4, sum_over_ranks, torch.bfloat16, zero) == [[259.0] * (1 if zero else 4)] * 4


# ---- overlap and order -------------------------------------------------------------------------------------------------------


@contextmanager
def departures(group: Group, operation: str, log: list[str]) -> Iterator[None]:
    """Note every bucket that leaves over the group, by its size."""
    original: Callable[..., Pending] = getattr(group, operation)

    def noted(x: Tensor, *args: Any) -> Pending:
        log.append(f"bucket of {x.numel()}")
        return original(x, *args)

    setattr(group, operation, noted)
    try:
        yield
    finally:
        delattr(group, operation)


class Chain(Vectors):
    """y = sum over p_i of a chain, so that backward completes the last parameter first."""

    def forward(self, x: Tensor) -> Tensor:
        for param in self.parameters():
            x = (x * param.sum()).tanh()
        return x


def order_of_events(overlap: bool, zero: bool) -> list[str]:
    with initialize_model_parallel() as state:
        model, log = Chain(8, 6, 4, 2), []
        reducer = GradientReducer([model], state, bucket_elements=1, use_distributed_optimizer=zero)
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: log.append(name))
        for microbatch in range(2):
            if overlap and microbatch == 1:
                reducer.last_backward(0)
            with departures(state.dp_cp, "reduce_scatter_async" if zero else "all_reduce_async", log):
                model(torch.tensor(0.5 + state.rank, dtype=torch.float64)).backward()
        with departures(state.dp_cp, "reduce_scatter_async" if zero else "all_reduce_async", log):
            reducer.ready(0)
        reducer.finish()
        return log


@pytest.mark.parametrize("zero", [False, True])
def test_buckets_leave_during_the_last_backward_and_not_before(ranks: Any, zero: bool) -> None:
    first = ["p3", "p2", "p1", "p0"]
    last = ["p3", "bucket of 2", "p2", "bucket of 4", "p1", "bucket of 6", "p0", "bucket of 8"]
    assert ranks(2, order_of_events, True, zero) == [first + last] * 2
    waiting = [*first, *first, "bucket of 2", "bucket of 4", "bucket of 6", "bucket of 8"]
    assert ranks(2, order_of_events, False, zero) == [waiting] * 2


class Branches(Vectors):
    """The product of branches, computed in an order of each rank's own: backward completes them in the reverse one."""

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        total = x.new_zeros(())
        for index in order:
            total = total + (getattr(self, f"p{index}") * x).sum() * (index + 1)
        return total


def unequal_order(rounds: int) -> tuple[list[str], list[str], list[list[float]]]:
    """-> in which order gradients arrived, which collectives ran, the sums."""
    with initialize_model_parallel() as state:
        model = Branches(5, 4, 3, 2)
        reducer = GradientReducer([model], state, bucket_elements=1)
        arrived: list[str] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
        collectives: list[str] = []

        def note(entry: Entry) -> None:
            if entry.group == "dp-cp":
                collectives.append(f"{entry.op} {entry.what}")

        order = [(i * 3 + state.rank) % 4 for i in range(4)]
        RECORDER.observers.append(note)
        try:
            for _ in range(rounds):
                reducer.zero()
                reducer.last_backward(0)
                model(torch.tensor(1.0 + state.rank, dtype=torch.float64), order).backward()
                reducer.ready(0)
                reducer.finish()
        finally:
            RECORDER.observers.remove(note)
        return arrived, collectives, model.gradients()


def test_ranks_that_complete_gradients_in_other_orders_send_them_in_the_same(ranks: Any) -> None:
    """Otherwise the first waits for a bucket that the second will send after one that the first has not sent."""
    results = ranks(4, unequal_order, 5)
    assert len({tuple(arrived) for arrived, _, _ in results}) == 4, "every rank had another order"
    assert all(collectives == results[0][1] for _, collectives, _ in results)
    assert results[0][1] == [f"all_reduce float64[{size}] sum" for size in (2, 3, 4, 5)] * 5
    for _, _, gradients in results:
        assert gradients == [[10.0 * (i + 1)] * (5 - i) for i in range(4)]


def too_late() -> str:
    with initialize_model_parallel() as state:
        model = Vectors(2)
        reducer = GradientReducer([model], state)
        reducer.last_backward(0)
        model.p0.sum().backward()
        with pytest.raises(RuntimeError) as error:
            model.p0.sum().backward()
        reducer.ready(0)
        reducer.finish()
        return str(error.value)


def test_a_gradient_that_comes_too_late_is_refused(ranks: Any) -> None:
    assert set(ranks(2, too_late)) == {"p0 got another gradient after its bucket had left: it would be lost"}


# ---- with the executor -------------------------------------------------------------------------------------------------------


def executed(layout: Layout) -> dict[str, Any]:
    """What left before the last action's end, and after which action."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        run_ = training(layout, state, bucket_elements=500)
        log: list[str] = []
        schedule, reducer = run_.schedule, run_.reducer
        everything = global_batch(0, layout.dp * layout.microbatches)

        def ready(chunk: int) -> None:
            log.append(f"ready {chunk}")
            reducer.ready(chunk)

        def last(chunk: int) -> None:
            log.append(f"last {chunk}")
            reducer.last_backward(chunk)

        with departures(state.dp_cp, "all_reduce_async", log):
            run(
                schedule,
                run_.chunks,
                everything[: schedule.microbatches],
                group=state.pp,
                loss=run_.chunks[-1].loss,
                normaliser=1.0,
                on_gradients_ready=ready,
                before_last_backward=last,
            )
        reducer.finish()
        return {"log": log, "buckets": [len(buckets) for buckets in reducer.buckets], "schedule": str(schedule)}


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2), Layout(dp=2, pp=2, schedule="interleaved", chunks=2)], ids=str)
def test_the_executor_says_when_and_most_buckets_leave_in_time(ranks: Any, layout: Layout) -> None:
    results = ranks(layout.world, executed, layout)
    for seen in results:
        assert seen["log"] == results[seen_twin(results, seen)]["log"]
        at = 0
        for chunk in reversed(range(layout.chunks)):
            end = seen["log"].index(f"ready {chunk}")
            assert seen["log"][at] == f"last {chunk}", "said once, before the backward"
            assert end - at - 1 == seen["buckets"][chunk], "all of them left before it was over"
            at = end + 1
        assert at == len(seen["log"])


def seen_twin(results: list[dict[str, Any]], seen: dict[str, Any]) -> int:
    """The other data-parallel rank of the same stage: tp = 1, ranks 0 1 | 2 3 are the stages."""
    index = next(i for i, one in enumerate(results) if one is seen)
    return index ^ 1


def test_where_weight_gradients_come_later_nothing_leaves_early(ranks: Any) -> None:
    layout = Layout(dp=2, pp=2, schedule="zb-h1")
    for seen in ranks(layout.world, executed, layout):
        assert not any(entry.startswith("last") for entry in seen["log"])
        assert seen["log"][0] == "ready 0"
        assert len(seen["log"]) == 1 + seen["buckets"][0]
