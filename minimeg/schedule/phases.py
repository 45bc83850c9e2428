"""A rank's list written phase by phase, for schedules over a "v" (ZB-V, DualPipeV).

    do("F0 B1 W", 3)    three times: the next forward of chunk 0, the next backward of chunk 1, and the weight gradient that has
                        waited longest

Micro-batches of a kind and chunk go in order 0..m-1, the W in the order of their B: the order in which one process accumulates.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from minimeg.schedule.actions import Action, Schedule


class Phases:
    """Attributes: ``actions``, what is written so far; ``microbatches``, m, after which F and B of a chunk are used up."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self.actions: list[Action] = []
        self._next = Counter[str]()
        self._waiting: deque[Action] = deque()

    def do(self, names: str, times: int) -> None:
        """Repeat a pattern of F0, F1, B0, B1 and W; names of a kind and chunk that is used up are passed over."""
        for name in names.split() * times:
            if name == "W":
                self.actions.append(self._waiting.popleft())
                continue
            kind, microbatch, chunk = name[0], self._next[name], int(name[1])
            if microbatch == self.microbatches:
                continue
            self._next[name] += 1
            self.actions.append(Action(kind, microbatch, chunk))
            if kind == "B":
                self._waiting.append(Action("W", microbatch, chunk))

    def do_waiting(self) -> None:
        """Every W that is left."""
        self.do("W", len(self._waiting))


def v_schedule(name: str, stages: int, microbatches: int, least: int, write: Callable[[Phases, int], None]) -> Schedule:
    """A schedule over a "v" whose ranks are written by ``write(phases, rank)``, which counts on m >= ``least``.

    With fewer micro-batches the order for ``least`` is taken and those that do not exist are left out.
    """
    rows = []
    for rank in range(stages):
        phases = Phases(max(microbatches, least))
        write(phases, rank)
        rows.append(tuple(action for action in phases.actions if action.microbatch < microbatches))
    return Schedule(name, stages, microbatches, 2, tuple(rows), placement="v")
