"""Buckets and pieces: how gradients lie in memory, so that many small sums become few large ones.

    bucket   the gradients of several parameters, one after the other in one buffer; it travels as a whole
    piece    the part of one parameter that this rank's optimizer steps: all of it, or a range of its flattened elements (ZeRO)

Three choices of Megatron-LM's DistributedDataParallel are made here:

* **Reverse order.** Backward completes the last layer first, so the first bucket is full while most of backward is still to come.
* **The buffer is the gradient**: each ``param.grad`` is a view of it. Autograd adds every micro-batch into place, and nothing is
  gathered before it is sent.
* **float32 for half precision** (``param.grad_dtype``). The sum over micro-batches, and later over ranks, is one long sum: in bf16
  256 + 1 is 256, however often 1 is added (Megatron-LM's ``main_grad``).

See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from minimeg.parameter import Shard

NamedParameter = tuple[nn.Parameter, Shard]


def wide(dtype: torch.dtype) -> torch.dtype:
    """What a parameter of ``dtype`` is summed and updated in: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class Piece:
    """The elements [start, end) of a parameter's flattened local shard; all of them where ``whole``."""

    param: nn.Parameter
    shard: Shard
    start: int
    end: int

    @property
    def whole(self) -> bool:
        return self.end - self.start == self.param.numel()

    def of(self, tensor: Tensor) -> Tensor:
        """This part of a tensor of the parameter's shape, as a view: the tensor itself, or one dimension of end - start."""
        return tensor if self.whole else tensor.view(-1)[self.start : self.end]

    @classmethod
    def all_of(cls, param: nn.Parameter, shard: Shard) -> Piece:
        return cls(param, shard, 0, param.numel())


@dataclass(eq=False)
class Bucket:
    """Gradients that travel together. ``parts``: ranks that share the update; the buffer is padded to a multiple of it.

    Attributes:
        spans: where in the buffer each parameter lies.
        partial: its gradients must first be summed over tp (sequence parallelism).
        tied: it holds one copy of a tied parameter, alone, so that both stages cut it alike.
    """

    members: list[NamedParameter]
    parts: int = 1
    buffer: Tensor = field(init=False, repr=False)
    views: list[Tensor] = field(init=False, repr=False)
    spans: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        ends = [0]
        for param, _ in self.members:
            ends.append(ends[-1] + param.numel())
        self.spans = list(pairwise(ends))
        first = self.members[0][0]
        padded = -(-ends[-1] // self.parts) * self.parts
        self.buffer = torch.zeros(padded, dtype=wide(first.dtype), device=first.device)
        self.views = [
            self.buffer[start:end].view(param.shape)
            for (param, _), (start, end) in zip(self.members, self.spans, strict=True)
        ]

    @property
    def partial(self) -> bool:
        return self.members[0][1].partial_over_tp

    @property
    def tied(self) -> bool:
        return self.members[0][1].tied

    def attach(self) -> None:
        """Make every ``param.grad`` a view of the buffer. What a gradient holds comes along; none counts as zeros."""
        for (param, _), view in zip(self.members, self.views, strict=True):
            if param.grad is view:
                continue
            if param.grad is None:
                view.zero_()
            else:
                view.copy_(param.grad)
            param.grad = None
            param.grad_dtype = view.dtype
            param.grad = view

    def zero(self) -> None:
        """Forget the gradients; the views stay attached."""
        self.buffer.zero_()
        for (param, _), view in zip(self.members, self.views, strict=True):
            if param.grad is not view:
                param.grad = None
                param.grad_dtype = view.dtype
                param.grad = view

    def slice_of(self, rank: int) -> Tensor:
        """The part of the buffer that ``rank`` of ``parts`` steps, as a view. [length / parts]"""
        return self.buffer.chunk(self.parts)[rank]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The same part, parameter by parameter; padding belongs to none."""
        width = self.buffer.numel() // self.parts
        low, high = rank * width, (rank + 1) * width
        for (param, shard), (start, end) in zip(self.members, self.spans, strict=True):
            if max(start, low) < min(end, high):
                yield Piece(param, shard, max(start, low) - start, min(end, high) - start)


def cut_into_buckets(parameters: Sequence[NamedParameter], elements: int, parts: int = 1) -> list[Bucket]:
    """Parameters, last first, in buckets of one dtype and at most ``elements`` elements (or one parameter).

    A tied weight is alone. Those that are summed over tp first come last: they wait for the whole backward, and nobody for them.
    """
    backwards = list(reversed(parameters))
    found: list[list[NamedParameter]] = []
    for param, shard in sorted(backwards, key=lambda item: item[1].partial_over_tp):
        if found and _joins(found[-1], param, shard, elements):
            found[-1].append((param, shard))
        else:
            found.append([(param, shard)])
    return [Bucket(members, parts) for members in found]


def _joins(bucket: list[NamedParameter], param: nn.Parameter, shard: Shard, elements: int) -> bool:
    before, its = bucket[-1]
    same = (before.dtype, its.partial_over_tp) == (param.dtype, shard.partial_over_tp)
    return same and not (its.tied or shard.tied) and sum(p.numel() for p, _ in bucket) + param.numel() <= elements
