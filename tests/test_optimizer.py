"""One norm, one factor, one decision; main values; and the state that a checkpoint keeps."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.data_parallel import GradientReducer
from minimeg.optimizer import CosineSchedule, GradientNorm, Optimizer
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard, ShardedModule
from minimeg.precision import LossScaler, NonFiniteError
from tests.pipeline.layouts import LEARNING_RATES, MAX_NORM, WEIGHT_DECAY, Layout, dense
from tests.rank_functions.training import Training, training


class Given(ShardedModule):
    """Parameters of ones with given gradients: {name: (Shard, gradient of the local part)}."""

    def __init__(self, *parameters: tuple[Shard, list[float]], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        for i, (shard, _) in enumerate(parameters):
            self.add_parameter(f"p{i}", shard, draw=False)
        self.to(dtype)
        self.given = [torch.tensor(grad, dtype=dtype) for _, grad in parameters]
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(1)

    def backward(self) -> None:
        for param, grad in zip(self.parameters(), self.given, strict=True):
            (param.flatten() * grad.flatten()).sum().backward()

    def values(self) -> list[float]:
        return [value for param in self.parameters() for value in param.flatten().tolist()]


# ---- CASE 18: what counts in the norm, and how often -------------------------------------------------------------------------


def norm_of_shards_and_a_copy(zero: bool) -> tuple[float, list[float]]:
    """tp = dp = pp = 2: shards 3 | 4 and a replicated 12 on the first stage, a tied 80 there and 4 on the last.

    -> norm, how far SGD moved each.
    """
    with initialize_model_parallel(2, 2) as state:
        half = 0.5  # of each gradient: the two data-parallel ranks add up
        first = [
            (Shard("cut", (2,), dim=0, index=state.tp.rank, parts=2), [half * (3 if state.tp.rank == 0 else 4)]),
            (Shard("whole", (1,)), [half * 12]),
            (Shard("words", (1,), tied=True), [half * 80]),
        ]
        last = [(Shard("head", (1,), tied=True, tied_to="words"), [half * 4])]
        model = Given(*(first if state.pp.rank == 0 else last))
        reducer = GradientReducer([model], state, use_distributed_optimizer=zero, bucket_elements=1)
        optimizer = Optimizer([model], state, kind="sgd", max_norm=42.5, reducer=reducer)
        model.backward()
        reducer.ready(0)
        reducer.finish()
        norm = optimizer.step(1.0)
        return norm, [1 - value for value in model.values()]


@pytest.mark.parametrize("zero", [False, True])
def test_shards_count_each_replicas_and_copies_once(ranks: Any, zero: bool) -> None:
    """3, 4, 12, 84: 85; and everything is clipped by the same factor 42.5/85."""
    for rank, (norm, moved) in enumerate(ranks(8, norm_of_shards_and_a_copy, zero)):
        assert norm == pytest.approx(85, abs=1e-12)
        first = [[1.5, 2.0][rank % 2], 6.0, 42.0]
        assert moved == pytest.approx(first if rank < 4 else [42.0], abs=1e-5)


def norms_of_replicas() -> list[float]:
    with initialize_model_parallel() as state:
        found = []
        for count in (1, 2, 3, 5):
            model = Given(*[(Shard(f"p{i}", (1,)), [float(i + 1)]) for i in range(count)])
            model.backward()
            found.append(GradientNorm(model, state)())
        return found


def test_replicas_share_the_work_and_count_once(ranks: Any) -> None:
    right = [math.sqrt(sum(i * i for i in range(1, count + 1))) for count in (1, 2, 3, 5)]
    assert ranks(4, norms_of_replicas) == [right] * 4


# ---- CASE 19: one norm, one factor -------------------------------------------------------------------------------------------


def two_stages(chunks: int) -> tuple[float, list[float]]:
    """Stage gradients 5 and 12 (each cut once more among its chunks: 3, 4 | 0, 12), clipped to 6.5."""
    with initialize_model_parallel(1, 2) as state:
        mine = [[3.0, 4.0], [0.0, 12.0]][state.pp.rank]
        parameters = [(Shard(f"{state.pp.rank}.{i}", (1,)), [value]) for i, value in enumerate(mine)]
        models = [Given(*parameters)] if chunks == 1 else [Given(one) for one in parameters]
        reducer = GradientReducer(models, state)
        optimizer = Optimizer(models, state, kind="sgd", max_norm=6.5, reducer=reducer)
        for chunk, model in enumerate(models):
            model.backward()
            reducer.ready(chunk)
        reducer.finish()
        norm = optimizer.step(1.0)
        return norm, [1 - value for model in models for value in model.values()]


@pytest.mark.parametrize("chunks", [1, 2])
def test_stages_and_chunks_do_not_clip_alone(ranks: Any, chunks: int) -> None:
    """Alone their factors would be 1 and 0.54; together both are 0.5."""
    (norm, first), (other, second) = ranks(2, two_stages, chunks)
    assert norm == other == 13
    assert first == pytest.approx([1.5, 2.0], abs=1e-6)
    assert second == pytest.approx([0.0, 6.0], abs=1e-6)


def clipped(layout: Layout) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        run = training(layout, state, max_norm=MAX_NORM, weight_decay=WEIGHT_DECAY)
        return [run.step(step, rate) for step, rate in enumerate(LEARNING_RATES)], run.parameters()


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(pp=2), Layout(pp=4), Layout(pp=2, schedule="interleaved", chunks=2)], ids=str
)
def test_clipped_steps_equal_the_dense_reference(run_on_ranks: Any, layout: Layout) -> None:
    """With buckets leaving during backward, unlike tests/pipeline/test_equality.py."""
    results = run_on_ranks(layout.world, clipped, layout)
    right = dense(layout.config().num_layers, layout.tied, layout.microbatches)
    for numbers, parameters in results:
        assert numbers == results[0][0]
        assert [loss for loss, _ in numbers] == pytest.approx(right.losses, abs=1e-10)
        assert [norm for _, norm in numbers] == pytest.approx(right.norms, abs=1e-10)
        assert max(norm for _, norm in numbers) > MAX_NORM
        assert all(float((parameters[name] - value).abs().max()) <= 1e-10 for name, value in right.parameters.items())


# ---- the update --------------------------------------------------------------------------------------------------------------


def decayed(zero: bool) -> list[list[float]]:
    """A matrix, a bias, another matrix, of gradient 0: what a step leaves of them. Under ZeRO all pieces have one dimension."""
    with initialize_model_parallel() as state:
        model = Given((Shard("a", (3, 3)), [0.0] * 9), (Shard("b", (3,)), [0.0] * 3), (Shard("c", (2, 2)), [0.0] * 4))
        reducer = GradientReducer([model], state, use_distributed_optimizer=zero)
        optimizer = Optimizer([model], state, weight_decay=0.5, reducer=reducer)
        model.backward()
        reducer.ready(0)
        reducer.finish()
        optimizer.step(0.1)
        return [param.flatten().tolist() for param in model.parameters()]


@pytest.mark.parametrize("zero", [False, True])
def test_weight_decay_is_for_matrices_only(ranks: Any, zero: bool) -> None:
    assert ranks(2, decayed, zero) == [[[0.95] * 9, [1.0] * 3, [0.95] * 4]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_many_small_steps_reach_half_precision_through_main_values(dtype: torch.dtype) -> None:
    """1 + 2^-12 is 1 in half precision; after 512 such steps 1.125."""
    model = Given((Shard("w", (1,)), [-1.0]), dtype=dtype)
    reducer = GradientReducer([model], single_process())
    optimizer = Optimizer([model], single_process(), kind="sgd", reducer=reducer, scaler=LossScaler(scale=1, growth=1))
    seen = []
    for step in range(512):
        model.backward()
        reducer.ready(0)
        reducer.finish()
        optimizer.step(2.0**-12)
        if step in (0, 511):
            seen.append(model.values()[0])
        assert model.p0.dtype == dtype
    assert seen == [1.0, 1.125]


def test_without_a_reducer_it_takes_the_gradients_as_they_are() -> None:
    model = Given((Shard("w", (2, 2)), [1.0, 2.0, 3.0, 4.0]), (Shard("unused", (2,)), [0.0, 0.0]), dtype=torch.bfloat16)
    optimizer = Optimizer(model, single_process(), kind="sgd")
    (model.p0.flatten() * model.given[0]).sum().backward()
    assert model.p1.grad is None
    assert optimizer.step(0.25) == pytest.approx(30**0.5)
    assert model.values() == [0.75, 0.5, 0.25, 0.0, 1.0, 1.0]
    assert model.p0.grad is model.p1.grad is None
    with pytest.raises(ValueError, match="model_states needs the reducer"):
        optimizer.model_states()


def test_unknown_kinds_are_refused() -> None:
    model = Given((Shard("w", (1,)), [0.0]))
    with pytest.raises(ValueError, match='must be "adamw" or "sgd", got \'lion\''):
        Optimizer(model, single_process(), kind="lion")
    with pytest.raises(ValueError, match='must be "stop" or "skip", got \'shrug\''):
        Optimizer(model, single_process(), on_nonfinite="shrug")


def test_the_learning_rate_warms_up_and_falls_along_a_cosine() -> None:
    rate = CosineSchedule(maximum=1.0, minimum=0.1, warmup=4, steps=15)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert rate(9) == pytest.approx(0.55)
    assert rate(14) == rate(100) == pytest.approx(0.1)
    assert all(rate(step) >= rate(step + 1) for step in range(3, 15))


# ---- numbers that are none ---------------------------------------------------------------------------------------------------


def poisoned(layout: Layout, bad: dict[int, str], policy: str, dtype: torch.dtype, zero: bool) -> dict[str, Any]:
    """Step 1 has a NaN in gradients of some ranks, {rank: parameter}, or in the loss, {rank: "loss"}."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        run = training(layout, state, dtype=dtype, zero=zero, on_nonfinite=policy)
        run.step(0)
        before = run.local()
        name = bad.get(state.rank, "loss")
        hook = run.named(name).register_hook(lambda grad: torch.full_like(grad, torch.nan)) if name != "loss" else None
        loss = run.gradients(1)
        if hook is not None:
            hook.remove()
        elif state.rank in bad:
            loss = loss * torch.inf
        said = ""
        try:
            run.optimizer.step(1e-2, loss)
        except NonFiniteError as error:
            said = str(error)
        after = run.local()
        seen = {
            "said": said or run.optimizer.skipped,
            "raised": bool(said),
            "unchanged": all(torch.equal(before[key], after[key]) for key in before),
            "attempts": (run.optimizer.attempts, run.optimizer.updates),
        }
        if not said:
            _, norm = run.step(2)
            later = run.local()
            seen["trains on"] = norm > 0 and any(not torch.equal(later[key], after[key]) for key in later)
        return seen


FC1, QKV = "layers.1.mlp.linear_fc1.weight", "layers.0.self_attention.linear_qkv.weight"


@pytest.mark.parametrize(
    ("layout", "bad", "words"),
    [
        (Layout(tp=2, dp=2), {2: FC1}, f"step 1: the gradient of {FC1} is not finite on ranks [2]"),
        (Layout(dp=4), {1: FC1, 3: QKV, 2: FC1}, f"step 1: the gradient of {QKV} (and 1 other parameters') is not finite on ranks [3]"),
        (Layout(pp=2, dp=2), {1: "loss"}, "step 1: the loss is not finite on ranks [1]"),
    ],
    ids=["tp2-dp2", "dp4", "loss"],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_the_first_parameter_and_its_ranks_are_named_and_no_rank_steps(
    run_on_ranks: Any, layout: Layout, bad: dict[int, str], words: str, policy: str
) -> None:
    zero = policy == "skip" and layout.dp == 4
    for seen in run_on_ranks(4, poisoned, layout, bad, policy, torch.float32, zero):
        assert seen["said"].removesuffix("; skipped") == words
        assert seen["raised"] == (policy == "stop")
        assert seen["unchanged"]
        assert seen["attempts"] == ((1, 1) if policy == "stop" else (2, 1))
        assert seen.get("trains on", True)


def test_fp16_at_the_smallest_scale_obeys_the_policy_and_a_bad_loss_at_any() -> None:
    for scale, loss, stops in ((2.0, 1.0, False), (1.0, 1.0, True), (2.0, torch.nan, True)):
        model = Given((Shard("w", (1,)), [torch.inf]), dtype=torch.float16)
        reducer = GradientReducer([model], single_process())
        optimizer = Optimizer([model], single_process(), reducer=reducer, scaler=LossScaler(scale=scale))
        model.backward()
        reducer.ready(0)
        reducer.finish()
        if stops:
            with pytest.raises(NonFiniteError):
                optimizer.step(0.1, loss)
        else:
            optimizer.step(0.1, loss)
            assert optimizer.loss_scale == scale / 2
        assert model.values() == [1.0]


def sum_overflows() -> str:
    with initialize_model_parallel() as state:
        model = Given((Shard("w", (1,)), [3e38]), dtype=torch.float32)
        reducer = GradientReducer([model], state)
        optimizer = Optimizer([model], state, reducer=reducer)
        model.backward()
        reducer.ready(0)
        reducer.finish()
        with pytest.raises(NonFiniteError) as error:
            optimizer.step(0.1)
        return str(error.value)


def test_a_sum_that_overflows_is_nobodys_fault(ranks: Any) -> None:
    said = set(ranks(2, sum_overflows))
    assert said == {"step 0: the gradient of w is not finite though each rank's share is: the sum overflows"}


# ---- what a checkpoint keeps -------------------------------------------------------------------------------------------------


def saved(run: Training) -> tuple[dict[tuple[str, str], Tensor], dict[str, Any]]:
    pieces = {key: piece.tensor.clone() for key, piece in run.optimizer.state_pieces().items()}
    return pieces, json.loads(json.dumps(run.optimizer.scalars()))


def restored(layout: Layout, kind: str, dtype: torch.dtype, zero: bool) -> dict[str, Any]:
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        first, second = (training(layout, state, kind=kind, dtype=dtype, zero=zero, max_norm=1.0) for _ in range(2))
        for step in range(2):
            first.step(step)
        pieces, scalars = saved(first)
        for mine, other in zip(second.chunks, first.chunks, strict=True):
            mine.load_state_dict(other.state_dict())
        for key, piece in second.optimizer.state_pieces().items():
            assert piece.tensor.numel() == piece.end - piece.start
            assert torch.Size(piece.shard.shape).numel() >= piece.end
            piece.tensor.copy_(pieces[key])
        second.optimizer.load_scalars(scalars)
        numbers = [(first.step(step), second.step(step)) for step in range(2, 4)]
        a, b = first.local(), second.local()
        return {
            "equal": all(x == y for x, y in numbers) and all(torch.equal(a[key], b[key]) for key in a),
            "kinds": sorted({kind for _, kind in pieces}),
            "scalars": scalars,
        }


@pytest.mark.parametrize(
    ("kind", "dtype", "zero", "kinds"),
    [
        ("adamw", torch.float32, False, ["exp_avg", "exp_avg_sq"]),
        ("adamw", torch.bfloat16, True, ["exp_avg", "exp_avg_sq", "main"]),
        ("adamw", torch.float64, True, ["exp_avg", "exp_avg_sq"]),
        ("sgd", torch.bfloat16, False, ["main"]),
        ("sgd", torch.float32, True, []),
    ],
)
def test_state_written_into_another_optimizer_continues_bit_for_bit(
    run_on_ranks: Any, kind: str, dtype: torch.dtype, zero: bool, kinds: list[str]
) -> None:
    for seen in run_on_ranks(4, restored, Layout(dp=2, pp=2), kind, dtype, zero):
        assert seen["equal"]
        assert seen["kinds"] == kinds
        assert seen["scalars"] == {"attempts": 2, "updates": 2, "scaler": None}
