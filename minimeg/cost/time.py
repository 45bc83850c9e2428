"""How many days? FLOPs over the speed that was reached.

Sources: Narayanan et al. 2021, arXiv 2104.04473, equation 4, Tables 1 and 2.

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --gpu a100-80g``.
"""

from __future__ import annotations

from minimeg.cost.flops import flops_per_iteration
from minimeg.cost.shapes import GPTShape

SECONDS_PER_DAY = 86400


def training_days(tokens: float, parameters: float, gpus: int, achieved: float) -> float:
    """8 T P / (n X) / 86400. Narayanan et al. 2021, equation 4: eight, not six, FLOPs per token and parameter, as it recomputes all.

    Args:
        tokens: T. parameters: P. gpus: n. achieved: X, FLOP/s of a GPU, recomputation included.

    GPT-3 on 1024 A100s: 33.9, "34 days". For the trillion, "84 days" needs P = 1008e9; with 10^12 it is 83.2. The approximation leaves
    out attention and output layer: ``training_days_exact`` gives 34.7 and 85.0 for the two.
    """
    return 8 * tokens * parameters / (gpus * achieved) / SECONDS_PER_DAY


def training_days_exact(shape: GPTShape, tokens: float, gpus: int, achieved: float) -> float:
    """F/(B s) T / (n X) / 86400 with F of equation 3 (which has full recomputation). Narayanan et al. 2021, Table 2 was made so.

    Equation 4 is 1 to 3 % low on that table (87.7 for 90 days).
    """
    return flops_per_iteration(shape, 1) / shape.sequence * tokens / (gpus * achieved) / SECONDS_PER_DAY


def percent_of_peak(achieved: float, peak: float) -> int:
    """round(100 X / peak), as Narayanan et al. 2021, Table 1 prints it; 312e12 FLOP/s is an A100's peak."""
    return round(100 * achieved / peak)


def aggregate_petaflops(achieved: float, gpus: int) -> float:
    """n X in PFLOP/s. Narayanan et al. 2021, Table 1; the column agrees with the one per GPU within 0.5 %."""
    return gpus * achieved / 1e15


def scaling_efficiency(achieved_total: float, gpus: int, achieved_by_one: float) -> float:
    """All GPUs' FLOP/s over n times those of one. Shoeybi et al. 2019 (arXiv 1909.08053), abstract: 15.1 PFLOP/s on 512 V100s, 76 %.

    One reaches 39 TFLOP/s, "30 % of peak": a peak of 130, not the 125 of the data sheet. Figure 5 and section 5.1.1 of the same paper
    say 74 % for the same 512 GPUs: there it is weak scaling, time of a step against that of one GPU at equal work.
    """
    return achieved_total / (gpus * achieved_by_one)
