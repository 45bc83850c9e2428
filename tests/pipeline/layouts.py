"""One layout against the dense reference: what test_equality.py asserts and docs/equivalence.md shows.

Runs on the pool of ranks. The batch is unequal on purpose: different tokens on every data-parallel rank, different numbers of valid
tokens in every micro-batch, one micro-batch with none.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minimeg.data import MicroBatch
from minimeg.data_parallel import GradientReducer
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import ParallelState, initialize_model_parallel, single_process
from minimeg.parameter import full_state, load_full_state
from minimeg.pipeline import run
from minimeg.schedule import Schedule, build
from tests.reference.gpt import parameter_shapes, random_state, train_reference

STEPS, B, S, V = 3, 2, 8, 27  # 27 is divisible by neither 2, 4 nor 8
LEARNING_RATES = [1e-2, 2e-2, 5e-3]
MAX_NORM, WEIGHT_DECAY = 0.5, 0.1


@dataclass(frozen=True)
class Layout:
    """How one run is cut. ``microbatches``: m of each data-parallel rank."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    tied: bool = True
    microbatches: int = 4
    sequence_parallel: bool = False
    layers: int = 4

    def __str__(self) -> str:
        schedule = f"-{self.schedule}-n{self.chunks}" if self.pp > 1 else ""
        return f"tp{self.tp}-dp{self.dp}-pp{self.pp}{schedule}-{'tied' if self.tied else 'untied'}{'-sp' * self.sequence_parallel}"

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def only_pipeline(self) -> bool:
        return self.tp == self.dp == 1 < self.pp

    def config(self) -> GPTConfig:
        return GPTConfig(
            num_layers=max(self.layers, self.pp * self.chunks),
            hidden_size=16,
            num_attention_heads=8,
            vocab_size=V,
            max_sequence_length=S,
            tied=self.tied,
            sequence_parallel=self.sequence_parallel,
        )

    def built_schedule(self) -> Schedule:
        return build(self.schedule, self.pp, self.microbatches, chunks=self.chunks)


def initial_state(config: GPTConfig) -> dict[str, Tensor]:
    shapes = parameter_shapes(
        config.num_layers, config.hidden_size, config.vocab_size, config.max_sequence_length, tied=config.tied
    )
    return random_state(shapes, seed=5)


def global_batch(step: int, count: int) -> list[MicroBatch]:
    """``count`` micro-batches of [b, s] tokens, every one with another number of valid targets; number 1 has none."""
    generator = torch.Generator().manual_seed(1000 + step)
    result = []
    for index in range(count):
        tokens = torch.randint(V, (B, S), generator=generator)
        targets = torch.randint(V, (B, S), generator=generator)
        valid = torch.rand(B, S, generator=generator) < 0.2 + 0.8 * (index + 1) / count
        if index == 1:
            valid[:] = False
        result.append(MicroBatch(tokens, targets, valid, index, step))
    return result


def normaliser(batch: list[MicroBatch]) -> int:
    return sum(microbatch.valid_tokens for microbatch in batch)


@dataclass
class Outcome:
    """Per step losses and norms; gradients of the first step; parameters after the last. Gathered: {name: full tensor}."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def train(layout: Layout, state: ParallelState) -> Outcome:
    """Three AdamW steps with clipping over the rooms of minimeg, on this rank's part."""
    config, schedule = layout.config(), layout.built_schedule()
    stages = schedule.stages * schedule.chunks
    chunks = [
        GPT(config, state.tp, schedule.virtual_stage(state.pp.rank, c), stages).double() for c in range(schedule.chunks)
    ]
    load_full_state(chunks, initial_state(config))
    reducer = GradientReducer(chunks, state, bucket_elements=3000)  # small: several buckets
    optimizer = Optimizer(chunks, state, weight_decay=WEIGHT_DECAY, max_norm=MAX_NORM)
    outcome = Outcome([], [], {}, {})
    for step in range(STEPS):
        everything = global_batch(step, layout.dp * layout.microbatches)
        m = schedule.microbatches
        mine = everything[state.dp.rank * m : (state.dp.rank + 1) * m]
        result = run(
            schedule,
            chunks,
            mine,
            group=state.pp,
            loss=chunks[-1].loss,
            normaliser=normaliser(everything),
            on_gradients_ready=reducer.ready,
        )
        assert result.actions == schedule.ranks[state.pp.rank]
        reducer.finish()
        if step == 0:
            outcome.gradients = full_state(chunks, state, lambda param: param.grad)
        outcome.losses.append(float(state.dp_cp.all_reduce(result.loss)))
        outcome.norms.append(optimizer.step(LEARNING_RATES[step]))
    outcome.parameters = full_state(chunks, state)
    return outcome


def reference(layout: Layout) -> Outcome:
    """The same three steps of the dense model in plain torch."""
    config = layout.config()
    steps = [
        [(mb.tokens, mb.targets, mb.valid) for mb in global_batch(step, layout.dp * layout.microbatches)]
        for step in range(STEPS)
    ]
    dense = train_reference(
        initial_state(config),
        steps,
        num_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        learning_rates=LEARNING_RATES,
        tied=config.tied,
        weight_decay=WEIGHT_DECAY,
        max_norm=MAX_NORM,
    )
    return Outcome(dense.losses, dense.norms, dense.gradients, dense.parameters)


def one_process(layout: Layout) -> Outcome:
    """minimeg itself in one process, over the same micro-batches."""
    alone = Layout(tied=layout.tied, microbatches=layout.dp * layout.microbatches, layers=layout.config().num_layers)
    return train(alone, single_process())


def differences(mine: Outcome, other: Outcome) -> dict[str, float]:
    """Largest absolute difference of each kind of number; KeyError if the parameters have other names."""
    return {
        "loss": max(abs(a - b) for a, b in zip(mine.losses, other.losses, strict=True)),
        "norm": max(abs(a - b) for a, b in zip(mine.norms, other.norms, strict=True)),
        "gradients": _apart(mine.gradients, other.gradients),
        "parameters": _apart(mine.parameters, other.parameters),
    }


def _apart(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    if mine.keys() != other.keys():
        raise KeyError(f"other parameters: {sorted(mine.keys() ^ other.keys())}")
    return max(float((mine[name] - other[name]).abs().max()) for name in mine)


@lru_cache(maxsize=16)
def dense(layers: int, tied: bool, microbatches: int) -> Outcome:
    """The reference depends on little of a layout: computed once a process."""
    return reference(Layout(layers=layers, tied=tied, microbatches=microbatches))


def compare(layout: Layout) -> tuple[list[float], list[float], dict[str, float]]:
    """Called on every rank of the pool. Returns losses, norms, and on rank 0 the differences from the dense reference and, where
    only the pipeline is split and the head is untied, from one process ("... bits": must be 0)."""
    with initialize_model_parallel(layout.tp, layout.pp) as state:
        mine = train(layout, state)
        if state.rank != 0:
            return mine.losses, mine.norms, {}
    found = differences(mine, dense(layout.config().num_layers, layout.tied, layout.dp * layout.microbatches))
    if layout.only_pipeline and not layout.tied:
        found |= {f"{name}, bits": value for name, value in differences(mine, one_process(layout)).items()}
    return mine.losses, mine.norms, found
