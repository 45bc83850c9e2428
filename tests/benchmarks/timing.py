"""Contenders take turns; a ratio is formed within a round, where both met the same machine."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_LEAD = 0.004  # seconds between agreeing on a start and starting


@dataclass(frozen=True)
class Spread:
    """Median, lower and upper quartile, and the smallest of several measurements."""

    median: float
    low: float
    high: float
    minimum: float
    number: int

    def scaled(self, factor: float) -> Spread:
        return Spread(self.median * factor, self.low * factor, self.high * factor, self.minimum * factor, self.number)


def spread(values: Sequence[float]) -> Spread:
    low, _, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return Spread(statistics.median(values), low, high, min(values), len(values))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Round by round."""
    return spread([a / b for a, b in zip(ours, theirs, strict=True)])


def take_turns(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, prepare: Mapping[str, Callable[[], Any]] | None = None
) -> dict[str, list[float]]:
    """Seconds of each contender's step in each round, from the common start to the end on the last rank. Every rank calls it.

    The order turns round from one round to the next. A first round, in which connections are made and caches are filled, does not
    count. ``prepare``: what a contender does before its clock starts, such as forgetting its gradients.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 1):
        for name in names if number % 2 else names[::-1]:
            if prepare is not None:
                prepare[name]()
            gc.collect()  # what one leaves behind is not charged to the next
            start = _common_start()
            contenders[name]()
            end = torch.tensor(time.perf_counter(), dtype=torch.float64)
            dist.all_reduce(end, dist.ReduceOp.MAX)
            if number > 0:
                times[name].append(float(end) - start)
    return times


def _common_start() -> float:
    """All ranks of this machine read the same clock: rank 0 names a moment that is still to come, and all wait for it."""
    moment = torch.tensor(0.0, dtype=torch.float64)
    while True:
        dist.barrier()
        if dist.get_rank() == 0:
            moment.fill_(time.perf_counter() + _LEAD)
        dist.broadcast(moment, 0)
        late = torch.tensor(time.perf_counter() > float(moment), dtype=torch.int32)
        dist.all_reduce(late, dist.ReduceOp.MAX)
        if not late:
            break
    while time.perf_counter() < float(moment):
        pass
    return float(moment)
