"""One transformer layer, its matrices cut over the tensor-parallel group: column, then row, twice.

    x + dropout(attention(norm(x)))      QKV by columns, projection by rows: one f and one g
    x + dropout(mlp(norm(x)))            h -> 4h by columns, 4h -> h by rows: one f and one g

so that a layer costs four all-reduces of [s, b, h], forward and backward together. The rows of QKV are ordered head by head: a cut
over t hands out whole heads.

Source: Shoeybi et al. 2019, section 3 and figures 3-4. See it run: ``notebooks/03_parallel_linears.ipynb``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimeg.comm import Group
from minimeg.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from minimeg.models.config import GPTConfig
from minimeg.models.recomputation import NOTHING, Plan
from minimeg.parameter import Initialiser, normal
from minimeg.rng import Key, dropout


class CausalSelfAttention(nn.Module):
    """softmax(Q K^T / sqrt(d)) V for the a/t heads of this rank. [s, b, h] -> [s, b, h]."""

    def __init__(self, config: GPTConfig, group: Group, layer: int) -> None:
        super().__init__()
        self.config, self.group, self.layer = config, group, layer
        h, sp = config.hidden_size, config.sequence_parallel
        self.linear_qkv = ColumnParallelLinear(
            h, 3 * h, group=group, sequence_parallel=sp, init=normal(config.init_std), draw=False
        )
        self.linear_proj = RowParallelLinear(
            h, h, group=group, sequence_parallel=sp, init=_output_init(config), draw=False
        )

    def forward(self, x: Tensor, causal_bias: Tensor, key: Key | None, plan: Plan = NOTHING) -> Tensor:
        qkv = self.linear_qkv(x)  # [s, b, 3h/t]
        context = plan.module("core_attn", lambda qkv: self.core(qkv, causal_bias, key), qkv)  # [s, b, h/t]
        out: Tensor = self.linear_proj(context)
        return out

    def core(self, qkv: Tensor, causal_bias: Tensor, key: Key | None) -> Tensor:
        """The part between the two linears: little work, much memory (5 a s^2 b bytes): what selective recomputation replays."""
        s, b, _ = qkv.shape
        heads = self.config.num_attention_heads // self.group.size
        d = self.config.hidden_size // self.config.num_attention_heads
        q, k, v = (part.reshape(s, b * heads, d).transpose(0, 1) for part in qkv.view(s, b, heads, 3, d).unbind(3))
        # One kernel scales, multiplies and masks; as an addend the mask is not kept for backward.
        scores = torch.baddbmm(causal_bias[:s, :s], q, k.transpose(1, 2), alpha=1 / math.sqrt(d))  # [b a/t, s, s]
        probabilities = scores.softmax(-1).view(b, heads, s, s)
        key = None if key is None else key.at(layer=self.layer, call=0)
        whole = self.config.whole_dropout_masks
        probabilities = dropout(probabilities, self.config.attention_dropout, key, group=self.group, dim=1, whole=whole)
        context = torch.bmm(probabilities.view(b * heads, s, s), v)  # [b a/t, s, d]
        return context.transpose(0, 1).reshape(s, b, heads * d)


class MLP(nn.Module):
    """h -> 4h -> h with a GELU between. [s, b, h] -> [s, b, h]; on this rank 4h/t columns."""

    def __init__(self, config: GPTConfig, group: Group) -> None:
        super().__init__()
        h, ffn, sp = config.hidden_size, config.ffn, config.sequence_parallel
        self.linear_fc1 = ColumnParallelLinear(
            h, ffn, group=group, sequence_parallel=sp, init=normal(config.init_std), draw=False
        )
        self.linear_fc2 = RowParallelLinear(
            ffn, h, group=group, sequence_parallel=sp, init=_output_init(config), draw=False
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


def _output_init(config: GPTConfig) -> Initialiser:
    """GPT-2's: the residual stream adds 2L outputs, so each starts smaller by sqrt(2L)."""
    return normal(config.init_std / math.sqrt(2 * config.num_layers))


class TransformerLayer(nn.Module):
    """x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x))). [s, b, h]; [s/t, b, h] under sequence parallelism."""

    def __init__(self, config: GPTConfig, group: Group, layer: int) -> None:
        super().__init__()
        self.config, self.group, self.layer = config, group, layer
        h, sp = config.hidden_size, config.sequence_parallel
        self.input_layernorm = LayerNorm(h, group=group, sequence_parallel=sp)
        self.self_attention = CausalSelfAttention(config, group, layer)
        self.pre_mlp_layernorm = LayerNorm(h, group=group, sequence_parallel=sp)
        self.mlp = MLP(config, group)

    def forward(self, x: Tensor, causal_bias: Tensor, key: Key | None, plan: Plan = NOTHING) -> Tensor:
        def attention(y: Tensor) -> Tensor:
            out: Tensor = self.self_attention(y, causal_bias, key, plan)
            return out

        def mlp(y: Tensor) -> Tensor:
            return plan.module("mlp", self.mlp, y)

        x = x + self._dropout(plan.module_into("layernorm", attention, self.input_layernorm, x), key, call=1)
        return x + self._dropout(plan.module_into("layernorm", mlp, self.pre_mlp_layernorm, x), key, call=2)

    def _dropout(self, x: Tensor, key: Key | None, call: int) -> Tensor:
        return residual_dropout(x, self.config, self.group, key, self.layer, call)


def residual_dropout(x: Tensor, config: GPTConfig, group: Group, key: Key | None, layer: int, call: int) -> Tensor:
    """Dropout on [s, b, h], which every tp rank holds alike, or on [s/t, b, h], of which each holds another part."""
    key = None if key is None else key.at(layer=layer, call=call)
    cut = group if config.sequence_parallel else None
    return dropout(x, config.hidden_dropout, key, group=cut, dim=0, whole=config.whole_dropout_masks)
