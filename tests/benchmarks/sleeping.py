"""Pipeline schedules with stages that sleep: what the runtime adds to the schedule, without ranks that fight for cores.

A stage sleeps for the time of its forward, of its input gradient and of its weight gradient, and passes on a message of the size
asked for. *Excess* is the measured step over the critical path of the same order with free communication. Three contenders in one
run: minimeg, the hand-written loop, torch.distributed.pipelining. Every stage sleeps in full, the first one too, whose input
needs no gradient: torch's own split of a backward would skip it there, so it is given the same deferral by its ``dw_builder``.

Equal: the gradients of all contenders, and those of one process that does not sleep, by ``torch.equal``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleMulti

from minimeg.lab.ranks import Ranks
from minimeg.linear import WeightGradientStore, accumulate
from minimeg.parallel_state import initialize_model_parallel
from minimeg.pipeline import run
from minimeg.schedule import Schedule, build
from tests.benchmarks.critical_path import Work, critical_path
from tests.benchmarks.hand_loop import hand_loop
from tests.benchmarks.table import Row
from tests.benchmarks.timing import Spread, ratio, spread, take_turns

_COLUMNS = 256
_TORCH = {
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zb-v": pipelining.ScheduleZBVZeroBubble,
}
_TORCH_KINDS = {"F": "F", "B": "B", "I": "B", "W": "W"}


@dataclass(frozen=True)
class Setting:
    """A row of the table. Times are those of a whole stage, in seconds."""

    stages: int
    microbatches: int
    forward: float
    backward: float
    kilobytes: int = 256
    jitter: float = 0.0

    def __str__(self) -> str:
        size = f"{self.kilobytes} KB" if self.kilobytes < 1024 else f"{self.kilobytes // 1024} MB"
        jitter = f", jitter {self.jitter:.0%}" if self.jitter else ""
        return (
            f"p={self.stages} m={self.microbatches}, {self.forward * 1e3:g}/{self.backward * 1e3:g} ms, {size}{jitter}"
        )

    @property
    def rows(self) -> int:
        return self.kilobytes * 1024 // 4 // _COLUMNS

    def duration(self, work: Work, chunks: int, split: bool) -> float:
        """Of one action. Where backward is split, input and weight take half of it each."""
        kind, microbatch, stage = work
        whole = self.forward if kind == "F" else self.backward / 2 if split else self.backward
        factor = random.Random(f"{kind} {microbatch} {stage}").uniform(1 - self.jitter, 1 + self.jitter)
        return whole / chunks * factor


SETTINGS = (
    Setting(4, 8, 0.050, 0.100),
    Setting(4, 8, 0.020, 0.040, jitter=0.5),
    Setting(4, 8, 0.020, 0.040, kilobytes=4096),
    Setting(8, 16, 0.020, 0.040),
)
ZERO_BUBBLE = Setting(4, 8, 0.020, 0.040)


class _Sleep(Function):
    """y = w x, slowly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, stage: SleepingStage, microbatch: int) -> Tensor:
        stage.sleep("F", microbatch)
        ctx.save_for_backward(x, w)
        ctx.stage, ctx.microbatch = stage, microbatch
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        stage, microbatch, (x, w), dy = ctx.stage, ctx.microbatch, ctx.saved_tensors, grads[0]
        stage.sleep("B", microbatch)
        dx = dy * w if ctx.needs_input_grad[0] else None

        def weight_gradient() -> Tensor:
            if stage.split:
                stage.sleep("W", microbatch)
            return (dy[0] * x[0]).sum().view(1)  # one row: the product of all would be work, not sleep

        put = stage.deferral()
        if put is None:
            return dx, weight_gradient(), None, None
        put(lambda: accumulate(stage.weight, weight_gradient()))
        return dx, None, None, None


class SleepingStage(nn.Module):
    """Virtual stage ``number``, for all contenders. torch does not say which micro-batch it runs; they come in order, so we count."""

    def __init__(self, setting: Setting, number: int, chunks: int, split: bool, asleep: bool = True) -> None:
        super().__init__()
        self.setting, self.number, self.n, self.split, self.asleep = setting, number, chunks, split, asleep
        self.weight = nn.Parameter(torch.tensor([1 + 0.01 * (number + 1)]))
        self.weight_gradients: WeightGradientStore | None = None  # minimeg's executor sets it
        self.aside: list[Callable[[], None]] | None = None  # torch's dw_builder takes them from here
        self.seen = 0

    def sleep(self, kind: str, microbatch: int) -> None:
        if self.asleep:
            time.sleep(self.setting.duration((kind, microbatch, self.number), self.n, self.split))

    def deferral(self) -> Callable[[Callable[[], None]], None] | None:
        if self.aside is not None:
            return self.aside.append
        store = self.weight_gradients
        return store.put if store is not None and store.recording else None

    def take_deferred(self) -> Callable[[], None]:
        assert self.aside is not None
        closures, self.aside = self.aside, []
        return lambda: [closure() for closure in closures]  # type: ignore[return-value]

    def input_shape(self, microbatch: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(microbatch.shape), microbatch.dtype

    output_shape = input_shape

    def forward(self, x: Tensor | None, microbatch: Tensor | None = None) -> Tensor:
        number = self.seen % self.setting.microbatches
        self.seen += 1
        y: Tensor = _Sleep.apply(microbatch if x is None else x, self.weight, self, number)
        return y


def loss(y: Tensor, _: Any) -> Tensor:
    return y[0].square().sum()


def microbatches(setting: Setting) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(setting.rows, _COLUMNS, generator=generator) for _ in range(setting.microbatches)]


# ---- on the ranks ------------------------------------------------------------------------------------------------------------


class _Minimeg:
    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        self.schedule, self.batch = schedule, microbatches(setting)
        self.group = initialize_model_parallel(pipeline_model_parallel_size=setting.stages).pp
        self.stages = _stages(schedule, setting, self.group.rank)

    def step(self) -> None:
        run(self.schedule, self.stages, self.batch, group=self.group, loss=loss, normaliser=1.0)


class _Hand:
    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        self.schedule, self.batch = schedule, microbatches(setting)
        self.stages = _stages(schedule, setting, dist.get_rank())

    def step(self) -> None:
        hand_loop(self.schedule, dist.get_rank(), self.stages, self.batch, loss, tuple(self.batch[0].shape))


class _Torch:
    def __init__(self, schedule: Schedule, setting: Setting) -> None:
        # Its orders are its own; only where a virtual stage lies is the same.
        self.batch, self.stages = microbatches(setting), _stages(schedule, setting, dist.get_rank())
        virtual, cpu = schedule.stages * schedule.chunks, torch.device("cpu")
        stages = []
        for stage in self.stages:
            builder = None
            if schedule.split:
                stage.aside = []
                builder = stage.take_deferred
            example = self.batch[0].clone().requires_grad_(stage.number > 0)
            stages.append(
                pipelining.PipelineStage(
                    stage,
                    stage.number,
                    virtual,
                    cpu,
                    input_args=example,
                    output_args=example.detach().clone().requires_grad_(),
                    dw_builder=builder,
                )
            )
        kind = _TORCH[schedule.name]
        given = stages if schedule.chunks > 1 else stages[0]
        self.schedule = kind(given, schedule.microbatches, loss_fn=loss, scale_grads=False)
        self.x, self.target = torch.cat(self.batch), torch.zeros(schedule.microbatches)
        self.numbers = [stage.number for stage in self.stages]

    def step(self) -> None:
        first = [self.x] if 0 in self.numbers else []
        self.schedule.step(*first, target=self.target, return_outputs=False)

    def order(self) -> list[list[Work]] | None:
        """None for 1F1B: it runs minimeg's order, and what its ``_get_pipeline_order`` says is another one (the last rank would
        begin with micro-batch 1)."""
        if not isinstance(self.schedule, PipelineScheduleMulti):
            return None
        found = self.schedule.pipeline_order
        return [
            [
                (_TORCH_KINDS[action.computation_type.value], action.microbatch_index, action.stage_index)
                for action in found[rank]
                if action is not None and action.computation_type.value in _TORCH_KINDS
            ]
            for rank in sorted(found)
        ]


_CONTENDERS = {"ours": _Minimeg, "hand loop": _Hand, "torch": _Torch}


def _stages(schedule: Schedule, setting: Setting, rank: int) -> list[SleepingStage]:
    numbers = [schedule.virtual_stage(rank, chunk) for chunk in range(schedule.chunks)]
    return [SleepingStage(setting, number, schedule.chunks, schedule.split) for number in numbers]


def measure(setting: Setting, names: Sequence[tuple[str, str]], rounds: int) -> dict[str, Any]:
    """Steps of (schedule, contender) pairs in turn -> times by pair, torch's orders, and whose gradients are wrong."""
    contenders = {}
    for schedule, contender in names:
        plan = build(schedule, setting.stages, setting.microbatches)
        contenders[f"{schedule} {contender}"] = _CONTENDERS[contender](plan, setting)
    times = take_turns(
        {name: contender.step for name, contender in contenders.items()},
        rounds,
        {name: partial(_forget, contender.stages) for name, contender in contenders.items()},
    )
    wrong = [
        f"{name} stage {stage.number}"
        for name, contender in contenders.items()
        for stage, right in zip(contender.stages, _in_one_process(setting, contender.stages), strict=True)
        if not torch.equal(stage.weight.grad, right)
    ]
    orders = {name: found.order() for name, found in contenders.items() if isinstance(found, _Torch)}
    return {"times": times, "orders": orders, "wrong": wrong}


def _forget(stages: Sequence[SleepingStage]) -> None:
    for stage in stages:
        stage.weight.grad, stage.seen = None, 0


def _in_one_process(setting: Setting, mine: Sequence[SleepingStage]) -> list[Tensor]:
    """The gradients of my stages, from all stages in a row, awake."""
    virtual = setting.stages * mine[0].n
    row = [SleepingStage(setting, number, mine[0].n, False, asleep=False) for number in range(virtual)]
    for batch in microbatches(setting):
        y: Tensor = batch
        for stage in row:
            y = stage(y)
        loss(y, None).backward()
    grads = [row[stage.number].weight.grad for stage in mine]
    assert all(grad is not None for grad in grads)
    return [grad for grad in grads if grad is not None]


# ---- in the parent -----------------------------------------------------------------------------------------------------------


def excesses(setting: Setting, names: Sequence[tuple[str, str]], rounds: int, pool: Ranks) -> dict[str, list[float]]:
    """By "schedule contender": each round's step over the critical path. RuntimeError if a gradient is wrong."""
    answers = pool.call(measure, setting, names, rounds, timeout=300)
    wrong = sorted({name for answer in answers for name in answer["wrong"]})
    if wrong:
        raise RuntimeError(f"{setting}: gradients differ from those of one process: {wrong}")
    found = {}
    for schedule, contender in names:
        name = f"{schedule} {contender}"
        plan = build(schedule, setting.stages, setting.microbatches)
        rows: list[list[Work]] = [
            [(a.kind, a.microbatch, plan.virtual_stage(rank, a.chunk)) for a in row]
            for rank, row in enumerate(plan.ranks)
        ]
        rows = answers[0]["orders"].get(name) or rows
        last = plan.stages * plan.chunks - 1
        least = critical_path(rows, last, partial(setting.duration, chunks=plan.chunks, split=plan.split))
        found[name] = [seconds / least for seconds in answers[0]["times"][name]]
    return found


EQUAL = "gradients of all, and of one process, by torch.equal"


def rows(
    rounds: int,
    pool: Callable[[int], Ranks],
    settings: Sequence[Setting] = SETTINGS,
    zero_bubble: Setting = ZERO_BUBBLE,
) -> Iterator[Row]:
    """1F1B and interleaved in every setting, then the zero-bubble schedules beside 1F1B."""
    for setting in settings:
        pairs = [(schedule, contender) for schedule in ("1f1b", "interleaved") for contender in _CONTENDERS]
        found = excesses(setting, pairs, rounds, pool(setting.stages))
        for schedule in ("1f1b", "interleaved"):
            yield _row(setting, schedule, {contender: found[f"{schedule} {contender}"] for contender in _CONTENDERS})
    yield from zero_bubble_rows(rounds, pool, zero_bubble)


def _row(setting: Setting, schedule: str, found: dict[str, list[float]]) -> Row:
    values = {contender: spread(each) for contender, each in found.items()}
    ours = values["ours"].median
    return Row(
        section="sleeping",
        setting=f"{schedule} {setting}",
        unit="excess",
        values=values,
        ratios={f"ours / {other}": ratio(found["ours"], found[other]) for other in ("hand loop", "torch")},
        equal=EQUAL,
        reach="at most 1.02 x the hand loop, and below torch",
        met=ours <= 1.02 * values["hand loop"].median and ours < values["torch"].median,
    )


def zero_bubble_rows(rounds: int, pool: Callable[[int], Ranks], setting: Setting) -> Iterator[Row]:
    pairs = [("1f1b", "ours"), ("zb-h1", "ours"), ("zb-v", "ours"), ("zb-v", "torch")]
    found = excesses(setting, pairs, rounds, pool(setting.stages))
    values: dict[str, Spread] = {name: spread(each) for name, each in found.items()}
    bound = values["1f1b ours"].median + 0.02
    for schedule in ("zb-h1", "zb-v"):
        ours, peer = values[f"{schedule} ours"], values.get(f"{schedule} torch")
        shown = {"ours": ours, "ours, 1f1b": values["1f1b ours"]} | ({"torch": peer} if peer else {})
        yield Row(
            section="sleeping",
            setting=f"{schedule} {setting}, F=B=W",
            unit="excess",
            values=shown,
            ratios={"ours / torch": ratio(found[f"{schedule} ours"], found[f"{schedule} torch"])} if peer else {},
            equal=EQUAL,
            reach="at most that of 1F1B + 0.02" + (", and below torch" if peer else ""),
            met=ours.median <= bound and (peer is None or ours.median < peer.median),
        )
