"""The layers that tensor parallelism cuts: column-parallel and row-parallel linear, vocabulary-parallel embedding.

    Y = X A          A cut by columns: X whole on every rank, each rank gets some columns of Y. No talk in forward.
    Z = Y B          B cut by rows:    each rank has the matching columns of Y and gets a partial sum of Z. One all-reduce.

Column first, then row: between the two, the element-wise GELU (or a head's attention) needs no communication at all, because
each rank holds *complete* columns. The other way round, a GELU of partial sums would be wrong. A bias of the row-parallel layer
is added after the sum, once. Shapes beside the tensors use s sequence, b micro-batch, h hidden, t tensor-parallel size.

Source: Shoeybi et al. 2019 (Megatron-LM), section 3. See it run: ``notebooks/03_parallel_linears.ipynb``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from minimeg.comm import Group
from minimeg.linear import WeightGradientStore, linear
from minimeg.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from minimeg.parameter import Initialiser, Shard, ShardedModule, constant, normal


def _refuse(group: Group, cut: tuple[str, int], whole: tuple[str, int], conflict: str = "") -> None:
    """ValueError with all that forbids a linear whose one dimension is cut over the group and the other is whole."""
    (field, value), faults = cut, []
    if value < 1 or value % group.size:
        below = value // group.size * group.size
        legal = f"{below} or {below + group.size}" if below > 0 else f"{group.size}"
        faults.append(
            f"{field}={value} must be a positive multiple of the {group.size} ranks of {group.name}; use {legal}"
        )
    if whole[1] < 1:
        faults.append(f"{whole[0]}={whole[1]} must be at least 1; use 1")
    if faults or conflict:
        raise ValueError("; ".join([*faults, *filter(None, [conflict])]))


class ColumnParallelLinear(ShardedModule):
    """Y = X A^T + b, with A's output features cut over the group. [..., in] -> [..., out/t] ([..., out] with gather_output).

    Args:
        gather_output: all-gather the columns, so that every rank has all of Y.
        sequence_parallel: the input is [s/t, b, in], cut along the sequence, and gathered inside.
        skip_bias_add: return (Y without bias, bias) for a caller that fuses the addition.
        init, draw: how the full weight is filled, and whether now (see ShardedModule.add_parameter).

    ``weight`` is [out/t, in], ``bias`` [out/t], zero at first. Raises ValueError if t does not divide ``out_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init: Initialiser | None = None,
        draw: bool = True,
    ) -> None:
        super().__init__()
        conflict = (
            "gather_output=True with sequence_parallel=True: the gathered output would not be cut; use one of them"
        )
        both = gather_output and sequence_parallel
        _refuse(group, ("out_features", out_features), ("in_features", in_features), conflict if both else "")
        self.group, self.gather_output, self.skip_bias_add = group, gather_output, skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradientStore | None = None  # set by the pipeline for schedules with a separate W
        rows = Shard("weight", (out_features, in_features), 0, group.rank, group.size, init=init or normal())
        self.weight = self.add_parameter("weight", rows, draw)
        entries = Shard("bias", (out_features,), 0, group.rank, group.size, init=constant(0))
        self.bias = self.add_parameter("bias", entries, draw) if bias else None

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        y = linear(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            self.group,
            input_gradient="reduce-scatter" if self.sequence_parallel else "all-reduce",
            store=self.weight_gradients,
        )  # [s, b, out/t]
        if self.gather_output:
            y = gather_from_tensor_model_parallel_region(y, self.group)  # [s, b, out]
        return (y, self.bias) if self.skip_bias_add else y


class RowParallelLinear(ShardedModule):
    """Z = Y B^T + b, with B's input features cut over the group. [..., in/t] -> [..., out], equal on every rank.

    Args:
        input_is_parallel: the input is already this rank's [..., in/t]; False: it is whole and is cut here.
        sequence_parallel: reduce-scatter the result to [s/t, b, out] instead of all-reducing it.
        skip_bias_add: return (Z without bias, bias).

    ``weight`` is [out, in/t]; ``bias`` [out] is whole on every rank and added after the sum. Under sequence parallelism each rank
    adds it to its own tokens only, so its gradient is partial over tp. Raises ValueError if t does not divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        group: Group,
        bias: bool = True,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        skip_bias_add: bool = False,
        init: Initialiser | None = None,
        draw: bool = True,
    ) -> None:
        super().__init__()
        conflict = "sequence_parallel=True needs input_is_parallel=True: a whole input has no place in that region"
        both = sequence_parallel and not input_is_parallel
        _refuse(group, ("in_features", in_features), ("out_features", out_features), conflict if both else "")
        self.group, self.input_is_parallel, self.skip_bias_add = group, input_is_parallel, skip_bias_add
        self.sequence_parallel = sequence_parallel
        self.weight_gradients: WeightGradientStore | None = None
        shard = Shard(
            "weight", (out_features, in_features), dim=1, index=group.rank, parts=group.size, init=init or normal()
        )
        self.weight = self.add_parameter("weight", shard, draw)
        whole = Shard("bias", (out_features,), partial_over_tp=sequence_parallel and group.size > 1, init=constant(0))
        self.bias = self.add_parameter("bias", whole, draw) if bias else None

    def forward(self, y: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        if not self.input_is_parallel:
            y = scatter_to_tensor_model_parallel_region(y, self.group)  # [s, b, in/t]
        partial = linear(y, self.weight, None, self.group, input_gradient="local", store=self.weight_gradients)
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if self.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        z = reduce(partial, self.group)  # [s, b, out] or [s/t, b, out]
        if self.skip_bias_add:
            return z, self.bias
        # Not inside F.linear, at any t: a fused bias rounds differently, and t = 1 must be bit-equal to itself in a pipeline.
        return z if self.bias is None else z + self.bias


class VocabParallelEmbedding(ShardedModule):
    """Rows of an embedding table cut over the group. ids [...] -> [..., h], equal on every rank.

    Each rank looks up the ids in its own range, contributes zeros for the others, and the sum over the ranks completes every row.
    Any vocabulary size works: the table is padded to a multiple of t inside, and padded rows are never touched.

    Args:
        sequence_parallel: ids are [s, b]; reduce-scatter the sum along s to [s/t, b, h].

    ``weight`` is [ceil(v/t), h]. Raises IndexError naming an id outside 0..v-1, at every t (Megatron-LM issue 2459: at t > 1 such
    an id silently becomes a zero vector there).
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        group: Group,
        sequence_parallel: bool = False,
        init: Initialiser | None = None,
        draw: bool = True,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(
                f"num_embeddings={num_embeddings} and embedding_dim={embedding_dim} must be positive, e.g. 256 and 64"
            )
        self.num_embeddings, self.group, self.sequence_parallel = num_embeddings, group, sequence_parallel
        self.weight = self.add_parameter("weight", vocabulary_shard(num_embeddings, embedding_dim, group, init), draw)

    def forward(self, ids: Tensor) -> Tensor:
        check_range("token id", ids, self.num_embeddings)
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self.group.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        mine = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere.unsqueeze(-1), 0)
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(mine, self.group)  # [s/t, b, h]
        return reduce_from_tensor_model_parallel_region(mine, self.group)  # [s, b, h]


class LayerNorm(ShardedModule):
    """Layer normalisation over the last dimension; whole on every rank. [..., h] -> [..., h].

    Under sequence parallelism it sees only this rank's tokens, so its gradients are partial over tp.
    """

    def __init__(self, hidden_size: int, *, group: Group, sequence_parallel: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        partial = sequence_parallel and group.size > 1
        self.weight = self.add_parameter(
            "weight", Shard("weight", (hidden_size,), partial_over_tp=partial, init=constant(1))
        )
        self.bias = self.add_parameter("bias", Shard("bias", (hidden_size,), partial_over_tp=partial, init=constant(0)))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


def vocabulary_shard(
    vocab_size: int, hidden_size: int, group: Group, init: Initialiser | None = None, tied_to: str | None = None
) -> Shard:
    """Rows of a [v, h] table: ceil(v/t) on each rank, the last ones padded."""
    return Shard(
        "weight",
        (vocab_size, hidden_size),
        dim=0,
        index=group.rank,
        parts=group.size,
        padded=-vocab_size % group.size,
        tied_to=tied_to,
        tied=tied_to is not None,
        init=init or normal(),
    )


def check_range(what: str, ids: Tensor, size: int) -> None:
    """IndexError naming the first value outside 0..size-1. Fake and meta tensors (a dry run) have no values to check."""
    if ids.device.type == "meta" or ids.numel() == 0 or isinstance(ids, torch._subclasses.FakeTensor):
        return
    lowest, highest = torch.aminmax(ids)
    if int(lowest) < 0 or int(highest) >= size:
        bad = ids[(ids < 0) | (ids >= size)].flatten()[0].item()
        raise IndexError(f"{what} {bad} is outside the vocabulary 0..{size - 1}")
