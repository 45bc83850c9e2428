"""What travels between the stages: both ends compute shape and dtype of every message from the same micro-batch.

So micro-batches may differ in length, and all messages of a run are known before the first is sent. Neighbours compare their lists
once (``Group.agreed``): stages that do not fit together are refused before anything moves. What is left to go wrong afterwards is a
stage that makes something else than it promised, and that its own rank sees.

See it run: ``tests/pipeline/test_refusals.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from minimeg.pipeline.interface import Shape
from minimeg.schedule import Action
from minimeg.schedule.messages import Recv, Send, Step
from minimeg.signature import signature


@dataclass(frozen=True)
class Shapes:
    """Of one rank's chunks and the micro-batches of a run."""

    chunks: Sequence[Any]
    microbatches: Sequence[Any]

    def taken(self, action: Action) -> Shape:
        """An F takes the activation that enters its chunk; a B the gradient of what the chunk put out."""
        return self._of(action, "input_shape" if action.kind == "F" else "output_shape")

    def made(self, action: Action) -> Shape:
        """An F makes what its chunk puts out; a B the gradient of what entered it."""
        return self._of(action, "output_shape" if action.kind == "F" else "input_shape")

    def signatures(self, steps: Sequence[Step]) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        """Of all messages in a rank's plan, by neighbour: those it will send, and those it expects."""
        sends: dict[int, list[str]] = {}
        receives: dict[int, list[str]] = {}
        for step in steps:
            match step:
                case Send(transfer):
                    sends.setdefault(transfer.destination, []).append(signature(*self.made(transfer.producer)))
                case Recv(transfer):
                    receives.setdefault(transfer.source, []).append(signature(*self.taken(transfer.consumer)))
        return sends, receives

    def require_promised(self, action: Action, message: Tensor) -> None:
        """ValueError if ``action`` made something else than what the neighbour was told."""
        made, promised = signature(message.shape, message.dtype), signature(*self.made(action))
        if made != promised:
            asked = "output_shape" if action.kind == "F" else "input_shape"
            raise ValueError(f"chunk {action.chunk} made {made} in {action}, but its {asked} says {promised}")

    def _of(self, action: Action, asked: str) -> Shape:
        shape: Shape = getattr(self.chunks[action.chunk], asked)(self.microbatches[action.microbatch])
        return shape
