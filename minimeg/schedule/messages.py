"""From actions to messages: which rank sends what to whom, and when it asks for what it will get.

A schedule says what is computed. What is sent follows: where two neighbouring virtual stages lie on different ranks, every F sends an
activation forth and every B a gradient back. Each rank then carries out a list of steps:

    Recv(transfer)   post a receive and go on
    Run(action)      compute; waits for the message that it needs, and for nothing else
    Send(transfer)   begin to send and go on
    Free(transfer)   let go of what was sent

Why this cannot deadlock. All transfers are sorted into *one global order*, by the time at which their sender has them ready in a
simulation with F = B = W = 1, and every rank posts its ends in that order. Of all transfers not yet done take the first in the order.
Whatever its two ranks still wait for stands earlier in their lists, so it is earlier in the order, so it is done: both ends are posted
and the transfer completes. That needs no tags and nothing about real times. It holds for gloo, where a send waits for its receive, and
for NCCL, where messages between two ranks complete in the order in which they were issued.

(Blocking sends in the order of 1F1B deadlock on nearly every configuration: see the deadlock lab in ``notebooks/06_pipelines.ipynb``.)

See it run: ``python -c "from minimeg.schedule import *; print(*plan(one_f_one_b(2, 2))[0], sep='\\n')"``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from minimeg.schedule.actions import Action, Schedule
from minimeg.schedule.dependencies import Dependencies, unit_times

_AHEAD = 2  # actions between posting a receive and using it: earlier would hold buffers, later would hold up the sender
_SENDS_KEPT = 2  # forward-only: how many later sends a sent tensor outlives


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message between two ranks.

    Attributes:
        source, destination: ranks of the pipeline.
        producer: the action of the source that makes it.
        consumer: the action of the destination that needs it.
        kind: "activation" (F to F) or "gradient" (B to B).
        tag: its place in the global order, unique in the schedule.
    """

    source: int
    destination: int
    producer: Action
    consumer: Action
    kind: str
    tag: int

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.producer} rank {self.source} -> {self.consumer} rank {self.destination}, tag {self.tag}"
        )


@dataclass(frozen=True, slots=True)
class Recv:
    """Post the receive of a transfer; wait for nothing."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Run:
    """Compute an action; wait first for the message it needs."""

    action: Action


@dataclass(frozen=True, slots=True)
class Send:
    """Begin to send; wait for nothing."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Free:
    """Wait until a send is complete and let its tensor go. Placed where the receiver is known to have used it."""

    transfer: Transfer


Step = Recv | Run | Send | Free


class Posts(NamedTuple):
    """What one rank posts, in the global order.

    Attributes:
        transfers: places in the global order, ascending.
        slots: beside each, before which of the rank's actions it is posted; the number of actions: after the last.
    """

    transfers: list[int]
    slots: list[int]


class Messages:
    """All transfers of a schedule in the global order, and where each rank posts its ends. ``plan`` and ``prove`` share it.

    Attributes:
        producers, consumers: by place in the order, numbers of actions (see ``Dependencies``).
        posts: per rank.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.graph = graph = Dependencies(schedule)
        self.end = unit_times(graph)
        crossing = [
            (need, number)
            for rank, row in enumerate(graph.rows)
            for number, need in zip(row, graph.needs[rank], strict=True)
            if need >= 0 and graph.rank(need) != rank  # neighbours on one rank hand over in memory
        ]
        # Equal times go by virtual stage, kind, micro-batch, which is how actions are numbered.
        crossing.sort(key=lambda pair: self.end[pair[0]] * graph.size + pair[0])
        self.producers = [need for need, _ in crossing]
        self.consumers = [number for _, number in crossing]
        ends: list[list[int]] = [[] for _ in graph.rows]
        for place, (need, number) in enumerate(crossing):
            ends[graph.rank(need)].append(place)
            ends[graph.rank(number)].append(place)
        self.posts = [self._place(rank, mine) for rank, mine in enumerate(ends)]

    def sends(self, rank: int, place: int) -> bool:
        return self.graph.rank(self.producers[place]) == rank

    def _place(self, rank: int, mine: list[int]) -> Posts:
        """A send stands directly after its action. A receive stands two actions ahead of its use, but no later than the post after
        it in the order, which it would hold up, and no earlier than the send before it.

        There is always room: a transfer that comes before another in the order is ready before the other is used.
        """
        position = self.graph.position
        slots = [
            position[self.producers[place]] + 1
            if self.sends(rank, place)
            else max(0, position[self.consumers[place]] - _AHEAD)
            for place in mine
        ]
        for i in range(len(mine) - 2, -1, -1):
            if not self.sends(rank, mine[i]):
                slots[i] = min(slots[i], slots[i + 1])
        for i in range(1, len(mine)):
            slots[i] = max(slots[i], slots[i - 1])
        return Posts(mine, slots)

    def transfer(self, place: int) -> Transfer:
        """The transfer at a place of the global order, spelled out."""
        graph, producer, consumer = self.graph, self.producers[place], self.consumers[place]
        action = graph.action(producer)
        kind = "activation" if action.kind == "F" else "gradient"
        return Transfer(graph.rank(producer), graph.rank(consumer), action, graph.action(consumer), kind, place)


def plan(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Per rank the steps that an executor carries out.

    Raises:
        ScheduleError: the schedule is incomplete, or ranks wait for each other in a circle.
    """
    messages = Messages(schedule)
    from minimeg.schedule.freeing import known_uses  # it reads Messages

    transfers = [messages.transfer(place) for place in range(len(messages.producers))]
    covered = known_uses(messages)
    return tuple(tuple(_steps(messages, transfers, rank, covered[rank])) for rank in range(schedule.stages))


def _steps(messages: Messages, transfers: list[Transfer], rank: int, covered: dict[int, list[int]]) -> Iterator[Step]:
    """One rank's actions, between them its posts, and each Free where the receiver is known to be done.

    What is never known to be used is freed at the end; in a forward-only schedule, where nothing comes back, two sends later.
    """
    graph, posts = messages.graph, messages.posts[rank]
    at: dict[int, list[int]] = defaultdict(list)
    for place, slot in zip(posts.transfers, posts.slots, strict=True):
        at[slot].append(place)
    known = {place for places in covered.values() for place in places}
    unknown: deque[int] = deque()  # sent, and freed without knowing: oldest first
    for slot, number in enumerate([*graph.rows[rank], None]):
        for place in at[slot]:
            if not messages.sends(rank, place):
                yield Recv(transfers[place])
                continue
            yield Send(transfers[place])
            if place not in known:
                unknown.append(place)
            if graph.kinds == "F" and len(unknown) > _SENDS_KEPT:
                yield Free(transfers[unknown.popleft()])
        if number is not None:
            yield Run(graph.action(number))
            for place in covered.get(slot, ()):
                yield Free(transfers[place])
    for place in unknown:
        yield Free(transfers[place])
