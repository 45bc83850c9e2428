"""A GPT, cut both ways: each matrix over the tensor-parallel group, the layers over the pipeline.

    word + position embedding                                       first virtual stage
    L x [ x + attention(norm(x)),  x + mlp(norm(x)) ]               spread over all virtual stages
    norm, logits                                                    last virtual stage

Pre-norm GPT-2: learned positions, biases, GELU, dropout, fused QKV with the rows ordered head by head (so that a cut over t
hands out whole heads), the head tied to the word embedding or not. Tensors lie as [s, b, h], as in Megatron-LM.

A virtual stage is one :class:`GPT` module. Its layers are keyed by their index in the *whole* model, so that
``layers.7.mlp.linear_fc1.weight`` is the same parameter in every layout; initialisation, checkpoints and the gradient norm rely
on it.

Source: Shoeybi et al. 2019, figures 2-4. See it run: ``notebooks/00_start_here.ipynb``; ``python -m minimeg.train``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minimeg.comm import Group
from minimeg.cross_entropy import vocab_parallel_cross_entropy
from minimeg.data import MicroBatch
from minimeg.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear, VocabParallelEmbedding, vocabulary_shard
from minimeg.linear import InputGradient, WeightGradientStore, linear
from minimeg.parameter import Initialiser, Shard, ShardedModule, name_globally, normal
from minimeg.rng import Key, dropout

WORD_EMBEDDING = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class GPTConfig:
    """The shape of the model and its dropouts; nothing about how it is cut, apart from sequence parallelism."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    vocab_size: int
    max_sequence_length: int
    ffn_hidden_size: int | None = None  # None: 4 h
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    tied: bool = True
    sequence_parallel: bool = False
    whole_dropout_masks: bool = False
    init_std: float = 0.02

    @property
    def ffn(self) -> int:
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    def faults(self, tp: int = 1, virtual_stages: int = 1) -> list[str]:
        """What forbids this model over ``tp`` ranks and ``virtual_stages`` = p n chunks: one sentence each, none if fine."""
        found = []
        sizes = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "vocab_size": self.vocab_size,
            "max_sequence_length": self.max_sequence_length,
            "ffn_hidden_size": self.ffn,
        }
        found += [f"{name}={size} must be at least 1" for name, size in sizes.items() if size < 1]
        if found:
            return found  # the rest would divide by what is missing
        heads = self.num_attention_heads
        if self.hidden_size % heads:
            divisors = [a for a in range(1, self.hidden_size + 1) if self.hidden_size % a == 0]
            found.append(
                f"num_attention_heads={heads} must divide hidden_size={self.hidden_size}; use one of {divisors}"
            )
        for name, size in (("num_attention_heads", heads), ("ffn_hidden_size", self.ffn)):
            if size % tp:
                legal = [t for t in range(1, size + 1) if size % t == 0]
                found.append(f"{name}={size} must be a multiple of tp={tp}; legal tp: {legal}")
        if self.num_layers < virtual_stages:
            found.append(
                f"num_layers={self.num_layers} is less than the {virtual_stages} pipeline chunks (pp x vpp): one would be "
                f"empty; use at least {virtual_stages} layers or fewer chunks"
            )
        for name, p in (("hidden_dropout", self.hidden_dropout), ("attention_dropout", self.attention_dropout)):
            if not 0 <= p < 1:
                found.append(f"{name}={p} must lie in [0, 1), e.g. 0.1")
        if self.sequence_parallel and self.max_sequence_length % tp:
            legal_length = -(-self.max_sequence_length // tp) * tp
            found.append(
                f"sequence_parallel: max_sequence_length={self.max_sequence_length} must be a multiple of tp={tp}; use {legal_length}"
            )
        return found


def layers_of(virtual_stage: int, virtual_stages: int, num_layers: int) -> range:
    """The global indices of the layers of one virtual stage.

    Each gets L // V, and the L mod V extra layers go one each to the stages just before the last: the last has the head's work
    already, and the first holds the most micro-batches in flight.
    """
    share, extras = divmod(num_layers, virtual_stages)
    if share == 0:
        raise ValueError(
            f"num_layers={num_layers} is less than the {virtual_stages} virtual stages; use at least {virtual_stages}"
        )
    first_with_extra = virtual_stages - 1 - extras

    def start(stage: int) -> int:
        return stage * share + min(max(stage - first_with_extra, 0), extras)

    return range(start(virtual_stage), start(virtual_stage + 1))


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

    def forward(self, x: Tensor, causal_bias: Tensor, key: Key | None) -> Tensor:
        qkv = self.linear_qkv(x)  # [s, b, 3h/t]
        context = self.core(qkv, causal_bias, key)  # [s, b, h/t]
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

    def forward(self, x: Tensor, causal_bias: Tensor, key: Key | None) -> Tensor:
        x = x + self._dropout(self.self_attention(self.input_layernorm(x), causal_bias, key), key, call=1)
        return x + self._dropout(self.mlp(self.pre_mlp_layernorm(x)), key, call=2)

    def _dropout(self, x: Tensor, key: Key | None, call: int) -> Tensor:
        return residual_dropout(x, self.config, self.group, key, self.layer, call)


def residual_dropout(x: Tensor, config: GPTConfig, group: Group, key: Key | None, layer: int, call: int) -> Tensor:
    """Dropout on [s, b, h], which every tp rank holds alike, or on [s/t, b, h], of which each holds another part."""
    key = None if key is None else key.at(layer=layer, call=call)
    cut = group if config.sequence_parallel else None
    return dropout(x, config.hidden_dropout, key, group=cut, dim=0, whole=config.whole_dropout_masks)


class Embedding(ShardedModule):
    """Word plus position. ids [s, b] -> [s, b, h]; [s/t, b, h] under sequence parallelism."""

    def __init__(self, config: GPTConfig, group: Group) -> None:
        super().__init__()
        self.config, self.group = config, group
        sp, std = config.sequence_parallel, config.init_std
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, group=group, sequence_parallel=sp, init=normal(std), draw=False
        )
        self.position_embeddings = PositionEmbedding(config, group)

    def forward(self, ids: Tensor, key: Key | None) -> Tensor:
        x = self.word_embeddings(ids) + self.position_embeddings(ids.shape[0])
        # The embedding is "layer" L: an index that no transformer layer has.
        return residual_dropout(x, self.config, self.group, key, self.config.num_layers, call=0)


class PositionEmbedding(ShardedModule):
    """One learned vector a position, whole on every rank. -> [s, 1, h], or this rank's [s/t, 1, h]."""

    def __init__(self, config: GPTConfig, group: Group) -> None:
        super().__init__()
        self.group = group if config.sequence_parallel else None
        shape = (config.max_sequence_length, config.hidden_size)
        partial = config.sequence_parallel and group.size > 1
        self.weight = self.add_parameter(
            "weight", Shard("weight", shape, partial_over_tp=partial, init=normal(config.init_std)), draw=False
        )

    def forward(self, length: int) -> Tensor:
        if length > self.weight.shape[0]:
            raise ValueError(f"sequence length {length} exceeds max_sequence_length={self.weight.shape[0]}")
        positions = self.weight[:length].unsqueeze(1)
        return positions if self.group is None else positions.chunk(self.group.size)[self.group.rank]


class OutputLayer(ShardedModule):
    """Logits of this rank's part of the vocabulary: x W^T. [s, b, h] -> [s, b, v/t].

    ``shares``: it has no weight and is given the word embedding's with each call. (Were one parameter registered in two modules,
    ``.to("meta")`` and ``to_empty`` would make two of it.)
    """

    def __init__(self, config: GPTConfig, group: Group, shares: bool) -> None:
        super().__init__()
        self.group, self.sequence_parallel = group, config.sequence_parallel
        self.weight_gradients: WeightGradientStore | None = None
        tied_to = WORD_EMBEDDING if config.tied else None
        shard = vocabulary_shard(config.vocab_size, config.hidden_size, group, normal(config.init_std), tied_to=tied_to)
        self.weight = None if shares else self.add_parameter("weight", shard, draw=False)

    def forward(self, x: Tensor, shared: Tensor | None = None) -> Tensor:
        how: InputGradient = "reduce-scatter" if self.sequence_parallel else "all-reduce"
        weight = self.weight if shared is None else shared
        assert weight is not None, "a layer that shares its weight is given it"
        return linear(x, weight, None, self.group, input_gradient=how, store=self.weight_gradients)


class GPT(nn.Module):
    """One virtual stage of the model; with ``virtual_stages=1``, all of it.

    ``forward(x, microbatch)``: x is None on the first virtual stage (it reads ``microbatch.tokens``), else the [s, b, h] that the
    stage before sent. Returns [s, b, h], or [s, b, v/t] logits on the last.
    """

    causal_bias: Tensor

    def __init__(
        self, config: GPTConfig, group: Group, virtual_stage: int = 0, virtual_stages: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        faults = config.faults(group.size, virtual_stages)
        if faults:
            raise ValueError("this GPT cannot be built:\n  " + "\n  ".join(faults))
        self.config, self.group, self.seed = config, group, seed
        self.is_first, self.is_last = virtual_stage == 0, virtual_stage == virtual_stages - 1
        if self.is_first:
            self.embedding = Embedding(config, group)
            if config.tied and not self.is_last:
                words = self.embedding.word_embeddings
                words.set_shard("weight", replace(words.own_shards()["weight"], tied=True))
        indices = layers_of(virtual_stage, virtual_stages, config.num_layers)
        self.layers = nn.ModuleDict({str(i): TransformerLayer(config, group, i) for i in indices})
        if self.is_last:
            self.final_layernorm = LayerNorm(
                config.hidden_size, group=group, sequence_parallel=config.sequence_parallel
            )
            self.output_layer = OutputLayer(config, group, shares=config.tied and self.is_first)
        s = config.max_sequence_length
        self.register_buffer("causal_bias", torch.full((s, s), -torch.inf).triu(1), persistent=False)
        name_globally(self)

    def input_shape(self, microbatch: MicroBatch) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of the x that this stage takes for a micro-batch: what a receive must expect."""
        b, s = microbatch.tokens.shape
        if self.config.sequence_parallel:
            if s % self.group.size:
                raise ValueError(
                    f"sequence length {s} of micro-batch {microbatch.index} must be a multiple of tp={self.group.size}"
                )
            s //= self.group.size
        return (s, b, self.config.hidden_size), self.causal_bias.dtype

    def output_shape(self, microbatch: MicroBatch) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of what a stage before the last puts out: all stages are equally wide."""
        return self.input_shape(microbatch)

    def forward(self, x: Tensor | None, microbatch: MicroBatch) -> Tensor:
        key = Key(self.seed, step=microbatch.step, microbatch=microbatch.index) if self.training else None
        if self.is_first:
            self.input_shape(microbatch)  # refuses a length that sequence parallelism cannot cut
            x = self.embedding(microbatch.tokens.t(), key)
        assert x is not None, "only the first virtual stage reads the tokens; the others are given x"
        for layer in self.layers.values():
            x = layer(x, self.causal_bias, key)
        if self.is_last:
            shared = self.embedding.word_embeddings.weight if self.config.tied and self.is_first else None
            x = self.output_layer(self.final_layernorm(x), shared)
        out: Tensor = x
        return out

    def loss(self, logits: Tensor, microbatch: MicroBatch) -> Tensor:
        """Sum of the valid tokens' losses (not the mean: the caller divides by the count over the whole batch). Scalar."""
        targets, valid = microbatch.targets.t(), microbatch.valid.t()  # [s, b]
        losses = vocab_parallel_cross_entropy(logits, targets, self.group, vocab_size=self.config.vocab_size)
        return torch.where(valid, losses, 0).sum()
