"""The rows of recompute.py: full recomputation against torch's non-reentrant checkpoint, in processor time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from minimeg.lab.ranks import Ranks
from tests.benchmarks import recompute
from tests.benchmarks.table import Row
from tests.benchmarks.timing import ratio, spread


def measure(rounds: int, dropout: float) -> dict[str, list[float]]:
    return recompute.measure(rounds, dropout)


def rows(rounds: int, pool: Callable[[int], Ranks], dropouts: Sequence[float] = (0.1, 0.0)) -> Iterator[Row]:
    for dropout in dropouts:
        times = pool(1).call(measure, rounds, dropout, timeout=300)[0]
        found = ratio(times["minimeg"], times["torch, non-reentrant"])
        yield Row(
            section="recomputation",
            setting=f"{recompute.LAYERS} layers, h={recompute.H}, s={recompute.S}, b={recompute.B}, dropout {dropout}",
            unit="s",
            values={"ours" if name == "minimeg" else name: spread(each) for name, each in times.items()},
            ratios={
                "ours / torch": found,
                "ours / none": ratio(times["minimeg"], times["none"]),
                "torch / none": ratio(times["torch, non-reentrant"], times["none"]),
            },
            equal="all gradients by torch.equal, in every round",
            reach="no slower than torch's checkpoint (within 2 %)",
            met=found.median <= 1.02,
            notes="processor time; counting FLOPs says 4/3 of a step without recomputation",
        )
