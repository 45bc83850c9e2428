"""What the course's widgets show, as functions: from a few settings to a picture and the numbers beneath it.

A notebook calls the function first, so that the picture is on the page wherever it is read; the widget of
:mod:`minimeg.lab.widgets` then calls the same function again and again. Nothing here knows of sliders.

See it run: ``notebooks/01_rank_groups.ipynb`` (ranks), 03 (shards), 06 (schedules), 11 (memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from minimeg.cost.activations import activation_bytes_per_layer, attention_core_ratio
from minimeg.cost.bubble import bubble_of_ideal, bubble_of_total
from minimeg.cost.flops import RECOMPUTE, Recompute
from minimeg.cost.shapes import GPTShape
from minimeg.grid import Grid
from minimeg.lab.drawings.bars import bars
from minimeg.lab.drawings.sharding import columns_then_rows, rows_first
from minimeg.schedule import ScheduleError, build, prove, simulate


@dataclass(frozen=True)
class Page:
    """A picture (SVG text) and the lines that stand beneath it."""

    svg: str
    lines: tuple[str, ...] = ()


def rank_page(
    ranks: int = 16, tp: int = 2, cp: int = 1, pp: int = 4, order: str = "tp-cp-dp-pp", node: int = 8, rank: int = 5
) -> Page:
    """The grid of ranks, with the groups of one of them; ``node``: ranks on one machine. ValueError: no such grid."""
    grid = Grid(ranks, tp=tp, cp=cp, pp=pp, order=order)
    chosen = min(rank, ranks - 1)
    return Page(grid.svg(selected_rank=chosen, ranks_per_node=node), tuple(_groups(grid, chosen, node)))


def _groups(grid: Grid, rank: int, node: int) -> list[str]:
    lines = []
    for axis in (axis for axis, size in grid.sizes.items() if size > 1):
        (group,) = [group for group in grid.groups(axis) if rank in group]
        nodes = len({member // node for member in group})
        reach = "inside one node" if nodes == 1 else f"across {nodes} nodes"
        lines.append(f"{axis}  rank {rank} with {[other for other in group if other != rank]}, {reach}")
    return lines


def schedule_page(
    name: str = "1f1b",
    p: int = 4,
    m: int = 8,
    n: int = 1,
    forward: float = 1,
    backward: float = 2,
    weight: float = 0,
    latency: float = 0,
) -> Page:
    """A schedule in simulated time: its chart, both bubbles beside the formula's, and what each rank holds at its peak.

    Times are of a whole stage, in slots; ``latency``: of a message. ValueError or ScheduleError: no such schedule.
    """
    schedule = build(name, p, m, n if name in ("interleaved", "forward-only") else None)
    in_flight = prove(schedule).peak_in_flight
    if schedule.split and not weight:
        weight = backward / 2  # a split schedule with nothing in W would be another one
        backward -= weight
    line = simulate(schedule, forward=forward, backward=backward, weight=weight, comm=latency)
    lines = [
        f"makespan {line.makespan:g} slots",
        f"bubble   {line.bubble_of_ideal:.4f} of ideal   {line.bubble_of_total:.4f} of total   (counted)",
    ]
    if name in ("gpipe", "1f1b", "interleaved"):
        formula = bubble_of_ideal(p, m, schedule.chunks), bubble_of_total(p, m, schedule.chunks)
        holds = abs(formula[0] - line.bubble_of_ideal) < 1e-9
        lines.append(
            f"         {formula[0]:.4f}            {formula[1]:.4f}            (formula: {'equal' if holds else 'NOT equal'})"
        )
    lines.append(
        f"in flight at the peak, by rank: {' '.join(map(str, in_flight))}" + (" chunks" if schedule.chunks > 1 else "")
    )
    return Page(line.svg(), tuple(lines))


def sharding_page(first: str = "columns", t: int = 2, step: int = 4) -> Page:
    """relu(X A) B over t ranks, ``first`` cut "columns" (right) or "rows" (wrong), up to one of four steps."""
    if first == "rows":
        if t > 2:
            raise ValueError(f"t={t}: A has 2 rows, so rows first takes t = 1 or 2")
        return Page(rows_first(t, step), ("rows first: relu of a partial sum is no part of the relu",) if t > 1 else ())
    return Page(columns_then_rows(t, step), (f"all-reduces, forward: {int(t > 1)}",))


def memory_page(
    s: int = 64,
    b: int = 2,
    h: int = 64,
    a: int = 4,
    t: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> Page:
    """Bytes that one layer keeps for backward, in units of sbh, for each kind of recomputation; ``recompute`` is the one chosen."""
    shape = GPTShape(layers=1, hidden=h, heads=a, sequence=s)
    sbh = s * b * h
    kept = {how: activation_bytes_per_layer(shape, b, t, sequence_parallel, how) / sbh for how in RECOMPUTE}
    core = attention_core_ratio(shape)
    svg = bars(
        {f"recompute {how}": value for how, value in kept.items()},
        title=f"one layer, s={s} b={b} h={h} a={a} t={t}{', sequence parallel' if sequence_parallel else ''}",
        sentence=f"Bytes kept for backward, divided by sbh, for three kinds of recomputation; 5as/h is {core:g} here.",
        chosen=f"recompute {recompute}",
    )
    whole = "34/t + 5as/(ht)" if sequence_parallel else "10 + 24/t + 5as/(ht)"
    formula = {
        "none": whole,
        "selective": whole.replace(" + 5as/(ht)", ""),
        "full": "2/t" if sequence_parallel else "2",
    }
    lines = (
        f"{formula[recompute]} = {kept[recompute]:g} sbh = {kept[recompute] * sbh:,.0f} bytes a layer and micro-batch",
        f"that is {kept[recompute] / kept['none']:.0%} of what is kept without recomputation",
    )
    return Page(svg, lines)


__all__ = ["Page", "ScheduleError", "memory_page", "rank_page", "schedule_page", "sharding_page"]
