"""What must happen before what, and the one pass in which everything else is found out.

An action waits for three things only:

    the action before it on its rank      a rank does one thing at a time, in its order
    F: the activation                     of the same micro-batch from the virtual stage before
    B: its own F, and the gradient        of the same micro-batch from the virtual stage after
    W: its own B

So the whole graph is arithmetic. Actions are numbered

    number = (virtual stage * kinds + kind) * m + micro-batch

and the neighbour that F or B waits for is kinds * m to the left or to the right. ``finish_times`` walks all ranks at once; where it
gets stuck, ranks wait for each other in a circle, and ``circle`` puts the circle in words.

See it run: ``python -m minimeg.schedule --file mine.txt`` with a table that cannot run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from minimeg.schedule.actions import Action, Schedule, ScheduleError, refuse

_SHOWN = 10  # faults that a message names before it counts the rest
_TRIED = 20_000  # a repair of a schedule with more actions is not searched


class Dependencies:
    """A complete schedule with its actions numbered.

    Attributes:
        kinds: "F", "FB" or "FBW".
        rows: per rank the numbers of its actions, in order.
        needs: per rank, beside each action, the number of the neighbour it waits for; -1 for none.
        position: by number, where in its rank's row the action stands.
        owner: by virtual stage, its rank.
        stride: kinds * m, numbers per virtual stage.

    Raises:
        ScheduleError: actions are missing, doubled or misplaced; all of them in one message.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.kinds = "F" if schedule.forward_only else "FBW" if schedule.split else "FB"
        self.stride = len(self.kinds) * schedule.microbatches
        self.size = self.stride * schedule.virtual_stages
        self.owner = [schedule.rank_of(stage) for stage in range(schedule.virtual_stages)]
        self.rows: list[list[int]] = []
        self.position = [-1] * self.size
        faults: list[str] = []
        for rank in range(schedule.stages):
            self.rows.append(self._number(rank, faults))
        if len(faults) > _SHOWN:
            faults[_SHOWN:] = [f"and {len(faults) - _SHOWN} more"]
        refuse(faults, f"{schedule.name} cannot run", ScheduleError)
        self.needs = [self._needs(row) for row in self.rows]

    def action(self, number: int) -> Action:
        kind, microbatch = divmod(number % self.stride, self.schedule.microbatches)
        return Action(self.kinds[kind], microbatch, self.schedule.chunk_of(number // self.stride))

    def rank(self, number: int) -> int:
        return self.owner[number // self.stride]

    def _number(self, rank: int, faults: list[str]) -> list[int]:
        """The numbers of one rank's actions; what is wrong with them is added to ``faults``."""
        schedule, m, row, position = self.schedule, self.schedule.microbatches, [], self.position
        expected = {
            Action(kind, microbatch, chunk): (schedule.virtual_stage(rank, chunk) * len(self.kinds) + k) * m
            + microbatch
            for k, kind in enumerate(self.kinds)
            for chunk in range(schedule.chunks)
            for microbatch in range(m)
        }
        for place, action in enumerate(schedule.ranks[rank]):
            number = expected.get(action, -1)
            if number < 0:
                faults.append(
                    f"rank {rank}: {action} does not belong here; with microbatches={m} and chunks={schedule.chunks} "
                    f"numbers run to {schedule.chunks - 1}.{m - 1}, kinds are {', '.join(self.kinds)}"
                )
            elif position[number] >= 0:
                faults.append(f"rank {rank}: {action} occurs more than once")
            else:
                position[number] = place
            row.append(number)
        for action, number in expected.items():
            before = number - m  # the F of this B, the B of this W
            if position[number] < 0:
                faults.append(f"rank {rank}: {action} is missing")
            elif action.kind != "F" and position[before] > position[number]:
                faults.append(
                    f"rank {rank} waits for itself: {action} needs {self.action(before)}, which comes after it; "
                    f"put {self.action(before)} first"
                )
        return row

    def _needs(self, row: list[int]) -> list[int]:
        """F waits for the virtual stage before, B for the one after; the ends of the model and W for none."""
        m, stride, last = self.schedule.microbatches, self.stride, self.size - self.stride
        return [
            (number - stride if number >= stride else -1)
            if number % stride < m
            else (number + stride if number % stride < 2 * m and number < last else -1)
            for number in row
        ]


def finish_times(
    graph: Dependencies, duration: Sequence[Sequence[float]], latency: float = 0
) -> tuple[list[float], list[int]]:
    """When each action ends if every rank does its list as early as it can.

    Args:
        duration: per kind and rank. latency: of a message between different ranks; nobody waits for a send.

    Returns:
        the end by number, and per rank how many of its actions could be done. ``circle`` explains what could not.
    """
    end: list[float] = [-1] * graph.size
    done = [0] * len(graph.rows)
    waiting: dict[int, Iterator[int]] = {}  # by the action it waits for: a rank that cannot go on
    ready: list[Iterator[int]] = []

    def walk(rank: int) -> Iterator[int]:
        """Do this rank's actions in order; yield the number of an action that has to come first."""
        m, stride, owner = graph.schedule.microbatches, graph.stride, graph.owner
        costs = [row[rank] for row in duration]
        clock: float = 0
        for number, need in zip(graph.rows[rank], graph.needs[rank], strict=True):
            if need >= 0:
                if end[need] < 0:
                    yield need
                arrival = end[need] if owner[need // stride] == rank else end[need] + latency
                if arrival > clock:
                    clock = arrival
            clock += costs[number % stride // m]
            end[number] = clock
            done[rank] += 1
            if number in waiting:
                ready.append(waiting.pop(number))

    ready.extend(walk(rank) for rank in range(len(graph.rows)))
    while ready:
        rank = ready.pop()
        need = next(rank, None)
        if need is not None:
            waiting[need] = rank
    return end, done


def unit_times(graph: Dependencies) -> list[int]:
    """When each action ends if every one takes 1 and messages are free.

    Raises:
        ScheduleError: ranks wait for each other in a circle.
    """
    end, done = finish_times(graph, _ones(graph))
    if not _all_done(graph, done):
        raise ScheduleError(circle(graph, done))
    return end  # type: ignore[return-value]  # sums of ones


def _ones(graph: Dependencies) -> list[list[int]]:
    return [[1] * len(graph.rows)] * len(graph.kinds)


def _all_done(graph: Dependencies, done: Sequence[int]) -> bool:
    return sum(done) == graph.size


def circle(graph: Dependencies, done: Sequence[int]) -> str:
    """Why nobody can go on, in words. Each stuck rank waits for one that is stuck too, so some of them form a circle."""
    stuck = next(rank for rank, row in enumerate(graph.rows) if done[rank] < len(row))
    path: list[int] = []
    while stuck not in path:
        path.append(stuck)
        stuck = graph.rank(graph.needs[stuck][done[stuck]])
    path = path[path.index(stuck) :]
    lines, repairs = [], []
    for rank in path:
        need = graph.needs[rank][done[rank]]
        now, wanted, other = graph.action(graph.rows[rank][done[rank]]), graph.action(need), graph.rank(need)
        blocked = graph.action(graph.rows[other][done[other]])
        what = "the activation" if wanted.kind == "F" else "the gradient"
        who = f"its own {wanted}" if other == rank else f"{wanted} of rank {other}"
        when = "comes later in its list" if other == rank else f"rank {other} does only after its {blocked}"
        if wanted == blocked:
            when = f"rank {other} cannot do yet"
        else:
            repairs.append((other, wanted, blocked))
        lines.append(
            f"rank {rank} waits, before {now}, for {what} of micro-batch {now.microbatch} from {who}, which {when}"
        )
    where = "ranks wait for each other in a circle" if len(path) > 1 else "a rank waits for itself"
    return f"{graph.schedule.name} cannot run; {where}:\n  " + "\n  ".join(lines) + _suggestion(graph, repairs)


def _suggestion(graph: Dependencies, repairs: list[tuple[int, Action, Action]]) -> str:
    """The first single move along the circle with which everything runs; it has been tried. Empty if there is none."""
    if graph.size > _TRIED:
        return ""
    for rank, wanted, blocked in repairs:
        rows = list(graph.schedule.ranks)
        row = [action for action in rows[rank] if action != wanted]
        row.insert(row.index(blocked), wanted)
        rows[rank] = tuple(row)
        try:
            repaired = Dependencies(replace(graph.schedule, ranks=tuple(rows)))
        except ScheduleError:
            continue  # it would put a B before its F
        if _all_done(repaired, finish_times(repaired, _ones(repaired))[1]):
            return f"\nIt runs with {wanted} put before {blocked} on rank {rank}."
    return ""
