"""A GPT in any layout and precision, step by step, with the reducer and the optimizer that a test wants to look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minimeg.data_parallel import GradientReducer
from minimeg.models.gpt import GPT
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import ParallelState
from minimeg.parameter import full_state, load_full_state, named_shards
from minimeg.pipeline import run
from minimeg.schedule import Schedule
from tests.pipeline.layouts import Layout, global_batch, initial_state, normaliser


@dataclass
class Training:
    """This rank's part of a run. Small buckets: several a chunk, cutting across parameters."""

    layout: Layout
    state: ParallelState
    schedule: Schedule
    chunks: list[GPT]
    reducer: GradientReducer
    optimizer: Optimizer

    def gradients(self, step: int) -> Tensor:
        """Forward, backward and the sums over ranks. Returns this rank's share of the loss."""
        everything = global_batch(step, self.layout.dp * self.layout.microbatches)
        m, scale = self.schedule.microbatches, self.optimizer.loss_scale
        result = run(
            self.schedule,
            self.chunks,
            everything[self.state.dp.rank * m : (self.state.dp.rank + 1) * m],
            group=self.state.pp,
            loss=self.chunks[-1].loss,
            normaliser=normaliser(everything) / scale,
            on_gradients_ready=self.reducer.ready,
            before_last_backward=self.reducer.last_backward,
        )
        self.reducer.finish()
        return result.loss / scale

    def step(self, step: int, learning_rate: float = 1e-2) -> tuple[float, float]:
        """-> loss of the whole batch, norm."""
        loss = self.gradients(step)
        norm = self.optimizer.step(learning_rate, loss)
        return float(self.state.dp_cp.all_reduce(loss)), norm

    def parameters(self) -> dict[str, Tensor]:
        return full_state(self.chunks, self.state)

    def local(self) -> dict[str, Tensor]:
        """A copy of everything that a step may change on this rank."""
        found = {shard.name: param.detach().clone() for _, param, shard in named_shards(self.chunks)}
        found |= {" ".join(key): piece.tensor.clone() for key, piece in self.optimizer.state_pieces().items()}
        return found

    def named(self, name: str) -> nn.Parameter:
        return next(param for _, param, shard in named_shards(self.chunks) if shard.name == name)


def training(
    layout: Layout,
    state: ParallelState,
    *,
    dtype: torch.dtype = torch.float64,
    zero: bool = False,
    bucket_elements: int = 3000,
    values: Callable[[], dict[str, Tensor]] | None = None,
    **settings: Any,
) -> Training:
    schedule = layout.built_schedule()
    chunks = [
        GPT(layout.config(), state.tp, schedule.virtual_stage(state.pp.rank, c), schedule.virtual_stages).to(dtype)
        for c in range(schedule.chunks)
    ]
    load_full_state(chunks, initial_state(layout.config()) if values is None else values())
    reducer = GradientReducer(chunks, state, bucket_elements, use_distributed_optimizer=zero)
    optimizer = Optimizer(chunks, state, reducer=reducer, **settings)
    return Training(layout, state, schedule, chunks, reducer, optimizer)
