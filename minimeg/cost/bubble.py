"""How long does a pipeline stand idle?

Two fractions are in use and differ: idle time over IDEAL time (Megatron-LM) and over TOTAL time (GPipe, Zero Bubble). With stages of
equal time and free messages they are (p-1)/m and (p-1)/(m+p-1), for GPipe and 1F1B alike; n chunks a rank divide the first by n.
``minimeg.schedule.simulate`` finds the same by moving actions, and the truth where stages differ.

Source: Narayanan et al. 2021, arXiv 2104.04473, sections 2.2, 3.3.1 and 3.4.

See it run: ``python -m minimeg.schedule 1f1b interleaved --pp 4 --microbatches 8 --compare``.
"""

from __future__ import annotations

from minimeg.schedule.actions import refuse, size_faults


def bubble_seconds(pipeline: int, forward: float, backward: float, chunks: int = 1) -> float:
    """t_pb = (p-1)(t_f + t_b)/n: idle time of a rank in a step. Narayanan et al. 2021, section 2.2.

    Args:
        forward, backward: times of a micro-batch in a whole stage.
    """
    refuse(size_faults(pipeline=pipeline, chunks=chunks), "no such pipeline")
    return (pipeline - 1) * (forward + backward) / chunks


def bubble_of_ideal(pipeline: int, microbatches: int, chunks: int = 1) -> float:
    """(1/n)(p-1)/m, idle time over the time without a bubble, m(t_f + t_b). Narayanan et al. 2021, section 2.2.

    With n > 1, m must be a multiple of p (some public notes ask for p n: the paper does not); pipeline messages grow n-fold.
    """
    refuse(size_faults(pipeline=pipeline, microbatches=microbatches, chunks=chunks), "no such pipeline")
    return (pipeline - 1) / (microbatches * chunks)


def bubble_of_total(pipeline: int, microbatches: int, chunks: int = 1) -> float:
    """r/(1 + r), r = ``bubble_of_ideal``: idle time over all time, (p-1)/(m+p-1) if n = 1. GPipe, arXiv 1811.06965, section 2.3."""
    ideal = bubble_of_ideal(pipeline, microbatches, chunks)
    return ideal / (1 + ideal)


def bubble_of_data_parallel(gpus: int, data: int, batch_over_microbatch: int) -> float:
    """(n - d)/b': the same with t = 1 in terms of n GPUs, p = n/d and m = b'/d. Narayanan et al. 2021, section 3.3.1.

    Args:
        batch_over_microbatch: b' = B/b. In the paper's equation 1 the same letter is B/d, see ``batch_seconds``.
    """
    refuse(size_faults(gpus=gpus, data=data, batch_over_microbatch=batch_over_microbatch), "no such pipeline")
    return (gpus - data) / batch_over_microbatch


def batch_seconds(batch_per_replica: int, microbatch: int, pipeline: int, forward: float, backward: float) -> float:
    """(b'/b + p - 1)(t_f(b) + t_b(b)): time of a batch. Narayanan et al. 2021, equation 1; communication is left out.

    Which b is best depends on how t_f and t_b grow with b, which only a measurement tells (the paper's Figures 8 and 16): too small
    wastes the GPU, too big the pipeline.

    Args:
        batch_per_replica: b' = B/d, a multiple of b. In section 3.3.1 the same letter is B/b.
        forward, backward: t_f(b) and t_b(b) of one micro-batch in one stage.
    """
    faults = size_faults(batch_per_replica=batch_per_replica, microbatch=microbatch, pipeline=pipeline)
    if not faults and batch_per_replica % microbatch:
        faults.append(f"microbatch={microbatch} does not divide batch_per_replica={batch_per_replica}; use a divisor")
    refuse(faults, "no such pipeline")
    return (batch_per_replica // microbatch + pipeline - 1) * (forward + backward)
