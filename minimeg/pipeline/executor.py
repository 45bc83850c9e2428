"""One executor for every schedule: it carries out the steps of ``plan(schedule)`` and knows no schedule by name.

    Recv(transfer)   post a receive, wait for nothing
    Run(action)      F, B or W of one micro-batch in one chunk; waits for the messages it needs
    Send(transfer)   begin to send, wait for nothing
    Free(transfer)   the receiver is known to have the message: let go of it

What is kept between F and B decides the memory of a pipeline, so this file keeps little:

* of what it sent, only the *gradient edge*: the place in the autograd graph where the gradient will enter. The output itself is
  dropped once its message has left (Megatron-LM's ``deallocate_output_tensor``, without its trick of shrinking the data);
* of the last stage, the graph of the loss, and no logits.

Source: Narayanan et al. 2021, section 2.2, for the schedules; Qi et al. 2023 for W. See it run: ``notebooks/06_pipelines.ipynb``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from minimeg.comm import Group, Pending, phase
from minimeg.faults import BOX
from minimeg.linear import WeightGradientStore
from minimeg.memory import label
from minimeg.pipeline.interface import Result, check
from minimeg.pipeline.recorder import Recorder
from minimeg.pipeline.shapes import Shapes
from minimeg.pipeline.stash import Stash
from minimeg.schedule import Action, Schedule, plan, prove
from minimeg.schedule.messages import Free, Recv, Run, Send, Step

Slot = tuple[int, int]  # (chunk, micro-batch)
_PHASES = {"F": "forward", "B": "backward", "W": "weight gradients"}


@lru_cache(maxsize=64)
def _proven_plan(schedule: Schedule, duplex: bool) -> tuple[tuple[Step, ...], ...]:
    """Nothing is executed unproven."""
    prove(schedule)
    return plan(schedule, duplex)


def run(
    schedule: Schedule,
    chunks: Sequence[Any],
    microbatches: Sequence[Any],
    *,
    group: Group,
    loss: Callable[[Tensor, Any], Tensor],
    normaliser: float | Tensor,
    on_gradients_ready: Callable[[int], None] | None = None,
    before_last_backward: Callable[[int], None] | None = None,
    learning_rate: float | None = None,
    recorder: Recorder | None = None,
) -> Result:
    """Execute this rank's part of a schedule. Every rank of ``group`` calls it; gradients add to ``param.grad``.

    Args:
        chunks: this rank's n modules (see ``Stage``); chunk c is virtual stage ``schedule.virtual_stage(rank, c)``.
        microbatches: all m of the step, the same list on every rank of the pipeline. Lengths may differ between them.
        loss: (output of the last virtual stage, micro-batch) -> scalar, the *sum* over the valid tokens.
        normaliser: the loss is divided by it; the number of valid tokens in the whole global batch.
        on_gradients_ready: called with a chunk's number once its last backward is done.
        before_last_backward: called with a chunk's number when that backward begins; not where weight gradients come after it.
        learning_rate: of plain SGD, for the schedules that update while they run (PipeDream, 2BW); None for all others.

    Raises:
        ScheduleError: the schedule is not proven; nothing has been sent.
        ValueError: sizes that do not fit, all faults in one message; nothing has been sent.
    """
    steps = _proven_plan(schedule, group.duplex)
    reduces = on_gradients_ready is not None or before_last_backward is not None
    check(schedule, chunks, microbatches, group, normaliser, learning_rate, reduces)
    stashes: list[Stash] = []
    if learning_rate is not None:
        stashes = [
            Stash(chunk, schedule.updates, schedule.stages, schedule.microbatches, learning_rate) for chunk in chunks
        ]
    executor = _Executor(
        schedule,
        chunks,
        microbatches,
        group,
        loss,
        normaliser,
        on_gradients_ready,
        before_last_backward,
        recorder,
        stashes,
    )
    return executor.run(steps[group.rank])


@dataclass
class _Executor:
    """The state of one run on one rank. All dictionaries are empty again at the end: every message meets its action."""

    schedule: Schedule
    chunks: Sequence[Any]
    microbatches: Sequence[Any]
    group: Group
    loss: Callable[[Tensor, Any], Tensor]
    normaliser: float | Tensor
    on_gradients_ready: Callable[[int], None] | None
    before_last_backward: Callable[[int], None] | None
    recorder: Recorder | None
    stashes: Sequence[Stash]
    actions: list[Action] = field(default_factory=list)
    receives: dict[Action, Pending] = field(default_factory=dict)  # by the action that will use the message
    handed_over: dict[Action, Tensor] = field(default_factory=dict)  # the same, between chunks of this rank
    outbox: dict[Action, Tensor] = field(default_factory=dict)  # by the action that produced the message
    sends: dict[int, Pending] = field(default_factory=dict)  # by the transfer's tag
    inputs: dict[Slot, Tensor] = field(default_factory=dict)
    roots: dict[Slot, GradientEdge | None] = field(default_factory=dict)
    in_flight: set[Slot] = field(default_factory=set)
    peak_in_flight: int = 0
    peak_sends: int = 0

    def __post_init__(self) -> None:
        mine = self.schedule.ranks[self.group.rank]
        # The virtual stages that the chunks are.
        self.numbers = [self.schedule.virtual_stage(self.group.rank, chunk) for chunk in range(len(self.chunks))]
        self.last_stage = self.schedule.virtual_stages - 1
        self.shapes = Shapes(self.chunks, self.microbatches)
        self.trains = any(action.kind == "B" for action in mine)
        self.device = next((p.device for chunk in self.chunks for p in chunk.parameters()), torch.device("cpu"))
        self.total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.stores = [WeightGradientStore() for _ in self.chunks] if self.schedule.split else []
        self.last_backward = {action.chunk: action for action in mine if action.kind in "BW"}
        self.last_kind = "W" if self.schedule.split else "B"

    def run(self, steps: Sequence[Step]) -> Result:
        self._attach(self.stores or [None] * len(self.chunks))
        try:
            with self.group.agreed(*self.shapes.signatures(steps)), torch.set_grad_enabled(self.trains):
                for step in steps:
                    self._carry_out(step)
        finally:
            self._attach([None] * len(self.chunks))
        self._require_nothing_left()
        for store in self.stores:
            store.require_empty()
        for stash in self.stashes:
            stash.finish()
        versions = max((stash.peak_versions for stash in self.stashes), default=1)
        return Result(self._loss_everywhere(), tuple(self.actions), self.peak_in_flight, self.peak_sends, versions)

    def _require_nothing_left(self) -> None:
        left = [
            name for name in ("receives", "handed_over", "outbox", "sends", "inputs", "roots") if getattr(self, name)
        ]
        if left:
            raise RuntimeError(
                f"{self.schedule.name}: {', '.join(left)} not empty at the end of the step: something was lost"
            )

    def _carry_out(self, step: Step) -> None:
        match step:
            case Recv(transfer):
                shape, dtype = self.shapes.taken(transfer.consumer)
                self.receives[transfer.consumer] = self.group.irecv(
                    shape, dtype, transfer.source, transfer.tag, self.device
                )
            case Run(action):
                try:
                    self._run(action)
                except Exception as error:
                    error.add_note(f"{self.schedule.name}, rank {self.group.rank} of the pipeline, in {action}")
                    raise
            case Send(transfer):
                message = self.outbox.pop(transfer.producer)
                self.shapes.require_promised(transfer.producer, message)
                self.sends[transfer.tag] = self.group.isend(message, transfer.destination, transfer.tag)
                self.peak_sends = max(self.peak_sends, len(self.sends))
            case Free(transfer):
                self.sends.pop(transfer.tag).wait()

    def _run(self, action: Action) -> None:
        message = self._take(action)  # waiting is no part of the action: a recorded timeline shows it as idle
        BOX.enter(_PHASES[action.kind] if self.trains else "evaluation")
        recording = self.recorder.action(action) if self.recorder else nullcontext()
        with label(f"micro-batch {action.microbatch}"), recording:
            {"F": self._forward, "B": self._backward, "W": self._weights}[action.kind](action, message)
        self.actions.append(action)
        self._after(action)

    # ---- the three actions -------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, x: Tensor | None) -> None:
        slot, microbatch = (action.chunk, action.microbatch), self.microbatches[action.microbatch]
        if x is not None and self.trains:
            self.inputs[slot] = x.requires_grad_()
        if self.stashes:
            output = self.stashes[action.chunk].forward(action.microbatch, x, microbatch)
        else:
            output = self.chunks[action.chunk](x, microbatch)
        if self._is_last(action.chunk):
            output = self.loss(output, microbatch) / self.normaliser  # the logits are dropped here
            self.total += output.detach()
        if self.trains:
            # Only the edge is kept. A frozen stage has none: nothing behind it wants a gradient.
            self.roots[slot] = get_gradient_edge(output) if output.requires_grad else None
        if not self._is_last(action.chunk):
            self._hand_on(action, output.detach(), +1)

    def _backward(self, action: Action, grad: Tensor | None) -> None:
        slot = (action.chunk, action.microbatch)
        root = self.roots.pop(slot)
        store = self.stores[action.chunk] if self.stores else None
        if store:
            store.record(action.microbatch)
        if self.before_last_backward is not None and action == self.last_backward[action.chunk]:
            self.before_last_backward(action.chunk)

        def backward() -> None:
            if root is not None:
                torch.autograd.backward((root,), None if grad is None else (grad,))

        if self.stashes:
            self.stashes[action.chunk].backward(action.microbatch, backward)
        else:
            backward()
        if store:
            store.stop()
        if not self._is_first(action.chunk):
            x = self.inputs.pop(slot)
            self._hand_on(action, torch.zeros_like(x) if x.grad is None else x.grad, -1)

    def _weights(self, action: Action, _: Tensor | None) -> None:
        self.stores[action.chunk].run(action.microbatch)

    def _after(self, action: Action) -> None:
        slot = (action.chunk, action.microbatch)
        if action.kind == "F" and self.trains:
            self.in_flight.add(slot)
            self.peak_in_flight = max(self.peak_in_flight, len(self.in_flight))
        elif action.kind == self.last_kind:
            self.in_flight.discard(slot)
        if self.on_gradients_ready is not None and action == self.last_backward.get(action.chunk):
            BOX.enter("reductions")
            self.on_gradients_ready(action.chunk)

    # ---- where tensors come from and go to ---------------------------------------------------------------------------------

    def _take(self, action: Action) -> Tensor | None:
        """The message this action needs: from another rank, or from another chunk of this one. None: it needs none."""
        begins = {"F": self._is_first(action.chunk), "B": self._is_last(action.chunk), "W": True}
        if begins[action.kind]:
            return None
        if action not in self.receives:
            return self.handed_over.pop(action)
        BOX.enter("message wait")
        return self.receives.pop(action).wait()

    def _hand_on(self, action: Action, message: Tensor, direction: int) -> None:
        """Towards the next virtual stage (+1, an activation) or the one before (-1, a gradient)."""
        neighbour = self.numbers[action.chunk] + direction
        if self.schedule.rank_of(neighbour) == self.group.rank:
            receiver = Action(action.kind, action.microbatch, self.schedule.chunk_of(neighbour))
            self.handed_over[receiver] = message
        else:
            self.outbox[action] = message

    def _is_first(self, chunk: int) -> bool:
        return self.numbers[chunk] == 0

    def _is_last(self, chunk: int) -> bool:
        return self.numbers[chunk] == self.last_stage

    def _loss_everywhere(self) -> Tensor:
        """The last stage knows the loss; logging and stopping must be decided alike on all."""
        owner = self.schedule.rank_of(self.last_stage)
        BOX.enter("loss")
        with phase("loss"):
            return self.group.broadcast(self.total, owner)

    def _attach(self, stores: Sequence[WeightGradientStore | None]) -> None:
        """Tell every linear layer of each chunk where its deferred weight gradients go (None: nowhere, compute at once)."""
        for chunk, store in zip(self.chunks, stores, strict=True):
            for module in chunk.modules():
                if hasattr(module, "weight_gradients"):
                    module.weight_gradients = store
