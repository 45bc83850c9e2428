"""The loss scaler by itself, fp16 and bf16 against float64, and an overflow that all ranks answer together."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from minimeg.data_parallel import GradientReducer
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard, ShardedModule, full_state
from minimeg.precision import LossScaler
from tests.pipeline.layouts import Layout
from tests.rank_functions.training import Training, training

# ---- the scaler --------------------------------------------------------------------------------------------------------------


def test_it_halves_at_an_overflow_and_doubles_after_an_interval() -> None:
    scaler = LossScaler(scale=8, interval=3)
    scales = []
    for overflow in (False, False, True, False, False, False, False, False, False, True, True):
        scaler.update(overflow)
        scales.append(scaler.scale)
    assert scales == [8, 8, 4, 4, 4, 8, 8, 8, 16, 8, 4]


def test_it_stays_between_its_bounds() -> None:
    scaler = LossScaler(scale=2, interval=1, minimum=1, maximum=4)
    assert scaler.can_back_off
    for _ in range(3):
        scaler.update(overflow=True)
    assert (scaler.scale, scaler.can_back_off) == (1, False)
    for _ in range(5):
        scaler.update(overflow=False)
    assert scaler.scale == 4


def test_its_state_is_plain_numbers_and_continues() -> None:
    scaler = LossScaler(scale=32, interval=4)
    scaler.update(False)
    scaler.update(False)
    text = json.dumps(scaler.state_dict())
    other = LossScaler()
    other.load_state_dict(json.loads(text))
    assert other == scaler
    for overflow in (False, False, True):
        scaler.update(overflow)
        other.update(overflow)
    assert other == scaler
    assert other.scale == 32


def test_a_damaged_state_changes_nothing() -> None:
    scaler = LossScaler(scale=32)
    for damaged in ({"scale": 4.0}, scaler.state_dict() | {"other": 1}, scaler.state_dict() | {"scale": 3.0}):
        with pytest.raises(ValueError):
            scaler.load_state_dict(damaged)
    assert scaler == LossScaler(scale=32)


def test_all_faults_at_once() -> None:
    with pytest.raises(ValueError) as error:
        LossScaler(scale=3, growth=0.5, backoff=2, interval=0, minimum=float("inf"))
    for words in ("scale=3 must be a power of two, e.g. 65536", "minimum=inf", "growth=0.5", "backoff=2", "interval=0"):
        assert words in str(error.value)
    with pytest.raises(ValueError, match=r"scale=0\.5 must lie in 1\.0\.\."):
        LossScaler(scale=0.5)


# ---- half precision against float64 ------------------------------------------------------------------------------------------


class Line(ShardedModule):
    """y = w . x of [n] numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = self.add_parameter("weight", Shard("weight", (4,)), draw=False)
        with torch.no_grad():
            self.weight.fill_(1)
        self.to(dtype)


def vanishing(scaler: LossScaler | None) -> tuple[list[float], list[float]]:
    """Gradients of 2^-26 in fp16 -> (what the optimizer makes of them, loss scale included; the norm)."""
    model = Line(torch.float16)
    reducer = GradientReducer([model], single_process())
    optimizer = Optimizer([model], single_process(), kind="sgd", reducer=reducer, scaler=scaler)
    loss = (model.weight * torch.tensor(2.0**-13, dtype=torch.float16)).float().sum() * 2.0**-13
    (loss * optimizer.loss_scale).backward()
    reducer.ready(0)
    reducer.finish()
    norm = optimizer.step(2.0**20)
    return [1 - value for value in optimizer.main[0].tolist()], [norm]


def test_small_gradients_vanish_without_scaling_and_are_exact_with_it() -> None:
    moved, norm = vanishing(LossScaler(scale=1))
    assert (moved, norm) == ([0.0] * 4, [0.0])
    moved, norm = vanishing(None)  # the default: 2^16
    assert moved == [2.0**20 * 2.0**-26] * 4
    assert norm == [2 * 2.0**-26]


def gradients(dtype: torch.dtype, microbatches: int, wide: bool = True) -> dict[str, Tensor]:
    run = training(Layout(microbatches=microbatches, layers=2), single_process(), dtype=dtype)
    if not wide:
        for bucket in run.reducer.buckets[0]:
            for param, _ in bucket.members:
                param.grad, param.grad_dtype = None, dtype
    scale = run.optimizer.loss_scale
    run.gradients(0)
    return {name: grad.double() / scale for name, grad in full_state(run.chunks, run.state, lambda p: p.grad).items()}


def error(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Over all gradients together, relative."""
    difference = sum(float((found[name] - right[name]).square().sum()) for name in right)
    return float((difference / sum(float(x.square().sum()) for x in right.values())) ** 0.5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.02), (torch.float16, 0.003)], ids=str)
def test_gradients_of_a_gpt_over_64_microbatches(dtype: torch.dtype, bound: float) -> None:
    """Against float64. What remains is the rounding inside each micro-batch; the 64 additions add nothing to it."""
    right = gradients(torch.float64, 64)
    summed_wide, summed_narrow = error(gradients(dtype, 64), right), error(gradients(dtype, 64, wide=False), right)
    assert summed_wide < 0.9 * summed_narrow, "about three quarters of it"
    assert summed_wide < bound


# ---- all ranks decide together -----------------------------------------------------------------------------------------------


def overflow_on_one_rank(bad: int | None, value: float, layout: Layout, zero: bool) -> dict[str, Any]:
    """Three steps; in the second one rank's gradient of one parameter overflows before any sum. What this rank did."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        run = training(layout, state, dtype=torch.float16, zero=zero, scaler=LossScaler(scale=1024.0))
        seen: dict[str, Any] = {"scales": [], "moved": [], "skipped": [], "updates": [], "lost": []}
        for step in range(3):
            before = run.local()
            poisoned = step == 1 and state.rank == bad
            if poisoned:
                last = run.reducer.buckets[0][-1].members[0][0]
                hook = last.register_hook(lambda grad: torch.full_like(grad, value))
            _, norm = run.step(step)
            if poisoned:
                hook.remove()
            after = run.local()
            seen["scales"].append(run.optimizer.loss_scale)
            seen["moved"].append(any(not torch.equal(before[name], after[name]) for name in before))
            seen["skipped"].append(run.optimizer.skipped)
            seen["updates"].append((run.optimizer.attempts, run.optimizer.updates))
            seen["lost"].append(not norm < float("inf"))
        seen["steps"] = {float(s["step"]) for s in run.optimizer.update.state.values()}
        seen["name"] = run.reducer.buckets[0][-1].members[0][1].name
        return seen


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
@pytest.mark.parametrize(
    ("layout", "bad", "value"),
    [(Layout(tp=2, pp=2), 3, torch.inf), (Layout(tp=2, pp=2), 0, torch.nan), (Layout(dp=4), 2, -torch.inf)],
    ids=str,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    run_on_ranks: Any, layout: Layout, bad: int, value: float, zero: bool
) -> None:
    """CASE 51."""
    results = run_on_ranks(layout.world, overflow_on_one_rank, bad, value, layout, zero)
    for seen in results:
        assert seen["moved"] == [True, False, True], "no parameter, main value or moment of any rank"
        assert seen["scales"] == [1024, 512, 512]
        assert seen["updates"] == [(1, 1), (2, 1), (3, 2)]
        assert seen["lost"] == [False, True, False]
        assert seen["steps"] == {2.0}
        assert seen["skipped"][0] is seen["skipped"][2] is None
        assert seen["skipped"][1] == results[0]["skipped"][1]
        name = results[bad]["name"]
        assert f"step 1: the gradient of {name} is not finite on ranks [{bad}]" in seen["skipped"][1]
        assert "loss scale was 1024" in seen["skipped"][1]


def resumed(layout: Layout, zero: bool) -> list[str]:
    """Five steps in one go, and two, a new optimizer with the state of the old one, three more: what differs at the end."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:

        def begin() -> Training:
            scaler = LossScaler(scale=2.0**22, interval=2)  # too large at first: it overflows, then grows
            return training(layout, state, dtype=torch.float16, zero=zero, scaler=scaler, max_norm=1.0)

        whole, first, second = begin(), begin(), begin()
        numbers = [whole.step(step) for step in range(6)]
        again = [first.step(step) for step in range(3)]
        saved = {key: piece.tensor.clone() for key, piece in first.optimizer.state_pieces().items()}
        scalars = json.loads(json.dumps(first.optimizer.scalars()))
        for mine, other in zip(second.chunks, first.chunks, strict=True):
            mine.load_state_dict(other.state_dict())
        for key, piece in second.optimizer.state_pieces().items():
            piece.tensor.copy_(saved[key])
        second.optimizer.load_scalars(scalars)
        again += [second.step(step) for step in range(3, 6)]
        a, b = whole.local(), second.local()
        different = [name for name in a if not torch.equal(a[name], b[name])]
        if str(numbers) != str(again):  # NaN equals itself as text
            different.append(f"{numbers} {again}")
        if whole.optimizer.scalars() != second.optimizer.scalars():
            different.append("scalars")
        if not 0 < whole.optimizer.updates < whole.optimizer.attempts:
            different.append("nothing was skipped, or everything")
        return different


@pytest.mark.parametrize("zero", [False, True], ids=["", "zero"])
def test_state_restored_continues_bit_for_bit(run_on_ranks: Any, zero: bool) -> None:
    assert run_on_ranks(4, resumed, Layout(dp=2, pp=2), zero) == [[]] * 4
