"""A measured timeline: seconds of a real run, from which ``simulate`` gets its times."""

from __future__ import annotations

import time
from typing import Any

import pytest
from torch import Tensor

from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.pipeline import Recorder, run
from minimeg.schedule import Schedule, Timeline, build, simulate
from minimeg.schedule.drawing import gantt
from tests.pipeline.stages import Block, Sample, chunks_of, loss, samples


class Slow(Block):
    """Sleeps longer the later its rank is, so that the times differ."""

    def forward(self, x: Tensor | None, sample: Sample) -> Tensor:
        time.sleep(0.001 * (1 + self.number))
        return super().forward(x, sample)


def measure(schedule: Schedule) -> Timeline:
    pp = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
    chunks = [Slow(schedule.virtual_stage(pp.rank, c)) for c in range(schedule.chunks)]
    recorder = Recorder()
    run(
        schedule,
        chunks,
        samples(schedule.microbatches),
        group=pp,
        loss=loss,
        normaliser=1.0,
        recorder=recorder,
    )
    timeline = recorder.timeline(schedule, pp)
    assert sum(len(row) for row in timeline.spans) == sum(len(row) for row in schedule.ranks)
    return timeline


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "forward-only"])
def test_what_was_measured(run_on_ranks: Any, name: str) -> None:
    schedule = build(name, 3, 4)
    timeline, *others = run_on_ranks(3, measure, schedule)
    assert all(other == timeline for other in others), "every rank has the records of all"
    assert timeline.measured
    assert not simulate(schedule).measured
    assert tuple(tuple(span.action for span in row) for row in timeline.spans) == schedule.ranks
    assert min(row[0].start for row in timeline.spans) == 0
    end = {(rank, span.action): span.end for rank, row in enumerate(timeline.spans) for span in row}
    for rank, row in enumerate(timeline.spans):
        for span in row:
            sender = schedule.sender(rank, span.action)
            assert sender is None or end[sender] <= span.start, "nothing began before its message was made: one clock"
            assert span.start <= span.end
            if span.action.kind == "F":
                assert span.end - span.start >= 0.001 * (1 + schedule.virtual_stage(rank, span.action.chunk))
    assert "Measured, in seconds" in gantt(timeline)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "zb-v", "forward-only"])
def test_a_simulation_with_the_measured_means_does_the_same_work(run_on_ranks: Any, name: str) -> None:
    """Per rank the simulation is busy as long as the run was, and it waits for the same messages, only without delay."""
    schedule = build(name, 3, 4)
    timeline = run_on_ranks(3, measure, schedule)[0]
    times = timeline.mean_times()
    predicted = simulate(schedule, forward=times["F"], backward=times["B"], weight=times["W"])
    assert predicted.busy == pytest.approx(timeline.busy)
    assert predicted.peak_in_flight == timeline.peak_in_flight
    for kind in "FBW":
        for rank, row in enumerate(timeline.spans):
            took = [span.end - span.start for span in row if span.action.kind == kind]
            assert times[kind][rank] == pytest.approx(schedule.chunks * sum(took) / len(took) if took else 0)


def test_a_recorder_is_for_one_run() -> None:
    schedule, group, recorder = build("1f1b", 1, 2), single_process().pp, Recorder()
    for _ in range(2):
        run(schedule, chunks_of(schedule, 0), samples(2), group=group, loss=loss, normaliser=1.0, recorder=recorder)
    with pytest.raises(ValueError, match="its 8 actions are not one run of 1f1b, in which rank 0 does 4; use a new"):
        recorder.timeline(schedule, group)
