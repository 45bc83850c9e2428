"""Pipelines of two ranks that really compute: a GPT of 8 layers, one thread a rank.

minimeg, the hand-written loop and torch.distributed.pipelining run the same minimeg modules (minimeg's under torch's
PipelineStage, too), so that only the pipeline differs; gradients must be equal to the bit, also to those of one process. For ZB-V
torch splits the backward of plain modules by its own means, since that is its way of doing it; there gradients agree to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from minimeg.data import MicroBatch
from minimeg.lab.ranks import Ranks
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel, single_process
from minimeg.parameter import initialise, named_shards
from minimeg.pipeline import run
from minimeg.schedule import Schedule, build
from tests.benchmarks.hand_loop import hand_loop
from tests.benchmarks.plain_gpt import SEED, PlainGPT, batch, cross_entropy, largest_gap, targets_of, tokens_of
from tests.benchmarks.table import Row
from tests.benchmarks.timing import ratio, spread, take_turns

CONFIG = GPTConfig(8, 256, 8, 512, 64, tied=False)
STAGES, MICROBATCHES, SIZE = 2, 8, 2
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-v")
_TORCH = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}
_CLOSE = 1e-5


def tokens_in(batch: Sequence[MicroBatch]) -> float:
    return float(sum(each.valid_tokens for each in batch))


def chunks_of(schedule: Schedule, config: GPTConfig, rank: int) -> list[GPT]:
    """This rank's stages of a model that is not cut over tp."""
    virtual = schedule.stages * schedule.chunks
    numbers = [schedule.virtual_stage(rank, chunk) for chunk in range(schedule.chunks)]
    chunks = [GPT(config, single_process().tp, number, virtual) for number in numbers]
    initialise(chunks, SEED)
    return chunks


def gradients(chunks: Sequence[nn.Module]) -> dict[str, Tensor]:
    """By global name, of this rank."""
    return {name: param.grad for chunk in chunks for name, param in chunk.named_parameters() if param.grad is not None}


def forget(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        module.zero_grad()


class Minimeg:
    def __init__(self, schedule: Schedule, config: GPTConfig, batch: list[MicroBatch]) -> None:
        self.schedule, self.batch, self.normaliser = schedule, batch, tokens_in(batch)
        self.group = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
        self.modules: list[Any] = chunks_of(schedule, config, self.group.rank)

    def step(self) -> None:
        run(
            self.schedule,
            self.modules,
            self.batch,
            group=self.group,
            loss=self.modules[-1].loss,
            normaliser=self.normaliser,
        )


class Hand:
    def __init__(self, schedule: Schedule, config: GPTConfig, batch: list[MicroBatch]) -> None:
        self.schedule, self.batch = schedule, batch
        self.modules: list[Any] = chunks_of(schedule, config, dist.get_rank())
        self.shape, _ = self.modules[-1].input_shape(batch[0])
        normaliser = tokens_in(batch)
        self.loss = lambda y, microbatch: self.modules[-1].loss(y, microbatch) / normaliser

    def step(self) -> None:
        hand_loop(self.schedule, dist.get_rank(), self.modules, self.batch, self.loss, self.shape)


class _ForTorch(nn.Module):
    """A minimeg stage as torch calls it: with tokens or with x, without a micro-batch."""

    def __init__(self, chunk: GPT, example: MicroBatch) -> None:
        super().__init__()
        self.chunk, self.example = chunk, example

    def forward(self, x: Tensor) -> Tensor:
        if self.chunk.is_first:
            microbatch = MicroBatch(x, self.example.targets, self.example.valid, index=0, step=0)
            out: Tensor = self.chunk(None, microbatch)
        else:
            out = self.chunk(x, self.example)
        return out


class Torch:
    """``plain``: modules of plain torch instead of minimeg's."""

    def __init__(self, schedule: Schedule, config: GPTConfig, batch: list[MicroBatch], plain: bool = False) -> None:
        rank, virtual = dist.get_rank(), schedule.stages * schedule.chunks
        numbers = [schedule.virtual_stage(rank, chunk) for chunk in range(schedule.chunks)]
        if plain:
            self.modules: list[nn.Module] = [PlainGPT(config, number, virtual) for number in numbers]
            called = self.modules
        else:
            self.modules = [*chunks_of(schedule, config, rank)]
            called = [_ForTorch(chunk, batch[0]) for chunk in self.modules]  # type: ignore[arg-type]
        stages = [
            pipelining.PipelineStage(module, number, virtual, torch.device("cpu"))
            for module, number in zip(called, numbers, strict=True)
        ]
        normaliser, given = tokens_in(batch), stages if schedule.chunks > 1 else stages[0]

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            if plain:
                return cross_entropy(logits, targets) / normaliser
            microbatch = MicroBatch(targets, targets, torch.ones_like(targets, dtype=torch.bool), index=0, step=0)
            total: Tensor = self.modules[-1].loss(logits, microbatch)  # type: ignore[operator]
            return total / normaliser

        self.schedule = _TORCH[schedule.name](given, schedule.microbatches, loss_fn=loss, scale_grads=False)
        self.tokens, self.targets = tokens_of(batch), targets_of(batch)
        self.is_first = 0 in numbers

    def step(self) -> None:
        self.schedule.step(*([self.tokens] if self.is_first else []), target=self.targets, return_outputs=False)


def one_process(config: GPTConfig, batch: Sequence[MicroBatch]) -> dict[str, Tensor]:
    """The gradients of the whole model, micro-batch after micro-batch."""
    whole = GPT(config, single_process().tp)
    initialise(whole, SEED)
    normaliser = tokens_in(batch)
    for each in batch:
        (whole.loss(whole(None, each), each) / normaliser).backward()
    return {shard.name: param.grad for _, param, shard in named_shards(whole) if param.grad is not None}


def measure(name: str, config: GPTConfig, microbatches: int, rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    """-> times by contender, and which gradients are not what they must be. On every rank of the world."""
    schedule, data = build(name, STAGES, microbatches), batch(config, microbatches, SIZE)
    contenders: dict[str, Any] = {"ours": Minimeg(schedule, config, data)}
    if schedule.split:
        contenders["torch"] = Torch(schedule, config, data, plain=True)
    else:
        contenders |= {"hand loop": Hand(schedule, config, data), "torch": Torch(schedule, config, data)}
    times = take_turns(
        {name: each.step for name, each in contenders.items()},
        rounds,
        {name: partial(forget, each.modules) for name, each in contenders.items()},
    )
    right, wrong = one_process(config, data), []
    for contender, each in contenders.items():
        mine = gradients(each.modules)
        expected = {name: right[name] for name in mine}
        exact = not (schedule.split and contender == "torch")
        same = all(torch.equal(mine[k], expected[k]) for k in mine) if exact else largest_gap(mine, expected) <= _CLOSE
        if not same or len(mine) != sum(1 for module in each.modules for _ in module.parameters()):
            wrong.append(contender)
    return times, wrong


def rows(
    rounds: int,
    pool: Callable[[int], Ranks],
    schedules: Sequence[str] = SCHEDULES,
    config: GPTConfig = CONFIG,
    microbatches: int = MICROBATCHES,
) -> Iterator[Row]:
    for name in schedules:
        answers = pool(STAGES).call(measure, name, config, microbatches, rounds, timeout=300)
        times, wrong = answers[0][0], sorted({each for _, found in answers for each in found})
        if wrong:
            raise RuntimeError(f"{name}: gradients of {wrong} differ from those of one process")
        values = {contender: spread(each) for contender, each in times.items()}
        exact = name != "zb-v"
        yield Row(
            section="compute",
            setting=f"{name} p={STAGES} m={microbatches}, GPT of {config.num_layers} layers, h={config.hidden_size}, "
            f"s={config.max_sequence_length}, b={SIZE}",
            unit="s",
            values=values,
            ratios={f"ours / {other}": ratio(times["ours"], times[other]) for other in times if other != "ours"},
            equal="gradients of all, and of one process, by torch.equal"
            if exact
            else f"ours by torch.equal, torch's own split within {_CLOSE:.0e}",
            reach="parity with torch (within 5 %)",
            met=values["ours"].median <= 1.05 * values["torch"].median,
        )
