"""One layout, estimated: its schedule is built, its stages get their seconds, and the schedule is simulated, not approximated.

An iteration is the makespan of the simulated schedule and what comes once per step after it. The makespan is taken apart on its busiest
stage, so that the terms add up to it exactly:

    busy        products, elementwise, collectives and recomputation of m micro-batches    ``minimeg.cost.step``
    bubble      makespan with free messages - busy: filling and draining, and waiting for stages that take longer
    messages    makespan - makespan with free messages: what the links between stages add

With n chunks a stage's time is spread evenly over its chunks, the output layer's part on the last stage too.

See it run: ``python -m minimeg.cost --model gpt3-175b --gpus 1024 --explain "t8 p8 d16 n3 b1 selective"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from minimeg.cost.flops import hardware_flops_per_iteration, model_flops_per_iteration, utilisation
from minimeg.cost.layout import Job, Layout
from minimeg.cost.memory import Term, fullest_rank, total
from minimeg.cost.step import StageWork, message_seconds, once_per_step, stage_work
from minimeg.cost.time import SECONDS_PER_DAY
from minimeg.schedule import Schedule, Timeline, build, simulate
from minimeg.schedule.actions import refuse


@dataclass(frozen=True)
class Estimate:
    """What a layout costs. ``stages``: the work of one micro-batch by stage; ``message``: seconds of one between stages."""

    job: Job
    layout: Layout
    stages: tuple[StageWork, ...]
    message: float

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, without what comes once after it. In seconds."""
        return self._simulate(self.message)

    @cached_property
    def without_messages(self) -> float:
        """Makespan if messages were free, seconds."""
        return self._simulate(0.0).makespan if self.layout.pipeline > 1 and self.message else self.timeline.makespan

    def _simulate(self, message: float) -> Timeline:
        forward = [stage.forward_seconds for stage in self.stages]
        backward = [stage.backward_seconds for stage in self.stages]
        return simulate(_schedule(self.layout, self.job.batch), forward, backward, comm=message)

    @cached_property
    def after(self) -> list[Term]:
        """Seconds of what comes once per step."""
        return once_per_step(self.job, self.layout)

    @property
    def seconds(self) -> float:
        """Of one iteration."""
        return self.timeline.makespan + total(self.after)

    @cached_property
    def busiest(self) -> int:
        """The stage with most work, the first of them."""
        return max(range(len(self.stages)), key=lambda stage: (self.stages[stage].seconds, -stage))

    @property
    def busy(self) -> float:
        """Seconds that the busiest stage works in a step."""
        return self.layout.microbatches(self.job.batch) * self.stages[self.busiest].seconds

    @property
    def bubble(self) -> float:
        """(makespan with free messages - busy) / busy: of IDEAL time, as Narayanan et al. 2021, section 2.2, count."""
        return self.without_messages / self.busy - 1

    @cached_property
    def tensor_seconds(self) -> float:
        """Of tensor-parallel collectives per step on the busiest stage, those of recomputation among them."""
        stage = self.stages[self.busiest]
        one = stage.forward.tensor + stage.backward.tensor + stage.again.tensor
        return self.layout.microbatches(self.job.batch) * one

    @property
    def pipeline_seconds(self) -> float:
        """That messages between stages add to a step."""
        return self.timeline.makespan - self.without_messages

    @property
    def data_seconds(self) -> float:
        """Of reducing gradients over d, and of the tied embedding, per step."""
        return total([term for term in self.after if term.name != "optimizer"])

    @cached_property
    def memory(self) -> tuple[int, list[Term]]:
        """(stage, terms in bytes) of the fullest rank, activations in flight counted in the simulated timeline."""
        return fullest_rank(self.job, self.layout, self.timeline.peak_in_flight)

    @property
    def memory_bytes(self) -> float:
        return total(self.memory[1])

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.job.gpu.memory

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: Korthikanti et al. 2022, equation 7 over time, GPUs and peak."""
        flops = model_flops_per_iteration(self.job.shape, self.job.batch)
        return utilisation(flops, self.seconds, self.job.gpus, self.job.gpu.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: recomputed FLOPs counted too, exactly."""
        flops = hardware_flops_per_iteration(self.job.shape, self.job.batch, self.layout.recompute)
        return utilisation(flops, self.seconds, self.job.gpus, self.job.gpu.peak)

    @property
    def days(self) -> float:
        """Of the whole training: T / (B s) iterations."""
        return self.job.tokens / (self.job.batch * self.job.shape.sequence) * self.seconds / SECONDS_PER_DAY

    @property
    def time_terms(self) -> list[Term]:
        """The iteration as a sum; its values add up to ``seconds``."""
        m, stage = self.layout.microbatches(self.job.batch), self.stages[self.busiest]
        once = stage.forward + stage.backward
        where = f"{m} micro-batches, stage {self.busiest}"
        t, p, n = self.layout.tensor, self.layout.pipeline, self.layout.chunks
        message = (
            f"{2 * m * n} of {self.message * 1e3:.3g} ms per stage, as far as they delay" if p > 1 else "p = 1: none"
        )
        return [
            Term("matrix products", where, m * once.matmul),
            Term("elementwise", f"{where}: norms, dropout, GELU, softmax", m * once.elementwise),
            Term("tensor (tp)", f"{where}: collectives over {t} ranks", m * once.tensor),
            Term("recomputation", f"{where}: {self.layout.recompute}", m * stage.again.seconds),
            Term("bubble", f"simulated, {self.bubble:.1%} of the lines above", self.without_messages - self.busy),
            Term("messages (pp)", message, self.pipeline_seconds),
            *self.after,
        ]


def estimate(job: Job, layout: Layout) -> Estimate:
    """A layout's cost; it need not fit the memory.

    Raises:
        ValueError: the layout cannot run the job (``Layout.faults``).
    """
    refuse(layout.faults(job), f"layout {layout}")
    return Estimate(job, layout, stages_of(job, layout), message_seconds(job, layout) if layout.pipeline > 1 else 0.0)


def stages_of(job: Job, layout: Layout) -> tuple[StageWork, ...]:
    """The work of one micro-batch by stage. Those in the middle are alike."""
    p = layout.pipeline
    ends = {stage: stage_work(job, layout, stage) for stage in {0, min(1, p - 1), p - 1}}
    return tuple(ends.get(stage, ends[min(1, p - 1)]) for stage in range(p))


def lower_bound(job: Job, layout: Layout) -> float:
    """Seconds that an iteration takes at least, without simulating it: the planner skips what cannot win.

    Stage r works m (F + B); before its first action all stages above have done one chunk's F, and after its last one their B, each
    behind a message. The largest of these sums over r is a bound for every order of actions, equal stages or not.
    """
    stages, m = stages_of(job, layout), layout.microbatches(job.batch)
    message = message_seconds(job, layout) if layout.pipeline > 1 else 0.0
    before = best = 0.0
    for stage in stages:
        best = max(best, before + m * stage.seconds)
        before += stage.seconds / layout.chunks + 2 * message
    return best + total(once_per_step(job, layout))


def _schedule(layout: Layout, batch: int) -> Schedule:
    return _build(layout.pipeline, layout.microbatches(batch), layout.chunks)


@lru_cache(maxsize=32)
def _build(stages: int, microbatches: int, chunks: int) -> Schedule:
    return build("interleaved" if chunks > 1 else "1f1b", stages, microbatches, chunks)
