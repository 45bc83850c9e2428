"""How long would a schedule take? Each rank does its list in order, each action as early as its message allows.

The model: an action of one rank takes a given time; a message takes a given latency and nobody waits for a send. That is enough to
reproduce the papers: Narayanan et al. 2021 (section 2.2), and from the measured times in Zero Bubble's Table 9 (Qi et al. 2023) the
bubble rates of its Table 5 to all four decimals for 1F1B, ZB-H1 and ZB-H2. It knows no bandwidth and no contention.

See it run: ``python -m minimeg.schedule 1f1b --pp 4 --microbatches 8``.
"""

from __future__ import annotations

from collections.abc import Sequence

from minimeg.schedule.actions import Schedule, ScheduleError, refuse
from minimeg.schedule.dependencies import Dependencies, circle, finish_times
from minimeg.schedule.timeline import Span, Timeline

Times = float | Sequence[float]


def simulate(
    schedule: Schedule, forward: Times = 1.0, backward: Times = 2.0, weight: Times = 0.0, comm: float = 0.0
) -> Timeline:
    """When each action begins and ends.

    Args:
        forward, backward, weight: times of a whole stage, a number or one per rank, in any one unit; with n chunks an action takes
            1/n of it. In a split schedule B takes ``backward`` and W takes ``weight``; else B takes backward + weight.
        comm: latency of a message between different ranks, not divided by n.

    Raises:
        ScheduleError: the schedule is incomplete, or ranks wait for each other in a circle.
        ValueError: times that are negative or of the wrong number, all faults in one message.
    """
    faults: list[str] = []
    f, b, w = (
        _per_rank(name, times, schedule.stages, faults)
        for name, times in (("forward", forward), ("backward", backward), ("weight", weight))
    )
    if not 0 <= comm < float("inf"):
        faults.append(f"comm={comm} must be a latency of at least 0")
    refuse(faults, f"cannot simulate {schedule.name}")
    if not schedule.split:
        b = [x + y for x, y in zip(b, w, strict=True)]
    graph, n = Dependencies(schedule), schedule.chunks
    # The clock counts in 1/n, so that whole numbers stay exact.
    end, done = finish_times(graph, [f, b, w], comm * n)
    if sum(done) < graph.size:
        raise ScheduleError(circle(graph, done))
    m, stride = schedule.microbatches, graph.stride
    spans = []
    for rank, row in enumerate(graph.rows):
        took = [f[rank], b[rank], w[rank]]
        spans.append(
            tuple(
                Span(action, (end[number] - took[number % stride // m]) / n, end[number] / n)
                for action, number in zip(schedule.ranks[rank], row, strict=True)
            )
        )
    return Timeline(schedule, tuple(spans), comm)


def _per_rank(name: str, times: Times, stages: int, faults: list[str]) -> list[float]:
    values = [times] * stages if isinstance(times, int | float) else list(times)
    if len(values) != stages:
        faults.append(f"{name} has {len(values)} times, there are {stages} ranks; give one number or one per rank")
    if not all(0 <= value < float("inf") for value in values):
        faults.append(f"{name}={times} must be times of at least 0")
    return values
