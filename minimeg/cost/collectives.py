"""How long does a collective take?

The bandwidth term of a ring: every rank sends a fixed multiple k(n) of the full tensor, S bytes, over its slowest link.

    all-reduce 2(n-1)/n     reduce-scatter, all-gather, all-to-all (n-1)/n     broadcast, reduce 1     S is the FULL size

NCCL's tests print S/t as "algorithm bandwidth" and k S/t as "bus bandwidth", which can be held against the data sheet
(nccl-tests, PERFORMANCE.md). An all-reduce is a reduce-scatter and an all-gather, hence the 2.

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --explain "t8 p8 d16 n3 b1 selective"``.
"""

from __future__ import annotations

from fractions import Fraction

from minimeg.schedule.actions import refuse, size_faults

# (times (n-1)/n, constant) of the bandwidth term; steps over n-1 of the latency term.
_RING = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1}
_WHOLE = ("broadcast", "reduce")
OPERATIONS = (*_RING, *_WHOLE)


def wire_factor(operation: str, ranks: int) -> Fraction:
    """k(n): bytes that a rank sends over the size of the full tensor; the cost factors of nccl-tests.

    Raises:
        ValueError: an unknown operation, ranks below 1.
    """
    faults = size_faults(ranks=ranks)
    if operation not in OPERATIONS:
        faults.append(f"operation={operation!r} is unknown; use one of {', '.join(OPERATIONS)}")
    refuse(faults, "cannot cost a collective")
    if operation in _WHOLE:
        return Fraction(int(ranks > 1))
    return _RING[operation] * Fraction(ranks - 1, ranks)


def collective_seconds(operation: str, size: float, ranks: int, bandwidth: float, latency: float = 0.0) -> float:
    """S k(n) / B + alpha term: bandwidth term of nccl-tests, latency term of a ring.

    Args:
        size: S, bytes of the full (gathered) tensor. bandwidth: B, bytes/s in ONE direction over the slowest link of the ring; the
            advertised 600 GB/s of an A100's NVLink are both directions together, so B = 300e9 there. latency: alpha, seconds per hop;
            2(n-1) hops for an all-reduce, n-1 for the others.

    Raises:
        ValueError: an unknown operation, ranks below 1, bandwidth not above 0.
    """
    refuse([] if bandwidth > 0 else [f"bandwidth={bandwidth} must be above 0 bytes/s"], "cannot cost a collective")
    hops = _RING.get(operation, 1) * (ranks - 1)
    return size * float(wire_factor(operation, ranks)) / bandwidth + hops * latency
