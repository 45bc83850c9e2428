"""Schedules that nobody designed: random changes of good ones. What is valid gives the right gradients; what is not never starts."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimeg.comm import ledger
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import run
from minimeg.schedule import Schedule, ScheduleError, build, prove
from tests.pipeline.stages import chunks_of, gradients, in_one_process, loss, samples

NAMES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v")


def mutate(schedule: Schedule, dice: random.Random) -> Schedule:
    """One or two actions swapped with another, or moved, or dropped, or doubled."""
    rows = [list(row) for row in schedule.ranks]
    for _ in range(dice.randint(1, 2)):
        row = dice.choice([row for row in rows if row])
        i, j = dice.randrange(len(row)), dice.randrange(len(row))
        match dice.choice(["neighbours", "neighbours", "neighbours", "swap", "move", "drop", "double"]):
            case "neighbours":
                row[i - 1], row[i] = row[i], row[i - 1]
            case "swap":
                row[i], row[j] = row[j], row[i]
            case "move":
                row.insert(j, row.pop(i))
            case "drop":
                row.pop(i)
            case "double":
                row.insert(j, row[i])
    return replace(schedule, ranks=tuple(tuple(row) for row in rows))


def mutants(p: int, count: int, seed: int) -> list[Schedule]:
    dice = random.Random(seed)
    return [mutate(build(dice.choice(NAMES), p, dice.randint(1, 6)), dice) for _ in range(count)]


def is_valid(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except ScheduleError:
        return False
    return True


def try_them(p: int, count: int, seed: int) -> tuple[int, int, list[str]]:
    """How many were executed, how many refused, and what was wrong."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=p).pp
    executed, refused, faults = 0, 0, []
    for number, schedule in enumerate(mutants(p, count, seed)):
        chunks, batch = chunks_of(schedule, pp.rank), samples(schedule.microbatches)
        valid = is_valid(schedule)
        with ledger() as book:
            try:
                run(schedule, chunks, batch, group=pp, loss=loss, normaliser=1.0)
            except ScheduleError:
                refused += 1
                if valid or book.records:
                    faults.append(f"{number}: refused although valid, or only after {len(book.records)} operations")
                continue
        executed += 1
        expected = in_one_process(p * schedule.chunks, batch, 1.0)[1]
        # Another order of B or W is another order of summation.
        off = max(float((grad - expected[name]).abs().max()) for name, grad in gradients(chunks).items())
        if not valid or off > 1e-10 or any(torch.isnan(grad).any() for grad in gradients(chunks).values()):
            faults.append(f"{number}: gradients off by {off:.1e}\n{schedule}")
    return executed, refused, faults


@pytest.mark.parametrize(("p", "count"), [(2, 250), (3, 250)])
def test_500_mutations_are_refused_or_give_the_right_gradients(run_on_ranks: Any, p: int, count: int) -> None:
    for executed, refused, faults in run_on_ranks(p, try_them, p, count, 20 + p, timeout=120):
        assert faults == []
        assert min(executed, refused) > 40, "both kinds must be among them"
