"""Does the simulator tell the truth? Step times of real pipelines against ``simulate`` with times measured first.

In each round every rank first measures F, B and W of its chunks alone (both ranks at once, so that they share the machine as they
will), and what a message takes to the other rank and back; then the step itself is run and timed. The prediction of a round is
compared with the step of the same round. Equal: the actions that were executed are those that were simulated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minimeg.comm import Group
from minimeg.data import MicroBatch
from minimeg.lab.ranks import Ranks
from minimeg.linear import WeightGradientStore
from minimeg.models.config import GPTConfig
from minimeg.models.gpt import GPT
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import run
from minimeg.schedule import Schedule, build, simulate
from tests.benchmarks.compute import CONFIG, MICROBATCHES, SIZE, STAGES, chunks_of, tokens_in
from tests.benchmarks.plain_gpt import batch
from tests.benchmarks.table import Row
from tests.benchmarks.timing import ratio, spread, take_turns

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
_REPEATS = 4


class _Measured:
    """One rank's part of a pipeline, its times alone, and its steps."""

    def __init__(self, schedule: Schedule, config: GPTConfig, batch: list[MicroBatch]) -> None:
        self.schedule, self.batch, self.normaliser = schedule, batch, tokens_in(batch)
        self.group = initialize_model_parallel(pipeline_model_parallel_size=schedule.stages).pp
        self.chunks: list[Any] = chunks_of(schedule, config, self.group.rank)
        self.predictions: list[float] = []

    def alone(self) -> None:
        """Measure, exchange, predict: what this step will take."""
        mine = [0.0, 0.0, 0.0]
        for chunk in self.chunks:
            rounds = [self._one(chunk, self.batch[k % len(self.batch)]) for k in range(_REPEATS)]
            for kind in range(3):
                mine[kind] += statistics.median(each[kind] for each in rounds)
        latency = _latency(self.group, self.chunks[0].input_shape(self.batch[0]))
        everyone = self.group.all_gather_json([*mine, latency])
        forward, backward, weight = ([each[kind] for each in everyone] for kind in range(3))
        comm = statistics.median(each[3] for each in everyone)
        self.predictions.append(simulate(self.schedule, forward, backward, weight, comm).makespan)
        for chunk in self.chunks:
            chunk.zero_grad()

    def _one(self, chunk: GPT, microbatch: MicroBatch) -> tuple[float, float, float]:
        """Seconds of F, B, W of one micro-batch; W is 0 where the schedule has none."""
        x = None if chunk.is_first else torch.randn(chunk.input_shape(microbatch)[0]).requires_grad_()
        store = WeightGradientStore()
        clock = [time.perf_counter()]
        self._attach(chunk, store if self.schedule.split else None)
        y = chunk(x, microbatch)
        if chunk.is_last:
            y = chunk.loss(y, microbatch) / self.normaliser
        grad: Tensor | None = None if chunk.is_last else torch.ones_like(y)
        clock.append(time.perf_counter())
        if self.schedule.split:
            store.record(0)
        torch.autograd.backward(y, grad)
        store.stop()
        clock.append(time.perf_counter())
        if self.schedule.split:
            store.run(0)
        clock.append(time.perf_counter())
        self._attach(chunk, None)
        return clock[1] - clock[0], clock[2] - clock[1], clock[3] - clock[2]

    def _attach(self, chunk: GPT, store: WeightGradientStore | None) -> None:
        for module in chunk.modules():
            if hasattr(module, "weight_gradients"):
                module.weight_gradients = store

    def step(self) -> None:
        done = run(
            self.schedule,
            self.chunks,
            self.batch,
            group=self.group,
            loss=self.chunks[-1].loss,
            normaliser=self.normaliser,
        )
        if done.actions != self.schedule.ranks[self.group.rank]:
            raise RuntimeError(f"{self.schedule.name}: executed {done.actions}")


def _latency(group: Group, expected: tuple[tuple[int, ...], torch.dtype]) -> float:
    """Seconds of one message, from half of a round trip."""
    shape, dtype = expected
    x, other, times = torch.zeros(shape, dtype=dtype), 1 - group.rank, []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        if group.rank == 0:
            group.isend(x, other).wait()
            group.irecv(shape, dtype, other).wait()
        else:
            group.irecv(shape, dtype, other).wait()
            group.isend(x, other).wait()
        times.append((time.perf_counter() - start) / 2)
    return min(times[1:])


def measure(
    names: Sequence[str], config: GPTConfig, microbatches: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """-> measured and predicted step times by schedule, round by round."""
    data = batch(config, microbatches, SIZE)
    pipelines = {name: _Measured(build(name, STAGES, microbatches), config, data) for name in names}
    times = take_turns(
        {name: each.step for name, each in pipelines.items()},
        rounds,
        {name: each.alone for name, each in pipelines.items()},
    )
    dist.barrier()
    return times, {name: each.predictions[1:] for name, each in pipelines.items()}


def rows(
    rounds: int,
    pool: Callable[[int], Ranks],
    names: Sequence[str] = SCHEDULES,
    config: GPTConfig = CONFIG,
    microbatches: int = MICROBATCHES,
) -> Iterator[Row]:
    measured, predicted = pool(STAGES).call(measure, names, config, microbatches, rounds, timeout=300)[0]
    errors = {name: [abs(p / t - 1) for p, t in zip(predicted[name], measured[name], strict=True)] for name in names}
    everything = statistics.median(error for each in errors.values() for error in each)
    for name in names:
        yield Row(
            section="prediction",
            setting=f"{name} p={STAGES} m={microbatches}, GPT of {config.num_layers} layers, h={config.hidden_size}, "
            f"s={config.max_sequence_length}, b={SIZE}",
            unit="s",
            values={"measured": spread(measured[name]), "simulated": spread(predicted[name])},
            ratios={"simulated / measured": ratio(predicted[name], measured[name])},
            equal="the executed actions are the simulated ones",
            reach="median error over all rounds and schedules at most 5 %",
            met=everything <= 0.05,
            notes=f"median error {statistics.median(errors[name]):.1%}; over all schedules {everything:.1%}",
        )
