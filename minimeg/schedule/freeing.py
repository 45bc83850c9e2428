"""When may a sender let go of what it sent, without waiting? Once it *knows* that the receiver has used it.

No rank asks. It knows from what it receives: if the gradient of micro-batch 0 comes back, the activation of micro-batch 0 has been
used. In general an action knows, for each rank, how many of that rank's actions are done: what the action before it on its own rank
knew, and what the sender of its message knew (a vector clock; Fidge 1988, Mattern 1989). Only an action that takes a message learns
anything new. ``plan`` puts a Free directly after the first action that knows; a wait placed there returns at once.

See it run: ``python -c "from minimeg.schedule import *; print(*plan(one_f_one_b(4, 8))[0], sep='\\n')"``.
"""

from __future__ import annotations

from minimeg.schedule.posting import Messages


def known_uses(messages: Messages) -> list[dict[int, list[int]]]:
    """Per rank {position of an action: places, in the global order, of the sends that are known to be used once it has run}."""
    graph = messages.graph
    position, ranks = graph.position, range(len(graph.rows))
    knows = [[0] * len(graph.rows) for _ in ranks]  # of each rank now: how many actions of every rank are done
    carried: dict[int, list[int]] = {}  # by the place of a transfer: what its producer knew
    incoming = {number: place for place, number in enumerate(messages.consumers)}
    outgoing = {number: place for place, number in enumerate(messages.producers)}
    pending = _pending(messages)
    result: list[dict[int, list[int]]] = [{} for _ in ranks]
    for number in sorted((n for row in graph.rows for n in row), key=messages.end.__getitem__):
        rank = graph.rank(number)
        place = incoming.get(number)
        if place is not None:
            source = messages.sources[place]
            mine = knows[rank] = list(map(max, knows[rank], carried.pop(place)))
            mine[source] = max(mine[source], position[messages.producers[place]] + 1)
            for destination, sends in pending[rank].items():
                while sends and position[messages.consumers[sends[-1]]] < mine[destination]:
                    result[rank].setdefault(position[number], []).append(sends.pop())
        place = outgoing.get(number)
        if place is not None:
            carried[place] = knows[rank]
    return result


def _pending(messages: Messages) -> list[dict[int, list[int]]]:
    """Per source and destination the places of the transfers, the first used last, to be popped."""
    pending: list[dict[int, list[int]]] = [{} for _ in messages.graph.rows]
    for place, (source, destination) in enumerate(zip(messages.sources, messages.destinations, strict=True)):
        pending[source].setdefault(destination, []).append(place)
    for of_rank in pending:
        for places in of_rank.values():
            places.sort(key=lambda place: messages.graph.position[messages.consumers[place]], reverse=True)
    return pending
