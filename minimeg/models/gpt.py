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

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from minimeg.comm import Group
from minimeg.cross_entropy import vocab_parallel_cross_entropy
from minimeg.data import MicroBatch
from minimeg.layers import LayerNorm, VocabParallelEmbedding, vocabulary_shard
from minimeg.linear import InputGradient, WeightGradientStore, linear
from minimeg.models.config import GPTConfig, layers_of
from minimeg.models.recomputation import Plan, Recomputation
from minimeg.models.transformer import TransformerLayer, residual_dropout
from minimeg.parameter import Shard, ShardedModule, name_globally, normal
from minimeg.replay import label
from minimeg.rng import Key

WORD_EMBEDDING = "embedding.word_embeddings.weight"


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


class Layers(nn.ModuleDict):
    """The transformer layers of one chunk, one after the other, in the groups that recomputation makes. [s, b, h] -> [s, b, h]."""

    def forward(self, x: Tensor, causal_bias: Tensor, key: Key | None, plan: Plan) -> Tensor:
        layers = list(self.values())

        def run(x: Tensor, group: range) -> Tensor:
            for index in group:
                x = layers[index](x, causal_bias, key, plan)
            return x

        for group, again in plan.groups(len(layers)):
            # The bias by closure, not as an argument: a recomputed block keeps its arguments, and the bias is there anyway.
            x = plan.group(again, partial(run, group=group), x)
        return x


class GPT(nn.Module):
    """One virtual stage of the model; with ``virtual_stages=1``, all of it.

    ``forward(x, microbatch)``: x is None on the first virtual stage (it reads ``microbatch.tokens``), else the [s, b, h] that the
    stage before sent. Returns [s, b, h], or [s, b, v/t] logits on the last.
    """

    causal_bias: Tensor

    def __init__(
        self,
        config: GPTConfig,
        group: Group,
        virtual_stage: int = 0,
        virtual_stages: int = 1,
        seed: int = 0,
        recomputation: Recomputation | None = None,
    ) -> None:
        super().__init__()
        self.recomputation = Recomputation() if recomputation is None else recomputation
        faults = config.faults(group.size, virtual_stages)
        faults += self.recomputation.faults(config.num_layers, group.size, config.sequence_parallel)
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
        self.layers = Layers({str(i): TransformerLayer(config, group, i) for i in indices})
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
        self.input_shape(microbatch)  # refuses a length that sequence parallelism cannot cut
        with label(f"micro-batch {microbatch.index}"):
            if self.is_first:
                x = self.embedding(microbatch.tokens.t(), key)
            assert x is not None, "only the first virtual stage reads the tokens; the others are given x"
            x = self.layers(x, self.causal_bias, key, self.recomputation.of(microbatch.index, self.group))
            if self.is_last:
                shared = self.embedding.word_embeddings.weight if self.config.tied and self.is_first else None
                x = self.output_layer(self.final_layernorm(x), shared)
        out: Tensor = x
        return out

    def loss(self, logits: Tensor, microbatch: MicroBatch) -> Tensor:
        """Sum of the valid tokens' losses (not the mean: the caller divides by the count over the whole batch). Scalar."""
        targets, valid = microbatch.targets.t(), microbatch.valid.t()  # [s, b]
        with label(f"micro-batch {microbatch.index}"):
            losses = vocab_parallel_cross_entropy(logits, targets, self.group, vocab_size=self.config.vocab_size)
            return torch.where(valid, losses, 0).sum()
