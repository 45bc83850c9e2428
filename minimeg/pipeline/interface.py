"""What the executor is given and what it returns: a stage, a result, and all that is refused before anything is sent.

See it run: ``python -m torch.distributed.run --nproc-per-node 4 -m minimeg.demos.pipeline``, whose stage has seven lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from minimeg.comm import Group
from minimeg.pipeline.stash import stash_faults
from minimeg.schedule import Action, Schedule

Shape = tuple[tuple[int, ...], torch.dtype]


class Stage(Protocol):
    """What a chunk must offer: a module of one virtual stage."""

    def __call__(self, x: Tensor | None, microbatch: Any) -> Tensor:
        """x is None on the first virtual stage, which reads the micro-batch itself."""

    def input_shape(self, microbatch: Any) -> Shape:
        """Shape and dtype of x (not asked of the first virtual stage)."""

    def output_shape(self, microbatch: Any) -> Shape:
        """Shape and dtype of what the call returns (not asked of the last virtual stage)."""


@dataclass(frozen=True)
class Result:
    """What a run did.

    Attributes:
        loss: sum of the micro-batches' losses / normaliser, the same number on every rank of the pipeline.
        actions: what this rank executed, in order.
        peak_in_flight: most (chunk, micro-batch) pairs at once whose forward was done and whose last backward was not.
        peak_sends: most messages at once that this rank had sent and not freed.
        weight_versions: most versions of its weights that a chunk held at once; 1 unless the schedule updates while it runs.
    """

    loss: Tensor
    actions: tuple[Action, ...]
    peak_in_flight: int
    peak_sends: int
    weight_versions: int = 1


def check(
    schedule: Schedule,
    chunks: Sequence[Any],
    microbatches: Sequence[Any],
    group: Group,
    normaliser: float | Tensor,
    learning_rate: float | None,
    reduces: bool,
) -> None:
    """ValueError with everything that does not fit together. ``reduces``: the caller wants to be told of complete gradients."""
    faults = []
    if group.size != schedule.stages:
        faults.append(f"the schedule has {schedule.stages} stages, but the group {group.name} has {group.size} ranks")
    if len(chunks) != schedule.chunks:
        faults.append(f"the schedule wants {schedule.chunks} chunks a rank, got {len(chunks)}")
    if len(microbatches) != schedule.microbatches:
        faults.append(f"the schedule wants {schedule.microbatches} micro-batches, got {len(microbatches)}")
    if not 0 < float(normaliser) < float("inf"):
        faults.append(f"normaliser must be positive, got {float(normaliser)}; it counts the valid tokens of the batch")
    if not faults:
        faults += _no_stages(schedule, chunks, group.rank)
    if schedule.updates != "flush":
        modules = [chunk for chunk in chunks if isinstance(chunk, nn.Module)]
        faults += stash_faults(schedule, modules, learning_rate, reduces)
    elif learning_rate is not None:
        faults.append(
            "learning_rate is for schedules that update while they run; leave it out and step an optimizer after run"
        )
    if faults:
        raise ValueError(f"cannot run {schedule.name}:\n  " + "\n  ".join(faults))


def _no_stages(schedule: Schedule, chunks: Sequence[Any], rank: int) -> list[str]:
    """Chunks that lack what the executor will ask them for."""
    faults = []
    for number, chunk in enumerate(chunks):
        stage = schedule.virtual_stage(rank, number)
        asked = {"input_shape": stage > 0, "output_shape": stage < schedule.virtual_stages - 1}
        missing = [
            name for name, needed in asked.items() if needed and schedule.stages > 1 and not hasattr(chunk, name)
        ]
        if not isinstance(chunk, nn.Module) or missing:
            what = f"has no {' and no '.join(missing)}" if missing else "is no torch.nn.Module"
            faults.append(f"chunk {number}, a {type(chunk).__name__}, {what}; see minimeg.pipeline.Stage")
    return faults
