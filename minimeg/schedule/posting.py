"""The order of all messages, and when each rank posts its ends: what makes every schedule free of deadlock.

Why this cannot deadlock. All transfers are sorted into *one global order*, by the time at which their sender has them ready in a
simulation with F = B = W = 1, and every rank posts its ends in that order. Of all transfers not yet done take the first in the order.
Whatever its two ranks still wait for stands earlier in their lists, so it is earlier in the order, so it is done: both ends are posted
and the transfer completes. That needs no tags and nothing about real times. It holds for gloo, where a send waits for its receive, and
for NCCL, where messages between two ranks complete in the order in which they were issued.

The price: where an activation and a gradient cross, one of the two receives is posted only after the send before it, directly before it
is needed. gloo is *duplex*: a message to a rank never waits for one from it. There each direction keeps its own order, a receive need
not wait for a send, and all of them stand two actions ahead. No rank then ever waits but for a message that its sender has not made yet
(posting is not waiting, receives are posted before use, and a Free stands where the receiver has used the message), and ``prove`` has
shown that those waits form no circle. Where nothing comes back, in a forward-only schedule, a Free does wait; it keeps the one order.

(Blocking sends in the order of 1F1B deadlock on nearly every configuration: see the deadlock lab in ``notebooks/06_pipelines.ipynb``.)

See the posts: ``python -c "from minimeg.schedule import *; print(*plan(one_f_one_b(2, 2))[0], sep='\\n')"``.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

from minimeg.schedule.actions import Schedule
from minimeg.schedule.dependencies import Dependencies, unit_times

_AHEAD = 2  # actions between posting a receive and using it: earlier would hold buffers, later would hold up the sender


class Posts(NamedTuple):
    """What one rank posts, in the global order.

    Attributes:
        transfers: places in the global order, ascending.
        slots: beside each, before which of the rank's actions it is posted; the number of actions: after the last. Ascending, or
            where duplex, ascending among the sends and among the receives.
    """

    transfers: list[int]
    slots: list[int]


class Messages:
    """All transfers of a schedule in the global order, and where each rank posts its ends. ``plan`` and ``prove`` share it.

    Args:
        duplex: of the transport; see above.

    Attributes:
        producers, consumers: by place in the order, numbers of actions (see ``Dependencies``).
        sources, destinations: by place in the order, ranks.
        posts: per rank.
    """

    def __init__(self, schedule: Schedule, duplex: bool = False) -> None:
        self.graph = graph = Dependencies(schedule)
        self.duplex = duplex and graph.kinds != "F"
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
        self.sources = [graph.rank(number) for number in self.producers]
        self.destinations = [graph.rank(number) for number in self.consumers]
        ends: list[list[int]] = [[] for _ in graph.rows]
        for place, (source, destination) in enumerate(zip(self.sources, self.destinations, strict=True)):
            ends[source].append(place)
            ends[destination].append(place)
        self.posts = [self._place(rank, mine) for rank, mine in enumerate(ends)]

    def _place(self, rank: int, mine: list[int]) -> Posts:
        """A send stands directly after its action. A receive stands two actions ahead of its use, but no later than the post after
        it in the order, which it would hold up, and no earlier than the send before it. Duplex: sends do not count for receives.

        There is always room: a transfer that comes before another in the order is ready before the other is used.
        """
        position, sends = self.graph.position, [self.sources[place] == rank for place in mine]
        slots = [
            position[self.producers[place]] + 1 if is_send else max(0, position[self.consumers[place]] - _AHEAD)
            for place, is_send in zip(mine, sends, strict=True)
        ]
        latest = len(position)
        for i in reversed(range(len(mine))):
            if not sends[i]:
                slots[i] = latest = min(slots[i], latest)
            elif not self.duplex:
                latest = slots[i]
        if not self.duplex:
            slots = list(accumulate(slots, max))
        return Posts(mine, slots)
