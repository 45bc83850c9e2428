"""What one would write by hand for one schedule: the yardstick for an executor of all schedules.

Receives are posted two actions ahead, each message has a tag of its own, sends are waited for at the very end, and what was sent
is kept until then. It checks nothing, frees nothing, and knows neither unequal shapes nor a separate weight gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minimeg.schedule import Action, Schedule

_AHEAD = 2


def hand_loop(
    schedule: Schedule,
    rank: int,
    chunks: Sequence[nn.Module],
    microbatches: Sequence[Any],
    loss: Callable[[Tensor, Any], Tensor],
    shape: tuple[int, ...],
) -> None:
    """One step of this rank; gradients add to ``param.grad``. The group is that of all processes."""
    mine, last, m = schedule.ranks[rank], schedule.stages * schedule.chunks - 1, schedule.microbatches
    arriving: dict[Action, tuple[Tensor, dist.Work]] = {}
    sent: list[tuple[Tensor, dist.Work]] = []
    kept: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}

    def tag(kind: str, stage: int, microbatch: int) -> int:
        return (2 * stage + (kind == "B")) * m + microbatch

    def post(action: Action) -> None:
        stage = schedule.virtual_stage(rank, action.chunk)
        source = stage - 1 if action.kind == "F" else stage + 1
        if 0 <= source <= last:
            buffer = torch.empty(shape)
            work = dist.irecv(buffer, schedule.rank_of(source), tag=tag(action.kind, stage, action.microbatch))
            arriving[action] = (buffer, work)

    def send(x: Tensor, action: Action, stage: int) -> None:
        if 0 <= stage <= last:
            work = dist.isend(x, schedule.rank_of(stage), tag=tag(action.kind, stage, action.microbatch))
            sent.append((x, work))

    for action in mine[:_AHEAD]:
        post(action)
    for position, action in enumerate(mine):
        if position + _AHEAD < len(mine):
            post(mine[position + _AHEAD])
        message = None
        if action in arriving:
            message, work = arriving.pop(action)
            work.wait()
        stage, microbatch = schedule.virtual_stage(rank, action.chunk), microbatches[action.microbatch]
        if action.kind == "F":
            x = None if message is None else message.requires_grad_()
            y = chunks[action.chunk](x, microbatch)
            if stage == last:
                y = loss(y, microbatch)
            kept[action.chunk, action.microbatch] = (x, y)
            send(y.detach(), action, stage + 1)
        else:
            x, y = kept.pop((action.chunk, action.microbatch))
            torch.autograd.backward(y, message)
            if x is not None:
                assert x.grad is not None
                send(x.grad, action, stage - 1)
    for _, work in sent:
        work.wait()
