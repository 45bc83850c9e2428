"""How long an order must take if messages cost nothing: the denominator of "excess".

Written without minimeg's simulator, so that it also judges the orders of others and durations that differ from action to action.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Work = tuple[str, int, int]  # kind "F", "B" or "W"; micro-batch; virtual stage


def critical_path(rows: Sequence[Sequence[Work]], last: int, duration: Callable[[Work], float]) -> float:
    """Time from the first start to the last end when each rank does its row in order, each action as early as its input allows.

    F needs the F of the stage before, B the B of the stage after (on stage ``last``, its own F), W its own B.
    """
    ends: dict[Work, float] = {}
    clocks, places = [0.0] * len(rows), [0] * len(rows)
    while any(place < len(row) for place, row in zip(places, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while places[rank] < len(row):
                work = row[places[rank]]
                need = _need(work, last)
                if need is not None and need not in ends:
                    break
                ready = ends[need] if need is not None else 0.0
                clocks[rank] = max(clocks[rank], ready) + duration(work)
                ends[work] = clocks[rank]
                places[rank] += 1
                moved = True
        if not moved:
            raise ValueError("this order runs into a circle")
    return max(clocks)


def _need(work: Work, last: int) -> Work | None:
    kind, microbatch, stage = work
    if kind == "F":
        return ("F", microbatch, stage - 1) if stage > 0 else None
    if kind == "W":
        return ("B", microbatch, stage)
    return ("B", microbatch, stage + 1) if stage < last else ("F", microbatch, stage)
