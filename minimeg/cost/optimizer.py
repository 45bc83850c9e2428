"""How many bytes does a parameter cost before a single activation is stored?

A mixed-precision parameter is kept several times: in 16 bits to compute with, as a gradient, in 32 bits to update, and as Adam's two
moments. ZeRO (Rajbhandari et al. 2019, arXiv 1910.02054) splits these over the d data-parallel ranks, in three stages.

Three ways to count are in use; a table must say which it means. Per parameter, without splitting:

    16   ZeRO: 16-bit weight 2, 16-bit gradient 2, K = 12 (32-bit weight, momentum, variance)
    18   Megatron-LM, bf16: the same with a 32-bit gradient, 4
    20   Megatron-LM, fp16: 16-bit gradient 2 and, beside K, a 32-bit gradient 4

See it run: ``python -m minimeg.cost --model gpt3-175b``.
"""

from __future__ import annotations

from minimeg.schedule.actions import refuse, size_faults

# (on every rank, split over d by the distributed optimizer), bytes per parameter.
_MEGATRON = {"fp16_fp16": (4, 16), "bf16_fp32": (6, 12), "fp32_fp32": (8, 8)}
PRECISIONS = tuple(_MEGATRON)  # type of the weights, type of their gradients


def zero_bytes(parameters: float, data: int, stage: int, optimizer_bytes: float = 12) -> float:
    """Bytes of weights, gradients and optimizer state on one rank. ZeRO, section 5 and Figure 1.

        stage   0                1 (P_os)          2 (P_os+g)          3 (P_os+g+p)
        bytes   (4 + K) Psi      4 Psi + K Psi/d   2 Psi + (2+K) Psi/d   (4 + K) Psi/d

    Args:
        parameters: Psi. data: d, called N_d in the paper. optimizer_bytes: K, 12 for Adam.

    ZeRO's Table 1 cuts large values off instead of rounding them (4187.5 is printed as 4187, 513.5 as 513) and counts 1 GB = 10^9
    bytes. A summary in circulation has 1.96 GB for 7.5B parameters, d = 64, stage 3: it is 1.875.

    Raises:
        ValueError: data below 1, stage not 0..3.
    """
    refuse(size_faults(data=data) + _stage_faults(stage), "cannot count model states")
    per_parameter = {
        0: 4 + optimizer_bytes,
        1: 4 + optimizer_bytes / data,
        2: 2 + (2 + optimizer_bytes) / data,
        3: (4 + optimizer_bytes) / data,
    }
    return parameters * per_parameter[stage]


def megatron_bytes_per_parameter(precision: str = "bf16_fp32", data: int = 1, distributed: bool = True) -> float:
    """Bytes per parameter on one rank, with or without the distributed optimizer (ZeRO stage 1).

        precision     weight/gradient   whole   distributed over d
        "fp16_fp16"   fp16/fp16         20      4 + 16/d
        "bf16_fp32"   bf16/fp32         18      6 + 12/d
        "fp32_fp32"   fp32/fp32         16      8 + 8/d

    Megatron-Core's documentation of the distributed optimizer (dist_optimizer.md).

    Raises:
        ValueError: an unknown precision, data below 1.
    """
    faults = size_faults(data=data)
    if precision not in _MEGATRON:
        faults.append(f"precision={precision!r} is unknown; use one of {', '.join(PRECISIONS)}")
    refuse(faults, "cannot count model states")
    kept, split = _MEGATRON[precision]
    return kept + split / (data if distributed else 1)


def zero_communication(stage: int) -> int:
    """Elements that a rank sends per step, over Psi; the factor (d - 1)/d is dropped. ZeRO, section 7.

    2 for plain data parallelism and stages 1 and 2 (a reduce-scatter and an all-gather are an all-reduce), 3 for stage 3, which gathers
    the weights for the backward pass once more.

    Raises:
        ValueError: stage not 0..3.
    """
    refuse(_stage_faults(stage), "cannot count communication")
    return 3 if stage == 3 else 2


def _stage_faults(stage: int) -> list[str]:
    return [] if stage in (0, 1, 2, 3) else [f"stage={stage} must be 0, 1, 2 or 3"]
