"""Zero bubble: a backward is two jobs with two deadlines.

B, the gradient of the input, is urgent: another rank waits for it. W, the gradient of the weights, is for nobody but the optimizer,
so it can fill holes. Qi et al. 2023, arXiv 2401.10241. How each begins, for p=4 m=8 F=B=W=1 (time runs to the right):

    ZB-H1   r0  F F F F . . . B W F . B W F . B ...     1F1B's warm-up. Rank r lets its W lag r micro-batches behind B, so no rank
            r1  . F F F . . B F B W F B W F B W ...     holds more than 1F1B's rank 0, p activations, and the last ranks have W
            r2  . . F F . B F B F B W F B W F B ...     left when 1F1B idles at the end. Bubble (p-1)(F+B-W), a third of 1F1B's.
            r3  . . . F B F B F B F B W F B W F ...
    ZB-H2   r0  F F F F F F F B W F B W B W ...         2(p-r-1) forwards fill the first triangle of holes, a lag of 2r fills the
                                                        last. No bubble at F=B=W, at the price of 2p - 1 activations.
    ZB-V    chunk 0 runs down the ranks and chunk 1 back up ("v"), so every micro-batch returns to the rank where it began: no
            bubble at F=B=W and m >= 2p, with p activations (2p half-size chunks).

The bubble is that of each rank's own span: ranks start and end at different times, so the optimizer must not make them wait for each
other at the end (the paper, section 4, says how). Formulas hold while W <= F and W <= B.

See them run: ``python -m minimeg.schedule 1f1b zb-h1 zb-h2 zb-v --compare --pp 4 --microbatches 8 --weight 1 --backward 1``.
"""

from __future__ import annotations

from minimeg.schedule.actions import Action, Schedule
from minimeg.schedule.orders import actions, check
from minimeg.schedule.phases import Phases, v_schedule


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """1F1B with W after B, r micro-batches late: at most p activations on a rank, a third of 1F1B's bubble at F = B = W."""
    check(stages=stages, microbatches=microbatches)
    rows = tuple(_row_with_lag(microbatches, warmup=stages - rank - 1, lag=rank) for rank in range(stages))
    return Schedule("zb-h1", stages, microbatches, 1, rows)


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """Twice ZB-H1's warm-up and twice its lag: no bubble at F = B = W and m >= 2p - 1, with 2p - 1 activations on every rank."""
    check(stages=stages, microbatches=microbatches)
    rows = tuple(_row_with_lag(microbatches, warmup=2 * (stages - rank - 1), lag=2 * rank) for rank in range(stages))
    return Schedule("zb-h2", stages, microbatches, 1, rows)


def _row_with_lag(microbatches: int, warmup: int, lag: int) -> tuple[Action, ...]:
    """1F1B's phases; after B of micro-batch k comes W of micro-batch k - lag, and at the end the W that are left."""
    warmup = min(warmup, microbatches)
    row = actions("F", range(warmup))
    for k in range(microbatches):
        if warmup + k < microbatches:
            row.append(Action("F", warmup + k))
        row.append(Action("B", k))
        if k >= lag:
            row.append(Action("W", k - lag))
    return (*row, *actions("W", range(max(0, microbatches - lag), microbatches)))


def zero_bubble_v(stages: int, microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank in a "v", no bubble at F = B = W and m >= 2p, with p activations (2p chunks) on every rank."""
    check(stages=stages, microbatches=microbatches)
    p = stages

    def write(row: Phases, rank: int) -> None:
        row.do("F0", 2 * (p - rank) - 1)  # until the first micro-batch is back from the turn of the v
        row.do("F1 F0", rank)
        row.do("F1 B1 W", p - rank)  # until its gradient has gone round the v too
        row.do("F0 B0 W F1 B1 W", row.microbatches - p)  # at the end of it no F0 is left
        row.do("B0 B1", rank)  # other ranks wait for these, so W is put off
        row.do("B0 W", p - rank)
        row.do_waiting()

    return v_schedule("zb-v", p, microbatches, 2 * p - 1, write)
