"""ZeRO stage 1: d replicas that all keep the same optimizer state need not.

    reduce-scatter    each rank gets the summed gradients of its 1/d of every bucket       (data_parallel.py)
    step              it updates those elements alone: their moments and main values lie nowhere else
    all-gather        it gives the new values to the others, and gets theirs

The first and the last together are what an all-reduce does inside, so not one byte more travels: 2 (d - 1)/d of the gradients (the
parameters' way back is shorter still in half precision). What is saved is memory. Per parameter, in bytes:

                                  weight  gradient   optimizer state           everything      ZeRO-1 over d ranks
    half precision, as here            2         4   4 main + 4 + 4 moments    18              6 + 12/d
    the same in the ZeRO paper         2         2   K = 12                    16              4 + 12/d
    float32                            4         4   4 + 4                     16              8 + 8/d

The paper (Rajbhandari et al. 2019, arXiv 1910.02054, section 3.1 and Table 1) sums gradients in 16 bits; here their sum is float32.

A part cuts across parameters, wherever it happens to: the update is element by element and does not care.

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.train --use-distributed-optimizer``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from minimeg.comm import phase
from minimeg.data_parallel import GradientReducer


@torch.no_grad()
def gather_parameters(reducer: GradientReducer) -> None:
    """Every rank's updated elements, on every rank, bucket by bucket. Collective over dp x cp."""
    group = reducer.state.dp_cp
    if group.size == 1:
        return
    with phase("parameters"):
        for bucket in (bucket for buckets in reducer.buckets for bucket in buckets):
            mine = torch.zeros_like(bucket.slice_of(group.rank), dtype=bucket.members[0][0].dtype)
            filled = 0
            for piece in bucket.pieces(group.rank):
                size = piece.end - piece.start
                mine[filled : filled + size] = piece.param.view(-1)[piece.start : piece.end]
                filled += size
            everything = group.all_gather(mine)
            for (param, _), (start, end) in zip(bucket.members, bucket.spans, strict=True):
                param.copy_(everything[start:end].view(param.shape))


@dataclass(frozen=True)
class ModelStates:
    """Bytes that this rank keeps for its parameters from step to step; activations are another matter (memory.py).

    Attributes:
        parameters: Psi, elements on this rank.
        weights, gradients, optimizer: measured, of the tensors themselves.
        narrow, wide: bytes of an element of a weight, and of its gradient.
        moments: tensors of its shape that the optimizer keeps (AdamW 2, plain SGD 0).
        data: d, the ranks that share the update; scattered: whether they do (ZeRO-1).
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    narrow: int
    wide: int
    moments: int
    data: int
    scattered: bool

    @property
    def measured(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def state_bytes(self) -> int:
        """K: bytes of optimizer state of one parameter; main values where the weights are narrow."""
        return self.wide * (self.moments + (self.narrow < self.wide))

    def formula(self, scattered: bool) -> float:
        """(weight + gradient) Psi + K Psi, or + K Psi/d with ZeRO-1. Padding of the buckets to a multiple of d is left out."""
        share = self.state_bytes / (self.data if scattered else 1)
        return (self.narrow + self.wide + share) * self.parameters

    def paper(self, scattered: bool) -> float:
        """The same with gradients as narrow as the weights: ZeRO, Table 1."""
        return self.formula(scattered) - (self.wide - self.narrow) * self.parameters

    def __str__(self) -> str:
        def row(what: str, value: float) -> str:
            return f"  {what:<46} {value:>15,.0f} bytes   {value / self.parameters:6.2f} a parameter"

        each = self.narrow + self.wide
        return "\n".join(
            [
                f"model states of this rank: {self.parameters:,} parameters, d = {self.data}, "
                + ("optimizer state shared (ZeRO-1)" if self.scattered else "every replica keeps all"),
                row("weights", self.weights),
                row("gradients", self.gradients),
                row("optimizer state", self.optimizer),
                row("measured", self.measured),
                row(f"formula without ZeRO: {each} + {self.state_bytes}", self.formula(False)),
                row(f"formula with ZeRO-1:  {each} + {self.state_bytes}/{self.data}", self.formula(True)),
                row(f"ZeRO, Table 1:        {2 * self.narrow} + {self.state_bytes}/{self.data}", self.paper(True)),
            ]
        )


def model_states(reducer: GradientReducer, state: Iterable[Tensor], moments: int) -> ModelStates:
    """Measure this rank. ``state``: the optimizer's tensors; one that shares memory with a weight costs nothing more."""
    buckets = [bucket for buckets in reducer.buckets for bucket in buckets]
    params = [param for bucket in buckets for param, _ in bucket.members]
    owned = {param.untyped_storage() for param in params}  # not their addresses: those of meta tensors are all 0
    kept = [x for x in state if x.untyped_storage() not in owned]
    return ModelStates(
        parameters=sum(param.numel() for param in params),
        weights=sum(param.nbytes for param in params),
        gradients=sum(bucket.buffer.nbytes for bucket in buckets),
        optimizer=sum(x.nbytes for x in kept),
        narrow=params[0].element_size(),
        wide=buckets[0].buffer.element_size(),
        moments=moments,
        data=reducer.state.dp_cp.size,
        scattered=reducer.use_distributed_optimizer,
    )
