"""From actions to messages: which rank sends what to whom, and when it asks for what it will get.

A schedule says what is computed. What is sent follows: where two neighbouring virtual stages lie on different ranks, every F sends an
activation forth and every B a gradient back. Each rank then carries out a list of steps:

    Recv(transfer)   post a receive and go on
    Run(action)      compute; waits for the message that it needs, and for nothing else
    Send(transfer)   begin to send and go on
    Free(transfer)   let go of what was sent

All transfers stand in one global order in which every rank posts its ends; ``posting.py`` says why that cannot deadlock, and
``freeing.py`` when a sent tensor may go.

See it run: ``python -c "from minimeg.schedule import *; print(*plan(one_f_one_b(2, 2))[0], sep='\\n')"``.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from minimeg.schedule.actions import Action, Schedule
from minimeg.schedule.freeing import known_uses
from minimeg.schedule.posting import Messages

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


def plan(schedule: Schedule, duplex: bool = False) -> tuple[tuple[Step, ...], ...]:
    """Per rank the steps that an executor carries out.

    Args:
        duplex: the transport lets messages to and from a rank pass each other, as gloo does; see ``posting.py``.

    Raises:
        ScheduleError: the schedule is incomplete, or ranks wait for each other in a circle.
    """
    messages = Messages(schedule, duplex)
    transfers = [_transfer(messages, place) for place in range(len(messages.producers))]
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
        if messages.duplex:
            at[slot].sort(key=lambda place: messages.sources[place] != rank)  # somebody may be waiting for what is sent
        for place in at[slot]:
            if messages.sources[place] != rank:
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


def _transfer(messages: Messages, place: int) -> Transfer:
    """The transfer at a place of the global order, spelled out."""
    graph, producer, consumer = messages.graph, messages.producers[place], messages.consumers[place]
    action = graph.action(producer)
    kind = "activation" if action.kind == "F" else "gradient"
    source, destination = messages.sources[place], messages.destinations[place]
    return Transfer(source, destination, action, graph.action(consumer), kind, place)
