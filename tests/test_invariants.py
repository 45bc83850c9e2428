"""Every relation between ranks that must hold is seen to fail: by name, by rank, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minimeg.invariants import InvariantError, check_invariants
from minimeg.parallel_state import initialize_model_parallel
from tests.pipeline.layouts import Layout
from tests.rank_functions.training import Training, training

CUBE = Layout(tp=2, dp=2, pp=2)  # rank = tp + 2 dp + 4 pp
NORM, FC1 = "layers.0.input_layernorm.weight", "layers.0.mlp.linear_fc1.weight"
WORDS, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


def nudge(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.view(-1)[3] = torch.nextafter(x.view(-1)[3], torch.tensor(torch.inf, dtype=x.dtype))


def parameter(run: Training, name: str) -> None:
    nudge(run.named(name))


def gradient(run: Training, name: str) -> None:
    grad = run.named(name).grad
    assert grad is not None
    nudge(grad)


def moment(run: Training, name: str) -> None:
    nudge(run.optimizer.state_pieces()[name, "exp_avg_sq"].tensor)


def same_shards(run: Training, name: str) -> None:
    with torch.no_grad():
        run.named(name).copy_(run.state.tp.broadcast(run.named(name), 0))


def half_a_step(run: Training, name: str) -> None:
    run.optimizer.updates -= 1


# (who does it, what, to which parameter, words of the message)
FAULTS: list[tuple[list[int], Callable[[Training, str], None], str, list[str]]] = [
    ([2], parameter, NORM, [f"parameter {NORM}: every rank must hold the same, but it differs between ranks [0, 1, 3] and [2]"]),
    ([0, 2], parameter, NORM, [f"parameter {NORM}: every rank must hold the same, but it differs between ranks [0, 2] and [1, 3]"]),
    ([3], parameter, FC1, [f"parameter {FC1}: every rank of tp=1 must hold the same, but it differs between ranks [1] and [3]"]),
    ([0], gradient, NORM, [f"gradient {NORM}: every rank must hold the same, but it differs between ranks [0] and [1, 2, 3]"]),
    ([1], gradient, FC1, [f"gradient {FC1}: every rank of tp=1 must hold the same, but it differs between ranks [1] and [3]"]),
    ([1], moment, FC1, [f"exp_avg_sq {FC1}: every rank of tp=1 must hold the same, but it differs between ranks [1] and [3]"]),
    ([4, 6], parameter, HEAD, [f"parameter {WORDS}: the copies of this tied parameter differ (tp=0): {WORDS} on rank 0, ",
                               f"{HEAD} on rank 4, {HEAD} on rank 6"]),
    ([5, 7], gradient, HEAD, [f"gradient {WORDS}: the copies of this tied parameter differ (tp=1)"]),
    ([0, 1, 2, 3], same_shards, FC1, [f"parameter {FC1}: ranks [0, 1] hold different shards of it, but these are equal"]),
    ([6], half_a_step, "", ["the optimizers are out of step: ranks [0, 1, 2, 3, 4, 5, 7]: {'attempts': 1, 'updates': 1",
                            "ranks [6]: {'attempts': 1, 'updates': 0"]),
]  # fmt: skip


def broken(which: int, zero: bool) -> tuple[str, str]:
    """-> (what the check says of a right run, and after the fault)."""
    guilty, fault, name, _ = FAULTS[which]
    with initialize_model_parallel(CUBE.tp, CUBE.pp) as state:
        run = training(CUBE, state, zero=zero)
        run.step(0)
        run.gradients(1)
        right = str(check_invariants(run.chunks, state, run.optimizer))
        if state.rank in guilty:
            fault(run, name)
        with pytest.raises(InvariantError) as error:
            check_invariants(run.chunks, state, run.optimizer)
        return right, str(error.value)


@pytest.mark.parametrize("which", range(len(FAULTS)))
def test_each_fault_is_found_and_named_on_every_rank(run_on_ranks: Any, which: int) -> None:
    results = run_on_ranks(CUBE.world, broken, which, False)
    assert len({said for _, said in results}) == 1
    for right, said in results:
        assert right.startswith("invariants hold: ")
        assert said.startswith("the ranks disagree:\n")
        assert len(said.splitlines()) == 2, "nothing else is blamed"
        for words in FAULTS[which][3]:
            assert words in said


def test_a_drifting_copy_under_zero(run_on_ranks: Any) -> None:
    """CASE 17: one copy of a tied embedding is off; all else is right."""
    for right, said in run_on_ranks(CUBE.world, broken, 6, True):
        assert right.startswith("invariants hold: ")
        assert FAULTS[6][3][0] in said


def holds(layout: Layout, zero: bool, dtype: torch.dtype) -> list[tuple[int, int, float]]:
    """Before the first step, with gradients, after steps."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        run = training(layout, state, zero=zero, dtype=dtype, max_norm=0.5)
        reports = [check_invariants(run.chunks, state, run.optimizer)]
        for step in range(2):
            loss = run.gradients(step)
            reports.append(check_invariants(run.chunks, state, run.optimizer))
            run.optimizer.step(1e-2, loss)
            reports.append(check_invariants(run.chunks, state, run.optimizer))
        reports.append(check_invariants(run.chunks, state))
        return [(report.tensors, report.bytes, report.seconds) for report in reports]


@pytest.mark.parametrize(
    ("layout", "zero", "dtype"),
    [
        (Layout(), False, torch.float32),
        (Layout(tp=4), False, torch.float64),  # 27 tokens over 4 ranks, one padded row
        (Layout(tp=2, dp=2, sequence_parallel=True), True, torch.bfloat16),
        (Layout(dp=2, pp=2, tied=False), True, torch.float32),
        (Layout(dp=2, pp=2, schedule="zb-v", chunks=2), False, torch.float16),
        (Layout(tp=2, dp=2, pp=2, sequence_parallel=True), False, torch.float64),
    ],
    ids=str,
)
def test_right_runs_hold(run_on_ranks: Any, layout: Layout, zero: bool, dtype: torch.dtype) -> None:
    for reports in run_on_ranks(layout.world, holds, layout, zero, dtype):
        assert all(tensors > 10 and size > 1000 and 0 < seconds < 60 for tensors, size, seconds in reports)
        assert len({tensors for tensors, _, _ in reports[:-1]}) == 1
