"""Every schedule, run on real ranks, equals one process: to the bit, since no sum is reordered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minimeg.comm import Group, Pending, ledger
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.pipeline import run
from minimeg.schedule import Schedule, ScheduleError, build, prove
from minimeg.schedule.actions import Action
from tests.pipeline.stages import H, Live, chunks_of, gradients, in_one_process, loss, samples
from tests.rank_functions import Outside

MICROBATCHES = (1, 2, 3, 4, 7, 8)
NORMALISER = 3.0
OWN = "F0 F1 B0 F2 B1 B2\nF0 B0 F1 B1 F2 B2"  # a schedule of one's own: rank 0 is one ahead


def schedules(p: int) -> list[Schedule]:
    """All executable ones with a flush, in all sizes that they take."""
    found = [
        build(name, p, m) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v", "dualpipe-v") for m in MICROBATCHES
    ]
    found += [build("interleaved", p, m, chunks=n) for m in MICROBATCHES for n in (1, 2, 3)]
    found += [build("interleaved", p, m, chunks=2, group_size=p + 1) for m in (3, 8)]
    return found


class OneTag(Group):
    """All messages under the same tag: only their order can tell them apart."""

    def isend(self, x: torch.Tensor, dst: int, tag: int = 0) -> Pending:
        return super().isend(x, dst, 0)

    def irecv(
        self, shape: Any, dtype: torch.dtype, src: int, tag: int = 0, device: torch.device | None = None
    ) -> Pending:
        return super().irecv(shape, dtype, src, 0, device)


def without_tags(group: Group) -> Group:
    return OneTag(group.ranks, group.rank, group.name, group.handle, False, group.coordinates, group.store)


def execute(schedule: Schedule, group: Group, unequal: bool = False) -> list[str]:
    """Run a schedule and say what is not as it should be, on this rank."""
    live = Live()
    chunks = chunks_of(schedule, group.rank, live)
    batch = samples(schedule.microbatches, unequal)
    ready: list[tuple[int, tuple[Any, ...]]] = []
    result = run(
        schedule,
        chunks,
        batch,
        group=group,
        loss=loss,
        normaliser=NORMALISER,
        on_gradients_ready=lambda chunk: ready.append((chunk, tuple(sorted(gradients([chunks[chunk]]))))),
    )
    expected_loss, expected = in_one_process(schedule.stages * schedule.chunks, batch, NORMALISER)
    faults = []
    if float(result.loss) != expected_loss:
        faults.append(f"loss {float(result.loss)} instead of {expected_loss}")
    for name, grad in gradients(chunks).items():
        if not torch.equal(grad, expected[name]):
            faults.append(f"gradient of {name} is off by {float((grad - expected[name]).abs().max()):.1e}")
    if result.actions != schedule.ranks[group.rank]:
        faults.append(f"did {result.actions}")
    proven = prove(schedule).peak_in_flight[group.rank]
    if not live.peak <= result.peak_in_flight == proven:
        faults.append(f"held {live.peak} micro-batches, counted {result.peak_in_flight}, proven {proven}")
    if live.kept_outputs:
        faults.append(f"{live.kept_outputs} outputs were alive after they had been handed on")
    if live.held:
        faults.append(f"activations of {sorted(live.held)} are alive after the step")
    if sorted(chunk for chunk, _ in ready) != list(range(schedule.chunks)):
        faults.append(f"chunks were ready {ready}")
    factor = {"1f1b": 1, "zb-h1": 1, "interleaved": 2}.get(schedule.name)
    usual = factor == schedule.chunks and schedule == build(schedule.name, schedule.stages, len(batch), chunks=factor)
    if factor and usual and result.peak_sends > factor * schedule.stages:
        faults.append(f"{result.peak_sends} sends were outstanding, more than {factor} p")
    return [
        f"{schedule.name} p={schedule.stages} m={schedule.microbatches} n={schedule.chunks}: {fault}"
        for fault in faults
    ]


def execute_all(todo: list[Schedule], tags: bool = True, unequal: bool = False) -> list[str]:
    pp = initialize_model_parallel(pipeline_model_parallel_size=todo[0].stages).pp
    group = pp if tags else without_tags(pp)
    return [fault for schedule in todo for fault in execute(schedule, group, unequal)]


@pytest.mark.parametrize("p", [2, 3, 4])
def test_every_schedule_equals_one_process_to_the_bit(run_on_ranks: Any, p: int) -> None:
    """CASES 23, 24, 30, 53: m < p, no deadlock, every m, and nothing held longer than proven."""
    assert run_on_ranks(p, execute_all, schedules(p), timeout=120) == [[]] * p


def test_two_ranks_need_no_tags(run_on_ranks: Any) -> None:
    """With p = 2 the next rank and the one before are the same: only the order of messages tells the directions apart."""
    assert run_on_ranks(2, execute_all, schedules(2), tags=False, timeout=120) == [[]] * 2


def test_microbatches_may_differ_in_length(run_on_ranks: Any) -> None:
    todo = [build(name, 3, 5) for name in ("1f1b", "zb-h1", "zb-v")] + [build("interleaved", 3, 5, chunks=2)]
    assert run_on_ranks(3, execute_all, todo, unequal=True) == [[]] * 3


def test_a_schedule_of_ones_own_runs(run_on_ranks: Any) -> None:
    assert run_on_ranks(2, execute_all, [Schedule.parse(OWN)]) == [[]] * 2


def test_one_rank_with_several_chunks_hands_over_in_memory() -> None:
    group = single_process().pp
    todo = [build("gpipe", 1, 3), build("interleaved", 1, 3, chunks=3), build("zb-v", 1, 3)]
    assert [fault for schedule in todo for fault in execute(schedule, group)] == []


# ---- messages, counted from outside ------------------------------------------------------------------------------------------


def count_messages(schedule: Schedule) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What torch was asked to send and receive, and what the ledger says; the loss at the end apart."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    chunks, batch = chunks_of(schedule, pp.rank), samples(schedule.microbatches)
    with ledger() as book, Outside() as outside:
        run(schedule, chunks, batch, group=pp, loss=loss, normaliser=NORMALISER)
    return (
        [(op, size) for op, size in outside.communication if op in ("send", "recv")],
        [(record.op, record.payload) for record in book.records if record.op in ("send", "recv")],
    )


@pytest.mark.parametrize(
    ("name", "chunks", "m"), [("1f1b", 1, 5), ("interleaved", 2, 6), ("zb-v", 2, 4), ("gpipe", 1, 1)]
)
def test_one_message_each_way_a_boundary_and_microbatch(run_on_ranks: Any, name: str, chunks: int, m: int) -> None:
    schedule = build(name, 3, m, chunks=chunks)
    everybody = run_on_ranks(3, count_messages, schedule)
    sbh = 4 * 2 * H * 8
    crossings = sum(schedule.rank_of(v) != schedule.rank_of(v + 1) for v in range(3 * schedule.chunks - 1))
    for rank, (outside, book) in enumerate(everybody):
        assert outside == book
        assert {size for _, size in outside} == {sbh}
        mine = [schedule.virtual_stage(rank, c) for c in range(schedule.chunks)]
        sent = sum(
            0 <= v + step < 3 * schedule.chunks and schedule.rank_of(v + step) != rank for v in mine for step in (1, -1)
        )
        assert sum(op == "send" for op, _ in outside) == sum(op == "recv" for op, _ in outside) == m * sent
    assert sum(op == "send" for outside, _ in everybody for op, _ in outside) == 2 * m * crossings


def peers() -> list[tuple[str, bool]]:
    """Which group and which peers do point-to-point operations name? tp = pp = dp = 2."""
    import torch.distributed as dist

    state = initialize_model_parallel(2, 2)
    seen: list[tuple[str, bool]] = []
    real = {"isend": dist.isend, "irecv": dist.irecv}

    def spy(name: str) -> Any:
        def call(tensor: torch.Tensor, peer: int, group: Any = None, tag: int = 0) -> Any:
            seen.append((name, group is state.pp.handle and peer in state.pp.ranks and peer != state.rank))
            return real[name](tensor, peer, group=group, tag=tag)

        return call

    dist.isend, dist.irecv = spy("isend"), spy("irecv")
    try:
        schedule = build("1f1b", 2, 3)
        run(schedule, chunks_of(schedule, state.pp.rank), samples(3), group=state.pp, loss=loss, normaliser=1.0)
    finally:
        dist.isend, dist.irecv = real["isend"], real["irecv"]
    return seen


def test_messages_stay_inside_the_pipeline_group(run_on_ranks: Any) -> None:
    """CASE 26: every message names the pipeline's group and a global rank of it."""
    for seen in run_on_ranks(8, peers):
        assert seen == [(name, True) for name, _ in seen]
        assert sorted(name for name, _ in seen) == ["irecv"] * 3 + ["isend"] * 3


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
    evaluation = build("forward-only", schedule.stages, 3, chunks=schedule.chunks)
    evaluation = replace(evaluation, placement=schedule.placement) if schedule.placement == "loop" else None
    for _ in range(2):
        run(schedule, chunks, samples(schedule.microbatches), group=pp, loss=note, normaliser=1.0)
        if evaluation is not None:
            run(evaluation, chunks, samples(3), group=pp, loss=note, normaliser=1.0)
    return met


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_an_output_meets_the_label_of_its_own_microbatch(run_on_ranks: Any, name: str, chunks: int) -> None:
    """CASE 28, with an evaluation in between."""
    schedule = build(name, 3, 5, chunks=chunks)
    everybody = run_on_ranks(3, labels, schedule)
    met = [pair for pairs in everybody for pair in pairs]
    assert len(met) == (2 * (5 + 3) if schedule.placement == "loop" else 10)
    assert all(output == index for output, index in met)


# ---- what is refused, and what goes wrong ------------------------------------------------------------------------------------


def refused(schedule: Schedule, **changes: Any) -> tuple[str, int]:
    """The refusal, and how many messages were sent."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=2).pp
    arguments: dict[str, Any] = {
        "chunks": chunks_of(schedule, pp.rank),
        "microbatches": samples(schedule.microbatches),
        "normaliser": 1.0,
    } | changes
    with ledger() as book, pytest.raises(ValueError) as error:
        run(schedule, arguments.pop("chunks"), arguments.pop("microbatches"), group=pp, loss=loss, **arguments)
    assert isinstance(error.value, ScheduleError) == (not changes)
    return str(error.value), len(book.records)


def test_nothing_is_executed_unproven(run_on_ranks: Any) -> None:
    good = build("1f1b", 2, 3)
    unusual = Schedule.parse("F0 F1 F2 B0 B1 B2\nF0 B0 F1 F2 B1 B2")
    doubled = replace(good, ranks=(good.ranks[0] + (Action("F", 0, 0),), good.ranks[1]))
    missing = replace(good, ranks=(good.ranks[0][:-1], good.ranks[1]))
    circle = Schedule.parse("F0 B0 F1 B1\nF1 F0 B0 B1")
    for schedule, words in ((doubled, "F0.0"), (missing, "B0.2"), (circle, "rank 0")):
        for message, sent in run_on_ranks(2, refused, schedule):
            assert words in message
            assert sent == 0
    assert run_on_ranks(2, execute_all, [unusual]) == [[]] * 2, "it can run, and so it does"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatches": samples(2)}, ["wants 3 micro-batches, got 2"]),
        ({"chunks": []}, ["wants 1 chunks a rank, got 0"]),
        ({"normaliser": 0.0}, ["normaliser must be positive, got 0.0"]),
        ({"normaliser": float("nan")}, ["normaliser must be positive, got nan"]),
        ({"learning_rate": 0.1}, ["learning_rate is for schedules that update"]),
        ({"chunks": [], "microbatches": [], "normaliser": -1.0}, ["got 0", "micro-batches, got 0", "got -1.0"]),
    ],
)
def test_arguments_that_do_not_fit_are_named_before_anything_is_sent(
    run_on_ranks: Any, changes: dict[str, Any], words: list[str]
) -> None:
    for message, sent in run_on_ranks(2, refused, build("1f1b", 2, 3), **changes):
        assert all(word in message for word in words), message
        assert sent == 0


def frozen(schedule: Schedule) -> list[str]:
    """The stages but the last need no gradient: nothing behind them does either, and the last one's is right."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    chunks, batch = chunks_of(schedule, pp.rank), samples(schedule.microbatches)
    last = schedule.stages * schedule.chunks - 1
    for block in chunks:
        block.requires_grad_(block.number == last)
    run(schedule, chunks, batch, group=pp, loss=loss, normaliser=NORMALISER)
    expected = in_one_process(schedule.stages * schedule.chunks, batch, NORMALISER)[1]
    return [
        name
        for name, grad in gradients(chunks).items()
        if not (torch.equal(grad, expected[name]) if name.startswith(f"{last}.") else grad is None)
    ]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v"])
def test_frozen_stages(run_on_ranks: Any, name: str) -> None:
    assert run_on_ranks(3, frozen, build(name, 3, 4)) == [[]] * 3


def fails_at(rank: int) -> None:
    pp = initialize_model_parallel(pipeline_model_parallel_size=3, timeout_seconds=20).pp
    schedule = build("1f1b", 3, 4)
    chunks = chunks_of(schedule, pp.rank)
    if pp.rank == rank:
        chunks[0].forward = lambda x, sample: 1 / 0  # type: ignore[method-assign]
    run(schedule, chunks, samples(4), group=pp, loss=loss, normaliser=1.0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_the_rank_that_fails_is_the_one_reported(run_on_ranks: Any, rank: int) -> None:
    with pytest.raises(Exception, match=rf"rank {rank}: ZeroDivisionError"):
        run_on_ranks(3, fails_at, rank)
