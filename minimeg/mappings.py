"""f, g and their relatives: what crosses between a replicated tensor and a sharded one, and what its gradient does.

A layer cut over t ranks computes with pieces. Where a whole tensor enters the cut region or leaves it, one of these mappings
stands. Each is a linear map from "the tensors of all ranks" to "the tensors of all ranks", and its backward is the transpose:

    <forward(x), y> == <x, backward(y)>        summed over all elements and ranks (the adjoint identity; tests assert it)

where a replicated tensor counts once. With R for replicated and S for sharded:

    mapping                                        forward            backward           from -> to
    copy_to_tensor_model_parallel_region      f    identity           all-reduce         R -> partial use on each rank
    reduce_from_tensor_model_parallel_region  g    all-reduce         identity           partial sums -> R
    scatter_to_tensor_model_parallel_region        own slice (last)   all-gather (last)  R -> S
    gather_from_tensor_model_parallel_region       all-gather (last)  own slice (last)   S -> R
    scatter_to_sequence_parallel_region            own slice (first)  all-gather (first) R -> S
    gather_from_sequence_parallel_region           all-gather (first) reduce-scatter     S -> partial use on each rank
    reduce_scatter_to_sequence_parallel_region     reduce-scatter     all-gather (first) partial sums -> S

"last" and "first" name the dimension that is cut. Why does an identity have an all-reduce for a gradient? Each rank used x for
its own piece of the work, and x's gradient is the sum of what the pieces want. torch's own differentiable all-reduce has an
all-reduce in backward too: right for the *sum over ranks* of their losses, t times too large for Megatron's *one* loss, of which
every rank holds a copy.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4.2.2 for the sequence-parallel ones.
See it run: ``notebooks/02_f_and_g.ipynb``; ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.f_and_g``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

from minimeg.autograd import apply
from minimeg.comm import Group

Operation = Callable[[Tensor, Group], Tensor]


class _Mapping(Function):
    """``forward`` and ``backward`` are each other's transposes, so the backward is the same class with the two exchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, forward: Operation, backward: Operation) -> Tensor:
        ctx.group, ctx.operations = group, (forward, backward)
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        forward, backward = ctx.operations
        return apply(_Mapping, grads[0], ctx.group, backward, forward), None, None, None


def _map(x: Tensor, group: Group, forward: Operation, backward: Operation) -> Tensor:
    return x if group.size == 1 else apply(_Mapping, x, group, forward, backward)


def _identity(x: Tensor, group: Group) -> Tensor:
    return x


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    return group.all_reduce(x)


def _own_slice(dim: int) -> Operation:
    def own_slice(x: Tensor, group: Group) -> Tensor:
        if x.dim() == 0 or x.shape[dim] % group.size:
            which = "first" if dim == 0 else "last"
            raise ValueError(
                f"the {which} dimension of shape {list(x.shape)} must be a multiple of the {group.size} ranks of {group.name}"
            )
        return x.chunk(group.size, dim)[group.rank].clone()  # a copy: the whole tensor can then be freed

    return own_slice


def _gather(dim: int) -> Operation:
    return lambda x, group: group.all_gather(x, dim)


def _reduce_scatter(dim: int) -> Operation:
    return lambda x, group: group.reduce_scatter(x, dim)


_slice_first, _slice_last = _own_slice(0), _own_slice(-1)
_gather_first, _gather_last = _gather(0), _gather(-1)
_reduce_scatter_first, _reduce_scatter_last = _reduce_scatter(0), _reduce_scatter(-1)


def copy_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """f. Forward: identity; backward: all-reduce. [..., h] -> [..., h]."""
    return _map(x, group, _identity, _all_reduce)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """g. Forward: all-reduce; backward: identity. [..., h] partial sums -> [..., h], the same on every rank."""
    return _map(x, group, _all_reduce, _identity)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Forward: keep the own slice of the last dimension; backward: all-gather. [..., h] -> [..., h/t]."""
    return _map(x, group, _slice_last, _gather_last)


def gather_from_tensor_model_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather along the last dimension; backward: keep the own slice. [..., h/t] -> [..., h]."""
    return _map(x, group, _gather_last, _slice_last)


def scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Forward: keep the own slice of the first dimension; backward: all-gather. [s, ...] -> [s/t, ...]."""
    return _map(x, group, _slice_first, _gather_first)


def gather_from_sequence_parallel_region(x: Tensor, group: Group, tensor_parallel_output_grad: bool = True) -> Tensor:
    """Forward: all-gather along the first dimension. [s/t, ...] -> [s, ...].

    Backward depends on who uses the result. ``tensor_parallel_output_grad=True``: each rank uses it for its own piece of the
    work (a column-parallel linear), so the gradients are partial: reduce-scatter. False: every rank computes the same with it,
    so each already holds the whole gradient: keep the own slice. The wrong choice is t times too large or leaves terms out.
    """
    return _map(x, group, _gather_first, _reduce_scatter_first if tensor_parallel_output_grad else _slice_first)


def reduce_scatter_to_sequence_parallel_region(x: Tensor, group: Group) -> Tensor:
    """g-bar. Forward: reduce-scatter along the first dimension; backward: all-gather. [s, ...] partial sums -> [s/t, ...]."""
    return _map(x, group, _reduce_scatter_first, _gather_first)


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Forward: all-gather along the last dimension; backward: reduce-scatter. [..., h/t] -> [..., h] for partial use."""
    return _map(x, group, _gather_last, _reduce_scatter_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: Group) -> Tensor:
    """Forward: reduce-scatter along the last dimension; backward: all-gather. [..., h] partial sums -> [..., h/t]."""
    return _map(x, group, _reduce_scatter_last, _gather_last)
