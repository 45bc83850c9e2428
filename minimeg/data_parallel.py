"""Who is reduced over which group, and when: the order of gradient reductions after the last backward.

A gradient is complete only when every rank that saw part of the data, or part of the tokens, has added its share. Three sums, in
this order (Megatron-LM's ``finalize_model_grads``):

1. **tp**: replicated parameters that each rank used on its own tokens only (sequence parallelism: ``shard.partial_over_tp``).
2. **dp x cp**: everything, in buckets: one all-reduce of many gradients costs less than many small ones.
3. **embedding**: a tied word embedding lives on the first and the last stage; the two copies add their gradients and so stay
   bit-equal after every step.

*When* matters as much as what. Summed after every micro-batch, the first gradient would be counted again and again; summed when "all
forwards are done", the last stage is right and the first is wrong. Only the pipeline executor knows the last action that touches a
chunk; it calls :meth:`GradientReducer.ready` then, once a step, and sums 1 and 2 of that chunk travel while other chunks still work.

Nothing is divided here: the loss was divided by the number of valid tokens of the whole batch, so gradients simply add.

See it run: ``notebooks/12_data_parallelism.ipynb``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from minimeg.comm import Group, Pending, phase
from minimeg.parallel_state import ParallelState
from minimeg.parameter import Shard, named_shards

BUCKET_ELEMENTS = (
    4_000_000  # large enough that latency does not count, small enough to begin while others are still computed
)

NamedParameter = tuple[nn.Parameter, Shard]


@dataclass
class GradientReducer:
    """Sums the gradients of this rank's chunks over the groups they belong to.

    Gradients of half-precision parameters are summed in float32 (gloo adds bf16 256 + 1 to 256). A parameter without a gradient
    counts as zeros: its peers wait for it in the same collective.
    """

    chunks: Sequence[nn.Module]
    state: ParallelState
    bucket_elements: int = BUCKET_ELEMENTS
    _under_way: list[tuple[list[NamedParameter], Pending]] = field(default_factory=list)
    _begun: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._parameters = [[(param, shard) for _, param, shard in named_shards(chunk)] for chunk in self.chunks]

    def ready(self, chunk: int) -> None:
        """The gradients of a chunk are final on this rank: begin to sum them. Once a step and chunk, else RuntimeError."""
        if chunk in self._begun:
            raise RuntimeError(f"chunk {chunk} was reduced twice in one step: its gradients would be counted twice")
        self._begun.add(chunk)
        parameters = self._parameters[chunk]
        for param, _ in parameters:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        with phase("gradients"):
            partial = [(param, shard) for param, shard in parameters if shard.partial_over_tp]
            _sum_flat(partial, self.state.tp)
            if self.state.dp_cp.size > 1:
                for bucket in self.buckets(parameters):
                    self._under_way.append((bucket, self.state.dp_cp.all_reduce_async(_flatten(bucket))))

    def finish(self) -> None:
        """Wait for what :meth:`ready` began, for every chunk, then add up the copies of a tied embedding."""
        missing = set(range(len(self.chunks))) - self._begun
        if missing:
            raise RuntimeError(f"chunks {sorted(missing)} were never ready: the step did not finish")
        with phase("gradients"):
            for bucket, pending in self._under_way:
                _unflatten(bucket, pending.wait())
            self._sum_tied_copies()
        self._under_way.clear()
        self._begun.clear()

    def buckets(self, parameters: Sequence[NamedParameter]) -> list[list[NamedParameter]]:
        """Cut the parameters, last first (the order in which backward completes them), into buckets of one dtype.

        A tied weight is alone in its bucket, so that both of its stages cut it alike.
        """
        found: list[list[NamedParameter]] = []
        elements = 0
        for param, shard in reversed(parameters):
            last = found[-1][-1] if found else None
            fits = last is not None and elements + param.numel() <= self.bucket_elements
            if last is not None and fits and last[0].dtype == param.dtype and not last[1].tied and not shard.tied:
                found[-1].append((param, shard))
                elements += param.numel()
            else:
                found.append([(param, shard)])
                elements = param.numel()
        return found

    def _sum_tied_copies(self) -> None:
        """Both copies of a tied embedding get the sum of their gradients.

        They live on the first and the last rank of the pipeline, or both on this one (a "v" placement; several chunks on one rank).
        """
        copies = [param for parameters in self._parameters for param, shard in parameters if shard.tied]
        grads = [param.grad for param in copies if param.grad is not None]
        if len(grads) == 2:
            total = grads[0] + grads[1]
        elif len(grads) == 1 and self.state.embedding is not None:
            total = self.state.embedding.all_reduce(grads[0].to(_wide(grads[0].dtype))).to(grads[0].dtype)
        else:
            return
        for param in copies:
            param.grad = total.clone()


def _sum_flat(parameters: list[NamedParameter], group: Group) -> None:
    if parameters and group.size > 1:
        _unflatten(parameters, group.all_reduce(_flatten(parameters)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _flatten(bucket: list[NamedParameter]) -> Tensor:
    grads = [param.grad.flatten() for param, _ in bucket if param.grad is not None]
    return torch.cat(grads).to(_wide(grads[0].dtype))


def _unflatten(bucket: list[NamedParameter], flat: Tensor) -> None:
    pieces = flat.split([param.numel() for param, _ in bucket])
    for (param, _), piece in zip(bucket, pieces, strict=True):
        param.grad = piece.view(param.shape).to(param.dtype)
