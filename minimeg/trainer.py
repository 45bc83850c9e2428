"""One training step over tensor, pipeline and data parallelism: where all rooms meet.

    draw the micro-batches of the step          data.py: a function of (seed, step)
    count valid tokens over dp x cp             the loss is divided by it, so gradients simply add
    run the schedule                            pipeline/: forwards, backwards, messages
    sum the gradients                           data_parallel.py: begun by the executor, chunk by chunk
    one norm, one factor, one update            optimizer.py

The same class trains in one process: then every group has one rank, and each step above is the plain thing it stands for. That is how
a run is compared with its single-process twin (comparison.py).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minimeg.comm import phase
from minimeg.data import MicroBatch, TextDataset
from minimeg.data_parallel import GradientReducer
from minimeg.faults import BOX
from minimeg.invariants import InvariantReport, check_invariants
from minimeg.meta import number
from minimeg.models.gpt import GPT
from minimeg.models.recomputation import sliding_window
from minimeg.optimizer import CosineSchedule, Optimizer
from minimeg.options import Options
from minimeg.parallel_state import ParallelState
from minimeg.parameter import initialise
from minimeg.pipeline import Recorder, run


@dataclass(frozen=True)
class StepReport:
    """Numbers of one step, the same on every rank."""

    step: int
    loss: float
    norm: float
    learning_rate: float


class Trainer:
    """This rank's chunks of the model, and everything that a step needs."""

    def __init__(self, options: Options, state: ParallelState, dataset: TextDataset) -> None:
        self.options, self.state, self.dataset = options, state, dataset
        world = state.grid.world_size
        self.schedule, self.evaluation = options.training_schedule(world), options.evaluation_schedule(world)
        dtype = getattr(torch, options.dtype)
        dry = state.device.type == "meta"
        with state.device if dry else nullcontext():  # a dry run allocates no weights
            self.chunks = [self._chunk(c) for c in range(self.schedule.chunks)]
        for chunk in self.chunks:
            chunk.to(state.device, dtype)
        if not dry:
            initialise(self.chunks, options.seed)
        self.reducer = GradientReducer(self.chunks, state, use_distributed_optimizer=options.use_distributed_optimizer)
        self.optimizer = Optimizer(
            self.chunks,
            state,
            kind=options.optimizer,
            weight_decay=options.weight_decay,
            max_norm=options.clip_grad,
            reducer=self.reducer,
            on_nonfinite=options.on_nonfinite,
        )
        self.invariants: InvariantReport | None = None  # of the last step, with --check-invariants
        self.learning_rate = CosineSchedule(options.lr, options.min_lr, options.warmup, options.train_iters)

    def _chunk(self, chunk: int) -> GPT:
        schedule, options, rank = self.schedule, self.options, self.state.pp.rank
        # Decided before anything runs: which of this rank's micro-batches will find room to keep everything.
        window = sliding_window(schedule, rank, options.recompute_keep_microbatches)[chunk]
        first = self.state.dp.rank * schedule.microbatches  # their index is that in the global batch
        recomputation = replace(options.recomputation, kept=frozenset(first + i for i in window))
        stage = schedule.virtual_stage(rank, chunk)
        return GPT(options.config, self.state.tp, stage, schedule.virtual_stages, options.seed, recomputation)

    def step(self, step: int, recorder: Recorder | None = None) -> StepReport:
        """One optimizer step, counted from 0. Collective over all ranks."""
        BOX.enter("data", step)
        microbatches = self.dataset.microbatches(step, seed=self.options.seed, **self._batch_layout())
        scale = self.optimizer.loss_scale
        result = run(
            self.schedule,
            self.chunks,
            self._to_device(microbatches),
            group=self.state.pp,
            loss=self.chunks[-1].loss,
            normaliser=self._valid_tokens(microbatches) / scale,
            on_gradients_ready=self.reducer.ready,
            before_last_backward=self._before_last_backward,
            recorder=recorder,
        )
        BOX.enter("reductions")
        self.reducer.finish()
        if self.options.check_invariants:
            self.invariants = check_invariants(self.chunks, self.state, self.optimizer)
        BOX.enter("optimizer")
        learning_rate = self.learning_rate(step)
        loss = result.loss / scale
        norm = self.optimizer.step(learning_rate, loss)
        return StepReport(step, self._over_data_parallel(loss), norm, learning_rate)

    def _before_last_backward(self, chunk: int) -> None:
        if BOX.take("nan"):  # MINIMEG_FAULT=...:nan
            next(param.grad for param in self.chunks[chunk].parameters() if param.grad is not None).view(-1)[0] = (
                torch.nan
            )
        self.reducer.last_backward(chunk)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss of a validation token, over ``eval_iters`` fixed batches, without dropout. Collective; equal on all ranks."""
        BOX.enter("evaluation")
        for chunk in self.chunks:
            chunk.eval()
        total = 0.0
        for iteration in range(self.options.eval_iters):
            microbatches = self.dataset.valid_microbatches(iteration, **self._batch_layout())
            result = run(
                self.evaluation,
                self.chunks,
                self._to_device(microbatches),
                group=self.state.pp,
                loss=self.chunks[-1].loss,
                normaliser=self._valid_tokens(microbatches),
            )
            total += self._over_data_parallel(result.loss)
        for chunk in self.chunks:
            chunk.train()
        return total / self.options.eval_iters

    def _batch_layout(self) -> dict[str, int]:
        return {
            "micro_batch_size": self.options.micro_batch_size,
            "global_batch_size": self.options.global_batch_size,
            "dp_rank": self.state.dp.rank,
            "dp_size": self.state.dp.size,
        }

    def _to_device(self, microbatches: list[MicroBatch]) -> list[MicroBatch]:
        return [microbatch.to(self.state.device) for microbatch in microbatches]

    def _valid_tokens(self, microbatches: list[MicroBatch]) -> float:
        mine = torch.tensor(sum(mb.valid_tokens for mb in microbatches), dtype=torch.float64)
        if self.state.device.type != "meta":  # counts stay real in a dry run
            mine = mine.to(self.state.device)
        return self._over_data_parallel(mine)

    def _over_data_parallel(self, share: Tensor) -> float:
        with phase("loss"):
            return number(self.state.dp_cp.all_reduce(share))
