"""What the executor is given and what it returns: a stage, a result, and all that is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minimeg.comm import Group
from minimeg.pipeline.stash import stash_faults
from minimeg.schedule import Action, Schedule

Shape = tuple[tuple[int, ...], torch.dtype]


class Stage(Protocol):
    """What a chunk must offer: a module of one virtual stage."""

    def __call__(self, x: Tensor | None, microbatch: Any) -> Tensor:
        """x is None on the first virtual stage, which reads the micro-batch itself."""

    def input_shape(self, microbatch: Any) -> Shape:
        """Shape and dtype of x."""

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
    faults = []
    if group.size != schedule.stages:
        faults.append(f"the schedule has {schedule.stages} stages, but the group {group.name} has {group.size} ranks")
    if len(chunks) != schedule.chunks:
        faults.append(f"the schedule wants {schedule.chunks} chunks a rank, got {len(chunks)}")
    if len(microbatches) != schedule.microbatches:
        faults.append(f"the schedule wants {schedule.microbatches} micro-batches, got {len(microbatches)}")
    if not float(normaliser) > 0:
        faults.append(f"normaliser must be positive, got {float(normaliser)}; it counts the valid tokens of the batch")
    if schedule.updates != "flush":
        faults += stash_faults(list(chunks), schedule.stages, learning_rate, reduces)
    elif learning_rate is not None:
        faults.append(
            "learning_rate is for schedules that update while they run; leave it out and step an optimizer after run"
        )
    if faults:
        raise ValueError(f"cannot run {schedule.name}:\n  " + "\n  ".join(faults))
