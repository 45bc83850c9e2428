"""PipeDream and PipeDream-2BW: never drain the pipe, and pay with stale weights.

The order of actions is that of 1F1B, over all micro-batches of a whole run instead of one step: there is no flush between updates,
so the bubble is paid once. What differs is when weights change, which the schedule records and the executor does:

    pipedream       "each"  after every B a stage updates its weights. F and B of a micro-batch must use the same weights, so a stage
                            keeps (stashes) one version for each micro-batch in flight: p - r on rank r. With stages 1..n,
                            w(t+1) = w(t) - lr * grad f(w1(t-n+1), w2(t-n+2), ..., wn(t)), versions clamped at 0.
    pipedream-2bw   "2bw"   gradients of m micro-batches, m >= p, are added up before an update, and two versions are enough (a double
                            buffer): micro-batch k, counted from 1, uses version max(floor((k - 1) / m) - 1, 0) on every stage, so
                            w(t+1) = w(t) - lr * grad f(w(t-1)).

Sources: PipeDream, Harlap et al. 2018, arXiv 1806.03377, section 3.3; PipeDream-2BW, Narayanan et al. 2020, arXiv 2006.09503.

See the order: ``python -m minimeg.schedule pipedream --pp 4 --microbatches 8``.
"""

from __future__ import annotations

from minimeg.schedule.actions import Schedule, refuse, size_faults
from minimeg.schedule.orders import check, one_f_one_b_rows


def pipedream(stages: int, microbatches: int) -> Schedule:
    """PipeDream: an update after every backward. ``microbatches`` counts those of the whole run, and so the updates."""
    check(stages=stages, microbatches=microbatches)
    rows = one_f_one_b_rows(stages, microbatches)
    return Schedule("pipedream", stages, microbatches, 1, rows, updates="each")


def pipedream_2bw(stages: int, microbatches: int) -> Schedule:
    """PipeDream-2BW: gradients are accumulated over at least p micro-batches. ``microbatches`` counts those of the whole run.

    Raises:
        ValueError: fewer micro-batches than stages.
    """
    faults = size_faults(stages=stages, microbatches=microbatches)
    if not faults and microbatches < stages:
        faults.append(
            f"microbatches={microbatches} is less than stages={stages}: with two weight versions an update needs the gradients "
            f"of at least {stages} micro-batches; use {stages} or more"
        )
    refuse(faults, "pipedream-2bw")
    rows = one_f_one_b_rows(stages, microbatches)
    return Schedule("pipedream-2bw", stages, microbatches, 1, rows, updates="2bw")
