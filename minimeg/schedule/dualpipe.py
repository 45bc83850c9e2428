"""DualPipeV: forward of one micro-batch beside backward of another, so that each can communicate while the other computes.

DeepSeek-V3 (arXiv 2412.19437, section 3.2.1) runs two directions over p ranks that each hold two stages, twice the parameters. Cut
in the middle and folded, it becomes a "v" with every stage held once: DualPipeV. In its steady phase a rank pairs F of one chunk with
B of the other. With the pair as one unit of time F&B and PP = 2p virtual stages the bubble is (PP/2 - 1)(F&B + B - 3W), B with W in
it, and a rank holds PP + 1 chunk activations.

Here the two of a pair simply follow each other: what the first makes leaves at once, and the bubble is smaller than the formula's, but
nothing overlaps. Where communication takes long, compare with ZB-V, which has no bubble at F = B = W.

See it run: ``python -m minimeg.schedule zb-v dualpipe-v --compare --pp 4 --microbatches 8``.
"""

from __future__ import annotations

from minimeg.schedule.actions import Schedule
from minimeg.schedule.orders import check
from minimeg.schedule.phases import Phases, v_schedule


def dualpipe_v(stages: int, microbatches: int) -> Schedule:
    """DualPipeV: two chunks a rank in a "v", 2p + 1 chunk activations. A B directly before its W is a whole backward."""
    check(stages=stages, microbatches=microbatches)
    p = stages

    def write(row: Phases, rank: int) -> None:
        behind = p - rank - 1
        row.do("F0", 2 * behind)
        row.do("F0 F1", rank + 1)
        row.do("B1 W F1", behind)
        row.do("F0 B1 W F1 B0 W", row.microbatches - 2 * p + rank + 1)  # the pairs: F0 with B1, F1 with B0
        row.do("B1 W F1 B0 W", behind)
        last = ("B1 B0 " * (rank + 1)).split()  # half of the last backwards whole, half with W put off
        row.do(" W ".join([*last[: rank + 1], ""]), 1)
        row.do(" ".join(last[rank + 1 :]), 1)
        row.do("W B0", behind)
        row.do_waiting()

    return v_schedule("dualpipe-v", p, microbatches, 2 * p, write)
