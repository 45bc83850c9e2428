"""Can this schedule run at all? Found out before anything is executed, for every timing at once.

``prove`` checks three things and names what is wrong:

1. complete    every virtual stage does F, B (and W, where the schedule is split) of every micro-batch exactly once, on the rank that
               holds it, no B before its F, no W before its B;
2. acyclic     no ranks wait for each other in a circle, if messages arrive by themselves;
3. messages    they do arrive: the posts of ``plan(schedule)``, made without waiting and matched in the order of issue without tags,
               bring every message to its action. The argument is in ``posting.py``; what it assumes is checked here, post by post:

               a. every transfer is posted once by its sender and once by its receiver, on both in the one global order;
               b. a send is posted after its action has run, a receive before its action runs.

Given a and b, suppose some ranks are stuck for ever. Take the first transfer T in the order that is not complete. If one of its ends is
not posted, that rank is stuck at an earlier action, whose message (by b and a) is earlier in the order than T, so it is complete, so
the rank is not stuck. If both ends are posted, all earlier posts of both ranks are complete, and so is T.

See it run: ``python -m minimeg.schedule --file mine.txt``.
"""

from __future__ import annotations

from dataclasses import dataclass

from minimeg.schedule.actions import Schedule, ScheduleError, refuse
from minimeg.schedule.posting import Messages
from minimeg.schedule.timeline import peak_in_flight


@dataclass(frozen=True)
class Proof:
    """What is known of a schedule that can run, whatever the times.

    Attributes:
        schedule: the proven one.
        peak_in_flight: per rank the most chunk activations held at once, each from its F to the last of its B and W.
        messages: how many are sent in all.
    """

    schedule: Schedule
    peak_in_flight: tuple[int, ...]
    messages: int


def prove(schedule: Schedule) -> Proof:
    """Show that a schedule is complete and cannot deadlock.

    Raises:
        ScheduleError: the missing, doubled or misplaced actions, or the circle of ranks that wait for each other, in words.
    """
    messages = Messages(schedule)
    faults = post_faults(messages)
    refuse(faults, f"the messages of {schedule.name} are not in order", ScheduleError)
    peaks = tuple(peak_in_flight(schedule, row) for row in schedule.ranks)
    return Proof(schedule, peaks, len(messages.producers))


def post_faults(messages: Messages) -> list[str]:
    """Every breach of a and b above; empty for whatever ``Messages`` builds."""
    faults = []
    position, total = messages.graph.position, len(messages.producers)
    sent, received = bytearray(total), bytearray(total)
    for rank, posts in enumerate(messages.posts):
        last_place, last_slot = -1, 0
        for place, slot in zip(posts.transfers, posts.slots, strict=True):
            if place <= last_place or slot < last_slot:
                faults.append(f"rank {rank} does not post transfer {place} in the global order")
            last_place, last_slot = place, slot
            if messages.sources[place] == rank:
                sent[place] += 1
                if slot <= position[messages.producers[place]]:
                    faults.append(f"rank {rank} sends transfer {place} before it is made")
            elif messages.destinations[place] == rank:
                received[place] += 1
                if slot > position[messages.consumers[place]]:
                    faults.append(f"rank {rank} asks for transfer {place} after it is used")
    for what, count in (("sender", sent), ("receiver", received)):
        faults += [f"transfer {place} is posted {n} times by its {what}" for place, n in enumerate(count) if n != 1]
    return faults
