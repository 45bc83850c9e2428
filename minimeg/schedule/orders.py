"""The orders that every training program knows: GPipe, 1F1B, interleaved 1F1B, and forward-only for evaluation.

Each builder writes down, for one rank, its phases in order. Micro-batches enter in order 0..m-1, and every chunk does its backwards in
order 0..m-1 too: that is the order in which a single process accumulates gradients, so pipelines can equal it to the last bit.

    GPipe   p=4 m=4   r0  F F F F . . . . . . B B B B       all forwards, then all backwards; a rank holds m activations
                      r1  . F F F F . . . . B B B B .
                      r2  . . F F F F . . B B B B . .
                      r3  . . . F F F F B B B B . . .

    1F1B    p=4 m=4   r0  F F F F . . . B . B . B . B       p - r - 1 forwards to fill the pipe, then one forward and one
                      r1  . F F F . . B F B . B . B .       backward in turn, then the backwards that are left; a rank holds
                      r2  . . F F . B F B F B . B . .       p - r activations, however many micro-batches there are
                      r3  . . . F B F B F B F B . . .

Both take the same time: with equal stages the bubble is (p - 1) / m of the ideal time for either, F = B or not (p=8 m=32 F=B=1: 78
slots both, 14 of them idle on each rank). What 1F1B buys is memory. Only with unequal stages do the two differ.

Sources: GPipe, Huang et al. 2018, arXiv 1811.06965. 1F1B: PipeDream-Flush, Narayanan et al. 2020, arXiv 2006.09503. Interleaved:
Narayanan et al. 2021, section 2.2, arXiv 2104.04473.

See them run: ``python -m minimeg.schedule gpipe 1f1b interleaved --pp 4 --microbatches 8 --compare``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from minimeg.schedule.actions import PLACEMENTS, Action, Schedule, refuse, size_faults


def actions(kind: str, microbatches: Iterable[int], chunk: int = 0) -> list[Action]:
    """The same kind of action for several micro-batches."""
    return [Action(kind, microbatch, chunk) for microbatch in microbatches]


def alternate(first: Sequence[Action], second: Sequence[Action]) -> list[Action]:
    """One of the first, one of the second, and so on; both have the same length."""
    return [action for pair in zip(first, second, strict=True) for action in pair]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards."""
    check(stages=stages, microbatches=microbatches)
    row = tuple(actions("F", range(microbatches)) + actions("B", range(microbatches)))
    return Schedule("gpipe", stages, microbatches, 1, (row,) * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """1F1B with a flush, for every m >= 1: rank r holds min(p - r, m) activations."""
    check(stages=stages, microbatches=microbatches)
    return Schedule("1f1b", stages, microbatches, 1, one_f_one_b_rows(stages, microbatches))


def one_f_one_b_rows(stages: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Per rank: p - r - 1 forwards, one forward and one backward in turn, the backwards that are left."""
    forwards, backwards = actions("F", range(microbatches)), actions("B", range(microbatches))
    rows = []
    for rank in range(stages):
        warmup = min(stages - rank - 1, microbatches)
        rows.append(_warm_steady_cool(forwards, backwards, warmup))
    return tuple(rows)


def interleaved(stages: int, microbatches: int, chunks: int, group_size: int | None = None) -> Schedule:
    """1F1B over n chunks a rank: the pipe fills in 1/n of the time, for n times as many messages.

    Micro-batches go in groups of g (``group_size``, p if None): a group through chunk 0, then through chunk 1, and so on. Rank r begins
    with 2 (p - r - 1) + (n - 1) g forwards: (n - 1) g until the last rank has begun the last chunk, and 2 for each rank between,
    since an exchange in the steady phase comes once a pair of F and B. That is Megatron-LM's order wherever it has one.

    Where m is not made of whole groups, that order can run into a circle (first at p=5 m=7 n=2). Then the order of the next larger m'
    is taken (m' mod g = 0 or >= p) and the micro-batches that do not exist are left out.

    Raises:
        ValueError: group_size < p, sizes below 1.
    """
    faults = size_faults(stages=stages, microbatches=microbatches, chunks=chunks)
    group = stages if group_size is None else group_size
    if group_size is not None:
        faults += size_faults(group_size=group_size)
        if not faults and group_size < stages:
            faults.append(
                f"group_size={group_size} is smaller than stages={stages}; use {stages} or more, or leave it out"
            )
    refuse(faults, "interleaved")
    padded = next(k for k in range(microbatches, microbatches + group) if k % group == 0 or k % group >= stages)
    forwards = _group_by_group("F", padded, range(chunks), group)
    backwards = _group_by_group("B", padded, range(chunks)[::-1], group)
    rows = []
    for rank in range(stages):
        warmup = min(2 * (stages - rank - 1) + (chunks - 1) * group, len(forwards))
        row = _warm_steady_cool(forwards, backwards, warmup)
        rows.append(tuple(action for action in row if action.microbatch < microbatches))
    return Schedule("interleaved", stages, microbatches, chunks, tuple(rows))


def forward_only(stages: int, microbatches: int, chunks: int = 1, placement: str = "loop") -> Schedule:
    """Evaluation: forwards only. The placement is that of the training schedule, so that the chunks can stay where they are.

    In a loop micro-batches go in groups of p through chunk after chunk. In a "v" rank r does 2(p - r) - 1 forwards of chunk 0 until
    its first micro-batch comes back through chunk 1, then one of each in turn.
    """
    faults = size_faults(stages=stages, microbatches=microbatches, chunks=chunks)
    if placement not in PLACEMENTS:
        faults.append(f"placement={placement!r} is not one of {', '.join(PLACEMENTS)}")
    if placement == "v" and chunks != 2:
        faults.append(f"placement='v' has two chunks a rank, got chunks={chunks}; use chunks=2 or placement='loop'")
    refuse(faults, "forward-only")
    if placement == "loop":
        rows = (tuple(_group_by_group("F", microbatches, range(chunks), stages)),) * stages
    else:
        down, up = (actions("F", range(microbatches), chunk) for chunk in (0, 1))
        rows = tuple(_warm_steady_cool(down, up, min(2 * (stages - rank) - 2, microbatches)) for rank in range(stages))
    return Schedule("forward-only", stages, microbatches, chunks, rows, placement)


def check(**sizes: int) -> None:
    """ValueError for sizes below 1, all in one message."""
    refuse(size_faults(**sizes), "cannot build the schedule")


def _warm_steady_cool(first: Sequence[Action], second: Sequence[Action], warmup: int) -> tuple[Action, ...]:
    """The three phases of 1F1B: ``warmup`` of the first, then first and second in turn, then what is left of the second."""
    steady = len(first) - warmup
    return (*first[:warmup], *alternate(first[warmup:], second[:steady]), *second[steady:])


def _group_by_group(kind: str, microbatches: int, chunks: Sequence[int], group: int) -> list[Action]:
    """Micro-batches 0..g-1 through each chunk in turn, then g..2g-1, ...; the last group may be smaller."""
    return [
        Action(kind, microbatch, chunk)
        for start in range(0, microbatches, group)
        for chunk in chunks
        for microbatch in range(start, min(start + group, microbatches))
    ]
