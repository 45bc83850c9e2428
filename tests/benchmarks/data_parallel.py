"""Data parallelism over two ranks: gradients against DistributedDataParallel, a whole step with ZeRO-1 against
ZeroRedundancyOptimizer.

Both get minimeg's modules. DDP is used as one should: ``no_sync`` for all micro-batches but the last, gradients as views of its
buckets. It divides by d, so its loss is multiplied by d; for d = 2 that is exact, and the gradients must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from minimeg.data_parallel import GradientReducer
from minimeg.lab.ranks import Ranks
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.optimizer import Optimizer
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import initialise
from minimeg.pipeline import run
from minimeg.schedule import one_f_one_b
from tests.benchmarks.compute import tokens_in
from tests.benchmarks.plain_gpt import SEED, batch, largest_gap
from tests.benchmarks.table import Row
from tests.benchmarks.timing import ratio, spread, take_turns

CONFIG = GPTConfig(4, 256, 8, 512, 64, tied=False)
DP, MICROBATCHES, SIZE = 2, 4, 2
LEARNING_RATE, WEIGHT_DECAY, MAX_NORM = 1e-3, 0.1, 1.0
_CLOSE = 1e-5


class _Contender:
    def __init__(self, config: GPTConfig, microbatches: int) -> None:
        self.rank = dist.get_rank()
        self.batch = batch(config, microbatches, SIZE, first=self.rank * microbatches)
        self.normaliser = tokens_in(self.batch) * DP
        self.model = GPT(config, single_process().tp)
        initialise(self.model, SEED)

    def gradients(self) -> dict[str, Tensor]:
        return {name: param.grad.clone() for name, param in self.model.named_parameters() if param.grad is not None}

    def parameters(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.model.named_parameters()}


class _Minimeg(_Contender):
    def __init__(self, config: GPTConfig, microbatches: int, zero: bool) -> None:
        super().__init__(config, microbatches)
        self.state = initialize_model_parallel()
        self.schedule = one_f_one_b(1, microbatches)
        self.reducer = GradientReducer([self.model], self.state, use_distributed_optimizer=zero)
        self.optimizer = Optimizer(
            self.model,
            self.state,
            weight_decay=WEIGHT_DECAY,
            max_norm=MAX_NORM,
            betas=(0.9, 0.999),
            reducer=self.reducer,
        )

    def reduce(self) -> None:
        run(
            self.schedule,
            [self.model],
            self.batch,
            group=self.state.pp,
            loss=self.model.loss,
            normaliser=self.normaliser,
            on_gradients_ready=self.reducer.ready,
            before_last_backward=self.reducer.last_backward,
        )
        self.reducer.finish()

    def train(self) -> None:
        self.reduce()
        self.optimizer.step(LEARNING_RATE)

    def forget(self) -> None:
        self.reducer.zero()


class _Torch(_Contender):
    def __init__(self, config: GPTConfig, microbatches: int, zero: bool) -> None:
        super().__init__(config, microbatches)
        self.replica = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        # Megatron's rule, ours too: weight decay for matrices only.
        decay, rest = ([p for p in self.model.parameters() if (p.dim() >= 2) is matrix] for matrix in (True, False))
        groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": rest, "weight_decay": 0.0}]
        settings = {"lr": LEARNING_RATE, "betas": (0.9, 0.999), "eps": 1e-8}
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **settings)
        if zero:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # the import warns of something deprecated

            self.optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)

    def reduce(self) -> None:
        for index, microbatch in enumerate(self.batch):
            last = index == len(self.batch) - 1
            with nullcontext() if last else self.replica.no_sync():
                loss = self.model.loss(self.replica(None, microbatch), microbatch) / self.normaliser
                (loss * DP).backward()

    def train(self) -> None:
        self.reduce()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forget(self) -> None:
        self.optimizer.zero_grad()


def measure_gradients(config: GPTConfig, microbatches: int, rounds: int) -> tuple[dict[str, list[float]], bool]:
    """-> times by contender, and whether the gradients are the same to the bit."""
    ours, torchs = _Minimeg(config, microbatches, zero=False), _Torch(config, microbatches, zero=False)
    times = take_turns({"ours": ours.reduce, "DDP": torchs.reduce}, rounds, {"ours": ours.forget, "DDP": torchs.forget})
    mine, theirs = ours.gradients(), torchs.gradients()
    return times, mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def measure_steps(
    config: GPTConfig, microbatches: int, rounds: int, zero: bool
) -> tuple[dict[str, list[float]], float]:
    """-> times by contender, and how far apart the parameters are after all steps."""
    ours, torchs = _Minimeg(config, microbatches, zero), _Torch(config, microbatches, zero)
    times = take_turns({"ours": ours.train, "torch": torchs.train}, rounds)
    return times, largest_gap(ours.parameters(), torchs.parameters())


def rows(
    rounds: int, pool: Callable[[int], Ranks], config: GPTConfig = CONFIG, microbatches: int = MICROBATCHES
) -> Iterator[Row]:
    shape = (
        f"d={DP}, GPT of {config.num_layers} layers, h={config.hidden_size}, s={config.max_sequence_length}, b={SIZE}"
    )
    for m in sorted({1, microbatches}):
        answers = pool(DP).call(measure_gradients, config, m, rounds, timeout=300)
        if not all(same for _, same in answers):
            raise RuntimeError("gradients of minimeg and DDP are not equal to the bit")
        times = answers[0][0]
        found = ratio(times["ours"], times["DDP"])
        yield Row(
            section="data parallel",
            setting=f"gradients, {shape}, m={m}",
            unit="s",
            values={name: spread(each) for name, each in times.items()},
            ratios={"ours / DDP": found},
            equal="all gradients by torch.equal",
            reach="parity with DDP (within 5 %)",
            met=found.median <= 1.05,
        )
    for zero in (False, True):
        peer = "DDP + ZeroRedundancyOptimizer" if zero else "DDP + AdamW"
        answers = pool(DP).call(measure_steps, config, microbatches, rounds, zero, timeout=300)
        gap = max(gap for _, gap in answers)
        if gap > _CLOSE:
            raise RuntimeError(
                f"parameters of minimeg and {peer} differ by {gap:.1e} of the largest after {rounds + 1} steps"
            )
        times = answers[0][0]
        found = ratio(times["ours"], times["torch"])
        yield Row(
            section="data parallel",
            setting=f"step{' with ZeRO-1' if zero else ''}, {shape}, m={microbatches}, clipped",
            unit="s",
            values={"ours": spread(times["ours"]), peer: spread(times["torch"])},
            ratios={f"ours / {peer}": found},
            equal=f"parameters after {rounds + 1} steps within {_CLOSE:.0e} of the largest",
            reach=f"parity with {peer} (within 5 %)",
            met=found.median <= 1.05,
        )
