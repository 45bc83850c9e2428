"""When each action began and ended: simulated or measured, the same object, so both are drawn and compared alike.

The papers name two bubbles. Both start from the *cost*, the longest time between the first start and the last end on one rank:

    of ideal   (cost - ideal) / ideal   Narayanan et al. 2021, section 2.2:  (p - 1) / m for GPipe and 1F1B
    of total   (cost - ideal) / cost    GPipe, Zero Bubble Table 5:          (p - 1) / (m + p - 1)

where *ideal* is the time in which the busiest rank does nothing but work. The cost is a rank's own span, not the makespan of all:
ranks that start later may also end later, as in ZB-H2, if nobody makes them wait for each other (Zero Bubble, section 4).

See it run: ``python -m minimeg.schedule zb-h2 --pp 4 --microbatches 8``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum
from typing import NamedTuple

from minimeg.schedule.actions import Action, Schedule


class Span(NamedTuple):
    """An action with its start and end, in any one unit of time."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ``simulate`` returns, and what a recorder builds from a real run.

    Attributes:
        schedule: what was run.
        spans: per rank a tuple of Span in order of time.
        comm: latency of a message between ranks, where known; for the critical path.
        measured: the times are seconds of a real run, not of a simulation.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    comm: float = 0.0
    measured: bool = field(default=False, repr=False)

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        rows = [row for row in self.spans if row]
        return max((row[-1].end for row in rows), default=0.0) - min((row[0].start for row in rows), default=0.0)

    @property
    def stage_spans(self) -> tuple[float, ...]:
        """Per rank the time from its own first start to its own last end."""
        return tuple(row[-1].end - row[0].start if row else 0.0 for row in self.spans)

    @property
    def busy(self) -> tuple[float, ...]:
        """Per rank the time spent in actions."""
        return tuple(fsum(span.end - span.start for span in row) for row in self.spans)

    def mean_times(self) -> dict[str, tuple[float, ...]]:
        """{"F", "B", "W": per rank the time of a whole stage}: what ``simulate`` takes, from what was measured. 0 where none occurred.

        A whole stage is n chunks, so it is n times the mean of a rank's actions of a kind. The same call serves every schedule,
        ``simulate(schedule, times["F"], times["B"], times["W"])``: without W in the schedule B was measured whole, and W is 0.
        """

        def of(row: Sequence[Span], kind: str) -> float:
            took = [span.end - span.start for span in row if span.action.kind == kind]
            return self.schedule.chunks * fsum(took) / len(took) if took else 0.0

        return {kind: tuple(of(row, kind) for row in self.spans) for kind in "FBW"}

    @property
    def bubble_of_ideal(self) -> float:
        """(longest stage span - busiest rank's work) / busiest rank's work: Megatron-LM's bubble."""
        ideal = max(self.busy)
        return (max(self.stage_spans) - ideal) / ideal if ideal else 0.0

    @property
    def bubble_of_total(self) -> float:
        """(longest stage span - busiest rank's work) / longest stage span: the bubble of GPipe and Zero Bubble."""
        cost = max(self.stage_spans)
        return (cost - max(self.busy)) / cost if cost else 0.0

    @property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Per rank the most chunk activations held at once, each from its F to the last of its B and W."""
        return tuple(peak_in_flight(self.schedule, [span.action for span in row]) for row in self.spans)

    def memory(self, rank: int, activation: float = 1.0, weight_part: float = 0.0) -> list[tuple[float, float]]:
        """Steps of a rank's activation memory as (time, level from then on).

        Args:
            activation: memory of one micro-batch in all chunks of a rank, taken at the start of F. B gives it back at its end,
                but for ``weight_part``, which stays until the end of W where the schedule is split.
        """
        n, split, keeps = self.schedule.chunks, self.schedule.split, not self.schedule.forward_only
        kept = weight_part if split else 0.0
        level, steps = 0.0, []
        for action, start, end in self.spans[rank]:
            time, change = {"F": (start, activation), "B": (end, kept - activation), "W": (end, -kept)}[action.kind]
            level += change / n if keeps else 0.0
            steps.append((time, level))
        return steps

    def peak_memory(self, activation: float = 1.0, weight_part: float = 0.0) -> tuple[float, ...]:
        """Per rank the largest level of ``memory``: Zero Bubble's Table 2 with M_B = activation and M_W = weight_part."""
        ranks = range(len(self.spans))
        return tuple(max((level for _, level in self.memory(r, activation, weight_part)), default=0.0) for r in ranks)

    @property
    def critical_path(self) -> tuple[tuple[int, Span], ...]:
        """(rank, Span) from the first action to the last to end, each waiting for the one before it. Only a shorter path saves time.

        Of what an action waited for, the action before it on its rank and the message it needs, the one that came last is on the path.
        """
        place = {(rank, span.action): i for rank, row in enumerate(self.spans) for i, span in enumerate(row)}
        last = max(range(len(self.spans)), key=lambda r: self.spans[r][-1].end if self.spans[r] else float("-inf"))
        here: tuple[int, int] | None = (last, len(self.spans[last]) - 1) if self.spans[last] else None
        path: list[tuple[int, Span]] = []
        while here is not None:
            rank, i = here
            path.append((rank, self.spans[rank][i]))
            here = (rank, i - 1) if i else None
            arrival = self.spans[rank][i - 1].end if i else float("-inf")
            sender = self.schedule.sender(rank, self.spans[rank][i].action)
            if sender in place:
                sent = self.spans[sender[0]][place[sender]].end + (self.comm if sender[0] != rank else 0.0)
                if sent > arrival:
                    here = (sender[0], place[sender])
        return tuple(reversed(path))

    def svg(self) -> str:
        """The Gantt chart as SVG text."""
        from minimeg.schedule.drawing import gantt

        return gantt(self)


def peak_in_flight(schedule: Schedule, actions: Sequence[Action]) -> int:
    """Most chunk activations that a rank holds at once if it does these actions: F adds one, the last of B and W takes it away.

    Under a forward-only schedule none is kept: 0.
    """
    if schedule.forward_only:
        return 0
    last = "W" if schedule.split else "B"
    held = peak = 0
    for action in actions:
        if action.kind == "F":
            held += 1
            peak = max(peak, held)
        elif action.kind == last:
            held -= 1
    return peak
