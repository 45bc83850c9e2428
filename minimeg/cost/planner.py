"""Which layout is best? All legal ones are listed, those that do not fit are dropped, and the fastest are found for certain.

Simulating every candidate would take minutes. Each gets a lower bound instead (``lower_bound``), candidates are simulated in order of
their bounds, and the search stops when the next bound is above the slowest of the k best: what was not simulated cannot be among
them. It is the search called branch and bound, in its simplest form.

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --gpu a100-80g``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from minimeg.cost.estimate import Estimate, estimate, lower_bound
from minimeg.cost.flops import RECOMPUTE
from minimeg.cost.hardware import GB
from minimeg.cost.layout import Job, Layout, legal_layouts
from minimeg.cost.memory import fullest_rank, total


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        best: the fastest that fit, best first.
        sizes: (bytes of the fullest rank, layout) of all that are legal.
        candidates: (lower bound in seconds, layout) of all that fit the memory, in order of bounds.
        simulated: how many of these had to be simulated.
    """

    job: Job
    best: tuple[Estimate, ...]
    sizes: tuple[tuple[float, Layout], ...]
    candidates: tuple[tuple[float, Layout], ...]
    simulated: int


@dataclass(frozen=True)
class Alternative:
    """The best layout under one choice that the winner did not make; ``estimate`` is None where none fits."""

    choice: str
    estimate: Estimate | None
    words: str


def plan(job: Job, best: int = 10) -> Plan:
    """The ``best`` fastest layouts that fit; fewer if there are not so many."""
    sizes = tuple((memory_bytes(job, layout), layout) for layout in legal_layouts(job))
    fitting = [layout for size, layout in sizes if size <= job.gpu.memory]
    candidates = tuple(sorted((lower_bound(job, layout), layout) for layout in fitting))
    winners, simulated = fastest(job, candidates, best)
    return Plan(job, winners, sizes, candidates, simulated)


def fastest(job: Job, candidates: Iterable[tuple[float, Layout]], best: int) -> tuple[tuple[Estimate, ...], int]:
    """The ``best`` fastest of candidates in order of their lower bounds, and how many had to be simulated."""
    found: list[Estimate] = []
    simulated = 0
    for bound, layout in candidates:
        if len(found) == best and bound > found[-1].seconds:
            break
        found = sorted([*found, estimate(job, layout)], key=lambda one: (one.seconds, one.layout))[:best]
        simulated += 1
    return tuple(found), simulated


def memory_bytes(job: Job, layout: Layout) -> float:
    """Of the fullest rank; in flight by the closed form, which equals the simulated peak."""
    return total(fullest_rank(job, layout)[1])


def alternatives(plan: Plan) -> list[Alternative]:
    """Why the first wins: for each choice that it made, the best layout that chooses the next smaller or larger value instead.

    Everything else may change with it: the best with t = 8 need not share p or n with the first.
    """
    first, fields = plan.best[0].layout, {"t": "tensor", "p": "pipeline", "n": "chunks", "b": "microbatch"}
    found = []
    for letter, field in fields.items():
        same_depth = [layout for _, layout in plan.sizes if field != "chunks" or layout.pipeline == first.pipeline]
        values = sorted({getattr(layout, field) for layout in same_depth})
        at = values.index(getattr(first, field))
        for value in values[max(0, at - 1) : at] + values[at + 1 : at + 2]:
            found.append(_alternative(plan, f"{letter} = {value}", field, value))
    for recompute in RECOMPUTE:
        if recompute != first.recompute:
            found.append(_alternative(plan, f"recompute {recompute}", "recompute", recompute))
    return found


def _alternative(plan: Plan, choice: str, field: str, value: object) -> Alternative:
    """The best that fits with this value, or else how much memory the smallest would need."""
    found, _ = fastest(plan.job, [pair for pair in plan.candidates if getattr(pair[1], field) == value], 1)
    if found:
        return Alternative(choice, found[0], f"{_difference(plan.best[0], found[0])}, with {found[0].layout}")
    least, layout = min(pair for pair in plan.sizes if getattr(pair[1], field) == value)
    return Alternative(choice, None, f"nothing fits: the smallest needs {least / GB:.1f} GB, with {layout}")


def _difference(first: Estimate, other: Estimate) -> str:
    """How much slower the other is, and the terms that grow and shrink most, in words."""
    names = dict.fromkeys(term.name for one in (first, other) for term in one.time_terms)
    change = dict.fromkeys(names, 0.0)
    for sign, one in ((-1, first), (1, other)):
        for term in one.time_terms:
            change[term.name] += sign * term.value
    up, down = max(change, key=lambda name: change[name]), min(change, key=lambda name: change[name])
    parts = [f"{name} {change[name]:+.2f}" for name in (up, down) if abs(change[name]) >= 0.005]
    return f"{other.seconds - first.seconds:+.2f} s" + (f" ({', '.join(parts)})" if parts else "")
