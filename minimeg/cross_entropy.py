"""Cross entropy of logits that no rank holds whole: b s numbers travel, not b s v.

With z the logits of one token, cut over t ranks, and y its target:  loss = log sum_j exp(z_j) - z_y.  Three reductions do it:

    MAX of the local maxima          so that exp never overflows: stability is a reduction too
    SUM of exp(z - max)              each rank adds its columns
    SUM of the target's z - max      only the rank that owns column y contributes

(the two sums travel together). Backward needs nobody: softmax - onehot, each rank for its own columns, since the normaliser is
already global.

**Padding.** A vocabulary that t does not divide is padded; padded columns must not vote. With ``vocab_size`` they are masked: all
logits zero and v = 5 gives ln 5 at every t (Megatron-LM issue 1754).

**Label smoothing** spreads alpha over the K - 1 *other* classes of the global vocabulary:
loss = (1 - s) nll - s mean(log p), with s = alpha K/(K - 1). (Megatron takes K and the mean from the local shard, so that at
t > 1 its ranks disagree.) The mean costs a third sum.

Source: Shoeybi et al. 2019, section 3; Megatron-LM ``vocab_parallel_cross_entropy``.
See it run: ``notebooks/04_cross_entropy.ipynb``.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from minimeg.autograd import apply
from minimeg.comm import Group
from minimeg.layers import check_range


class _VocabParallelCrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Group, smoothing: float, vocab_size: int) -> Tensor:
        width = logits.shape[-1]
        first = group.rank * width
        real = max(0, min(vocab_size - first, width))  # columns of this rank that are not padding; they come first
        z = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if real < width:
            z = z.clone()
            z[..., real:] = -torch.inf
        z = z - _all_reduce(z.amax(-1), group, "max").unsqueeze(-1)  # a new tensor: the rest may work in place

        local = target - first
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        target_z = z.gather(-1, local).squeeze(-1).masked_fill(elsewhere, 0)
        sums = [target_z, None]
        if smoothing:
            sums.append(z[..., :real].sum(-1))
        exp = z.exp_()
        sums[1] = exp.sum(-1)
        target_z, sum_exp, *rest = _all_reduce(torch.stack([part for part in sums if part is not None]), group, "sum")

        log_sum = sum_exp.log()
        loss = log_sum - target_z
        spread = smoothing * vocab_size / (vocab_size - 1) if smoothing else 0.0
        if smoothing:
            loss = (1 - spread) * loss + spread * (log_sum - rest[0] / vocab_size)
        ctx.save_for_backward(exp.div_(sum_exp.unsqueeze(-1)), local, elsewhere)
        ctx.spread, ctx.vocab_size, ctx.real, ctx.dtype = spread, vocab_size, real, logits.dtype
        return cast(Tensor, loss)

    @staticmethod
    @once_differentiable  # the saved softmax is a number: a second derivative would lack terms
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        softmax, local, elsewhere = ctx.saved_tensors
        # d loss / dz_j = softmax_j - (1 - s) [j = y] - s/K, for real columns; padded ones have softmax 0 and stay 0.
        dz = softmax.clone()
        # Not torch.where of two numbers, which gives float32 also for float64 logits.
        hit = torch.full_like(local, ctx.spread - 1, dtype=dz.dtype)
        dz.scatter_add_(-1, local, hit.masked_fill(elsewhere.unsqueeze(-1), 0))
        if ctx.spread:
            dz[..., : ctx.real] -= ctx.spread / ctx.vocab_size
        dz *= grads[0].unsqueeze(-1)
        return dz.to(ctx.dtype), None, None, None, None


def _all_reduce(x: Tensor, group: Group, op: str) -> Tensor:
    return x if group.size == 1 else group.all_reduce(x, op)


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, group: Group, label_smoothing: float = 0.0, *, vocab_size: int | None = None
) -> Tensor:
    """Loss of each token, in float32 or better, equal on every rank. [..., v/t] logits, [...] int64 targets -> [...].

    Args:
        label_smoothing: alpha in [0, 1), spread over the v - 1 other classes (torch's ``label_smoothing`` is alpha v/(v - 1)).
        vocab_size: the true v; padded columns take no part. None: t times the local width.

    Raises:
        ValueError: shapes that do not fit, a local width other than ceil(v/t), alpha outside [0, 1).
        IndexError: a target outside 0..v-1, at every t. (Tokens without a target: weigh their loss with 0.)
    """
    width = logits.shape[-1]
    if vocab_size is None:
        vocab_size = group.size * width
    if width != -(-vocab_size // group.size):
        raise ValueError(
            f"logits have {width} columns on this rank, but vocab_size={vocab_size} over {group.size} ranks of {group.name} "
            f"means ceil(v/t) = {-(-vocab_size // group.size)}"
        )
    if target.shape != logits.shape[:-1]:
        raise ValueError(f"target of shape {list(target.shape)} does not fit logits of shape {list(logits.shape)}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must lie in [0, 1), got {label_smoothing}")
    if label_smoothing and vocab_size == 1:
        raise ValueError("label_smoothing needs another class to spread over, but the vocabulary has 1; use 0")
    check_range("target", target, vocab_size)
    return apply(_VocabParallelCrossEntropy, logits, target, group, label_smoothing, vocab_size)
