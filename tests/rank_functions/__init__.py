"""What several test modules need on the ranks: groups, strided views, and a counter that does not trust the ledger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minimeg.comm import Group
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import Shard

# torch's operator -> (our name, which argument holds the full tensor). gloo's reduce-scatter is an all-to-all and a sum.
_COLLECTIVES = {
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::send": ("send", 0),
    "c10d::recv_": ("recv", 0),
}


class Outside(TorchDispatchMode):
    """Every operator that torch dispatches, in order, with the bytes of the communicated ones: seen from below minimeg."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []
        self.communication: list[tuple[str, int]] = []  # (our name, bytes of the full tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        self.operators.append(name)
        if name.startswith("c10d::"):
            ours, position = _COLLECTIVES[name]
            tensors = args[position]
            tensors = [tensors] if isinstance(tensors, Tensor) else tensors
            self.communication.append((ours, sum(x.numel() * x.element_size() for x in tensors)))
        return func(*args, **(kwargs or {}))


def tensor_group(t: int) -> Group:
    """A tensor-parallel group of t ranks: all of this world, or one rank by itself. Its groups go with the test module."""
    return single_process().tp if t == 1 else initialize_model_parallel(t).tp


def strided(x: Tensor) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(kind, a tensor equal to x in another memory layout, the whole storage behind it). x has two dimensions or more."""
    flipped = x.transpose(0, -1).contiguous()
    yield "transposed", flipped.transpose(0, -1), flipped
    wide = x.new_full((*x.shape[:-1], x.shape[-1] + 3), 99)
    wide[..., 1:-2] = x
    yield "column slice", wide[..., 1:-2], wide
    tall = x.new_full((x.shape[0] + 3, *x.shape[1:]), 99)
    tall[2:-1] = x
    yield "offset view", tall[2:-1], tall
    sparse = x.new_full((2 * x.shape[0], *x.shape[1:]), 99)
    sparse[::2] = x
    yield "every second row", sparse[::2], sparse
    yield "contiguous", (y := x.clone()), y


def set_full(param: torch.nn.Parameter, full: Tensor) -> None:
    """Give a parameter its slice of the full tensor, by plain slicing, not by the Shard's own code. No padding."""
    shard: Shard = param.shard
    with torch.no_grad():
        param.copy_(full if shard.dim is None else full.chunk(shard.parts, shard.dim)[shard.index])


def close(a: Tensor, b: Tensor, bound: float = 1e-10) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and (a.numel() == 0 or float((a - b).abs().max()) <= bound)
