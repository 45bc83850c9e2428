"""What is refused before anything is sent, and who is blamed for what goes wrong later."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import minimeg.linear
from minimeg.comm import ledger
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.pipeline import run
from minimeg.schedule import Action, Schedule, ScheduleError, build
from tests.pipeline.stages import Sample, chunks_of, loss, samples


def refused(schedule: Schedule, **changes: Any) -> tuple[str, int]:
    """The refusal, and how many messages were sent."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=2).pp
    arguments: dict[str, Any] = {
        "chunks": chunks_of(schedule, pp.rank) if schedule.stages == 2 else [],
        "microbatches": samples(schedule.microbatches),
        "normaliser": 1.0,
    } | changes
    with ledger() as book, pytest.raises(ValueError) as error:
        run(schedule, arguments.pop("chunks"), arguments.pop("microbatches"), group=pp, loss=loss, **arguments)
    assert isinstance(error.value, ScheduleError) == (not changes)
    return str(error.value), len(book.records)


def test_nothing_is_executed_unproven(run_on_ranks: Any) -> None:
    good = build("1f1b", 2, 3)
    doubled = replace(good, ranks=(good.ranks[0] + (Action("F", 0, 0),), good.ranks[1]))
    missing = replace(good, ranks=(good.ranks[0][:-1], good.ranks[1]))
    circle = Schedule.parse("F0 B0 F1 B1\nF1 F0 B0 B1")
    for schedule, words in ((doubled, "F0.0"), (missing, "B0.2"), (circle, "rank 0")):
        for message, sent in run_on_ranks(2, refused, schedule):
            assert words in message
            assert sent == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"microbatches": samples(2)}, ["wants 3 micro-batches, got 2"]),
        ({"chunks": []}, ["wants 1 chunks a rank, got 0"]),
        ({"chunks": [torch.nn.Linear(2, 2)]}, ["chunk 0, a Linear, has no ", "put_shape; see minimeg.pipeline.Stage"]),
        ({"normaliser": 0.0}, ["normaliser must be positive, got 0.0"]),
        ({"normaliser": float("nan")}, ["normaliser must be positive, got nan"]),
        ({"normaliser": float("inf")}, ["normaliser must be positive, got inf"]),
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


def test_a_group_of_another_size_is_refused(run_on_ranks: Any) -> None:
    for message, sent in run_on_ranks(2, refused, build("1f1b", 3, 3), chunks=[torch.nn.Identity()]):
        assert "the schedule has 3 stages, but the group pp has 2 ranks" in message
        assert sent == 0


def test_a_stage_must_be_a_module() -> None:
    group = single_process().pp
    with pytest.raises(ValueError, match=r"chunk 0, a builtin_function_or_method, is no torch\.nn\.Module"):
        run(build("1f1b", 1, 1), [print], samples(1), group=group, loss=loss, normaliser=1.0)


# ---- failures while it runs --------------------------------------------------------------------------------------------------


class Boom(Exception):
    pass


def _boom(*_: Any) -> Any:
    raise Boom("on purpose")


def fails(name: str, rank: int, kind: str) -> None:
    """One rank fails in its first F, B or W, or in the loss."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=3, timeout_seconds=20).pp
    schedule = build(name, 3, 4)
    chunks = chunks_of(schedule, pp.rank)
    real_accumulate, real_forward = minimeg.linear.accumulate, chunks[0].forward

    def fails_in_backward(x: Tensor | None, sample: Sample) -> Tensor:
        y = real_forward(x, sample)
        y.register_hook(_boom)
        return y

    if pp.rank == rank:
        if kind == "F":
            chunks[0].forward = _boom  # type: ignore[method-assign]
        elif kind == "B":
            chunks[0].forward = fails_in_backward  # type: ignore[method-assign]
        elif kind == "W":
            minimeg.linear.accumulate = _boom
    try:
        run(schedule, chunks, samples(4), group=pp, loss=_boom if kind == "loss" else loss, normaliser=1.0)
    finally:
        minimeg.linear.accumulate = real_accumulate
        assert chunks[0].linear.weight_gradients is None, "the layers are as they were before"


@pytest.mark.parametrize(
    ("name", "rank", "kind", "action"),
    [
        ("1f1b", 0, "F", "F0.0"),
        ("1f1b", 1, "F", "F0.0"),
        ("1f1b", 2, "F", "F0.0"),
        ("1f1b", 2, "loss", "F0.0"),
        ("1f1b", 0, "B", "B0.0"),
        ("zb-h1", 1, "B", "B0.0"),
        ("zb-h1", 2, "W", "W0.0"),
    ],
)
def test_the_rank_that_fails_is_the_one_reported(
    run_on_ranks: Any, name: str, rank: int, kind: str, action: str
) -> None:
    """With the action that failed, and the others named as waiting: they are freed at once, not after their timeout."""
    with pytest.raises(Exception, match=rf"rank {rank}: Boom: on purpose") as error:
        run_on_ranks(3, fails, name, rank, kind)
    message = str(error.value)
    assert f"{name}, rank {rank} of the pipeline, in {action}" in message
    others = [r for r in range(3) if r != rank]
    assert re.search(f"ranks {others[0]}[-,]{others[1]}  waiting", message), message


def wrong_shape(rank: int, method: str) -> None:
    """A stage says of what it takes, or of what it makes, another length than it has."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=2, timeout_seconds=20).pp
    schedule = build("1f1b", 2, 2)
    chunks = chunks_of(schedule, pp.rank)
    if pp.rank == rank:
        setattr(chunks[0], method, lambda sample: ((5, 2, 6), torch.float64))
    with ledger() as book:
        try:
            run(schedule, chunks, samples(2), group=pp, loss=loss, normaliser=1.0)
        finally:
            assert book.records == [], "something was sent"


@pytest.mark.parametrize(("rank", "method"), [(1, "input_shape"), (0, "output_shape")], ids=["taken", "made"])
def test_stages_that_do_not_fit_are_refused_before_anything_is_sent(run_on_ranks: Any, rank: int, method: str) -> None:
    """Either side may be the first to say so: the gradient that comes back does not fit either."""
    right, wrong = r"float64\[4, 2, 6\]", r"float64\[5, 2, 6\]"
    said = {rank: wrong, 1 - rank: right}
    text = "|".join(
        rf"position {r} of pp will send {said[r]} as message 0 of 2, but {said[1 - r]} was expected" for r in range(2)
    )
    with pytest.raises(Exception, match=text) as error:
        run_on_ranks(2, wrong_shape, rank, method)
    assert "something was sent" not in str(error.value)


def breaks_its_promise() -> None:
    """Both sides agree on a length that the first stage does not make."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=2, timeout_seconds=20).pp
    schedule = build("1f1b", 2, 2)
    chunks = chunks_of(schedule, pp.rank)
    if pp.rank == 0:
        real = chunks[0].forward
        chunks[0].forward = lambda x, sample: real(x, sample)[:3]  # type: ignore[method-assign]
    run(schedule, chunks, samples(2), group=pp, loss=loss, normaliser=1.0)


def test_a_stage_that_makes_something_else_is_named_on_its_own_rank(run_on_ranks: Any) -> None:
    text = r"rank 0: ValueError: chunk 0 made float64\[3, 2, 6\] in F0.0, but its output_shape says float64\[4, 2, 6\]"
    with pytest.raises(Exception, match=text):
        run_on_ranks(2, breaks_its_promise)
