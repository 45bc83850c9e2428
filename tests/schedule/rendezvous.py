"""An executor of plans without processes: a discrete-event model of ranks, actions of random length, and messages that meet.

Send and Recv go on at once. A message is complete when both of its ends are posted, and the k-th send from a to b meets the k-th
receive of b from a: there are no tags. Run waits for the message it needs, Free for the message it lets go.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from minimeg.schedule import Action, Free, Recv, Run, Send, Step, Transfer


@dataclass
class Outcome:
    deadlock: list[int] = field(default_factory=list)  # ranks that never finish
    log: list[list[Action]] = field(default_factory=list)
    blocking_frees: list[Transfer] = field(default_factory=list)  # Frees before a later Run whose wait took time
    peak_sends: list[int] = field(default_factory=list)  # per rank: most sends at once begun and not freed
    unfreed: int = 0
    crossed: list[tuple[Transfer, Transfer]] = field(default_factory=list)  # met the wrong message


class World:
    """Runs per-rank lists of steps; ``serial`` lets a rank's messages complete only in the order in which it posted them."""

    def __init__(self, steps: Sequence[Sequence[Step]], seed: int, serial: bool = False) -> None:
        self.steps, self.serial, self.random = steps, serial, random.Random(seed)
        # Very unequal: some ranks and some actions are a thousand times slower than others.
        self.speed = [10 ** self.random.uniform(-1.5, 1.5) for _ in steps]
        self.outcome = Outcome(log=[[] for _ in steps], peak_sends=[0] * len(steps))
        self.clock = [0.0] * len(steps)
        self.at = [0] * len(steps)
        self.posted: dict[tuple[str, int, int], list[tuple[Transfer, float]]] = defaultdict(list)
        self.complete: dict[Transfer, float] = {}
        # serial: (transfer, when posted), not complete, oldest first
        self.queue: list[deque[tuple[Transfer, float]]] = [deque() for _ in steps]
        self.drained = [0.0] * len(steps)
        self.last_run = [max((i for i, step in enumerate(row) if isinstance(step, Run)), default=0) for row in steps]
        self.kept: list[set[Transfer]] = [set() for _ in steps]
        self.incoming: list[dict[Action, Transfer]] = [
            {step.transfer.consumer: step.transfer for step in row if isinstance(step, Recv)} for row in steps
        ]

    def run(self) -> Outcome:
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.steps):
                while self.at[rank] < len(row) and self._do(rank, row[self.at[rank]]):
                    self.at[rank] += 1
                    moved = True
        self.outcome.deadlock = [rank for rank, row in enumerate(self.steps) if self.at[rank] < len(row)]
        self.outcome.unfreed = sum(map(len, self.kept))
        return self.outcome

    def _do(self, rank: int, step: Step) -> bool:
        """Carry out a step; False if it cannot be done yet."""
        match step:
            case Run(action):
                message = self.incoming[rank].get(action)
                if message is not None:
                    if message not in self.complete:
                        return False
                    self.clock[rank] = max(self.clock[rank], self.complete[message])
                self.clock[rank] += self.speed[rank] * 10 ** self.random.uniform(-1.5, 1.5)
                self.outcome.log[rank].append(action)
            case Free(transfer):
                if transfer not in self.complete:
                    return False
                if self.complete[transfer] > self.clock[rank]:
                    if self.at[rank] < self.last_run[rank]:
                        self.outcome.blocking_frees.append(transfer)
                    self.clock[rank] = self.complete[transfer]
                self.kept[rank].remove(transfer)
            case Send(transfer):
                self.kept[rank].add(transfer)
                self.outcome.peak_sends[rank] = max(self.outcome.peak_sends[rank], len(self.kept[rank]))
                self._post(rank, "send", transfer)
            case Recv(transfer):
                self._post(rank, "recv", transfer)
        return True

    def _post(self, rank: int, end: str, transfer: Transfer) -> None:
        a, b = transfer.source, transfer.destination
        mine = self.posted[end, a, b]
        mine.append((transfer, self.clock[rank]))
        others = self.posted["recv" if end == "send" else "send", a, b]
        self.queue[rank].append((transfer, self.clock[rank]))
        if len(others) >= len(mine):
            partner, when = others[len(mine) - 1]
            if partner != transfer:
                self.outcome.crossed.append((transfer, partner))
            if not self.serial:
                self.complete[transfer] = self.complete[partner] = max(when, self.clock[rank])
        if self.serial:
            self._drain(a, b)

    def _drain(self, *ranks: int) -> None:
        """A message completes once it is the oldest of both its ranks."""
        todo = list(ranks)
        while todo:
            rank = todo.pop()
            while self.queue[rank]:
                transfer, here = self.queue[rank][0]
                other = transfer.destination if rank == transfer.source else transfer.source
                if not self.queue[other] or self.queue[other][0][0] != transfer:
                    break
                there = self.queue[other][0][1]
                self.queue[rank].popleft()
                self.queue[other].popleft()
                now = max(here, there, self.drained[rank], self.drained[other])
                self.complete[transfer] = self.drained[rank] = self.drained[other] = now
                todo.append(other)


def execute(steps: Sequence[Sequence[Step]], seed: int, serial: bool = False) -> Outcome:
    return World(steps, seed, serial).run()
