"""Messages, counted from outside: one of s b h each way a stage boundary and micro-batch, inside the pipeline's group, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimeg.comm import ledger
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import run
from minimeg.schedule import NAMES, Schedule, build, prove
from tests.pipeline.stages import H, chunks_of, loss, samples
from tests.rank_functions import Outside

MESSAGE = 4 * 2 * H * 8  # s b h float64, in bytes

Messages = list[tuple[str, int]]  # (operation, bytes)


def count(todo: list[Schedule]) -> list[tuple[Messages, Messages]]:
    """Per schedule what torch was asked to do, and what the ledger says; but for the loss, which every rank is told at the end."""
    pp = initialize_model_parallel(pipeline_model_parallel_size=todo[0].stages).pp
    found = []
    for schedule in todo:
        chunks, batch = chunks_of(schedule, pp.rank), samples(schedule.microbatches)
        rate = None if schedule.updates == "flush" else 0.1
        with ledger() as book, Outside() as outside:
            run(schedule, chunks, batch, group=pp, loss=loss, normaliser=3.0, learning_rate=rate)
        assert outside.communication.pop() == ("broadcast", 8)
        told = [(record.op, record.payload) for record in book.records if record.phase != "loss"]
        found.append((outside.communication, told))
    return found


@pytest.mark.parametrize("p", [2, 3, 4])
def test_one_message_each_way_a_boundary_and_microbatch(run_on_ranks: Any, p: int) -> None:
    todo = [build(name, p, m) for name in NAMES for m in (1, 5) if name != "pipedream-2bw" or m >= p]
    todo += [build("interleaved", p, 5, chunks=3), build("forward-only", p, 5, chunks=2)]
    everybody = run_on_ranks(p, count, todo)
    for schedule, of_ranks in zip(todo, zip(*everybody, strict=True), strict=True):
        last, ways = schedule.virtual_stages - 1, 1 if schedule.forward_only else 2
        crossings = [v for v in range(last) if schedule.rank_of(v) != schedule.rank_of(v + 1)]
        for rank, (outside, book) in enumerate(of_ranks):
            assert outside == book, schedule.name
            assert {size for _, size in outside} <= {MESSAGE}
            forth = sum(schedule.rank_of(v) == rank for v in crossings)
            back = sum(schedule.rank_of(v + 1) == rank for v in crossings)
            sent, received = forth + back * (ways - 1), back + forth * (ways - 1)
            assert (
                sorted(op for op, _ in outside)
                == ["recv"] * received * schedule.microbatches + ["send"] * sent * schedule.microbatches
            ), (schedule.name, rank)
        total = sum(op == "send" for outside, _ in of_ranks for op, _ in outside)
        assert total == ways * schedule.microbatches * len(crossings) == prove(schedule).messages


def peers() -> list[tuple[str, bool]]:
    """Which group and which peers do point-to-point operations name? tp = pp = dp = 2."""
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
        for name in ("1f1b", "interleaved", "zb-v", "forward-only"):
            schedule = build(name, 2, 3)
            run(schedule, chunks_of(schedule, state.pp.rank), samples(3), group=state.pp, loss=loss, normaliser=1.0)
    finally:
        dist.isend, dist.irecv = real["isend"], real["irecv"]
    return seen


def test_messages_stay_inside_the_pipeline_group(run_on_ranks: Any) -> None:
    """CASE 26: every message names the pipeline's group and a global rank of it."""
    everybody = run_on_ranks(8, peers)
    for seen in everybody:
        assert seen == [(name, True) for name, _ in seen]
    # m times: 1f1b one forth, one back; interleaved three crossings each way; zb-v two; forward-only one forth.
    assert sum(name == "isend" for seen in everybody for name, _ in seen) == 4 * 3 * (2 + 6 + 4 + 1)
    assert sum(name == "irecv" for seen in everybody for name, _ in seen) == 4 * 3 * (2 + 6 + 4 + 1)
