"""The same GPT as a user of plain torch would write it: nn.Linear, nn.LayerNorm, nn.Embedding, nothing of minimeg.

What torch.distributed.pipelining, DTensor and DDP are given. Parameters have minimeg's global names and layout, so that both
start from the same numbers, and the arithmetic is the same kernel by kernel, so that a difference in time is one of the parallel
machinery.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimeg.data import MicroBatch
from minimeg.models.config import GPTConfig, layers_of
from minimeg.models.gpt import GPT
from minimeg.parallel_state import single_process
from minimeg.parameter import initialise, named_shards

SEED = 3


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        h = config.hidden_size
        self.head_dim = h // config.num_attention_heads
        self.linear_qkv, self.linear_proj = nn.Linear(h, 3 * h), nn.Linear(h, h)

    def forward(self, x: Tensor, causal_bias: Tensor) -> Tensor:
        s, b, _ = x.shape
        d = self.head_dim
        qkv = self.linear_qkv(x)  # [s, b, 3h/t], head by head
        heads = qkv.shape[-1] // (3 * d)
        q, k, v = (part.reshape(s, b * heads, d).transpose(0, 1) for part in qkv.view(s, b, heads, 3, d).unbind(3))
        scores = torch.baddbmm(causal_bias[:s, :s], q, k.transpose(1, 2), alpha=1 / math.sqrt(d))
        context = torch.bmm(scores.softmax(-1), v)
        out: Tensor = self.linear_proj(context.transpose(0, 1).reshape(s, b, heads * d))
        return out


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.ffn)
        self.linear_fc2 = nn.Linear(config.ffn, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(x), approximate="tanh"))
        return out


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.input_layernorm, self.pre_mlp_layernorm = (nn.LayerNorm(config.hidden_size) for _ in range(2))
        self.self_attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor, causal_bias: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), causal_bias)
        out: Tensor = x + self.mlp(self.pre_mlp_layernorm(x))
        return out


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_sequence_length, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: tokens.shape[1]].unsqueeze(1)
        out: Tensor = self.word_embeddings(tokens.t()) + positions
        return out


class PlainGPT(nn.Module):
    """One virtual stage, untied. tokens [b, s] or x [s, b, h] -> [s, b, h], or logits [s, b, v] on the last."""

    causal_bias: Tensor

    def __init__(self, config: GPTConfig, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.embedding = Embedding(config) if stage == 0 else None
        indices = layers_of(stage, stages, config.num_layers)
        self.layers = nn.ModuleDict({str(i): Layer(config) for i in indices})
        self.is_last = stage == stages - 1
        if self.is_last:
            self.final_layernorm = nn.LayerNorm(config.hidden_size)
            self.output_layer = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        s = config.max_sequence_length
        self.register_buffer("causal_bias", torch.full((s, s), -torch.inf).triu(1), persistent=False)
        full = full_parameters(config)
        self.load_state_dict({name: full[name] for name in self.state_dict()})

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, self.causal_bias)
        if self.is_last:
            x = self.output_layer(self.final_layernorm(x))
        return x


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over the tokens. logits [s, b, v], targets [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.t().reshape(-1), reduction="sum")


def full_parameters(config: GPTConfig) -> dict[str, Tensor]:
    """What minimeg starts from in every layout, by global name."""
    whole = GPT(config, single_process().tp)
    initialise(whole, SEED)
    return {shard.name: param.detach().clone() for _, param, shard in named_shards(whole)}


def batch(config: GPTConfig, microbatches: int, size: int, first: int = 0) -> list[MicroBatch]:
    """Micro-batches ``first``, ``first`` + 1, ... of one global batch."""
    found = []
    for index in range(first, first + microbatches):
        generator = torch.Generator().manual_seed(100 + index)
        ids = torch.randint(config.vocab_size, (size, config.max_sequence_length + 1), generator=generator)
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        found.append(MicroBatch(tokens, targets, torch.ones_like(targets, dtype=torch.bool), index, step=0))
    return found


def tokens_of(batch: Sequence[MicroBatch]) -> Tensor:
    """The whole batch in one tensor, as torch's pipelines want it. [m b, s]"""
    return torch.cat([each.tokens for each in batch])


def targets_of(batch: Sequence[MicroBatch]) -> Tensor:
    return torch.cat([each.targets for each in batch])


def largest_gap(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """max |difference| / max |value| over all tensors together (that of a key bias alone is 0). ValueError for different names."""
    if mine.keys() != theirs.keys():
        raise ValueError(f"different parameters: {sorted(mine.keys() ^ theirs.keys())}")
    scale = max(float(x.abs().max()) for x in theirs.values())
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine) / scale
