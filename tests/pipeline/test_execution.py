"""Every schedule, run on real ranks, equals one process: to the bit, since no sum is reordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minimeg.comm import Group
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.pipeline import Recorder, run
from minimeg.schedule import Schedule, build, prove
from tests.pipeline.stages import (
    SHAPES,
    Live,
    chunks_of,
    equal,
    gradients,
    in_one_process,
    loss,
    samples,
    watched,
)

MICROBATCHES = (1, 2, 3, 4, 7, 8)
NORMALISER = 3.0
OWN = "F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2"  # a schedule of one's own: rank 0 is one ahead


def schedules(p: int) -> list[Schedule]:
    """All executable ones with a flush, in all sizes that they take."""
    found = [
        build(name, p, m) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v") for m in MICROBATCHES
    ]
    found += [build("interleaved", p, m, chunks=n) for m in MICROBATCHES for n in (1, 2, 3)]
    found += [build("interleaved", p, m, chunks=2, group_size=g) for m in (3, 8) for g in (p + 1, 2 * p)]
    return found


def most_sends(schedule: Schedule) -> float:
    """What is promised of sends begun and not yet done."""
    if schedule.forward_only:
        return 3 if schedule.chunks == 1 else 2 * schedule.stages
    factor = {"1f1b": 1, "zb-h1": 1, "interleaved": 2}.get(schedule.name)
    size = (schedule.name, schedule.stages, schedule.microbatches)
    if factor is None or schedule.chunks != factor or schedule != build(*size, chunks=factor):
        return float("inf")
    return factor * schedule.stages


def execute(
    schedule: Schedule,
    pp: Group,
    one_tag: bool = False,
    in_order: bool = False,
    unequal: bool = False,
    shape: str = "plain",
) -> list[str]:
    """Run a schedule and say what is not as it should be, on this rank."""
    live, group, recorder = Live(), watched(pp, one_tag, in_order), Recorder()
    chunks = chunks_of(schedule, group.rank, live, shape)
    batch = samples(schedule.microbatches, unequal)
    begun: list[tuple[int, int]] = []  # (chunk, actions before it)
    ready: list[tuple[int, int]] = []
    result = run(
        schedule,
        chunks,
        batch,
        group=group,
        loss=loss,
        normaliser=NORMALISER,
        on_gradients_ready=lambda chunk: ready.append((chunk, len(recorder.spans))),
        before_last_backward=lambda chunk: begun.append((chunk, len(recorder.spans))),
        recorder=recorder,
    )
    faults = wrong_numbers(schedule, chunks, batch, float(result.loss), shape)
    row = schedule.ranks[group.rank]
    if not result.actions == row == tuple(span.action for span in recorder.spans):
        faults.append(f"did {result.actions}")
    proven = prove(schedule).peak_in_flight[group.rank]
    if result.peak_in_flight != proven or (live.peak != proven if shape == "plain" else live.peak > proven):
        faults.append(f"held {live.peak} micro-batches, counted {result.peak_in_flight}, proven {proven}")
    if live.kept_outputs:
        faults.append(f"{live.kept_outputs} outputs were alive after they had been handed on")
    if live.held:
        faults.append(f"activations of {sorted(live.held)} are alive after the step")
    last = {action.chunk: place for place, action in enumerate(row) if action.kind in "BW"}
    if sorted(ready) != sorted((chunk, place + 1) for chunk, place in last.items()):
        faults.append(f"gradients were called ready at {ready}, are at {last}")
    if sorted(begun) != ([] if schedule.split else sorted(last.items())):
        faults.append(f"the last backward was announced at {begun}, is at {last}")
    if group.outstanding or not group.peak == result.peak_sends <= most_sends(schedule):
        faults.append(
            f"{group.peak} sends were outstanding, counted {result.peak_sends}; {group.outstanding} still are"
        )
    size = f"{schedule.name} p={schedule.stages} m={schedule.microbatches} n={schedule.chunks} {shape}"
    return [f"{size}: {fault}" for fault in faults]


def wrong_numbers(schedule: Schedule, chunks: list[Any], batch: list[Any], found: float, shape: str) -> list[str]:
    expected_loss, expected = in_one_process(schedule.virtual_stages, batch, NORMALISER, shape)
    faults = [] if found == expected_loss else [f"loss {found} instead of {expected_loss}"]
    if schedule.forward_only:
        expected = dict.fromkeys(expected)
    # A message, and a gradient that autograd keeps, lie in memory as their tensors' shapes say. Where the output itself does not,
    # one process sums in another order.
    bound = 1e-10 if shape == "transposed" else 0.0
    for name, grad in gradients(chunks).items():
        right = expected[name]
        if (grad is None) != (right is None):
            faults.append(f"gradient of {name} is {grad} instead of {right}")
        elif grad is not None and right is not None and not float((grad - right).abs().max()) <= bound:
            faults.append(f"gradient of {name} is off by {float((grad - right).abs().max()):.1e}")
    return faults


def execute_all(todo: list[Schedule], **how: Any) -> list[str]:
    pp = initialize_model_parallel(pipeline_model_parallel_size=todo[0].stages).pp
    return [fault for schedule in todo for fault in execute(schedule, pp, **how)]


@pytest.mark.parametrize("in_order", [False, True], ids=["duplex", "one order"])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_schedule_equals_one_process_to_the_bit(run_on_ranks: Any, p: int, in_order: bool) -> None:
    """CASES 23, 24, 30, 53: m < p, no deadlock, every m, and held is exactly what was proven."""
    assert run_on_ranks(p, execute_all, schedules(p), in_order=in_order, timeout=120) == [[]] * p


@pytest.mark.parametrize("in_order", [False, True], ids=["duplex", "one order"])
def test_two_ranks_need_no_tags(run_on_ranks: Any, in_order: bool) -> None:
    """With p = 2 the next rank and the one before are the same: only the order of messages tells the directions apart."""
    todo = schedules(2) + [build("forward-only", 2, 5, chunks=n) for n in (1, 2, 3)]
    assert run_on_ranks(2, execute_all, todo, one_tag=True, in_order=in_order, timeout=120) == [[]] * 2


@pytest.mark.parametrize("p", [2, 3, 4])
def test_evaluation_gives_the_loss_and_keeps_nothing(run_on_ranks: Any, p: int) -> None:
    """Forward only: no gradient, no saved tensor, and at most three messages not yet let go, 2p with several chunks."""
    todo = [build("forward-only", p, m, chunks=n) for m in (*MICROBATCHES, 16) for n in (1, 2, 3)]
    assert run_on_ranks(p, execute_all, todo) == [[]] * p


def test_microbatches_may_differ_in_length(run_on_ranks: Any) -> None:
    names = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v", "forward-only")
    assert run_on_ranks(3, execute_all, [build(name, 3, 5) for name in names], unequal=True) == [[]] * 3


def test_a_schedule_of_ones_own_runs(run_on_ranks: Any) -> None:
    assert run_on_ranks(2, execute_all, [Schedule.parse(OWN)]) == [[]] * 2


def test_one_rank_with_several_chunks_hands_over_in_memory() -> None:
    group = single_process().pp
    todo = [build("gpipe", 1, 3), build("interleaved", 1, 3, chunks=3), build("zb-v", 1, 3), build("dualpipe-v", 1, 3)]
    todo += [build("forward-only", 1, 3, chunks=3)]
    faults = [fault for schedule in todo for shape in SHAPES for fault in execute(schedule, group, shape=shape)]
    assert faults == []


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"plain"}))
def test_outputs_may_be_views_or_the_input_itself(run_on_ranks: Any, shape: str) -> None:
    """Only the gradient edge of an output is kept, so a view needs no special case, in a message and handed over in memory (zb-v)."""
    todo = [build("1f1b", 2, 3), build("interleaved", 2, 3, chunks=2), build("zb-h1", 2, 3), build("zb-v", 2, 3)]
    assert run_on_ranks(2, execute_all, todo, shape=shape) == [[]] * 2


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 1)])
def test_what_is_held_does_not_grow_with_the_microbatches(run_on_ranks: Any, name: str, chunks: int) -> None:
    """CASE 53: the same peak at m = 12 and at m = 32; that it is really held, and no more, ``execute`` sees from outside."""
    few, many = (build(name, 3, m, chunks=chunks) for m in (12, 32))
    assert prove(few).peak_in_flight == prove(many).peak_in_flight
    assert run_on_ranks(3, execute_all, [few, many]) == [[]] * 3


# ---- what the loss sees ------------------------------------------------------------------------------------------------------


def labels(schedule: Schedule) -> list[tuple[float, int]]:
    """Each stage passes the number of its micro-batch on; the loss notes which number met which sample."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    met: list[tuple[float, int]] = []

    class Pass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

        def input_shape(self, sample: Any) -> Any:
            return (1,), torch.float64

        output_shape = input_shape

        def forward(self, x: torch.Tensor | None, sample: Any) -> torch.Tensor:
            return self.weight * (torch.tensor([float(sample.index)], dtype=torch.float64) if x is None else x)

    def note(output: torch.Tensor, sample: Any) -> torch.Tensor:
        met.append((float(output.detach()), sample.index))
        return output.sum()

    chunks = [Pass() for _ in range(schedule.chunks)]
    evaluation = replace(
        build("forward-only", schedule.stages, 3, chunks=schedule.chunks), placement=schedule.placement
    )
    for _ in range(2):
        run(schedule, chunks, samples(schedule.microbatches), group=pp, loss=note, normaliser=1.0)
        run(evaluation, chunks, samples(3), group=pp, loss=note, normaliser=1.0)
    return met


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "dualpipe-v"])
def test_an_output_meets_the_label_of_its_own_microbatch(run_on_ranks: Any, name: str) -> None:
    """CASE 28, with an evaluation in between, for every schedule."""
    met = [pair for pairs in run_on_ranks(3, labels, build(name, 3, 5)) for pair in pairs]
    assert len(met) == 2 * (5 + 3)
    assert all(output == index for output, index in met)


# ---- frozen stages -----------------------------------------------------------------------------------------------------------


def frozen(schedule: Schedule, trained: tuple[int, ...]) -> list[str]:
    """Only the virtual stages ``trained`` have parameters that need a gradient; the others get none."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    chunks, batch = chunks_of(schedule, pp.rank), samples(schedule.microbatches)
    for block in chunks:
        block.requires_grad_(block.number in trained)
    run(schedule, chunks, batch, group=pp, loss=loss, normaliser=NORMALISER)
    expected = in_one_process(schedule.virtual_stages, batch, NORMALISER)[1]
    return [
        name
        for name, grad in gradients(chunks).items()
        if not equal(grad, expected[name] if int(name.split(".")[0]) in trained else None)
    ]


@pytest.mark.parametrize("trained", [(), (0,), (1,), (2,)])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v"])
def test_frozen_stages(run_on_ranks: Any, name: str, trained: tuple[int, ...]) -> None:
    assert run_on_ranks(3, frozen, build(name, 3, 4), trained) == [[]] * 3
